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
    rows: list[dict[str, Any]]  # prompt, turns and scores


@dataclass
class Run:
    """Metrics, completions and settings that a run logged."""

    name: str
    directory: str
    curves: dict[str, Curve] = field(default_factory=dict)  # with a finite value
    sheets: list[Sheet] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)  # PPO's own settings
    trainer_config: dict[str, Any] = field(default_factory=dict)  # the Trainer's settings
    environment: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    max_steps: int | None = None
    resumed_at: list[int] = field(default_factory=list)
    plan: dict[str, int] = field(default_factory=dict)  # sizes of a rollout
    changed: list[str] = field(default_factory=list)  # fields that are not at their default
    written: float = 0.0  # time of the last entry, in seconds since 1970
    seconds: float = 0.0  # of training, with repeated steps
    notes: list[str] = field(default_factory=list)  # missing or unreadable parts

    @property
    def last_step(self) -> int:
        """The last step with a metric."""
        return max((int(curve.steps[-1]) for curve in self.curves.values()), default=0)

    @property
    def rollouts(self) -> int:
        """Number of rollouts until the last step."""
        return -(-self.last_step // self.plan.get("optimizer_steps", 1))


def _read_log(run: Run) -> list[dict[str, Any]]:
    """Entries of the run log, which the run may still be writing."""
    path = Path(run.directory, RUN_LOG)
    # what follows the last line break is still being written
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    entries: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError):  # the run was killed while it wrote
            entries.append(json.loads(line))
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
            run.seconds = run.seconds if step > 0 else 0.0
            for part in ("model", "max_steps", "changed", "config", "trainer_config", "environment", "plan"):
                setattr(run, part, entry[part])
        elif entry["kind"] == "metrics":
            for name, value in entry["metrics"].items():
                if name not in ("step", "epoch") and isinstance(value, int | float | None):
                    points.setdefault(name, {})[step] = math.nan if value is None else float(value)
        else:
            sheet = Sheet(step, entry["mode"], entry["rows"])
            sheets[sheet[:2]] = sheet
        if entry["kind"] != "run" and run.written:
            run.seconds += entry["time"] - run.written
        run.written = entry["time"]
    run.sheets = [sheets[key] for key in sorted(sheets)]
    for name, values in points.items():
        if any(map(math.isfinite, values.values())):
            steps, numbers = zip(*sorted(values.items()))
            run.curves[name] = Curve(np.array(steps), np.array(numbers))
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
