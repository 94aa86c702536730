"""Gap of each setting to the known optimum, about a minute each.

    python benchmarks/learning/optimum.py

The problem of tests/optimum/optimum.py can be enumerated. `gap` is what a setting leaves of the way
from the reference to the best that exact gradient ascent reaches with the same adapter: 0 is all of
it, above 1 is worse than not training. A wrong sign, mask or place of a term shows here.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "optimum.json"
GROUPS = {"critic": "none", "num_generations": 64}
# in the units of the reward
IN_LOSS = {"kl_placement": "loss", "whiten_advantages": False}

# name: (settings, tokens of a response); the first ones must be within 0.02
REACHING = {
    "critic head": ({}, 2),
    "critic adapter": ({"critic": "adapter"}, 2),
    "GRPO": (GROUPS, 2),
    "Dr. GRPO": (GROUPS | {"advantage_estimator": "dr_grpo"}, 2),
    "RLOO": (GROUPS | {"advantage_estimator": "rloo"}, 2),
}
OTHERS = {
    "critic head, no backprop": ({"critic_kwargs": {"backprop": False}}, 2),
    "GRPO, groups of 16": (GROUPS | {"num_generations": 16}, 2),
    "REINFORCE": ({"critic": "none", "advantage_estimator": "reinforce"}, 2),
    "λ by length, critic's λ 1": ({"critic_kwargs": {"lam_length_alpha": 1.0, "lam": 1.0}}, 2),
    "sequence ratio (GSPO)": (
        {"importance_sampling_level": "sequence", "loss_aggregation": "sequence_mean"},
        2,
    ),
    "k2 in the reward": ({"kl_estimator": "k2"}, 2),
    "k3 in the reward": ({"kl_estimator": "k3"}, 2),
    "exact in the reward": ({"kl_estimator": "exact"}, 2),
    "exact in both": (
        {"kl_estimator": "exact", "kl_placement": "both", "whiten_advantages": False},
        2,
    ),
    "k1 in the loss": (IN_LOSS | {"kl_estimator": "k1"}, 2),
    "k2 in the loss": (IN_LOSS | {"kl_estimator": "k2"}, 2),
    "k3 in the loss": (IN_LOSS | {"kl_estimator": "k3"}, 2),
    "exact in the loss": (IN_LOSS | {"kl_estimator": "exact"}, 2),
    "one token: k1 in the reward": ({}, 1),
    "one token: exact in the reward": ({"kl_estimator": "exact"}, 1),
    "one token: k1 in the loss": (IN_LOSS | {"kl_estimator": "k1"}, 1),
    "one token: k2 in the loss": (IN_LOSS | {"kl_estimator": "k2"}, 1),
    "one token: k3 in the loss": (IN_LOSS | {"kl_estimator": "k3"}, 1),
    "one token: exact in the loss": (IN_LOSS | {"kl_estimator": "exact"}, 1),
}
ROWS = REACHING | OTHERS


def measure(job: tuple[str, int, int]) -> tuple[str, int, dict]:
    """Train one setting with one seed, on one thread."""
    import torch

    name, seed, max_steps = job
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "tests" / "optimum"))
    from optimum import gap
    from transformers.utils import logging

    logging.set_verbosity_error()
    settings, length = ROWS[name]
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w") as quiet:
        stdout = sys.stdout
        sys.stdout = quiet
        try:
            result = gap(seed, directory, max_steps, length=length, **settings)
        finally:
            sys.stdout = stdout
    return name, seed, result


def table(results: dict[str, dict[str, dict]]) -> str:
    """Results as Markdown, in the order of the settings."""
    lines = ["| setting | gap, by seed | mean | seconds |", "|---|---|---|---|"]
    for name in (name for name in ROWS if name in results):
        runs = [results[name][seed] for seed in sorted(results[name])]
        gaps = [run["gap"] for run in runs]
        by_seed = ", ".join(f"{gap:.4f}" for gap in gaps)
        seconds = statistics.mean(run["seconds"] for run in runs)
        lines.append(f"| {name} | {by_seed} | {statistics.mean(gaps):.4f} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Train every setting and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="rows after the fifth take the first",
    )
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, metavar="SETTING", help="names of the table's rows"
    )
    parser.add_argument("--max_steps", type=int, default=1400)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="trainings at a time, each on one thread"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = args.only or list(ROWS)
    jobs = [
        (name, seed, args.max_steps)
        for name in names
        for seed in (args.seeds if name in REACHING else args.seeds[:1])
    ]
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "trl")}
    results: dict[str, dict[str, dict]] = {}
    measured = {
        "versions": versions,
        "machine": platform.machine(),
        "max_steps": args.max_steps,
        "results": results,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs, max_tasks_per_child=1) as pool:
        for name, seed, result in pool.map(measure, jobs):
            results.setdefault(name, {})[str(seed)] = result
            print(f"{name}, seed {seed}: gap {result['gap']:.4f}", file=sys.stderr, flush=True)
            # keep finished measurements
            args.output.write_text(json.dumps(measured, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
