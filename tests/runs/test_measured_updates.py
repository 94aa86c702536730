"""How far the updates of a rollout moved the policy, measured after its last optimizer step."""

import math

import pytest
import torch
from runs_of_tiny import micro_batches_of, plain_logprobs, rollouts_of, trainer, weights
from tiny import llama
from transformers import TrainerCallback

ALL = {"per_device_train_batch_size": 8, "num_mini_batches": 1}  # a micro-batch is the rollout


def log_ratios(built, rollout):
    """Log-ratios of a rollout's tokens under the trained policy, by a forward of transformers
    for each completion."""
    ratios = []
    prompts = rollout.sequences.prompt_ids
    completions = rollout.sequences.completion_ids
    lengths = zip(rollout.sequences.prompt_lengths.tolist(), rollout.response_mask.sum(1).tolist())
    for row, (prompt_length, length) in enumerate(lengths):
        prompt = prompts[row, -prompt_length:].tolist()
        completion = completions[row, :length].tolist()
        with torch.no_grad():
            logprobs = plain_logprobs(built.actor_critic.policy, prompt, completion)
        ratios += (logprobs - rollout.old_logprobs[row, :length]).tolist()
    return ratios


def mean_k3(ratios):
    return sum(math.exp(x) - 1 - x for x in ratios) / len(ratios)


@pytest.mark.parametrize("num_ppo_epochs", [1, 3])
def test_kl_and_ratio_are_measured_after_the_last_step(tmp_path, num_ppo_epochs):
    """A single step begins at the policy that sampled: before it, both would be those of no
    change."""
    settings = ALL | {
        "num_ppo_epochs": num_ppo_epochs,
        "max_steps": num_ppo_epochs,
        "learning_rate": 2e-2,
    }
    built = trainer(tmp_path, target_kl=None, **settings)
    rollouts = rollouts_of(built)
    built.train()
    logs = built.state.log_history[:-1]
    ratios = log_ratios(built, rollouts[0][0])
    assert ["approx_kl" in log for log in logs] == [False] * (num_ppo_epochs - 1) + [True]
    assert logs[-1]["approx_kl"] == pytest.approx(mean_k3(ratios), rel=1e-3)
    assert logs[-1]["ratio/max"] >= math.exp(max(ratios)) * (1 - 1e-4) > 1.01
    if num_ppo_epochs == 1:
        assert logs[-1]["ratio/mean"] == 1 and logs[-1]["ratio/max"] == pytest.approx(
            math.exp(max(ratios)), rel=1e-4
        )


def test_kl_of_a_step_of_known_size_is_known(tmp_path):
    """The step sets the adapter's weights; one twice as large moves the policy four times as
    far."""

    def measured(scale):
        built = trainer(tmp_path, num_ppo_epochs=1, max_steps=1, **ALL)
        rollouts = rollouts_of(built)

        class SetWeights(TrainerCallback):
            def on_optimizer_step(self, *args, **kwargs):
                generator = torch.Generator().manual_seed(0)
                for name, x in built.actor_critic.policy_parameters().items():
                    if "lora_B" in name:
                        x.data = scale * torch.randn(x.shape, generator=generator)

        built.add_callback(SetWeights())
        built.train()
        return built.state.log_history[0]["approx_kl"], mean_k3(log_ratios(built, rollouts[0][0]))

    (one, expected), (other, _) = measured(0.001), measured(0.002)
    assert one == pytest.approx(expected, rel=1e-2) and 1e-8 < one < 0.01
    assert other == pytest.approx(4 * one, rel=0.1)


def test_updates_that_stop_early_are_measured(tmp_path):
    settings = ALL | {"num_ppo_epochs": 4, "max_steps": 4, "learning_rate": 2e-2}
    built = trainer(tmp_path, target_kl=1e-4, **settings)
    rollouts = rollouts_of(built)
    built.train()
    logs = built.state.log_history[:-1]
    assert [log["stopped_early"] for log in logs] == [0, 1, 1, 1]
    assert logs[-1]["approx_kl"] == pytest.approx(
        mean_k3(log_ratios(built, rollouts[0][0])), rel=1e-3
    )
    assert logs[-1]["approx_kl"] > 1e-4


def test_measuring_changes_nothing(tmp_path):
    """Neither random numbers, gradients, weights and modes, nor what follows."""
    settings = {"gradient_checkpointing": True, "max_steps": 8, "critic": "adapter"}
    built = trainer(tmp_path / "one", llama(), **settings)
    seen = []

    def state():
        modes = {name: module.training for name, module in built.actor_critic.named_modules()}
        gradients = {name: x.grad is not None for name, x in built.actor_critic.named_parameters()}
        trained = {name: x.requires_grad for name, x in built.actor_critic.named_parameters()}
        return modes, gradients, trained, built.actor_critic.active_adapter

    def checked():
        before = state()
        random = torch.get_rng_state()
        held = weights(built)
        measure_updates()
        seen.append(state() == before and torch.equal(torch.get_rng_state(), random))
        seen.append(all(torch.equal(x, held[name]) for name, x in weights(built).items()))

    measure_updates = built._measure_updates
    built._measure_updates = checked
    built.train()
    assert seen == [True] * 16  # after each of 8 steps

    other = trainer(tmp_path / "other", llama(), **settings)
    other._measure_updates = lambda: None
    other.train()
    assert all(torch.equal(x, weights(other)[name]) for name, x in weights(built).items())
    logs = [[log["loss"] for log in x.state.log_history if "loss" in log] for x in (built, other)]
    assert logs[0] == logs[1]
    assert [step for step, log in enumerate(built.state.log_history, 1) if "approx_kl" in log] == [
        4,
        8,
    ]


def test_measured_kl_is_in_the_checkpoint_of_its_step(tmp_path):
    """It is logged later than it was measured, by a run that resumed in between."""
    settings = {
        "max_steps": 8,
        "logging_steps": 6,
        "logging_first_step": False,
        "learning_rate": 1e-2,
    }
    whole = trainer(tmp_path / "whole", save_strategy="steps", save_steps=4, **settings)
    whole.train()
    again = trainer(tmp_path / "again", **settings)
    seen = micro_batches_of(again)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert len(seen) == 4
    first, other = (
        next(x for x in built.state.log_history if x["step"] == 6) for built in (whole, again)
    )
    assert first["approx_kl"] == other["approx_kl"] > 0 and first["ratio/max"] == other["ratio/max"]
