"""Plots of a report, drawn by Bokeh in the browser from numbers that the page holds."""

from typing import Any, NamedTuple

import numpy as np
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, DataRange1d, HoverTool
from bokeh.plotting import figure

from .curves import Curve
from .panels import Panel, chosen, trained
from .reading import Run

# Okabe and Ito's colours, which colour-blind readers tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#555555")
DASHES = ("solid", "dashed", "dotted", "dotdash")
FEW_POINTS = 30  # up to so many are drawn as they are, with a mark at each
MOST_LINES = 16
HEIGHT = 240


class Line(NamedTuple):
    """A curve in a plot."""

    label: str  # name in the legend
    colour: str  # colour, as CSS has it
    dash: str  # one of DASHES
    curve: Curve  # the curve


class Plot(NamedTuple):
    """A plot as the page has it."""

    title: str  # heading
    look_for: str  # what to look for
    legend: list[Line]  # its curves
    item: dict[str, Any]  # what Bokeh draws
    left_out: int = 0  # curves for which there was no room


def _lines(panel: Panel, runs: list[Run]) -> list[Line]:
    """Curves of a panel: of one run, a colour for each metric; of several, a colour for each run, metrics by dash."""
    names = chosen(panel, dict.fromkeys(name for run in runs for name in run.curves))
    if panel.kind == "scaled":
        names = [name for name in names if not name.startswith("eval_")]
    metrics = list(dict.fromkeys(trained(name, names) for name in names))
    lines = []
    for at, run in enumerate(runs):
        for name in (name for name in names if name in run.curves):
            index = metrics.index(trained(name, names))
            if len(runs) == 1:
                label, colour = name, COLOURS[index % len(COLOURS)]
                dash = "dashed" if name.startswith("eval_") else "solid"
            else:
                label = run.name if len(names) == 1 else f"{run.name}: {name}"
                colour, dash = COLOURS[at % len(COLOURS)], DASHES[names.index(name) % len(DASHES)]
            lines.append(Line(label, colour, dash, run.curves[name]))
    return [line for line in lines if len(line.curve.finite().values)]


def _figure(label: str) -> figure:
    """An empty plot that lets a finger scroll the page: tools are off until they are chosen."""
    plot = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        tools="box_zoom,pan,reset,save",
        active_drag=None,
        active_scroll=None,
        toolbar_location="above",
        x_axis_label=label,
        output_backend="canvas",
    )
    plot.toolbar.autohide, plot.toolbar.logo = True, None
    plot.min_border_right = 12
    plot.outline_line_color = plot.xgrid.grid_line_color = None
    plot.axis.axis_line_color = plot.axis.minor_tick_line_color = None
    plot.axis.major_label_text_font_size = plot.axis.axis_label_text_font_size = "12px"
    plot.axis.axis_label_text_font_style = "normal"
    return plot


def _columns(curve: Curve) -> dict[str, np.ndarray]:
    """What is drawn and shown at a touch, in numbers of half the size."""
    smooth = curve.smooth()
    thin = curve.thinned()
    kept = np.searchsorted(curve.steps, thin.steps)
    return {
        "step": thin.steps.astype(np.int32),
        "value": thin.values.astype(np.float32),
        "smooth": smooth.values[kept].astype(np.float32),
    }


def _draw(plot: figure, line: Line, alpha: float) -> None:
    source = ColumnDataSource(_columns(line.curve))
    style: dict[str, Any] = {"line_color": line.colour, "line_dash": line.dash, "source": source}
    if len(line.curve.values) <= FEW_POINTS:
        drawn = plot.line("step", "value", line_width=2, **style)
        plot.scatter("step", "value", size=5, color=line.colour, source=source)
        shown = [("step", "@step"), (line.label, "@value{%.4g}")]
    else:
        plot.line("step", "value", line_width=1, line_alpha=alpha, **style)
        drawn = plot.line("step", "smooth", line_width=2, **style)
        shown = [("step", "@step"), (line.label, "@value{%.4g}"), ("smoothed", "@smooth{%.4g}")]
    formatters: dict[str, Any] = {"@value": "printf", "@smooth": "printf"}
    plot.add_tools(HoverTool(tooltips=shown, formatters=formatters, renderers=[drawn], mode="vline", visible=False))


