"""Places where scores enter a completion, what scores tell there, and the default λ that follows
from it."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ppo_math import (
    Reduction,
    at_sampled,
    means_by_number,
    place_numbers,
    turn_ends,
)

# over a place, if scores tell more before the last place of a completion than at it
STEPWISE_LAMBDA = 0.8


def enter_at(token_scores: Tensor, places: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and places at sampled tokens, `[batch, response]`; each end of a turn is a place,
    too."""
    mask = turns.bool()
    counts = at_sampled(places.to(turns.dtype), mask)
    return at_sampled(token_scores, mask), (counts > 0) & mask | turn_ends(turns)


def explained_without_clock(
    values: Tensor, returns: Tensor, numbers: Tensor, mask: Tensor, all_sum: Reduction = torch.clone
) -> Tensor:
    """Explained variance after subtracting the means of values and returns at each place, a scalar.

    Time to go is no knowledge: where scores come at every turn, returns fall from turn to turn, and
    a clock explains most of their variance. 0 if returns differ by rounding only.
    """
    sums = []
    for x in (returns, returns - values):
        means = means_by_number(x, numbers, mask, all_sum)[numbers]
        squares = ((x - means) ** 2).masked_fill(~mask, 0)
        sums.append(squares.sum())
    size = (returns.to(sums[0].dtype) ** 2).masked_fill(~mask, 0).sum()
    variance, unexplained, size = all_sum(torch.stack(sums + [size])).unbind()
    return torch.where(variance > 1e-12 * size, 1 - unexplained / variance, 0)


class Information(NamedTuple):
    """Squared distances of scores from what is usual at their place, summed over a run.

    A constant score, e.g. a cost per turn, tells nothing. Usual is the mean of the completions that
    go on after a place or, if none does, of those that end there: an end that pays is not usual
    where others go on.
    """

    earlier: float = 0.0  # before the last place of a completion
    last: float = 0.0

    @property
    def is_stepwise(self) -> bool:
        """Whether scores tell more before last places than at them."""
        return self.earlier > self.last

    @classmethod
    def pooled(cls, parts: Iterable["Information"]) -> "Information":
        """Sum of several parts."""
        return cls(*map(sum, zip(*parts)))

    def in_unit(self, unit: float) -> "Information":
        """The same of scores that are divided by a unit."""
        return Information(self.earlier / unit**2, self.last / unit**2)

    def add(
        self, scores: Tensor, places: Tensor, usable: Tensor, all_sum: Reduction = torch.clone
    ) -> "Information":
        """Add a rollout; `scores` and `places` are `[batch, response]`, `usable` is `[batch]`."""
        counts = places & usable[:, None]
        position = torch.arange(places.shape[1], device=places.device)
        is_last = position == (position * places).amax(1, keepdim=True)
        numbers = place_numbers(places)
        of_going_on = means_by_number(scores, numbers, counts & ~is_last, all_sum)
        of_ending = means_by_number(scores, numbers, counts & is_last, all_sum)
        usual = torch.where(of_going_on.isnan(), of_ending, of_going_on)[numbers]
        squares = ((scores - usual) ** 2).masked_fill(~counts, 0)
        # a distance of rounding is none
        squares = squares.masked_fill(squares <= 1e-12 * scores**2, 0)
        sums = torch.stack([(squares * ~is_last).sum(), (squares * is_last).sum()])
        earlier, last = all_sum(sums).tolist()
        return Information(self.earlier + earlier, self.last + last)


def default_lambda(
    information: Information, places: Tensor, turns: Tensor, all_sum: Reduction = torch.clone
) -> tuple[float, float]:
    """Default λ per token and per turn.

    Both are 1 unless most of the spread of scores lies before the last place. Then λ of a turn is
    `STEPWISE_LAMBDA`, and λ of a token `STEPWISE_LAMBDA^(places / tokens)`, so that it has shrunk
    by as much from one place to the next. With 1, credit for a score at the end reaches the first
    tokens at once, not through the critic after many rollouts. With less, scores at later places,
    of which the critic knows the mean, are less noise for what came before.
    """
    if not information.is_stepwise:
        return 1.0, 1.0
    num_places, num_tokens = all_sum(torch.stack([places.sum(), turns.bool().sum()])).tolist()
    return STEPWISE_LAMBDA ** (num_places / max(num_tokens, 1)), STEPWISE_LAMBDA
