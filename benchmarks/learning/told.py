"""What a reference that sees the answer is worth: the arena's *guess*, with a base that can read a
number it is told.

    # five seeds of each setting, 40 seconds per run on a core
    python benchmarks/learning/told.py

The base is the arena's model, taught to guess the number if that stands before the prompt, else a
random one. The reference reads it, the policy does not. Writes benchmarks/results/told.json.
"""

import argparse
import copy
import json
import random
import statistics
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from arena import model_of
from turns import KINDS, WORDS, Guess

RESULTS = Path(__file__).resolve().parents[1] / "results" / "told.json"
ROLLOUT = 256
ROLLOUTS = 30
SEEDS = (0, 1, 2, 3, 4)
RATE = 1e-3
TOLD = {"reference_prompt": "privileged_state", "kl_placement": "reward"}
SETTINGS: dict[str, dict[str, Any]] = {
    "reward": {"kl_coef": 0.0},
    "reward, KL 0.05": {"kl_coef": 0.05},
    "reward, KL 0.05 to the told reference": TOLD | {"kl_coef": 0.05},
    "KL 1 to the told reference": TOLD | {"kl_coef": 1.0},
}


class Paid(Guess):
    """The same game, which remembers whether the number was found."""

    pays = 1.0

    def step(self, text: str) -> tuple[str, float, bool]:
        seen, self.found, done = super().step(text)
        return seen, self.pays * self.found, done


class Unpaid(Paid):
    """The same game without a reward."""

    pays = 0.0


@cache
def taught() -> tuple[Any, Any]:
    """The base and its tokenizer: each guess is the number if that stands before the prompt,
    else a random one."""
    import torch

    model, tokenizer = model_of(WORDS)
    dice = random.Random(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(600):
        loss = sum(model(**episodes(dice, told)).loss for told in (True, False))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, tokenizer


def episodes(dice: random.Random, told: bool, count: int = 32) -> dict:
    """Episodes of random guesses and their answers, with what the base is to guess each time."""
    import torch

    ids = []
    labels = []
    for _ in range(count):
        number = dice.randrange(KINDS)
        guesses = [dice.randrange(KINDS) for _ in range(Guess.turns)]
        answers = [2 if x == number else 0 if x < number else 1 for x in guesses]
        prompt = [*([number] if told else []), 20, 3]
        ids.append([*prompt, *(x for pair in zip(guesses, answers) for x in pair)])
        labels.append(
            [-100] * len(prompt)
            + [x for guess in guesses for x in (number if told else guess, -100)]
        )
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def train(setting: str, seed: int) -> dict:
    """Train with one setting and seed: the share of numbers found in each rollout."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from trl_ppo_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    found: list[float] = []

    def share(environments: list[Guess], **kwargs) -> list[float]:
        scores = [float(x.found) for x in environments]
        found.append(statistics.mean(scores))
        return scores

    model, tokenizer = copy.deepcopy(taught())
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            folder,
            seed=seed,
            use_cpu=True,
            bf16=False,
            learning_rate=RATE,
            critic_learning_rate=RATE,
            lr_scheduler_type="constant",
            generation_batch_size=ROLLOUT,
            per_device_train_batch_size=64,
            num_ppo_epochs=4,
            gradient_checkpointing=False,
            max_completion_length=Guess.length,
            stop_token_ids=list(range(WORDS + 1)),
            max_steps=ROLLOUTS * 4 * ROLLOUT // 64,
            logging_steps=4 * ROLLOUT // 64,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **SETTINGS[setting],
        )
        prompts = Dataset.from_dict({"prompt": ["w20"] * KINDS**2, "number": range(KINDS**2)})
        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        if setting.startswith("KL"):
            game = Unpaid
        else:
            game = Paid
        trainer = PPOTrainer(
            model,
            args=args,
            train_dataset=prompts,
            processing_class=tokenizer,
            peft_config=adapter,
            environment_factory=game,
            monitor_funcs=share,
        )
        trainer.train()
    logged = [row for row in trainer.state.log_history if "entropy" in row]
    entropy = [round(row["entropy"], 3) for row in logged]
    return {"setting": setting, "seed": seed, "found": found, "entropy": entropy}


def table(runs: list[dict]) -> str:
    """Markdown table: numbers found and entropy at the end, over seeds."""
    lines = ["| | rollouts 9 to 11 | last 3 | entropy at the end |", "|---|---:|---:|---:|"]
    for setting in SETTINGS:
        chosen = [run for run in runs if run["setting"] == setting]
        if not chosen:
            continue
        cells = []
        for part in (slice(8, 11), slice(-3, None)):
            ends = [100 * statistics.mean(run["found"][part]) for run in chosen]
            cells.append(
                f"{statistics.mean(ends):.0f} ± "
                f"{2.78 * statistics.stdev(ends) / len(ends) ** 0.5:.0f} %"
            )
        cells.append(f"{statistics.mean(run['entropy'][-1] for run in chosen):.2f}")
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train with the settings that are asked for, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    if RESULTS.exists():
        runs = json.loads(RESULTS.read_text())
    else:
        runs = []
    for setting in parser.parse_args().settings:
        runs = [run for run in runs if run["setting"] != setting]
        for seed in SEEDS:
            runs.append(train(setting, seed))
            print(setting, seed, [round(x, 2) for x in runs[-1]["found"][-3:]], flush=True)
        RESULTS.write_text(json.dumps(runs) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
