"""Invariants of the maths, on whatever hypothesis finds: padding, order, processes, bounds,
degenerate rollouts."""

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from properties import GARBAGE, batches, close, property_test, seeds

from trl_ppo_ext import ppo_math

MODES = ("token", "sequence_mean", "sequence_sum")
probabilities = st.floats(0, 1)


def mean_loss(x, y, mask, mode):
    return ppo_math.aggregate_loss((x - y) ** 2, mask, mode)


# name: function of two tensors and a mask, whether its result is one number, or one for each token
FUNCTIONS = {
    "gae": lambda x, y, m: ppo_math.gae(x, y, m, 0.9, 0.8)[0],
    "returns": lambda x, y, m: ppo_math.gae(x, y, m, 0.9, 0.8)[1],
    "gae with lambda by length": lambda x, y, m: ppo_math.gae(
        x, y, m, 1.0, ppo_math.length_adaptive_lambda(m, 0.5).double()
    )[0],
    "whiten": lambda x, y, m: ppo_math.whiten(x, m)[0],
    "whiten around the mean": lambda x, y, m: ppo_math.whiten(x, m, keeps_mean=True)[0],
    "masked_mean": lambda x, y, m: ppo_math.masked_mean(x, m),
    "masked_var": lambda x, y, m: ppo_math.masked_var(x, m),
    "masked_correlation": ppo_math.masked_correlation,
    "explained_variance": ppo_math.explained_variance,
    **{f"loss {mode}": lambda x, y, m, mode=mode: mean_loss(x, y, m, mode) for mode in MODES},
    "policy loss": lambda x, y, m: ppo_math.aggregate_loss(
        ppo_math.clipped_policy_loss(x, y, x - y, 0.2, 0.3, 3.0), m, "token"
    ),
    "sequence policy loss": lambda x, y, m: ppo_math.aggregate_loss(
        ppo_math.clipped_policy_loss(ppo_math.sequence_logprobs(x, y, m), y, x - y, 0.2, 0.3),
        m,
        "token",
    ),
    "value loss": lambda x, y, m: ppo_math.aggregate_loss(
        ppo_math.clipped_value_loss(x, y, y, 0.1), m, "token"
    ),
    **{
        f"KL {k}": lambda x, y, m, k=k: ppo_math.masked_mean(ppo_math.kl_estimate(x, y, k), m)
        for k in ("k1", "k2", "k3")
    },
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def spread_out(tensor, columns, width, fill):
    wide = torch.full((len(tensor), width), fill, dtype=tensor.dtype)
    wide[:, columns] = tensor
    return wide


@every_function
@property_test
@given(batches(), st.lists(st.integers(0, 3), min_size=8, max_size=8), st.sampled_from(GARBAGE))
def test_masked_positions_change_nothing(function, batch, gaps, garbage):
    *tensors, mask = batch
    columns = torch.tensor([place + sum(gaps[: place + 1]) for place in range(mask.shape[1])])
    width = int(columns[-1]) + 1 + gaps[-1]
    dirty = [tensor.masked_fill(mask == 0, garbage) for tensor in tensors]
    wide = [spread_out(tensor, columns, width, garbage) for tensor in dirty]
    expected = function(*tensors, mask)
    given = function(*wide, spread_out(mask, columns, width, 0))
    if expected.ndim:
        assert (given[spread_out(mask, columns, width, 0) == 0] == 0).all()
        given = given[:, columns]
    close(given, expected)


@every_function
@property_test
@given(batches(), seeds)
def test_order_of_rows_changes_nothing(function, batch, seed):
    order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(seed))
    expected = function(*batch)
    given = function(*(tensor[order] for tensor in batch))
    close(given, expected[order] if expected.ndim else expected)


