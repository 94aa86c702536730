"""Estimators as functions over values: where the units of a critic are applied, and what they never change."""

import pytest
import torch

from trl_ppo_ext import ppo_math
from trl_ppo_ext.modeling.critics import Units
from trl_ppo_ext.ppo.advantages import DECAY, Advantages, in_units, of_critic, of_groups, to_go, whitened
from trl_ppo_ext.ppo.math import Moments

STEPS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [1, 0, 0, 0, 0]]).bool()
REWARDS = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * STEPS
OUTPUTS = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * STEPS
SEEN = Moments(20.0, 3.0, 20.0 * 4)


def close(x, y, **tolerance):
    torch.testing.assert_close(x, y, **tolerance)


def monte_carlo(rewards, after=None):
    return ppo_math.gae(rewards, torch.zeros_like(rewards), STEPS, 0.9, 1.0, after)[1]


def test_values_are_outputs_in_units_of_earlier_returns():
    result, _ = of_critic(REWARDS, OUTPUTS, STEPS, SEEN, True, 0.9, 0.8, 0.8)
    close(result.values, (3 + 2 * OUTPUTS) * STEPS)
    advantages, returns = ppo_math.gae(REWARDS, 3 + 2 * OUTPUTS, STEPS, 0.9, 0.8)
    close(result.advantages, advantages)
    close(result.returns, returns)


def test_targets_are_returns_in_units_with_this_rollout():
    result, seen = of_critic(REWARDS, OUTPUTS, STEPS, SEEN, True, 0.9, 0.8, 0.8)
    assert seen == SEEN.add(monte_carlo(REWARDS), STEPS, torch.clone, DECAY)
    close(Units.of(seen).values(result.targets)[STEPS], result.returns[STEPS])
    assert not result.targets[~STEPS].any()


def test_new_critic_predicts_the_mean_return_of_its_first_rollout():
    result, seen = of_critic(REWARDS, torch.zeros_like(OUTPUTS), STEPS, Moments(), True, 0.9, 0.8, 0.8)
    mean = monte_carlo(REWARDS)[STEPS].mean()
    close(result.values[STEPS], mean.expand(int(STEPS.sum())))
    assert seen.mean == pytest.approx(mean.item())


def test_critic_in_the_unit_of_rewards_is_left_as_it_is():
    result, seen = of_critic(REWARDS, OUTPUTS, STEPS, SEEN, False, 0.9, 0.8, 0.8)
    close(result.values, OUTPUTS)
    close(result.targets, result.returns * STEPS)
    assert seen.weight > SEEN.weight  # the advantages still have a unit


def test_policy_and_critic_have_lambdas_of_their_own():
    both = [
        of_critic(REWARDS, OUTPUTS, STEPS, SEEN, True, 0.9, lam, lam_critic)[0]
        for lam, lam_critic in ((0.5, 1.0), (1.0, 0.5))
    ]
    alone = {lam: of_critic(REWARDS, OUTPUTS, STEPS, SEEN, True, 0.9, lam, lam)[0] for lam in (0.5, 1.0)}
    close(both[0].advantages, alone[0.5].advantages)
    close(both[0].returns, alone[1.0].returns)
    close(both[1].advantages, alone[1.0].advantages)
    close(both[1].returns, alone[0.5].returns)


def test_value_after_a_cut_stands_for_the_rest():
    """A completion cut in two, with an exact value after the first part, has the returns of the whole."""
    whole = torch.randn(1, 6, dtype=torch.float64)
    rest = whole[:, 4:].sum(1)
    cut, steps = whole[:, :4], torch.ones(1, 4, dtype=torch.bool)
    after, is_cut = (rest - 3) / 2, torch.tensor([True])
    result, seen = of_critic(cut, torch.zeros_like(cut), steps, SEEN, True, outputs_after=after, is_cut=is_cut)
    returns = whole.flip(1).cumsum(1).flip(1)[:, :4]
    close(result.returns, returns)
    assert seen == pytest.approx(SEEN.add(returns, steps, torch.clone, DECAY))
    ended, _ = of_critic(cut, torch.zeros_like(cut), steps, SEEN, True, outputs_after=after, is_cut=~is_cut)
    close(ended.returns, cut.flip(1).cumsum(1).flip(1))


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("length", [32, 256, 1024])
def test_critic_of_noise_explains_no_outcome(length, lam):
    """Returns with λ < 1 are mostly the critic's own values, so measured by these it would seem to predict."""
    generator = torch.Generator().manual_seed(length)
    steps = torch.ones(64, length, dtype=torch.bool)
    scores = torch.randn(64, 1, generator=generator, dtype=torch.float64)
    rewards = torch.cat([torch.zeros(64, length - 1, dtype=torch.float64), scores], 1)
    noise = torch.randn(64, length, generator=generator, dtype=torch.float64).cumsum(1) / length**0.5
    result, _ = of_critic(rewards, noise, steps, Moments(), True, lam=lam, lam_critic=lam)
    close(result.outcomes, scores.expand(64, length))
    assert ppo_math.explained_variance(result.values, result.outcomes, steps) <= 0.1
    if lam < 1 and length == 1024:
        assert ppo_math.explained_variance(result.values, result.returns, steps) > 0.8


