"""Where values meet returns: the baseline that is subtracted from them.

The critic's values V, and the mean score M of the other completions of a prompt, predict the return
R of a token:

    b = R̄ + α·(V − V̄) + β·(M − M̄),  0 ≤ α, β ≤ 1,

with α and β that fit the returns of this rollout best, by least squares over its tokens. A critic
that tells nothing gets α = 0, and the baseline is a constant. With β = 1 and α = 0 it is RLOO's,
but for the constant. α, β and the means are of the other prompts of the rollout, R̄ also of earlier
rollouts: a baseline that depended on its own return would bias the gradient.

What fits some prompts need not hold for others, least of all if a few completions decide. So α and
β shrink by the squared share of what they explain that they still explain of prompts which were
left out of the fit.

With λ below 1 what is fitted are deviations from means at a place of a completion, and only α and
what it explains are used.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ppo_math import Moments, Reduction

MEMORY = 8  # completions whose weight earlier rollouts have, at most, in means and units of returns
FOLDS = 16  # parts of the prompts that are left out in turn
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


def _dtype_of_sums(x: Tensor) -> torch.dtype:
    """Float64, in which sums do not depend on ranks, if the device has it."""
    if x.device.type == "mps":
        return torch.float32
    return torch.float64


def is_nearer(
    values: Tensor, rivals: Tensor, returns: Tensor, mask: Tensor, groups: Groups
) -> Tensor:
    """True if the errors of values vary less than those of rivals on all other prompts,
    `[batch, 1]`."""
    errors = torch.stack([values, rivals], -1).to(_dtype_of_sums(returns)) - returns[..., None]
    errors = errors.masked_fill(~mask[..., None], 0)
    tokens = mask.sum(1, keepdim=True).to(errors.dtype)
    of_prompts = groups.sums(torch.cat([errors.sum(1), errors.square().sum(1), tokens], 1))
    totals, squares, tokens = (of_prompts.sum(0) - of_prompts).split([2, 2, 1], 1)
    around_mean = squares - totals**2 / tokens.clamp(min=1)
    return groups.spread(around_mean[:, :1] < around_mean[:, 1:], returns)


def means_of_others(totals: Tensor, counts: Tensor, groups: Groups) -> Tensor:
    """Mean total of the other completions of the prompt that count, or else of the other
    prompts, `[batch]`."""
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
    left_out: Tensor  # [batch, 1], explained variance of prompts that were left out of a fit

    def at(self, predictors: Tensor) -> Tensor:
        """Baseline `[batch, response]` of predictors `[batch, response, predictors]`."""
        return self.mean[:, None] + (
            self.weights[:, None] * (predictors - self.centers[:, None])
        ).sum(-1)

    def said_by_first(self, predictor: Tensor) -> Tensor:
        """What the first predictor says of returns around their mean, `[batch, response]`.

        With one center for all: that of a completion's other prompts is low where its own is high.
        """
        return self.weights[:, :1] * (predictor - self.common[0])


class _Sums(NamedTuple):
    """Sums over tokens, of returns and predictors; the first axes are those of prompts or parts
    of them."""

    rows: Tensor  # [...], completions
    tokens: Tensor  # [...]
    totals: Tensor  # [..., 1 + predictors]
    products: Tensor  # [..., 1 + predictors, 1 + predictors]

    def map(self, change: Callable[..., Tensor], *others: "_Sums") -> "_Sums":
        """Change each sum, maybe with those of others."""
        return _Sums(*(change(*sums) for sums in zip(self, *others)))

    @property
    def means(self) -> Tensor:
        """`[..., 1 + predictors]`."""
        return self.totals / self.tokens.clamp(min=1)[..., None]

    def around(self, center: Tensor) -> Tensor:
        """Sums of products of deviations from a center, `[..., 1 + predictors, 1 + predictors]`."""
        crossed = self.totals[..., :, None] * center[..., None, :]
        count = self.tokens[..., None, None]
        return (
            self.products
            - crossed
            - crossed.mT
            + count * center[..., :, None] * center[..., None, :]
        )


def _sums_of_prompts(x: Tensor, mask: Tensor, groups: Groups) -> _Sums:
    """Sums of each prompt, from returns and predictors `[batch, response, 1 + predictors]`."""
    tokens = mask.sum(1).to(x.dtype)
    counts = torch.stack([(tokens > 0).to(x.dtype), tokens], 1)
    products = torch.einsum("bti,btj->bij", x, x)
    # one collective for all of them
    columns = groups.sums(torch.cat([counts, x.sum(1), products.flatten(1)], 1))
    size = x.shape[-1]
    rows, tokens = columns[:, :2].unbind(1)
    return _Sums(
        rows, tokens, columns[:, 2 : 2 + size], columns[:, 2 + size :].unflatten(1, (size, size))
    )


def _least_squares(products: Tensor, rounding: Tensor) -> Tensor:
    """Weights of the predictors, `[..., predictors]`, of least squares in the box from 0 to 1.

    `products` are sums of products of deviations, `[..., 1 + predictors, 1 + predictors]`; returns
    come first. Those of predictors below their `rounding`, `[1 + predictors]`, are no variances.
    """
    variances = products.diagonal(dim1=-2, dim2=-1)
    weights = torch.zeros_like(variances)  # the first one, of the returns themselves, stays 0
    for _ in range(SWEEPS):
        for k in range(1, variances.shape[-1]):
            others = weights.clone()
            others[..., k] = 0
            left = products[..., 0, k] - (others * products[..., :, k]).sum(-1)
            best = left / variances[..., k].clamp(min=torch.finfo(variances.dtype).tiny)
            weights[..., k] = torch.where(variances[..., k] > rounding[k], best.clamp(0, 1), 0)
    return weights[..., 1:]


def _explained(errors: Tensor, squares: Tensor) -> Tensor:
    """Explained variance, from sums of squared errors and of squared deviations."""
    return 1 - errors / squares.clamp(min=torch.finfo(squares.dtype).tiny)


def _error(products: Tensor, weights: Tensor) -> Tensor:
    """Sum of squared errors of the returns, `[...]`."""
    signed = torch.cat([torch.ones_like(weights[..., :1]), -weights], -1)
    return torch.einsum("...i,...ij,...j->...", signed, products, signed)


def _explained_left_out(of_prompts: _Sums, of_others: _Sums, rounding: Tensor) -> Tensor:
    """Explained variance of prompts that are left out of a fit in turn, `[prompts, 1]`; a prompt
    takes no part in its own."""
    # 1. Parts of all prompts, and of all but each one, `[prompts, folds]`.
    prompts = len(of_prompts.tokens)
    device = of_prompts.tokens.device
    part = torch.arange(prompts, device=device) % FOLDS
    folds = min(FOLDS, prompts)
    is_in = (part[:, None] == torch.arange(folds, device=device)).to(of_prompts.tokens.dtype)

    def in_parts(x: Tensor) -> Tensor:
        whole = torch.einsum("pf,p...->f...", is_in, x)
        return whole[None] - torch.einsum("pf,p...->pf...", is_in, x)

    left_out = of_prompts.map(in_parts)
    fitted = of_others.map(lambda x, y: x[:, None] - y, left_out)

    # 2. Errors of weights and of a constant, both from the rest, on what was left out.
    center = fitted.means
    tested = left_out.around(center)
    errors = _error(tested, _least_squares(fitted.around(center), rounding)).sum(1)
    constant = tested[..., 0, 0].sum(1)
    return _explained(errors, constant)[:, None]


def fit_baseline(
    returns: Tensor,
    predictors: Tensor,  # [batch, response, predictors]
    mask: Tensor,
    seen: Moments = Moments(),
    groups: Groups = Groups(),
) -> Baseline:
    """Fit the baseline of each completion to the completions of the other prompts, and R̄ also to
    earlier rollouts.

    `returns` and `mask` are `[batch, response]`; the mask is 1 at tokens whose return was observed.
    """
    # 1. Sums of each prompt, and of all others.
    x = torch.cat([returns[..., None], predictors], -1).to(_dtype_of_sums(returns))
    center = torch.full_like(x[0, 0], seen.mean)  # so that squares are not large beside variances
    of_prompts = _sums_of_prompts((x - center).masked_fill(~mask[..., None], 0), mask, groups)
    of_all = of_prompts.map(lambda sums: sums.sum(0))
    of_others = of_prompts.map(lambda sums, total: total - sums, of_all)

    # 2. Weights, and means of the predictors.
    means = of_others.means
    products = of_others.around(means)
    rounding = 1e-12 * of_all.products.diagonal()
    weights = _least_squares(products, rounding)
    left_out = _explained_left_out(of_prompts, of_others, rounding)
    explained = _explained(_error(products, weights), products[..., 0, 0])[:, None]
    smallest = torch.finfo(weights.dtype).tiny
    # squared, for what tells nothing holds a little for half of all parts
    weights = weights * (left_out / explained.clamp(min=smallest)).clamp(0, 1) ** 2
    size_of_returns = of_others.tokens * (means[:, 0] + center[0]) ** 2
    # they vary, not by rounding only
    weights = weights * (products[:, 0, 0] > 1e-12 * size_of_returns)[:, None]

    # 3. Mean of the returns, in which earlier rollouts take part as so many completions. If there
    # is no other completion at all, it is the completion's own.
    tokens = of_others.tokens
    memory = (MEMORY * tokens / of_others.rows.clamp(min=1)).clamp(max=seen.weight)
    # the center is the mean of earlier rollouts
    mean = means[:, 0] * tokens / (tokens + memory).clamp(min=1)
    if not seen.weight:
        mean = torch.where(tokens > 0, mean, of_all.means[0])

    num_predictors = len(center) - 1
    mean_of_returns = (mean + center[0])[:, None]
    means_of_predictors = means[:, 1:] + center[1:]
    by_prompt = torch.cat([mean_of_returns, left_out, weights, means_of_predictors], 1)
    by_row = groups.spread(by_prompt, returns).to(returns.dtype)
    sizes = [1, 1, num_predictors, num_predictors]
    mean, left_out, weights, centers = by_row.split(sizes, 1)
    common = (of_all.means[1:] + center[1:]).to(returns.dtype)
    return Baseline(mean[:, 0], weights, centers, common, left_out)
