"""Estimators as functions over values: where the units of a critic are applied, and what they
never change."""

import numpy as np
import pytest
import torch

from trl_ppo_ext import ppo_math
from trl_ppo_ext.config import CriticOptions
from trl_ppo_ext.modeling.critics import Units
from trl_ppo_ext.ppo.advantages import (
    Cuts,
    Discounts,
    divide_by_unit,
    gae_with_critic,
    group_advantages,
    in_groups_that_differ,
    mean_of_others_at_place,
    objective_advantages,
    rewards_to_go,
)
from trl_ppo_ext.ppo.baseline import MEMORY, Groups
from trl_ppo_ext.ppo_math import Moments

STEPS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [1, 0, 0, 0, 0]]).bool()
REWARDS = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * STEPS
OUTPUTS = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * STEPS
SEEN = Moments(20.0, 3.0, 20.0 * 4)


def close(x, y, **tolerance):
    torch.testing.assert_close(x, y, **tolerance)


def monte_carlo(rewards, steps=STEPS):
    return ppo_math.gae(rewards, torch.zeros_like(rewards), steps, 0.9, 1.0)[1]


def with_lambdas(lam, lam_critic=None, gamma=0.9):
    return Discounts(gamma, lam, lam if lam_critic is None else lam_critic)


def plain(rewards, outputs, discounts, seen=SEEN):
    """Values in the unit of the rewards, on which no baseline is fitted."""
    return gae_with_critic(rewards, outputs, STEPS, seen, is_normalized=False, discounts=discounts)


def test_baseline_of_a_critic_that_fits_is_its_value():
    """In units of earlier returns."""
    returns = monte_carlo(torch.randn(64, 5, dtype=torch.float64), steps=torch.ones(64, 5).bool())
    rewards = returns - 0.9 * torch.nn.functional.pad(returns[:, 1:], (0, 1))
    outputs = Units(3.0, 2.0).targets(returns)
    seen = Moments(1.0, 3.0, 4.0)
    result, _ = gae_with_critic(rewards, outputs, outputs > -99, seen, True, with_lambdas(1.0))
    close(result.weights, torch.ones_like(result.weights))
    close(result.values, Units(3.0, 2.0).values(outputs))
    assert ppo_math.explained_variance(result.baseline, returns, outputs > -99) > 0.99


def test_targets_are_returns_in_units_with_this_rollout():
    result, seen = gae_with_critic(REWARDS, OUTPUTS, STEPS, SEEN, True, with_lambdas(0.8))
    assert seen == SEEN.add(monte_carlo(REWARDS), STEPS, torch.clone, MEMORY)
    close(Units.of(seen).values(result.targets)[STEPS], result.returns[STEPS])
    assert not result.targets[~STEPS].any()


def test_what_all_completions_pay_at_a_place_moves_no_token():
    """With λ below 1 and values that know nothing, e.g. a KL penalty, or scores that rise with the
    length."""
    torch.manual_seed(0)
    steps = torch.ones(64, 12).bool()
    rewards = torch.randn(64, 12, dtype=torch.float64)
    outputs = 1e-3 * torch.randn(64, 12, dtype=torch.float64)
    clock = torch.linspace(-3, -1, 12, dtype=torch.float64)
    discounts = with_lambdas(0.8, 1.0, gamma=1.0)
    plain, charged = (
        gae_with_critic(x, outputs, steps, Moments(), True, discounts)[0].advantages
        for x in (rewards, rewards + clock)
    )
    assert charged.mean(0).abs().max() < 0.05 * charged.std()
    close(charged[:, :-1], plain[:, :-1], atol=0.1, rtol=0)


def test_trusted_values_are_all_that_is_subtracted():
    """Where most completions have nothing left to earn, a mean of their place would be noise."""
    torch.manual_seed(0)
    steps = torch.ones(64, 12).bool()
    alive = torch.rand(64, 12).cumsum(1) < 3
    rewards = alive.double()
    left = rewards.flip(1).cumsum(1).flip(1)  # what a good critic predicts
    seen = Moments(100.0, 0.0, 100.0)
    advantages = gae_with_critic(
        rewards, left - 1e-3, steps, seen, True, with_lambdas(0.8, 1.0, gamma=1.0)
    )[0].advantages
    expected, _ = ppo_math.gae(rewards, left - 1e-3, steps, 1.0, 0.8)
    close(advantages, expected)


