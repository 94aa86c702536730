"""The default λ follows where scores tell something, and explained variance does not count the
clock."""

from types import SimpleNamespace

import pytest
import torch

from trl_ppo_ext.ppo import credit
from trl_ppo_ext.ppo.places import (
    Information,
    default_lambda,
    enter_at,
    explained_without_clock,
)
from trl_ppo_ext.ppo_math import explained_variance, means_by_number, place_numbers

# of an episode
TURNS = 12
TOKENS = 3
SIZES = {"episodes": 256}


def episodes(rewards, lengths=None):
    """Turns and scores of episodes whose turns have `TOKENS` tokens; `rewards` is `[episodes,
    turns]`."""
    count, turns = rewards.shape
    number = torch.arange(1, turns + 1).repeat_interleave(TOKENS).expand(count, -1)
    if lengths is not None:
        number = number.where(number <= lengths[:, None], 0)
    scores = torch.zeros(number.shape)
    scores[:, TOKENS - 1 :: TOKENS] = rewards
    return scores * (number > 0), number


def lambdas(scores, turns, places=None, information=Information()):
    """λ over a token and a turn after a rollout."""
    places = torch.zeros_like(turns, dtype=torch.bool) if places is None else places
    entered, places = enter_at(scores, places, turns)
    information = information.add(entered, places, torch.ones(len(turns)).bool())
    return default_lambda(information, places, turns)


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1, 10.0])
@pytest.mark.parametrize("turns", [12, 30])
def test_constant_cost_per_turn_tells_nothing(cost, turns):
    """By size, all but a twelfth of the scores would come with turns."""
    success = torch.rand(256) < 0.17
    rewards = torch.full((256, turns), -cost)
    rewards[:, -1] += success
    assert lambdas(*episodes(rewards)) == (1.0, 1.0)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])  # of success in each turn
@pytest.mark.parametrize("cost", [0.0, 0.1])
def test_success_that_ends_an_episode_is_at_its_end(rate, cost):
    """Also if most episodes end early, so that those which go on are the unusual ones."""
    won = torch.rand(256, TURNS) < rate
    first = torch.where(won.any(1), won.int().argmax(1), TURNS - 1)
    rewards = torch.full((256, TURNS), -cost)
    rewards[torch.arange(256), first] += won.any(1)
    assert lambdas(*episodes(rewards, first + 1)) == (1.0, 1.0)


def test_rewards_that_come_with_turns_are_noise_for_each_other():
    scores, turns = episodes((torch.rand(256, TURNS) < 0.3).float())
    over_token, over_turn = lambdas(scores, turns)
    assert over_turn == 0.8 and over_token == pytest.approx(0.8 ** (1 / TOKENS))


def test_rewards_of_tokens_are_places_of_their_own():
    scores = torch.randn(64, 32)
    turns = torch.ones(64, 32, dtype=torch.long)
    assert lambdas(scores, turns, torch.ones_like(turns).bool())[0] == pytest.approx(0.8)


@pytest.mark.parametrize("length", [12, 50, 200])
def test_lambda_of_process_rewards_is_0_8_over_any_step(length):
    """Whatever its length."""
    turns = torch.ones(64, 4 * length, dtype=torch.long)
    places = torch.zeros(64, 4 * length, dtype=torch.bool)
    places[:, length - 1 :: length] = True
    over_token, _ = lambdas(torch.randn(64, 4 * length) * places, turns, places)
    assert over_token**length == pytest.approx(0.8)


def test_lambda_does_not_flip_when_the_success_rate_moves():
    """A solved task tells nothing, so what small rewards tell then does not outweigh what was
    learned from."""
    information = Information()
    seen = []
    for rate in (0.1, 0.5, 0.9, 0.99, 1.0, 1.0, 1.0):
        rewards = 0.01 * torch.randn(256, TURNS)
        rewards[:, -1] += torch.rand(256) < rate
        scores, turns = episodes(rewards)
        entered, places = enter_at(scores, torch.zeros_like(turns).bool(), turns)
        information = information.add(entered, places, torch.ones(256).bool())
        seen.append(default_lambda(information, places, turns))
    assert set(seen) == {(1.0, 1.0)}


def test_nothing_is_known_without_scores():
    scores, turns = episodes(torch.zeros(8, TURNS))
    assert lambdas(scores, turns) == (1.0, 1.0)
    # nor with equal ones, whose distances from their mean are rounding
    assert lambdas(*episodes(torch.full((8, TURNS), 0.1))) == (1.0, 1.0)


