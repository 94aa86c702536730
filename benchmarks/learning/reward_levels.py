"""A reward model paid at the end against its changes paid by token, on the task of `make demo`,
over 12 rollouts of 64 completions, at a rate of 1e-3 and a lower KL coefficient.

    python benchmarks/learning/reward_levels.py                # all runs
    python benchmarks/learning/reward_levels.py --rewards pairs --levels token --seeds 0
    python benchmarks/learning/reward_levels.py --rewards regression --levels token --rivals ReBN
    python benchmarks/learning/reward_levels.py --table
    python benchmarks/learning/reward_levels.py --table --rewards regression --goal 0.59

Reward models, all taught VADER's opinion of what the base writes:

- regression: that of `make demo`, trained on a score at every token, in NF4.
- pairs: six layers of the base, trained by TRL's RewardTrainer on pairs of reviews, in NF4.
- adapter: LoRA on the policy's own base, trained in the same way, as a `RewardAdapter`.
- useless: the first one, with noise in place of all scores but the last. Paid at the end it is the
  first one.

Rivals have PPO's prompts and are paid as PPO is. ReBN has no critic, and in a running mean all
values are the mean return, with PPO's λ.

TextBlob judges, which nothing optimizes. One thread each. Writes
benchmarks/results/reward_levels.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes"), str(ROOT / "recipes" / "smollm2")]

from student import margin

RESULTS = ROOT / "benchmarks" / "results" / "reward_levels.json"
RUNS = Path("runs/reward_levels")
REWARDS = "regression", "pairs", "adapter", "useless"
LEVELS = "end", "token"
SEEDS = 0, 1, 2
RIVALS = {
    "PPO": {},
    "ReBN": {"critic": "none", "advantage_estimator": "rebn"},
    "running mean": {
        "critic": "head",
        "critic_learning_rate": 1e-12,
        "critic_kwargs": {"backprop": False},
    },
}
PAIRS = 640
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
SETTING = {
    "learning_rate": 1e-3,
    "max_steps": 48,  # 12 rollouts of 64
    "kl_coef": 0.02,
    "disable_tqdm": True,
}
EXPLAINED = "value/explained_variance"
LOGGED = "reward", "kl", EXPLAINED, "entropy", "lam"
AT_END = 3  # rollouts


def preference_pairs(base: str):
    """Dataset of the base's reviews of one opening, the one that VADER prefers first."""
    import torch
    from datasets import Dataset
    from reviews import THINGS, openings, vader
    from reward_model import sample
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(base)
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    prompts = (openings(THINGS) * PAIRS)[:PAIRS]
    first = sample(policy, tokenizer, prompts)
    second = sample(policy, tokenizer, prompts)
    rows = []
    for prompt, texts in zip(prompts, zip(first, second)):
        worse, better = sorted(texts, key=lambda text: vader([text])[0])
        if vader([worse]) != vader([better]):
            rows.append({"prompt": prompt, "chosen": better, "rejected": worse})
    return Dataset.from_list(rows)


