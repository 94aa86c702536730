"""A run that resumes within a rollout, or between two, ends bit for bit as the uninterrupted
one."""

import pytest
import torch
from runs_of_tiny import micro_batches_of, rollouts_of, trainer, weights
from scripted import Echo
from tiny import WORDS, prompts

# train_loss: the mean since `train()` was called
TIMED = ("time/", "step_time", "tokens_per_second", "train_")
SIDE = {"critic": "side", "normalize_values": True, "vf_coef": 0.5}


def reward_per_token(completion_ids, **kwargs):
    return [[float(token % 3) for token in ids] for ids in completion_ids]


def with_answers():
    rows = prompts()
    return rows.add_column(
        "answer", [f"{WORDS[25 + n % 3]} {text}" for n, text in enumerate(rows["prompt"])]
    )


RUNS = {
    "head": {"logging_steps": 2},  # metrics from before the checkpoint are logged after it
    "rewards so far": SIDE | {"reward_funcs": reward_per_token},
    "running statistics": {"normalize_rewards": True, "kl_target": 0.5},
    "privileged critic": {
        "critic": "adapter",
        "critic_kwargs": {"prompt": "answer"},
        "dataset": with_answers(),
    },
    "reference that sees more": {
        "reference_prompt": "answer",
        "kl_estimator": "exact",
        "kl_placement": "both",
        "dataset": with_answers(),
    },
    "truncated": SIDE | {"mask_truncated_completions": True},
    "turns": {
        "environment_factory": Echo,
        "reward_funcs": None,
        "stop_token_ids": list(range(16, 32)),
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_run_resumes_bit_for_bit(tmp_path, name):
    """Within a rollout, and between two."""
    settings = {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "target_kl": None,
    } | RUNS[name]
    whole = trainer(tmp_path / "whole", **settings)
    shapes = shapes_of_updates(whole)
    whole.train()
    for step in (3, 4):
        again = trainer(tmp_path / f"{step}", **settings | {"save_strategy": "no"})
        rollouts = rollouts_of(again)
        seen = micro_batches_of(again)
        resumed_shapes = shapes_of_updates(again)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert (
            len(rollouts) == 1
            and [batch.step for batch in seen] == [*range(step % 4, 4), *range(4)][-len(seen) :]
        )
        assert len(seen) == 8 - step and again.state.global_step == 8
        assert all(torch.equal(x, weights(again)[key]) for key, x in weights(whole).items())
        assert logs(again) == logs(whole) and len(logs(whole)) > 3
        # packed as before; here padding would give the same numbers, on a GPU it would not
        assert resumed_shapes == shapes[-len(resumed_shapes) :] and resumed_shapes[0][0] == 1


def shapes_of_updates(built):
    """Record the shape of the ids in each forward of the trunk with gradients."""
    shapes = []

    def record(module, args):
        if torch.is_grad_enabled():
            shapes.append(args[0].shape)

    built.actor_critic.trunk.register_forward_pre_hook(record)
    return shapes


def logs(built):
    return [
        {k: x for k, x in log.items() if not k.startswith(TIMED)} for log in built.state.log_history
    ]
