"""Rewards that are Python functions, with TRL's signature."""

from collections.abc import Callable, Sequence
from typing import Any

from .base import ScoringBatch


def function_name(function: Callable) -> str:
    """Name under which a function's scores are logged.

    Args:
        function (`Callable`): Function, `functools.partial` or callable object.

    Returns:
        `str`: Its name.
    """
    inner = getattr(function, "func", function)  # what a partial wraps
    return getattr(inner, "__name__", type(inner).__name__)


class FunctionReward:
    """A function `f(prompts, completions, completion_ids, trainer_state, **columns) -> list[float | None]`.

    Args:
        function (`Callable`): The function; everything is passed by keyword.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.name = function_name(function)

    def score(self, batch: ScoringBatch) -> Sequence[float | None]:
        """Call the function.

        Args:
            batch ([`ScoringBatch`]): Prompts and completions.

        Returns:
            `list[float or None]`: What the function gives.
        """
        return self.function(
            prompts=batch.prompts,
            completions=batch.completions,
            completion_ids=batch.completion_ids,
            trainer_state=batch.trainer_state,
            **batch.columns,
        )
