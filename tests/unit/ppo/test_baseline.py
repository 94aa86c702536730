"""The regression baseline: as good as its best part, and without bias, by enumeration."""

import itertools

import pytest
import torch

from trl_ppo_ext.ppo.baseline import FOLDS, Groups, fit_baseline, is_nearer, means_of_others
from trl_ppo_ext.ppo_math import Moments, explained_variance, outliers


def fitted(returns, predictors, groups=Groups(), seen=Moments(), counts=None):
    """Baseline of one-step completions; `returns` is `[batch]` and `predictors` are `[batch,
    predictors]`."""
    mask = (torch.ones(len(returns), dtype=torch.bool) if counts is None else counts)[:, None]
    baseline = fit_baseline(returns[:, None], predictors[:, None], mask, seen, groups)
    return baseline.at(predictors[:, None])[:, 0], baseline


def residual(returns, baseline):
    return ((returns - baseline) ** 2).mean() / returns.var(correction=0)


def ordinary_least_squares(x, y):
    centered = x - x.mean(0)
    return torch.linalg.solve(centered.T @ centered, centered.T @ (y - y.mean()))


def test_weights_are_the_least_squares_of_the_other_completions():
    """Shrunk by what holds for those that are left out in turn, of what they explain."""
    torch.manual_seed(0)
    x = torch.randn(40, 2, dtype=torch.float64) @ torch.tensor([[1.0, 0.5], [0.0, 1.0]]).double()
    returns = 0.6 * x[:, 0] + 0.3 * x[:, 1] + 0.5 * torch.randn(40, dtype=torch.float64) + 7
    _, baseline = fitted(returns, x)
    number = torch.arange(40)
    for row in range(40):
        others = number != row
        weights = ordinary_least_squares(x[others], returns[others])
        errors = 0.0
        constant = 0.0
        for part in range(FOLDS):
            rest = others & (number % FOLDS != part)
            tested = others & (number % FOLDS == part)
            deviations = returns[tested] - returns[rest].mean()
            predicted = (x[tested] - x[rest].mean(0)) @ ordinary_least_squares(
                x[rest], returns[rest]
            )
            errors = errors + ((deviations - predicted) ** 2).sum()
            constant = constant + (deviations**2).sum()
        left = returns[others] - (x[others] - x[others].mean(0)) @ weights
        explained = 1 - left.var() / returns[others].var()
        trust = (1 - errors / constant) / explained
        assert 0.8 < trust < 1
        torch.testing.assert_close(baseline.weights[row], trust**2 * weights, rtol=1e-4, atol=1e-4)
        assert baseline.mean[row].item() == pytest.approx(returns[others].mean().item())


@pytest.mark.parametrize("sign, weight", [(-1.0, 0.0), (0.2, 1.0)])
def test_weights_stay_between_zero_and_one(sign, weight):
    """A critic that is wrong in sign gets none, and values too small are not blown up."""
    returns = torch.randn(64, dtype=torch.float64)
    _, baseline = fitted(returns, sign * returns[:, None])
    torch.testing.assert_close(
        baseline.weights, torch.full((64, 1), weight).double(), rtol=0, atol=0.01
    )


def test_weights_at_a_bound_are_the_best_of_the_box():
    torch.manual_seed(1)
    values = torch.randn(64, dtype=torch.float64)
    x = torch.stack([values, values + 0.1 * torch.randn(64, dtype=torch.float64)], 1)
    returns = 1.5 * x[:, 0] - 0.5 * x[:, 1]  # least squares without bounds are 1.5 and -0.5
    _, baseline = fitted(returns, x)
    grid = torch.linspace(0, 1, 101).double()
    for row in (0, 17):
        others = torch.arange(64) != row
        y = returns[others] - returns[others].mean()
        z = x[others] - x[others].mean(0)

        def loss(weights, y=y, z=z):
            return ((y - z @ weights) ** 2).sum()

        best = min(loss(torch.stack(pair)) for pair in itertools.product(grid, grid))
        assert loss(baseline.weights[row]) - best < 0.01 * (y**2).sum()
        assert loss(torch.ones(2).double()) - best > 0.1 * (y**2).sum()


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0, 3.0, 100.0])
# of the prompts' difficulty, beside chance of 1
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
def test_baseline_is_never_worse_than_its_best_part(noise, spread):
    """Its parts are a constant, the critic and the group."""
    torch.manual_seed(0)
    prompts = 64
    size = 8
    difficulty = (
        spread * torch.randn(prompts, 1, dtype=torch.float64).expand(prompts, size).flatten()
    )
    returns = difficulty + torch.randn(prompts * size, dtype=torch.float64)
    values = difficulty + noise * torch.randn(prompts * size, dtype=torch.float64)
    groups = Groups(size)
    others = means_of_others(returns, torch.ones(prompts * size).bool(), groups)
    baseline, _ = fitted(returns, torch.stack([values, others], 1), groups)
    rivals = (returns.mean().expand_as(returns), values, others)
    assert residual(returns, baseline) < 1.03 * min(residual(returns, rival) for rival in rivals)


