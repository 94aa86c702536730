"""Weights for a sampler that is not the policy: closed forms, and their bias by enumeration."""

import itertools
import math
from typing import get_args

import pytest
import torch

from trl_ppo_ext.ppo_math import (
    LOG_RATIO_BOUND,
    SamplerCorrection,
    clipped_policy_loss,
    effective_share,
    gae,
    sampler_weights,
)

# ---- closed forms


def one_by_one(logprobs, sampler_logprobs, mask, mode, clip_max):
    """The definitions, with the standard library, one completion at a time."""
    level, beyond = mode.split("_")
    rows = []
    for new, old, counts in zip(logprobs.tolist(), sampler_logprobs.tolist(), mask.tolist()):
        ratios = [math.exp(a) / math.exp(b) for a, b, c in zip(new, old, counts) if c]
        if level != "token":
            ratios = [math.prod(ratios)] * len(ratios)
        bounded = [min(ratio, clip_max or math.inf) for ratio in ratios]
        if beyond == "mask":
            bounded = [ratio if ratio == bound else 0.0 for ratio, bound in zip(ratios, bounded)]
        weights = iter(bounded)
        rows.append([next(weights) if c else 1.0 for c in counts])
    return torch.tensor(rows, dtype=torch.float64)


MODES = get_args(SamplerCorrection)


@pytest.mark.parametrize("bound", [None, 1.5, 1.2])
@pytest.mark.parametrize("mode", MODES)
def test_weights_equal_those_computed_one_by_one(mode, bound):
    generator = torch.Generator().manual_seed(0)
    logprobs, sampler_logprobs = -torch.rand(2, 40, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(40, 6, generator=generator) < 0.7
    mask[0] = False
    expected = one_by_one(logprobs, sampler_logprobs, mask, mode, bound)
    unbounded = one_by_one(logprobs, sampler_logprobs, mask, mode, None)
    assert (expected != unbounded).any() == (bound is not None)
    torch.testing.assert_close(
        sampler_weights(logprobs, sampler_logprobs, mask, mode, bound), expected
    )


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_the_policy_itself_are_one(mode):
    logprobs = -torch.rand(3, 4)
    assert torch.equal(
        sampler_weights(logprobs, logprobs, torch.ones(3, 4), mode, 1.0), torch.ones(3, 4)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_of_extreme_ratios_are_finite(mode, sign):
    """Masked positions have weight 1, and there is no gradient."""
    logprobs = torch.tensor([[0.5, 1e4, math.nan]]) * sign
    mask = torch.tensor([[1, 1, 0]])
    weights = sampler_weights(logprobs, torch.zeros(1, 3), mask, mode)
    assert weights[0, 1] == pytest.approx(math.exp(sign * LOG_RATIO_BOUND)) and weights[0, 2] == 1
    assert not sampler_weights(
        logprobs.requires_grad_(), torch.zeros(1, 3), mask, mode
    ).requires_grad


def test_weights_on_advantages_scale_the_clipped_loss():
    logprobs, sampled, advantages = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    weights = sampler_weights(logprobs, sampled, torch.ones(5, 8), "token_truncate", 3.0)
    loss = clipped_policy_loss(
        logprobs, logprobs + 0.3 * sampled, advantages, 0.2, 0.2, dual_clip=3.0
    )
    weighted = clipped_policy_loss(
        logprobs, logprobs + 0.3 * sampled, advantages * weights, 0.2, 0.2, dual_clip=3.0
    )
    torch.testing.assert_close(weighted, weights * loss)


# ---- effective sample size


def test_effective_share_follows_its_definition_on_valid_tokens():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    counted = [
        w for row, counts in zip(weights.tolist(), mask.tolist()) for w, c in zip(row, counts) if c
    ]
    expected = sum(counted) ** 2 / len(counted) / sum(w * w for w in counted)
    assert effective_share(weights.masked_fill(~mask, math.nan), mask).item() == pytest.approx(
        expected
    )
    # two ranks, of which each has other rows
    parts = zip(weights.split([2, 4]), mask.split([2, 4]))
    sums = [torch.stack([x[m].sum(), (x[m] ** 2).sum(), m.sum().double()]) for x, m in parts]
    on_ranks = effective_share(weights[:2], mask[:2], lambda own: own + sums[1])
    assert on_ranks.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "share"), [([0.3] * 4, 1), ([0.0, 0.0, 2.0, 0.0], 0.25), ([0.0] * 4, 0)]
)
def test_effective_share_of_equal_single_and_no_weights(weights, share):
    assert effective_share(torch.tensor([weights]), torch.ones(1, 4)).item() == pytest.approx(share)
    assert effective_share(torch.tensor([weights]), torch.zeros(1, 4)).item() == 0


def normal_below(x):
    return math.erfc(-x / math.sqrt(2)) / 2


def truncated_lognormal(variance, bound):
    """Mean weight and effective share of min(W, bound), where log W is normal and W has mean 1."""
    deviation = math.sqrt(variance)
    log = math.log(bound)
    above = 1 - normal_below((log + variance / 2) / deviation)
    mean = normal_below((log - variance / 2) / deviation) + bound * above
    squares = (
        math.exp(variance) * normal_below((log - 1.5 * variance) / deviation) + bound**2 * above
    )
    return mean, mean**2 / squares


