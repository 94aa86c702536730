"""Rewards that are Python functions, with TRL's signature."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from .base import ScoringBatch


def function_name(function: Callable) -> str:
    """Name under which a function's scores are logged.

    Args:
        function (`Callable`): Function, `functools.partial` or callable object.

    Returns:
        `str`: Its name.
    """
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _is_async(function: Callable) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class FunctionReward:
    """A function `f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) -> list`.

    Args:
        function (`Callable`): The function, synchronous or asynchronous; everything is passed by keyword.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.name = function_name(function)
        self.is_async = _is_async(function)

    def score(self, batch: ScoringBatch) -> Any:
        """Call the function.

        Args:
            batch ([`ScoringBatch`]): Prompts and completions.

        Returns:
            `list` or `Coroutine`: What the function gives.
        """
        return self.function(
            prompts=batch.prompts,
            completions=batch.completions,
            completion_ids=batch.completion_ids,
            trainer_state=batch.trainer_state,
            log_extra=batch.log_extra,
            log_metric=batch.log_metric,
            **batch.columns,
        )
