"""The side critic reads the mean reward per token so far, in units of earlier rollouts."""

import pytest
import torch
from runs_of_tiny import trainer, weights
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


@pytest.mark.parametrize("step", [1, 2])
def test_run_with_rewards_per_token_resumes_bit_for_bit(tmp_path, step):
    settings = DEFAULTS | {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "reward_funcs": reward_per_token}
    whole, again = (trainer(tmp_path / name, **settings) for name in ("whole", "again"))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert all(torch.equal(x, weights(again)[name]) for name, x in weights(whole).items())
    heads = (run.actor_critic.value_head.state_dict() for run in (whole, again))
    assert all(torch.equal(one, other) for one, other in zip(*(head.values() for head in heads)))