def test_groups_that_span_ranks_equal_groups_of_one_process():
    returns = torch.randn(12, dtype=torch.float64)
    x = torch.randn(12, 2, dtype=torch.float64)
    whole, _ = fitted(returns, x, Groups(4))
    sums = []
    for rank in range(2):  # of two rows each, then of all

        def gather(own, rank=rank):
            sums.append(own)
            return own.repeat(2, 1)

        rows = slice(6 * rank, 6 * rank + 6)
        fitted(returns[rows], x[rows], Groups(4, gather, rank))
    everyone = torch.cat(sums)
    parts = [
        fitted(returns[6 * rank :][:6], x[6 * rank :][:6], Groups(4, lambda own: everyone, rank))[0]
        for rank in range(2)
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


def nearer(values, rivals, returns, mask=None, groups=Groups()):
    """Of values, rivals and returns of one step per completion."""
    mask = torch.ones_like(returns).bool() if mask is None else mask
    columns = (x[:, None] for x in (values, rivals, returns, mask))
    return is_nearer(*columns, groups)[:, 0].tolist()


def test_values_are_compared_on_the_other_prompts():
    """One prompt alone has values that are wrong, in both of its completions."""
    returns = torch.randn(8).double()
    values = returns + torch.tensor([9.0, -9.0, 0.1, 0, -0.1, 0, 0.1, 0])
    rivals = returns + torch.tensor([0.0, 0, 1, -1, 1, -1, 1, -1])
    assert nearer(values, rivals, returns, groups=Groups(2)) == 2 * [True] + 6 * [False]
    assert nearer(values, rivals, returns) == 8 * [False]  # of which the other one is a prompt
    mask = torch.arange(8) > 1
    values[:2] = torch.tensor([torch.nan, torch.inf])
    assert nearer(values, rivals, returns, mask, Groups(2)) == 8 * [True]


def test_values_that_all_lag_are_no_farther():
    """By what all completions have learned to earn."""
    returns = torch.randn(8).double()
    rivals = returns + torch.randn(8)
    values = returns + 0.1 * torch.randn(8)
    assert nearer(values - 100, rivals, returns) == 8 * [True]


def test_comparison_of_ranks_is_that_of_one_process():
    returns, values, rivals = torch.randn(3, 16).double()
    whole = nearer(values, rivals, returns, groups=Groups(2))
    sums = []

    def gather(own):
        sums.append(own)
        return own.repeat(2, 1)

    halves = [[x[rows] for x in (values, rivals, returns)] for rows in (slice(8), slice(8, 16))]
    for rank, half in enumerate(halves):
        nearer(*half, groups=Groups(2, gather, rank))
    of_all = torch.cat(sums)
    parts = [
        nearer(*half, groups=Groups(2, lambda own: of_all, rank))
        for rank, half in enumerate(halves)
    ]
    assert parts[0] + parts[1] == whole


def test_mean_of_others_excludes_own_and_uncounted_scores():
    totals = torch.tensor([1.0, 2.0, 6.0, 5.0, 7.0, 0.0])
    counts = torch.tensor([True, True, True, True, False, False])
    means = means_of_others(totals, counts, Groups(3))
    # the fourth one is alone, and has the mean of the other prompt; of those that do not count
    # nothing is used
    assert means.tolist() == [4.0, 3.5, 1.5, 3.0, 5.0, 5.0]


@pytest.mark.parametrize("weight", [0.0, 40.0])
def test_completion_alone_has_the_mean_of_earlier_rollouts(weight):
    seen = Moments(weight, 3.0 if weight else 0.0, weight)
    baseline, coefficients = fitted(torch.tensor([5.0]), torch.tensor([[9.0]]), seen=seen)
    assert baseline.tolist() == [3.0 if weight else 5.0] and not coefficients.weights.any()


def test_prediction_that_tells_nothing_has_hardly_ever_a_weight():
    torch.manual_seed(0)
    harm = []
    for _ in range(200):
        returns, values = torch.randn(2, 64, dtype=torch.float64)
        mask = torch.ones(64, 24, dtype=torch.bool)
        of_tokens = returns[:, None].expand(64, 24), values[:, None, None].expand(64, 24, 1)
        baseline = fit_baseline(*of_tokens, mask)
        harm.append(
            explained_variance(
                baseline.said_by_first(of_tokens[1][..., 0]), of_tokens[0], mask
            ).item()
        )
    assert sum(x < -0.005 for x in harm) <= 0.1 * len(harm) and min(harm) > -0.1


def test_prediction_supported_by_one_completion_has_no_weight():
    """All but one return are nearly equal, as in a solved task, and a wild value is beside the
    other one."""
    torch.manual_seed(0)
    returns = 1 + 0.001 * torch.randn(64, dtype=torch.float64)
    values = 0.1 * torch.randn(64, dtype=torch.float64)
    returns[5], values[5] = 0.9, -0.5
    baseline, coefficients = fitted(returns, values[:, None])
    assert coefficients.weights[torch.arange(64) != 5].max() < 0.02
    assert residual(returns, baseline) < 1.1


# ---- bias

CHANCES = torch.tensor([0.2, 0.7]).double()  # of action 1, for each of two prompts
REWARDS = torch.tensor([[0.0, 3.0], [1.0, -1.0]]).double()  # by prompt and action
VALUES = torch.tensor([0.4, 2.0]).double()  # of a wrong critic


def expected_gradient(prompts, counts, groups, seen):
    """Expectation, over all actions of a rollout, of the gradient by each prompt's logit, of
    those that count."""
    total = torch.zeros(2).double()
    prompts = torch.tensor(prompts)
    for actions in itertools.product((0, 1), repeat=len(prompts)):
        actions = torch.tensor(actions)
        chance = torch.where(actions == 1, CHANCES[prompts], 1 - CHANCES[prompts]).prod()
        returns = REWARDS[prompts, actions]
        values = VALUES[prompts] + torch.arange(len(prompts)).double() * 0.1
        predictors = values[:, None]
        if groups.size > 1:
            others = means_of_others(returns, counts, groups)
            predictors = torch.stack([values, others], 1)
        baseline, _ = fitted(returns, predictors, groups, seen, counts)
        score = (actions - CHANCES[prompts]) * counts
        total = total.index_add(0, prompts, chance * (returns - baseline) * score)
    return total


@pytest.mark.parametrize("seen", [Moments(), Moments(8.0, 1.0, 4.0)])
@pytest.mark.parametrize("missing", [None, 0])  # a completion that does not count
@pytest.mark.parametrize("size", [1, 2, 3])
def test_baseline_has_no_bias(size, missing, seen):
    """The weights differ with every outcome, but never with that of the completion itself."""
    if size == 1:
        prompts = [0, 1, 0, 1]
    else:
        prompts = [0] * size + [1] * size + [0] * size
    counts = torch.tensor([row != missing for row in range(len(prompts))])
    count = torch.zeros(2).double().index_add(0, torch.tensor(prompts), counts.double())
    true = count * CHANCES * (1 - CHANCES) * (REWARDS[:, 1] - REWARDS[:, 0])
    torch.testing.assert_close(expected_gradient(prompts, counts, Groups(size), seen), true)


# ---- outliers


def test_one_score_of_a_million_is_an_outlier():
    totals = torch.cat([torch.randn(31), torch.tensor([1e6])])
    assert outliers(totals, torch.ones(32).bool()).nonzero().flatten().tolist() == [31]
    assert not outliers(totals, totals < 1e5).any()  # it was excluded already


@pytest.mark.parametrize(
    "size, broken, found", [(1, 1, 1), (1, 2, 0), (4, 4, 4), (4, 3, 3), (4, 5, 0), (16, 16, 0)]
)
@pytest.mark.parametrize("shift", [0, 50])
def test_scores_of_one_prompt_may_be_outliers(size, broken, found, shift):
    totals = torch.randn(32) + shift
    totals[:broken] = torch.tensor([1e6, -1e5]).repeat(16)[:broken]
    found_rows = outliers(totals, torch.ones(32).bool(), size).nonzero().flatten()
    assert found_rows.tolist() == [*range(found)]


@pytest.mark.parametrize("others", [0.0, 1e-7, 5e-4])
def test_successes_of_several_prompts_are_no_outliers(others):
    totals = torch.full((64,), -others) * torch.rand(64)
    totals[:12] = 1.0
    assert not outliers(totals, torch.ones(64).bool()).any()


@pytest.mark.parametrize("count, found", [(16, 0), (24, 0), (32, 8)])
def test_prompts_without_scores_are_not_counted(count, found):
    totals = torch.randn(40)
    totals[:8] = 1e6
    assert outliers(totals, torch.arange(40) < count, 8).sum() == found


def test_scores_that_differ_by_rounding_have_no_outliers():
    parts = torch.tensor([[0.1, 0.9], [0.3, 0.7], [0.6, 0.4], [0.2, 0.8]]).repeat(8, 1)
    totals = (0.7 * parts).sum(1)
    assert len(totals.unique()) > 1
    totals[0] = 0.0
    assert not outliers(totals, torch.ones(32).bool()).any()


@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_completions_have_no_outliers(count):
    totals = torch.randn(32)
    totals[0] = 1e6
    assert not outliers(totals, torch.arange(32) < count).any()


@pytest.mark.parametrize("count", [8, 64, 256])
def test_rare_successes_and_normal_scores_are_no_outliers(count):
    one = torch.zeros(count)
    one[3] = 1.0
    drawn = [torch.zeros(count), torch.randn(count), torch.randn(count).exp()]
    small = [one + size * torch.randn(count) for size in (0.1, 0.01)]
    # a penalty for length
    small.append(one - 0.001 * torch.randint(1, 20, (count,)))
    for totals in (one, *drawn, *small):
        assert not outliers(totals, torch.ones(count).bool()).any()
