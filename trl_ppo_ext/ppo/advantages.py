"""Advantages for the policy and targets for the critic, from rewards per token."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..modeling.critics import Units
from . import math as ppo_math
from .math import Moments, Reduction

DECAY = 0.8  # of earlier rollouts in the moments of returns and rewards
STEPWISE_LAMBDA = 0.8  # over a token or a turn, where rewards come with them
OVER_GROUPS = {
    "grpo": ppo_math.grpo_advantages,
    "dr_grpo": ppo_math.dr_grpo_advantages,
    "rloo": ppo_math.rloo_advantages,
    "reinforce": lambda scores, counts, _: scores.masked_fill(~counts, 0),
}


class Advantages(NamedTuple):
    """Result of an estimator; tensors are `[batch, response]`."""

    advantages: Tensor
    unit: float = 1.0  # by which the advantages are divided, in that of the rewards
    # None without a critic; annotated as present, for the code that has one
    values: Tensor = None  # type: ignore[assignment]  # in the unit of the rewards
    returns: Tensor = None  # type: ignore[assignment]  # what the values are to predict
    targets: Tensor = None  # type: ignore[assignment]  # the same in the critic's units
    outcomes: Tensor = None  # type: ignore[assignment]  # Monte Carlo returns, to which values add after cuts only


def default_lambda(token_scores: Tensor, turns: Tensor, all_sum: Reduction = torch.clone) -> tuple[Tensor, Tensor]:
    """λ of each completion of a rollout, `[batch]`, by where the scores are: over tokens, and over turns.

    1 if most, by size, are at last tokens: with a lower one, credit reaches the first tokens only through the critic,
    after many rollouts. Scores that come with tokens, or with turns, make what follows in an episode noise for a
    token's credit, and the critic knows its mean: λ falls to `STEPWISE_LAMBDA` over a token, or a turn.
    """
    sampled, place = turns.bool(), torch.arange(turns.shape[1], device=turns.device)
    ends = ppo_math.turn_ends(turns)
    size, is_earlier = token_scores.abs(), place < (place * sampled).amax(1, keepdim=True)
    sums = (size * (sampled & ~ends)).sum(), (size * is_earlier).sum(), size.sum(), ends.sum(), sampled.sum()
    in_turns, earlier, total, num_turns, num_tokens = all_sum(torch.stack([x.to(size) for x in sums])).unbind()
    share_of_turn = torch.where(in_turns > earlier / 2, 1.0, num_turns / num_tokens)
    # on the device: the host does not wait for it
    over_tokens, over_turns = STEPWISE_LAMBDA ** torch.stack([share_of_turn, torch.ones_like(total)])
    is_stepwise, lam = earlier > total / 2, token_scores.new_ones(len(turns))
    return torch.where(is_stepwise, over_tokens, lam), torch.where(is_stepwise, over_turns, lam)


def of_critic(
    rewards: Tensor,
    outputs: Tensor,  # of the critic; if it is normalized, in units of the returns that were seen
    steps: Tensor,  # 1 at tokens, or first tokens of turns, that have a value
    seen: Moments,  # of the returns of earlier rollouts
    is_normalized: bool,  # else the critic predicts in the unit of the rewards
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 1.0,  # of the advantages; tensors as in `gae`
    lam_critic: float | Tensor = 1.0,  # of the targets
    outputs_after: Tensor | None = None,  # [batch], for the states after completions
    is_cut: Tensor | None = None,  # [batch], completions after which these outputs stand for the rest
    all_sum: Reduction = torch.clone,
) -> tuple[Advantages, Moments]:
    """GAE with the values of a critic, and the moments with the Monte Carlo returns of this rollout.

    Source: https://huggingface.co/papers/1506.02438, https://huggingface.co/papers/2503.01491 (decoupled λ)
    """
    nothing = torch.zeros_like(rewards)

    def outcomes(after: Tensor | None = None) -> Tensor:
        return ppo_math.gae(rewards, nothing, steps, gamma, 1.0, after)[1]

    # 1. Values in the unit of the rewards. A new critic outputs 0: it predicts the mean return of its first rollout.
    units = Units()
    if is_normalized:
        units = Units.of(seen if seen.weight else seen.add(outcomes(), steps, all_sum, DECAY))
    values, after = units.values(outputs) * steps, None
    if outputs_after is not None and is_cut is not None:
        after = units.values(outputs_after) * is_cut

    # 2. Advantages for the policy and returns for the critic, each with its λ.
    advantages, returns = ppo_math.gae(rewards, values, steps, gamma, lam, after)
    if isinstance(lam, Tensor) or lam_critic != lam:
        _, returns = ppo_math.gae(rewards, values, steps, gamma, lam_critic, after)

    # 3. The critic learns in units with this rollout's Monte Carlo returns, which do not depend on its own values.
    observed = outcomes(after)
    seen = seen.add(observed, steps, all_sum, DECAY)
    targets = (Units.of(seen) if is_normalized else Units()).targets(returns) * steps
    return Advantages(advantages, 1.0, values, returns, targets, observed), seen


def in_units(result: Advantages, seen: Moments, steps: Tensor, all_sum: Reduction = torch.clone) -> Advantages:
    """Divide the advantages by the deviation of the returns: no scale of the rewards is left.

    When the returns hardly vary any more, a critic that lags behind is worse than a constant one: its errors are
    scaled down to those of the recent mean. A KL in the loss keeps its unit, so that it acts on.
    """
    critic_error = ppo_math.masked_mean(result.advantages**2, steps, all_sum)
    baseline_error = ppo_math.masked_mean((result.outcomes - seen.mean) ** 2, steps, all_sum)
    share = (baseline_error / critic_error.clamp(min=torch.finfo(critic_error.dtype).tiny)).sqrt().clamp(max=1)
    return result._replace(advantages=share * result.advantages / seen.unit, unit=seen.unit)


def in_groups_that_differ(scores: Tensor, usable: Tensor, group_size: int, gather: Reduction = torch.clone) -> Tensor:
    """Whether the scores of a completion's group differ, at those of all ranks."""
    deviations = ppo_math.dr_grpo_advantages(gather(scores), gather(usable), group_size).view(-1, group_size)
    return (deviations != 0).any(1).repeat_interleave(group_size)  # exactly 0, if there is no spread


def of_groups(
    name: str, rewards: Tensor, usable: Tensor, group_size: int, gather: Reduction = torch.clone, rank: int = 0
) -> Advantages:
    """A completion's score against the others of its prompt, `[batch, 1]`; a group may span ranks."""
    scores = rewards.sum(1)
    advantages = OVER_GROUPS[name](gather(scores), gather(usable), group_size)
    return Advantages(advantages[rank * len(scores) : (rank + 1) * len(scores), None])


def to_go(rewards: Tensor, steps: Tensor, gamma: float) -> Advantages:
    """Sum of the rewards from each token on, without a baseline.

    Source: https://huggingface.co/papers/2510.01051
    """
    return Advantages(ppo_math.gae(rewards, torch.zeros_like(rewards), steps, gamma, 1.0)[0])
