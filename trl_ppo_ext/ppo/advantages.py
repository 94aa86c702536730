"""Advantages for the policy and targets for the critic, from rewards per token."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import ppo_math
from ..modeling.critics import Units
from ..ppo_math import FEWEST, Moments, Reduction
from .baseline import MEMORY, Groups, fit_baseline, is_nearer, means_of_others

SOLVED = 0.1  # share of the largest deviation of a run, below which advantages fade
# weight of a critic, and explained variance without the clock, from which on its values may be
# bootstrapped from as they are
TRUSTED = 0.5
KNOWN = 0.01
LARGEST = 100.0  # advantage and target of a critic, in units of the returns

OVER_GROUPS = {
    "grpo": ppo_math.grpo_advantages,
    "dr_grpo": ppo_math.dr_grpo_advantages,
    "rloo": ppo_math.rloo_advantages,
    "reinforce": lambda scores, counts, *_: scores.masked_fill(~counts, 0),
}


class Advantages(NamedTuple):
    """Result of an estimator without a critic."""

    advantages: Tensor  # [batch, response], or [batch, 1] of whole completions
    unit: float = 1.0  # by which they are divided, in that of the rewards


class CriticAdvantages(NamedTuple):
    """Result of an estimator with a critic; tensors are `[batch, response]`."""

    advantages: Tensor
    values: Tensor  # of the critic, in the unit of the rewards
    baseline: Tensor  # what the advantages are taken from, in that unit
    returns: Tensor  # what the values are to predict
    targets: Tensor  # the same in the critic's units
    outcomes: Tensor  # sums of the rewards that follow
    # 1 at outcomes of ordinary completions without a value after a limit; at all of these if there
    # are too few
    counted: Tensor
    explains: Tensor  # what the critic says of outcomes around their mean, for the log
    weights: Tensor | None = None  # [batch, 1 or 2], of the critic and of other completions
    # deviation of the outcomes of this rollout, 0 if they are equal, or the critic has no units
    spread: float = 0.0
    unit: float = 1.0  # by which the advantages are divided, in that of the rewards


AnyAdvantages = TypeVar("AnyAdvantages", Advantages, CriticAdvantages)


class Discounts(NamedTuple):
    """γ and λ; numbers, or tensors as in [`~ppo_math.gae`]."""

    gamma: float | Tensor = 1.0
    lam: float | Tensor = 1.0  # of the advantages
    lam_critic: float | Tensor = 1.0  # of the critic's targets

    @property
    def bootstraps(self) -> bool:
        """Whether advantages hold values of later tokens."""
        return isinstance(self.lam, Tensor) or self.lam != 1


class Cuts(NamedTuple):
    """Completions after which the critic's value stands for the rest, and its outputs for those
    states."""

    is_cut: Tensor  # [batch]
    outputs: Tensor  # [batch]


def gae_with_critic(
    rewards: Tensor,
    outputs: Tensor,  # of the critic; if it is normalized, in units of the returns that were seen
    steps: Tensor,  # 1 at tokens, or first tokens of turns, that have a value
    seen: Moments,  # of the returns of earlier rollouts
    # else the critic predicts in the unit of the rewards, and its values are the baseline
    is_normalized: bool,
    discounts: Discounts = Discounts(),
    cuts: Cuts | None = None,
    groups: Groups = Groups(),
    # [batch], completions that enter units and fits; all by default
    ordinary: Tensor | None = None,
    all_sum: Reduction = torch.clone,
) -> tuple[CriticAdvantages, Moments]:
    """GAE with the baseline of a critic, and the moments with the returns of this rollout.

    Source: https://huggingface.co/papers/1506.02438, https://huggingface.co/papers/2503.01491
    (decoupled λ)
    """
    gamma = discounts.gamma

    # 1. What was paid after each token. No value enters: units do not depend on the critic.
    nothing = torch.zeros_like(rewards)
    _, outcomes = ppo_math.gae(rewards, nothing, steps, gamma, 1.0)
    enters = steps if ordinary is None else steps & ordinary[:, None]
    own, per_row = Moments.of(outcomes, enters, all_sum)
    seen_after = units_after(seen, own, most=MEMORY * per_row)
    spread = 0.0
    if is_normalized and own.varies:
        spread = own.unit

    # 2. Values in the unit of the rewards. A new critic outputs 0: it predicts the mean return of
    # its first rollout, and of the next one if all returns were equal, which have no unit.
    units = Units()
    if is_normalized:
        units = Units.of(seen if seen.varies else seen_after)
    values = units.values(outputs) * steps
    after = None if cuts is None else units.values(cuts.outputs) * cuts.is_cut

    # 3. The critic is measured on completions that ended. If those are too few, the values after
    # cuts stand for the rest.
    uncut = steps
    left = outcomes
    if cuts is not None:
        ended = steps & ~cuts.is_cut[:, None]
        is_enough = all_sum(ended.any(1).sum()) >= FEWEST
        _, left = ppo_math.gae(rewards, nothing, steps, gamma, 1.0, after)
        outcomes = torch.where(is_enough, outcomes, left)
        uncut = torch.where(is_enough, ended, steps)

    # 4. Advantages for the policy.
    measured = Measured(
        rewards,
        values,
        after,
        steps,
        outcomes=outcomes,
        left=left,
        entering=enters,
        counted=uncut & enters,
    )
    if not is_normalized:
        estimate = from_values(measured, discounts)
    elif discounts.bootstraps:
        estimate = from_later_values(measured, discounts, groups, all_sum)
    else:
        estimate = from_outcomes(measured, discounts, seen, groups)

    # 5. Returns for the critic, in units with those of this rollout.
    _, returns = ppo_math.gae(rewards, values, steps, gamma, discounts.lam_critic, after)
    if is_normalized:
        new_units = Units.of(seen_after)
    else:
        new_units = Units()
    targets = new_units.targets(returns) * steps
    if is_normalized:
        targets = targets.clamp(-LARGEST, LARGEST)
    result = CriticAdvantages(
        estimate.advantages,
        values=values,
        baseline=estimate.baseline,
        returns=returns,
        targets=targets,
        outcomes=outcomes,
        counted=measured.counted,
        explains=estimate.explains,
        weights=estimate.weights,
        spread=spread,
    )
    return result, seen_after


def units_after(seen: Moments, own: Moments, most: float) -> Moments:
    """Moments of earlier returns, which weigh at most `most`, with those of a rollout.

    If its returns are all equal, they do not lower the scale. In rollouts of failures after a
    success the unit would go to 0, and all that is divided by it beyond all bounds.
    """
    after = seen.joined(own, most)
    if own.varies or not seen.varies:
        return after
    as_before = after.weight * seen.squares / seen.weight
    return after._replace(squares=max(after.squares, as_before))


class Measured(NamedTuple):
    """A rollout with the values of a critic; tensors are `[batch, response]`."""

    rewards: Tensor
    values: Tensor  # in the unit of the rewards
    after: Tensor | None  # [batch], values after a limit; 0 at completions that ended
    steps: Tensor  # 1 at tokens, or first tokens of turns, that have a value
    outcomes: Tensor  # sums of the rewards that follow
    left: Tensor  # the same, with the values after a limit
    entering: Tensor  # 1 at steps of ordinary completions
    counted: Tensor  # 1 at those of them with an outcome

    def gae(self, baseline: Tensor, discounts: Discounts) -> Tensor:
        """Advantages over a baseline."""
        return ppo_math.gae(
            self.rewards, baseline, self.steps, discounts.gamma, discounts.lam, self.after
        )[0]

    def of_others(self, groups: Groups) -> Tensor:
        """Mean score of the prompt's other completions at each step."""
        others = means_of_others(self.rewards.sum(1), self.counted.any(1), groups)
        return others[:, None].expand_as(self.values)


