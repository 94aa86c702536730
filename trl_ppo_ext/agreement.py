"""What may fail on one process fails on all: a process that raised alone would leave the others waiting for it."""

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import gather_object

from .redaction import shortened

T = TypeVar("T")


class ElsewhereError(OSError):
    """Raised where a step succeeded on this process and failed on another."""


def on_every_process(action: Callable[[], T], *failures: type[Exception]) -> T:
    """Run something on every process; where it fails on one, it fails on all."""
    result, error = None, None
    try:
        result = action()
    except failures as caught:
        error = caught
    told = gather_object([None if error is None else f"{type(error).__name__}: {shortened(error)}"])
    if error is not None:
        raise error
    for process, said in enumerate(told):
        if said is not None:
            raise ElsewhereError(f"on process {process}: {said}")
    return result  # type: ignore[return-value]