class Meeting:
    """`all_sum` of processes that are threads here: all must reach it equally often."""

    def __init__(self, processes):
        self.barrier = threading.Barrier(processes, timeout=10)
        self.parts = [None] * processes

    def all_sum(self, rank):
        def reduce(tensor):
            self.parts[rank] = tensor
            self.barrier.wait()
            total = torch.stack(self.parts).sum(0)
            self.barrier.wait()
            return total

        return reduce

    def run(self, function, inputs):
        results = [None] * len(inputs)

        def process(rank):
            results[rank] = function(*inputs[rank], all_sum=self.all_sum(rank))

        threads = [threading.Thread(target=process, args=[rank]) for rank in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, m, **k: ppo_math.masked_mean(x, m, **k),
        lambda x, y, m, **k: ppo_math.masked_var(x, m, **k),
        lambda x, y, m, **k: ppo_math.whiten(x, m, **k)[0],
        lambda x, y, m, **k: ppo_math.whiten(x, m, keeps_mean=True, **k)[0],
        ppo_math.masked_correlation,
        ppo_math.explained_variance,
    ],
)
@settings(property_test, max_examples=15)
@given(batches(), st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_ranks_together_have_the_moments_of_the_whole_batch(function, batch, cuts):
    """Also where a process has no row at all."""
    rows = len(batch[0])
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    parts = [tuple(tensor[start:end] for tensor in batch) for start, end in pairwise(edges)]
    expected = function(*batch)
    given = Meeting(len(parts)).run(function, parts)
    if expected.ndim:
        close(torch.cat(given), expected)
    else:
        for part in given:
            close(part, expected)


@property_test
@given(batches(), st.sampled_from(MODES), st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_micro_batches_add_up_to_the_loss_of_the_step(batch, mode, cuts):
    x, y, mask = batch
    rows = len(x)
    if mode == "token":
        count = mask.sum()
    else:
        count = (mask.sum(1) > 0).sum()
    x.requires_grad_()
    (whole,) = torch.autograd.grad(mean_loss(x, y, mask, mode), x)
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    parts = [slice(start, end) for start, end in pairwise(edges)]
    losses = [ppo_math.aggregate_loss((x[p] - y[p]) ** 2, mask[p], mode, count) for p in parts]
    (cut,) = torch.autograd.grad(sum(losses), x)
    close(sum(losses).detach(), mean_loss(x, y, mask, mode).detach())
    close(cut, whole)


# ---- GAE ----


def gae_by_hand(rewards, values, gamma, lam):
    """Python floats, forwards: Âₜ = Σₖ (γλ)ᵏ δₜ₊ₖ."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after)]
    return [
        sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))
    ]


@property_test
@given(batches(), probabilities, probabilities)
def test_gae_equals_the_sum_of_discounted_residuals(batch, gamma, lam):
    rewards, values, mask = batch
    advantages, returns = ppo_math.gae(rewards, values, mask, gamma, lam)
    for row, counts in enumerate(mask.bool()):
        expected = gae_by_hand(
            rewards[row][counts].tolist(), values[row][counts].tolist(), gamma, lam
        )
        close(advantages[row][counts], torch.tensor(expected, dtype=torch.float64))
    close(returns, (advantages + values) * mask)


@property_test
@given(batches(), probabilities)
def test_extreme_lambdas_are_monte_carlo_and_the_residual(batch, gamma):
    rewards, values, mask = batch
    _, returns = ppo_math.gae(rewards, values, mask, gamma, 1.0)
    residuals, _ = ppo_math.gae(rewards, values, mask, gamma, 0.0)
    for row, counts in enumerate(mask.bool()):
        r = rewards[row][counts]
        v = values[row][counts]
        discounted = [
            sum(gamma**k * x for k, x in enumerate(r[t:].tolist())) for t in range(len(r))
        ]
        close(returns[row][counts], torch.tensor(discounted, dtype=torch.float64))
        close(residuals[row][counts], r + gamma * torch.cat([v[1:], v.new_zeros(len(v[:1]))]) - v)


@property_test
@given(batches(tensors=3), probabilities, probabilities, st.floats(-3, 3))
def test_gae_is_linear_and_zero_for_a_perfect_critic(batch, gamma, lam, factor):
    rewards, others, values, mask = batch
    gae = ppo_math.gae
    together, _ = gae(rewards + factor * others, values * (1 + factor), mask, gamma, lam)
    close(
        together,
        gae(rewards, values, mask, gamma, lam)[0]
        + factor * gae(others, values, mask, gamma, lam)[0],
        1e-7,
    )
    perfect = gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]
    close(gae(rewards, perfect, mask, gamma, lam)[0], torch.zeros_like(rewards), atol=1e-8)


# ---- statistics ----


@property_test
@given(batches(tensors=1), st.floats(-100, 100), st.floats(0.1, 100))
def test_whitening_removes_shift_and_scale(batch, shift, scale):
    x, mask = batch
    counted = x[mask.bool()]
    assume(len(counted) >= 2 and counted.std() > 0.01)
    white, unit = ppo_math.whiten(x, mask)
    assert unit == pytest.approx(float((counted.var() + 1e-8) ** 0.5))
    kept = white[mask.bool()]
    # 1e-8 is added to the variance
    expected = counted.var() / (counted.var() + 1e-8)
    close(kept.mean(), kept.new_zeros(()), atol=1e-7)
    close(kept.var(), expected, rtol=1e-6)
    # 1e-8 over 0.1² times 0.01²
    close(ppo_math.whiten(shift + scale * x, mask)[0], white, rtol=1e-2, atol=1e-6)
    close(
        ppo_math.whiten(x, mask, keeps_mean=True)[0][mask.bool()].mean(), counted.mean(), rtol=1e-6
    )


@pytest.mark.parametrize("value", [0.0, 100.7, 5000.3])
def test_whitening_makes_nothing_of_the_rounding_of_equal_values(value):
    mask = torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) < 0.7
    white, unit = ppo_math.whiten(torch.full((64, 256), value), mask)
    assert not white.any() and unit == 1
    kept = ppo_math.whiten(torch.full((64, 256), value), mask, keeps_mean=True)[0][mask]
    assert kept.sub(value).abs().max() <= 1e-6 * value


@property_test
@given(batches(), st.floats(0.1, 10), st.floats(-5, 5))
def test_correlation_reaches_its_bounds_on_a_line(batch, slope, shift):
    x, y, mask = batch
    correlation = ppo_math.masked_correlation(x, y, mask)
    assert -1 - 1e-9 <= correlation <= 1 + 1e-9
    assume(mask.sum() >= 2 and x[mask.bool()].std() > 1e-4)
    close(
        ppo_math.masked_correlation(x, shift - slope * x, mask),
        correlation.new_tensor(-1.0),
        atol=1e-5,
    )
    assert ppo_math.explained_variance(x, y, mask) <= 1


# ---- losses ----


@property_test
@given(batches(), st.floats(-1e4, 1e4))
def test_ratios_stay_finite_for_huge_log_ratios_in_float32(batch, shift):
    logprobs, advantages, mask = (x.float() if x.is_floating_point() else x for x in batch)
    moved = (logprobs + shift).requires_grad_()
    for dual_clip in (None, 3.0):
        per_token = ppo_math.clipped_policy_loss(moved, logprobs, advantages, 0.2, 0.2, dual_clip)
        (gradient,) = torch.autograd.grad(ppo_math.aggregate_loss(per_token, mask, "token"), moved)
        assert (
            per_token.isfinite().all()
            and gradient.isfinite().all()
            and (gradient**2).sum().isfinite()
        )
    for estimator in ("k1", "k2", "k3"):
        kl = ppo_math.kl_estimate(moved, logprobs, estimator)
        (gradient,) = torch.autograd.grad(ppo_math.aggregate_loss(kl, mask, "token"), moved)
        assert kl.isfinite().all() and gradient.isfinite().all()
    sequence = ppo_math.sequence_logprobs(moved, logprobs, mask)
    assert ppo_math.clipped_policy_loss(sequence, logprobs, advantages, 0.2, 0.2).isfinite().all()


@property_test
@given(batches(tensors=3), st.floats(0.01, 0.9), st.floats(0.01, 2), st.floats(1.01, 5))
def test_clipped_loss_is_bounded_with_its_gradient_or_none(batch, low, high, dual_clip):
    old, step, advantages, _ = batch
    logprobs = (old + step).requires_grad_()
    ratio = (logprobs - old).detach().clamp(-20, 20).exp()
    loss = ppo_math.clipped_policy_loss(logprobs, old, advantages, low, high)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    with torch.no_grad():
        # pessimistic: never better than without the clip
        assert (loss >= -advantages * ratio - 1e-9).all()
        good = advantages > 0
        assert (loss[good] >= -(1 + high) * advantages[good] - 1e-9).all()
        assert (loss[~good] >= -(1 - low) * advantages[~good] - 1e-9).all()
        beyond = torch.where(good, ratio > 1 + high, ratio < 1 - low) | (step.abs() > 20)
        close(gradient, torch.where(beyond, 0.0, -advantages * ratio))
        dual = ppo_math.clipped_policy_loss(logprobs, old, advantages, low, high, dual_clip)
        assert (dual <= torch.maximum(loss, torch.zeros_like(loss)) + 1e-9).all()
        assert (dual[~good] <= -dual_clip * advantages[~good] + 1e-9).all() and torch.equal(
            dual[good], loss[good]
        )


@property_test
@given(batches(tensors=3), st.floats(0.01, 5))
def test_clipped_value_loss_is_never_below_the_unclipped(batch, cliprange):
    values, old, returns, _ = batch
    free = ppo_math.clipped_value_loss(values, old, returns, None)
    clipped = ppo_math.clipped_value_loss(values, old, returns, cliprange)
    assert (clipped >= free).all() and (free >= 0).all()
    inside = (values - old).abs() <= cliprange
    close(clipped[inside], free[inside], rtol=1e-6)


@property_test
@given(batches())
def test_kl_estimators_have_their_signs(batch):
    logprobs, ref, _ = batch
    k1, k2, k3 = (
        ppo_math.kl_estimate(logprobs, ref, estimator) for estimator in ("k1", "k2", "k3")
    )
    assert torch.equal(k1, -ppo_math.kl_estimate(ref, logprobs, "k1"))
    assert (k2 >= 0).all() and torch.equal(k2, ppo_math.kl_estimate(ref, logprobs, "k2"))
    near = k1.abs() < 20
    assert (k3[near] >= -1e-12).all() and (k3[near] >= k1[near] - 1).all()


@property_test
@given(batches(tensors=1), st.floats(-10, 10))
def test_constant_loss_aggregates_to_itself_or_the_mean_length(batch, constant):
    x, mask = batch
    assume(mask.any())
    flat = torch.full_like(x, constant)
    lengths = mask.sum(1)
    mean_length = lengths.sum() / (lengths > 0).sum()
    for mode, factor in zip(MODES, (1.0, 1.0, mean_length)):
        close(
            ppo_math.aggregate_loss(flat, mask, mode),
            x.new_tensor(constant * float(factor)),
            rtol=1e-6,
        )