@pytest.mark.parametrize("scale, shift", [(100.0, 0.0), (1.0, 50.0), (0.01, -3.0)])
def test_scaled_advantages_do_not_depend_on_the_rewards_scale_and_shift(scale, shift):
    """Two rollouts with one-step episodes, whose returns scale and shift with the rewards."""
    steps = torch.ones(64, 1, dtype=torch.bool)
    rollouts = torch.randn(2, 64, 1, dtype=torch.float64)

    def learned(scale, shift):
        seen, results = Moments(), []
        for rewards, outputs in zip(rollouts, (torch.zeros(64, 1, dtype=torch.float64), rollouts[0].roll(1, 0))):
            result, seen = of_critic(scale * rewards + shift, outputs, steps, seen, True)
            results.append(in_units(result, seen, steps))
        return results

    for plain, other in zip(learned(1.0, 0.0), learned(scale, shift)):
        close(other.advantages, plain.advantages)
        close(other.targets, plain.targets)
        assert other.unit == pytest.approx(scale * plain.unit)


def test_errors_of_a_lagging_critic_are_scaled_to_the_spread_of_the_returns():
    returns = torch.randn(4, 8, dtype=torch.float64)
    seen = Moments().add(returns, torch.ones_like(returns), torch.clone)
    for error in (0.1, 10.0):
        result = Advantages(error * torch.randn(4, 8, dtype=torch.float64), values=None, returns=returns)
        scaled = in_units(result, seen, torch.ones(4, 8, dtype=torch.bool))
        size, given = ((x.advantages**2).mean().sqrt().item() for x in (scaled, result))
        assert size * seen.unit == pytest.approx(min(given, returns.std().item()), rel=1e-6)
        close(scaled.advantages * scaled.unit, result.advantages)


def test_whitened_advantages_keep_their_unit():
    result = whitened(Advantages(REWARDS), STEPS)
    assert result.advantages[STEPS].mean() == pytest.approx(0, abs=1e-9)
    assert result.unit == pytest.approx(REWARDS[STEPS].std().item(), rel=1e-6)
    close(result.advantages[STEPS] * result.unit, REWARDS[STEPS] - REWARDS[STEPS].mean(), rtol=1e-6, atol=1e-8)


def test_rewards_to_go_are_monte_carlo_returns():
    close(to_go(REWARDS, STEPS, 0.9).advantages[STEPS], monte_carlo(REWARDS)[STEPS])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_groups_that_span_ranks_equal_groups_of_one_process(name):
    rewards, usable = torch.randn(4, 3), torch.tensor([True, True, True, False])
    whole = of_groups(name, rewards, usable, 4).advantages

    def gather(own):
        return usable if own.dtype == torch.bool else rewards.sum(1)

    parts = [of_groups(name, rewards[i : i + 2], usable[i : i + 2], 4, gather, i // 2).advantages for i in (0, 2)]
    close(torch.cat(parts), whole)
    assert whole.shape == (4, 1) and whole[3] == 0


def test_reinforce_has_no_baseline():
    usable = torch.tensor([True, False, True])
    assert of_groups("reinforce", REWARDS, usable, 1).advantages[:, 0].tolist() == (REWARDS.sum(1) * usable).tolist()


def test_units_of_targets_undo_those_of_values():
    units = Units(5.0, 0.1)
    close(units.targets(units.values(OUTPUTS)), OUTPUTS)
