"""The mathematics of PPO for language models: pure functions on tensors.

Every tensor is `[batch, response]` unless said otherwise, and `response_mask` is 1 where the policy sampled a token
that counts. Masked positions may hold anything finite: they never influence a result.

Statistics take an optional `all_sum`, a function that sums a tensor over all processes: with it they are the
statistics of the whole batch, however it is spread over processes.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence_mean", "sequence_sum"]

# A gradient norm squares the ratio: float32 overflows from e^44 on, and one infinity times a mask's zero makes a step
# NaN. A token that became e^20 (5e8) times as likely only says "far away", so nothing meaningful is lost.
LOG_RATIO_BOUND = 20.0


def _same_shape(expected: str = "[batch, response]", /, **tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"These tensors must have one shape {expected}, got {shapes}.")


def _local(total: Tensor) -> Tensor:
    return total


def _counted(x: Tensor, mask: Tensor) -> Tensor:
    """0 where nothing counts, whatever stands there: a product with the mask would keep NaN."""
    return x.masked_fill(mask == 0, 0)


def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimation over the response tokens.

    δₜ = rₜ + γ·V(sₜ₊₁) − V(sₜ),  Âₜ = δₜ + γλ·Âₜ₊₁,  returnₜ = Âₜ + V(sₜ), where t + 1 is the next position that is
    not masked, and the value after the last one is 0 (the episode ends there).

    Args:
        rewards (`Tensor`): Reward of each token.
        values (`Tensor`): Value of the state in which each token was sampled.
        response_mask (`Tensor`): 1 where a token counts. Masked positions are skipped, not zero-valued states.
        gamma (`float`): Discount factor.
        lam (`float` or `Tensor` of shape `[batch]`): λ, from bias (0: TD residual) to variance (1: Monte Carlo).

    Returns:
        `tuple(Tensor, Tensor)`: Advantages and returns, 0 at masked positions.

    Source: https://huggingface.co/papers/1506.02438
    """
    _same_shape(rewards=rewards, values=values, response_mask=response_mask)
    counts = response_mask.bool()
    advantages = torch.zeros_like(rewards)
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(counts[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(counts[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    advantages = advantages.masked_fill(~counts, 0)
    returns = (advantages + values).masked_fill(~counts, 0)
    return advantages, returns


def length_adaptive_lambda(response_mask: Tensor, alpha: float) -> Tensor:
    r"""GAE's λ for each response, nearer to 1 the longer it is: the reward at its end is felt at its start.

    λ = 1 − 1/(α·length), where the length is the number of tokens that count; 0 for responses shorter than 1/α. The
    sum of GAE's weights, 1/(1 − λ) = α·length, is then a fixed share of the response.

    Args:
        response_mask (`Tensor`): 1 where a token counts.
        alpha (`float`): α, above 0; the paper takes 0.05. Infinity gives λ = 1, which is Monte Carlo.

    Returns:
        `Tensor` of shape `[batch]`: λ of each response, 0 where no token counts.

    Raises:
        ValueError: If `alpha` is not above 0.

    Source: https://huggingface.co/papers/2504.05118
    """
    if not alpha > 0:
        raise ValueError(f"`alpha` must be above 0, got {alpha}: λ is 1 − 1/(alpha · length). The paper takes 0.05.")
    dtype = response_mask.dtype if response_mask.is_floating_point() else torch.get_default_dtype()
    lengths = response_mask.bool().sum(1)
    lam = 1 - 1 / (alpha * lengths.clamp(min=1).to(dtype))
    return lam.clamp(min=0).masked_fill(lengths == 0, 0)


def sequence_logprobs(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    r"""Log-probabilities whose ratio to the old ones is one number for a whole response (GSPO).

    sₜ = log π_oldₜ + mean over the response's tokens of (log π − log π_old), so that exp(sₜ − log π_oldₜ) is, at every
    token, the length-normalised ratio of the sequence. Give the result to [`clipped_policy_loss`] as `logprobs`.

    Args:
        logprobs (`Tensor`): Log-probabilities under the policy that is trained (gradients flow through their mean).
        old_logprobs (`Tensor`): Log-probabilities under the policy that sampled.
        response_mask (`Tensor`): 1 where a token counts.

    Returns:
        `Tensor`: Log-probabilities with the ratio of the sequence; the old ones where no token of a response counts.

    Source: https://huggingface.co/papers/2507.18071
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, response_mask=response_mask)
    counts = response_mask.bool()
    log_ratio = (logprobs - old_logprobs).masked_fill(~counts, 0)
    return old_logprobs + log_ratio.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    r"""PPO's clipped surrogate, negated, for each token.

    Lₜ = max(−ρₜ·Âₜ, −clip(ρₜ, 1 − clip_low, 1 + clip_high)·Âₜ) with ρₜ = exp(logprobsₜ − old_logprobsₜ). With
    `dual_clip` = c > 1 the loss of tokens with a negative advantage is at most −c·Âₜ. The log-ratio is bounded to
    ±`LOG_RATIO_BOUND`; beyond it the gradient is 0.

    Args:
        logprobs (`Tensor`): Log-probabilities under the policy that is trained (gradients flow through these).
        old_logprobs (`Tensor`): Log-probabilities under the policy that sampled.
        advantages (`Tensor`): Advantages.
        clip_low (`float`): Lower clip range.
        clip_high (`float`): Upper clip range.
        dual_clip (`float`, *optional*): Bound c of the dual clip, above 1.

    Returns:
        `Tensor`: Loss of each token.

    Source: https://huggingface.co/papers/1707.06347; dual clip: https://huggingface.co/papers/1912.09729
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"`dual_clip` bounds the ratio from above where the advantage is negative: {dual_clip} <= 1.")
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float | None) -> Tensor:
    r"""Half the squared error of the values, for each token, with the step from the old value clipped.

    Lₜ = ½·max((Vₜ − Rₜ)², (clip(Vₜ, V_oldₜ − c, V_oldₜ + c) − Rₜ)²)

    Args:
        values (`Tensor`): Values that are trained (gradients flow through these).
        old_values (`Tensor`): Values at the time of sampling.
        returns (`Tensor`): Targets.
        cliprange (`float`, *optional*): c; `None` leaves the step unclipped.

    Returns:
        `Tensor`: Loss of each token.

    Source: https://huggingface.co/papers/1707.06347
    """
    _same_shape(values=values, old_values=old_values, returns=returns)
    error = (values - returns) ** 2
    if cliprange is None:
        return 0.5 * error
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum(error, (clipped - returns) ** 2)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    r"""Estimate KL(π ‖ π_ref) at each token from the sampled token alone.

    With d = log π − log π_ref: k1 = d (unbiased, may be negative), k2 = ½d² (biased, low variance),
    k3 = exp(−d) − 1 + d (unbiased, never negative).

    Args:
        logprobs (`Tensor`): Log-probabilities under the policy.
        ref_logprobs (`Tensor`): Log-probabilities under the reference.
        estimator (`str`): `"k1"`, `"k2"` or `"k3"`.

    Returns:
        `Tensor`: KL of each token, in nats.

    Source: http://joschu.net/blog/kl-approx.html
    """
    _same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "k3":
        # expm1 keeps the precision where the two policies nearly agree
        return torch.expm1((-difference).clamp(max=LOG_RATIO_BOUND)) + difference
    raise ValueError(f"The KL estimator must be one of 'k1', 'k2', 'k3', got {estimator!r}.")


def exact_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    r"""KL(π ‖ π_ref) from the whole distributions: Σₐ π(a)·(log π(a) − log π_ref(a)).

    Args:
        logprobs (`Tensor` of shape `[..., vocabulary]`): Normalised log-probabilities under the policy.
        ref_logprobs (`Tensor` of shape `[..., vocabulary]`): Normalised log-probabilities under the reference.

    Returns:
        `Tensor` of shape `[...]`: KL in nats. Tokens with π(a) = 0 add 0; it is infinite where only π_ref(a) is 0.
    """
    _same_shape("[..., vocabulary]", logprobs=logprobs, ref_logprobs=ref_logprobs)
    probabilities = logprobs.exp()
    # filled before the product: 0 · (−∞) is NaN, in the value and in the gradient
    difference = (logprobs - ref_logprobs).masked_fill(probabilities == 0, 0)
    return (probabilities * difference).sum(-1)


def masked_mean(x: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor] = _local) -> Tensor:
    """Mean of `x` over the mask, a scalar; 0 if the mask is empty.

    Args:
        x (`Tensor`): Values.
        mask (`Tensor`): 1 where a value counts, same shape.
        all_sum (`Callable`, *optional*): Sums over processes; the default is this process alone.

    Returns:
        `Tensor`: Scalar mean.
    """
    _same_shape(x=x, mask=mask)
    total, count = all_sum(torch.stack([_counted(x, mask).sum(), mask.to(x.dtype).sum()]))
    return total / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor] = _local) -> Tensor:
    """Variance of `x` over the mask with Bessel's correction, a scalar; 0 for fewer than two values.

    Args:
        x (`Tensor`): Values.
        mask (`Tensor`): 1 where a value counts, same shape.
        all_sum (`Callable`, *optional*): Sums over processes; the default is this process alone.

    Returns:
        `Tensor`: Scalar variance.
    """
    x = _counted(x, mask)
    squares = (x - masked_mean(x, mask, all_sum)) ** 2
    total, count = all_sum(torch.stack([_counted(squares, mask).sum(), mask.to(x.dtype).sum()]))
    return total / (count - 1).clamp(min=1)


