"""Where values meet returns: the baseline that is subtracted from them.

The critic's values V, and the mean score M of the other completions of a prompt, predict the return R of a token:

    b = R̄ + α·(V − V̄) + β·(M − M̄),  0 ≤ α, β ≤ 1,

with α and β that fit the returns of this rollout best, by least squares over its tokens. A critic that tells nothing
gets α = 0, and the baseline is a constant; one that is good gets α = 1, and the baseline is its value. With β = 1 and
α = 0 it is RLOO's. All five numbers are those of the other prompts of the rollout: a baseline that depended on its
own return would bias the gradient. A prediction that tells nothing would still seem to explain 1/n of the variance of
n completions. So α and β are 0 below three times that, and hardly shrink far above.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .math import Moments, Reduction

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


def means_of_others(totals: Tensor, counts: Tensor, groups: Groups) -> Tensor:
    """Mean total of the other completions of the prompt that count, or else of the rollout's, `[batch]`."""
    all_counts = groups.gather(counts).to(totals.dtype)
    all_totals = groups.gather(totals) * all_counts
    mean = all_totals.sum() / all_counts.sum().clamp(min=1)
    by_group = all_totals.view(-1, groups.size)
    counts_by_group = all_counts.view(-1, groups.size)
    sums = by_group.sum(1, keepdim=True) - by_group
    others = counts_by_group.sum(1, keepdim=True) - counts_by_group
    means = torch.where(others > 0, sums / others.clamp(min=1), mean)
    return groups.own(means.flatten(), totals)


class Baseline(NamedTuple):
    """Coefficients of each completion's baseline."""

    mean: Tensor  # [batch], R̄
    weights: Tensor  # [batch, predictors], α and β
    centers: Tensor  # [batch, predictors], V̄ and M̄

    def at(self, predictors: Tensor) -> Tensor:
        """Baseline `[batch, response]` of predictors `[batch, response, predictors]`."""
        shift = (self.weights * self.centers).sum(-1)
        return (self.mean - shift)[:, None] + self.explains(predictors)

    def explains(self, predictors: Tensor) -> Tensor:
        """The part of the baseline that differs between tokens, `[batch, response]`."""
        return (predictors * self.weights[:, None]).sum(-1)


def fit_baseline(
    returns: Tensor,
    predictors: Tensor,  # [batch, response, predictors]
    mask: Tensor,
    seen: Moments = Moments(),
    groups: Groups = Groups(),
) -> Baseline:
    """Fit the baseline of each completion to the completions of the other prompts, and R̄ also to earlier rollouts.

    `returns` and `mask` are `[batch, response]`; the mask is 1 at tokens whose return was observed.
    """
    # 1. Sums over the tokens of each completion: counts, returns, predictors, and their products.
    dtype = torch.float32 if returns.device.type == "mps" else torch.float64
    x = torch.cat([returns[..., None], predictors], -1).to(dtype)
    center = torch.full_like(x[0, 0], seen.mean)  # so that squares are not large beside variances
    x = (x - center).masked_fill(~mask[..., None], 0)
    count = mask.sum(1).to(dtype)
    products = torch.einsum("bti,btj->bij", x, x)
    counts = torch.stack([(count > 0).to(dtype), count, count**2], 1)
    sums = torch.cat([counts, x.sum(1), products.flatten(1)], 1)

    # 2. Sums over the completions of all other prompts.
    by_group = groups.gather(sums).unflatten(0, (-1, groups.size)).sum(1)
    total = by_group.sum(0)
    rest = total - by_group
    size = len(center)
    (rows, count, squares), totals, products = rest[:, :3].unbind(1), rest[:, 3 : 3 + size], rest[:, 3 + size :]
    means = totals / count.clamp(min=1)[:, None]
    moments = products.unflatten(1, (size, size)) / count.clamp(min=1)[:, None, None]
    covariance = moments - means[:, :, None] * means[:, None, :]

    # 3. Weights between 0 and 1 by coordinate descent. Tokens of a completion are no chances of their own: long
    #    completions count as fewer.
    variances = covariance.diagonal(dim1=1, dim2=2)
    weights = torch.zeros_like(means)  # the first one, of the returns themselves, stays 0
    for _ in range(SWEEPS):
        for k in range(1, size):
            others = weights.clone()
            others[:, k] = 0
            explained = covariance[:, 0, k] - (others * covariance[:, :, k]).sum(1)
            best = explained / variances[:, k].clamp(min=torch.finfo(dtype).tiny)
            weights[:, k] = torch.where(variances[:, k] > 0, best.clamp(0, 1), 0)
    explained = (weights * covariance[:, 0]).sum(1)
    by_chance = CAUTION * (size - 1) * squares / (count**2).clamp(min=1) * variances[:, 0]
    share = by_chance / explained.clamp(min=torch.finfo(dtype).tiny)
    varies = variances[:, 0] > 1e-12 * (means[:, 0] + center[0]) ** 2  # not by rounding only
    weights = weights * ((1 - share**2).clamp(min=0) * varies)[:, None]

    # 4. Mean of the returns, in which earlier rollouts take part as so many completions. If there is no other
    #    completion at all, it is the completion's own.
    memory = (MEMORY * count / rows.clamp(min=1)).clamp(max=seen.weight)
    mean = means[:, 0] * count / (count + memory).clamp(min=1)  # the center is the mean of earlier rollouts
    if not seen.weight:
        mean = torch.where(count > 0, mean, total[3] / total[1].clamp(min=1))
    by_group = torch.cat([mean[:, None] + center[0], weights[:, 1:], means[:, 1:] + center[1:]], 1)
    by_row = groups.own(by_group.repeat_interleave(groups.size, 0), returns).to(returns.dtype)
    mean, weights, centers = by_row.split([1, size - 1, size - 1], 1)
    return Baseline(mean[:, 0], weights, centers)
