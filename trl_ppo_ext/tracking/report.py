"""The report of a run: one HTML file with plots, advice, completions and settings that needs no
network."""

import glob
import os
import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup, escape
from pandas import Series

from ..redaction import shortened
from .advice import judge, number
from .reading import CREDIT, CUT, RUN_LOG, Sheet, evaluation_prefixes, read_run, smooth

try:
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, DataRange1d, HoverTool
    from bokeh.plotting import figure
    from bokeh.resources import Resources
except ImportError as error:
    raise ImportError(
        f'A report needs an extra ({error}); run pip install "trl_ppo_ext[report]".'
    ) from error


class Panel(NamedTuple):
    """A plot of some metrics."""

    title: str
    metrics: list[str]  # names or patterns, which match evaluations too
    hint: str = ""  # what to look for


_PANELS = Path(__file__).with_name("templates").joinpath("panels.yaml").read_text(encoding="utf-8")
SECTIONS = {
    section: [Panel(**panel) for panel in panels]
    for section, panels in yaml.safe_load(_PANELS).items()
}
# logged by the Trainer, or shown in another form
NOT_DRAWN = re.compile(
    r"(train|eval|eval_.+)_(runtime|samples_per_second|steps_per_second|model_preparation_time)"
    r"|train_loss|train_tokens_per_second|total_flos|num_tokens|num_input_tokens_seen"
)
FEW_POINTS = 30  # up to here, a curve is drawn with a mark at each point and without smoothing
MOST_SHEETS = 12  # of up to 60, so that the page stays small
MOST_PAIRS = 4  # of completions before and after
GRAY = "#7d828c"  # of text in plots, legible on light and on dark pages
# the palette of Okabe and Ito, which color-blind readers can tell apart
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#555555")


def _matches(name: str, patterns: Iterable[str], prefixes: list[str]) -> bool:
    """True for a metric of training or of an evaluation that one of the patterns matches."""
    own = {name.removeprefix(prefix) for prefix in ["", *prefixes]}
    return any(fnmatchcase(x, pattern) for x in own for pattern in patterns)


def _trained(name: str, names: Iterable[str], prefixes: list[str]) -> str:
    """The training metric that an evaluation metric belongs to."""
    own = {name.removeprefix(prefix) for prefix in prefixes}
    return min(own.intersection(names) - {name}, key=len, default=name)


def _draw(panel: Panel, curves: dict[str, Series]) -> dict[str, Any] | None:
    """Draw a panel as Bokeh's JSON; None without data.

    Each metric has a color, and its evaluations are dashed.
    """
    prefixes = evaluation_prefixes(curves)
    selected = list(
        dict.fromkeys(
            name
            for pattern in panel.metrics
            for name in curves
            if _matches(name, [pattern], prefixes)
        )
    )
    metrics = list(dict.fromkeys(_trained(name, selected, prefixes) for name in selected))
    if not selected:
        return None

    # 1. An empty plot. No tool is active, so that a finger on a phone scrolls the page.
    tools: dict[str, Any] = {
        "tools": "box_zoom,pan,reset,save",
        "active_drag": None,
        "active_scroll": None,
    }
    plot = figure(height=240, sizing_mode="stretch_width", x_axis_label="optimizer step", **tools)
    plot.toolbar_location = "above"
    plot.toolbar.autohide = True
    plot.toolbar.logo = None
    plot.min_border_right = 12
    for part in ("background_fill_color", "border_fill_color", "outline_line_color"):
        setattr(plot, part, None)  # the page's
    plot.axis.axis_label_text_color = GRAY
    plot.axis.major_label_text_color = GRAY
    plot.axis.axis_line_color = GRAY
    plot.axis.major_tick_line_color = GRAY
    plot.axis.minor_tick_line_color = None
    plot.grid.grid_line_color = GRAY
    plot.grid.grid_line_alpha = 0.2
    height = max(curves[name].abs().max() for name in selected)
    # of a plot whose curves are one constant
    plot.y_range = DataRange1d(default_span=height or 1.0)

    # 2. The lines: values and their moving average, or values with a mark at each.
    legend = []
    for name in selected:
        color = COLORS[metrics.index(_trained(name, selected, prefixes)) % len(COLORS)]
        if name.startswith("eval_"):
            dash = "dashed"
        else:
            dash = "solid"
        legend.append((name, color, dash))
        curve = curves[name]
        tooltips = [("step", "@step"), (name, "@y")]
        columns = {
            "step": curve.index,
            "y": curve,
            "smooth": smooth(curve) if len(curve) > FEW_POINTS else curve,
        }
        source = ColumnDataSource({key: np.asarray(x, np.float32) for key, x in columns.items()})
        style: dict[str, Any] = {"source": source, "line_color": color, "line_dash": dash}
        if len(curve) > FEW_POINTS:
            tooltips.append(("smoothed", "@smooth"))
            plot.line("step", "y", line_width=1, line_alpha=0.3, **style)
        else:
            plot.scatter("step", "y", size=5, color=color, source=source)
        touched = plot.line("step", "smooth", line_width=2, **style)
        plot.add_tools(
            HoverTool(tooltips=tooltips, renderers=[touched], mode="vline", visible=False)
        )
    return {"title": panel.title, "hint": panel.hint, "legend": legend, "item": json_item(plot)}


