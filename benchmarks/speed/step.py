"""One PPO step compared with its peers', each program in its own process and environment.

A step is: generate, score, values and reference, advantages, four epochs of updates; the same model
shape, completions, lengths and LoRA for all. The programs take turns. The table has medians over
all their steps after a warm-up, and the peak of resident memory above that after the imports. The
peers are installed once into `benchmarks/.environments`.

    python benchmarks/speed/step.py --shapes small medium --dtypes bf16 fp32 --rounds 3

prints a table and writes benchmarks/results/step.json. Nothing else should run on the machine.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PEERS = BENCHMARKS / "peers"
ENVIRONMENTS = BENCHMARKS / ".environments"
RESULTS = BENCHMARKS / "results" / "step.json"
# name: worker, further arguments, how it is installed
PROGRAMS = {
    "trl_ppo_ext": ("ours.py", [], None),
    "TRL 1.12.0 PPOTrainer": ("trl_ppo.py", [], "trl"),
    "AgileRL 2.58.0 LLMPPO": ("agilerl_ppo.py", ["batch"], "agilerl"),
    "AgileRL 2.58.0, prompt by prompt": ("agilerl_ppo.py", ["each"], "agilerl"),
    "miniVERL 0.16.0 PPO": ("miniverl_ppo.py", [], "miniverl"),
    "TRL GRPOTrainer (no critic)": ("trl_grpo.py", [], None),
}
OURS = "trl_ppo_ext"


def installed(peer: str | None) -> tuple[str, dict[str, str]]:
    """Interpreter of a program, and its environment variables."""
    if peer is None:
        return sys.executable, {"PYTHONPATH": str(ROOT)}
    place = ENVIRONMENTS / peer
    try:
        return provided(peer, place)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)  # the next run would take it for complete
        raise


def provided(peer: str, place: Path) -> tuple[str, dict[str, str]]:
    """Interpreter and environment variables of a peer, installed if missing."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if peer == "trl":  # beside the tested stack
        if not place.exists():
            subprocess.run([*pip, "--no-deps", "--target", str(place), "trl==1.12.0"], check=True)
        return sys.executable, {"PYTHONPATH": str(place)}
    python = str(place / "bin" / "python")
    if not place.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run(
            [python, *pip[1:], "-r", str(PEERS / f"requirements_{peer}.txt")], check=True
        )
    return python, {}


def run(program: str, shape: str, dtype: str, steps: int) -> dict:
    """Run one process of a program; return the result in its last line."""
    worker, more, peer = PROGRAMS[program]
    python, environment = installed(peer)
    command = [python, str(PEERS / worker), shape, dtype, str(steps + 1), *more]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, cwd=PEERS
    )
    if done.returncode:
        raise RuntimeError(f"{program} failed on {shape} {dtype}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def together(runs: list[dict]) -> dict:
    """Summary of several processes of one program."""
    seconds = [x for each in runs for x in each["seconds"]]
    phases = [each["phases"] for each in runs if "phases" in each]
    summary = {
        "median": statistics.median(seconds),
        "seconds": seconds,
        "peak_mib": max(each["peak_mib"] for each in runs),
        "completion_lengths": sorted(
            {x for each in runs for x in each.get("completion_lengths", [])}
        ),
    }
    if phases:
        summary["phases"] = {
            name: statistics.median(each[name] for each in phases) for name in phases[0]
        }
    return summary


def show(results: dict[str, dict], title: str) -> None:
    """A table of one shape and dtype."""
    table = Table(title=title)
    for column in ("", "s per step", "least to most", "times ours", "peak MiB", "phases, s"):
        table.add_column(column, justify="left" if column in ("", "phases, s") else "right")
    ours = results.get(OURS)
    for name, result in results.items():
        spread = f"{min(result['seconds']):.2f} to {max(result['seconds']):.2f}"
        ratio = "" if ours is None else f"{result['median'] / ours['median']:.2f}"
        phases = ", ".join(f"{phase} {x:.2f}" for phase, x in result.get("phases", {}).items())
        table.add_row(
            name, f"{result['median']:.2f}", spread, ratio, f"{result['peak_mib']:.0f}", phases
        )
    Console(width=150).print(table)


def about() -> dict:
    """Versions and hardware."""
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            cpu = next(
                (line.split(":")[1].strip() for line in file if line.startswith("model name")), cpu
            )
    versions = {
        name: version(name) for name in ("torch", "transformers", "peft", "trl", "accelerate")
    }
    return {
        "versions": versions,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["small", "medium"])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=2, help="measured steps of each process, after one of warm-up"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.results.exists():
        written = json.loads(args.results.read_text())
    else:
        written = {"machines": {}, "results": {}}
    for shape in args.shapes:
        for dtype in args.dtypes:
            runs: dict[str, list[dict]] = {program: [] for program in args.programs}
            for _ in range(args.rounds):
                # in turns, so that a slow minute of the machine affects all of them
                for program in args.programs:
                    runs[program].append(run(program, shape, dtype, args.steps))
            summaries = {program: together(each) for program, each in runs.items()}
            show(summaries, f"{shape}, {dtype}")
            written["machines"][f"{shape} {dtype}"], written["results"][f"{shape} {dtype}"] = (
                about(),
                summaries,
            )
            args.results.parent.mkdir(exist_ok=True)
            args.results.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
