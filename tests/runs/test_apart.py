"""What policy and critic learn apart: truncated completions, and gradients that are clipped each
by itself."""

import pytest
import torch
from runs_of_tiny import rollouts_of, trainer, weights, write_completions

SIDE = {"critic": "side", "normalize_values": True}


def parts(built):
    """Copies of the weights of policy and critic."""
    named = weights(built)
    critic = {id(x) for x in built.actor_critic.critic_parameters().values()}
    names = {name for name, x in built.actor_critic.named_parameters() if id(x) in critic}
    return {n: x for n, x in named.items() if n not in names}, {
        n: x for n, x in named.items() if n in names
    }


def equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )


# ---- truncated completions; tests/runs/test_choices.py compares gradients


@pytest.mark.parametrize("critic", ["head", "side", "adapter"])
def test_steps_of_truncated_completions_move_only_the_critic(tmp_path, critic):
    settings = {"critic": critic, "mask_truncated_completions": True, "weight_decay": 0.1}
    # equal scores teach a critic that begins at their mean nothing
    run = trainer(
        tmp_path,
        reward_funcs=lambda completion_ids, **_: [ids[0] for ids in completion_ids],
        **settings,
    )
    write_completions(run, lambda prompts: [[5 + sum(ids) % 9] * 8 for ids in prompts])
    before = parts(run)
    seen = rollouts_of(run)
    run.train()
    assert not any(samples.advantages.any() for _, samples in seen)  # nor does a log show any
    policy, critic = parts(run)
    assert equal(policy, before[0]) and not any(
        torch.equal(x, before[1][name]) for name, x in critic.items()
    )
    logs = run.state.log_history[:-1]
    assert all(
        log["empty_steps"] > 0 and log["loss/value"] > 0 and "loss/policy" not in log
        for log in logs
    )


def test_whitening_counts_only_the_tokens_of_the_policy(tmp_path):
    run = trainer(tmp_path, mask_truncated_completions=True, normalize_values=False, lam=0.95)
    rollouts = rollouts_of(run)
    run.train()
    rollout, samples = rollouts[0]
    assert torch.equal(rollout.policy_mask, rollout.response_mask & samples.stopped[:, None])
    assert 0 < rollout.policy_mask.sum() < rollout.response_mask.sum() and not samples.stopped.all()
    learned = rollout.advantages[rollout.policy_mask]
    torch.testing.assert_close(
        torch.stack([learned.mean(), learned.std()]), torch.tensor([0.0, 1.0])
    )


# ---- gradients clipped apart


def test_huge_value_loss_does_not_shrink_the_step_of_the_policy(tmp_path):
    runs = []
    for vf_coef in (0.1, 1e6):
        runs.append(
            trainer(
                tmp_path / str(vf_coef), vf_coef=vf_coef, max_steps=1, max_grad_norm=1e-3, **SIDE
            )
        )
        runs[-1].train()
    assert equal(*(parts(run)[0] for run in runs))
    one, other = (run.state.log_history[0] for run in runs)
    assert one["grad_norm"] == other["grad_norm"] > 1e-3
    assert other["value/grad_norm"] == pytest.approx(1e7 * one["value/grad_norm"], rel=1e-4)


def test_gradients_are_clipped_each_to_the_bound(tmp_path):
    run = trainer(tmp_path, max_steps=2, max_grad_norm=1e-3, **SIDE)
    roles = (run.actor_critic.policy_parameters, run.actor_critic.critic_parameters)
    norms = []
    get = run._get_grad_norm

    def getting(*args, **kwargs):
        norm = get(*args, **kwargs)
        norms.extend(
            torch.nn.utils.get_total_norm([x.grad for x in role().values()]).item()
            for role in roles
        )
        return norm

    run._get_grad_norm = getting
    run.train()
    assert norms == pytest.approx([1e-3] * 4, rel=1e-2)


@pytest.mark.parametrize(
    "part, max_grad_norm", [("policy_parameters", 0.0), ("critic_parameters", 1.0)]
)
def test_non_finite_gradient_of_one_skips_the_step_of_both(tmp_path, part, max_grad_norm):
    run = trainer(tmp_path, max_steps=2, max_grad_norm=max_grad_norm, critic="side")
    for parameter in getattr(run.actor_critic, part)().values():
        parameter.register_hook(lambda gradient: gradient * torch.nan)
    before = weights(run)
    run.train()
    assert equal(weights(run), before) and [
        log["skipped_steps"] for log in run.state.log_history[:-1]
    ] == [1, 1]
