"""From rewards to advantages: what is credited to each token."""

from typing import Any

import torch
from torch import Tensor

from . import ppo_math
from .group_baselines import dr_grpo_advantages, grpo_advantages, rloo_advantages

GROUP_BASELINES = {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages, "rloo": rloo_advantages}


def token_rewards(tokens: Tensor, shaped: Tensor, kl: Tensor, completion_mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards where they enter, what shaping changed where the completion ends, and the KL penalty at every token.

    Args:
        tokens (`Tensor` of shape `[batch, response]`): Weighted sum of the rewards, at the tokens where they enter.
        shaped (`Tensor` of shape `[batch]`): Score that is optimised; the sum of `tokens` if nothing shapes it.
        kl (`Tensor` of shape `[batch, response]`): KL of each token.
        completion_mask (`Tensor` of shape `[batch, response]`): 1 at sampled tokens.
        kl_coef (`float`): Coefficient of the penalty.

    Returns:
        `Tensor` of shape `[batch, response]`: Rewards, 0 at padding.
    """
    rewards = tokens - kl_coef * kl.masked_fill(completion_mask == 0, 0)  # a product would keep a NaN
    last = completion_mask.sum(1) - 1  # the token after which nothing was sampled: EOS, or where it was cut off
    rewards[torch.arange(len(tokens), device=tokens.device), last] += (shaped - tokens.sum(1)) * (last >= 0)
    return rewards


def critic_advantages(rewards: Tensor, values: Tensor, response_mask: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Advantages for the policy and returns for the critic, each with its own λ.

    Args:
        rewards (`Tensor` of shape `[batch, response]`): Rewards.
        values (`Tensor` of shape `[batch, response]`): Values.
        response_mask (`Tensor` of shape `[batch, response]`): 1 where a token counts.
        args ([`PPOConfig`]): The run's config.

    Returns:
        `tuple(Tensor, Tensor)`: Advantages and returns, 0 at masked positions.

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
    """Advantages of whole completions, without a critic.

    Args:
        scores (`Tensor` of shape `[batch]`): Rewards of each completion, KL penalty and all; groups lie together.
        counted (`Tensor` of shape `[batch]`): False where a completion is skipped.
        args ([`PPOConfig`]): The run's config.

    Returns:
        `Tensor` of shape `[batch]`: Advantages; the scores themselves for plain REINFORCE.
    """
    if args.advantage_estimator == "reinforce":
        return scores.masked_fill(~counted.bool(), 0)
    return GROUP_BASELINES[args.advantage_estimator](scores, counted, args.num_generations)