def test_ranks_and_batches_change_nothing():
    rewards = torch.randn(64, TURNS, dtype=torch.float64)
    scores, turns = episodes(rewards, torch.randint(1, TURNS + 1, (64,)))
    entered, places = enter_at(scores, torch.zeros_like(turns).bool(), turns)
    usable = torch.rand(64) < 0.8
    whole = Information().add(entered, places, usable)

    # the other half is another rank, whose sums of each reduction are known in advance
    halves = [(entered[half], places[half], usable[half]) for half in (slice(0, 40), slice(40, 64))]
    recorded: list[list[torch.Tensor]] = [[], []]

    def record(number, others):
        def all_sum(x):
            recorded[number].append(x.clone())
            if len(others) >= len(recorded[number]):
                return x + others[len(recorded[number]) - 1]
            return x

        return all_sum

    for _ in range(3):  # each round knows one more reduction of the other rank
        before = [list(x) for x in recorded]
        recorded[0].clear(), recorded[1].clear()
        parts = [
            Information().add(*half, record(i, before[1 - i])) for i, half in enumerate(halves)
        ]
    assert parts[0] == pytest.approx(whole) and parts[1] == pytest.approx(whole)


def test_scores_at_observations_enter_at_the_last_sampled_token():
    turns = torch.tensor([[1, 1, 0, 0, 2]])
    scores = torch.tensor([[0.0, 1.0, 0.0, 2.0, 4.0]])
    given = torch.tensor([[False, False, False, True, False]])
    entered, places = enter_at(scores, given, turns)
    assert entered.tolist() == [[0, 3, 0, 0, 4]]
    assert places.tolist() == [[False, True, False, False, True]]  # ends of turns


def test_places_are_counted_before_each_token():
    places = torch.tensor([[0, 1, 0, 0, 1, 1]]).bool()
    assert place_numbers(places).tolist() == [[0, 0, 1, 1, 1, 2]]
    x = torch.arange(6.0)[None]
    mask = torch.tensor([[1, 1, 1, 0, 1, 0]]).bool()
    means = means_by_number(x, place_numbers(places), mask)
    assert means[:2].tolist() == [0.5, 3.0] and means[2:].isnan().all()


# ---- explained variance


def paid_by_turn(rewards):
    """Returns at each turn, and the number of each turn."""
    returns = rewards.flip(1).cumsum(1).flip(1)
    return returns, torch.arange(rewards.shape[1]).expand_as(returns)


def test_clock_explains_nothing_without_the_clock():
    """Each turn pays 1 and a little chance: time to go is most of a return, and tells nothing of
    an action."""
    returns, numbers = paid_by_turn(1 + 0.5 * torch.randn(256, TURNS))
    clock = TURNS - numbers.float()
    mask = torch.ones_like(returns).bool()
    assert explained_variance(clock, returns, mask) > 0.8
    assert explained_without_clock(clock, returns, numbers, mask).abs() < 1e-6
    # a critic that knows the next reward as well
    knows = clock + paid_by_turn(0.5 * torch.randn(256, TURNS))[0]
    assert explained_without_clock(returns, returns, numbers, mask) == 1
    assert explained_without_clock(knows, returns, numbers, mask) < 0


def test_without_places_before_the_end_nothing_is_subtracted():
    returns = torch.randn(64, 1).expand(64, 32)
    values = returns + torch.randn(64, 32)
    numbers = torch.zeros(64, 32, dtype=torch.long)
    mask = torch.ones(64, 32, dtype=torch.bool)
    expected = explained_variance(values, returns, mask)
    torch.testing.assert_close(
        explained_without_clock(values, returns, numbers, mask).float(), expected
    )


def test_equal_returns_are_not_explained():
    returns = torch.full((8, 8), 0.3)
    mask = torch.ones(8, 8, dtype=torch.bool)
    for values in (returns, torch.randn(8, 8)):
        assert explained_without_clock(values, returns, torch.arange(8).expand(8, 8), mask) == 0


@pytest.mark.parametrize(
    "level, lam, within", [("token", 0.9, 0.9), ("turn", 0.8, 0.9), ("both", 0.8, 0.9)]
)
def test_default_lambda_is_of_the_level_and_within_turns_of_tokens(monkeypatch, level, lam, within):
    monkeypatch.setattr(credit, "default_lambda", lambda *given: (0.9, 0.8))
    options = SimpleNamespace(lam_length_alpha=None)
    args = SimpleNamespace(
        advantage_level=level, lam=None, normalize_rewards=False, critic_options=options
    )
    components = SimpleNamespace(args=args, player=SimpleNamespace(names=[]), all_sum=torch.clone)
    samples = SimpleNamespace(sequences=SimpleNamespace(turns=torch.ones(2, 3)))
    run = SimpleNamespace(information={"": Information()})
    assert credit.lambdas_of(components, samples, run, torch.ones(2, 3)) == (lam, within)