def _scaled(curve: Curve) -> Curve:
    """The smoothed curve, its least value at 0 and its largest at 1."""
    values = curve.smooth().values
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return Curve(curve.steps, (values - low) / (high - low) if high > low else np.full_like(values, 0.5))


def _span(lines: list[Line]) -> float:
    """Height of a plot whose curves are all one constant."""
    return max(float(np.nanmax(np.abs(line.curve.values))) for line in lines) or 1.0


def over_steps(panel: Panel, runs: list[Run], marks: dict[int, str]) -> Plot | None:
    """Draw metrics over steps."""
    lines = _lines(panel, runs)
    if panel.kind == "scaled":
        lines = [line._replace(curve=_scaled(line.curve)) for line in lines if len(line.curve.values) > 1]
        if len(lines) <= len(runs):
            return None  # nothing to hold against one another
    if not lines:
        return None
    plot = _figure("optimizer step")
    for line in lines[:MOST_LINES]:
        _draw(plot, line, alpha=0.3 if len(runs) == 1 else 0.15)
    plot.y_range = DataRange1d(default_span=_span(lines[:MOST_LINES]))
    for step, colour in marks.items():
        plot.vspan(x=[step], line_color=colour, line_dash="dotted")
    return Plot(
        panel.title, panel.look_for, lines[:MOST_LINES], dict(json_item(plot)), max(len(lines) - MOST_LINES, 0)
    )


def against(panel: Panel, runs: list[Run]) -> Plot | None:
    """Draw one metric over another, smoothed, with a mark at the last step."""
    upward, along = panel.metrics
    plot = _figure(along)
    legend = []
    for at, run in enumerate(runs):
        curve, over = run.curves.get(upward), run.curves.get(along)
        if curve is None or over is None:
            continue
        curve, over = curve.finite(), over.finite()
        steps, first, second = np.intersect1d(curve.steps, over.steps, return_indices=True)
        if not len(steps):
            continue
        y, x = Curve(steps, curve.values[first]).smooth(), Curve(steps, over.values[second]).smooth()
        kept = np.unique(np.linspace(0, len(steps) - 1, 80).astype(int))
        line = Line(run.name if len(runs) > 1 else upward, COLOURS[at % len(COLOURS)], "solid", Curve(steps, y.values))
        _trace(plot, line, steps[kept], x.values[kept], y.values[kept])
        legend.append(line)
    return Plot(panel.title, panel.look_for, legend, dict(json_item(plot))) if legend else None


def _trace(plot: figure, line: Line, steps: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    source = ColumnDataSource({"step": steps.astype(np.int32), "x": x.astype(np.float32), "y": y.astype(np.float32)})
    plot.line("x", "y", line_color=line.colour, line_width=1.5, line_alpha=0.6, source=source)
    dots = plot.scatter("x", "y", size=4, color=line.colour, source=source)
    plot.scatter(x[-1:], y[-1:], size=11, color=line.colour, marker="star")
    shown = [("step", "@step"), (str(plot.xaxis[0].axis_label), "@x{%.4g}"), (line.label, "@y{%.4g}")]
    formatters: dict[str, Any] = {"@x": "printf", "@y": "printf"}
    plot.add_tools(HoverTool(tooltips=shown, formatters=formatters, renderers=[dots], visible=False))


def draw(panel: Panel, runs: list[Run], marks: dict[int, str]) -> Plot | None:
    """Draw a panel."""
    return against(panel, runs) if panel.kind == "against" else over_steps(panel, runs, marks)
