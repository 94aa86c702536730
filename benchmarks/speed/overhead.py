"""CPU time that the trainer adds around the model, about a minute.

    python benchmarks/speed/overhead.py

Three numbers: a switch of roles, a micro-batch with a critic adapter and activation checkpointing
at 32 layers of hidden size 32, and reading the rows of a rollout of 512 completions (micro-batch 8,
four epochs) with pinning.
"""

import json
import statistics
import sys
import tempfile
import time

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.batch_plan import BatchPlan
from trl_ppo_ext.data import PROMPT_IDS, RolloutSampler, Rows
from trl_ppo_ext.modeling.loading import load_actor_critic
from trl_ppo_ext.sequences import Sequences


def cpu_ms(action, repeats=5):
    """Median CPU time of an action, in milliseconds, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        action()
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times[1:])


def deep_model(directory, critic, layers=32):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=layers, **sizes))
    return load_actor_critic(model, PPOConfig(directory, critic=critic, use_cpu=True, bf16=False))


def switch(directory):
    """A reference pass in and out: two switches."""
    actor_critic = deep_model(directory, "adapter")

    def reference():
        with actor_critic.reference():
            pass

    return cpu_ms(reference, repeats=50)


def checkpointed(directory, critic):
    """Forward and backward of a micro-batch with activation checkpointing."""
    actor_critic = deep_model(directory, critic).train()
    actor_critic.gradient_checkpointing_enable()
    sequences = Sequences.from_token_ids([[4, 5, 6]] * 4, [[7, 8, 9, 10]] * 4, 0, "cpu")

    def micro_batch():
        scores = actor_critic(sequences)
        (scores.logprobs.sum() + scores.values.sum()).backward()

    return cpu_ms(micro_batch)


def rows():
    """Seconds per rollout to draw row numbers for every micro-batch, pin them, and read the rows
    once."""
    plan = BatchPlan(8, 16, 4, num_ppo_epochs=4)
    ids = [[row % 100] * 250 for row in range(2048)]
    dataset = Dataset.from_dict({"prompt": ["a prompt"] * 2048, PROMPT_IDS: ids})
    sampler = RolloutSampler(len(dataset), plan, True, 0)
    loader = DataLoader(
        range(len(dataset)), plan.completions_per_process, sampler=sampler, collate_fn=Rows
    )
    start = time.perf_counter()
    batches = iter(loader)
    for _ in range(sampler.rollouts):
        for micro_step in range(plan.micro_steps):
            # what pinning does to a batch; without a GPU torch's own `pin_memory` only returns it
            numbers = next(batches).pin_memory()
            if micro_step == 0:
                dataset.__getitems__(sorted(set(numbers)))
    return (time.perf_counter() - start) / sampler.rollouts


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        results = {
            "reference pass, two switches, 32 layers (ms)": switch(directory),
            "micro-batch, head, checkpointing, 32 layers (ms)": checkpointed(directory, "head"),
            "micro-batch, critic adapter, checkpointing, 32 layers (ms)": checkpointed(
                directory, "adapter"
            ),
            "rows of a rollout of 512 completions (s)": rows(),
        }
    for name, value in results.items():
        print(f"{name:62s} {value:9.3f}")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
