"""Where values meet returns: the baseline that is subtracted from them.

The critic's values V, and the mean score M of the other completions of a prompt, predict the return R of a token:

    b = R̄ + α·(V − V̄) + β·(M − M̄),  0 ≤ α, β ≤ 1,

with α and β that fit the returns of this rollout best, by least squares over its tokens. A critic that tells nothing
gets α = 0, and the baseline is a constant. With β = 1 and α = 0 it is RLOO's, but for the constant. All numbers are
those of the other prompts of the rollout: a baseline that depended on its own return would bias the gradient.

A prediction that tells nothing would still seem to explain 1/n of the variance of n completions. So α and β are 0
below three times that, and hardly shrink far above.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .math import FEWEST, Moments, Reduction

MEMORY = 8  # completions whose weight earlier rollouts have, at most, in means and units of returns
CAUTION = 3  # times the share of variance that a prediction would seem to explain by chance: less counts as nothing
SWEEPS = 20  # of coordinate descent, which approaches the least squares of a box


class Groups(NamedTuple):
    """Completions of a prompt, which are in consecutive rows and may span ranks."""

    size: int = 1
    gather: Reduction = torch.clone  # concatenates the rows of all ranks
    rank: int = 0

    def own(self, rows: Tensor, like: Tensor) -> Tensor:
        """Rows of this rank, from those of all ranks."""
        return rows[self.rank * len(like) :][: len(like)]

    def sums(self, rows: Tensor) -> Tensor:
        """Sums over the completions of each prompt, `[prompts, ...]`, of all ranks."""
        return self.gather(rows).unflatten(0, (-1, self.size)).sum(1)

    def spread(self, by_prompt: Tensor, like: Tensor) -> Tensor:
        """Rows of this rank, from one per prompt."""
        return self.own(by_prompt.repeat_interleave(self.size, 0), like)


def means_of_others(totals: Tensor, counts: Tensor, groups: Groups) -> Tensor:
    """Mean total of the other completions of the prompt that count, or else of the other prompts, `[batch]`."""
    pairs = torch.stack([totals * counts, counts.to(totals.dtype)], 1)
    of_prompts = groups.sums(pairs)
    of_prompt = groups.spread(of_prompts, totals)
    of_siblings = of_prompt - pairs
    of_other_prompts = of_prompts.sum(0) - of_prompt
    chosen = torch.where(of_siblings[:, 1:] > 0, of_siblings, of_other_prompts)
    return chosen[:, 0] / chosen[:, 1].clamp(min=1)


class Baseline(NamedTuple):
    """Coefficients of each completion's baseline."""

    mean: Tensor  # [batch], R̄
    weights: Tensor  # [batch, predictors], α and β
    centers: Tensor  # [batch, predictors], V̄ and M̄
    common: Tensor  # [predictors], means over all prompts, for what is logged

    def at(self, predictors: Tensor) -> Tensor:
        """Baseline `[batch, response]` of predictors `[batch, response, predictors]`."""
        return self.mean[:, None] + (self.weights[:, None] * (predictors - self.centers[:, None])).sum(-1)

    def explains(self, predictors: Tensor) -> Tensor:
        """What the baseline says of returns around their mean, `[batch, response]`.

        With one center for all: that of a completion's other prompts is low where its own is high.
        """
        return (self.weights[:, None] * (predictors - self.common)).sum(-1)


class _Sums(NamedTuple):
    """Sums over tokens; the first axis is that of prompts."""

    rows: Tensor  # [...], completions
    tokens: Tensor  # [...]
    squares: Tensor  # [...], of the tokens of each completion
    totals: Tensor  # [..., 1 + predictors], of returns and predictors
    products: Tensor  # [..., 1 + predictors, 1 + predictors]

    @property
    def means(self) -> Tensor:
        return self.totals / self.tokens.clamp(min=1)[..., None]

    @property
    def covariance(self) -> Tensor:
        means = self.means
        return self.products / self.tokens.clamp(min=1)[..., None, None] - means[..., :, None] * means[..., None, :]


