"""The page of a report: one HTML file with plots, advice, completions and settings, without any network access."""

import json
import math
import re
import secrets
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from .advice import FEWEST, Advice, advise, number, trend
from .plots import COLORS, draw_all
from .reading import Run, Sheet

TEMPLATES = Path(__file__).parent / "templates"
ADVISED, RESUMED = "#B00020", "#999999"  # colors of marked steps
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


def _with_code(text: str) -> Markup:
    """Escaped text with its backticks turned into code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _marks(runs: list[Run], advice: list[list[Advice]]) -> dict[str, dict[int, str]]:
    """Steps to mark in the plots of a single run, by metric; `""` stands for all metrics."""
    if len(runs) > 1:  # a mark could not show which run it belongs to
        return {}
    marks: dict[str, dict[int, str]] = {"": dict.fromkeys(runs[0].resumed_at, RESUMED)}
    for item in advice[0]:
        if item.step is not None:
            for name in item.metrics:
                marks.setdefault(name, {})[item.step] = ADVISED
    return marks


def _from_to(run: Run, name: str) -> tuple[str, str] | None:
    """Start and end of a metric."""
    curve = run.curves.get(name)
    if curve is None or not len(curve.finite().values):
        return None
    goes, values = trend(curve), curve.finite().values
    start, end = (goes.start, goes.end) if goes is not None else (values[0], values[-1])
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
    columns = [_flat(of_run) for of_run in settings]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = [column.get(name, "–") for column in columns]
        rows.append({"name": name, "cells": cells, "differs": len(set(cells)) > 1 and name not in NAMES_ONLY})
    return rows


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """A logged completion as text; every type in a log can be wrong."""

    def numbers(scores: Any) -> list[tuple[str, str]]:
        items = scores.items() if isinstance(scores, dict) else ()
        valid = ((name, value if type(value) in (int, float) else math.nan) for name, value in items)
        return [(name, f"{value:.5g}" if math.isfinite(value) else "–") for name, value in valid]

    rewards, monitors = numbers(row.get("rewards")), numbers(row.get("monitors"))
    ((_, score),) = numbers({"score": row.get("score")})
    scores = [("score", score), *(rewards if len(rewards) > 1 else ())]
    scores += [(f"monitored {name}", value) for name, value in monitors]
    scores += numbers({"KL": row.get("kl"), "tokens": row.get("tokens")})
    texts = [("prompt", row.get("prompt", "")), ("completion", row.get("completion", ""))]
    extra = row.get("extra")
    texts += [("prompt", f"{name}: {extra[name]}") for name in extra] if isinstance(extra, dict) else []
    return {"score": score, "scores": scores, "truncated": row.get("ended") is False, "texts": texts}


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


def _columns(runs: list[Run]) -> list[dict[str, Any]]:
    """Columns of completions; open are the first, middle and last of one run, or the last of each of several."""
    columns = []
    for run in runs:
        sheets = chosen_sheets(run, ROOM / len(runs))
        trained = [sheet for sheet in sheets if sheet.mode != "eval"] or sheets
        shown = [trained[place] for place in (0, (len(trained) - 1) // 2, -1)] if sheets else []
        for sheet in sheets:
            label = f"step {sheet.step}" + (", evaluation" if sheet.mode == "eval" else "")
            columns.append(
                {
                    "label": label if len(runs) == 1 else f"{run.name}: {label}",
                    "rows": [_row(row) for row in sheet.rows],
                    "open": sheet in shown if len(runs) == 1 else sheet is sheets[-1],
                }
            )
    return columns


def render(runs: list[Run]) -> str:
    """Render the page of one run, or of several runs over each other."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["with_code"] = _with_code
    environment.filters["date"] = lambda time: f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
    # Keys stay in Bokeh's order: an object is defined before it is referred to.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    bokeh = Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw
    advice = [advise(run) for run in runs]
    plots, too_many = draw_all(runs, _marks(runs, advice))
    names = dict.fromkeys(name for run in runs for name in run.curves)
    monitors = {name: f"Monitored: {name[8:-5]}" for name in names if re.fullmatch(r"monitor/.+/mean", name)}
    summary = [(label, [_from_to(run, name) for run in runs]) for name, label in (SUMMARY | monitors).items()]
    return environment.get_template("page.html").render(
        title=" / ".join(run.name for run in runs),
        runs=[
            {"run": run, "color": color, "advice": of_run} for run, color, of_run in zip(runs, cycle(COLORS), advice)
        ],
        fewest=FEWEST,
        summary=[(label, cells) for label, cells in summary if any(cells)],
        sections=plots,
        too_many=too_many,
        parts={
            "PPO": _table([run.config for run in runs]),
            "Trainer": _table([run.trainer_config for run in runs]),
            "Environment": _table([run.environment for run in runs]),
        },
        columns=_columns(runs),
        logged_columns=sum(len(run.sheets) for run in runs),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in [*bokeh, (TEMPLATES / "page.js").read_text(encoding="utf-8")]],
        nonce=secrets.token_urlsafe(),  # the browser runs only scripts that have it, which no logged text can know
        now=datetime.now(UTC).timestamp(),
    )
