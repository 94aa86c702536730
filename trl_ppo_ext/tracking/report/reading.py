"""Reading a run: its log, or the `trainer_state.json` of its checkpoints, as curves, completions and settings."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .curves import Curve

RUN_LOG = "run_log.jsonl"  # what a run writes as it goes, in its output directory
REPORT = "report.html"  # beside it, unless it is asked for elsewhere
TRAINER_STATE = "trainer_state.json"
PPO_STATE = "ppo_state.json"  # beside it: the settings that a run's course depends on
NOT_METRICS = {"step", "epoch"}


class Sheet(NamedTuple):
    """Completions that were sampled at a step."""

    step: int  # optimizer step
    mode: str  # "train" or "eval"
    rows: list[dict[str, Any]]  # prompt, completion and scores of each


@dataclass
class Run:
    """What is known of a run."""

    name: str  # name of its directory
    directory: str  # the directory
    curves: dict[str, Curve] = field(default_factory=dict)  # metrics over steps
    sheets: list[Sheet] = field(default_factory=list)  # completions over steps
    config: dict[str, Any] = field(default_factory=dict)  # settings of PPO
    trainer_config: dict[str, Any] = field(default_factory=dict)  # settings of the Trainer
    environment: dict[str, Any] = field(default_factory=dict)  # versions and hardware
    about: dict[str, Any] = field(default_factory=dict)  # model, names of rewards, planned steps
    resumed_at: list[int] = field(default_factory=list)  # steps at which it was resumed
    written: float | None = None  # when the last line was written, in seconds since 1970
    notes: list[str] = field(default_factory=list)  # what is missing, or could not be read

    @property
    def logs(self) -> int:
        """Logs of training that there are: points of the longest of its curves."""
        trained = (curve for name, curve in self.curves.items() if not name.startswith("eval_"))
        return max((len(curve.finite().values) for curve in trained), default=0)

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        return max((int(curve.steps[-1]) for curve in self.curves.values()), default=0)

    @property
    def max_steps(self) -> int | None:
        """Steps that were planned, where it is known."""
        planned = self.about.get("max_steps")
        return planned if isinstance(planned, int) and planned > 0 else None


class _Points:
    """Values by metric and step; of a step that was logged twice, the later value counts."""

    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = {}

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if name in NOT_METRICS or isinstance(value, bool):
                continue
            if value is None or isinstance(value, int | float):
                self.points.setdefault(name, {})[step] = float("nan") if value is None else float(value)

    def forget_after(self, step: int) -> None:
        for name, points in self.points.items():
            self.points[name] = {at: value for at, value in points.items() if at <= step}

    def curves(self) -> dict[str, Curve]:
        curves = {name: Curve.of(points) for name, points in self.points.items() if points}
        for name in [name for name in curves if name.endswith("completions/repeated_ratio")]:
            distinct = name.replace("repeated_ratio", "distinct_ratio")
            curves[distinct] = Curve(curves[name].steps, 1 - curves[name].values)
        return curves


def _is_entry(entry: Any) -> bool:
    """Whether a line holds what a run writes."""
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        return False
    kind = entry.get("kind")
    if kind == "completions":
        rows = entry.get("rows")
        return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    return kind == "run" or (kind == "metrics" and isinstance(entry.get("metrics"), dict))


def read_lines(path: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Read a run log, also one that is being written."""
    entries, unread = [], 0
    with open(path, "rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                unread += line.endswith(b"\n") and bool(line.strip())
                continue
            if _is_entry(entry):
                entries.append(entry)
            else:
                unread += 1
    lines = "1 line" if unread == 1 else f"{unread} lines"
    return entries, [f"{lines} of {RUN_LOG} could not be read, and {'is' if unread == 1 else 'are'} left out."] * (
        unread > 0
    )


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _begin(run: Run, points: _Points, entry: dict[str, Any]) -> None:
    """A run begins or goes on: what an earlier one logged after this step, it will log again."""
    step = entry["step"]
    if step > 0:
        points.forget_after(step)
        run.sheets = [sheet for sheet in run.sheets if sheet.step <= step]
        run.resumed_at = [at for at in run.resumed_at if at < step] + [step]
    else:  # another run in the same place
        points.points, run.sheets, run.resumed_at = {}, [], []
    run.config = _as_dict(entry.get("config"))
    run.trainer_config = _as_dict(entry.get("trainer_config"))
    run.environment = _as_dict(entry.get("environment"))
    run.about = {key: entry.get(key) for key in ("model", "rewards", "monitors", "max_steps")}


def _read_log(run: Run, path: str, points: _Points) -> None:
    entries, run.notes = read_lines(path)
    for entry in entries:
        if entry["kind"] == "run":
            if entry["step"] > 0 and not points.points:
                _read_state(run, points, until=entry["step"])  # the log begins where the run was resumed
            _begin(run, points, entry)
        elif entry["kind"] == "metrics":
            points.add(entry["step"], entry["metrics"])
        else:
            sheet = Sheet(entry["step"], str(entry.get("mode")), entry["rows"])
            run.sheets = [other for other in run.sheets if other[:2] != sheet[:2]] + [sheet]
        if isinstance(entry.get("time"), int | float):
            run.written = entry["time"]


def _state_directories(directory: str) -> list[str]:
    """Where a `trainer_state.json` lies: in the directory itself, then in the newest checkpoint."""
    numbered = []
    for name in os.listdir(directory):
        match = re.fullmatch(r"checkpoint-(\d+)", name)
        if match:
            numbered.append((int(match[1]), os.path.join(directory, name)))
    places = [directory, *(path for _, path in sorted(numbered, reverse=True))]
    return [place for place in places if os.path.isfile(os.path.join(place, TRAINER_STATE))]


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            return _as_dict(json.load(file)) or None
    except (OSError, ValueError):
        return None


def _read_state(run: Run, points: _Points, until: int | None = None) -> bool:
    """Read the newest `trainer_state.json` that can be read."""
    for place in _state_directories(run.directory):
        state = _read_json(os.path.join(place, TRAINER_STATE))
        if state is None:
            run.notes.append(f"{os.path.join(place, TRAINER_STATE)} could not be read.")
            continue
        for entry in state.get("log_history") or []:
            if (
                isinstance(entry, dict)
                and type(entry.get("step")) is int
                and (until is None or entry["step"] <= until)
            ):
                points.add(entry["step"], entry)
        run.about = {"max_steps": state.get("max_steps")}
        settings = _as_dict((_read_json(os.path.join(place, PPO_STATE)) or {}).get("settings"))
        run.config = run.config or settings
        return True
    return False


def read_run(directory: str | os.PathLike) -> Run:
    """Read what a run wrote."""
    directory = os.fspath(directory)
    if not os.path.isdir(directory):
        raise ValueError(f"`{directory}` is no directory; give the `output_dir` of a run.")
    name = os.path.basename(os.path.abspath(directory))
    run, points = Run(name, directory), _Points()
    path = os.path.join(directory, RUN_LOG)
    if os.path.isfile(path):
        _read_log(run, path, points)
    if not points.points and _read_state(run, points):
        run.notes.append(f"There is no {RUN_LOG}: curves come from {TRAINER_STATE}, and there are no completions.")
    run.curves = points.curves()
    run.sheets.sort(key=lambda sheet: (sheet.step, sheet.mode))
    if not run.curves and not run.config:
        raise ValueError(
            f"`{directory}` has neither a {RUN_LOG} nor a {TRAINER_STATE} with anything in it, nor has a checkpoint "
            "in it; give the `output_dir` of a run."
        )
    if not run.curves:
        run.notes.append("Nothing is logged yet; `logging_steps` says how often it is.")
    return run


def read_runs(directories: Iterable[str | os.PathLike]) -> list[Run]:
    """Read several runs, and give them names that differ."""
    runs = [read_run(directory) for directory in directories]
    names = [run.name for run in runs]
    for number, run in enumerate(runs):
        if names.count(run.name) > 1:
            run.name = _longer_name(run, [other.directory for other in runs], number)
    return runs


def _longer_name(run: Run, directories: Sequence[str], number: int) -> str:
    """The directory as it was given, numbered if it was given twice."""
    again = directories[:number].count(run.directory)
    return run.directory if not again else f"{run.directory} ({again + 1})"
