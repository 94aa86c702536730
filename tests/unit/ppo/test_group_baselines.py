"""Advantages within a group: worked examples, recomputation one by one, identities."""

import math
import statistics

import pytest
import torch

from trl_ppo_ext.ppo.math import dr_grpo_advantages, grpo_advantages, rloo_advantages

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


# two groups of four: 1, 2, 3, 6 with mean 3 and variance (4 + 1 + 0 + 9)/3; three completions score the same
SCORES = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 5.0, 9.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (dr_grpo_advantages, [-2, -1, 0, 3, -1, -1, -1, 3]),
        (rloo_advantages, [1 - 11 / 3, 2 - 10 / 3, 0, 6 - 2, -4 / 3, -4 / 3, -4 / 3, 4]),
        (
            grpo_advantages,
            [x / (math.sqrt(14 / 3) + 1e-4) for x in (-2, -1, 0, 3)] + [x / (2 + 1e-4) for x in (-1, -1, -1, 3)],
        ),
    ],
)
def test_advantages_by_hand(function, expected):
    close(function(SCORES, everything(SCORES), 4), expected)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # what is left: 1, 3 and 5 with mean 3 and deviation 2; then 5 alone
        (dr_grpo_advantages, [-2, 0, 0, 2, 0, 0, 0, 0]),
        (rloo_advantages, [-3, 0, 0, 3, 0, 0, 0, 0]),
        (grpo_advantages, [-2 / (2 + 1e-4), 0, 0, 2 / (2 + 1e-4), 0, 0, 0, 0]),
    ],
)
def test_failed_completions_are_skipped_by_hand(function, expected):
    scores = torch.tensor([1.0, 100.0, 3.0, 5.0, 7.0, 5.0, 8.0, 9.0], dtype=torch.float64)
    counts = torch.tensor([1, 0, 1, 1, 0, 1, 0, 0]).bool()
    close(function(scores, counts, 4), expected)


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
@pytest.mark.parametrize("score", [1e6, math.nan, math.inf, -math.inf])
def test_score_of_a_failed_completion_changes_nothing(function, score):
    scores, counts = normal(12, seed=1), torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0]).bool()
    expected = function(scores, counts, 4)
    actual = function(scores.masked_fill(~counts, score), counts, 4)
    assert torch.equal(actual, expected)
    assert not actual[~counts].any()


@pytest.mark.parametrize("function", ALL)
def test_group_of_fewer_than_two_has_no_advantage(function):
    scores = normal(6, seed=1)
    assert torch.equal(function(scores, everything(scores), 1), torch.zeros_like(scores))
    lonely = torch.tensor([0, 1, 0, 0, 0, 0]).bool()
    assert torch.equal(function(scores, lonely, 3), torch.zeros_like(scores))


@pytest.mark.parametrize("function", ALL)
def test_groups_are_independent(function):
    scores, counts = normal(12, seed=1), normal(12, seed=2) > -1
    together = function(scores, counts, 4)
    apart = [function(scores[i : i + 4], counts[i : i + 4], 4) for i in (0, 4, 8)]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize("function", ALL)
def test_advantages_sum_to_zero_in_the_order_of_scores(function):
    scores = normal(24, seed=1)
    advantages = function(scores, everything(scores), 6).reshape(4, 6)
    close(advantages.sum(1), torch.zeros(4))
    assert torch.equal(advantages.argsort(1), scores.reshape(4, 6).argsort(1))
    close(function(scores + 7, everything(scores), 6).reshape(4, 6), advantages)


def test_rloo_is_a_multiple_of_dr_grpo():
    scores = normal(24, seed=1)
    counts = everything(scores)
    close(rloo_advantages(scores, counts, 6), 6 / 5 * dr_grpo_advantages(scores, counts, 6))
    counts[::6] = False
    close(rloo_advantages(scores, counts, 6), 5 / 4 * dr_grpo_advantages(scores, counts, 6))


def test_grpo_has_unit_deviation_at_any_scale():
    scores = normal(24, seed=1)
    advantages = grpo_advantages(scores, everything(scores), 6)
    close(grpo_advantages(100 * scores, everything(scores), 6), advantages, 1e-3)
    close(advantages.reshape(4, 6).std(1), torch.ones(4), 1e-3)


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("score", [0.1, 1000.1, -1e5 / 3])
def test_equal_scores_have_exactly_no_advantage_in_float32(function, score):
    scores = torch.full((12,), score)
    assert torch.equal(function(scores, everything(scores), 6), torch.zeros(12))
