"""Repairs of the critic, one field each: in runs, the outcome without it is another one."""

from types import SimpleNamespace

import pytest
import torch
from runs_of_tiny import rollouts_of, trainer, weights, write_completions
from tiny import config

from trl_ppo_ext.ppo import math as ppo_math
from trl_ppo_ext.ppo.rollouts import RolloutCollector

SIDE = {"critic": "side", "normalize_values": True}


def parts(built):
    """Copies of the weights of policy and critic."""
    named, critic = weights(built), {id(x) for x in built.actor_critic.critic_parameters().values()}
    names = {name for name, x in built.actor_critic.named_parameters() if id(x) in critic}
    return {n: x for n, x in named.items() if n not in names}, {n: x for n, x in named.items() if n in names}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def token_rewards(run, samples):
    """Rewards per token of a rollout, with the KL of k1."""
    scored, mask = samples.scored, samples.sequences.completion_mask
    kl = ppo_math.kl_estimate(samples.tokens.logprobs, samples.tokens.ref_logprobs, "k1")
    return ppo_math.token_rewards(scored.tokens, scored.totals, kl, mask, run.args.kl_coef)


# ---- truncated completions; tests/runs/test_choices.py compares gradients


@pytest.mark.parametrize("critic", ["head", "side", "adapter"])
def test_steps_of_truncated_completions_move_only_the_critic(tmp_path, critic):
    run = trainer(tmp_path, critic=critic, mask_truncated_completions=True, weight_decay=0.1)
    write_completions(run, lambda prompts: [[5 + sum(ids) % 9] * 8 for ids in prompts])
    before = parts(run)
    run.train()
    policy, critic = parts(run)
    assert equal(policy, before[0]) and not any(torch.equal(x, before[1][name]) for name, x in critic.items())
    logs = run.state.log_history[:-1]
    assert all(log["empty_steps"] == 0 and log["loss/value"] > 0 and "loss/policy" not in log for log in logs)


def test_whitening_counts_only_the_tokens_of_the_policy(tmp_path):
    run = trainer(tmp_path, mask_truncated_completions=True)
    rollouts = rollouts_of(run)
    run.train()
    rollout, samples = rollouts[0]
    assert torch.equal(rollout.policy_mask, rollout.response_mask & samples.stopped[:, None])
    assert 0 < rollout.policy_mask.sum() < rollout.response_mask.sum() and not samples.stopped.all()
    learned = rollout.advantages[rollout.policy_mask]
    torch.testing.assert_close(torch.stack([learned.mean(), learned.std()]), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("critic", [{}, {"critic": "none", "advantage_estimator": "reinforce"}], ids=str)
def test_rollout_has_one_mask_unless_critic_and_policy_differ(tmp_path, critic):
    run = trainer(tmp_path, mask_truncated_completions=bool(critic), max_steps=1, **critic)
    rollouts = rollouts_of(run)
    run.train()
    assert rollouts[0][0].policy_mask is None


# ---- values within the range of the returns


def test_values_are_clamped_to_their_range(tmp_path):
    run = trainer(tmp_path, value_range=[0, 0.5], max_steps=1)
    torch.nn.init.constant_(run.actor_critic.value_head.bias, 2.0)
    rollouts = rollouts_of(run)
    run.train()
    rollout, samples = rollouts[0]
    mask, args = rollout.response_mask, run.args
    values = 0.5 * mask
    expected, returns = ppo_math.gae(token_rewards(run, samples), values, mask, args.gamma, args.lam)
    torch.testing.assert_close(rollout.advantages, ppo_math.whiten(expected, mask))
    torch.testing.assert_close(rollout.returns, returns)
    torch.testing.assert_close(rollout.old_values, values)


@pytest.mark.parametrize("value", [[1.0], [0.0, 1.0, 2.0], [1.0, 0.0], [1.0, 1.0]])
def test_value_range_must_be_two_rising_numbers(tmp_path, value):
    with pytest.raises(ValueError, match=r"`value_range` must be the lowest and the highest return, got .*; use e.g."):
        config(tmp_path, value_range=value)


# ---- weights of prompts


def test_value_loss_is_weighted_by_the_spread_of_the_prompt(tmp_path):
    run = trainer(tmp_path, value_loss_weights="prompt_std", num_generations=4, max_steps=1, num_mini_batches=1)
    run.args.per_device_train_batch_size, rollouts = 8, rollouts_of(run)
    run.train()
    rollout, samples = rollouts[0]
    totals = token_rewards(run, samples).sum(1)
    wanted = ppo_math.prompt_weights(totals, torch.ones_like(totals), 4)
    torch.testing.assert_close(rollout.value_weights[:, 0], wanted)
    assert len(set(wanted.tolist())) == len(wanted) / 4
    loss = wanted[:, None] * 0.5 * (rollout.old_values - rollout.returns) ** 2
    assert run.state.log_history[0]["loss/value"] == pytest.approx(loss[rollout.response_mask].mean().item(), rel=1e-5)


def test_weights_of_prompts_are_those_of_all_ranks():
    scores = torch.randn(8, generator=torch.Generator().manual_seed(0))
    usable, ranks = torch.ones(8, dtype=torch.bool), []
    for rank in (0, 1):
        accelerator = SimpleNamespace(process_index=rank, gather=lambda x: scores if x.is_floating_point() else usable)
        collector = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(num_generations=2))
        rows = slice(4 * rank, 4 * rank + 4)
        ranks.append(RolloutCollector._over_groups(collector, "prompt_std", scores[rows], usable[rows]))
    assert torch.equal(torch.cat(ranks), ppo_math.prompt_weights(scores, usable, 2))


