r"""PPO and its rivals on small tasks whose optimum is known, at equal completions.

    python benchmarks/learning/arena.py    # every task and rival: tune, then five seeds
    python benchmarks/learning/arena.py --tasks token --rivals RLOO ReBN
    # without tuning, into a file of its own:
    python benchmarks/learning/arena.py --tasks cost --rivals RLOO --rates 1e-3 --seeds 0 1 \
        --out part.json
    # table and figure of the saved results, or only the table of these files:
    python benchmarks/learning/arena.py --table
    python benchmarks/learning/arena.py --table part.json other.json

A two-layer Llama with random weights and a LoRA adapter writes 32 tokens of 12 kinds (8 in mixed),
or plays the turns of turns.py. All rivals have the same model, prompts, rollouts and epochs. Each
takes the learning rate of `RATES` with the best mean over 30 rollouts on a seed of its own; the
results are of `SEEDS`. So each rival takes seven runs per task, of one to three minutes on a core.
Writes benchmarks/results/arena.json, or another file: so several processes can run at once, each
with `--workers 1`.

    python benchmarks/learning/arena.py --tasks "spelled mistake" "spelled lake" \
        --rivals "PPO, side" "PPO, turn" "PPO, both"

compares the levels of advantages, which differ only where a turn has several tokens.

Tasks of one turn; right is the token that a fixed permutation assigns to the one before it, so the
best policy is always right:

- token: a reward of 1 for each right token. Group baselines see only the sum.
- noise: the same plus N(0, 1) at each token, times a number from 0.1 to 10 that belongs to the
  prompt.
- worth: token plus N(0, 1) at each token, plus a number from -3 to 3 that belongs to the prompt.
- chain: a reward of 1 for each right token before the first wrong one.
- mixed, a control: a score of 1 at the end if the first token is one of 1 to 12 that the prompt
  accepts, by the quantiles of Beta(1/2, 1/2): many prompts are solved by all or none of a group,
  and there is little to predict.
- steps 12, 50, 200: process rewards. A completion has 4 steps of so many tokens. Each has one
  decision, its first token: right is what the permutation assigns to the first token of the step
  before, or to the last one of the prompt. It pays 1 at the last token of its step. The other
  tokens do nothing. Rollouts of steps 50 and 200 have only 64 completions, so that a run takes less
  than ten minutes on a core.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

from picture import Curve, picture
from student import margin
from turns import TASKS, WORDS, share

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "arena.json"
FIGURE = ROOT / "docs" / "arena.svg"
KINDS = 12
ROLLOUT = 256
ROLLOUTS = 30
# in which a rollout is learned
EPOCHS = 4
MINIBATCHES = 4
# that nobody learns in 30
LONG = {name: 60 for name in TASKS if name.split()[-1] in ("cues", "lake", "wordle")}
LONG |= {"steps 12": 60, "steps 50": 120}
# of completions, by task of one turn
LENGTHS = {"token": 32, "noise": 32, "worth": 32, "chain": 32, "mixed": 8}
STEP_LENGTHS = {"steps 12": 12, "steps 50": 50, "steps 200": 200}  # in tokens
STEPS = 4  # of a completion
SMALL_ROLLOUTS = {"steps 50": 64, "steps 200": 64}  # completions, where they are long
LENGTHS |= {name: STEPS * length for name, length in STEP_LENGTHS.items()}
LENGTHS |= {name: task.length for name, task in TASKS.items()}
RATES = (3e-4, 1e-3)
TUNED_ON = 100
SEEDS = (0, 1, 2, 3, 4)
GROUPS = {"critic": "none", "num_generations": 8}
CENTERED = {"normalize_values": True, "whiten_advantages": False, "vf_coef": 0.5}
DEFAULT = {"critic_learning_rate": None}  # that of the config, instead of the policy's
SUCCESS = "monitor/won/mean"  # metric of tasks whose reward holds costs
PER_STEP = "PPO, per step"  # its λ is 0.8 over a step, so only tasks with steps have it
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
    "PPO, default": DEFAULT,
    "PPO, lam 1": DEFAULT | {"lam": 1.0},
    "PPO, lam 0.8": DEFAULT | {"lam": 0.8},
    "PPO, in groups": DEFAULT | {"num_generations": 8},
    "PPO, linear": DEFAULT | {"lr_scheduler_type": "linear"},  # the default schedule
    PER_STEP: DEFAULT,
}
COLORS = {
    "PPO, side": "#1f6f50",
    "PPO, running mean": "#7a6fb0",
    "ReBN": "#c9a227",
    "RLOO": "#4f81bd",
    "GRPO": "#b4552d",
}


def accepted(prompt: list[int]) -> int:
    """Number of first tokens that a prompt of the mixed task accepts, which are those after its
    last one."""
    quantile = (KINDS * prompt[0] + prompt[1] + 0.5) / KINDS**2
    return min(int(KINDS * math.sin(math.pi / 2 * quantile) ** 2) + 1, KINDS)


def right_tokens(prompt: list[int], completion: list[int]) -> list[bool]:
    """Whether each token is the one that follows its predecessor."""
    return [
        after == (5 * before + 1) % KINDS
        for before, after in zip([prompt[-1], *completion], completion)
    ]


class Task:
    """Reward of a task; records the share of the optimum without noise."""

    __name__ = "arena"

    def __init__(self, name: str, seed: int, watch: Callable[[float], None] = lambda share: None):
        import torch

        self.name = name
        self.watch = watch  # called with the share of each rollout
        self.shares: list[float] = []
        self.steps: list[list[float]] = []  # share of right decisions in each step, by rollout
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **kwargs) -> list:
        import torch

        numbers = [[int(word[1:]) for word in prompt.split()] for prompt in prompts]
        if self.name == "mixed":
            pairs = zip(numbers, completion_ids)
            scores = [
                float((ids[0] - prompt[1]) % KINDS < accepted(prompt) and ids[0] < KINDS)
                for prompt, ids in pairs
            ]
            self.record(statistics.mean(scores))
            return scores
        if self.name in STEP_LENGTHS:
            return self.pay_steps(numbers, completion_ids)
        right = [right_tokens(prompt, ids) for prompt, ids in zip(numbers, completion_ids)]
        if self.name == "chain":
            right = [[all(row[: t + 1]) for t in range(len(row))] for row in right]
        self.record(sum(map(sum, right)) / LENGTHS[self.name] / len(right))
        if self.name not in ("noise", "worth"):
            return [[float(x) for x in row] for row in right]
        rewards = torch.tensor(right) + torch.randn(
            len(right), len(right[0]), generator=self.generator
        )
        # of the prompt, 0 to 1
        place = torch.tensor([prompt[0] for prompt in numbers])[:, None] / (KINDS - 1)
        return (
            rewards * 10 ** (2 * place - 1) if self.name == "noise" else rewards + 6 * place - 3
        ).tolist()

    def pay_steps(
        self, prompts: list[list[int]], completions: list[list[int]]
    ) -> list[list[tuple[int, float]]]:
        """Pay each step at its last token, as `(position, reward)` pairs."""
        length = STEP_LENGTHS[self.name]
        ends = range(length - 1, STEPS * length, length)
        decisions = [
            right_tokens(prompt, ids[::length]) for prompt, ids in zip(prompts, completions)
        ]
        by_step = [statistics.mean(column) for column in zip(*decisions)]
        self.steps.append([round(x, 4) for x in by_step])
        self.record(statistics.mean(by_step))
        return [[(end, float(is_right)) for end, is_right in zip(ends, row)] for row in decisions]

    def record(self, share: float) -> None:
        """Add the share of a rollout."""
        self.shares.append(share)
        self.watch(share)


def model_of(kinds: int) -> tuple[Any, Any]:
    """Model of numbers, a token that is always wrong, and an EOS that is never sampled; and its
    tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(kinds)} | {"<pad>": kinds, "<eos>": kinds + 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    tokens = {
        "vocab_size": len(words),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": kinds + 1,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.2)), tokenizer


def rollout_of(task_name: str) -> int:
    """Completions of a rollout."""
    return SMALL_ROLLOUTS.get(task_name, ROLLOUT)


def settings_of(task_name: str, rival: str, rate: float) -> dict[str, Any]:
    """Settings in which a rival differs from the others."""
    settings = dict(RIVALS[rival])
    if settings.get("critic") != "none":
        settings.setdefault("critic_learning_rate", rate)
    if rival == PER_STEP:
        settings["lam"] = 0.8 ** (1 / STEP_LENGTHS[task_name])
    return settings


def won(environments: list, **kwargs: Any) -> list[float]:
    """Success of each episode, which is measured only: the reward may hold costs."""
    return [float(environment.won) for environment in environments]


def trainer_of(
    job: tuple[str, str, float, int], directory: str, watch: Callable[[float], None]
) -> tuple[Any, Task]:
    """Trainer of one rival on one task with one rate and seed, on one thread; and the task,
    which records."""
    task_name, rival, rate, seed = job
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from trl_ppo_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    # 1. A model and prompts.
    environment = TASKS.get(task_name)
    if environment:
        kinds = WORDS
    else:
        kinds = KINDS
    model, tokenizer = model_of(kinds)
    if environment:
        prompts = Dataset.from_dict({"prompt": ["w20"] * KINDS**2, "number": range(KINDS**2)})
        play = {"environment_factory": environment}
        if hasattr(environment, "fixed_cost"):
            play["monitor_funcs"] = won
        # else a turn is a word
        of_task = {"stop_token_ids": list(getattr(environment, "stops", range(kinds + 1)))}
    else:
        prompts = Dataset.from_dict(
            {"prompt": [f"w{i} w{j}" for i in range(KINDS) for j in range(KINDS)]}
        )
        play = {}
        of_task = {"generation_kwargs": {"min_new_tokens": LENGTHS[task_name]}}

    # 2. The same rollouts for every rival.
    if seed == TUNED_ON:
        rollouts = ROLLOUTS
    else:
        rollouts = LONG.get(task_name, ROLLOUTS)
    rollout = rollout_of(task_name)
    task = Task(task_name, seed, watch)
    schedule = {"lr_scheduler_type": "constant"}
    args = PPOConfig(
        directory,
        seed=seed,
        use_cpu=True,
        bf16=False,
        learning_rate=rate,
        per_device_train_batch_size=rollout // MINIBATCHES,
        num_mini_batches=MINIBATCHES,
        num_ppo_epochs=EPOCHS,
        gradient_checkpointing=False,
        max_completion_length=LENGTHS[task_name],
        **of_task,
        kl_coef=0.0,
        max_steps=rollouts * EPOCHS * MINIBATCHES,
        logging_steps=EPOCHS * MINIBATCHES,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **schedule | settings_of(task_name, rival, rate),
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    if environment:
        rewards = None
    else:
        rewards = task
    trainer = PPOTrainer(
        model, rewards, args, prompts, processing_class=tokenizer, peft_config=adapter, **play
    )
    return trainer, task


def train(
    job: tuple[str, str, float, int], watch: Callable[[float], None] = lambda share: None
) -> dict:
    """Train one rival on one task with one rate and seed."""
    task_name, rival, rate, seed = job
    with tempfile.TemporaryDirectory() as directory:
        trainer, task = trainer_of(job, directory, watch)
        trainer.train()
    history = [row for row in trainer.state.log_history if "reward" in row]  # one of each rollout
    if environment := TASKS.get(task_name):
        task.shares = [share(environment, row["reward"]) for row in history]
    names = {name for row in history for name in row if name == "lam" or name.startswith("value/")}
    logged = {
        name: [round(row[name], 4) for row in history if name in row] for name in sorted(names)
    }
    run = {
        "task": task_name,
        "rival": rival,
        "rate": rate,
        "seed": seed,
        "shares": [round(x, 4) for x in task.shares],
        "explained": [round(x, 3) for x in logged.get("value/explained_variance", [])],
        "logged": logged,
    }
    success = [round(row[SUCCESS], 4) for row in history if SUCCESS in row]
    if success:
        run["success"] = success
    if task.steps:
        run["steps"] = task.steps
    print(
        f"{task_name}, {rival}, {rate:g}, seed {seed}: "
        f"{100 * statistics.mean(task.shares[-3:]):.0f} %",
        flush=True,
    )
    return run


def probed(task_name: str, seed: int, completions: int = 2048) -> str:
    """What `trl-ppo probe` says of a task before training, as a row of a table."""
    from trl_ppo_ext.tools.probe import probe

    with tempfile.TemporaryDirectory() as directory:
        trainer, _ = trainer_of((task_name, "PPO, side", 1e-3, seed), directory, lambda share: None)
        found = probe(trainer, completions)
    cells = [
        "" if x is None else f"{x[0]:.2f} ({x[1]:.2f} to {x[2]:.2f})"
        for x in found["agreement"].values()
    ]
    return (
        f"| {task_name} | {found['explained_variance']:.2f} | {' | '.join(cells)} | "
        f"{found['verdict']} |"
    )


def compete(task_name: str, rival: str, rates: Sequence[float], seeds: Sequence[int]) -> list[dict]:
    """Tune the rate of a rival on a task with a seed of its own, if there are several, then
    train the others."""
    tuned = []
    if len(rates) > 1:
        tuned = [train((task_name, rival, rate, TUNED_ON)) for rate in rates]
        best = max(tuned, key=lambda run: statistics.mean(run["shares"]))
        rates = [best["rate"]]
    return tuned + [train((task_name, rival, rates[0], seed)) for seed in seeds]


def merged(runs: list[dict], made: list[dict]) -> list[dict]:
    """Runs with those that were made; of their rival on their task, those of seeds at another
    rate are dropped."""
    last = made[-1]
    pair = last["task"], last["rival"]
    keys = {(run["rate"], run["seed"]) for run in made}
    kept = []
    for run in runs:
        is_of_pair = (run["task"], run["rival"]) == pair
        is_replaced = (run["rate"], run["seed"]) in keys
        has_other_rate = run["seed"] != TUNED_ON and run["rate"] != last["rate"]
        if not (is_of_pair and (is_replaced or has_other_rate)):
            kept.append(run)
    return kept + made


def until(shares: list[float], rollout: int = ROLLOUT, goal: float = 0.9) -> int | None:
    """Completions until the share of the optimum is first at the goal."""
    return next((rollout * (n + 1) for n, share in enumerate(shares) if share >= goal), None)


def table(runs: list[dict]) -> str:
    """Markdown table: share of the optimum after half of the run and at its end, completions to
    90 %."""
    lines = [
        "| task | rival | rate | after half | at the end | 90 % after | explained variance |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for task, rival in dict.fromkeys((run["task"], run["rival"]) for run in runs):
        chosen = [
            run
            for run in runs
            if (run["task"], run["rival"]) == (task, rival) and run["seed"] != TUNED_ON
        ]
        if not chosen:
            continue
        if len({run["rate"] for run in chosen}) > 1:
            raise ValueError(f"{task}, {rival} has runs of two rates; remove those of one.")
        cells = []
        for part in (
            slice(len(chosen[0]["shares"]) // 2 - 3, len(chosen[0]["shares"]) // 2),
            slice(-3, None),
        ):
            ends = [100 * statistics.mean(run["shares"][part]) for run in chosen]
            cells.append(f"{statistics.mean(ends):.0f} ± {margin(ends):.0f} %")
        reached = sorted((until(run["shares"], rollout_of(task)) or float("inf")) for run in chosen)
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
    drawn = [task for task in LENGTHS if rollout_of(task) == ROLLOUT]
    for task, (rival, color) in product(drawn, COLORS.items()):
        chosen = [
            x["shares"]
            for x in runs
            if (x["task"], x["rival"]) == (task, rival) and x["seed"] in SEEDS
        ]
        if chosen:
            panels.setdefault(task, []).append(
                Curve(rival, color, [statistics.mean(shares) for shares in zip(*chosen)])
            )
    return picture(panels, ROLLOUT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=RATES,
        help="the only one, or those to choose from",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="file of the results, which keeps other runs"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--table", nargs="*", type=Path, metavar="FILE", help="only print the table of these files"
    )
    parser.add_argument(
        "--probe", type=int, metavar="SEED", help="only probe the tasks, before training"
    )
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.probe is not None:
        print("\n".join(probed(task, options.probe) for task in options.tasks))
        return
    if options.table is not None:
        files = options.table or [RESULTS]
        saved = [run for file in files for run in json.loads(file.read_text())]
        print(table(saved))
        if not options.table:
            FIGURE.write_text(figure(saved))
        return
    if TUNED_ON in options.seeds:
        parser.error(
            f"`--seeds` must not have {TUNED_ON}, on which rates are tuned, got {options.seeds}."
        )
    pairs = [
        (task, rival)
        for task, rival in product(options.tasks, options.rivals)
        if rival != PER_STEP or task in STEP_LENGTHS
    ]
    if options.out.exists():
        runs = json.loads(options.out.read_text())
    else:
        runs = []
    with ProcessPoolExecutor(options.workers) as pool:
        competitions = [
            pool.submit(compete, task, rival, options.rates, options.seeds) for task, rival in pairs
        ]
        for competition in as_completed(competitions):
            made = competition.result()
            runs = merged(runs, made)
            options.out.write_text(json.dumps(runs) + "\n")
            print(table(made).splitlines()[-1], flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