def train_on_pairs(base: str, folder: Path, as_adapter: bool) -> None:
    """Train a reward model with TRL."""
    import torch
    from peft import LoraConfig
    from reward_model import LAYERS
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    if as_adapter:
        size = {}
        adapter = LoraConfig(**LORA, task_type="SEQ_CLS")
        rate = 1e-3  # at 3e-4 it ranks half of the pairs wrong
    else:
        size = {"num_hidden_layers": LAYERS}
        adapter = None
        rate = 3e-4
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32, **size
    )
    torch.nn.init.zeros_(model.score.weight)
    model.get_input_embeddings().requires_grad_(False)
    args = RewardConfig(
        str(folder / "checkpoints"),
        learning_rate=rate,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = RewardTrainer(
        model,
        args,
        train_dataset=preference_pairs(base),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=adapter,
    )
    trainer.train()
    trainer.save_model(str(folder))


def useless_prefixes(model):
    """The demo's reward model with noise in place of all scores but the last."""
    import torch

    from trl_ppo_ext.rewards import ClassifierReward

    class UselessPrefixes(ClassifierReward):
        def _score_prefixes(self, rows: list[list[int]]) -> torch.Tensor:
            scores = super()._score_prefixes(rows)
            noise = torch.randn_like(scores) * scores.std()
            for row, ids in enumerate(rows):
                last = self._final_place(ids)
                noise[row, last:] = scores[row, last:]
            return noise

    return UselessPrefixes(model)


def reward_of(name: str, base: str):
    """Reward, which is trained once."""
    import torch
    from reward_model import train_reward_model

    from trl_ppo_ext import RewardAdapter
    from trl_ppo_ext.rewards import load_classifier

    trained = "regression" if name == "useless" else name
    folder = RUNS / trained
    if not (folder / "done").exists():
        if trained == "regression":
            train_reward_model(base, folder)
        else:
            train_on_pairs(base, folder, as_adapter=trained == "adapter")
        (folder / "done").touch()
    if name == "useless":
        return useless_prefixes(load_classifier(str(folder), torch.float32))
    if name == "adapter":
        return RewardAdapter(str(folder), check_base=False)
    return str(folder)


def train(name: str, level: str, seed: int, **settings) -> dict:
    """Train the demo's policy; return what it logged, and the judge's score of held-out reviews."""
    import torch
    from datasets import Dataset
    from demo import SETTINGS
    from peft import LoraConfig
    from reviews import THINGS, THINGS_HELD_OUT, distinct, openings, textblob, vader
    from reward_model import BATCH, sample
    from smollm2 import base_model
    from transformers import set_seed

    from trl_ppo_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    base = base_model()
    with tempfile.TemporaryDirectory() as directory:
        trainer = PPOTrainer(
            model=base,
            reward_funcs=reward_of(name, base),
            args=PPOConfig(
                directory,
                **SETTINGS | SETTING | {"seed": seed, "reward_level": level} | settings,
            ),
            train_dataset=Dataset.from_dict({"prompt": openings(THINGS)}),
            peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM"),
            monitor_funcs=[textblob, vader],
        )
        trainer.train()
        history = [row for row in trainer.state.log_history if "reward" in row]
        model = trainer.actor_critic.policy.eval()
        set_seed(1)
        prompts = (openings(THINGS_HELD_OUT) * 4)[:BATCH]
        texts = sample(model, trainer.tokenizer, prompts, temperature=0.7)
    names = [x for x in history[-1] if x in LOGGED or x.startswith(("monitor/", "rewards/"))]
    polarity = textblob(texts)
    return {
        "reward model": name,
        "level": level,
        "seed": seed,
        "settings": settings,
        "logged": {x: [round(row[x], 4) for row in history] for x in names},
        "positive": statistics.mean(x > 0 for x in polarity),
        "polarity": statistics.mean(polarity),
        "distinct": distinct(texts),
        "texts": texts[:8],
    }


def key(run: dict) -> str:
    """Identity of a run."""
    return json.dumps([run[x] for x in ("reward model", "level", "seed", "settings")])


def rollouts_to(rewards: list[float], goal: float) -> float:
    """Rollouts until the mean of two reaches a goal."""
    pairs = enumerate(pairwise(rewards), 2)
    return next((number for number, pair in pairs if statistics.mean(pair) >= goal), float("inf"))


def spread(values: list[float]) -> str:
    """Mean with its 95 % interval."""
    if len(values) < 3:
        return f"{statistics.mean(values):.2f}"
    return f"{statistics.mean(values):.2f} ± {margin(values):.2f}"


def table(
    runs: list[dict], rewards: Sequence[str] = REWARDS, given_goal: float | None = None
) -> str:
    """Markdown table of levels per reward model.

    Completions are those to a given goal, or else to the score that PPO ends with if it is paid at
    the end.
    """
    lines = [
        "| reward model | paid at | rival | seeds | reward of the run | last 3 rollouts | completions | KL | "
        "judge | explained | foreseen |",
        "|---|---|---|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for name, level, rival in product(rewards, LEVELS, RIVALS):
        group = [x for x in runs if (x["reward model"], x["level"]) == (name, level)]
        group = [x for x in group if x["settings"] == RIVALS[rival]]
        group = sorted(group, key=lambda x: x["seed"])
        if not group:
            continue
        source = "regression" if name == "useless" else name
        by_seed = {
            x["seed"]: statistics.mean(x["logged"]["reward"][-AT_END:])
            for x in runs
            if (x["reward model"], x["level"]) == (source, "end") and not x["settings"]
        }
        goal = statistics.mean(by_seed.values()) if given_goal is None else given_goal

        def late(metric: str, group: list[dict] = group) -> list[float]:
            return [statistics.mean(x["logged"][metric][-AT_END:]) for x in group]

        steps = [64 * rollouts_to(x["logged"]["reward"], goal) for x in group]
        foreseen = [
            statistics.mean(values)
            for x in group
            for metric, values in x["logged"].items()
            if metric.endswith("/foreseen")
        ]
        cells = [
            name,
            level,
            rival,
            ", ".join(str(x["seed"]) for x in group),
            spread([statistics.mean(x["logged"]["reward"]) for x in group]),
            spread(late("reward")),
            ", ".join("never" if x == float("inf") else f"{x:,}" for x in steps),
            spread(late("kl")),
            spread(late("monitor/textblob/mean")),
            spread(late(EXPLAINED)) if EXPLAINED in group[0]["logged"] else "",
            spread(foreseen) if foreseen else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train, or show the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rewards", nargs="*", default=REWARDS, choices=REWARDS)
    parser.add_argument("--levels", nargs="*", default=LEVELS, choices=LEVELS)
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--rivals", nargs="*", default=["PPO"], choices=RIVALS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--goal", type=float, help="score to which completions are counted")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not options.table:
        wishes = product(options.seeds, options.rewards, options.levels, options.rivals)
        for seed, name, level, rival in wishes:
            if (name, level) == ("useless", "end"):
                continue
            settings = RIVALS[rival]
            wanted = {"reward model": name, "level": level, "seed": seed, "settings": settings}
            if key(wanted) not in map(key, runs):
                runs.append(train(name, level, seed, **settings))
                RESULTS.write_text("[" + ",\n".join(map(json.dumps, runs)) + "]\n")
    print(table(runs, options.rewards, options.goal))


if __name__ == "__main__":
    main()
