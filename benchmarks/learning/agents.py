"""PPO, its rivals here, and TRL's own GRPOTrainer on environments of other packages, TextWorld and
ScienceWorld, with SmolLM2-135M-Instruct, at equal episodes.

    # supervised start, and its held-out success
    python benchmarks/learning/agents.py textworld prepare
    # tune on a seed of its own, then five seeds
    python benchmarks/learning/agents.py textworld PPO
    python benchmarks/learning/agents.py scienceworld PPO --rate 1e-3 --seed 0
    # each command costs that much
    python benchmarks/learning/agents.py textworld PPO --rate 5e-4 --seed 0 --cost 0.05
    # a rollout of 64 episodes over the model's own work
    python benchmarks/learning/agents.py textworld parallel
    python benchmarks/learning/agents.py textworld --table

All have the same start, episodes, rewards, optimizer steps, and LoRA of rank 16. One thread each. A
run is scored once, at its end, on episodes that nobody trains on, by one program for all: greedily,
and at temperature 1. TRL's trainer plays the same episodes with `environment_factory`, because the
chat template of the start reads a turn as the call of a tool. Writes
benchmarks/results/textworld.json and scienceworld.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
FOLDERS = "textworld", "scienceworld", "smollm2"
sys.path[:0] = [*(str(RECIPES / folder) for folder in FOLDERS), str(ROOT)]

from picture import Curve, picture
from student import margin

RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "textworld.svg"
RUNS = Path("runs")
RATES = (5e-4, 1e-3)
TUNED_ON = 100
SEEDS = (0, 1, 2, 3, 4)
SEVERAL = 3  # seeds, from which on there are intervals and curves
PARTS = slice(4, 8), slice(-4, None)  # of the table
# episodes, optimizer steps from them, rollouts, tokens
ROLLOUT = 32
STEPS = 4
ROLLOUTS = 12
LENGTH = 640
# and all of the critic
LOGGED = "reward", "entropy", "lam", "episodes/turns", "completions/mean_length"
GROUPS = {"num_generations": 8}
RIVALS: dict[str, dict[str, Any]] = {
    "PPO": {},
    # all values are the mean return
    "PPO, running mean": {"critic_learning_rate": 1e-12, "critic_kwargs": {"backprop": False}},
    "ReBN": {"critic": "none", "advantage_estimator": "rebn"},
    "RLOO": GROUPS | {"critic": "none", "advantage_estimator": "rloo"},
    "GRPO": GROUPS | {"critic": "none"},
    "TRL GRPO": GROUPS,
}
COLORS = {
    "PPO": "#4f81bd",
    "TRL GRPO": "#b4552d",
    "PPO, running mean": "#1f6f50",
    "ReBN": "#7a6fb0",
    "RLOO": "#c9a227",
    "GRPO": "#888888",
}


@dataclass(frozen=True)
class Engine:
    """Episodes of another package, and a model that knows how to begin."""

    environment: Any
    trained: list[dict]
    held_out: list[list[dict]]
    start_model: Callable[[], str]


def textworld() -> Engine:
    """Games of two rooms; held out are others of this size, and larger ones."""
    from start import start_model
    from text_games import SIZES, TextWorld, rows

    held_out = [rows(range(2000, 2032), [size]) for size in SIZES[:2]]
    return Engine(TextWorld, rows(range(96), SIZES[:1]), held_out, start_model)


def scienceworld() -> Engine:
    """Animals that live longest and shortest; held out are the variations that the engine keeps
    for tests."""
    from science_world import ScienceWorld, rows, start_model

    return Engine(ScienceWorld, rows("train"), [rows("test")], start_model)


ENGINES = {"textworld": textworld, "scienceworld": scienceworld}
# what is held out, as the table names it
HELD_OUT = {"textworld": ["held-out", "larger"], "scienceworld": ["held-out"]}


def won(environments: list, **kwargs) -> list[float]:
    """Whether each episode was won, which nobody optimizes."""
    return [float(environment.won) for environment in environments]


def costly(environment: Any, cost: float) -> Any:
    """The environment with a cost of each command."""
    if not cost:
        return environment

    class Costly(environment):
        def step(self, text: str) -> tuple[str, float, bool]:
            seen, reward, done = super().step(text)
            return seen, reward - cost, done

    return Costly


def as_tool(environment: Any) -> Any:
    """The environment as TRL has them: its method is the tool that the chat template calls with
    each turn."""

    class Tool:
        def reset(self, **row) -> str:
            self._played = environment()
            self._rewards = 0.0
            self.won = False
            return self._played.reset(row, 0)

        def command(self, command: str) -> str:
            """
            Play a command.

            Args:
                command: One of those that were listed.
            """
            seen, reward, done = self._played.step(command)
            self._rewards = self._rewards + reward
            self.won = self._played.won
            # TRL drops an answer that does not fit, and ends the episode
            if done:
                return "over " * LENGTH
            return seen

        def get_reward(self) -> float:
            return self._rewards

    return Tool


def dtype() -> str:
    """bfloat16 on CPUs with instructions for it, a third of the time of float32 there and eight
    times elsewhere."""
    import torch

    if torch.cpu.get_capabilities().get("avx512_bf16"):
        return "bfloat16"
    return "float32"


def settings(rollouts: int = ROLLOUTS, **given) -> dict[str, Any]:
    """Arguments of all trainers."""
    return {
        "max_steps": rollouts * STEPS,
        "per_device_train_batch_size": ROLLOUT // STEPS,
        "generation_batch_size": ROLLOUT,
        "max_completion_length": LENGTH,
        "model_init_kwargs": {"dtype": dtype()},
        "bf16": dtype() == "bfloat16",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": STEPS,
    } | given


def train(
    engine: Engine, rival: str, rate: float, seed: int, given: dict, cost: float = 0.0
) -> dict:
    """Train a rival; return rewards, successes and seconds of each rollout, and its held-out
    success."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from trl_ppo_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    wins = []
    seconds = []

    def success(environments, **kwargs):
        scores = won(environments)
        wins.append(statistics.mean(scores))
        seconds.append(round(time.monotonic() - start, 1))
        print(
            f"{rival} {rate:g} seed {seed}: rollout {len(wins)}, won {wins[-1]:.2f}, "
            f"{seconds[-1]:.0f} s",
            flush=True,
        )
        return scores

    common = settings(learning_rate=rate, seed=seed) | RIVALS[rival] | given
    data = Dataset.from_list(engine.trained * -(-ROLLOUT * ROLLOUTS // len(engine.trained)))
    played = costly(engine.environment, cost)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"model": engine.start_model(), "train_dataset": data, "peft_config": lora}
        if rival.startswith("TRL"):
            args = GRPOConfig(folder, reward_weights=[0.0], **common)
            run = GRPOTrainer(
                args=args, reward_funcs=success, environment_factory=as_tool(played), **arguments
            )
        else:
            args = PPOConfig(folder, **common)
            run = PPOTrainer(
                args=args, monitor_funcs=success, environment_factory=played, **arguments
            )
        start = time.monotonic()
        run.train()
        run.save_model(folder)
        held_out = score(engine, engine.start_model(), folder)
    history = [row for row in run.state.log_history if "reward" in row]
    names = {name for row in history for name in row if name in LOGGED or name.startswith("value/")}
    logged = {
        name: [round(row[name], 4) for row in history if name in row] for name in sorted(names)
    }
    result = {
        "rival": rival,
        "rate": rate,
        "seed": seed,
        "settings": given,
        "cost": cost,
        "dtype": dtype(),
    }
    return result | {"won": wins, "seconds": seconds, "held_out": held_out, "logged": logged}


def score(engine: Engine, model: str, adapter: str | None = None) -> dict:
    """Success of a model on what is held out: greedily, and at temperature 1."""
    import torch
    from datasets import Dataset

    from trl_ppo_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    wins: list[float] = []

    def success(environments, **kwargs):
        wins.extend(won(environments))
        return won(environments)

    means: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, temperature in {"greedy": 0.0, "sampled": 1.0}.items():
            chosen = settings(
                1, critic="none", advantage_estimator="rebn", seed=0, eval_temperature=temperature
            )
            args = PPOConfig(f"{folder}/{name}", per_device_eval_batch_size=32, **chosen)
            data = Dataset.from_list([row for rows in engine.held_out for row in rows])
            arguments = {
                "environment_factory": engine.environment,
                "monitor_funcs": success,
                "peft_config": adapter,
            }
            wins.clear()
            PPOTrainer(model, args=args, train_dataset=data, **arguments).evaluate(data)
            left = iter(wins)
            parts = [[next(left) for _ in rows] for rows in engine.held_out]
            means[name] = [round(statistics.mean(part), 4) for part in parts]
    print(f"held-out success: {means}", flush=True)
    return means


def prepare(engine: Engine, runs: Path) -> None:
    """Make the start, and score it and the base."""
    from player import base_model

    for name, model in (("start", engine.start_model()), ("base", base_model())):
        file = runs / f"{name}.json"
        if not file.exists():
            print(name, flush=True)
            untrained = {
                "rival": name,
                "rate": None,
                "seed": None,
                "settings": {},
                "dtype": dtype(),
            }
            file.write_text(json.dumps(untrained | {"held_out": score(engine, model)}))


def parallel(engine: Engine, episodes: int = 64) -> None:
    """Time a rollout of episodes that are played at once, over the model's own work in it."""
    import torch
    from datasets import Dataset

    from trl_ppo_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    data = Dataset.from_list(engine.trained[:episodes])
    spent = {"play": 0.0, "model": 0.0}

    def timed(function: Callable, name: str) -> Callable:
        def call(*given, **more):
            start = time.monotonic()
            result = function(*given, **more)
            spent[name] += time.monotonic() - start
            return result

        return call

    with tempfile.TemporaryDirectory() as folder:
        chosen = settings(
            1, critic="none", advantage_estimator="rebn", per_device_eval_batch_size=episodes
        )
        run = PPOTrainer(
            engine.start_model(),
            args=PPOConfig(folder, **chosen),
            train_dataset=data,
            environment_factory=engine.environment,
        )
        player = run.components.player
        conversation = player.generator.conversation
        player.play = timed(player.play, "play")
        player.generator.conversation = lambda: timed(conversation(), "model")
        for _ in range(3):  # the first time loads what is needed once
            spent |= {"play": 0.0, "model": 0.0}
            run.evaluate(data)
            play, model = spent.values()
            print(
                f"{play:.1f} s, of which the model {model:.1f} s: {play / model:.2f} times its own "
                "work",
                flush=True,
            )


def once(name: str, rival: str, rate: float, seed: int, given: dict, cost: float) -> dict:
    """Train with an engine, unless the run is saved."""
    parts = [
        rival.replace(" ", "_"),
        f"{rate:g}",
        str(seed),
        *(f"{k}={v}" for k, v in sorted(given.items())),
    ]
    if cost:
        parts.append(f"cost{cost:g}")
    file = RUNS / name / ("-".join(parts).replace("/", "_") + ".json")
    if not file.exists():
        result = train(ENGINES[name](), rival, rate, seed, given, cost)
        file.write_text(json.dumps(result))
    return json.loads(file.read_text())


def key(run: dict) -> str:
    """Identity of a run."""
    return json.dumps(
        [run[name] for name in ("rival", "rate", "seed", "settings")] + [run.get("cost", 0.0)]
    )


def interval(values: list[float]) -> str:
    """Mean in percent with its 95 % interval, from three seeds on."""
    count = len(values)
    mean = f"{100 * statistics.mean(values):.0f} %"
    if count < SEVERAL:
        return mean
    return f"{mean} ± {100 * margin(values):.0f}"


def grouped(runs: list[dict]) -> dict[tuple, list[dict]]:
    """Runs of the seeds in the table, by rival, cost and rate: rivals in their order, those
    without training last."""
    groups: dict[tuple, list[dict]] = {}
    order = [*RIVALS, "start", "base"]

    def place(run: dict) -> tuple:
        return order.index(run["rival"]), run.get("cost", 0.0), run["rate"] or 0, run["seed"] or 0

    for run in sorted(runs, key=place):
        if run["seed"] in (*SEEDS, None) and not run["settings"]:
            groups.setdefault((run["rival"], run.get("cost", 0.0), run["rate"]), []).append(run)
    return groups


def figure(runs: list[dict]) -> str:
    """Mean success in training at the lower rate without costs, for each rival with three seeds
    or more."""
    curves = [
        Curve(
            rival, COLORS[rival], [statistics.mean(x) for x in zip(*(run["won"] for run in group))]
        )
        for (rival, cost, rate), group in grouped(runs).items()
        if len(group) >= SEVERAL and rate == RATES[0] and not cost
    ]
    return picture({"TextWorld, games won": curves}, ROLLOUT, "episodes")


def table(runs: list[dict], held_out: list[str]) -> str:
    """Markdown table: success in training and on what is held out, in percent."""
    names = ["", "rate", "seeds", "rollouts 5-8", "last 4"]
    names += [name for part in held_out for name in (f"{part}, greedy", "sampled")]
    names.append("time, s")
    lines = [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    for (rival, cost, rate), group in grouped(runs).items():
        if cost:
            label = f"{rival}, cost {cost:g}"
        else:
            label = rival
        cells = ["", "", "", "", ""]
        if rate is not None:  # otherwise a model that was not trained
            parts = [[statistics.mean(run["won"][part]) for run in group] for part in PARTS]
            seconds = statistics.mean(run["seconds"][-1] for run in group)
            cells = [f"{rate:g}", str(len(group)), *map(interval, parts), f"{seconds:.0f}"]
        scores = [
            [run["held_out"][name][size] for run in group]
            for size in range(len(held_out))
            for name in ("greedy", "sampled")
        ]
        cells[4:4] = map(interval, scores)
        lines.append(f"| {' | '.join([label, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    """Prepare, train a rival, or gather the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("what", nargs="?", choices=["prepare", "parallel", *RIVALS])
    parser.add_argument("--rate", type=float, nargs="*", default=RATES)
    parser.add_argument("--seed", type=int, nargs="*", default=None)
    parser.add_argument(
        "--cost", type=float, default=0.0, help="cost of each command, subtracted from the reward"
    )
    parser.add_argument("--set", type=json.loads, default={}, help="further settings as JSON")
    parser.add_argument("--table", action="store_true", help="gather the runs in the results")
    options = parser.parse_args()
    folder = RUNS / options.engine
    folder.mkdir(parents=True, exist_ok=True)
    if options.table:
        gather(options.engine, folder)
    elif options.what == "prepare":
        prepare(ENGINES[options.engine](), folder)
    elif options.what == "parallel":
        parallel(ENGINES[options.engine]())
    else:
        train_all(options)


def gather(name: str, folder: Path) -> None:
    """Add the saved runs to the results, draw them, and print the table."""
    results = RESULTS / f"{name}.json"
    saved = json.loads(results.read_text()) if results.exists() else []
    saved += [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    runs = list({key(run): run for run in saved}.values())
    results.write_text("[" + ",\n".join(map(json.dumps, runs)) + "]\n")
    if name == "textworld":
        FIGURE.write_text(figure(runs))
    print(table(runs, HELD_OUT[name]))


def train_all(options: argparse.Namespace) -> None:
    """Train on the seeds given, or tune the rate and train on all."""

    def trained(rate: float, seed: int) -> dict:
        return once(options.engine, options.what, rate, seed, options.set, options.cost)

    if options.seed is not None:
        for rate, seed in product(options.rate, options.seed):
            trained(rate, seed)
    else:
        tuned = [trained(rate, TUNED_ON) for rate in options.rate]
        best = max(tuned, key=lambda run: statistics.mean(run["won"]))["rate"]
        for seed in SEEDS:
            trained(best, seed)


if __name__ == "__main__":
    main()