class Estimate(NamedTuple):
    """Advantages, and the baseline that they are taken from, as of [`CriticAdvantages`]."""

    advantages: Tensor
    baseline: Tensor
    explains: Tensor
    weights: Tensor | None = None


def from_values(x: Measured, discounts: Discounts) -> Estimate:
    """The values themselves are the baseline."""
    return Estimate(x.gae(x.values, discounts), x.values, x.values)


def from_outcomes(x: Measured, discounts: Discounts, seen: Moments, groups: Groups) -> Estimate:
    """With λ = 1 the baseline has values, and scores of the prompt's other completions, as far as
    they fit the outcomes."""
    columns = [x.values]
    if groups.size > 1:
        columns.append(x.of_others(groups))
    predictors = torch.stack(columns, -1)
    fit = fit_baseline(x.outcomes, predictors, x.counted, seen, groups)
    baseline = fit.at(predictors) * x.steps
    explains = fit.said_by_first(x.values)
    return Estimate(x.gae(baseline, discounts), baseline, explains, fit.weights)


def from_later_values(
    x: Measured, discounts: Discounts, groups: Groups, all_sum: Reduction = torch.clone
) -> Estimate:
    """With λ < 1 values of later tokens stand for what is left to earn.

    Scores of other completions know no time: among the values, they would stay when nothing is left
    to earn. They are subtracted from the advantages.
    """
    # 1. Around their means at a place, values count as far as they fit the outcomes.
    has_number = ppo_math.place_numbers(x.steps) < ppo_math.MOST_PLACES - 1  # later ones share it

    def usual(y: Tensor) -> Tensor:
        return mean_of_others_at_place(y, x.steps, x.entering, all_sum) * has_number

    present = usual(torch.ones_like(x.values))  # below 1 where fewer than eight others are
    usual_left = usual(x.left)
    beyond = deviations(x.values, usual(x.values), present)
    of_outcomes = deviations(x.left, usual_left, present)
    fit = fit_baseline(of_outcomes, beyond[..., None], x.counted & has_number, groups=groups)

    # 2. What others earn from a place on is left to earn there; values stand for those that are
    # missing to eight. Values that know no more would be noise in the advantage of each token;
    # those that do are taken as they are, unless their errors vary more than those of the others'
    # mean. A constant error does not count: all completions may earn more since the last fit.
    of_others = usual_left + (1 - present) * x.values
    is_known = (
        (fit.weights > TRUSTED)
        & (fit.left_out > KNOWN)
        & is_nearer(x.values, of_others, x.left, x.counted, groups)
    )
    weights = fit.weights.masked_fill(is_known, 1.0)
    baseline = torch.where(is_known, x.values, of_others + weights * beyond) * x.steps
    advantages = x.gae(baseline, discounts)
    mean_left = mean_of_all_at_place(x.left, x.steps, x.counted, all_sum)
    mean_value = mean_of_all_at_place(x.values, x.steps, x.counted, all_sum)
    explains = torch.where(is_known, x.values, mean_left + weights * (x.values - mean_value))

    # 3. Whatever the other completions tell of an advantage is no merit of its token.
    if groups.size > 1:
        others = x.of_others(groups)[..., None]
        of_group = fit_baseline(advantages, others, x.counted, groups=groups)
        advantages = (advantages - of_group.at(others) + of_group.mean[:, None]) * x.steps
        weights = torch.cat([weights, of_group.weights], 1)
    return Estimate(advantages, baseline, explains, weights)


