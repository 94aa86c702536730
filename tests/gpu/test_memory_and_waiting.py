"""Peaks of the allocator beside what was estimated, and where the host waits for the GPU."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny import length_reward, llama, prompts, tokenizer

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.modeling import logprobs

pytestmark = pytest.mark.gpu
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 2**20


@pytest.fixture(scope="module")
def estimates():
    places = [str(BENCHMARKS / "memory"), str(BENCHMARKS / "peers")]
    sys.path[1:1] = places
    yield importlib.import_module("estimate")
    for place in places:
        sys.path.remove(place)


def needs(quantization):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")


def large(estimates, **kwargs):
    """Large beside a GPU's workspaces of some tens of MiB: 165 million weights, an update of
    about 2 GiB."""
    return estimates.Case(estimates.Shape(32000, 1024, 6, 8, 256, 256), **kwargs)


def both(estimates, case, directory):
    """Bytes at the peak of each phase: measured and estimated."""
    measured = {
        name: x * MIB for name, x in estimates.measure(case, str(directory))["phases"].items()
    }
    return measured, estimates.estimated(case, str(directory)).phases.sum()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"same_length": False},
        {"fields": {"gradient_checkpointing": True}},
        {
            "fields": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            "classifier": "bf16",
        },
        {"quantized": True, "classifier": "nf4"},
    ],
    ids=["masked", "checkpointing", "accumulation", "NF4"],
)
def test_no_update_takes_more_than_was_estimated(estimates, tmp_path, kwargs):
    needs(kwargs.get("classifier"))
    measured, said = both(estimates, large(estimates, **kwargs), tmp_path)
    assert measured["update"] <= 1.1 * said["update"]
    assert max(measured.values()) == pytest.approx(said.max(), rel=0.1)


def trainer_of(path, reward, response, **kwargs):
    """Three rollouts of completions that all have this length."""
    args = PPOConfig(
        str(path / "run"),
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        max_completion_length=response,
        generation_kwargs={"min_new_tokens": response},
        per_device_train_batch_size=4,
        num_mini_batches=1,
        num_ppo_epochs=1,
        max_steps=3,
        **kwargs,
    )
    return PPOTrainer(str(path / "base"), reward, args, prompts(longest=1))


def waits(function):
    """How often the host waited for the GPU while a function ran."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = function()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # the switch itself warns that it does not detect all of them
    return result, sum("called a synchronizing" in str(warning.message) for warning in caught)


def waits_of_losses(path, response):
    """Of each micro-batch's loss."""
    trainer = trainer_of(path, length_reward, response)
    counts = []
    compute_loss = trainer.compute_loss

    def counted(*args, **kwargs):
        loss, count = waits(lambda: compute_loss(*args, **kwargs))
        counts.append(count)
        return loss

    trainer.compute_loss = counted
    trainer.train()
    return counts


def test_waits_of_the_host_in_a_loss_do_not_grow_with_tokens(tmp_path, monkeypatch):
    """Masks cost a few waits; what is done for a chunk of the vocabulary must cost none."""
    _, one = waits(lambda: torch.ones(1, device="cuda").item())
    assert one == 1  # so that waits are seen at all
    monkeypatch.setitem(logprobs.CHUNK_LOGITS, "cuda", 32 * 4)  # 4 tokens of a vocabulary of 32
    llama().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    short = waits_of_losses(tmp_path, 4)
    long = waits_of_losses(tmp_path, 40)
    assert short[-1] == long[-1]
