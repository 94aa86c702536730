"""The side critic reads the mean reward per token so far, in units of earlier rollouts."""

from dataclasses import replace

import pytest
import torch
from runs_of_tiny import rollouts_of, trainer
from test_defaults import DEFAULTS

from trl_ppo_ext.modeling import SideCritic
from trl_ppo_ext.ppo.critics import EarnedRewards


def reward_per_token(completion_ids, **kwargs):
    return [[float(token % 3) for token in ids] for ids in completion_ids]


def earned_rewards(mean=0.0, deviation=1.0):
    critic = SideCritic(16, 16, 2, 8, True, torch.device("cpu"))
    critic.reward_mean.fill_(mean)
    critic.reward_deviation.fill_(deviation)
    return EarnedRewards(critic, lambda x: x)


def test_earned_is_the_mean_of_earlier_standardized_rewards():
    rewards = torch.tensor([[1.0, 3.0, 9.0, 5.0, 7.0], [5.0, 1.0, 2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool()
    earned = earned_rewards(mean=1.0, deviation=2.0).before(rewards, mask)
    torch.testing.assert_close(earned, torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0], [0.0, 2.0, 1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("token", range(6))
def test_earned_does_not_depend_on_its_own_or_later_rewards(token):
    rewards, mask = torch.randn(3, 6), torch.ones(3, 6, dtype=torch.bool)
    later = rewards.clone()
    later[:, token:] += 10 * torch.randn(3, 6 - token)
    before, after = (earned_rewards().before(x, mask) for x in (rewards, later))
    assert torch.equal(before[:, : token + 1], after[:, : token + 1])


def test_outliers_are_bounded_and_unknown_units_give_zero():
    rewards, mask = torch.tensor([[1e6, 0.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert earned_rewards().before(rewards, mask)[0, 1] == EarnedRewards.BOUND
    assert not earned_rewards(deviation=0.0).before(rewards, mask).any()


def test_sequences_of_the_updates_have_the_rewards_of_the_rollout(tmp_path):
    run = trainer(tmp_path, reward_funcs=reward_per_token, **DEFAULTS, max_steps=8)
    compute_loss, differences = run.compute_loss, []

    def compare(model, inputs, **kwargs):
        rollout = inputs.rollout
        for sequences in (rollout.sequences, replace(rollout.sequences, earned=None)):
            with torch.no_grad():
                difference = run.actor_critic(sequences).values - rollout.old_values
            differences.append(difference[rollout.response_mask].abs().max().item())
        return compute_loss(model, inputs, **kwargs)

    run.compute_loss = compare
    run.train()
    same, other = differences[8:10]  # the first step of the second rollout, as the values of a new head are the mean
    assert same < 1e-4 < other


def test_value_after_a_limit_reads_rewards_in_the_units_of_the_others(tmp_path, monkeypatch):
    settings = DEFAULTS | {"bootstrap_truncated": True, "max_completion_length": 4}
    run = trainer(
        tmp_path, reward_funcs=reward_per_token, **settings, max_steps=2, num_mini_batches=1, num_ppo_epochs=1
    )
    earned, units = run.collector.earned, []
    before = earned.before

    def recorded(*args):
        units.append((float(earned.critic.reward_mean), float(earned.critic.reward_deviation)))
        return before(*args)

    monkeypatch.setattr(earned, "before", recorded)
    run.train()
    first, after_first, second, after_second = units
    assert first == after_first == (0, 0) and second == after_second != first


def test_units_are_those_of_earlier_rollouts_and_saved_with_the_critic(tmp_path):
    run = trainer(tmp_path, reward_funcs=reward_per_token, **DEFAULTS, max_steps=8)
    rollouts = rollouts_of(run)
    run.train()
    first, second = (rollout for rollout, _ in rollouts[:2])
    assert not first.sequences.earned.any() and second.sequences.earned.any()
    scores, mask = rollouts[0][1].scored.tokens, rollouts[0][0].response_mask
    expected = earned_rewards(scores[mask].mean(), scores[mask].std())
    torch.testing.assert_close(
        second.sequences.earned,
        expected.before(rollouts[1][1].scored.tokens, second.response_mask),
        rtol=1e-4,
        atol=1e-5,
    )
    assert {"reward_mean", "reward_deviation"} <= run.actor_critic.value_head.state_dict().keys()
