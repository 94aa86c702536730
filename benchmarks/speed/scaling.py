"""Scaling of a PPO step with the batch, the completions and the groups.

    python benchmarks/speed/scaling.py

Micro-batches stay at 8 completions; each row is a process of its own, with one step of warm-up.
Prints a table of seconds, of seconds a thousand tokens, and of peak resident memory above that
after the imports, and writes benchmarks/results/scaling.json. About ten minutes on two cores;
nothing else should run.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from step import BENCHMARKS, PEERS, about, installed

MICRO_BATCH = 8
PROMPT = 48
MODEL = "8192,256,6"  # vocabulary, hidden size, layers
# varied size, completions, tokens per completion, completions per prompt, sampled at a time
ROWS = [
    *[("batch", batch, 64, 1, batch) for batch in (8, 16, 32, 64)],
    *[("completions", 8, response, 1, 8) for response in (64, 128, 256, 512, 1024)],
    *[("both", batch, response, 1, batch) for batch, response in ((32, 256), (64, 256))],
    *[("groups", 32, 64, group, 32) for group in (1, 4, 16)],
    *[("micro-batches", batch, 256, 1, 8) for batch in (8, 16, 32, 64)],
]


def measure(batch: int, response: int, group: int, at_a_time: int, dtype: str, steps: int) -> dict:
    """Steps of one process."""
    python, environment = installed(None)
    fields = [
        f"per_device_train_batch_size={MICRO_BATCH}",
        f"gradient_accumulation_steps={batch // MICRO_BATCH}",
        f"num_generations={group}",
        f"per_device_generation_batch_size={at_a_time}",
    ]
    shape = f"{MODEL},{batch},{PROMPT},{response}"
    command = [python, str(PEERS / "ours.py"), shape, dtype, str(steps + 1), *fields]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, cwd=PEERS
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="what grows; by default everything that does")
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "results" / "scaling.json")
    args = parser.parse_args()
    table = Table(
        title=f"{MODEL} (vocabulary, hidden, layers), {args.dtype}, micro-batches of {MICRO_BATCH}"
    )
    columns = (
        "grows",
        "completions",
        "tokens",
        "of a prompt",
        "at a time",
        "s a step",
        "s a 1000 tokens",
        "peak MiB",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "grows" else "right")
    rows = []
    for grows, *sizes in (row for row in ROWS if args.only is None or row[0] in args.only):
        batch, response = sizes[:2]
        result = measure(*sizes, args.dtype, args.steps)
        thousands = batch * (PROMPT + response) / 1000
        row = dict(zip(("completions", "response", "num_generations", "at_a_time"), sizes))
        measured = {
            "seconds": result["median"],
            "peak_mib": result["peak_mib"],
            "phases": result["phases"],
        }
        rows.append({"grows": grows} | row | measured)
        numbers = (
            f"{result['median']:.2f}",
            f"{result['median'] / thousands:.3f}",
            f"{result['peak_mib']:.0f}",
        )
        table.add_row(grows, *map(str, sizes), *numbers)
    Console(width=120).print(table)
    args.results.write_text(
        json.dumps(about() | {"dtype": args.dtype, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
