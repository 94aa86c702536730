"""What one rollout leaves to the next. Collecting returns a new state and changes nothing in place."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..modeling.critics import Units
from .math import Reduction

DECAY = 0.8  # of earlier rollouts in the moments of returns and rewards


class Moments(NamedTuple):
    """Mean and squared deviations of all values so far, independent of the number of ranks (Chan et al., 1979)."""

    weight: float = 0.0  # number of the values, those of earlier rollouts lowered
    mean: float = 0.0
    squares: float = 0.0

    def add(self, x: Tensor, mask: Tensor, all_sum: Reduction, decay: float = 1.0) -> "Moments":
        """Add a batch, after lowering the weight of earlier ones."""
        before, old_squares = decay * self.weight, decay * self.squares
        # float64 if the device has it (Apple's GPUs do not): the sums must not depend on batch sizes
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        x, mask = x.to(dtype), mask.to(dtype)
        sums = all_sum(torch.stack([(x * mask).sum(), mask.sum()]))
        mean = sums[0] / sums[1].clamp(min=1)
        squares = all_sum((mask * (x - mean) ** 2).sum())
        mean, count, squares = torch.stack([mean, sums[1], squares]).tolist()  # the only wait for the device
        if not count:
            return Moments(before, self.mean, old_squares)
        shift, total = mean - self.mean, before + count
        squares += old_squares + shift**2 * before * count / total
        return Moments(total, self.mean + shift * count / total, squares)

    @property
    def deviation(self) -> float:
        """Standard deviation with Bessel's correction; 1 for fewer than two values, or if all are equal."""
        variance = self.squares / (self.weight - 1) if self.weight > 1 else 0.0
        return math.sqrt(variance) if variance > 0 else 1.0

    @property
    def units(self) -> Units:
        """Mean and deviation of the values themselves; equal ones have no unit, and nor have none."""
        return Units(self.mean, math.sqrt(self.squares / self.weight) or 1.0) if self.weight else Units()


class RunState(NamedTuple):
    """Coefficients and running statistics; the critic reads `rewards` and predicts `returns` in their units."""

    kl_coef: float
    entropy_coef: float
    entropy_bonus: bool = True  # whether the coefficient is applied
    scores: Moments = Moments()  # of completions, if they are normalized
    returns: Moments = Moments()  # Monte Carlo returns of recent rollouts
    rewards: Moments = Moments()  # rewards per token of recent rollouts

    @property
    def critic(self) -> dict[str, Moments]:
        """Moments in whose units the critic reads and predicts, for its file."""
        return {"returns": self.returns, "rewards": self.rewards}

    def with_critic(self, moments: Mapping[str, Any]) -> "RunState":
        """State with the units of a saved critic."""
        named: dict[str, Any] = {name: Moments(*map(float, x)) for name, x in moments.items()}
        return self._replace(**named)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers of a checkpoint."""
        return {name: [*x] if isinstance(x, Moments) else x for name, x in self._asdict().items()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "RunState":
        """Restore the state that [`to_json`] returned."""
        fields: dict[str, Any] = {name: Moments(*x) if isinstance(x, list) else x for name, x in saved.items()}
        return cls(**fields)
