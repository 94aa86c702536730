"""Values in units of the returns: PopArt."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..modeling import ValueHead
from ..rewards import RunningMoments

DECAY = 0.8  # of the moments, per rollout


class ValueNormalizer:
    """Mean and deviation of the returns of recent rollouts, in whose units the value head predicts.

    When they move, the head is corrected, so that its values stay the same. A head that has not been trained begins at
    the mean return of its first rollout.

    Source: https://huggingface.co/papers/1602.07714
    """

    def __init__(self, head: ValueHead, all_sum: Callable[[Tensor], Tensor]):
        self.head = head
        self.all_sum = all_sum
        self.moments = RunningMoments()

    @property
    def is_new(self) -> bool:
        """Whether no returns have been seen."""
        return not self.moments.count

    @property
    def deviation(self) -> float:
        """Unit of the values."""
        return float(self.head.deviation)

    @torch.no_grad()
    def update(self, values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """Add the returns of a rollout; return its values, which change only for a new head."""
        moments, head = self.moments, self.head
        is_untrained = self.is_new and not (head.weight.any() or head.bias.any())
        moments.count, moments.squares = DECAY * moments.count, DECAY * moments.squares
        moments.update(returns, mask, self.all_sum)
        if not moments.count:  # no token counts
            return values
        # equal returns have no unit
        deviation = math.sqrt(moments.squares / moments.count) or 1.0
        mean, old_mean, old_deviation = moments.mean, float(head.mean), self.deviation
        head.mean.fill_(mean)
        head.deviation.fill_(deviation)
        if is_untrained:
            return torch.full_like(values, mean) * mask
        head.weight.mul_(old_deviation / deviation)
        head.bias.mul_(old_deviation / deviation).add_((old_mean - mean) / deviation)
        return values

    def state_dict(self) -> dict[str, float]:
        """Return the moments; mean and deviation are saved with the head."""
        return dict(vars(self.moments))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the moments returned by [`state_dict`]."""
        vars(self.moments).update(state)
