"""Rewards that are Python functions, with TRL's signature."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from .base import ScoringBatch

# keyword arguments of every function, besides the dataset's columns
PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class FunctionReward:
    """Function with the signature of TRL's reward functions. It may be asynchronous."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.name = _name(function)

    def score(self, batch: ScoringBatch) -> Any:
        """Call the function."""
        return self.function(**{name: getattr(batch, name) for name in PASSED}, **batch.columns)


def check_signature(function: Callable, columns: Iterable[str] | None = None, dataset: str = "the dataset") -> None:
    """Check that a function can be called, before anything is loaded for it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    parameters = signature.parameters.values()
    collects = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [x.name for x in parameters if x.default is x.empty and x.kind not in collects]
    names = [*PASSED, *(needed if columns is None else columns)]
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters)
        missing = [name for name in needed if name not in names]
        unknown = [] if takes_all else [name for name in names if name not in signature.parameters]
        causes, remedies = [], []
        if missing:
            causes.append(f"it needs {_listed(missing)}, which nothing provides")
            remedies.append("rename that parameter, give it a default, or add the column")
        if unknown:
            causes.append(f"it does not take {_listed(unknown)}")
            remedies.append("end its parameters with `**kwargs`")
        if not causes:
            causes, remedies = [str(error)], ["make its parameters accept keywords"]
        available = "" if columns is None else f" (available: {_listed(columns) or 'none'})"
        raise ValueError(
            f"The reward function `{_name(function)}` cannot be called: {', and '.join(causes)}. It gets "
            f"{_listed(PASSED)} and the other columns of {dataset}{available}, all by keyword: {'; '.join(remedies)}."
        ) from None


def _name(function: Callable) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
