"""PPO and its rivals on small tasks whose optimum is known, at equal completions.

    python benchmarks/arena.py                       # every task and rival: tune, then five seeds
    python benchmarks/arena.py --tasks token --rivals RLOO ReBN
    python benchmarks/arena.py --table               # table and figure of benchmarks/README.md from the saved results

A two-layer Llama with random weights and a LoRA adapter writes 32 tokens of 12 kinds (8 in mixed), or plays the turns
of benchmarks/turns.py. All rivals have the same model, prompts, rollouts and epochs. Each takes the learning rate of
`RATES` with the best mean over 30 rollouts on a seed of its own; the results are of `SEEDS`. So each rival takes seven
runs per task, of one to three minutes on a core. Writes benchmarks/results/arena.json.

    python benchmarks/arena.py --tasks "spelled mistake" "spelled lake" --rivals "PPO, side" "PPO, turn" "PPO, both"

compares the levels of advantages, which differ only where a turn has several tokens.

Tasks of one turn; right is the token that a fixed permutation assigns to the one before it, so the best policy is
always right:

- token: a reward of 1 for each right token. Group baselines see only the sum.
- noise: the same plus N(0, 1) at each token, times a number from 0.1 to 10 that belongs to the prompt.
- worth: token plus N(0, 1) at each token, plus a number from -3 to 3 that belongs to the prompt.
- chain: a reward of 1 for each right token before the first wrong one.
- mixed, a control: a score of 1 at the end if the first token is one of 1 to 12 that the prompt accepts, by the
  quantiles of Beta(1/2, 1/2): many prompts are solved by all or none of a group, and there is little to predict.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from picture import Curve, picture
from turns import TASKS, WORDS

HERE = Path(__file__).resolve().parent
RESULTS, FIGURE = HERE / "results" / "arena.json", HERE.parent / "docs" / "arena.svg"
KINDS, ROLLOUT, ROLLOUTS = 12, 256, 30
LONG = {name: 60 for name in TASKS if name.split()[-1] in ("cues", "lake", "wordle")}  # that nobody learns in 30
LENGTHS = {"token": 32, "noise": 32, "worth": 32, "chain": 32, "mixed": 8}  # of completions, by task of one turn
LENGTHS |= {name: task.length for name, task in TASKS.items()}
RATES, TUNED_ON, SEEDS = (3e-4, 1e-3), 100, (0, 1, 2, 3, 4)
GROUPS = {"critic": "none", "num_generations": 8}
CENTERED = {"normalize_values": True, "whiten_advantages": False, "vf_coef": 0.5}
FIXED = {"critic_learning_rate": 1e-12, "critic_kwargs": {"backprop": False}}  # at the mean return
RIVALS = {
    "GRPO": GROUPS | {"advantage_estimator": "grpo"},
    "Dr. GRPO": GROUPS | {"advantage_estimator": "dr_grpo"},
    "RLOO": GROUPS | {"advantage_estimator": "rloo"},
    "ReBN": {"critic": "none", "advantage_estimator": "rebn"},
    "PPO, running mean": CENTERED | FIXED,
    "PPO, old default": {
        "critic": "head",
        "normalize_values": False,
        "whiten_advantages": True,
        "vf_coef": 0.1,
        "cliprange": 0.2,
    },
    "PPO, head": CENTERED | {"critic": "head"},
    "PPO, adapter": CENTERED | {"critic": "adapter"},
    "PPO, side": CENTERED | {"critic": "side"},
    "PPO, turn": CENTERED | {"critic": "side", "advantage_level": "turn"},
    "PPO, both": CENTERED | {"critic": "side", "advantage_level": "both"},
}
COLORS = {
    "PPO, side": "#1f6f50",
    "PPO, running mean": "#7a6fb0",
    "ReBN": "#c9a227",
    "RLOO": "#4f81bd",
    "GRPO": "#b4552d",
}


def accepted(prompt: list[int]) -> int:
    """Number of first tokens that a prompt of the mixed task accepts, which are those after its last one."""
    quantile = (KINDS * prompt[0] + prompt[1] + 0.5) / KINDS**2
    return min(int(KINDS * math.sin(math.pi / 2 * quantile) ** 2) + 1, KINDS)


def right_tokens(prompt: list[int], completion: list[int]) -> list[bool]:
    """Whether each token is the one that follows its predecessor."""
    return [after == (5 * before + 1) % KINDS for before, after in zip([prompt[-1], *completion], completion)]


class Task:
    """Reward of a task; records the share of the optimum without noise."""

    __name__ = "arena"

    def __init__(self, name: str, seed: int, watch: Callable[[float], None] = lambda share: None):
        import torch

        self.name = name
        self.watch = watch  # called with the share of each rollout
        self.shares: list[float] = []
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **kwargs) -> list:
        import torch

        numbers = [[int(word[1:]) for word in prompt.split()] for prompt in prompts]
        if self.name == "mixed":
            pairs = zip(numbers, completion_ids)
            scores = [
                float((ids[0] - prompt[1]) % KINDS < accepted(prompt) and ids[0] < KINDS) for prompt, ids in pairs
            ]
            self.record(statistics.mean(scores))
            return scores
        right = [right_tokens(prompt, ids) for prompt, ids in zip(numbers, completion_ids)]
        if self.name == "chain":
            right = [[all(row[: t + 1]) for t in range(len(row))] for row in right]
        self.record(sum(map(sum, right)) / LENGTHS[self.name] / len(right))
        if self.name not in ("noise", "worth"):
            return [[float(x) for x in row] for row in right]
        rewards = torch.tensor(right) + torch.randn(len(right), len(right[0]), generator=self.generator)
        place = torch.tensor([prompt[0] for prompt in numbers])[:, None] / (KINDS - 1)  # of the prompt, 0 to 1
        return (rewards * 10 ** (2 * place - 1) if self.name == "noise" else rewards + 6 * place - 3).tolist()

    def record(self, share: float) -> None:
        """Add the share of a rollout."""
        self.shares.append(share)
        self.watch(share)


def model_of(kinds: int) -> tuple[Any, Any]:
    """Model of numbers, a token that is always wrong, and an EOS that is never sampled; and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(kinds)} | {"<pad>": kinds, "<eos>": kinds + 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(words), "pad_token_id": None, "bos_token_id": None, "eos_token_id": kinds + 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.2)), tokenizer


