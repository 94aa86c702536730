"""Arithmetic of a step, counted against what torch itself counts."""

import pytest
import torch
from tiny import config, length_reward, llama, prompts, tokenizer
from torch.utils.flop_counter import FlopCounterMode

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.ppo import throughput
from trl_ppo_ext.ppo.batch_plan import BatchPlan
from trl_ppo_ext.ppo.throughput import Throughput, peak_flops, step_flops


@pytest.mark.parametrize("critic, with_critic_adapter", [("head", False), ("adapter", True)])
def test_the_matrix_products_of_a_step_are_those_that_are_counted(tmp_path, critic, with_critic_adapter):
    """All but adapters, attention and the value head; equal lengths, so that nothing is padded."""
    epochs = 3
    args = config(tmp_path, critic=critic, num_mini_batches=1, num_ppo_epochs=epochs, max_steps=epochs)
    base = llama(512, hidden_size=64, attn_implementation="eager")
    trainer = PPOTrainer(base, length_reward, args, prompts(longest=1), processing_class=tokenizer())
    trainer.experience.generator.generate = lambda rows: [[5, 6, 7, 8, 9, 1] for _ in rows]
    with FlopCounterMode(display=False) as counter:
        trainer.train()
    through_linear = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    trunk, head = trainer.throughput.trunk, trainer.throughput.head
    assert head == 512 * 64
    completion_tokens, tokens = 4 * 6, 4 * (1 + 6)
    expected = step_flops(trunk, head, 4 * 1, completion_tokens, epochs, with_critic_adapter)
    expected -= 2 * (trunk * tokens + head * completion_tokens)  # what is sampled here costs nothing
    attention = trainer.actor_critic.trunk.layers[0].self_attn
    first = sum(getattr(attention, name).base_layer.weight.numel() for name in ("q_proj", "k_proj", "v_proj"))
    expected -= 2 * first * tokens * epochs * (1 + with_critic_adapter)  # no gradient goes on to the embeddings
    adapters = sum(x.numel() for x in trainer.actor_critic.parameters() if x.requires_grad)
    of_adapters = 2 * adapters * tokens * (1 + 3 * epochs)  # at most: forwards, backwards, gradients of their own
    assert expected <= through_linear <= expected + of_adapters


def test_tokens_and_utilisation_are_those_since_the_last_log(monkeypatch):
    clock = iter([10.0, 14.0, 14.0, 20.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(throughput, "_weights", lambda model: (1000, 100))
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 1e6)
    plan = BatchPlan(1, num_ppo_epochs=2, num_processes=2)
    counted = Throughput(type("Model", (), {"critic_adapter": None}), plan, torch.device("cpu"))
    assert counted.since_last() == {}
    counted.add(prompt_tokens=50, completion_tokens=100)
    reached = counted.since_last()
    assert reached["tokens_per_second"] == 25  # in 4 seconds
    assert reached["mfu"] == pytest.approx(step_flops(1000, 100, 50, 100, 2) / (4 * 1e6 * 2))
    assert counted.since_last() == {}


def test_what_was_before_training_does_not_count(tmp_path):
    trainer = PPOTrainer(llama(), length_reward, config(tmp_path), prompts(), processing_class=tokenizer())
    trainer.throughput.since -= 3600
    trainer.train()
    first = next(log for log in trainer.state.log_history if "tokens_per_second" in log)
    assert first["tokens_per_second"] > 0.1 * first["num_tokens"] / trainer.state.log_history[-1]["train_runtime"]


def test_a_device_without_a_known_peak_has_no_utilisation(monkeypatch):
    assert peak_flops(torch.device("cpu")) is None
    names = {"NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A10G": 70e12, "Some card": None}
    names |= {"NVIDIA A100-SXM4-80GB": 312e12, "Tesla T4": 65e12, "NVIDIA H100 NVL": 835e12}
    names |= {"NVIDIA L40": None, "NVIDIA RTX A1000": None, "NVIDIA T400": None}  # which begin like others
    for name, expected in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == expected
