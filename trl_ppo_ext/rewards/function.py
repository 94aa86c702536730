"""Rewards that are Python functions, with TRL's signature."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from .base import ScoringBatch

# what every function is given, by keyword, besides the dataset's columns
PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def function_name(function: Callable) -> str:
    """Name under which a function's scores are logged."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _is_async(function: Callable) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def check_signature(function: Callable, columns: Iterable[str] | None = None, dataset: str = "the dataset") -> None:
    """Refuse a function that could not be called, before anything is loaded for it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not everything that is written in C tells
        return
    needed = [name for name, x in signature.parameters.items() if x.default is x.empty and x.kind not in _COLLECTS]
    given = [*PASSED, *(needed if columns is None else columns)]
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError as error:
        why, remedy = _explained(signature, [name for name in needed if name not in given], given, error)
        found = "" if columns is None else f" (there are: {_listed(columns) or 'none'})"
        raise ValueError(
            f"The reward function `{function_name(function)}` cannot be called: {why}. It is given {_listed(PASSED)} "
            f"and the other columns of {dataset}{found}, all by keyword: {remedy}."
        ) from None


_COLLECTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _explained(
    signature: inspect.Signature, missing: list[str], given: list[str], error: TypeError
) -> tuple[str, str]:
    """Why what is given does not fit a signature, and what to do."""
    parameters = signature.parameters
    takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    refused = [] if takes_all else [name for name in given if name not in parameters]
    found = []
    if missing:
        remedy = "rename that parameter, give it a default, or add the column"
        found.append((f"it needs {_listed(missing)}, which nothing gives", remedy))
    if refused:
        remedy = "end its parameters with `**kwargs`, for what it does not use"
        found.append((f"it does not take {_listed(refused)}", remedy))
    whys, remedies = zip(*(found or [(str(error), "let it take them so")]))
    return ", and ".join(whys), "; ".join(remedies)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


class FunctionReward:
    """A function with the signature of TRL's reward functions."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.name = function_name(function)
        self.is_async = _is_async(function)

    def score(self, batch: ScoringBatch) -> Any:
        """Call the function."""
        return self.function(**{name: getattr(batch, name) for name in PASSED}, **batch.columns)
