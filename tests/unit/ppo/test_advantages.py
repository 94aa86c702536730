"""Estimators as functions over values: where the units of a critic are applied, and what they never change."""

import pytest
import torch

from trl_ppo_ext import ppo_math
from trl_ppo_ext.config import CriticOptions
from trl_ppo_ext.modeling.critics import Units
from trl_ppo_ext.ppo.advantages import (
    DECAY,
    Advantages,
    default_lambda,
    in_units,
    of_critic,
    of_groups,
    to_go,
)
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


def test_errors_of_a_lagging_critic_are_scaled_to_those_of_the_recent_mean():
    outcomes = torch.randn(4, 8, dtype=torch.float64)
    steps = torch.ones_like(outcomes).bool()
    seen = Moments(32.0, 3.0, 32.0).add(outcomes, steps, torch.clone)  # whose mean is about 1.5
    baseline_error = ((outcomes - seen.mean) ** 2).mean().sqrt().item()
    assert baseline_error > 1.2 * outcomes.std().item()
    for error in (0.1, 10.0):
        result = Advantages(error * torch.randn(4, 8, dtype=torch.float64), outcomes=outcomes)
        scaled = in_units(result, seen, steps)
        size, given = ((x.advantages**2).mean().sqrt().item() for x in (scaled, result))
        assert size * seen.unit == pytest.approx(min(given, baseline_error), rel=1e-6)
        assert scaled.unit == seen.unit


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_critic_of_noise_moves_less_and_less_once_all_returns_are_equal(lam):
    """It errs as the mean of recent returns does, which comes closer with each rollout."""
    rewards, outputs = torch.zeros(64, 32), torch.randn(64, 32)
    rewards[:, -1] = 1.0
    steps, seen, sizes = torch.ones(64, 32, dtype=torch.bool), Moments(1000.0, 0.9, 90.0), []  # solved after 90 %
    for _ in range(20):
        result, seen = of_critic(rewards, outputs, steps, seen, True, lam=lam)
        scaled = in_units(result, seen, steps)
        sizes.append((scaled.advantages**2).mean().sqrt().item())
        assert sizes[-1] * seen.unit <= (1 - seen.mean) * (1 + 1e-3)
        assert scaled.unit == seen.unit  # a KL in the loss weighs what it did
    assert sizes[0] < 0.25 and sizes[-1] < 0.025 and sizes == sorted(sizes, reverse=True)


def test_return_that_surprises_moves_the_policy_though_it_is_the_only_one_of_its_rollout():
    steps, seen, signs = torch.ones(1, 4, dtype=torch.bool), Moments(), []
    for score in (0.0, 1.0, 1.0, 0.0):
        rewards = torch.tensor([[0.0, 0.0, 0.0, score]])
        result, seen = of_critic(rewards, torch.zeros(1, 4), steps, seen, True)
        signs.append(in_units(result, seen, steps).advantages.sign().unique().item())
    assert signs == [0, 1, 1, -1]


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_unit_does_not_fall_below_the_rounding_of_returns(size):
    values, mask = torch.full((8, 8), size), torch.ones(8, 8, dtype=torch.bool)
    seen = Moments().add(size * torch.randn(8, 8), mask, decay=DECAY)
    for _ in range(300):
        seen = seen.add(values, mask, decay=DECAY)
    assert seen.unit == pytest.approx(1e-4 * size, rel=1e-3)


@pytest.mark.parametrize("is_per_turn", [False, True])
def test_default_lambda_follows_the_place_of_the_scores(is_per_turn):
    turns = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 2]])  # two turns in the second one
    at_ends = torch.tensor([[0.0, 2, 0, 0], [0, 0, 0, -1]])

    def lam(*places, scale=1.0, all_sum=torch.clone):
        scores = at_ends.clone()
        for row, place in places:
            scores[row, place] = 5.0
        scores = torch.where(scores == 5, scale * scores, scores)
        each = default_lambda(scores, turns, all_sum)[is_per_turn]
        assert each.shape == (2,) and each[0] == each[1]
        return pytest.approx(each[0].item())

    assert lam() == lam((0, 0), scale=0.02) == 1  # a small part of the scores decides nothing
    assert lam((0, 0)) == lam((1, 0)) == lam((0, 0), (1, 0), (1, 1)) == 0.8  # within a turn
    of_turns = 0.8 if is_per_turn else 0.8 ** (3 / 5)  # 0.8 over a turn, of which there are 3 with 5 tokens
    assert lam((1, 1)) == lam((1, 2)) == pytest.approx(of_turns)  # at its end, or where an environment answered
    assert lam(all_sum=lambda x: x + x.new_tensor([9, 9, 9, 0, 0])) == 0.8  # another rank has some


@pytest.mark.parametrize("lam", [None, 0.95, 0.8])
@pytest.mark.parametrize("length", [256, 1024])
def test_score_at_the_end_reaches_the_first_token_within_two_rollouts(length, lam):
    """The first token decides between scores of 1 and -1, and the critic fits its targets perfectly."""
    rewards, steps = torch.zeros(2, length), torch.ones(2, length, dtype=torch.bool)
    rewards[:, -1] = torch.tensor([1.0, -1.0])
    lam = default_lambda(rewards, steps.long())[0] if lam is None else lam  # of each completion
    seen, outputs, credit = Moments(), torch.zeros(2, length), []
    for _ in range(2):
        result, seen = of_critic(rewards, outputs, steps, seen, True, lam=lam, lam_critic=CriticOptions().lam)
        credit.append(result.advantages[0, 0].item())
        outputs = torch.cat([result.targets[:, :1].mean(0, keepdim=True).expand(2, 1), result.targets[:, 1:]], 1)
    assert max(credit) >= 0.5
    if length == 1024:  # what it was with one λ of 0.95 for both
        both, _ = of_critic(rewards, outputs * 0, steps, Moments(), True, lam=0.95, lam_critic=0.95)
        assert both.advantages[0, 0] < 1e-9


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
