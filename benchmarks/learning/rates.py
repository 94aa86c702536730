"""Learning rate and rank of the adapter: PPO on SmolLM2-135M-Instruct over a grid of both.

    python benchmarks/learning/rates.py reviews --rates 2e-4 1e-3 4e-3 --ranks 4 16 64 --seeds 0
    python benchmarks/learning/rates.py --table

Tasks and setup are those of real.py; the adapter's alpha is 32 at every rank, so that its scale is
32 / rank. Runs are added to benchmarks/results/rates.json.
"""

import argparse
import json
import os
import statistics
from itertools import product

import real

RESULTS = real.ROOT / "benchmarks" / "results" / "rates.json"
RIVALS = {"reviews": "PPO", "reverse": "PPO, by token"}
RATES = (5e-5, 2e-4, 1e-3, 4e-3)
RANKS = (4, 16, 64)


def settings_of(rank: int) -> dict[str, int]:
    """What a run of a rank changes, as `real.py` knows it."""
    if rank == real.RANK:
        return {}
    return {"rank": rank}


def gathered(runs: list[dict]) -> dict[str, dict]:
    """Known runs and those of runs/real, by what identifies them."""
    files = real.RUNS.glob("*.json")
    runs = runs + [json.loads(file.read_text()) for file in sorted(files)]
    return {real.key(run): run for run in runs if run["rival"] == RIVALS.get(run["task"])}


def table(runs: list[dict]) -> str:
    """Markdown table: mean reward of the run, and of its last three rollouts, by seed."""
    rates = sorted({run["rate"] for run in runs})
    heads = [f"rate {rate:g}" for rate in rates]
    lines = [f"| task | rank | {' | '.join(heads)} |", "|---|---:" + "|---" * len(rates) + "|"]
    ranks = sorted({run["settings"].get("rank", real.RANK) for run in runs})
    for task, rank in product(RIVALS, ranks):
        cells = []
        for rate in rates:
            group = [
                run
                for run in runs
                if (run["task"], run["rate"]) == (task, rate)
                and run["settings"] == settings_of(rank)
            ]
            cells.append(cell(sorted(group, key=lambda run: run["seed"])))
        if any(cells):
            lines.append(f"| {task} | {rank} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(group: list[dict]) -> str:
    """Runs of a rate and rank: mean of the run by seed, and in brackets its last three rollouts."""
    parts = [
        f"{statistics.mean(run['rewards']):.2f} ({statistics.mean(run['rewards'][-3:]):.2f})"
        for run in group
    ]
    return ", ".join(parts)


def main() -> None:
    """Train what is missing of a grid, or show the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="?", choices=RIVALS)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--seeds", type=int, nargs="*", default=(0, 1, 2))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not options.table:
        for seed, rate, rank in product(options.seeds, options.rates, options.ranks):
            real.once(options.task, RIVALS[options.task], rate, seed, settings_of(rank))
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    runs = [run for run in gathered(known).values() if set(run["settings"]) <= {"rank"}]
    RESULTS.write_text("[" + ",\n".join(map(json.dumps, runs)) + "]\n")
    print(table(runs))


if __name__ == "__main__":
    main()
