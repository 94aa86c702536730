"""Failures on one process raise on all: a process that raised alone would leave the others waiting."""

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import gather_object

from .redaction import shortened

T = TypeVar("T")


class ElsewhereError(OSError):
    """Raised when a step succeeded on this process and failed on another."""


def on_every_process(action: Callable[[], T], *failures: type[Exception]) -> T:
    """Run an action on every process; if it fails on one, raise on all."""
    result, error = None, None
    try:
        result = action()
    except failures as caught:
        error = caught
    messages = gather_object([None if error is None else f"{type(error).__name__}: {shortened(error)}"])
    if error is not None:
        raise error
    for process, message in enumerate(messages):
        if message is not None:
            raise ElsewhereError(f"on process {process}: {message}")
    return result  # type: ignore[return-value]