@pytest.mark.parametrize("lag", [0.0, 5.0])  # what all have learned since
@pytest.mark.parametrize("shift", [0.0, 1.0])  # of the clock, in deviations of the outcomes
def test_values_with_a_wrong_clock_are_compared_at_their_places(shift, lag):
    """They know which completion is better, and expect more and more to come where nothing does."""
    torch.manual_seed(0)
    steps = torch.ones(64, 12).bool()
    known = torch.randn(64, 1).double().expand(64, 12)
    rewards = torch.zeros(64, 12).double()
    rewards[:, -1] = known[:, 0] + torch.randn(64)
    values = known + shift * torch.linspace(-2, 2, 12) - lag
    discounts = with_lambdas(0.8, 1.0, gamma=1.0)
    seen = Moments(100.0, 0.0, 100.0)
    result, _ = gae_with_critic(rewards, values, steps, seen, True, discounts)
    if shift:
        others = (rewards.sum(0)[-1] - rewards[:, -1:]) / 63
        around = values - (values.sum(0) - values) / 63
        close(result.baseline, others + result.weights * around)
    else:
        close(result.baseline, values)
    left = rewards.sum(1, keepdim=True).expand(64, 12)
    assert ppo_math.explained_variance(result.explains, left, steps) > 0.4


def test_wild_values_of_a_prompt_or_an_outlier_are_not_compared_for_others():
    """Values of all others are right, and are taken as they are where the wild ones are left out:
    as those of the prompt itself, or of a completion far beyond all others."""
    torch.manual_seed(0)
    steps = torch.ones(32, 12).bool()
    rewards = torch.randn(32, 12).double()
    exact = rewards.flip(1).cumsum(1).flip(1)
    wild = exact + 1e-3
    wild[0] += torch.linspace(-90, 90, 12)
    discounts = with_lambdas(0.8, 1.0, gamma=1.0)
    known = {"seen": Moments(100.0, 0.0, 100.0), "is_normalized": True, "discounts": discounts}
    of_prompt, _ = gae_with_critic(rewards, wild, steps, **known, groups=Groups(2))
    close(of_prompt.baseline[:2], wild[:2])
    ordinary = torch.arange(32) > 0
    of_ordinary, _ = gae_with_critic(rewards, wild, steps, **known, ordinary=ordinary)
    close(of_ordinary.baseline, wild)
    compared, _ = gae_with_critic(rewards, wild, steps, **known)
    assert not torch.allclose(compared.baseline[1:], wild[1:], atol=1e-3)


def test_noise_of_a_critic_that_knows_the_time_only_is_in_no_advantage():
    """Values fall with what is left, which explains most of the returns, and each has an error."""
    torch.manual_seed(0)
    steps = torch.ones(64, 100).bool()
    rewards = 1.0 + torch.randn(64, 100).double()
    clock = torch.arange(100.0, 0.0, -1.0).double().expand(64, 100)
    seen = Moments(100.0, 0.0, 100.0)  # of a unit of 1

    def size(values):
        discounts = with_lambdas(0.8, 1.0, gamma=1.0)
        result = gae_with_critic(rewards, values, steps, seen, True, discounts)[0]
        return result.advantages.square().mean().sqrt(), result

    exact, _ = size(clock)
    noisy, result = size(clock + 4 * torch.randn(64, 100))
    as_it_is = ppo_math.gae(rewards, result.values, steps, 1.0, 0.8)[0].square().mean().sqrt()
    assert noisy < 1.05 * exact < 0.5 * as_it_is
    without_clock = result.explains - result.explains.mean(0)
    assert without_clock.abs().max() < 1.0  # and nothing is said to be explained by it