def _sums_of_prompts(x: Tensor, mask: Tensor, groups: Groups) -> _Sums:
    """Sums of each prompt, from returns and predictors `[batch, response, 1 + predictors]`."""
    tokens = mask.sum(1).to(x.dtype)
    counts = torch.stack([(tokens > 0).to(x.dtype), tokens, tokens**2], 1)
    products = torch.einsum("bti,btj->bij", x, x)
    # one collective for all of them
    columns = groups.sums(torch.cat([counts, x.sum(1), products.flatten(1)], 1))
    size = x.shape[-1]
    rows, tokens, squares = columns[:, :3].unbind(1)
    return _Sums(rows, tokens, squares, columns[:, 3 : 3 + size], columns[:, 3 + size :].unflatten(1, (size, size)))


def _weights(sums: _Sums, mean_squares: Tensor, is_cautious: bool) -> Tensor:
    """Weights of the predictors, `[prompts, predictors]`, of least squares in the box from 0 to 1."""
    covariance = sums.covariance
    variances = covariance.diagonal(dim1=1, dim2=2)
    smallest = torch.finfo(variances.dtype).tiny
    weights = torch.zeros_like(variances)  # the first one, of the returns themselves, stays 0

    def left_for(k: int) -> Tensor:
        """Covariance of a predictor with what the others leave of the returns."""
        others = weights.clone()
        others[:, k] = 0
        return covariance[:, 0, k] - (others * covariance[:, :, k]).sum(1)

    # 1. Coordinate descent.
    predictors = range(1, variances.shape[1])
    for _ in range(SWEEPS):
        for k in predictors:
            best = left_for(k) / variances[:, k].clamp(min=smallest)
            weights[:, k] = torch.where(variances[:, k] > 0, best.clamp(0, 1), 0)

    # 2. Tokens of a completion are no chances of their own, and long completions count as fewer.
    varies = variances[:, 0] > 1e-12 * mean_squares  # not by rounding only
    by_chance = CAUTION * len(predictors) * sums.squares / (sums.tokens**2).clamp(min=1) * variances[:, 0]
    explained = torch.stack([weights[:, k] * left_for(k) for k in predictors], 1)
    trust = 1 - (by_chance[:, None] / explained.clamp(min=smallest)) ** 2
    if is_cautious:
        return weights[:, 1:] * (trust.clamp(min=0) * varies[:, None])
    return torch.where((sums.rows >= FEWEST)[:, None], weights[:, 1:] * varies[:, None], 1.0)


def fit_baseline(
    returns: Tensor,
    predictors: Tensor,  # [batch, response, predictors]
    mask: Tensor,
    seen: Moments = Moments(),
    groups: Groups = Groups(),
    is_cautious: bool = True,
) -> Baseline:
    """Fit the baseline of each completion to the completions of the other prompts, and R̄ also to earlier rollouts.

    `returns` and `mask` are `[batch, response]`; the mask is 1 at tokens whose return was observed. Without caution,
    weights are not lowered by chance, and 1 in rollouts of a few: values that are bootstrapped from must know what is
    left, and a constant would charge each end of a completion with the mean return.
    """
    # 1. Sums of each prompt, and of all others.
    dtype = torch.float32 if returns.device.type == "mps" else torch.float64
    x = torch.cat([returns[..., None], predictors], -1).to(dtype)
    center = torch.full_like(x[0, 0], seen.mean)  # so that squares are not large beside variances
    of_prompts = _sums_of_prompts((x - center).masked_fill(~mask[..., None], 0), mask, groups)
    of_all = _Sums(*(sums.sum(0) for sums in of_prompts))
    of_others = _Sums(*(total - sums for total, sums in zip(of_all, of_prompts)))

    # 2. Weights, and means of the predictors.
    means = of_others.means
    weights = _weights(of_others, (means[:, 0] + center[0]) ** 2, is_cautious)

    # 3. Mean of the returns, in which earlier rollouts take part as so many completions. If there is no other
    #    completion at all, it is the completion's own.
    tokens = of_others.tokens
    memory = (MEMORY * tokens / of_others.rows.clamp(min=1)).clamp(max=seen.weight)
    mean = means[:, 0] * tokens / (tokens + memory).clamp(min=1)  # the center is the mean of earlier rollouts
    if not seen.weight:
        mean = torch.where(tokens > 0, mean, of_all.means[0])

    by_prompt = torch.cat([(mean + center[0])[:, None], weights, means[:, 1:] + center[1:]], 1)
    mean, weights, centers = (
        groups.spread(by_prompt, returns).to(returns.dtype).split([1, len(center) - 1, len(center) - 1], 1)
    )
    common = (of_all.means[1:] + center[1:]).to(returns.dtype)
    return Baseline(mean[:, 0], weights, centers, common)
