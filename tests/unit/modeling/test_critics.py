"""Inputs of the side critic, and what the file of a critic holds."""

import pytest
import torch

from trl_ppo_ext.modeling import SideCritic, ValueHead
from trl_ppo_ext.modeling.critics import EARNED_BOUND, Units, rewards_so_far
from trl_ppo_ext.ppo.math import Moments


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