def whiten(x: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor] = _local) -> Tensor:
    """Shift and scale `x` to zero mean and unit variance over the mask (Bessel-corrected).

    Args:
        x (`Tensor`): Values.
        mask (`Tensor`): 1 where a value counts, same shape.
        all_sum (`Callable`, *optional*): Sums over processes; the default is this process alone.

    Returns:
        `Tensor`: Whitened values, 0 at masked positions.
    """
    x = _counted(x, mask)
    centred = x - masked_mean(x, mask, all_sum)
    return _counted(centred * torch.rsqrt(masked_var(x, mask, all_sum) + 1e-8), mask)


def scale_to_unit_variance(x: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor] = _local) -> Tensor:
    """Scale the deviations of `x` from its mean to unit variance over the mask and leave the mean where it is.

    Args:
        x (`Tensor`): Values.
        mask (`Tensor`): 1 where a value counts, same shape.
        all_sum (`Callable`, *optional*): Sums over processes; the default is this process alone.

    Returns:
        `Tensor`: Scaled values, 0 at masked positions.
    """
    return _counted(whiten(x, mask, all_sum) + masked_mean(x, mask, all_sum), mask)


def masked_correlation(x: Tensor, y: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor] = _local) -> Tensor:
    """Pearson's correlation of `x` and `y` over the mask, a scalar; 0 where one of them is constant.

    Args:
        x (`Tensor`): Values.
        y (`Tensor`): Values, same shape.
        mask (`Tensor`): 1 where a pair counts, same shape.
        all_sum (`Callable`, *optional*): Sums over processes; the default is this process alone.

    Returns:
        `Tensor`: Scalar between -1 and 1.
    """
    _same_shape(x=x, y=y, mask=mask)
    x, y = (_counted(z - masked_mean(z, mask, all_sum), mask) for z in (x, y))
    together, of_x, of_y = all_sum(torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum()]))
    return together / (of_x * of_y).sqrt().clamp(min=1e-12)


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor] = _local
) -> Tensor:
    """1 − Var(returns − values)/Var(returns) over the mask, a scalar: 1 is a perfect critic, 0 a constant one.

    Args:
        values (`Tensor`): Values.
        returns (`Tensor`): What they should have been.
        mask (`Tensor`): 1 where a value counts, same shape.
        all_sum (`Callable`, *optional*): Sums over processes; the default is this process alone.

    Returns:
        `Tensor`: Scalar, at most 1.
    """
    unexplained = masked_var(returns - values, mask, all_sum)
    return 1 - unexplained / masked_var(returns, mask, all_sum).clamp(min=1e-8)


