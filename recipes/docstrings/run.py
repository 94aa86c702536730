"""
All stages of RLHF on the docstrings of this machine: supervised training, reward model, PPO, evaluation with ruff.

    python recipes/docstrings/run.py
    accelerate launch --config_file recipes/accelerate/cpu_2_processes.yaml recipes/docstrings/run.py
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the recipe needs nothing from the Hub

import datasets
from accelerate import PartialState
from align import align
from harvest import first_words, harvest, split
from measure import measure, sample
from report import plot_curves, print_samples, print_table
from reward_model import train_reward_model
from sft import train_sft
from transformers.utils import logging

NUM_EVALUATED = 512


def main() -> None:
    """Run incomplete stages, then PPO and the evaluation."""
    parser = argparse.ArgumentParser(description="RLHF on docstrings, from scratch.")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/docstrings"))
    output_dir = parser.parse_args().output_dir
    if find_spec("ruff") is None:  # fail now, not at the end
        parser.error("ruff is needed for the evaluation: `pip install ruff`")
    sft_dir, reward_dir, ppo_dir = (output_dir / name for name in ("sft", "reward_model", "ppo"))
    datasets.disable_progress_bars()
    logging.disable_progress_bar()

    with (
        timed("Harvest: the docstrings of the standard library and the installed packages"),
        PartialState(cpu=True).main_process_first(),
    ):
        corpus = harvest(output_dir / "corpus.jsonl")
    train, held_out = split(corpus)
    print_main(f"{len(corpus):,} docstrings, {len(held_out):,} of them held out")

    with timed("Stage 1: supervised training from scratch"):
        once(sft_dir, lambda: train_sft(train, sft_dir))
    with timed("Stage 2: reward model"):
        once(reward_dir, lambda: train_reward_model(train, sft_dir, reward_dir))
    # rows are sorted by module, so every n-th row covers all packages
    evaluated = held_out[:: max(len(held_out) // NUM_EVALUATED, 1)][:NUM_EVALUATED]
    with timed("Stage 3: PPO"):
        log_history = align(train, evaluated, sft_dir, reward_dir, ppo_dir)
    if PartialState(cpu=True).is_main_process:
        with timed("Verdict: ruff on held-out signatures"):
            give_verdict(corpus, evaluated, output_dir, log_history)
    PartialState(cpu=True).wait_for_everyone()
    PartialState(cpu=True).destroy_process_group()


def give_verdict(corpus: list[dict], rows: list[dict], output_dir: Path, log_history: list[dict]) -> None:
    """Sample from the models before and after PPO, print the comparison, and save it in `output_dir`."""
    reward_dir = output_dir / "reward_model"
    # words that open only one docstring are often typing errors
    known = {word for word, count in first_words(corpus).items() if count >= 2}
    signatures = [row["signature"] for row in rows]
    texts = {
        "people": [row["docstring"] for row in rows],
        "SFT": sample(output_dir / "sft", signatures),
        "PPO": sample(output_dir / "ppo", signatures),
    }
    measures = {name: measure(completions, signatures, reward_dir, known) for name, completions in texts.items()}
    kl = "KL to the reference (nats per completion)"
    measures["SFT"][kl] = 0.0  # it is the reference
    measures["PPO"][kl] = next(row["eval_kl_per_completion"] for row in reversed(log_history) if "eval_kl" in row)
    print_table(measures)
    print("\nBefore and after PPO:")
    step = max(len(rows) // 10, 1)
    print_samples(signatures[::step][:10], texts["SFT"][::step][:10], texts["PPO"][::step][:10])
    (output_dir / "measures.json").write_text(json.dumps(measures, indent=2))
    plot_curves(log_history, output_dir / "curves.png")
    print(f"\nCurves:  {output_dir / 'curves.png'}")
    print(f"Adapter: {output_dir / 'ppo'}")


def once(directory: Path, train: Callable[[], None]) -> None:
    """Run a training stage unless it is complete. An interrupted one resumes from its last checkpoint."""
    marker = directory / "complete"
    if marker.exists():
        print_main(f"already complete: {directory}")
        return
    train()
    # every process must have checked the marker before the main process sets it
    PartialState(cpu=True).wait_for_everyone()
    if PartialState(cpu=True).is_main_process:
        marker.touch()
    PartialState(cpu=True).wait_for_everyone()


@contextmanager
def timed(title: str):
    """Print a title and the elapsed time."""
    print_main(f"\n== {title}")
    start = time.monotonic()
    yield
    print_main(f"== done in {time.monotonic() - start:.0f} s")


def print_main(text: str) -> None:
    """Print on the main process."""
    if PartialState(cpu=True).is_main_process:
        print(text, flush=True)


if __name__ == "__main__":
    main()
