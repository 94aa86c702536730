"""PPO, its rivals here, and TRL's own GRPOTrainer on SmolLM2-135M-Instruct, at equal completions.

    python benchmarks/learning/real.py reviews "TRL GRPO"             # tune, then five seeds
    python benchmarks/learning/real.py reviews PPO --rate 1e-3 --seed 0
    python benchmarks/learning/real.py --table

All have the same base, in float32 if nothing else is said, LoRA of rank 16, prompts, reward,
completions and optimizer steps; each takes the learning rate of `RATES` with the best mean reward
on a seed of its own. One thread each. Writes benchmarks/results/real.json.

Tasks:

- reviews: VADER's sentiment of 24 tokens that continue an opening such as "The hotel was".
- moods: the same after a sentence that praises, complains, or neither, scored with it (moods.py).
- reverse: three words written backwards, by the letters in their place, after a warm start
  (reverse.py).
- unequal: the same with one to four words, so that prompts differ in what they can earn.
- length: the reward of the exercise in Hugging Face's course (chapter 12), answers of 50
  characters, with questions of our own, since its dataset is on the Hub; in bfloat16.
- keywords: stories of 200 words or more that contain eight given words, in up to 448 tokens
  (keywords.py); in bfloat16, with 32 completions in a rollout.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
sys.path[:0] = [str(ROOT), str(RECIPES), str(RECIPES / "smollm2")]
import keywords
import moods
import reverse
from by_token import by_token
from picture import Curve, picture
from reviews import THINGS, openings, vader
from smollm2 import base_model
from student import margin

RESULTS = ROOT / "benchmarks" / "results" / "real.json"
FIGURE = ROOT / "docs" / "real.svg"
RUNS = Path("runs/real")
RATES = (5e-4, 1e-3)
RANK = 16  # of the adapter, if "rank" is not among the settings; its alpha is 32
TUNED_ON = 100
SEEDS = (0, 1, 2, 3, 4)
# and all of the critic
LOGGED = {
    "approx_kl",
    "stopped_early",
    "clip_ratio/region_mean",
    "entropy",
    "lam",
    "kl",
    "reward",
    "completions/mean_length",
}
CRITIC = "value/"  # prefix of its metrics
EXPLAINED = "value/explained_variance"  # and prefix of such metrics
PRAISE = "Five stars! Wonderful, excellent, perfect!"
# completions, and optimizer steps from them
ROLLOUT = 64
STEPS = 4
PARTS = slice(3, 6), slice(8, 11), slice(-3, None), slice(None)  # of the table
GROUPS = {"num_generations": 8}
REBN = {"critic": "none", "advantage_estimator": "rebn"}
RUNNING_MEAN = {
    "critic": "head",
    "critic_learning_rate": 1e-12,
    "critic_kwargs": {"backprop": False},
}
RIVALS: dict[str, dict[str, Any]] = {
    "TRL GRPO": GROUPS,
    "PPO": {},
    "PPO, by token": {},  # "by token": the score is paid as it comes, each token what it changes
    "ReBN": REBN,
    "ReBN, by token": REBN,
    "GRPO": GROUPS | {"critic": "none"},
    "RLOO": GROUPS | {"critic": "none", "advantage_estimator": "rloo"},
    "PPO, in groups": GROUPS,  # PPO on the prompts of GRPO
    "PPO, running mean": RUNNING_MEAN,  # all values are the mean return
    "PPO, running mean, by token": RUNNING_MEAN,  # λ is PPO's
    # the score is measured, and no reward is given
    "distill": {"reference_prompt": "praised", "kl_coef": 1.0},
}
PARTED = "PPO", "PPO, running mean", "ReBN", "PPO, in groups", "GRPO", "TRL GRPO"
IN_FLOAT32 = {"bf16": False, "model_init_kwargs": {"dtype": "float32"}}
DRAWN = "reviews", "reverse"
COLORS = {
    "PPO, by token": "#1f6f50",
    "ReBN, by token": "#c9a227",
    "PPO": "#4f81bd",
    "TRL GRPO": "#b4552d",
    "ReBN": "#7a6fb0",
    "GRPO": "#888888",
}


class Task(NamedTuple):
    """Model, prompts of a seed, reward, length of completions in tokens, rollouts of a run, and
    reward to reach."""

    base: Callable[[], str]
    rows: Callable[[int], list[dict]]
    reward: Callable[..., list]
    length: int
    rollouts: int
    goal: float
    dtype: str = "float32"
    rollout: int = ROLLOUT


def reviews(seed: int) -> list[dict]:
    """Openings in the order of a seed, and after praise, for a reference that sees it."""
    prompts = openings(THINGS)
    random.Random(seed).shuffle(prompts)
    return [{"prompt": prompt, "praised": f"{PRAISE} {prompt}"} for prompt in prompts]


def questions(seed: int) -> list[dict]:
    """Questions in the order of a seed."""
    ways = (
        "What is a {}?|Tell me about the {}.|Why do people like a {}?|Describe a good "
        "{}.|Sum up what a {} is."
    ).split("|")
    prompts = [way.format(thing) for thing, way in product(THINGS.split(), ways)]
    random.Random(seed).shuffle(prompts)
    return [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]


def of_50_characters(completions: list[list[dict]], **kwargs) -> list[float]:
    """Distance from 50 characters, as in the course."""
    return [-float(abs(50 - len(turns[0]["content"]))) for turns in completions]


TASKS = {
    "reviews": Task(base_model, reviews, vader, 24, 20, 0.8),
    "moods": Task(base_model, moods.rows, moods.of_whole_review, 24, 20, 0.6),
    "reverse": Task(reverse.warm_base, reverse.rows, reverse.in_place, 24, 20, 0.38),
    "unequal": Task(reverse.warm_base, reverse.unequal_rows, reverse.in_place, 32, 20, 0.5),
    "length": Task(base_model, questions, of_50_characters, 96, 20, -15.0, "bfloat16"),
    "keywords": Task(
        base_model, keywords.rows, keywords.followed, 448, 6, 0.6, "bfloat16", rollout=32
    ),
}


def train(name: str, rival: str, rate: float, seed: int, **settings) -> dict:
    """Train a rival; return its mean reward and the seconds after each rollout."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from trl_ppo_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    task = TASKS[name]
    rewards = []
    seconds = []
    texts = []
    base = task.base()
    places = None  # the score is paid at the end
    if rival.endswith("by token"):
        places = by_token(task.reward, AutoTokenizer.from_pretrained(base))

    def reward(completions, **kwargs):
        scores = task.reward(completions=completions, **kwargs)
        rewards.append(statistics.mean(scores))
        seconds.append(round(time.monotonic() - start, 1))
        texts[:] = completions
        print(
            f"{name} {rival} {rate:g} seed {seed}: rollout {len(rewards)}, reward "
            f"{rewards[-1]:.3f}",
            flush=True,
        )
        return scores if places is None else places(completions=completions, **kwargs)

    is_trl = rival.startswith("TRL")
    own = {name: value for name, value in settings.items() if name != "rank"}
    rank = settings.get("rank", RANK)
    rows = task.rows(seed)
    common = (
        {
            "learning_rate": rate,
            "max_steps": task.rollouts * STEPS,
            "seed": seed,
            "per_device_train_batch_size": task.rollout // STEPS,
            "generation_batch_size": task.rollout,
            "max_completion_length": task.length,
            "model_init_kwargs": {"dtype": task.dtype},
            "bf16": task.dtype == "bfloat16",
            "gradient_checkpointing": False,
            "use_cpu": not torch.cuda.is_available(),
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": STEPS,
        }
        | RIVALS[rival]
        | own
    )
    config, trainer = (GRPOConfig, GRPOTrainer) if is_trl else (PPOConfig, PPOTrainer)
    with tempfile.TemporaryDirectory() as directory:
        args = config(directory, **common)
        data = Dataset.from_list(rows * -(-task.rollout * task.rollouts // len(rows)))
        lora = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        if rival == "distill":
            measure = {"monitor_funcs": reward}
        else:
            measure = {"reward_funcs": reward}
        run = trainer(model=base, **measure, args=args, train_dataset=data, peft_config=lora)
        start = time.monotonic()
        run.train()
    history = [row for row in run.state.log_history if "reward" in row]
    names = {name for row in history for name in row if name in LOGGED or name.startswith(CRITIC)}
    logged = {
        name: [round(row[name], 4) for row in history if name in row] for name in sorted(names)
    }
    result = {
        "task": name,
        "rival": rival,
        "rate": rate,
        "seed": seed,
        "settings": settings,
        "logged": logged,
    }
    return result | {
        "rewards": [round(x, 4) for x in rewards],
        "seconds": seconds,
        "last": texts[:8],
    }


def file_of(name: str, rival: str, rate: float, seed: int, settings: dict) -> Path:
    """File of a run."""
    parts = [
        name,
        rival.replace(" ", "_"),
        f"{rate:g}",
        str(seed),
        *(f"{k}={v}" for k, v in sorted(settings.items())),
    ]
    return RUNS / ("-".join(parts).replace("/", "_") + ".json")


def key(run: dict) -> str:
    """Identity of a run."""
    return json.dumps([run[name] for name in ("task", "rival", "rate", "seed", "settings")])


def once(name: str, rival: str, rate: float, seed: int, settings: dict) -> dict:
    """Train, unless the run is saved."""
    file = file_of(name, rival, rate, seed, settings)
    if not file.exists():
        result = train(name, rival, rate, seed, **settings)
        RUNS.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result))
    return json.loads(file.read_text())


