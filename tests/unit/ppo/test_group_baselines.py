"""Advantages within a group: worked examples, recomputation one by one, identities."""

import statistics

import pytest
import torch

from trl_ppo_ext.ppo_math import dr_grpo_advantages, grpo_advantages, rloo_advantages

ALL = [grpo_advantages, dr_grpo_advantages, rloo_advantages]


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance
    )


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
            if function is grpo_advantages:
                spread = statistics.stdev(group) + 1e-4
            else:
                spread = 1.0
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
