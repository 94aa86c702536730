"""Write the tables of benchmarks/README.md and benchmarks/NOTES.md from benchmarks/results/*.json.

    python benchmarks/tables.py

A table follows the name of its file in a comment, `<!-- arena.json -->`, and if there are several,
its own, `<!-- real.json, separated -->`. The sentences around it are written by hand.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "learning"))
import agents
import arena
import optimum
import rates
import real
import reward_levels
import told
from student import margin

PAGES = [HERE / "README.md", HERE / "NOTES.md"]
# names in statistics.json
TODAY = "where turns begin, and values that are nearer"
STATE_H = "around what others earn from a place on"
STATE_G = "less the mean of others at a place, unless the critic knows it"
BEFORE_H = (
    "before trusted values as they are",
    "with trusted values as they are",
    "less the mean of others at a place",
    STATE_G,
)
SEVERAL = 3  # values, from which on there are intervals
PLACE = re.compile(r"(<!-- ((\w+\.json)(?:, \w+)?) -->\n\n)(?:\|.*\n)*\n*")


def markdown(columns: str, rows: Iterable[Sequence[Any]]) -> str:
    """Table with columns of a comma-separated list; a `:` after a name aligns its column to the
    right."""
    names = columns.split(", ")
    lines = [
        [name.rstrip(":") for name in names],
        ["---:" if name.endswith(":") else "---" for name in names],
        *rows,
    ]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def step(measured: dict) -> str:
    rows = []
    for shape, trainers in measured["results"].items():
        ours = trainers["trl_ppo_ext"]["median"]
        for name, run in trainers.items():
            seconds = f"{min(run['seconds']):.2f} to {max(run['seconds']):.2f}"
            times = [
                f"{run['median']:.2f}",
                seconds,
                f"{run['median'] / ours:.2f}",
                f"{run['peak_mib']:.0f}",
            ]
            rows.append([shape.replace(" ", ", "), name, *times])
    return markdown("shape, trainer, seconds:, min to max:, relative to ours:, peak MiB:", rows)


def scaling(measured: dict) -> str:
    rows = []
    for run in measured["rows"]:
        sizes = [
            run[name]
            for name in ("grows", "completions", "response", "num_generations", "at_a_time")
        ]
        thousands = run["completions"] * (48 + run["response"]) / 1000  # with prompts of 48 tokens
        numbers = [
            f"{run['seconds']:.2f}",
            f"{run['seconds'] / thousands:.3f}",
            f"{run['peak_mib']:.0f}",
        ]
        rows.append([*sizes, *numbers])
    sizes = (
        "varied, completions:, tokens per completion:, completions per prompt:, sampled at a time:"
    )
    return markdown(f"{sizes}, seconds:, seconds per 1000 tokens:, peak MiB:", rows)


def estimate(measured: dict) -> str:
    rows = []
    for run in measured["results"]:
        peaks = run["estimated"]["peak"], max(run["measured"]["phases"].values())
        rows.append(
            [run["name"], *(f"{peak:.1f}" for peak in peaks), f"{run['measured']['resident']:.0f}"]
        )
    return markdown("run, estimated:, measured:, resident:", rows)


def backends(measured: dict) -> str:
    rows = []
    for name, run in measured.items():
        speeds = [
            f"{run[f'tokens/s of {lengths}']:,}" for lengths in ("one length", "many lengths")
        ]
        rows.append([f'`"{name}"`', *speeds, f"{run['swap ms']:.0f} ms" if run["swap ms"] else ""])
    return markdown("backend, tokens/s of one length:, of many lengths:, adapter swap:", rows)


def correction(measured: dict) -> str:
    rows = []
    for name in ("none", "sequence_truncate", "token_truncate", "sequence_mask"):
        gaps = measured["gaps"][name]
        spread = 2.776 * statistics.stdev(gaps) / len(gaps) ** 0.5  # t, 5 seeds
        if name == "none":
            label = "no correction"
        else:
            label = f"`{name}`"
        rows.append(
            [
                label,
                ", ".join(f"{gap:.4f}" for gap in gaps),
                f"{statistics.mean(gaps):.3f} ± {spread:.3f}",
            ]
        )
    return markdown("weights, gap by seed, mean", rows)


def gpu(measured: dict) -> str:
    rows = []
    for name, run in measured["results"].items():
        if run["status"] != "done" or "peak_gb" not in run:
            continue
        seconds = run.get("phases_s", {})
        peaks = run["peak_gb"]
        cells = [run["median_s"], seconds.get("generate"), seconds.get("update")]
        cells += [peaks["allocated"], run.get("estimate", {}).get("peak_gb"), peaks["reserved"]]
        rows.append([name, *("" if x is None else f"{x:.1f}" for x in cells[:3])])
        rows[-1] += ["" if x is None else f"{x:.2f}" for x in cells[3:]]
    return markdown(
        "run, seconds per step:, sampling:, updates:, peak GB:, estimated:, reserved:", rows
    )


def stars_of(run: dict) -> str | None:
    """None of a run of today, one of state H, which those before are where λ is 1, two of state G;
    others are not shown."""
    if run["code"] == TODAY:
        return ""
    if run["code"] == STATE_H or (run["code"] in BEFORE_H and set(run.get("lam", ())) == {1.0}):
        return " *"
    if run["code"] == STATE_G:
        return " **"
    return None


def statistics_of_today(measured: list[dict]) -> str:
    """Runs of the arena with today's defaults, and with stars those of earlier states, where there
    are fewer than three of later ones. Beside them, the ends of PPO's and GRPO's runs with earlier
    defaults."""
    of_arena = [
        run for run in measured if run["task"] in arena.LENGTHS and "lam" not in run["rival"]
    ]
    shown: dict[tuple[str, str, str, str], dict[int, list[float]]] = {}
    known: set[tuple[str, str]] = set()
    for stars in ("", " *", " **"):
        of_state: dict[tuple[str, str, str, str], dict[int, list[float]]] = {}
        for run in of_arena:
            pair = run["task"], run["rival"]
            if stars_of(run) == stars and pair not in known:
                curves = of_state.setdefault((*pair, stars, f"{run['lam'][0]:g}"), {})
                curves[run["seed"]] = run.get("success", run["shares"])
        known |= {key[:2] for key, curves in of_state.items() if len(curves) >= SEVERAL}
        shown |= of_state
    earlier = ends_of(json.loads(arena.RESULTS.read_text()))
    rows = []
    for (task, rival, stars, level), curves in sorted(shown.items()):
        means = [statistics.mean(curve) for curve in curves.values()]
        ends = [statistics.mean(curve[-3:]) for curve in curves.values()]
        seeds = ", ".join(map(str, sorted(curves)))
        before = [earlier.get((task, name), "") for name in (rival, "GRPO")]
        rows.append([task, rival + stars, level, seeds, interval(means), interval(ends), *before])
    return markdown(
        "task, rival, λ, seeds, mean of the run:, last 3 rollouts:, earlier defaults:, GRPO:", rows
    )


def ends_of(runs: list[dict]) -> dict[tuple[str, str], str]:
    """Mean of the last three rollouts with its interval, by task and rival of the arena."""
    ends: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["seed"] in arena.SEEDS:
            end = statistics.mean(run["shares"][-3:])
            ends.setdefault((run["task"], run["rival"]), []).append(end)
    return {pair: interval(values) for pair, values in ends.items()}


def interval(values: list[float]) -> str:
    """Mean with its 95 % interval, from three values on."""
    if len(values) < SEVERAL:
        return ", ".join(f"{x:.2f}" for x in values)
    return f"{statistics.mean(values):.2f} ± {margin(values):.2f}"


TABLES = {
    "arena.json": arena.table,
    "backends.json": backends,
    "correction.json": correction,
    "estimate.json": estimate,
    "gpu.json": gpu,
    "optimum.json": lambda measured: optimum.table(measured["results"]),
    "rates.json": rates.table,
    "real.json": real.table,
    "real.json, separated": real.separated,
    "reward_levels.json": reward_levels.table,
    "scaling.json": scaling,
    "scienceworld.json": lambda runs: agents.table(runs, agents.HELD_OUT["scienceworld"]),
    "statistics.json": statistics_of_today,
    "step.json": step,
    "step_miniverl.json": step,
    "textworld.json": lambda runs: agents.table(runs, agents.HELD_OUT["textworld"]),
    "told.json": told.table,
}


def filled(text: str) -> str:
    """The page with the tables of the saved results."""

    def table(place: re.Match) -> str:
        measured = json.loads((HERE / "results" / place[3]).read_text(encoding="utf-8"))
        return f"{place[1]}{TABLES[place[2]](measured)}\n\n"

    return PLACE.sub(table, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