def interval(values: list[float]) -> str:
    """Mean with its 95 % interval, from three seeds on."""
    mean = f"{statistics.mean(values):.2f}"
    if len(values) < 3:
        return mean
    return f"{mean} ± {margin(values):.2f}"


def chosen(runs: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Runs of the seeds that nothing was tuned on, by task and rival, which has one rate."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for run in runs:
        if run["seed"] in SEEDS and not run["settings"]:
            group = groups.setdefault((run["task"], run["rival"]), [])
            if group and group[0]["rate"] != run["rate"]:
                raise ValueError(
                    f"{run['task']}, {run['rival']} has runs of two rates; remove those of one."
                )
            group.append(run)
    return groups


def to_goal(rewards: list[float], goal: float) -> int | None:
    """Rollouts until the mean of the last three reaches a goal."""
    return next(
        (n for n in range(3, len(rewards) + 1) if statistics.mean(rewards[n - 3 : n]) >= goal), None
    )


def worse_than_constant(group: list[dict]) -> str:
    """Share of rollouts after the first whose explained variance is negative, of each metric of
    that name."""
    logs = [run.get("logged", {}) for run in group]
    names = sorted({name for log in logs for name in log if name.startswith(EXPLAINED)})
    cells = []
    for name in names:
        later = [value for log in logs for value in log.get(name, [])[1:]]
        if later:
            percent = 100 * statistics.mean(value < 0 for value in later)
            part = name.removeprefix(EXPLAINED).strip("_")
            cells.append(f"{part} {percent:.0f} %".strip())
    return ", ".join(cells)


def table(runs: list[dict]) -> str:
    """Markdown table: mean reward in the middle, at the end and over the run, and what it took
    to get there."""
    lines = [
        "| task | rival | rate | rollouts 4 to 6 | 9 to 11 | last 3 | all | completions to goal | "
        "explained below 0 | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (task, rival), group in chosen(runs).items():
        parts = [[run["rewards"][part] for run in group] for part in PARTS]
        means = [[statistics.mean(rewards) for rewards in part if rewards] for part in parts]
        reached = [to_goal(run["rewards"], TASKS[task].goal) for run in group]
        until = ", ".join("never" if n is None else f"{n * TASKS[task].rollout:,}" for n in reached)
        seconds = statistics.mean(run["seconds"][-1] for run in group)
        cells = [
            task,
            rival,
            f"{group[0]['rate']:g}",
            *(interval(values) if values else "" for values in means),  # short runs lack a part
            until,
            worse_than_constant(group),
            f"{seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def separated(runs: list[dict]) -> str:
    """Markdown table: mean reward of the run, of PPO and of rivals that each lack a part of it."""
    rewards: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        if run["seed"] in SEEDS and run["settings"] in ({}, IN_FLOAT32):
            task = run["task"] + (", float32" if run["settings"] else "")
            of_seed = rewards.setdefault((task, run["rival"]), {})
            of_seed[run["seed"]] = statistics.mean(run["rewards"])
    lines = [f"| task | {' | '.join(PARTED)} |", f"|---|{'---|' * len(PARTED)}"]
    for task in dict.fromkeys(task for task, _ in rewards):
        cells = []
        for rival in PARTED:
            # letters are paid to rivals that can tell them apart
            own = rewards.get((task, rival)) or rewards.get((task, f"{rival}, by token"), {})
            cells.append(by_seed([own[seed] for seed in sorted(own)]))
        if any(cells):
            lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_seed(values: list[float]) -> str:
    """Values of one or two seeds, of more their interval and number."""
    if len(values) < 3:
        return ", ".join(f"{x:.2f}" for x in values)
    return f"{interval(values)} ({len(values)})"


def figure(runs: list[dict]) -> str:
    """Mean reward over seeds of the drawn rivals, a panel per task of the first page."""
    panels: dict[str, list[Curve]] = {}
    for (task, rival), group in chosen(runs).items():
        if task not in DRAWN or rival not in COLORS:
            continue
        means = [statistics.mean(rewards) for rewards in zip(*(run["rewards"] for run in group))]
        panels.setdefault(task, []).append(Curve(rival, COLORS[rival], means))
    return picture(panels, ROLLOUT)


def main() -> None:
    """Train a rival, or gather the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="?", choices=TASKS)
    parser.add_argument("rival", nargs="?", choices=RIVALS)
    parser.add_argument("--rate", type=float, nargs="*", default=RATES)
    parser.add_argument("--seed", type=int, nargs="*", default=None)
    parser.add_argument("--set", type=json.loads, default={}, help="further settings as JSON")
    parser.add_argument(
        "--table", action="store_true", help="gather runs/real in benchmarks/results/real.json"
    )
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.table:
        known = {
            key(run): run for run in (json.loads(RESULTS.read_text()) if RESULTS.exists() else [])
        }
        known |= {
            key(run): run
            for run in map(json.loads, (file.read_text() for file in sorted(RUNS.glob("*.json"))))
        }
        RESULTS.write_text("[" + ",\n".join(map(json.dumps, known.values())) + "]\n")
        FIGURE.write_text(figure(list(known.values())))
        print(table(list(known.values())))
    elif options.seed is not None:
        for rate, seed in product(options.rate, options.seed):
            once(options.task, options.rival, rate, seed, options.set)
    else:
        tuned = [
            once(options.task, options.rival, rate, TUNED_ON, options.set) for rate in options.rate
        ]
        best = max(tuned, key=lambda run: statistics.mean(run["rewards"]))["rate"]
        for seed in SEEDS:
            once(options.task, options.rival, best, seed, options.set)


if __name__ == "__main__":
    main()