def aggregate_loss(
    per_token: Tensor, response_mask: Tensor, mode: Aggregation, denominator: float | Tensor | None = None
) -> Tensor:
    """Reduce per-token losses to a scalar.

    `"token"`: mean over tokens. `"sequence_mean"`: mean over sequences of each sequence's mean. `"sequence_sum"`: mean
    over sequences of each sequence's sum. Sequences without a token that counts are no sequences.

    Args:
        per_token (`Tensor`): Loss of each token.
        response_mask (`Tensor`): 1 where a token counts.
        mode (`str`): `"token"`, `"sequence_mean"` or `"sequence_sum"`.
        denominator (`float` or `Tensor`, *optional*):
            What the sum is divided by: tokens for `"token"`, sequences otherwise. Defaults to their number in this
            tensor. Give the number over the whole optimizer step, and the loss does not depend on how it is cut up.

    Returns:
        `Tensor`: Scalar loss.
    """
    _same_shape(per_token=per_token, response_mask=response_mask)
    per_sequence, lengths = _counted(per_token, response_mask).sum(1), response_mask.to(per_token.dtype).sum(1)
    if mode == "token":
        total, count = per_sequence.sum(), lengths.sum()
    elif mode == "sequence_mean":
        total, count = (per_sequence / lengths.clamp(min=1)).sum(), (lengths > 0).sum()
    elif mode == "sequence_sum":
        total, count = per_sequence.sum(), (lengths > 0).sum()
    else:
        raise ValueError(f"The loss aggregation must be 'token', 'sequence_mean' or 'sequence_sum', got {mode!r}.")
    return total / torch.as_tensor(count if denominator is None else denominator).clamp(min=1)
