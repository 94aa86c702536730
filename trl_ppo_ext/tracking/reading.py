"""Read the log of a run into curves, completions and settings."""

import fnmatch
import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pandas import Series

RUN_LOG = "run_log.jsonl"  # in the output directory of a run
REPORT = "report.html"  # next to it by default
CUT = "more characters)"  # at the end of a text that was too long
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
    start: dict[str, Any]  # model, settings and environment, as logged when training began last
    curves: dict[str, Series]  # finite values by ascending step
    sheets: list[Sheet]
    resumed_at: list[int]
    written: float  # time of the last entry, in seconds since 1970
    seconds: float  # of training, without repeated steps
    has_ended: bool = False  # not still running, killed, or failed
    best_step: int | None = None  # of the checkpoint whose weights it ended with

    @property
    def last_step(self) -> int:
        """Last step with a metric."""
        return max((int(curve.index[-1]) for curve in self.curves.values()), default=0)

    @property
    def rollouts(self) -> int:
        """Number of rollouts until the last step."""
        return self.rollouts_after(0)

    def rollouts_after(self, step: int) -> int:
        """Number of rollouts from a step to the last one."""
        return -(-(self.last_step - step) // self.start["plan"].get("optimizer_steps", 1))


def evaluation_prefixes(names: Iterable[str]) -> list[str]:
    """How metrics of evaluations begin; each set of several logs its runtime."""
    runtimes = fnmatch.filter(names, "eval_*_runtime")
    return ["eval_"] + [name.removesuffix("runtime") for name in runtimes]


def smooth(curve: Series) -> Series:
    """Centered moving average over a twelfth of a curve."""
    return curve.rolling(2 * (len(curve) // 24) + 1, center=True, min_periods=1).mean()


def curves_of(logs: Iterable[dict[str, Any]]) -> dict[str, Series]:
    """Finite values of each metric by step; of two values of one step the later one counts."""
    points: dict[str, dict[int, float]] = {}
    for log in logs:
        for name, value in log.items():
            if (
                name not in ("step", "epoch")
                and isinstance(value, int | float)
                and math.isfinite(value)
            ):
                points.setdefault(name, {})[log["step"]] = value
    return {name: Series(values, dtype=float) for name, values in points.items()}


def read_run(directory: str | os.PathLike) -> Run:
    """Read a run from its output directory."""
    # 1. Entries that count. What follows the last line break is still being written.
    path = Path(directory, RUN_LOG)
    entries = list[dict[str, Any]]()
    for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else []:
        with suppress(ValueError, RecursionError):  # the run was killed while it wrote
            entry = json.loads(line)
            if not isinstance(entry, dict) or "kind" not in entry:
                continue
            if entry["kind"] == "run":
                # A resumed run logs later steps again. A run from step 0 replaces an earlier run in
                # this directory.
                entries = [earlier for earlier in entries if 0 < entry["step"] >= earlier["step"]]
            entries.append(entry)
    starts = [entry for entry in entries if entry["kind"] == "run"]
    if not starts:
        raise ValueError(
            f"`{directory}` must have a non-empty {RUN_LOG}; pass the `output_dir` of a run."
        )

    # 2. Curves and completions
    last = entries[entries.index(starts[-1]) :]
    sheets = {(x["step"], x["mode"]): x["rows"] for x in entries if x["kind"] == "completions"}
    return Run(
        name=os.path.basename(os.path.abspath(directory)),
        start=starts[-1],
        curves=curves_of(
            x["metrics"] | {"step": x["step"]} for x in entries if x["kind"] == "metrics"
        ),
        sheets=[Sheet(*key, sheets[key]) for key in sorted(sheets)],
        resumed_at=sorted({entry["step"] for entry in starts if entry["step"] > 0}),
        written=entries[-1]["time"],
        seconds=sum(
            later["time"] - entry["time"]
            for entry, later in pairwise(entries)
            if later["kind"] != "run"
        ),
        has_ended=any(x["kind"] == "end" for x in last),
        best_step=next((x["step"] for x in last if x["kind"] == "best"), None),
    )
