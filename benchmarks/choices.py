"""Critics and baselines on the docstring recipe, on equal numbers of completions: `python benchmarks/choices.py`.

Needs what `make demo` leaves in runs/docstrings: corpus, supervised model, reward model. Every arrangement trains on
the same number of completions with the recipe's settings (`kl_coef` 0.03), on one thread; those that
pretrain a critic are part of them. The pass rate is ruff's verdict on held-out completions, which none optimizes.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes" / "docstrings"
HEAD = {"critic": "head", "normalize_values": False, "vf_coef": 0.1, "cliprange": 0.2}
UNCLIPPED, CLIPPED = HEAD | {"cliprange_value": None}, HEAD | {"cliprange_value": 0.2}
GROUPS = UNCLIPPED | {"critic": "none", "num_generations": 8, "lam": None, "critic_kwargs": None}
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "defaults": {"cliprange_value": None},
    "head": UNCLIPPED,
    "head, values clipped": CLIPPED,
    "head, values clipped, no backprop": CLIPPED | {"critic_kwargs": {"backprop": False, "lam": 0.95}},
    "adapter, values clipped": CLIPPED | {"critic": "adapter"},
    "adapter, values clipped, pretrained": CLIPPED | {"critic": "adapter"},
    "GRPO": GROUPS,
    "RLOO": GROUPS | {"advantage_estimator": "rloo"},
}
PRETRAINED = "adapter, values clipped, pretrained"


def pretrain(train: list[dict], runs: Path, output_dir: str, steps: int, seed: int) -> None:
    """Pretrain a critic on rollouts of the supervised model."""
    from align import prompts
    from peft import LoraConfig

    from trl_ppo_ext import PPOConfig, PPOTrainer
    from trl_ppo_ext.commands.pretrain_critic import pretrain_critic

    args = PPOConfig(
        output_dir,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        seed=seed,
        learning_rate=1.5e-3,
        max_steps=steps,
        generation_batch_size=128,
        per_device_train_batch_size=32,
        num_mini_batches=2,
        num_ppo_epochs=2,
        max_completion_length=48,
        missing_eos_penalty=2.0,
        gradient_checkpointing=False,
        **CLIPPED | {"critic": "adapter"},
    )
    trainer = PPOTrainer(
        str(runs / "sft"),
        str(runs / "reward_model"),
        args,
        prompts(train),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    pretrain_critic(trainer, output_dir)


def measure(job: tuple[str, int, int, int, Path]) -> tuple[str, int, dict[str, float]]:
    """Train one arrangement with one seed, and evaluate it on held-out signatures."""
    import torch

    name, seed, steps, pretraining, runs = job
    torch.set_num_threads(1)
    sys.path.insert(0, str(RECIPE))
    from align import align
    from harvest import harvest, split
    from transformers.utils import logging

    logging.set_verbosity_error()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        train, held_out = split(harvest(runs / "corpus.jsonl"))
        evaluated = held_out[:: max(len(held_out) // 512, 1)][:512]
        settings = ARRANGEMENTS[name] | {"seed": seed, "max_steps": steps, "save_strategy": "no", "kl_coef": 0.03}
        if name == PRETRAINED:
            pretrain(train, runs, f"{directory}/critic", pretraining, seed)
            settings |= {"critic_init": f"{directory}/critic", "max_steps": steps - pretraining}
        history = align(train, evaluated, runs / "sft", runs / "reward_model", f"{directory}/ppo", **settings)
    last = next(row for row in reversed(history) if "eval_reward" in row)
    explained = [row["value/explained_variance"] for row in history if "value/explained_variance" in row]
    result = {
        "pass_rate": last["eval_monitor/ruff/mean"],
        "kl": last["eval_kl_per_completion"],
        "reward": last["eval_reward"],
        "seconds": time.perf_counter() - start,
    }
    if explained:
        result |= {"explained_variance_first": explained[0], "explained_variance_last": explained[-1]}
    return name, seed, result


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Results as Markdown: means over seeds, with minimum and maximum."""

    def over_seeds(runs: list[dict[str, float]], key: str, form: str) -> str:
        values = [run[key] for run in runs if key in run]
        if not values:
            return "–"
        spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
        return f"{statistics.mean(values):{form}}{spread}"

    columns = {
        "pass rate": ("pass_rate", ".1%"),
        "KL, nats per completion": ("kl", ".1f"),
        "reward": ("reward", ".2f"),
        "explained variance, first log": ("explained_variance_first", ".2f"),
        "last": ("explained_variance_last", ".2f"),
    }
    lines = [f"| arrangement | {' | '.join(columns)} | seconds, least |", "|---|" + "---|" * (len(columns) + 1)]
    for name in (name for name in ARRANGEMENTS if name in results):
        runs = list(results[name].values())
        cells = [over_seeds(runs, key, form) for key, form in columns.values()]
        cells.append(f"{min(run['seconds'] for run in runs):.0f}")  # the least disturbed run
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train every arrangement and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/docstrings"), help="what `make demo` wrote")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ARRANGEMENTS, metavar="ARRANGEMENT")
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps, 4 a rollout of 128 completions")
    parser.add_argument("--pretraining", type=int, default=40, help="of these, steps that pretrain a critic")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at a time, each on one thread")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "choices.json")
    args = parser.parse_args()
    missing = [name for name in ("corpus.jsonl", "sft", "reward_model") if not (args.runs / name).exists()]
    if missing:
        parser.error(f"{args.runs} has no {', '.join(missing)}; run `make demo` first, or set --runs")
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    names = args.only or list(ARRANGEMENTS)
    jobs = [(name, seed, args.steps, args.pretraining, args.runs.resolve()) for seed in args.seeds for name in names]
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "trl")}
    results: dict[str, dict[str, dict[str, float]]] = {}
    measured = {"versions": versions, "machine": platform.machine(), "steps": args.steps, "results": results}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs, max_tasks_per_child=1) as pool:
        for name, seed, result in pool.map(measure, jobs):
            results.setdefault(name, {})[str(seed)] = result
            print(f"{name}, seed {seed}: {result}", file=sys.stderr, flush=True)
            args.output.write_text(json.dumps(measured, indent=2) + "\n")  # keep finished measurements
    print(table(results))


if __name__ == "__main__":
    main()
