"""What critics need besides states: units of the values (PopArt), rewards so far, and trust in the values."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..modeling import SideCritic, ValueHead
from ..rewards import RunningMoments, Scored
from ..sequences import Sequences
from .math import Reduction, masked_mean

DECAY = 0.8  # of the moments, per rollout


class ValueNormalizer:
    """Mean and deviation of the returns of recent rollouts, in whose units the value head predicts.

    When they move, the head is corrected, so that its values stay the same. A head that has not been trained begins at
    the mean return of its first rollout.

    Source: https://huggingface.co/papers/1602.07714
    """

    def __init__(self, head: ValueHead, all_sum: Reduction):
        self.head = head
        self.all_sum = all_sum
        self.moments = RunningMoments()

    @property
    def is_new(self) -> bool:
        """Whether no returns have been seen."""
        return not self.moments.count

    @property
    def units(self) -> tuple[float, float]:
        """Mean and deviation of the values; those of the head before any returns."""
        moments = self.moments
        if self.is_new:
            return float(self.head.mean), float(self.head.deviation)
        # equal returns have no unit
        return moments.mean, math.sqrt(moments.squares / moments.count) or 1.0

    @property
    def deviation(self) -> float:
        """Unit of the values."""
        return self.units[1]

    def _is_trained(self) -> bool:
        is_trained = any(bool(x.any()) for x in (self.head.weight, self.head.bias))
        # a rank may have no part of a sharded head
        return bool(self.all_sum(torch.tensor(float(is_trained), device=self.head.mean.device)))

    @torch.no_grad()
    def update(self, values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """Add the returns of a rollout; return its values, which change only for a new head."""
        moments, head = self.moments, self.head
        is_untrained = self.is_new and not self._is_trained()
        old_mean, old_deviation = self.units
        moments.update(returns, mask, self.all_sum, DECAY)
        if not moments.count:  # no token counts
            return values
        mean, deviation = self.units
        head.mean.fill_(mean)
        head.deviation.fill_(deviation)
        if is_untrained:
            return torch.full_like(values, mean) * mask
        head.weight.mul_(old_deviation / deviation)
        head.bias.mul_(old_deviation / deviation).add_((old_mean - mean) / deviation)
        return values


class EarnedRewards:
    """Rewards so far, as the side critic reads them: their mean per token before each token, in units of its buffers.

    The units are those of *earlier* rollouts, or later rewards of an episode would enter its values.
    """

    BOUND = 5.0  # of outliers

    def __init__(self, critic: SideCritic, all_sum: Reduction):
        self.critic = critic
        self.all_sum = all_sum
        self.moments = RunningMoments()

    def before(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Mean reward before each token, `[batch, response]`; 0 until the first rollout has been added."""
        mean, deviation = self.critic.reward_mean, self.critic.reward_deviation
        standardized = ((rewards - mean) / deviation.clamp(min=1e-12) * (deviation > 0)).masked_fill(~mask, 0)
        total, tokens = (nn.functional.pad(x, (1, -1)).cumsum(1) for x in (standardized, mask.long()))
        earned = total / tokens.clamp(min=1)
        return earned.clamp(-self.BOUND, self.BOUND).masked_fill(~mask, 0)

    def read_by_critic(self, sequences: Sequences, scored: Scored) -> Sequences:
        """Sequences with the rewards so far."""
        return replace(sequences, earned=self.before(scored.tokens, sequences.completion_mask))

    def update(self, scored: Scored, response_mask: Tensor) -> None:
        """Move the units by the rewards of a rollout, all of whose values are known."""
        self.moments.update(scored.tokens, response_mask, self.all_sum, DECAY)
        if self.moments.count:
            self.critic.reward_mean.fill_(self.moments.mean)
            self.critic.reward_deviation.fill_(self.moments.deviation)


class ValueTrust:
    """Weight w of the values V in the baseline m + w·(V − m), where m is the mean return of recent rollouts.

    w is the least-squares one on *earlier* rollouts. Their values were predicted before the critic learned from them,
    so it cannot be inflated by overfitting, and it does not depend on the actions whose baseline it weighs.

    Source: https://huggingface.co/papers/2604.19485
    """

    def __init__(self, all_sum: Reduction):
        self.all_sum = all_sum
        self.returns, self.values, self.errors = RunningMoments(), RunningMoments(), RunningMoments()

    @property
    def weight(self) -> float:
        """Least-squares w between 0 and 1; 0 if the values hardly differ from the mean return."""
        covariance = (self.returns.squares + self.values.squares - self.errors.squares) / 2
        around_mean = self.values.squares + self.values.count * self.errors.mean**2  # squares of V − m
        if around_mean <= 1e-9 * self.returns.squares:
            return 0.0
        return min(max(covariance / around_mean, 0.0), 1.0)

    def weighing(self, rewards_to_go: Tensor, mask: Tensor) -> Callable[[Tensor], Tensor]:
        """Function that weighs values by earlier rollouts; in the first, all become its mean."""
        weight, mean = self.weight, self.returns.mean
        if not self.returns.count:
            mean = float(masked_mean(rewards_to_go, mask, self.all_sum))
        return lambda values: mean + weight * (values - mean)

    def add(self, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        """Add the values of a rollout and its Monte Carlo returns to the evidence."""
        for moments, x in ((self.returns, returns), (self.values, values), (self.errors, returns - values)):
            moments.update(x, mask, self.all_sum, DECAY)
