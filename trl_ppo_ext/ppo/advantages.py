"""From rewards to advantages: what is credited to each token."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..rewards import RunningMoments
from . import math as ppo_math
from .group_baselines import dr_grpo_advantages, grpo_advantages, rloo_advantages

GROUP_BASELINES = {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages, "rloo": rloo_advantages}
FAR = 3  # standard deviations between the mean score and 0
FEWEST = 8  # completions of which that can be said


def token_rewards(tokens: Tensor, shaped: Tensor, kl: Tensor, completion_mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards where they enter, what shaping changed where the completion ends, and the KL penalty at every token."""
    rewards = tokens - kl_coef * kl.masked_fill(completion_mask == 0, 0)  # a product would keep a NaN
    last = completion_mask.sum(1) - 1  # the token after which nothing was sampled: EOS, or where it was cut off
    rewards[torch.arange(len(tokens), device=tokens.device), last] += (shaped - tokens.sum(1)) * (last >= 0)
    return rewards


def critic_advantages(rewards: Tensor, values: Tensor, response_mask: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Advantages for the policy and returns for the critic, each with its own λ.

    Source: https://huggingface.co/papers/2503.01491 (decoupled λ), https://huggingface.co/papers/2504.05118
    """
    lam = args.lam
    if args.lam_length_alpha is not None:
        lam = ppo_math.length_adaptive_lambda(response_mask, args.lam_length_alpha)
    advantages, returns = ppo_math.gae(rewards, values, response_mask, args.gamma, lam)
    lam_critic = args.lam if args.lam_critic is None else args.lam_critic
    if args.lam_length_alpha is not None or lam_critic != args.lam:
        _, returns = ppo_math.gae(rewards, values, response_mask, args.gamma, lam_critic)
    return advantages, returns


def group_advantages(scores: Tensor, counted: Tensor, args: Any) -> Tensor:
    """Advantages of whole completions, without a critic."""
    if args.advantage_estimator == "reinforce":
        return scores.masked_fill(~counted.bool(), 0)
    return GROUP_BASELINES[args.advantage_estimator](scores, counted, args.num_generations)


def warning_of_far_scores(
    scores: Tensor, counted: Tensor, args: Any, all_sum: Callable[[Tensor], Tensor]
) -> str | None:
    """Say what a new critic, which expects 0, makes of first scores that lie far from 0.

    With λ below 1 a token sees the score of the completion's end through the values between, and these are 0 at first:
    only the last tokens see it.
    """
    new_critic = args.critic != "none" and args.critic_init is None
    shifted = args.normalize_rewards or args.reward_baseline is not None
    if not new_critic or shifted or (args.lam == 1 and args.lam_length_alpha is None):
        return None
    moments = RunningMoments()
    moments.update(scores, counted, all_sum)
    mean, deviation = moments.mean, math.sqrt(moments.squares / max(moments.count - 1, 1))
    # equal scores may differ by rounding
    if moments.count < FEWEST or not 1e-6 * abs(mean) < deviation < abs(mean) / FAR:
        return None
    ending, lengths = ("worse", "grow") if mean < 0 else ("better", "shrink")
    return (
        f"The scores of the first rollout are {mean:.3g} ± {deviation:.3g}, and a new critic expects 0. Until it has "
        f"learned their mean, only a completion's last tokens see it, and ending looks {ending} than going on: "
        f"completions {lengths}, whatever the reward is for. Set `normalize_rewards=True` or "
        "`reward_baseline='reference'`, or start from a `critic_init` (`trl-ppo pretrain-critic` makes one)."
    )
