"""The report of a run: one HTML file that needs no network, written from what the run logged."""

from typing import Any

__all__ = ["Run", "read_run", "write_report"]


def __getattr__(name: str) -> Any:
    if name == "write_report":
        from .page import write_report  # the plots are imported when they are drawn

        return write_report
    if name in ("RUN_LOG", "Run", "read_run"):
        from . import reading

        return getattr(reading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