def deviations(x: Tensor, usual: Tensor, present: Tensor) -> Tensor:
    """Deviations from the mean at a place, which is shrunk as `present` is; 0 within rounding."""
    result = present * x - usual
    return result.masked_fill(result.abs() <= ppo_math.ROUNDING * x.abs(), 0)


def mean_of_all_at_place(
    x: Tensor, steps: Tensor, enters: Tensor, all_sum: Reduction = torch.clone
) -> Tensor:
    """Mean over all completions at the same number of a step, `[batch, response]`. The mean over
    all steps stands for those that are missing to eight: a mean of few would know their own."""
    numbers = ppo_math.place_numbers(steps)
    totals, counts = ppo_math.sums_by_number(x, numbers, enters, all_sum)
    overall = totals.sum() / counts.sum().clamp(min=1)
    missing = (FEWEST - counts).clamp(min=0)
    means = (totals + missing * overall) / (counts + missing)
    return means[numbers].to(x.dtype)


def mean_of_others_at_place(
    x: Tensor, steps: Tensor, enters: Tensor, all_sum: Reduction = torch.clone
) -> Tensor:
    """Mean over other completions at the same number of a step, `[batch, response]`, shrunk to 0 if
    they have fewer than eight.

    `enters` is 1 at the steps that the mean is made of. It depends on no step of the completion
    itself, of which several may share the last number, so it is a baseline without bias.
    """
    numbers = ppo_math.place_numbers(steps)
    totals, counts = ppo_math.sums_by_number(x, numbers, enters, all_sum)
    own_total, own_count = ppo_math.sums_of_row(x, numbers, enters)
    others = counts[numbers] - own_count
    return ((totals[numbers] - own_total) / others.clamp(min=FEWEST)).to(x.dtype)


