"""The page: everything in one HTML file, and nothing in it that asks the network."""

import hashlib
import json
import os
import re
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from .advice import Advice, advise
from .curves import FEWEST, number, trend
from .panels import QUIET_AT_0, SECTIONS, Section, chosen, matches, other_panels
from .plots import COLOURS, Plot, draw
from .reading import Run, read_runs
from .sheets import chosen_sheets, safe_json

TEMPLATES = Path(__file__).parent / "templates"
MARK = "#B00020"  # a step that advice names
RESUMED = "#999999"  # a step at which a run was resumed
NAMES_ONLY = {"output_dir", "logging_dir", "run_name", "hub_model_id"}  # differ between any two runs
SUMMARY = {
    "reward": "Reward",
    "kl_per_completion": "KL of a completion, nats",
    "entropy": "Entropy, nats",
    "completions/mean_length": "Length, tokens",
    "completions/clipped_ratio": "Cut off",
    "value/explained_variance": "Explained variance",
    "tokens_per_second": "Tokens a second",
}


class Drawn(NamedTuple):
    """A section of the page."""

    title: str  # heading
    plots: list[tuple[int, Plot]]  # plots with their numbers


def with_code(text: str) -> Markup:
    """Text in which what stands between backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def shown(value: Any) -> str:
    """A setting as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _counts_nothing(run: Run, name: str) -> bool:
    counted = any(matches(name, pattern) for pattern in QUIET_AT_0)
    return counted and not np.nansum(run.curves[name].values)


def _marks(runs: list[Run], advice: dict[str, list[Advice]]) -> dict[str, dict[int, str]]:
    """Steps to mark in the plots of one run, by metric; `""` for all. Of several, nobody could tell whose they are."""
    if len(runs) > 1:
        return {}
    run = runs[0]
    marks: dict[str, dict[int, str]] = {"": dict.fromkeys(run.resumed_at, RESUMED)}
    for given in advice[run.name]:
        for name in given.metrics if given.step is not None else ():
            marks.setdefault(name, {})[int(given.step or 0)] = MARK
    return marks


def _draw_all(runs: list[Run], advice: dict[str, list[Advice]]) -> tuple[list[Drawn], list[str]]:
    names = list(dict.fromkeys(name for run in runs for name in run.curves if not _counts_nothing(run, name)))
    others, too_many = other_panels(names)
    sections, marks = [*SECTIONS, Section("Other metrics", tuple(others))], _marks(runs, advice)
    drawn, number = [], 0
    for section in sections:
        plots = []
        for panel in section.panels:
            here = dict(marks.get("", {}))
            drawn_here = chosen(panel, names)
            for name in drawn_here:
                here |= marks.get(name, {})
            plot = draw(panel, runs, here) if drawn_here else None
            if plot is not None:
                plots.append((number, plot))
                number += 1
        if plots:
            drawn.append(Drawn(section.title, plots))
    return drawn, too_many


def _summary(runs: list[Run]) -> list[dict[str, Any]]:
    """Where the main metrics start and end, for each run."""
    names = dict(SUMMARY)
    for name in dict.fromkeys(name for run in runs for name in run.curves):
        match = re.fullmatch(r"monitor/(.+)/mean", name)
        if match:
            names[name] = f"Monitored: {match[1]}"
    rows = []
    for name, label in names.items():
        cells = [_from_to(run, name) for run in runs]
        if any(cells):
            rows.append({"label": label, "cells": cells})
    return rows


def _from_to(run: Run, name: str) -> tuple[str, str] | None:
    curve = run.curves.get(name)
    values = curve.finite().values if curve is not None else np.empty(0)
    if not len(values):
        return None
    goes = trend(curve)
    start, end = (goes.start, goes.end) if goes is not None else (values[0], values[-1])
    return number(start), number(end)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings within settings, as `outer.inner`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return flat


def _table(runs: list[Run], part: str) -> list[dict[str, Any]]:
    """Settings or facts of a part, a column for each run."""
    parts = [_flat(getattr(run, part)) for run in runs]
    names = dict.fromkeys(name for settings in parts for name in settings)
    rows = []
    for name in names:
        cells = [shown(settings[name]) if name in settings else "–" for settings in parts]
        rows.append({"name": name, "cells": cells, "differs": len(set(cells)) > 1 and name not in NAMES_ONLY})
    return rows


def _status(run: Run) -> str:
    planned = run.max_steps
    text = f"step {run.last_step}" + (f" of {planned}" if planned else "")
    if planned and run.last_step < planned:
        text += " so far"
    if run.written is not None:
        text += f", written {datetime.fromtimestamp(run.written, UTC):%Y-%m-%d %H:%M} UTC"
    if run.resumed_at:
        text += f", resumed at step {', '.join(map(str, run.resumed_at))}"
    return text


@cache
def _scripts() -> tuple[str, ...]:
    """Bokeh and the page's own script, with line ends as a browser has them: their hashes are what it lets run."""
    bokeh = Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw
    own = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    return tuple(script.replace("\r\n", "\n").replace("\r", "\n") for script in [*bokeh, own])


def _policy(scripts: Sequence[str]) -> str:
    """What the browser allows: these scripts and no others, and no connection to anywhere."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"


def render(runs: list[Run]) -> str:
    """Write the page of one run, or of several over each other."""
    advice = {run.name: advise(run) for run in runs}
    sections, too_many = _draw_all(runs, advice)
    sheets, there = chosen_sheets(runs)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["with_code"] = with_code
    scripts = _scripts()
    parts = {part: _table(runs, part) for part in ("config", "trainer_config", "environment")}
    return environment.get_template("page.html").render(
        title=" / ".join(run.name for run in runs),
        runs=[
            {"run": run, "status": _status(run), "colour": COLOURS[at % len(COLOURS)]} for at, run in enumerate(runs)
        ],
        advice=advice,
        fewest=FEWEST,
        summary=_summary(runs),
        sections=sections,
        too_many=too_many,
        parts=parts,
        sheets_shown=len(sheets),
        sheets_there=there,
        plots=safe_json([plot.item for section in sections for _, plot in section.plots]),
        sheets=safe_json(sheets),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def write_report(directories: Sequence[str | os.PathLike], output: str | os.PathLike) -> Path:
    """Read runs, and write the report."""
    path = Path(output)
    page = render(read_runs(directories))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(page, encoding="utf-8", errors="replace", newline="\n")
    beside.replace(path)  # who has the last one open reloads a whole one
    return path