def test_deviations_count_as_far_as_they_fit():
    """What is left to earn is that of others, and around it the critic's share."""
    torch.manual_seed(0)
    steps = torch.ones(64, 10).bool()
    known = torch.randn(64, 1).double().expand(64, 10)
    rewards = torch.zeros(64, 10).double()
    rewards[:, -1] = known[:, 0] + torch.randn(64)
    values = 5 + known + 2 * torch.randn(64, 1)  # a fifth of its deviations is right
    discounts = with_lambdas(0.0, 1.0, gamma=1.0)
    seen = Moments(100.0, 0.0, 100.0)
    result, _ = gae_with_critic(rewards, values, steps, seen, True, discounts)
    weight = result.weights[:, 0]
    assert (weight > 0.02).all() and (weight < 0.4).all()
    others = (values.sum(0) - values) / 63
    left = (rewards.sum(0)[-1] - rewards[:, -1:]) / 63
    close(result.baseline, left + weight[:, None] * (values - others), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
def test_values_stand_for_the_completions_that_are_missing_to_eight(count):
    torch.manual_seed(0)
    steps = torch.ones(count, 5).bool()
    rewards = torch.randn(count, 5).double()
    outcomes = rewards.flip(1).cumsum(1).flip(1)
    values = -outcomes  # a weight of 0
    discounts = with_lambdas(0.8, 1.0, gamma=1.0)
    seen = Moments(100.0, 0.0, 100.0)
    result, _ = gae_with_critic(rewards, values, steps, seen, True, discounts)
    of_others = outcomes.sum(0) - outcomes
    missing = 8 - (count - 1)
    assert not result.weights.any()
    close(result.baseline, (of_others + missing * values) / 8)


def test_mean_of_others_at_a_place_is_no_own_number():
    x = torch.arange(20.0).view(10, 2)
    mask = torch.ones_like(x).bool()
    mask[0, 0] = False  # its second token is its first that counts
    usual = mean_of_others_at_place(x, mask, mask)
    first = x[1:, 0]
    assert usual[0, 1].item() == pytest.approx(first.mean().item())
    # of the first places of nine others
    others = (first.sum() + x[0, 1] - x[4, 0]) / 9
    assert usual[4, 0].item() == pytest.approx(others.item())
    # eight others have a second place; of fewer the mean is shrunk
    assert usual[4, 1].item() == pytest.approx((x[1:, 1].sum() - x[4, 1]).item() / 8)
    few = mean_of_others_at_place(x[:3], mask[1:4], mask[1:4])
    assert few[0].tolist() == pytest.approx([(2 + 4) / 8, (3 + 5) / 8])


def test_end_of_the_longest_completion_is_not_compared_with_itself():
    """Places have numbers up to 4,095, which all later tokens share."""
    length = ppo_math.MOST_PLACES + 100
    steps = torch.arange(length) < torch.full((9, 1), 50)
    steps[0] = True
    x = torch.randn(9, length) * steps
    usual = mean_of_others_at_place(x, steps, steps)
    assert usual[0, 49].item() == pytest.approx(x[1:, 49].mean().item(), abs=1e-6)
    assert usual[0, 50:].abs().max() < 1e-9


def test_completion_outside_the_mean_has_that_of_its_own_places():
    """One far beyond all others enters no mean, and is still compared place by place."""
    x = torch.arange(20.0).view(10, 2)
    steps = torch.ones(10, 2).bool()
    enters = steps.clone()
    enters[0] = False
    usual = mean_of_others_at_place(x, steps, enters)
    assert usual[0].tolist() == pytest.approx(x[1:].mean(0).tolist())


def test_new_critic_predicts_the_mean_of_its_first_returns():
    result, seen = gae_with_critic(
        REWARDS, torch.zeros_like(OUTPUTS), STEPS, Moments(), True, with_lambdas(1.0)
    )
    returns = monte_carlo(REWARDS)
    close(result.values[STEPS], returns[STEPS].mean().expand(int(STEPS.sum())))
    for row in range(3):  # what is subtracted is that of the others
        others = STEPS & (torch.arange(3) != row)[:, None]
        close(
            result.baseline[row][STEPS[row]], returns[others].mean().expand(int(STEPS[row].sum()))
        )
    assert seen.mean == pytest.approx(returns[STEPS].mean().item())


def test_critic_in_the_unit_of_rewards_is_left_as_it_is():
    result, seen = plain(REWARDS, OUTPUTS, with_lambdas(0.8))
    close(result.values, OUTPUTS)
    close(result.targets, result.returns * STEPS)
    advantages, returns = ppo_math.gae(REWARDS, OUTPUTS, STEPS, 0.9, 0.8)
    close(result.advantages, advantages)
    close(result.returns, returns)
    assert seen.weight > 0 and result.weights is None  # the advantages still have a unit


def test_policy_and_critic_have_lambdas_of_their_own():
    both = [
        plain(REWARDS, OUTPUTS, with_lambdas(*lambdas))[0] for lambdas in ((0.5, 1.0), (1.0, 0.5))
    ]
    alone = {lam: plain(REWARDS, OUTPUTS, with_lambdas(lam))[0] for lam in (0.5, 1.0)}
    close(both[0].advantages, alone[0.5].advantages)
    close(both[0].returns, alone[1.0].returns)
    close(both[1].advantages, alone[1.0].advantages)
    close(both[1].returns, alone[0.5].returns)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_value_after_a_cut_stands_for_the_rest(is_normalized):
    """A completion cut in two, with an exact value after the first part, has the returns of the
    whole."""
    whole = torch.randn(1, 6, dtype=torch.float64)
    rest = whole[:, 4:].sum(1)
    cut = whole[:, :4]
    steps = torch.ones(1, 4, dtype=torch.bool)
    cuts = Cuts(torch.tensor([True]), Units(3.0, 2.0).targets(rest) if is_normalized else rest)
    result, after = gae_with_critic(
        cut, torch.zeros_like(cut), steps, SEEN, is_normalized, cuts=cuts
    )
    close(result.returns, whole.flip(1).cumsum(1).flip(1)[:, :4])
    # no value enters the unit
    assert after == pytest.approx(
        SEEN.add(cut.flip(1).cumsum(1).flip(1), steps, torch.clone, MEMORY)
    )
    not_cut = cuts._replace(is_cut=~cuts.is_cut)
    ended, _ = gae_with_critic(cut, torch.zeros_like(cut), steps, SEEN, is_normalized, cuts=not_cut)
    close(ended.returns, cut.flip(1).cumsum(1).flip(1))


def test_completions_that_a_limit_cut_tell_nothing_of_a_critic():
    """Its value after a cut is part of their return: it would seem to know what it says itself."""
    rewards, outputs = torch.randn(2, 16, 4, dtype=torch.float64)
    steps = torch.ones(16, 4, dtype=torch.bool)
    cuts = Cuts(torch.arange(16) < 8, torch.randn(16, dtype=torch.float64))
    result, _ = gae_with_critic(rewards, outputs, steps, SEEN, True, cuts=cuts)
    assert torch.equal(result.counted.any(1), ~cuts.is_cut)
    close(result.outcomes, rewards.flip(1).cumsum(1).flip(1))
    # fewer that ended tell too little
    few, _ = gae_with_critic(
        rewards, outputs, steps, SEEN, True, cuts=cuts._replace(is_cut=torch.arange(16) < 9)
    )
    assert few.counted.all()
    close(few.outcomes, few.returns)


def test_exact_critic_of_cut_episodes_is_trusted():
    """Episodes that go on for ever: each value is what the exact critic says of the next one,
    and no end is seen."""
    rewards = torch.randn(64, 8, dtype=torch.float64)
    after = torch.randn(64, dtype=torch.float64)
    exact = ppo_math.gae(rewards, 0 * rewards, rewards > -99, 0.9, 1.0, after)[1]
    units = Units(0.0, 2.0)
    seen = Moments(20.0, 0.0, 80.0)
    cuts = Cuts(torch.ones(64).bool(), units.targets(after))
    for lam in (0.8, 1.0):
        result, _ = gae_with_critic(
            rewards, units.targets(exact), rewards > -99, seen, True, Discounts(0.9, lam, 1.0), cuts
        )
        close(result.returns, exact)
        assert result.weights.min() > 0.99 and result.advantages.abs().max() < 0.3


def test_cut_episodes_are_not_compared_with_those_that_ended():
    """Each step earns 1, and one of twenty ends; what is left is 20, also after a limit."""
    torch.manual_seed(0)
    ends = torch.rand(64, 20) < 0.05
    steps = ends.cumsum(1) - ends.long() == 0
    is_cut = ~ends.any(1)
    assert 8 <= is_cut.sum() <= 56
    rewards = steps.double()
    values = 20 + 0.5 * torch.randn(64, 20).double()
    cuts = Cuts(is_cut, torch.full((64,), 20.0).double())
    seen = Moments(100.0, 0.0, 100.0)
    discounts = with_lambdas(0.8, 1.0, gamma=1.0)
    result, _ = gae_with_critic(rewards, values, steps, seen, True, discounts, cuts)
    assert result.weights.max() < 0.5
    assert result.advantages[is_cut, -5:].mean(0).abs().max() < 3  # of those that ended alone: 10


def test_steps_that_share_the_last_number_of_a_place_have_the_values_as_they_are():
    length = ppo_math.MOST_PLACES + 50
    rewards = torch.randn(9, length).double()
    steps = torch.ones(9, length).bool()
    values = torch.randn(9, length).double()
    seen = Moments(100.0, 0.0, 100.0)
    discounts = with_lambdas(0.8, 1.0, gamma=1.0)
    result, _ = gae_with_critic(rewards, values, steps, seen, True, discounts)
    close(result.baseline[:, ppo_math.MOST_PLACES - 1 :], values[:, ppo_math.MOST_PLACES - 1 :])
    assert (result.baseline[:, 0] - values[:, 0]).abs().min() > 1e-3


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("length", [32, 256, 1024])
def test_critic_of_noise_explains_no_outcome(length, lam):
    """Returns with λ < 1 are mostly the critic's own values, so measured by these it would seem
    to predict."""
    generator = torch.Generator().manual_seed(length)
    steps = torch.ones(64, length, dtype=torch.bool)
    scores = torch.randn(64, 1, generator=generator, dtype=torch.float64)
    rewards = torch.cat([torch.zeros(64, length - 1, dtype=torch.float64), scores], 1)
    noise = (
        torch.randn(64, length, generator=generator, dtype=torch.float64).cumsum(1) / length**0.5
    )
    result, _ = gae_with_critic(rewards, noise, steps, Moments(), True, Discounts(1.0, lam, lam))
    close(result.outcomes, scores.expand(64, length))
    explained = ppo_math.explained_variance(result.explains, result.outcomes, steps)
    assert -0.1 < explained <= 0.05 and result.weights.mean() < 0.2


@pytest.mark.parametrize("scale, shift", [(100.0, 0.0), (1.0, 50.0), (0.01, -3.0)])
def test_scaled_advantages_ignore_scale_and_shift_of_rewards(scale, shift):
    """Two rollouts with one-step episodes, whose returns scale and shift with the rewards."""
    steps = torch.ones(64, 1, dtype=torch.bool)
    rollouts = torch.randn(2, 64, 1, dtype=torch.float64)

    def learned(scale, shift):
        seen = Moments()
        results = []
        for rewards, outputs in zip(
            rollouts, (torch.zeros(64, 1, dtype=torch.float64), rollouts[0].roll(1, 0))
        ):
            result, seen = gae_with_critic(scale * rewards + shift, outputs, steps, seen, True)
            results.append(divide_by_unit(result, seen))
        return results

    for plain, other in zip(learned(1.0, 0.0), learned(scale, shift)):
        close(other.advantages, plain.advantages)
        close(other.targets, plain.targets)
        assert other.unit == pytest.approx(scale * plain.unit)


@pytest.mark.parametrize("error", [0.1, 10.0, 1000.0])
def test_critic_is_never_much_worse_than_a_constant(error):
    """One that errs by any amount costs what a constant costs; one that errs little costs only
    its errors."""
    returns = torch.randn(256, 1, dtype=torch.float64)
    steps = torch.ones(256, 1, dtype=torch.bool)
    outputs = returns + error * torch.randn(256, 1, dtype=torch.float64)
    result, _ = gae_with_critic(returns, outputs, steps, Moments(1.0, 0.0, 1.0), True)
    best = error / (1 + error**2) ** 0.5  # least squares of returns with variance 1
    assert result.advantages.std().item() == pytest.approx(best, rel=0.15)


@pytest.mark.parametrize("lam", [0.8, 1.0])
def test_scores_of_the_group_are_no_values(lam):
    """Each token pays what its prompt pays, and chance: nothing that a token of a good prompt
    does is of merit."""
    prompt = torch.tensor([0.0, 2.0]).repeat_interleave(32).double()
    rewards = prompt[:, None] + 0.1 * torch.randn(64, 20, dtype=torch.float64)
    steps = torch.ones(64, 20, dtype=torch.bool)
    clock = torch.arange(20, 0, -1).double().expand(64, 20)  # all that the critic knows
    results = [
        gae_with_critic(
            rewards,
            clock,
            steps,
            Moments(1.0, 0.0, 1.0),
            True,
            Discounts(1.0, lam, 1.0),
            groups=Groups(size),
        )[0]
        for size in (1, 4)
    ]
    without, with_group = results
    assert (with_group.advantages**2).mean() < 0.7 * (without.advantages**2).mean()
    # as a value, 20 times what a token pays would be missing at the end; so it is subtracted
    # afterwards
    if lam < 1:
        shift = without.advantages - with_group.advantages
        # but for what it changes in the fit of the critic
        assert shift.std(1).max() < 0.2 * shift.mean(1).std()
        assert with_group.weights[:, 1].min() > 0.05


def test_explained_variance_ignores_a_shift_of_the_returns():
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(16, 1, generator=generator, dtype=torch.float64)
    values = returns + 0.5 * torch.randn(16, 1, generator=generator, dtype=torch.float64)
    steps = torch.ones(16, 1, dtype=torch.bool)
    explained = []
    for shift in (0.0, 1000.0):
        seen = Moments(1.0, shift, 1.0)
        result, _ = gae_with_critic(returns + shift, values, steps, seen, True)
        explained.append(
            ppo_math.explained_variance(result.explains, result.outcomes, steps).item()
        )
    assert explained[0] > 0.4 and explained[1] == pytest.approx(explained[0], abs=1e-4)


@pytest.mark.parametrize("completions", [2, 4, 16])
def test_values_that_are_bootstrapped_from_charge_no_end(completions):
    """One per token, and a critic that knows what is left: as a constant it would charge the
    last token with it."""
    rewards = torch.ones(completions, 10).double()
    steps = torch.ones(completions, 10, dtype=torch.bool)
    to_go = torch.arange(10, 0, -1).double().expand(completions, 10)
    seen = Moments(1.0, 0.0, 1.0)
    result, _ = gae_with_critic(rewards, to_go, steps, seen, True, Discounts(1.0, 0.8, 1.0))
    assert result.advantages.abs().max() < 0.6


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_critic_of_noise_moves_nothing_if_returns_are_equal(lam):
    """It has no weight, and the mean of this rollout is what all of them got."""
    rewards = torch.zeros(64, 32)
    outputs = torch.randn(64, 32)
    rewards[:, -1] = 1.0
    # solved after 90 %
    steps = torch.ones(64, 32, dtype=torch.bool)
    seen = Moments(1000.0, 0.9, 90.0)
    sizes = []
    for _ in range(10):
        result, seen = gae_with_critic(
            rewards, outputs, steps, seen, True, Discounts(1.0, lam, 1.0)
        )
        assert not result.weights.any()
        sizes.append((result.advantages**2).mean().sqrt().item())
    # earlier rollouts take part in the mean as eight completions of 72
    assert sizes[0] <= 0.1 / 9 * 1.05 and sizes[-1] < 1e-6


def test_single_surprising_return_moves_the_policy():
    """It is the only one of its rollout."""
    steps = torch.ones(1, 4, dtype=torch.bool)
    seen = Moments()
    signs = []
    for score in (0.0, 1.0, 1.0, 0.0):
        rewards = torch.tensor([[0.0, 0.0, 0.0, score]])
        result, seen = gae_with_critic(rewards, torch.zeros(1, 4), steps, seen, True)
        signs.append(divide_by_unit(result, seen).advantages.sign().unique().item())
    assert signs == [0, 1, 1, -1]


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_unit_does_not_fall_below_the_rounding_of_returns(size):
    values = torch.full((8, 8), size)
    mask = torch.ones(8, 8, dtype=torch.bool)
    seen = Moments().add(size * torch.randn(8, 8), mask, memory=MEMORY)
    for _ in range(300):
        seen = seen.add(values, mask, memory=MEMORY)
    assert seen.unit == pytest.approx(1e-4 * size, rel=1e-3)


@pytest.mark.parametrize("length", [256, 1024])
def test_final_score_reaches_the_first_token_in_two_rollouts(length):
    """The first token decides between scores of 1 and -1, and the critic fits its targets
    perfectly."""
    rewards = torch.zeros(64, length)
    steps = torch.ones(64, length, dtype=torch.bool)
    rewards[:, -1] = torch.tensor([1.0, -1.0]).repeat(32)

    def credit_after(rollouts, discounts):
        seen = Moments()
        outputs = torch.zeros(64, length)
        credit = []
        for _ in range(rollouts):
            result, seen = gae_with_critic(rewards, outputs, steps, seen, True, discounts)
            credit.append(result.advantages[0, 0].item())
            first = result.targets[:, :1].mean(0, keepdim=True).expand(64, 1)
            outputs = torch.cat([first, result.targets[:, 1:]], 1)
        return max(credit)

    assert credit_after(2, Discounts(1.0, 1.0, CriticOptions().lam)) >= 0.5
    assert credit_after(2, Discounts(1.0, 0.95, CriticOptions().lam)) >= 0.5
    if length == 1024:  # what it was with one λ of 0.95 for both
        assert credit_after(1, Discounts(1.0, 0.95, 0.95)) < 1e-9


def test_rewards_to_go_are_monte_carlo_returns():
    close(rewards_to_go(REWARDS, STEPS, 0.9).advantages[STEPS], monte_carlo(REWARDS)[STEPS])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_groups_that_span_ranks_equal_groups_of_one_process(name):
    rewards = torch.randn(4, 3)
    usable = torch.tensor([True, True, True, False])
    whole = group_advantages(name, rewards, usable, 4).advantages

    def gather(own):
        if own.dtype == torch.bool:
            return usable
        return rewards.sum(1)

    parts = [
        group_advantages(name, rewards[i : i + 2], usable[i : i + 2], 4, gather, i // 2).advantages
        for i in (0, 2)
    ]
    close(torch.cat(parts), whole)
    assert whole.shape == (4, 1) and whole[3] == 0


SCORES = 3 * torch.randn(8, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
SCORES[[1, 3, 6, 6], [0, 1, 0, 1]] = torch.nan  # row 6 has no score
SCORED = ~SCORES.isnan().all(1)


def test_objectives_are_normalized_apart_as_in_trl():
    weights = [1.0, 0.25]
    rewards = SCORES.numpy()
    grouped = rewards.reshape(2, 4, 2)
    deviation = np.nanstd(grouped, axis=1, ddof=1, keepdims=True)
    each = (grouped - np.nanmean(grouped, axis=1, keepdims=True)) / (deviation + 1e-4)
    totals = np.nansum(each.reshape(8, 2) * weights, axis=1)
    totals[np.isnan(rewards).all(1)] = np.nan
    expected = np.nan_to_num((totals - np.nanmean(totals)) / (np.nanstd(totals, ddof=1) + 1e-4))
    result = objective_advantages(SCORES, weights, SCORED, Groups(4)).advantages
    close(result, torch.as_tensor(expected)[:, None])
    assert not torch.allclose(
        result, objective_advantages(SCORES, None, SCORED, Groups(4)).advantages, atol=0.1
    )
    # two rows per rank: groups span ranks
    gather = {2: SCORES, 1: SCORED}
    parts = [
        objective_advantages(
            SCORES[i : i + 2],
            weights,
            SCORED[i : i + 2],
            Groups(4, lambda x: gather[x.dim()], i // 2),
        ).advantages
        for i in range(0, 8, 2)
    ]
    close(torch.cat(parts), result)


def test_one_objective_is_grpo_whitened_over_the_batch():
    # row 3 is excluded though it has a score
    usable = SCORED & torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]).bool()
    usable[1] = False
    result = objective_advantages(SCORES[:, :1], None, usable, Groups(4)).advantages
    of_sum = group_advantages("grpo", SCORES[:, :1].nan_to_num(), usable, 4).advantages[:, 0]
    close(result[:, 0], ppo_math.grpo_advantages(of_sum, usable, 8))
    assert result[~usable].abs().max() == 0 and of_sum.std() > 0.5
    close(result[:, 0] * of_sum[usable].std(), of_sum, rtol=1e-3, atol=1e-6)


def test_reinforce_has_no_baseline():
    usable = torch.tensor([True, False, True])
    assert (
        group_advantages("reinforce", REWARDS, usable, 1).advantages[:, 0].tolist()
        == (REWARDS.sum(1) * usable).tolist()
    )


def test_units_of_targets_undo_those_of_values():
    units = Units(5.0, 0.1)
    close(units.targets(units.values(OUTPUTS)), OUTPUTS)


def test_equal_returns_leave_the_unit_of_advantages_as_it_is():
    """A success, and then failures only: with a unit that shrinks to 0, all that is divided by it
    would grow beyond all bounds."""
    steps = torch.ones(16, 4).bool()
    nothing = torch.zeros(16, 4).double()
    success = nothing.clone()
    success[0, -1] = 1.0
    _, seen = gae_with_critic(success, nothing, steps, Moments(), True)
    unit = seen.unit
    for _ in range(20):
        result, seen = gae_with_critic(nothing, nothing, steps, seen, True)
        assert seen.unit == pytest.approx(unit)
    assert seen.mean == pytest.approx(0, abs=1e-6)
    # another success is as large as the first one
    result, seen = gae_with_critic(success, nothing, steps, seen, True)
    assert divide_by_unit(result, seen).advantages.max() == pytest.approx(0.95 / unit, rel=0.1)


def test_explained_variance_is_that_of_the_critic():
    """Scores differ between prompts, which other completions of a prompt tell, and the critic knows
    nothing."""
    torch.manual_seed(0)
    scores = torch.randn(16, 1).repeat_interleave(8, 0) + 0.3 * torch.randn(128, 1)
    rewards = torch.cat([torch.zeros(128, 3), scores], 1).double()
    steps = torch.ones(128, 4).bool()
    result, _ = gae_with_critic(rewards, 0 * rewards, steps, SEEN, True, groups=Groups(8))
    assert result.weights[:, 1].min() > 0.9
    assert not result.explains.any()


def test_one_broken_score_does_not_hide_what_the_critic_explains():
    torch.manual_seed(0)
    values = torch.randn(64, 1).double().expand(64, 4)
    rewards = torch.cat([torch.zeros(64, 3).double(), values[:, :1]], 1)
    rewards[5, -1] = 1e6
    ordinary = torch.arange(64) != 5
    units = Units(0.0, 1.0)
    seen = Moments(100.0, 0.0, 100.0)
    result, _ = gae_with_critic(
        rewards, units.targets(values), values > -99, seen, True, ordinary=ordinary
    )
    assert not result.counted[5].any()
    explained = ppo_math.explained_variance(result.explains, result.outcomes, result.counted)
    assert explained > 0.9


@pytest.mark.parametrize("longest", [5, 200])
def test_a_long_completion_among_short_ones_does_not_explain_itself(longest):
    """Where it is alone, a mean of its place would be its own return."""
    torch.manual_seed(0)
    lengths = torch.tensor([5] * 31 + [longest])
    steps = torch.arange(longest) < lengths[:, None]
    rewards = (torch.randn(32, longest) * steps).double()
    discounts = with_lambdas(0.8, 1.0, gamma=1.0)
    result, _ = gae_with_critic(rewards, 0 * rewards, steps, SEEN, True, discounts)
    explained = ppo_math.explained_variance(result.explains, result.outcomes, result.counted)
    assert explained < 0.4  # and not 0.9, as with its own returns


@pytest.mark.parametrize("total, deviation", [(5, 1), (5, 0.01), (1000, 1)])
def test_normalized_sums_of_the_same_rewards_are_equal(total, deviation):
    """They are rounded otherwise in another order, and cancel with what centers them."""
    torch.manual_seed(0)
    rewards = torch.randn(20)
    rewards = rewards - rewards.mean() + total / 20
    rows = torch.stack([rewards[torch.randperm(20)] for _ in range(8)]) / deviation
    centered = torch.cat([rows[:, :-1], rows[:, -1:] - total / deviation], 1)
    usable = torch.ones(8).bool()
    for name in ("grpo", "dr_grpo", "rloo"):
        assert not group_advantages(name, centered, usable, 8).advantages.any()
    sizes = centered.abs().sum(1)
    assert not in_groups_that_differ(centered.sum(1), usable, sizes, 8).any()
    centered[0, 0] += 0.5
    assert group_advantages("grpo", centered, usable, 8).advantages.all()


def test_single_completions_have_a_unit_that_follows_their_scores():
    """The returns of each rollout are equal, and those of several are not."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.ones(1, 4).bool()
    seen = Moments()
    for score in [0.5, 0.51, *torch.randn(40, generator=generator).tolist()]:
        rewards = torch.tensor([[0.0, 0.0, 0.0, score]]).double()
        result, seen = gae_with_critic(rewards, 0 * rewards, steps, seen, True)
    assert seen.unit > 0.5 and divide_by_unit(result, seen).advantages.abs().max() < 4
