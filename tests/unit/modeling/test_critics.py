"""Inputs of the side critic, and what the file of a critic holds."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from trl_ppo_ext.modeling import SideCritic, ValueHead
from trl_ppo_ext.modeling.critics import EARNED_BOUND, CriticState, Units, rewards_so_far
from trl_ppo_ext.ppo_math import Moments, explained_variance


def test_side_critic_reads_all_positions_beyond_its_end_alike():
    """Not as the mirror image of earlier ones."""
    critic = SideCritic(32, 32, 1, 8, False, torch.device("cpu"))
    read = critic.inputs(
        [torch.ones(4, 32)] * (len(critic.layers) + 1), torch.tensor([0, 7, 8, 16]), None
    )
    assert torch.equal(read[2], read[3]) and not torch.allclose(read[0], read[3])


@pytest.mark.parametrize("has_moments", [True, False])
def test_critic_predicts_in_the_units_that_its_file_has(has_moments):
    head = ValueHead(8, not has_moments, torch.device("cpu"))
    if has_moments:
        moments = {"returns": torch.tensor([4.0, 2.0, 16.0])}
    else:
        moments = {}
    head.load_saved(dict(head.state_dict()) | moments)
    returns = Moments(4.0, 2.0, 16.0) if has_moments else Moments()
    assert head.is_normalized is has_moments
    assert head.saved_state == CriticState(returns)
    head.load_saved(dict(head.state_dict()) | moments | {"rewards": torch.tensor([4.0, 1.0, 1.0])})
    assert head.is_normalized is has_moments
    assert head.saved_state == CriticState(returns, Moments(4.0, 1.0, 1.0))
    assert head.units(Moments(1.0, 2.0, 9.0)) == (Units(2.0, 3.0) if has_moments else Units())


# ---- rewards so far


def test_earned_is_the_mean_of_earlier_standardized_rewards():
    rewards = torch.tensor([[1.0, 3.0, 9.0, 5.0, 7.0], [5.0, 1.0, 2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool()
    earned = rewards_so_far(rewards, mask, Units(1.0, 2.0), is_known=True)
    torch.testing.assert_close(
        earned, torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0], [0.0, 2.0, 1.0, 0.0, 0.0]])
    )


def test_earned_never_depends_on_its_own_or_later_rewards():
    rewards = torch.randn(3, 6)
    mask = torch.ones(3, 6, dtype=torch.bool)
    for token in range(6):
        later = rewards.clone()
        later[:, token:] += 10 * torch.randn(3, 6 - token)
        before, after = (rewards_so_far(x, mask, Units(), is_known=True) for x in (rewards, later))
        assert torch.equal(before[:, : token + 1], after[:, : token + 1]), token


def test_outliers_are_bounded_and_unknown_units_give_zero():
    rewards = torch.tensor([[1e6, 0.0, 0.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert rewards_so_far(rewards, mask, Units(), is_known=True)[0, 1] == EARNED_BOUND
    assert not rewards_so_far(rewards, mask, Units(), is_known=False).any()


@pytest.mark.parametrize("size", [64, 576, 896, 3584])
def test_side_critic_learns_alike_at_any_width_of_the_policy(size):
    """Returns of which a linear function of the states explains half, in five rollouts of four
    optimizer steps."""
    generator = torch.Generator().manual_seed(0)
    if size == 64:
        layers = 2
    else:
        layers = 28
    latent = 16
    completions = 64
    length = 8
    torch.manual_seed(0)
    critic = SideCritic(size, size, layers, length, True, torch.device("cpu"))
    optimizer = torch.optim.Adam(critic.parameters(), lr=SideCritic.learning_rate)
    mixing = [torch.randn(latent, size, generator=generator) / latent**0.5 for _ in critic.layers]
    worth = torch.randn(latent, generator=generator) / (2 * latent) ** 0.5

    def rollout():
        x = torch.randn(completions * length, latent, generator=generator)
        states = [x @ mix + 0.5 * torch.randn(len(x), size, generator=generator) for mix in mixing]
        prompts = torch.randn(completions, size, generator=generator).repeat_interleave(length, 0)
        noise = torch.randn(len(x), generator=generator) * 0.5**0.5
        positions = torch.arange(length).repeat(completions)
        return critic.inputs([*states, prompts], positions, None), x @ worth + noise

    def values(inputs):
        with torch.no_grad():
            return critic(inputs)

    unseen, outcomes = rollout()
    for number in range(5):
        inputs, returns = rollout()
        if number == 0:
            steps = torch.ones(len(inputs), dtype=torch.bool)
            summary = critic.summary(inputs)
            parts = torch.arange(completions).repeat_interleave(length)
            ones = torch.ones(completions)
            fit = critic.fit([summary], returns, steps, parts, ones, torch.clone)
            critic.install(CriticState(first_fit=fit.weights))
            before = values(unseen)
        for _ in range(4):
            optimizer.zero_grad()
            (0.25 * (critic(inputs) - returns) ** 2).mean().backward()
            optimizer.step()
            after = values(unseen)
            assert (after - before).square().mean().sqrt() < 0.2  # deviations of the returns
            before = after
    assert 1 - (before - outcomes).var() / outcomes.var() > 0.25


# ---- how a new one begins


def new_one(length):
    return SideCritic(64, 64, 2, length, True, torch.device("cpu"))


def inputs_of(critic, mask, states=None):
    """Inputs at the tokens of a mask, of given or random states; the first one of a row stands for
    that of its prompt."""
    rows, positions = mask.nonzero().unbind(1)
    states = torch.randn(*mask.shape, 64) if states is None else states
    own = [states[mask] for _ in critic.layers]
    return critic.inputs([*own, states[rows, 0]], positions, None)


def begin(critic, targets, inputs, mask, all_sum=torch.clone, first=0, of=None):
    """Begin with targets of all tokens of a mask; each row is a part of its own, from the first one
    on."""
    with torch.no_grad():
        summaries = [critic.summary(part) for part in inputs.split(100)]
    targets = targets.expand(mask.shape)[mask]
    steps = torch.ones_like(targets, dtype=torch.bool)
    parts = mask.nonzero()[:, 0] + first
    completions = torch.zeros(of or len(mask)).index_add(
        0, torch.arange(len(mask)) + first, mask.any(1).float()
    )
    fit = critic.fit(summaries, targets, steps, parts, completions, all_sum)
    critic.install(CriticState(first_fit=fit.weights))
    return fit


def begun(critic, returns, mask, states=None):
    """Values after a first rollout with these returns."""
    targets = returns.expand(mask.shape)[mask]
    units = Units(targets.mean().item(), targets.std().item())
    fit = begin(critic, units.targets(returns), inputs_of(critic, mask, states), mask)
    return units.values(fit.left_out)


def test_new_critic_begins_with_the_mean_return_by_position():
    to_go = torch.arange(24, 0, -1.0).expand(256, 24)
    mask = torch.ones(256, 24, dtype=torch.bool)
    critic = new_one(24)
    returns = to_go + torch.randn(256, 24)
    values = begun(critic, returns, mask)
    best = to_go.var() / (to_go.var() + 1)
    assert 0.95 * best < explained_variance(values, returns[mask], mask[mask])
    assert (values - to_go[mask]).square().mean() < 0.3  # of 48


def test_fit_adds_to_the_outputs_what_it_returned():
    critic = new_one(24)
    mask = torch.ones(16, 24, dtype=torch.bool)
    inputs = inputs_of(critic, mask)
    added = begin(critic, torch.randn(16, 24), inputs, mask).outputs
    with torch.no_grad():
        torch.testing.assert_close(critic(inputs), added)


def test_left_out_outputs_hardly_depend_on_their_own_returns():
    """Or a baseline would hold the return that it is subtracted from."""
    torch.manual_seed(0)
    critic = new_one(12)
    mask = torch.arange(12) < torch.randint(3, 13, (32, 1))
    states = torch.randn(32, 12, 64)
    inputs = inputs_of(critic, mask, states)
    targets = states[:, :1, 0].expand(32, 12)  # which prompts tell
    before = begin(critic, targets, inputs, mask)
    for row in range(0, 32, 4):
        own = mask.nonzero()[:, 0] == row
        others = targets.clone()
        others[row] += 1
        after = begin(critic, others, inputs, mask)
        assert (after.outputs - before.outputs)[own].mean() > 0.2
        assert (after.left_out - before.left_out)[own].mean().abs() < 0.05


def test_fit_reads_from_a_prompt_what_its_completion_is_worth():
    """States within a completion tell nothing of it here."""
    torch.manual_seed(0)
    mask = torch.ones(64, 8, dtype=torch.bool)
    states = torch.randn(64, 8, 64)
    worth = states[:, 0] @ torch.randn(64, 4) @ torch.ones(4)
    states[:, 0] += worth[:, None]
    values = begun(new_one(8), worth[:, None].expand(64, 8), mask, states)
    assert explained_variance(values, worth[:, None].expand(64, 8)[mask], mask[mask]) > 0.5


def test_new_critic_tells_ends_from_what_goes_on():
    torch.manual_seed(0)
    mask = torch.ones(64, 16, dtype=torch.bool)
    states = torch.randn(64, 16, 64)
    ends = torch.rand(64, 16) < 0.5
    states[..., 0] += 3 * ends
    values = begun(new_one(16), 1 - ends.float(), mask, states)
    assert values[ends[mask]].mean() < 0.4 and values[~ends[mask]].mean() > 0.6


@pytest.mark.parametrize("completions", [4, 8, 64])
@pytest.mark.parametrize("has_score_at_end", [True, False])
def test_fit_to_noise_takes_little_of_it(completions, has_score_at_end):
    torch.manual_seed(0)
    mask = torch.arange(32) < torch.randint(8, 33, (completions, 1))
    returns = torch.randn(completions, 1 if has_score_at_end else 32) * mask
    critic = new_one(32)
    left_out = explained_variance(begun(critic, returns, mask), returns[mask], mask[mask])
    unseen = torch.ones(64, 32, dtype=torch.bool)
    with torch.no_grad():
        values = critic(inputs_of(critic, unseen))
    of_unseen = explained_variance(values, torch.randn(64 * 32), unseen[unseen])
    assert -0.15 < of_unseen <= 0.1 and -0.2 < left_out <= 0.2


def test_rollout_without_a_token_that_counts_has_no_fit():
    critic = new_one(8)
    empty = torch.zeros(4, 8, dtype=torch.bool)
    summaries = [torch.zeros(0, len(critic.directions()))]
    parts = torch.zeros(0, dtype=torch.long)
    fit = critic.fit(summaries, torch.zeros(0), empty[empty], parts, torch.zeros(4), torch.clone)
    assert not fit.weights.any()


def test_first_fit_extrapolates_near_the_returns():
    """At positions that no completion reached."""
    critic = new_one(1024)
    mask = torch.ones(256, 100, dtype=torch.bool)
    targets = torch.linspace(2, -2, 100).expand(256, 100)
    begin(critic, targets, inputs_of(critic, mask), mask)
    with torch.no_grad():
        fitted = critic(inputs_of(critic, torch.ones(8, 1025, dtype=torch.bool))).view(8, 1025)
    assert fitted.abs().max() < 3 and (fitted[:, :100] - targets[0]).abs().max() < 1


def test_first_fit_is_the_same_on_several_processes():
    mask = torch.arange(12) < torch.tensor([12, 5, 9, 1])[:, None]
    returns = torch.randn(4, 12)
    states = torch.randn(4, 12, 64)
    everyone = Barrier(2)
    sums = [None, None]

    def fitted(rows, all_sum):
        critic = new_one(12)
        inputs = inputs_of(critic, mask[rows], states[rows])
        begin(critic, returns[rows], inputs, mask[rows], all_sum, first=rows.start, of=4)
        return critic.first_fit

    def of_rank(rank):
        def all_sum(x):
            sums[rank] = x
            everyone.wait()
            total = sums[0] + sums[1]
            everyone.wait()
            return total

        return fitted(slice(2 * rank, 2 * rank + 2), all_sum)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(of_rank, range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, fitted(slice(0, 4), torch.clone))
