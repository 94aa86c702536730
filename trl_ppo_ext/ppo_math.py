"""The mathematics of PPO for language models: advantages, losses, KL, group baselines, moments, the
KL coefficient.

Tensors are `[batch, response]` unless noted otherwise. Arguments with these names are the same
everywhere:

- `logprobs`, `old_logprobs`, `ref_logprobs`: Log-probs of the sampled tokens under the current
  policy (gradients flow through these), under the policy that sampled, and under the reference.
- `response_mask`, `mask`: 1 at sampled tokens, or values, that count. Masked positions may hold any
  finite number, which never influences a result.
- `turns`: Number of the turn at each sampled token that counts, and 0 at others, e.g. those that an
  environment wrote.
- `all_sum`: Sums a tensor over ranks, for statistics of the global batch. Defaults to this rank
  only.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Reduction = Callable[[Tensor], Tensor]  # of a tensor over ranks
KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence_mean", "sequence_sum"]
SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

# A gradient norm squares the ratio: float32 overflows from e^44 on, and inf times a mask's zero is
# NaN. A token that became e^20 (5e8) times as likely is far out of distribution anyway.
LOG_RATIO_BOUND = 20.0
# of the relative error that a KL coefficient follows, and of its change after a rollout
KL_ERROR_BOUND = 0.2
# of a deviation, as a share of the mean: in the unit of returns that vary less, rounding is large
UNIT_FLOOR = 1e-4
ROUNDING = 1e-6  # of equal values in float32, as a share of their mean
ROUNDING_OF_SUMS = 4 * torch.finfo(torch.float32).eps  # of the same numbers in another order
OUTLYING = 1000.0  # times the largest distance of a score of another prompt
FEWEST = 8  # completions among which there are outliers, and a mean tells something
FEWEST_PROMPTS = 4  # of which one may have outliers
# of scores in a completion; later ones share a number, so that tables have one size on all ranks
MOST_PLACES = 4096
TRUST = 2.0  # factor of a token's probability, per rollout, at which the default clip acts


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"These tensors must have one shape [batch, response], got {shapes}.")


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """Zero outside the mask; a product with the mask would keep NaN."""
    return x.masked_fill(mask == 0, 0)


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Generalized advantage estimation over the response tokens.

    δₜ = rₜ + γ·V(sₜ₊₁) − V(sₜ),  Âₜ = δₜ + γλ·Âₜ₊₁,  returnₜ = Âₜ + V(sₜ), where sₜ is the state in
    which token t was sampled, and t + 1 the next unmasked position. Masked ones are skipped, not
    zero-valued states, and their advantages and returns are 0. λ goes from bias (0: TD residual) to
    variance (1: Monte Carlo), and may be `[batch]`. γ and λ may also be `[batch, response]`, e.g.
    those of [`at_turn_ends`].

    The value after the last token is 0 (the episode ends there), or `final_values`, `[batch]`: 0
    after an end, the critic's where a limit cut the response.

    Source: https://huggingface.co/papers/1506.02438
    """
    _same_shape(rewards=rewards, values=values, response_mask=response_mask)
    counts = response_mask.bool()
    width = rewards.shape[1]
    # the n-th unmasked value in slot n, the final one in the slot after the last one
    number = counts.long().cumsum(1)
    slots = values.new_zeros(len(values), width + 1)
    slots = slots.scatter(1, torch.where(counts, number - 1, width), values.masked_fill(~counts, 0))
    if final_values is not None:
        slots = slots.scatter(1, number[:, -1:], final_values[:, None])
    deltas = (rewards + gamma * slots.gather(1, number) - values).masked_fill(~counts, 0)
    if isinstance(lam, Tensor) and lam.dim() == 1:
        lam = lam[:, None]
    decay = (gamma * lam * torch.ones_like(rewards)).masked_fill(~counts, 1)
    advantages = torch.empty_like(rewards)
    advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(width)):  # one operation per token: launches take the time on a GPU
        advantage = torch.addcmul(deltas[:, t], decay[:, t], advantage, out=advantages[:, t])
    advantages = advantages.masked_fill(~counts, 0)
    returns = (advantages + values).masked_fill(~counts, 0)
    return advantages, returns


