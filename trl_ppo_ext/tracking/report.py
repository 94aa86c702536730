"""The report of a run: one HTML file with plots, advice, completions and settings that needs no network."""

import json
import os
import re
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from pandas import json_normalize

from .advice import Trend, advise, number, verdict
from .reading import CREDIT, INSTALL, MAIN_METRICS, Run, Sheet, read_run

ROOM = 1_500_000  # bytes of completions per page
MOST_SHEETS = 40


def write_report(directory: str | os.PathLike, output: str | os.PathLike) -> Path:
    """Write the report of a run."""
    path = Path(output)
    page = render(read_run(directory))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="replace", newline="\n")
    return path


def chosen_sheets(run: Run, room: float = ROOM) -> list[Sheet]:
    """Completions that fit in `room` bytes: evenly over the steps, with the first and the last step."""
    if not run.sheets:
        return []
    largest = max(len(escape(sheet.rows).encode(errors="replace")) for sheet in run.sheets)
    count = min(len(run.sheets), MOST_SHEETS, max(int(room / largest), 2))
    share = min(room / (count * largest), 1.0)  # of the rows, if even two sheets do not fit
    sheets = [run.sheets[place] for place in np.linspace(0, len(run.sheets) - 1, count).round().astype(int)]
    return [sheet._replace(rows=sheet.rows[: max(int(len(sheet.rows) * share), 1)]) for sheet in sheets]


def _settings(settings: dict[str, Any]) -> dict[str, str]:
    """Settings as text; nested ones are named `outer.inner`."""
    flat = json_normalize([settings]).astype(object).to_dict("records")[0]
    return {name: x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for name, x in flat.items()}


def render(run: Run) -> str:
    """Render the page of a run."""
    try:
        from bokeh.resources import Resources

        from .plots import draw_all
    except ImportError as error:
        raise ValueError(f"A report needs bokeh, which cannot be imported; run {INSTALL}.") from error
    loader = PackageLoader("trl_ppo_ext.tracking")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "with_code": lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))),
        "number": number,
        "duration": lambda seconds: str(timedelta(seconds=round(seconds))),
        "date": lambda time: f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC",
    }
    # Keys stay in Bokeh's order: an object is defined before it is referenced.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}

    # 1. Advice, and the steps to mark in the plots of a metric.
    advice = advise(run)
    marks = [(name, item.step) for item in advice if item.step is not None for name in item.metrics]

    # 2. Start and end of the main metrics.
    monitors = {name: f"monitored {name[8:-5]}" for name in run.curves if re.fullmatch(r"monitor/.+/mean", name)}
    main = MAIN_METRICS | {"completions/clipped_ratio": "truncated"} | monitors
    courses = {label: Trend(run.curves.get(name)) for name, label in main.items()}

    # 3. Completions. The first, middle and last of training are open.
    sheets = chosen_sheets(run)
    trained = [sheet for sheet in sheets if not sheet.mode.startswith("eval")] or sheets
    shown = [trained[place] for place in (0, (len(trained) - 1) // 2, -1)] if sheets else []

    # 4. The page.
    parts = {"PPO": run.config, "Trainer": run.trainer_config, "Environment": run.environment}
    return environment.get_template("page.html").render(
        run=run,
        advice=advice,
        verdict=verdict(run, advice),
        courses={label: course for label, course in courses.items() if len(course.values)},
        sections=draw_all(run, marks),
        parts={heading: _settings(settings) for heading, settings in parts.items() if settings},
        sheets=sheets,
        shown=shown,
        credit=CREDIT,
        bokeh=map(Markup, Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw),
        nonce=secrets.token_urlsafe(),  # the browser runs only scripts with it, and logged text cannot guess it
        now=datetime.now(UTC).timestamp(),
    )
