"""Advantages within a group: worked examples, recomputation one by one, identities."""

import math
import statistics

import pytest
import torch

from trl_ppo_ext.ppo.math import dr_grpo_advantages, grpo_advantages, prompt_weights, rloo_advantages

ALL = [grpo_advantages, dr_grpo_advantages, rloo_advantages]


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def everything(scores):
    return torch.ones(len(scores), dtype=torch.bool)


def one_by_one(function, scores, counts, group_size):
    """The definitions of the papers, with the standard library, one completion at a time."""
    advantages = []
    for i, (score, counted) in enumerate(zip(scores, counts)):
        first = i - i % group_size
        others = [scores[j] for j in range(first, first + group_size) if counts[j] and j != i]
        if not counted or not others:
            advantages.append(0.0)
        elif function is rloo_advantages:
            advantages.append(score - statistics.fmean(others))
        else:
            group = [score, *others]
            spread = statistics.stdev(group) + 1e-4 if function is grpo_advantages else 1.0
            advantages.append((score - statistics.fmean(group)) / spread)
    return advantages


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("group_size", [1, 2, 3, 6])
def test_advantages_equal_those_computed_one_by_one(function, group_size):
    scores = 2 + 3 * normal(24, seed=group_size)
    counts = normal(24, seed=10 + group_size) > -0.5
    assert counts.any()
    assert not counts.all()
    expected = one_by_one(function, scores.tolist(), counts.tolist(), group_size)
    close(function(scores, counts, group_size), expected)


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("score", [0.1, 1000.1, -1e5 / 3])
def test_equal_scores_have_exactly_no_advantage_in_float32(function, score):
    scores = torch.full((12,), score)
    assert torch.equal(function(scores, everything(scores), 6), torch.zeros(12))


# ---- weights of the value loss


def test_prompt_weights_are_inverse_to_the_spread_of_the_group():
    """The mean variance, (2/3 + 50/3 + 0)/3 here, counts as one more observation."""
    scores = torch.tensor([0.0, 1, 1, 0, 10, 5, 5, 0, 3, 3, 3, 3], dtype=torch.float64)
    scores[:4] *= math.sqrt(2 / 3)
    weights = prompt_weights(scores, torch.ones(12), 4).reshape(3, 4)
    pooled = (2 / 3 + 50 + 0) / 9
    wanted = torch.tensor([((squares + pooled) / 4) ** -0.5 for squares in (2 / 3, 50, 0)], dtype=torch.float64)
    close(weights[:, 0], wanted / wanted.mean())
    assert (weights == weights[:, :1]).all() and weights[2, 0] > weights[0, 0] > weights[1, 0]


def test_prompt_weights_have_mean_one_over_those_that_count():
    generator = torch.Generator().manual_seed(0)
    scores, counts = torch.randn(40, generator=generator), torch.rand(40, generator=generator) < 0.6
    weights = prompt_weights(scores.masked_fill(~counts, math.nan), counts, 4)
    assert weights[counts].mean() == pytest.approx(1) and (weights[~counts] == 0).all()
    torch.testing.assert_close(prompt_weights(100 * scores + 7, counts, 4), weights, rtol=1e-3, atol=1e-4)
    shuffled = torch.randperm(10, generator=generator)
    rows = (4 * shuffled[:, None] + torch.arange(4)).flatten()
    torch.testing.assert_close(prompt_weights(scores[rows], counts[rows], 4), weights[rows])


@pytest.mark.parametrize("scores", [torch.full((8,), 3.0), torch.arange(4.0).repeat(2)])
def test_prompt_weights_of_groups_alike_are_one(scores):
    torch.testing.assert_close(prompt_weights(scores, torch.ones(8), 4), torch.ones(8))
    assert not prompt_weights(scores, torch.zeros(8), 4).any()