def turn_starts(turns: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the turns of episodes start.

    Returns a mask, 1 at the first token of each turn, and for each position the one at which its
    turn starts. With that mask in [`gae`], and each turn's reward at its first token, γ and λ count
    turns. If `turns` is a mask, each run of sampled tokens is a turn.
    """
    starts = turns.bool() & (turns != torch.nn.functional.pad(turns[:, :-1], (1, 0)))
    place = torch.arange(turns.shape[1], device=turns.device)
    return starts, (place * starts).cummax(1).values


def latest_sampled(mask: Tensor) -> Tensor:
    """Sampled position at or before each one or, before the first one, the first, `[batch,
    response]`."""
    position = torch.arange(mask.shape[1], device=mask.device)
    first = mask.int().argmax(1, keepdim=True)
    return (position * mask).cummax(1).values.maximum(first)


def at_sampled(x: Tensor, mask: Tensor) -> Tensor:
    """Numbers of each token at the sampled one at or before it, `[batch, response]`; sums stay."""
    return torch.zeros_like(x).scatter_add(1, latest_sampled(mask), x)


def turn_ends(turns: Tensor) -> Tensor:
    """Mask, 1 at the last token of each turn."""
    return turns.bool() & (turns != torch.nn.functional.pad(turns[:, 1:], (0, 1)))


def place_numbers(places: Tensor) -> Tensor:
    """Number of the next place at or after each token, from 0, `[batch, response]`."""
    before = places.long().cumsum(1) - places.long()
    return before.clamp(max=MOST_PLACES - 1)


def sums_by_number(
    x: Tensor, numbers: Tensor, mask: Tensor, all_sum: Reduction = torch.clone
) -> tuple[Tensor, Tensor]:
    """Sum of `x` and count over the mask and all ranks for each number, `[MOST_PLACES]`."""
    table = x.new_zeros(
        MOST_PLACES, dtype=torch.float32 if x.device.type == "mps" else torch.float64
    )
    chosen = mask.flatten().to(table.dtype)
    index = numbers.flatten()
    totals = table.index_add(0, index, x.flatten().to(table.dtype) * chosen)
    counts = table.index_add(0, index, chosen)
    totals, counts = all_sum(torch.stack([totals, counts])).unbind()
    return totals, counts


def sums_of_row(x: Tensor, numbers: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of `x` and count over the mask within a completion, of the number at each token, `[batch,
    response]`."""
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    sums = []
    for chosen in (x.to(dtype) * mask, mask.to(dtype)):
        table = chosen.new_zeros(len(x), MOST_PLACES).scatter_add(1, numbers, chosen)
        sums.append(table.gather(1, numbers))
    total, count = sums
    return total, count


def means_by_number(
    x: Tensor, numbers: Tensor, mask: Tensor, all_sum: Reduction = torch.clone
) -> Tensor:
    """Mean of `x` over the mask and all ranks for each number, `[MOST_PLACES]`; NaN without any."""
    totals, counts = sums_by_number(x, numbers, mask, all_sum)
    return totals / counts


def at_turn_ends(x: float | Tensor, turns: Tensor, within: float | Tensor = 1.0) -> Tensor:
    r"""γ or λ at the last token of each turn, and another one before it, `[batch, response]`; both
    may be `[batch]`.

    With 1 before it, [`gae`] is over turns: the first token has the advantage of its turn, and
    later ones have the
    rewards and the value of their own state: Âₜ = Â_turn − (rewards of the turn before t) − (V(sₜ)
    − V(s_first)).
    """
    x, within = (y[:, None] if isinstance(y, Tensor) else y for y in (x, within))
    return torch.where(turn_ends(turns), x, within)


def length_adaptive_lambda(response_mask: Tensor, alpha: float) -> Tensor:
    r"""GAE's λ per response.

    It grows with the length, so that the first tokens receive the reward at the end.

    λ = 1 − 1/(α·length), `[batch]`, where length is the number of tokens that count; 0 for
    responses shorter than 1/α. The sum of GAE's weights, 1/(1 − λ) = α·length, is then a fixed
    share of the response. α is above 0, and 0.05 in the paper; infinity gives λ = 1, which is Monte
    Carlo.

    Source: https://huggingface.co/papers/2504.05118
    """
    if response_mask.is_floating_point():
        dtype = response_mask.dtype
    else:
        dtype = torch.get_default_dtype()
    lengths = response_mask.bool().sum(1)
    lam = 1 - 1 / (alpha * lengths.clamp(min=1).to(dtype))
    return lam.clamp(min=0).masked_fill(lengths == 0, 0)


def sequence_logprobs(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    r"""Log-probs whose ratio to the old ones is the same for all tokens of a response (GSPO).

    sₜ = log π_oldₜ + mean over the response's tokens of (log π − log π_old), so that exp(sₜ − log
    π_oldₜ) is, at every token, the length-normalized ratio of the sequence. Pass the result to
    [`clipped_policy_loss`] as `logprobs`. It is `old_logprobs` if no token of a response counts.

    Source: https://huggingface.co/papers/2507.18071
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, response_mask=response_mask)
    counts = response_mask.bool()
    log_ratio = (logprobs - old_logprobs).masked_fill(~counts, 0)
    return old_logprobs + log_ratio.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)


def sampler_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    response_mask: Tensor,
    mode: SamplerCorrection,
    clip_max: float | None = None,
) -> Tensor:
    r"""Importance weights π_old/μ of tokens that another implementation μ of the policy sampled, as
    in TRL.

    wₜ is the ratio of the `"token_..."`, or of the `"sequence_..."` (the product of its tokens'
    ratios). Ratios above `clip_max` become the bound (`"..._truncate"`) or 0 (`"..._mask"`); `None`
    has no bound but exp(`LOG_RATIO_BOUND`). Weights have no gradient, and are 1 at masked
    positions: where μ is π_old, nothing changes.

    Advantages are multiplied by them, which scales the loss: PPO's clipped objective is linear in a
    factor wₜ ≥ 0 of Âₜ. Only the sequence's ratio without a bound is unbiased, and its variance
    grows with the length: see [`effective_share`].

    Source: https://fengyao.notion.site/off-policy-rl
    """
    _same_shape(logprobs=logprobs, sampler_logprobs=sampler_logprobs, response_mask=response_mask)
    log_ratio = _masked(logprobs - sampler_logprobs, response_mask).detach()
    level, beyond = mode.split("_")
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    bound = math.inf if clip_max is None else clip_max
    weights = torch.where(ratio > bound, bound if beyond == "truncate" else 0.0, ratio)
    return weights.expand_as(response_mask).masked_fill(response_mask == 0, 1)


def effective_share(weights: Tensor, mask: Tensor, all_sum: Reduction = torch.clone) -> Tensor:
    r"""Effective sample size of importance weights, as a share of the tokens: (Σw)²/(n·Σw²).

    1 if all weights are equal, 1/n if one token has all the weight, and 0 if all weights are 0.
    With weights of sequences each completion counts by its length.
    """
    weights = _masked(weights, mask)
    sums = torch.stack([weights.sum(), (weights**2).sum(), mask.sum().to(weights)])
    total, squares, count = all_sum(sums).unbind()
    return total**2 / (count * squares).clamp(min=torch.finfo(weights.dtype).tiny)


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    r"""PPO's clipped surrogate loss per token.

    Lₜ = max(−ρₜ·Âₜ, −clip(ρₜ, 1 − clip_low, 1 + clip_high)·Âₜ) with ρₜ = exp(logprobsₜ −
    old_logprobsₜ). With `dual_clip` = c > 1 the loss of tokens with a negative advantage is at most
    −c·Âₜ. The log-ratio is clamped to ±`LOG_RATIO_BOUND`, beyond which the gradient is 0.

    Source: https://huggingface.co/papers/1707.06347; dual clip:
    https://huggingface.co/papers/1912.09729
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss = torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    )
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float | None
) -> Tensor:
    r"""Half the squared error of the values per token, with the step from the old value clipped.

    Lₜ = ½·max((Vₜ − Rₜ)², (clip(Vₜ, V_oldₜ − c, V_oldₜ + c) − Rₜ)²), where V_old are the values at
    the time of sampling, the returns R are the targets, and c is `cliprange`; `None` does not clip.

    Source: https://huggingface.co/papers/1707.06347
    """
    _same_shape(values=values, old_values=old_values, returns=returns)
    error = (values - returns) ** 2
    if cliprange is None:
        return 0.5 * error
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum(error, (clipped - returns) ** 2)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    r"""Estimate KL(π ‖ π_ref) per token from the sampled token only.

    In nats, with d = log π − log π_ref: k1 = d (unbiased, may be negative), k2 = ½d² (biased, low
    variance), k3 = exp(−d) − 1 + d (unbiased, never negative).

    Source: http://joschu.net/blog/kl-approx.html
    """
    _same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    # expm1 is precise where the two policies nearly agree
    return torch.expm1((-difference).clamp(max=LOG_RATIO_BOUND)) + difference


