"""The report of a run: one HTML file with plots, advice, completions and settings that needs no network."""

import json
import os
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from .advice import NO_TREND, advise, number, trend, verdict
from .plots import COLORS, WARNING, draw_all
from .reading import CREDIT, Run, Sheet, read_runs

TEMPLATES = Path(__file__).parent / "templates"
RESUMED = "#999999"  # color of steps at which a run was resumed
NAMES_ONLY = {"output_dir", "logging_dir", "run_name", "hub_model_id"}  # differ between any two runs
ROOM = 1_500_000  # bytes of completions per page
MOST_SHEETS = 40  # per run
SUMMARY = {
    "reward": "Reward",
    "kl_per_completion": "KL per completion, nats",
    "entropy": "Entropy, nats",
    "completions/mean_length": "Length, tokens",
    "completions/clipped_ratio": "Truncated",
    "value/explained_variance": "Explained variance",
    "tokens_per_second": "Tokens per second",
}


def write_report(directories: Sequence[str | os.PathLike], output: str | os.PathLike) -> Path:
    """Write the report of one run, or of several runs in the same plots."""
    path = Path(output)
    page = render(read_runs(directories))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Rename a finished file, so that a browser never loads a partial report.
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(page, encoding="utf-8", errors="replace", newline="\n")
    return partial.replace(path)


def _with_code(text: str) -> Markup:
    """Escaped text with its backticks turned into code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _scores(scores: dict[str, float | None]) -> list[tuple[str, str]]:
    """Names and numbers as text."""
    return [(name, "–" if value is None else f"{value:.5g}") for name, value in scores.items()]


def _turns(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns of a completion for the page, with the lowest and the highest value of the episode, or 0."""
    turns = row["turns"]
    values = [0.0, *(turn["value"] for turn in turns if turn["value"] is not None)]
    scale = {"low": min(values), "high": max(values)}
    return [turn | scale | {"numbers": {x: turn[x] for x in CREDIT if turn[x] is not None}} for turn in turns]


def _from_to(run: Run, name: str) -> tuple[str, str] | None:
    """Start and end of a metric."""
    if name not in run.curves:
        return None
    values = run.curves[name].finite().values
    course = trend(run.curves[name])
    start, end = (values[0], values[-1]) if course is NO_TREND else (course.start, course.end)
    return number(start), number(end)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as text, named `outer.inner`."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def _table(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings by row, runs by column."""
    columns = [_flat(run_settings) for run_settings in settings]
    cells = {name: [column.get(name, "–") for column in columns] for names in columns for name in names}
    return [
        {"name": name, "cells": row, "differs": len(set(row)) > 1 and name not in NAMES_ONLY}
        for name, row in cells.items()
    ]


def chosen_sheets(run: Run, room: float = ROOM) -> list[Sheet]:
    """Completions that fit in `room` bytes: evenly over the steps, with the first and the last step."""
    if not run.sheets:
        return []
    largest = max(len(escape(sheet.rows).encode(errors="replace")) for sheet in run.sheets)
    count = min(len(run.sheets), MOST_SHEETS, max(int(room / largest), 2))
    share = min(room / (count * largest), 1.0)  # of the rows, if even two sheets do not fit
    places = np.linspace(0, len(run.sheets) - 1, count).round().astype(int)
    sheets = [run.sheets[place] for place in places]
    return [sheet._replace(rows=sheet.rows[: max(int(len(sheet.rows) * share), 1)]) for sheet in sheets]


def render(runs: list[Run]) -> str:
    """Render the page of one run, or of several runs in the same plots."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["with_code"] = _with_code
    environment.filters["scores"] = _scores
    environment.filters["turns"] = _turns
    environment.filters["number"] = number
    environment.filters["duration"] = lambda seconds: str(timedelta(seconds=round(seconds)))
    environment.filters["date"] = lambda time: f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
    # Keys stay in Bokeh's order: an object is defined before it is referenced.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}

    # 1. Advice, and the steps to mark in the plots of a single run; `""` stands for all metrics.
    advice = [advise(run) for run in runs]
    marks: dict[str, dict[int, str]] = {}
    if len(runs) == 1:  # with several runs, a mark would be ambiguous
        marks[""] = dict.fromkeys(runs[0].resumed_at, RESUMED)
        for item in advice[0]:
            if item.step is not None:
                for name in item.metrics:
                    marks.setdefault(name, {})[item.step] = WARNING

    # 2. Start and end of the main metrics.
    names = dict.fromkeys(name for run in runs for name in run.curves)
    monitors = {name: f"Monitored: {name[8:-5]}" for name in names if re.fullmatch(r"monitor/.+/mean", name)}
    summary = [(label, [_from_to(run, name) for run in runs]) for name, label in (SUMMARY | monitors).items()]

    # 3. Completions. Open are the first, middle and last of one run, or the last of each of several.
    columns = []
    for run in runs:
        sheets = chosen_sheets(run, ROOM / len(runs))
        trained = [sheet for sheet in sheets if not sheet.mode.startswith("eval")] or sheets
        shown = [trained[place] for place in (0, (len(trained) - 1) // 2, -1)] if sheets else []
        columns += [(run, sheet, sheet in (shown if len(runs) == 1 else sheets[-1:])) for sheet in sheets]

    # 4. The page.
    bokeh = Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw
    return environment.get_template("page.html").render(
        title=" / ".join(run.name for run in runs),
        runs=[
            {"run": run, "color": color, "advice": rows, "verdict": verdict(run, rows)}
            for run, color, rows in zip(runs, cycle(COLORS), advice)
        ],
        summary=[(label, cells) for label, cells in summary if any(cells)],
        sections=draw_all(runs, marks),
        parts={
            "PPO": _table([run.config for run in runs]),
            "Trainer": _table([run.trainer_config for run in runs]),
            "Environment": _table([run.environment for run in runs]),
        },
        changed={name for run in runs for name in run.changed},
        columns=columns,
        logged_columns=sum(len(run.sheets) for run in runs),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in [*bokeh, (TEMPLATES / "page.js").read_text(encoding="utf-8")]],
        nonce=secrets.token_urlsafe(),  # the browser runs only scripts with it, and logged text cannot guess it
        now=datetime.now(UTC).timestamp(),
    )
