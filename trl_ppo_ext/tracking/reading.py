"""Read the log of a run into curves, completions and settings."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import Series

RUN_LOG = "run_log.jsonl"  # in the output directory of a run
REPORT = "report.html"  # next to it by default
CREDIT = ("reward", "value", "advantage")  # numbers of a turn of the policy
MOST_DRAWN = 1_000  # points per curve in a report


class Curve(NamedTuple):
    """A metric over optimizer steps."""

    steps: np.ndarray  # [n] ascending
    values: np.ndarray  # [n] NaN if not finite

    def finite(self) -> "Curve":
        """The curve without NaN."""
        kept = np.isfinite(self.values)
        return Curve(self.steps[kept], self.values[kept])

    @property
    def window(self) -> int:
        """Number of points in a moving average: a twelfth of the curve."""
        return max(len(self.values) // 12, 1)

    def smooth(self) -> "Curve":
        """Centered moving average that skips NaN."""
        windows = Series(self.values).rolling(2 * (self.window // 2) + 1, center=True, min_periods=1)
        return Curve(self.steps, windows.mean().to_numpy())

    def thinned(self, most: int = MOST_DRAWN) -> "Curve":
        """The smallest and the largest value of each of `most // 2` stretches, so that every peak stays."""
        if len(self.values) <= most:
            return self
        low, high = (np.where(np.isnan(self.values), fill, self.values) for fill in (np.inf, -np.inf))
        parts = np.array_split(np.arange(len(self.values)), most // 2)
        index = sorted({int(at) for part in parts for at in (part[low[part].argmin()], part[high[part].argmax()])})
        return Curve(self.steps[index], self.values[index])

    def at(self, step: int) -> float:
        """The smoothed value at a step, or at the last step before it."""
        index = max(int(np.searchsorted(self.steps, step, side="right")) - 1, 0)
        return float(self.smooth().values[index])


class Sheet(NamedTuple):
    """Completions sampled at one step."""

    step: int
    mode: str  # "train", "eval" or "eval_NAME"
    rows: list[dict[str, Any]]  # prompt, turns and scores, of any type


def logged_turns(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns of a logged completion, as [`turns_of`] returned them; a log may hold any type."""
    turns = row.get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


@dataclass
class Run:
    """Metrics, completions and settings that a run logged."""

    name: str
    directory: str
    curves: dict[str, Curve] = field(default_factory=dict)
    sheets: list[Sheet] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)  # PPO's own settings
    trainer_config: dict[str, Any] = field(default_factory=dict)  # the Trainer's settings
    environment: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    max_steps: int | None = None
    resumed_at: list[int] = field(default_factory=list)
    plan: dict[str, int] = field(default_factory=dict)  # sizes of a rollout
    changed: list[str] = field(default_factory=list)  # fields that are not at their default
    written: float | None = None  # time of the last entry, in seconds since 1970
    seconds: float = 0.0  # of training, with repeated steps
    notes: list[str] = field(default_factory=list)  # missing or unreadable parts

    @property
    def logs(self) -> int:
        """Number of training logs: points of the longest curve."""
        lengths = (len(curve.finite().values) for name, curve in self.curves.items() if not name.startswith("eval_"))
        return max(lengths, default=0)

    @property
    def last_step(self) -> int:
        """The last step with a metric."""
        return max((int(curve.steps[-1]) for curve in self.curves.values()), default=0)

    @property
    def rollouts(self) -> int:
        """Number of rollouts until the last step; without a plan, of logs with one."""
        if self.plan:
            return -(-self.last_step // self.plan["optimizer_steps"])
        return len(self.curves["reward"].values) if "reward" in self.curves else self.logs


def _read_log(run: Run) -> list[dict[str, Any]]:
    """Valid entries of the run log, which the run may still be writing."""
    path = Path(run.directory, RUN_LOG)
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    if lines and not lines[-1].endswith(b"\n"):  # the last line is still being written
        lines.pop()
    entries: list[dict[str, Any]] = []
    for line in lines:
        entry: Any = None
        with suppress(ValueError):
            entry = json.loads(line)
        match entry:
            case {"kind": "run", "step": int()} | {"kind": "metrics", "step": int(), "metrics": dict()}:
                entries.append(entry)
            case {"kind": "completions", "step": int(), "rows": list()}:
                entries.append(entry)
    if len(entries) < len(lines):
        run.notes.append(f"{len(lines) - len(entries)} line(s) of {RUN_LOG} could not be read and were skipped.")
    return entries


def _replay(run: Run, entries: list[dict[str, Any]]) -> None:
    """Fill a run from its log. For a step that was logged twice, the later entry counts."""
    points: dict[str, dict[int, float]] = {}
    sheets: dict[tuple[int, str], Sheet] = {}
    for entry in entries:
        step = entry["step"]
        if entry["kind"] == "run":
            # A resumed run logs later steps again. A run from step 0 replaces an earlier run in this directory.
            kept = step if step > 0 else -1
            points = {name: {at: x for at, x in values.items() if at <= kept} for name, values in points.items()}
            sheets = {key: sheet for key, sheet in sheets.items() if sheet.step <= kept}
            run.resumed_at = sorted({at for at in [*run.resumed_at, step] if 0 < at <= kept})
            run.model, run.max_steps = entry.get("model"), entry.get("max_steps")
            run.changed, run.seconds = entry.get("changed") or [], run.seconds if step > 0 else 0.0
            for part in ("config", "trainer_config", "environment", "plan"):
                setattr(run, part, entry.get(part) or {})
        elif entry["kind"] == "metrics":
            for name, value in entry["metrics"].items():
                if name not in ("step", "epoch") and type(value) in (int, float, type(None)):
                    points.setdefault(name, {})[step] = math.nan if value is None else float(value)
        else:
            sheet = Sheet(step, str(entry.get("mode")), entry["rows"])
            sheets[sheet[:2]] = sheet
        before, run.written = run.written, entry.get("time", run.written)
        if entry["kind"] != "run" and before is not None and run.written is not None:
            run.seconds += run.written - before
    run.sheets = [sheets[key] for key in sorted(sheets)]
    for name in filter(points.get, points):
        steps, values = zip(*sorted(points[name].items()))
        run.curves[name] = Curve(np.array(steps), np.where(np.isfinite(values), values, np.nan))
    # The share of distinct completions is easier to read.
    for name in [name for name in run.curves if name.endswith("completions/repeated_ratio")]:
        curve = run.curves[name]
        run.curves[name.replace("repeated", "distinct")] = curve._replace(values=1 - curve.values)


def read_runs(directories: Iterable[str | os.PathLike]) -> list[Run]:
    """Read runs from their output directories, and give them distinct names."""
    runs = [read_run(directory) for directory in directories]
    names = Counter(run.name for run in runs)
    for number, run in enumerate(runs, start=1):
        if names[run.name] > 1:
            run.name += f" ({number})"
    return runs


def read_run(directory: str | os.PathLike) -> Run:
    """Read a run from its output directory."""
    directory = os.fspath(directory)
    if not os.path.isdir(directory):
        raise ValueError(f"`{directory}` is not a directory; pass the `output_dir` of a run.")
    run = Run(os.path.basename(os.path.abspath(directory)), directory)
    _replay(run, _read_log(run))
    if not run.curves and not run.config:
        raise ValueError(f"`{directory}` must contain a non-empty {RUN_LOG}; pass the `output_dir` of a run.")
    if not run.curves:
        run.notes.append("Nothing is logged yet; `logging_steps` sets how often the run logs.")
    return run
