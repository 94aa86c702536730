"""The critic of the defaults: a side network in units of the returns, whose advantages are not
whitened."""

import pytest
import torch
from runs_of_tiny import trainer
from tiny import config

from trl_ppo_ext import ppo_math
from trl_ppo_ext.modeling.critics import SideCritic


def test_defaults_follow_from_the_critic(tmp_path):
    args = config(tmp_path)
    assert (args.critic, args.normalize_values, args.whiten_advantages, args.vf_coef) == (
        "side",
        True,
        False,
        0.5,
    )
    plain = config(tmp_path, normalize_values=False)
    assert plain.whiten_advantages
    none = config(tmp_path, critic="none", advantage_estimator="reinforce")
    assert (none.normalize_values, none.whiten_advantages) == (False, False)
    assert config(tmp_path, critic="none", advantage_estimator="rebn").whiten_advantages


def test_default_clip_is_a_factor_of_two_either_way(tmp_path):
    default = config(tmp_path)
    paper = config(tmp_path, cliprange=0.2)
    assert (default.cliprange, default.cliprange_high, default.dual_clip) == (0.5, 1.0, 2.0)
    assert (paper.cliprange_high, paper.dual_clip) == (None, None)
    own = config(tmp_path, cliprange_high=0.28, dual_clip=10.0)
    assert (own.cliprange, own.cliprange_high, own.dual_clip) == (0.5, 0.28, 10.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_default_clip_has_no_gradient_beyond_its_region(tmp_path, advantage):
    args = config(tmp_path)
    ratios = torch.tensor([0.4, 0.6, 1.9, 2.1])
    logprobs = ratios.log().requires_grad_()
    clip = (args.cliprange, args.cliprange_high, args.dual_clip)
    ppo_math.clipped_policy_loss(
        logprobs, torch.zeros(4), torch.full((4,), advantage), *clip
    ).sum().backward()
    pulls_in = [advantage > 0, True, True, False]  # a token below the region may come back
    assert (logprobs.grad != 0).tolist() == pulls_in


def test_normalize_values_needs_a_critic(tmp_path):
    with pytest.raises(ValueError, match="`normalize_values=True` needs a critic"):
        config(tmp_path, critic="none", advantage_estimator="reinforce", normalize_values=True)


def test_side_critic_has_a_learning_rate_of_its_own(tmp_path):
    run = trainer(tmp_path, learning_rate=1e-5)
    run.create_optimizer()
    rates = {id(x): group["lr"] for group in run.optimizer.param_groups for x in group["params"]}
    assert {rates[id(x)] for x in run.actor_critic.critic_parameters().values()} == {
        SideCritic.learning_rate
    }
    assert {rates[id(x)] for x in run.actor_critic.policy_parameters().values()} == {1e-5}
