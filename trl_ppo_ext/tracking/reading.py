"""Read the log of a run into curves, completions and settings."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pandas import Series

RUN_LOG = "run_log.jsonl"  # in the output directory of a run
REPORT = "report.html"  # next to it by default
INSTALL = 'pip install "trl_ppo_ext[report]"'  # what draws it
# label of each, on the terminal and in the report
MAIN_METRICS = {
    "reward": "reward",
    "kl_per_completion": "KL",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "value/explained_variance": "critic",
    "tokens_per_second": "tokens/s",
}
CREDIT = ("reward", "value", "advantage")  # numbers of a turn of the policy


class Sheet(NamedTuple):
    """Completions sampled at one step."""

    step: int
    mode: str  # "train", "eval" or "eval_NAME"
    rows: list[dict[str, Any]]  # prompt, turns and scores


@dataclass
class Run:
    """Metrics, completions and settings that a run logged."""

    name: str
    curves: dict[str, Series] = field(default_factory=dict)  # values by ascending step, at least one is finite
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
        """Last step with a metric."""
        return max((int(curve.index[-1]) for curve in self.curves.values()), default=0)

    @property
    def rollouts(self) -> int:
        """Number of rollouts until the last step."""
        return -(-self.last_step // self.plan.get("optimizer_steps", 1))


def smooth(curve: Series) -> Series:
    """Centered moving average over a twelfth of a curve, without NaN."""
    return curve.rolling(2 * (len(curve) // 24) + 1, center=True, min_periods=1).mean()


def read_run(directory: str | os.PathLike) -> Run:
    """Read a run from its output directory. For a step that was logged twice, the later entry counts."""
    # 1. Entries. What follows the last line break is still being written.
    path, entries = Path(directory, RUN_LOG), list[dict[str, Any]]()
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for line in lines:
        with suppress(ValueError):  # the run was killed while it wrote
            entries.append(json.loads(line))
    if not entries:
        raise ValueError(f"`{directory}` must have a non-empty {RUN_LOG}; pass the `output_dir` of a run.")
    run = Run(os.path.basename(os.path.abspath(directory)))
    if len(entries) < len(lines):
        run.notes.append(f"{len(lines) - len(entries)} line(s) of {RUN_LOG} could not be read and were skipped.")

    # 2. Points and completions.
    points: dict[str, dict[int, float | None]] = {}
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
                    points.setdefault(name, {})[step] = value
        else:
            sheets[step, entry["mode"]] = Sheet(step, entry["mode"], entry["rows"])
        if entry["kind"] != "run" and run.written:
            run.seconds += entry["time"] - run.written
        run.written = entry["time"]
    run.sheets = [sheets[key] for key in sorted(sheets)]

    # 3. Curves.
    curves = {name: Series(values, dtype=float).sort_index() for name, values in points.items()}
    run.curves = {name: curve for name, curve in curves.items() if curve.notna().any()}
    if not run.curves:
        run.notes.append("Nothing is logged yet; `logging_steps` sets how often the run logs.")
    return run