def masked_mean(x: Tensor, mask: Tensor, all_sum: Reduction = torch.clone) -> Tensor:
    """Mean of `x` over the mask, a scalar; 0 if the mask is empty."""
    _same_shape(x=x, mask=mask)
    total, count = all_sum(torch.stack([_masked(x, mask).sum(), mask.to(x.dtype).sum()]))
    return total / count.clamp(min=1)


def _moments(x: Tensor, mask: Tensor, all_sum: Reduction) -> tuple[Tensor, Tensor]:
    """Mean and variance over the mask."""
    mean = masked_mean(x, mask, all_sum)
    total, count = all_sum(
        torch.stack([_masked((x - mean) ** 2, mask).sum(), mask.to(x.dtype).sum()])
    )
    return mean, total / (count - 1).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, all_sum: Reduction = torch.clone) -> Tensor:
    """Variance of `x` over the mask with Bessel's correction, a scalar; 0 for fewer than two
    values."""
    return _moments(x, mask, all_sum)[1]


def root_mean_square(
    x: Tensor, mask: Tensor, all_sum: Reduction = torch.clone, least: float = 0.0
) -> float:
    """Root of the mean square over the mask, or `least` if it is lower; 1 if both are 0."""
    return max(masked_mean(x**2, mask, all_sum).sqrt().item(), least) or 1.0