# ---- values that are trusted as far as they predicted


@pytest.mark.parametrize("settings", [{}, {"lam_critic": 1.0}, SIDE], ids=str)
def test_auto_advantages_are_gae_of_the_weighed_values(tmp_path, settings):
    run = trainer(tmp_path, advantage_estimator="auto", learning_rate=1e-2, max_steps=24, **settings)
    rollouts, trust, states = rollouts_of(run), run.collector.value_trust, []
    weighing = trust.weighing
    trust.weighing = lambda *given: states.append((trust.weight, trust.returns.mean)) or weighing(*given)
    run.train()
    logged = [log["value/weight"] for log in run.state.log_history if "value/weight" in log]
    assert logged == pytest.approx([weight for weight, _ in states]) and logged[0] == 0
    number = max(range(6), key=lambda number: logged[number] * (logged[number] < 1))
    (rollout, samples), (weight, mean), args = rollouts[number], states[number], run.args
    assert 0 < weight < 1
    mask, rewards = rollout.response_mask, token_rewards(run, samples)
    weighed = mean + weight * (rollout.old_values - mean)
    expected, _ = ppo_math.gae(rewards, weighed, mask, args.gamma, args.lam)
    worse = (expected[mask] ** 2).mean().sqrt() / rollout.returns[mask].std()  # than a constant
    unit = rollout.value_unit * max(worse.item(), 1)
    scaled = expected / unit if args.normalize_values else ppo_math.whiten(expected, mask)
    torch.testing.assert_close(rollout.advantages, scaled)
    _, returns = ppo_math.gae(rewards, rollout.old_values, mask, args.gamma, args.lam_critic or args.lam)
    torch.testing.assert_close(rollout.returns, returns)  # the critic's own


# ---- gradients clipped apart


def test_huge_value_loss_does_not_shrink_the_step_of_the_policy(tmp_path):
    runs = []
    for vf_coef in (0.1, 1e6):
        runs.append(trainer(tmp_path / str(vf_coef), vf_coef=vf_coef, max_steps=1, max_grad_norm=1e-3, **SIDE))
        runs[-1].train()
    (policy, _), (other_policy, _) = map(parts, runs)
    assert equal(policy, other_policy)
    one, other = (run.state.log_history[0] for run in runs)
    assert one["grad_norm"] == other["grad_norm"] > 1e-3
    assert other["value/grad_norm"] == pytest.approx(1e7 * one["value/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("part", [0, 1], ids=["policy", "critic"])
def test_gradients_are_clipped_each_to_the_bound(tmp_path, part):
    run = trainer(tmp_path, max_steps=2, max_grad_norm=1e-3, **SIDE)
    roles, norms = (run.actor_critic.policy_parameters, run.actor_critic.critic_parameters), []
    get = run._get_grad_norm

    def getting(*args, **kwargs):
        norm = get(*args, **kwargs)
        norms.append(torch.nn.utils.get_total_norm([x.grad for x in roles[part]().values()]).item())
        return norm

    run._get_grad_norm = getting
    run.train()
    assert norms == pytest.approx([1e-3] * 2, rel=1e-2)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("part", ["policy_parameters", "critic_parameters"])
def test_non_finite_gradient_of_one_skips_the_step_of_both(tmp_path, part, max_grad_norm):
    run = trainer(tmp_path, max_steps=2, max_grad_norm=max_grad_norm, critic="side")
    for parameter in getattr(run.actor_critic, part)().values():
        parameter.register_hook(lambda gradient: gradient * torch.nan)
    before = weights(run)
    run.train()
    assert equal(weights(run), before) and [log["skipped_steps"] for log in run.state.log_history[:-1]] == [1, 1]
