"""The report of a run: one HTML file that needs no network, written from the run's log."""

import os
from collections.abc import Sequence
from pathlib import Path

from .reading import read_runs

__all__ = ["write_report"]


def write_report(directories: Sequence[str | os.PathLike], output: str | os.PathLike) -> Path:
    """Write the report of one run, or of several runs over each other."""
    from .page import render  # imports Bokeh and Jinja2, which only a report needs

    path = Path(output)
    page = render(read_runs(directories))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Rename a finished file, so that a browser that reloads the report never sees half of it.
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(page, encoding="utf-8", errors="replace", newline="\n")
    return partial.replace(path)