@pytest.mark.parametrize(
    ("mode", "mean", "share"), [("sequence_truncate", 0.043, 0.022), ("token_truncate", 1.0, 0.96)]
)
def test_only_token_weights_of_long_completions_keep_their_size(mode, mean, share):
    """512 tokens of which each has a KL of 10/512 nats: twice the KL is the variance of the
    log-ratio."""
    length = 512
    kl = 10.0
    bound = 3.0
    variance = 2 * kl / length
    noise = torch.randn(20_000, length, generator=torch.Generator().manual_seed(0))
    log_ratios = math.sqrt(variance) * noise - variance / 2
    mask = torch.ones(20_000, length)
    weights = sampler_weights(log_ratios, torch.zeros_like(log_ratios), mask, mode, bound)
    expected = truncated_lognormal(2 * kl if mode == "sequence_truncate" else variance, bound)
    assert expected == pytest.approx((mean, share), rel=0.03)
    measured = weights.mean().item(), effective_share(weights, mask).item()
    # the mean of the completions has a standard error of 5 %
    assert measured == pytest.approx(expected, rel=0.2 if mode == "sequence_truncate" else 1e-3)


# ---- bias, by enumeration of all completions

# Three tokens, of which the first one ends a completion; 8 tokens at most. The policy is a table of
# logits, a row per prefix, and a reward comes at every token.
EOS = 0
VOCABULARY = 3
LENGTH = 8
PREFIXES = [prefix for n in range(LENGTH) for prefix in itertools.product((1, 2), repeat=n)]
COMPLETIONS = [
    (*p, t) for p in PREFIXES for t in range(VOCABULARY) if t == EOS or len(p) == LENGTH - 1
]
WIDTHS = torch.tensor([len(completion) for completion in COMPLETIONS])
MASK = torch.arange(LENGTH) < WIDTHS[:, None]
NUMBER = {prefix: number for number, prefix in enumerate(PREFIXES)}
ENTRIES = torch.zeros(len(COMPLETIONS), LENGTH, dtype=torch.long)  # of the table, for each token
for row, completion in enumerate(COMPLETIONS):
    for t, token in enumerate(completion):
        ENTRIES[row, t] = NUMBER[completion[:t]] * VOCABULARY + token
# std of the sampler's noise in each logit; policies over which the bias is averaged
NOISES = (0.1, 0.3)
PROBLEMS = 10
ADVANTAGES = ("score", "rewards to go", "exact critic")
ROWS = {
    "no correction": None,
    "token, unbounded": ("token_truncate", None),
    "`token_truncate`": ("token_truncate", 3.0),
    "`token_mask`": ("token_mask", 3.0),
    "sequence, unbounded": ("sequence_truncate", None),
    "`sequence_truncate`": ("sequence_truncate", 3.0),
    "`sequence_mask`": ("sequence_mask", 3.0),
}


def tokens(table):
    """Log-probs of each token of all completions, 0 outside."""
    return table.log_softmax(1).flatten()[ENTRIES] * MASK


def gradient(table, weights):
    """∇ of the sum of weights·log π over all tokens of all completions."""
    table = table.clone().requires_grad_()
    return torch.autograd.grad((weights * tokens(table)).sum(), table)[0]


def biases(noise, seed):
    """Bias of the expected gradient relative to the true one, `[rows, advantages]`."""
    generator = torch.Generator().manual_seed(seed)
    table, shift = torch.randn(
        2, len(PREFIXES), VOCABULARY, generator=generator, dtype=torch.float64
    )
    table[:, EOS] -= 1
    rewards = torch.randn(table.numel(), generator=generator, dtype=torch.float64)[ENTRIES] * MASK
    logprobs = tokens(table)
    sampled = tokens(table + noise * shift)
    policy = logprobs.sum(1, keepdim=True).exp()
    sampler = sampled.sum(1, keepdim=True).exp()
    torch.testing.assert_close(torch.stack([policy.sum(), sampler.sum()]), torch.ones(2).double())
    _, to_go = gae(rewards, torch.zeros_like(rewards), MASK, 1.0, 1.0)
    states = ENTRIES // VOCABULARY
    score = rewards.sum(1, keepdim=True)
    sums = [
        torch.zeros(len(table)).double().index_put((states,), policy * x, True)
        for x in (to_go, MASK)
    ]
    advantages = {
        "score": (score - (sampler * score).sum()) * MASK,
        "rewards to go": to_go,
        "exact critic": gae(rewards, (sums[0] / sums[1])[states], MASK, 1.0, 0.0)[0],
    }
    leaf = table.clone().requires_grad_()
    exact = torch.autograd.grad((tokens(leaf).sum(1).exp() * score[:, 0]).sum(), leaf)[0]
    weights = [mode and sampler_weights(logprobs, sampled, MASK, *mode) for mode in ROWS.values()]
    result = torch.zeros(len(ROWS), len(ADVANTAGES))
    for column, advantage in enumerate(advantages.values()):
        # under the policy itself, each of them gives the true gradient
        torch.testing.assert_close(gradient(table, policy * advantage), exact, rtol=0, atol=1e-10)
        for row, weight in enumerate(weights):
            expected = gradient(table, sampler * (1 if weight is None else weight) * advantage)
            result[row, column] = (expected - exact).norm() / exact.norm()
    return result


def mean_biases():
    """Mean over problems, `[rows, advantages, noises]`."""
    of_noises = [
        torch.stack([biases(noise, seed) for seed in range(PROBLEMS)]).mean(0) for noise in NOISES
    ]
    return torch.stack(of_noises, -1)


@pytest.fixture(scope="module")
def means():
    return mean_biases()


def test_unbounded_sequence_weight_is_unbiased(means):
    assert (means[list(ROWS).index("sequence, unbounded")] < 1e-10).all()


def test_token_weight_removes_less_than_half_of_the_bias(means):
    of = dict(zip(ROWS, means))
    for name in ("`token_truncate`", "`token_mask`"):
        # tokens hardly ever reach 3
        torch.testing.assert_close(of[name], of["token, unbounded"], rtol=1e-3, atol=0)
    assert (of["token, unbounded"] < of["no correction"]).all()
    assert (of["token, unbounded"] > 0.5 * of["no correction"]).all()
