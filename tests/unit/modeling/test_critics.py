"""Inputs of the side critic, and what the file of a critic holds."""

import pytest
import torch

from trl_ppo_ext.modeling import SideCritic, ValueHead
from trl_ppo_ext.modeling.critics import EARNED_BOUND, Units, rewards_so_far
from trl_ppo_ext.ppo.math import Moments, explained_variance


def test_side_critic_of_shorter_completions_reads_no_mirror_image_beyond():
    critic = SideCritic(32, 32, 1, 8, False, torch.device("cpu"))
    read = critic.read([torch.ones(4, 32)], torch.tensor([0, 7, 8, 16]), None)
    assert torch.equal(read[2], read[3]) and not torch.allclose(read[0], read[3])


@pytest.mark.parametrize("has_moments", [True, False])
def test_critic_predicts_in_the_units_that_its_file_has(has_moments):
    head = ValueHead(8, not has_moments, torch.device("cpu"))
    moments = {"returns": torch.tensor([4.0, 2.0, 16.0])} if has_moments else {}
    head.load_saved(dict(head.state_dict()) | moments)
    assert head.is_normalized is has_moments and head.saved_moments.keys() == moments.keys()
    assert head.units(Moments(1.0, 2.0, 9.0)) == (Units(2.0, 3.0) if has_moments else Units())


# ---- rewards so far


def test_earned_is_the_mean_of_earlier_standardized_rewards():
    rewards = torch.tensor([[1.0, 3.0, 9.0, 5.0, 7.0], [5.0, 1.0, 2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool()
    earned = rewards_so_far(rewards, mask, Units(1.0, 2.0), is_known=True)
    torch.testing.assert_close(earned, torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0], [0.0, 2.0, 1.0, 0.0, 0.0]]))


def test_earned_never_depends_on_its_own_or_later_rewards():
    rewards, mask = torch.randn(3, 6), torch.ones(3, 6, dtype=torch.bool)
    for token in range(6):
        later = rewards.clone()
        later[:, token:] += 10 * torch.randn(3, 6 - token)
        before, after = (rewards_so_far(x, mask, Units(), is_known=True) for x in (rewards, later))
        assert torch.equal(before[:, : token + 1], after[:, : token + 1]), token


def test_outliers_are_bounded_and_unknown_units_give_zero():
    rewards, mask = torch.tensor([[1e6, 0.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert rewards_so_far(rewards, mask, Units(), is_known=True)[0, 1] == EARNED_BOUND
    assert not rewards_so_far(rewards, mask, Units(), is_known=False).any()


@pytest.mark.parametrize("size", [64, 576, 896, 3584])
def test_side_critic_learns_alike_at_any_width_of_the_policy(size):
    """Returns of which a linear function of the states explains half, in five rollouts of four optimizer steps."""
    generator = torch.Generator().manual_seed(0)
    layers, latent, completions, length = (2 if size == 64 else 28), 16, 64, 8
    torch.manual_seed(0)
    critic = SideCritic(size, size, layers, length, True, torch.device("cpu"))
    optimizer = torch.optim.Adam(critic.parameters(), lr=SideCritic.learning_rate)
    mixing = [torch.randn(latent, size, generator=generator) / latent**0.5 for _ in critic.layers]
    worth = torch.randn(latent, 1, generator=generator) / (2 * latent) ** 0.5

    def rollout():
        x = torch.randn(completions * length, latent, generator=generator)
        states = [x @ mix + 0.5 * torch.randn(len(x), size, generator=generator) for mix in mixing]
        noise = torch.randn(len(x), 1, generator=generator) * 0.5**0.5
        return critic.read(states, torch.arange(length).repeat(completions), None), x @ worth + noise

    def values(inputs):
        with torch.no_grad():
            return critic(inputs)

    unseen, outcomes = rollout()
    before = values(unseen)
    for _ in range(5):
        inputs, returns = rollout()
        for _ in range(4):
            optimizer.zero_grad()
            (0.25 * (critic(inputs) - returns) ** 2).mean().backward()
            optimizer.step()
            after = values(unseen)
            assert (after - before).square().mean().sqrt() < 0.2  # deviations of the returns
            before = after
    assert 1 - (before - outcomes).var() / outcomes.var() > 0.25


# ---- how a new one begins


def begun(returns, mask):
    """Explained variance of the trend, and a critic that began with these returns."""
    critic = SideCritic(64, 64, 2, mask.shape[1], True, torch.device("cpu"))
    units = Units(returns[mask].mean().item(), returns[mask].std().item())
    trend = critic.begin(units.targets(returns), mask, torch.clone)
    return float(explained_variance(units.values(trend), returns, mask)), critic, trend


def test_new_critic_begins_with_the_mean_return_by_position():
    to_go = torch.arange(24, 0, -1.0).expand(256, 24)
    mask = torch.ones(256, 24, dtype=torch.bool)
    explained, critic, trend = begun(to_go + torch.randn(256, 24), mask)
    best = to_go.var() / (to_go.var() + 1)
    assert 0.95 * best < explained <= best
    read = critic.read([torch.randn(24, 64) for _ in critic.layers], torch.arange(24), None)
    with torch.no_grad():
        torch.testing.assert_close(critic(read)[:, 0], trend[0])  # what the network adds begins at 0


@pytest.mark.parametrize("completions", [4, 8, 64])
@pytest.mark.parametrize("has_score_at_end", [True, False])
def test_trend_of_noise_explains_nothing(completions, has_score_at_end):
    torch.manual_seed(0)
    mask = torch.arange(32) < torch.randint(1, 33, (completions, 1))
    returns = torch.randn(completions, 1 if has_score_at_end else 32) * mask
    assert abs(begun(returns, mask)[0]) <= 0.1


def test_rollout_without_a_token_that_counts_has_no_trend():
    critic = SideCritic(64, 64, 2, 8, True, torch.device("cpu"))
    assert not critic.begin(torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.bool), torch.clone).any()


def test_trend_stays_within_the_returns_where_no_completion_was():
    critic = SideCritic(64, 64, 2, 1024, True, torch.device("cpu"))
    targets = torch.linspace(2, -2, 100).expand(256, 100)
    critic.begin(targets, torch.ones(256, 100, dtype=torch.bool), torch.clone)
    trend = critic.cosines(torch.arange(1025)) @ critic.trend
    assert trend.abs().max() < 2.5 and (trend[:100] - targets[0]).abs().max() < 1


def test_trend_is_the_same_on_several_processes():
    mask = torch.arange(12) < torch.tensor([12, 5, 9, 1])[:, None]
    returns, parts = torch.randn(4, 12) * mask, []

    def begin(rows, all_sum):
        critic = SideCritic(64, 64, 2, 12, True, torch.device("cpu"))
        critic.begin(returns[rows], mask[rows], all_sum)
        return critic.trend

    for rows in (slice(0, 2), slice(2, 4)):
        begin(rows, lambda x: parts.append(x) or x)
    assert torch.equal(begin(slice(0, 2), lambda _: sum(parts)), begin(slice(2, 4), lambda _: sum(parts)))
    torch.testing.assert_close(begin(slice(0, 2), lambda _: sum(parts)), begin(slice(0, 4), torch.clone))
