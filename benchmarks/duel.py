"""PPO against GRPO on the token task of the arena, drawn while they train.

    make duel

Both start from the same model with random weights and see the same number of completions, each at its learning rate of
results/arena.json. Draws the share of the optimum in the terminal, and writes runs/duel.svg.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import arena
from picture import Curve, picture
from rich.live import Live

SEED = 0
RIVALS = {"PPO": ("PPO, side", "●", "#1f6f50"), "GRPO": ("GRPO", "○", "#b4552d")}  # rival of the arena, mark, color
WIDTH, HEIGHT = 60, 16  # of the chart, in characters
PICTURE = Path("runs/duel.svg")


def tuned_rate(rival: str) -> float:
    """Learning rate of a rival on the token task."""
    runs = json.loads(arena.RESULTS.read_text())
    return next(x["rate"] for x in runs if (x["task"], x["rival"]) == ("token", rival) and x["seed"] in arena.SEEDS)


def compete(name: str, rival: str, queue: multiprocessing.Queue) -> None:
    """Train a rival; send its share of the optimum after every rollout."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    arena.train(("token", rival, tuned_rate(rival), SEED), watch=lambda share: queue.put((name, share)))


def chart(curves: dict[str, list[float]]) -> str:
    """Curves as text, from 0 to the optimum; a mark per rollout."""
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for name, shares in curves.items():
        for number, share in enumerate(shares):
            column = number * (WIDTH - 1) // (arena.ROLLOUTS - 1)
            cells[round((1 - min(share, 1)) * (HEIGHT - 1))][column] = RIVALS[name][1]
    labels = {0: "optimum", HEIGHT - 1: "0"}
    lines = [f"{labels.get(row, ''):>8} ┤{''.join(line).rstrip()}" for row, line in enumerate(cells)]
    ends = [f"{RIVALS[name][1]} {name} {shares[-1]:.0%}" for name, shares in curves.items() if shares]
    done = arena.ROLLOUT * max(map(len, curves.values()))
    return "\n".join([*lines, f"{'':>8} └{'─' * WIDTH}", f"{'':>10}{done:,} completions each    {'    '.join(ends)}"])


def main() -> None:
    """Train both at once and draw them."""
    sys.path.insert(0, str(arena.HERE.parent))
    context, start = multiprocessing.get_context("spawn"), time.monotonic()
    queue = context.Queue()
    processes = [context.Process(target=compete, args=(name, RIVALS[name][0], queue)) for name in RIVALS]
    curves: dict[str, list[float]] = {name: [] for name in RIVALS}
    for process in processes:
        process.start()
    with Live(chart(curves), refresh_per_second=2) as live:
        while any(process.is_alive() for process in processes) or not queue.empty():
            while not queue.empty():
                name, share = queue.get()
                curves[name].append(share)
            live.update(chart(curves))
            time.sleep(0.2)
    if any(process.exitcode for process in processes):
        sys.exit("A rival ended with an error; `python benchmarks/arena.py --tasks token` shows it.")
    PICTURE.parent.mkdir(exist_ok=True)
    lines = [Curve(name, RIVALS[name][2], shares) for name, shares in curves.items()]
    PICTURE.write_text(picture({"token": lines}, arena.ROLLOUT))
    print(f"\n{time.monotonic() - start:.0f} s; {PICTURE}")


if __name__ == "__main__":
    main()