def draw_all(curves: dict[str, Series]) -> dict[str, list[dict[str, Any]]]:
    """Plots by section."""
    patterns = [
        pattern for panels in SECTIONS.values() for panel in panels for pattern in panel.metrics
    ]
    prefixes = evaluation_prefixes(curves)
    others = [
        name
        for name, curve in curves.items()
        if curve.any() and not _matches(name, patterns, prefixes)
    ]
    others = [name for name in others if not NOT_DRAWN.fullmatch(name)]
    others = list(dict.fromkeys(_trained(name, others, prefixes) for name in others))
    sections = SECTIONS | {"Other metrics": [Panel(name, [glob.escape(name)]) for name in others]}
    plots = {
        section: [_draw(panel, curves) for panel in panels] for section, panels in sections.items()
    }
    return {section: list(filter(None, drawn)) for section, drawn in plots.items() if any(drawn)}


class Shown(NamedTuple):
    """A completion of a step."""

    step: int
    row: dict[str, Any]


def before_and_after(sheets: list[Sheet]) -> list[tuple[Shown, Shown]]:
    """Completions of the same prompts in the first and the last sheet, of an evaluation if there
    are two."""
    modes = sorted({sheet.mode for sheet in sheets}, key=lambda mode: (mode == "train", mode))
    for mode in modes:
        of_mode = [sheet for sheet in sheets if sheet.mode == mode]
        first = of_mode[0]
        last = of_mode[-1]
        # prompts that were cut may differ in what is missing
        whole = [row for row in first.rows if not row["prompt"].endswith(CUT)]
        rows = {row["prompt"]: Shown(first.step, row) for row in whole}
        pairs = [
            (rows[row["prompt"]], Shown(last.step, row))
            for row in last.rows
            if row["prompt"] in rows
        ]
        if pairs and first.step < last.step:
            unique = {before.row["prompt"]: (before, after) for before, after in pairs}
            return list(unique.values())[:MOST_PAIRS]
    return []


def write_report(directory: str | os.PathLike, output: str | os.PathLike) -> Path:
    """Write the report of a run; raise a `ValueError` for a log that is damaged, or of another
    program."""
    try:
        page = _page(directory)
    except (
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        UndefinedError,
    ) as error:
        raise ValueError(
            f"`{Path(directory, RUN_LOG)}` must be the log of a run of this package, but has "
            f"entries of another form ({type(error).__name__}: {shortened(error)}); restore it, or "
            "pass the `output_dir` of another run."
        ) from error
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="replace", newline="\n")
    return path


def _page(directory: str | os.PathLike) -> str:
    """The report of a run as HTML."""
    run = read_run(directory)
    loader = PackageLoader("trl_ppo_ext.tracking")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "with_code": lambda text: Markup(
            re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
        ),
        "number": number,
        "duration": lambda seconds: str(timedelta(seconds=round(seconds))),
        "date": lambda time: f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC",
    }
    # Keys stay in Bokeh's order: an object is defined before it is referenced.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}

    # evenly over the steps, with the first and the last
    places = (
        np.linspace(0, len(run.sheets) - 1, min(len(run.sheets), MOST_SHEETS)).round().astype(int)
    )
    return environment.get_template("page.html").render(
        run=run,
        judgement=judge(run),
        sections=draw_all(run.curves),
        pairs=before_and_after(run.sheets),
        sheets=[run.sheets[place] for place in places],
        credit=CREDIT,
        bokeh=map(Markup, Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw),
        # the browser runs only scripts with it, and logged text cannot guess it
        nonce=secrets.token_urlsafe(),
        now=datetime.now(UTC).timestamp(),
    )