def whiten(
    x: Tensor, mask: Tensor, all_sum: Reduction = torch.clone, keeps_mean: bool = False
) -> tuple[Tensor, float]:
    """Return `x` with zero mean (unless `keeps_mean`) and unit variance over the mask, and what it
    was divided by.

    The variance is Bessel-corrected, and 1e-8 is added to it as in TRL, so `x` stays small if its
    deviation is far below 1e-4. If the variance is no more than rounding, the scale is unknown: `x`
    becomes 0, or its mean with `keeps_mean`, and the unit is 1.
    """
    mean, variance = torch.stack(_moments(x, mask, all_sum)).tolist()
    varies = variance > 1e-12 * mean**2
    if varies:
        unit = math.sqrt(variance + 1e-8)
    else:
        unit = 1.0
    return _masked((x - mean) * (varies / unit) + keeps_mean * mean, mask), unit


def masked_correlation(
    x: Tensor, y: Tensor, mask: Tensor, all_sum: Reduction = torch.clone
) -> Tensor:
    """Pearson's correlation of `x` and `y` over the mask, a scalar; 0 if one of them is
    constant."""
    _same_shape(x=x, y=y, mask=mask)
    x, y = (_masked(z - masked_mean(z, mask, all_sum), mask) for z in (x, y))
    covariance, x_variance, y_variance = all_sum(
        torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum()])
    )
    return covariance / (x_variance * y_variance).sqrt().clamp(min=1e-12)


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, all_sum: Reduction = torch.clone
) -> Tensor:
    """1 − Var(returns − values)/Var(returns) over the mask, a scalar: 1 is a perfect critic, 0 a
    constant one.

    It is 0 if the returns are equal up to rounding.
    """
    unexplained = masked_var(returns - values, mask, all_sum)
    mean, variance = _moments(returns, mask, all_sum)
    varies = variance > 1e-12 * mean**2
    return torch.where(varies, 1 - unexplained / variance, 0)