def divide_by_unit(result: AnyAdvantages, seen: Moments, largest: float = 0.0) -> AnyAdvantages:
    """Divide the advantages by the deviation of the returns: no scale of the rewards is left.

    The divisor is at least a tenth of the largest deviation of the run, except for one rollout,
    whose scores may have been broken. So advantages fade once a task is nearly solved, and the small
    differences that are left are not scaled up. A KL in the loss is divided by the same unit.
    Advantages are clamped beyond what a return that counts in the unit can reach.
    """
    unit = max(seen.unit, SOLVED * largest)
    advantages = (result.advantages / unit).clamp(-LARGEST, LARGEST)
    return result._replace(advantages=advantages, unit=unit)


def in_groups_that_differ(
    scores: Tensor,
    usable: Tensor,
    sizes: Tensor,  # of what the scores are sums of, [batch]
    group_size: int,
    gather: Reduction = torch.clone,
) -> Tensor:
    """Whether the scores of a completion's group differ, at those of all ranks."""
    deviations = ppo_math.dr_grpo_advantages(
        gather(scores), gather(usable), group_size, gather(sizes)
    )
    has_spread = deviations.view(-1, group_size) != 0  # it is exactly 0 without a spread
    return has_spread.any(1).repeat_interleave(group_size)


def group_advantages(
    name: str,
    rewards: Tensor,
    usable: Tensor,
    group_size: int,
    gather: Reduction = torch.clone,
    rank: int = 0,
) -> Advantages:
    """A completion's score against the others of its prompt, `[batch, 1]`; a group may span
    ranks."""
    scores = rewards.sum(1)
    sizes = rewards.abs().sum(1)
    advantages = OVER_GROUPS[name](gather(scores), gather(usable), group_size, gather(sizes))
    return Advantages(advantages[rank * len(scores) : (rank + 1) * len(scores), None])


def objective_advantages(
    rewards: Tensor, weights: Sequence[float] | None, usable: Tensor, groups: Groups = Groups()
) -> Advantages:
    """GDPO: each of `[batch, rewards]` (NaN is skipped) within its group, then their weighted sum
    over the batch.

    Source: https://huggingface.co/papers/2601.05242
    """
    all_rewards = groups.gather(rewards)
    counts = groups.gather(usable)
    total = torch.zeros_like(all_rewards[:, 0])
    for column, weight in enumerate(weights or [1.0] * all_rewards.shape[1]):
        scores = all_rewards[:, column]
        applies = counts & ~scores.isnan()
        total = total + weight * ppo_math.grpo_advantages(scores, applies, groups.size)
    advantages = ppo_math.grpo_advantages(total, counts, len(counts))
    return Advantages(groups.own(advantages, rewards)[:, None])


def rewards_to_go(rewards: Tensor, steps: Tensor, gamma: float) -> Advantages:
    """Sum of the rewards from each token on, without a baseline.

    Source: https://huggingface.co/papers/2510.01051
    """
    return Advantages(ppo_math.gae(rewards, torch.zeros_like(rewards), steps, gamma, 1.0)[0])
