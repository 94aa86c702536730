"""PPO against GRPO on the token task of the arena, drawn while they train.

    make duel

Both start from the same model with random weights and see the same number of completions, each at
its learning rate of benchmarks/results/arena.json, with three seeds: on another machine rounding
decides what a single one shows. Draws the share of the optimum of every run in the terminal, and
the means in runs/duel.svg.
"""

import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import arena
from picture import Curve, picture
from rich.live import Live

SEEDS = (0, 1, 2)
# rival of the arena, mark, color
RIVALS = {"PPO": ("PPO, side", "●", "#1f6f50"), "GRPO": ("GRPO", "○", "#b4552d")}
# of the chart, in characters
WIDTH = 60
HEIGHT = 16
PICTURE = Path("runs/duel.svg")


def tuned_rate(rival: str) -> float:
    """Learning rate of a rival on the token task."""
    runs = json.loads(arena.RESULTS.read_text())
    return next(
        x["rate"]
        for x in runs
        if (x["task"], x["rival"]) == ("token", rival) and x["seed"] in arena.SEEDS
    )


def compete(name: str, queue: multiprocessing.Queue) -> None:
    """Train a rival with each seed; send its share of the optimum after every rollout."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    rival = RIVALS[name][0]
    for seed in SEEDS:
        arena.train(
            ("token", rival, tuned_rate(rival), seed),
            watch=lambda share, seed=seed: queue.put((name, seed, share)),
        )


def chart(runs: dict[str, dict[int, list[float]]]) -> str:
    """Runs as text, from 0 to the optimum; a mark per rollout."""
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for name, seeds in runs.items():
        for number, share in (
            (n, share) for shares in seeds.values() for n, share in enumerate(shares)
        ):
            column = number * (WIDTH - 1) // (arena.ROLLOUTS - 1)
            cells[round((1 - min(share, 1)) * (HEIGHT - 1))][column] = RIVALS[name][1]
    labels = {0: "optimum", HEIGHT - 1: "0"}
    lines = [
        f"{labels.get(row, ''):>8} ┤{''.join(line).rstrip()}" for row, line in enumerate(cells)
    ]
    ends = {
        name: [shares[-1] for shares in seeds.values() if shares] for name, seeds in runs.items()
    }
    texts = [
        f"{RIVALS[name][1]} {name} {min(x):.0%} to {max(x):.0%}" for name, x in ends.items() if x
    ]
    total = arena.ROLLOUT * arena.ROLLOUTS
    return "\n".join(
        [
            *lines,
            f"{'':>8} └{'─' * WIDTH}",
            f"{'':>10}0 to {total:,} completions    {'    '.join(texts)}",
        ]
    )


def main() -> None:
    """Train both at once and draw them."""
    sys.path.insert(0, str(arena.ROOT))
    context = multiprocessing.get_context("spawn")
    start = time.monotonic()
    queue = context.Queue()
    processes = [context.Process(target=compete, args=(name, queue)) for name in RIVALS]
    runs: dict[str, dict[int, list[float]]] = {
        name: {seed: [] for seed in SEEDS} for name in RIVALS
    }
    for process in processes:
        process.start()
    with Live(chart(runs), refresh_per_second=2) as live:
        while any(process.is_alive() for process in processes) or not queue.empty():
            while not queue.empty():
                name, seed, share = queue.get()
                runs[name][seed].append(share)
            live.update(chart(runs))
            time.sleep(0.2)
    if any(process.exitcode for process in processes):
        sys.exit(
            "A rival ended with an error; "
            "`python benchmarks/learning/arena.py --tasks token` shows it."
        )
    PICTURE.parent.mkdir(exist_ok=True)
    means = {
        name: [statistics.mean(shares) for shares in zip(*seeds.values())]
        for name, seeds in runs.items()
    }
    lines = [Curve(name, RIVALS[name][2], shares) for name, shares in means.items()]
    PICTURE.write_text(picture({"token": lines}, arena.ROLLOUT))
    print(f"\n{time.monotonic() - start:.0f} s; {PICTURE}")


if __name__ == "__main__":
    main()