def trainer_of(job: tuple[str, str, float, int], directory: str, watch: Callable[[float], None]) -> tuple[Any, Task]:
    """Trainer of one rival on one task with one rate and seed, on one thread; and the task, which records."""
    task_name, rival, rate, seed = job
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from trl_ppo_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    # 1. A model and prompts.
    environment = TASKS.get(task_name)
    kinds = WORDS if environment else KINDS
    model, tokenizer = model_of(kinds)
    if environment:
        prompts = Dataset.from_dict({"prompt": ["w20"] * KINDS**2, "number": range(KINDS**2)})
        play = {"environment_factory": environment}
        of_task = {"stop_token_ids": [*getattr(environment, "stops", range(kinds + 1))]}  # else a turn is a word
    else:
        prompts = Dataset.from_dict({"prompt": [f"w{i} w{j}" for i in range(KINDS) for j in range(KINDS)]})
        play, of_task = {}, {"generation_kwargs": {"min_new_tokens": LENGTHS[task_name]}}

    # 2. The same rollouts for every rival.
    rollouts = ROLLOUTS if seed == TUNED_ON else LONG.get(task_name, ROLLOUTS)
    task = Task(task_name, seed, watch)
    args = PPOConfig(
        directory,
        seed=seed,
        use_cpu=True,
        bf16=False,
        learning_rate=rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=64,
        num_mini_batches=ROLLOUT // 64,
        num_ppo_epochs=4,
        gradient_checkpointing=False,
        max_completion_length=LENGTHS[task_name],
        **of_task,
        kl_coef=0.0,
        max_steps=rollouts * 4 * ROLLOUT // 64,
        logging_steps=4 * ROLLOUT // 64,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({} if RIVALS[rival].get("critic") == "none" else {"critic_learning_rate": rate}) | RIVALS[rival],
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    rewards = None if environment else task
    trainer = PPOTrainer(model, rewards, args, prompts, processing_class=tokenizer, peft_config=adapter, **play)
    return trainer, task


def train(job: tuple[str, str, float, int], watch: Callable[[float], None] = lambda share: None) -> dict:
    """Train one rival on one task with one rate and seed."""
    task_name, rival, rate, seed = job
    with tempfile.TemporaryDirectory() as directory:
        trainer, task = trainer_of(job, directory, watch)
        trainer.train()
    if environment := TASKS.get(task_name):  # a log per rollout, after the first optimizer step's
        means = [x["reward"] for x in trainer.state.log_history if "reward" in x]
        task.shares = [mean / environment.optimum() for mean in means]
    explained = [x["value/explained_variance"] for x in trainer.state.log_history if "value/explained_variance" in x]
    return {
        "task": task_name,
        "rival": rival,
        "rate": rate,
        "seed": seed,
        "shares": [round(x, 4) for x in task.shares],
        "explained": [round(x, 3) for x in explained],
    }


def probed(task_name: str, seed: int, completions: int = 2048) -> str:
    """What `trl-ppo probe` says of a task before training, as a row of a table."""
    from trl_ppo_ext.commands.probe import probe

    with tempfile.TemporaryDirectory() as directory:
        trainer, _ = trainer_of((task_name, "PPO, side", 1e-3, seed), directory, lambda share: None)
        found = probe(trainer, completions)
    cells = ["" if x is None else f"{x[0]:.2f} ({x[1]:.2f} to {x[2]:.2f})" for x in found["agreement"].values()]
    return f"| {task_name} | {found['explained_variance']:.2f} | {' | '.join(cells)} | {found['verdict']} |"


def compete(pair: tuple[str, str]) -> list[dict]:
    """Tune the rate of a rival on a task with a seed of its own, then train five others."""
    tuned = [train((*pair, rate, TUNED_ON)) for rate in RATES]
    rate = max(tuned, key=lambda run: statistics.mean(run["shares"]))["rate"]
    return tuned + [train((*pair, rate, seed)) for seed in SEEDS]


def until(shares: list[float], goal: float = 0.9) -> int | None:
    """Completions until the share of the optimum is first at the goal."""
    return next((ROLLOUT * (n + 1) for n, share in enumerate(shares) if share >= goal), None)


def table(runs: list[dict]) -> str:
    """Markdown table: share of the optimum after half of the run and at its end, completions to 90 %."""
    lines = [
        "| task | rival | rate | after half | at the end | 90 % after | explained variance |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for task, rival in dict.fromkeys((run["task"], run["rival"]) for run in runs):
        chosen = [run for run in runs if (run["task"], run["rival"]) == (task, rival) and run["seed"] in SEEDS]
        if not chosen:
            continue
        cells = []
        for part in (slice(len(chosen[0]["shares"]) // 2 - 3, len(chosen[0]["shares"]) // 2), slice(-3, None)):
            ends = [100 * statistics.mean(run["shares"][part]) for run in chosen]
            spread = 2.78 * statistics.stdev(ends) / len(ends) ** 0.5 if len(ends) > 1 else float("nan")  # t, 5 seeds
            cells.append(f"{statistics.mean(ends):.0f} ± {spread:.0f} %")
        reached = sorted((until(run["shares"]) or float("inf")) for run in chosen)
        middle = reached[len(reached) // 2]
        explained = [statistics.mean(run["explained"][-3:]) for run in chosen if run["explained"]]
        cells += [
            "never" if middle == float("inf") else f"{middle:.0f}",
            f"{statistics.mean(explained):.2f}" if explained else "",
        ]
        lines.append(f"| {task} | {rival} | {chosen[0]['rate']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(runs: list[dict]) -> str:
    """Mean share over seeds of the drawn rivals, one panel per task."""
    panels: dict[str, list[Curve]] = {}
    for task, (rival, color) in product(LENGTHS, COLORS.items()):
        chosen = [x["shares"] for x in runs if (x["task"], x["rival"]) == (task, rival) and x["seed"] in SEEDS]
        if chosen:
            panels.setdefault(task, []).append(
                Curve(rival, color, [statistics.mean(shares) for shares in zip(*chosen)])
            )
    return picture(panels, ROLLOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--probe", type=int, metavar="SEED", help="only probe the tasks, before training")
    options = parser.parse_args()
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    sys.path.insert(0, str(HERE.parent))
    if options.probe is not None:
        print("\n".join(probed(task, options.probe) for task in options.tasks))
        return
    if options.table:
        print(table(runs))
        FIGURE.write_text(figure(runs))
        return
    pairs = [(task, rival) for task in options.tasks for rival in options.rivals]
    with ProcessPoolExecutor(options.workers) as pool:
        for pair, made in zip(pairs, pool.map(compete, pairs)):
            runs = [run for run in runs if (run["task"], run["rival"]) != pair] + made
            RESULTS.write_text(json.dumps(runs) + "\n")
            print(table(made).splitlines()[-1], flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