def aggregate_loss(
    per_token: Tensor,
    response_mask: Tensor,
    mode: Aggregation,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Reduce per-token losses to a scalar.

    `"token"`: mean over tokens. `"sequence_mean"`: mean over sequences of each sequence's mean.
    `"sequence_sum"`: mean over sequences of each sequence's sum. Sequences in which no token counts
    are excluded.

    The `denominator` is the number of tokens for `"token"`, of sequences otherwise. It defaults to
    that of this tensor. With that of the full optimizer step, the loss does not depend on
    micro-batches and ranks.
    """
    _same_shape(per_token=per_token, response_mask=response_mask)
    per_sequence = _masked(per_token, response_mask).sum(1)
    lengths = response_mask.to(per_token.dtype).sum(1)
    if mode == "sequence_mean":
        per_sequence = per_sequence / lengths.clamp(min=1)
    if denominator is None:
        if mode == "token":
            denominator = lengths.sum()
        else:
            denominator = (lengths > 0).sum()
    return per_sequence.sum() / torch.as_tensor(denominator).clamp(min=1)


# ---- rewards and advantages ----


def token_rewards(
    token_scores: Tensor, score: Tensor, kl: Tensor, completion_mask: Tensor, kl_coef: float
) -> Tensor:
    r"""Rewards per token: −kl_coef·KLₜ at every token, and the score at the last one.

    Scores that enter before the last token stay at their token, or at the last sampled one before a
    token that an environment wrote. Shaping changes the last token's reward, so that a completion's
    rewards sum to `score` minus its KL penalty.

    `token_scores` has the weighted sum of the rewards at the tokens where they enter, and `score`,
    `[batch]`, is what
    to optimize: their sum if nothing shapes it. Where `completion_mask` is 0 the rewards are 0.
    """
    rewards = at_sampled(token_scores, completion_mask)
    rewards = rewards - kl_coef * _masked(kl, completion_mask)
    # EOS, or the token at which the completion was truncated
    last = latest_sampled(completion_mask)[:, -1]
    rows = torch.arange(len(rewards), device=rewards.device)
    rewards[rows, last] += (score - token_scores.sum(1)) * completion_mask.any(1)
    return rewards


# ---- advantages without a critic: a completion's score against the others sampled for its prompt
# ----


def _deviations(
    scores: Tensor, counts: Tensor, group_size: int, sizes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Deviations from the group's mean, `[groups, group_size]`, and the members that count,
    `[groups, 1]`."""
    sizes = scores.abs() if sizes is None else sizes
    scores = scores.reshape(-1, group_size)
    counts = counts.bool().reshape(-1, group_size)
    largest = sizes.reshape(-1, group_size).masked_fill(~counts, 0).amax(1, keepdim=True)
    # relative to a member, so that equal scores deviate by exactly 0: GRPO would amplify the
    # rounding of a mean, and of sums of the same rewards at other tokens
    lowest = scores.masked_fill(~counts, torch.inf).amin(1, keepdim=True)
    above = (scores - lowest).masked_fill(~counts, 0)
    differ = above.amax(1, keepdim=True) > ROUNDING_OF_SUMS * largest
    above = above * differ
    members = counts.sum(1, keepdim=True)
    mean = above.sum(1, keepdim=True) / members.clamp(min=1)
    return (above - mean).masked_fill(~counts, 0), members


def grpo_advantages(
    scores: Tensor, counts: Tensor, group_size: int, sizes: Tensor | None = None
) -> Tensor:
    r"""GRPO: (Rᵢ − mean) / (std + 1e-4) over the group, with Bessel's correction, as in TRL's
    `GRPOTrainer`.

    Scores, `counts` and the result are `[batch]`. The `group_size` completions of a prompt are in
    consecutive rows. Those that do not count are skipped, and their advantage is 0. Scores that are
    sums round as the `sizes` of what they are sums of, `[batch]`; by default as they do themselves.

    Source: https://huggingface.co/papers/2402.03300
    """
    deviations, members = _deviations(scores, counts, group_size, sizes)
    variance = (deviations**2).sum(1, keepdim=True) / (members - 1).clamp(min=1)
    return (deviations / (variance.sqrt() + 1e-4)).reshape(-1)


def dr_grpo_advantages(
    scores: Tensor, counts: Tensor, group_size: int, sizes: Tensor | None = None
) -> Tensor:
    r"""Rᵢ − mean over the group (Dr. GRPO).

    It is not divided by the deviation, so that no prompt weighs more than another.

    Arguments and result are those of [`grpo_advantages`].

    Source: https://huggingface.co/papers/2503.20783
    """
    return _deviations(scores, counts, group_size, sizes)[0].reshape(-1)


def rloo_advantages(
    scores: Tensor, counts: Tensor, group_size: int, sizes: Tensor | None = None
) -> Tensor:
    r"""RLOO: Rᵢ − mean over the other members of the group, an unbiased baseline.

    Arguments and result are those of [`grpo_advantages`].

    Source: https://huggingface.co/papers/2402.14740
    """
    deviations, members = _deviations(scores, counts, group_size, sizes)
    # Rᵢ − (ΣR − Rᵢ)/(n − 1) = n/(n − 1)·(Rᵢ − mean)
    return (deviations * members / (members - 1).clamp(min=1)).reshape(-1)


# ---- what a rollout leaves to the next: moments, and a coefficient that follows a measurement ----


class Moments(NamedTuple):
    """Mean and squared deviations of all values so far, independent of the number of ranks (Chan
    et al., 1979)."""

    weight: float = 0.0  # number of the values, lowered for those of earlier rollouts
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(
        cls, x: Tensor, mask: Tensor, all_sum: Reduction = torch.clone
    ) -> tuple["Moments", float]:
        """Moments of a batch, `[batch]` or `[batch, response]`, and how many values a row has."""
        # float64 if the device has it (Apple's GPUs do not): the sums must not depend on batch
        # sizes
        if x.device.type == "mps":
            dtype = torch.float32
        else:
            dtype = torch.float64
        if mask.dim() > 1:
            rows = mask.flatten(1).any(1)
        else:
            rows = mask
        x = x.to(dtype)
        mask = mask.to(dtype)
        total, count, num_rows = all_sum(
            torch.stack([(x * mask).sum(), mask.sum(), rows.to(dtype).sum()])
        )
        mean = total / count.clamp(min=1)
        squares = all_sum((mask * (x - mean) ** 2).sum())
        per_row = count / num_rows.clamp(min=1)
        # the only wait for the device
        mean, count, squares, per_row = torch.stack([mean, count, squares, per_row]).tolist()
        return cls(count, mean, squares), per_row

    def joined(self, batch: "Moments", most: float = math.inf) -> "Moments":
        """These values, which weigh at most `most`, and those of a batch."""
        if not batch.weight:
            return self
        before = min(self.weight, most)
        if self.weight:
            kept = before / self.weight
        else:
            kept = 0.0
        shift = batch.mean - self.mean
        weight = before + batch.weight
        mean = self.mean + shift * batch.weight / weight
        squares = kept * self.squares + batch.squares + shift**2 * before * batch.weight / weight
        return Moments(weight, mean, squares)

    def add(
        self, x: Tensor, mask: Tensor, all_sum: Reduction = torch.clone, memory: float | None = None
    ) -> "Moments":
        """Add a batch, `[batch]` or `[batch, response]`.

        With a `memory`, all earlier batches together weigh at most as much as so many rows of this
        one. Otherwise a mean that moves from rollout to rollout would count as spread.
        """
        batch, per_row = Moments.of(x, mask, all_sum)
        if memory is None:
            return self.joined(batch)
        return self.joined(batch, most=memory * per_row)

    @property
    def varies(self) -> bool:
        """Whether the values differ, by more than the rounding of float32."""
        return self.squares > self.weight * (ROUNDING * self.mean) ** 2

    @property
    def sample_deviation(self) -> float:
        """Standard deviation with Bessel's correction; 1 for fewer than two values, or if all
        are equal."""
        if self.weight <= 1 or self.squares <= self.weight * (ROUNDING_OF_SUMS * self.mean) ** 2:
            return 1.0
        return math.sqrt(self.squares / (self.weight - 1))

    @property
    def unit(self) -> float:
        """Standard deviation of the values themselves, but above their rounding; 1 for none, or
        if all are equal."""
        if self.weight:
            deviation = math.sqrt(self.squares / self.weight)
        else:
            deviation = 0.0
        if deviation:
            return max(deviation, UNIT_FLOOR * abs(self.mean))
        return 1.0


def outliers(totals: Tensor, counts: Tensor, group_size: int = 1) -> Tensor:
    """True at totals of one prompt that are `OUTLYING` times as far from the median as any total of
    the other prompts.

    `totals` and `counts` are `[batch]`, of all ranks, with `group_size` completions of each prompt
    in a row. Nothing is an outlier where all others are equal up to rounding, which have no scale,
    or among fewer than `FEWEST`.
    """
    # the lower median, by sorting: Apple's GPUs have no `nanmedian` before torch 2.8
    ordered = totals.masked_fill(~counts, torch.inf).sort().values
    center = ordered.gather(0, (counts.sum() - 1).clamp(min=0)[None] // 2)
    distances = (totals - center).abs().masked_fill(~counts, 0)
    of_prompts = distances.view(-1, group_size).amax(1)
    prompt = torch.arange(len(totals), device=totals.device) // group_size
    is_farthest = prompt == of_prompts.argmax()
    largest = distances.masked_fill(is_farthest, 0).amax()
    varies = largest > ROUNDING * center.abs()
    num_prompts = counts.view(-1, group_size).any(1).sum()
    is_enough = (counts.sum() >= FEWEST) & (num_prompts >= FEWEST_PROMPTS)
    return counts & is_farthest & is_enough & varies & (distances > OUTLYING * largest)


def adapt_kl_coef(
    value: float, measured: float, target: float, horizon: float, completions: int
) -> float:
    r"""KL coefficient that rises while the KL is above its target and falls while it is below.

    error = clip(measured/target − 1, −0.2, 0.2),  value·(1 + error·min(completions/horizon, 1))

    The `value` is the coefficient so far, and `measured` the mean KL of so many completions (the
    sum over their tokens), in nats; if it is not finite, nothing changes. Over `horizon`
    completions a full error multiplies the coefficient by about e^±0.2.

    Source: https://huggingface.co/papers/1909.08593
    """
    if not math.isfinite(measured):
        return value
    error = min(max(measured / target - 1, -KL_ERROR_BOUND), KL_ERROR_BOUND)
    return value * (1 + error * min(completions / horizon, 1))
