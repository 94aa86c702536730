"""Run iterations of PPO on the simulated GPU and write the waits of the host, by configuration,
to a JSON file."""

import json
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig
from simulation import DEVICE, SimulatedCuda
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import config, length_reward, llama, prompts, tokenizer

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.data import Rows
from trl_ppo_ext.ppo_math import Moments


def flash_attention(module, query, *args, **kwargs):
    """Stand-in with the demands of flash attention's kernels."""
    if query.device.type == "cpu" or query.dtype == torch.float32:
        raise RuntimeError(
            f"FlashAttention takes fp16 and bf16 tensors on a GPU, got {query.dtype} on "
            f"{query.device}"
        )
    return sdpa_attention_forward(module, query, *args, **kwargs)


AttentionInterface.register("stand_in", flash_attention)
LORA = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["gate_proj"])
CONFIGURATIONS = {
    "defaults": {},
    "value head": {"critic": "head", "normalize_values": False},
    "critic adapter, checkpointing": {"critic": "adapter", "gradient_checkpointing": True},
    "no critic": {"critic": "none", "num_generations": 2},
    "reward model": {"reward_funcs": "classifier", "critic": "head", "normalize_values": False},
    "shared prompts": {"num_generations": 4},
    "bf16, flash attention, modules_to_save": {"bf16": True, "peft_config": LORA},
}


def build(directory, reward_funcs=length_reward, peft_config=None, **settings):
    model = llama()
    processing_classes = None
    if settings.get("bf16"):
        model = llama(dtype=torch.bfloat16, attn_implementation="stand_in")
    if reward_funcs == "classifier":
        reward_funcs = llama(classifier=True)
        processing_classes = tokenizer()
    settings |= {
        "gradient_accumulation_steps": 2,
        "per_device_reward_batch_size": 8,
        "num_ppo_epochs": 1,
    }
    args = config(directory, **settings)
    rest = {"processing_class": tokenizer(), "reward_processing_classes": processing_classes}
    return PPOTrainer(model, reward_funcs, args, prompts(), peft_config=peft_config, **rest)


def set_device(trainer, device):
    for state in (PartialState(), trainer.accelerator.state):  # one is copied to the other at times
        state.__dict__["device"] = device
    for kept in trainer._process_state.values():
        kept["device"] = device


def move(trainer, gpu):
    """Move a trainer to the simulated GPU; sampling returns tokens at once."""
    gpu.place(trainer.actor_critic)
    for reward in trainer.reward_funcs:
        if isinstance(reward, torch.nn.Module):
            gpu.place(reward)
    set_device(trainer, DEVICE)
    trainer.updates.device = DEVICE
    trainer.updates.reset()
    for metrics in trainer.metrics.values():
        metrics.device = DEVICE

    length = trainer.args.max_completion_length

    def sampled(prompts):
        return torch.zeros(len(prompts), length, dtype=torch.long, device=DEVICE).tolist()

    trainer.components.player.generator.generate = sampled


def iterations(trainer, gpu):
    """Run two iterations; return the waits of the second one, in the rollout and per kind of
    micro-batch."""
    model = trainer.accelerator.prepare_model(trainer.model, device_placement=False)
    accumulation = trainer.args.gradient_accumulation_steps
    rollout = Counter()
    collect = trainer._collect

    def counted(rows):
        before = gpu.waits.copy()
        collect(rows)
        rollout.update(gpu.waits - before)

    trainer._collect = counted
    trainer.get_train_dataloader()
    rows = Rows(range(trainer.plan.completions_per_process))
    for iteration in range(2):
        if iteration:  # a number read from the simulated GPU is 0, so the critic has seen no return
            # that differ
            critic = trainer.run_state.critic._replace(returns=Moments(1.0, 0.0, 1.0))
            if trainer.actor_critic.value_head is not None:  # nor is it fitted again
                critic = trainer.actor_critic.value_head.settled(critic)
            trainer.run_state = trainer.run_state._replace(critic=critic)
        gpu.waits.clear()
        rollout.clear()
        for micro_batch in range(1, trainer.plan.micro_steps + 1):
            trainer.accelerator.gradient_state._set_sync_gradients(micro_batch % accumulation == 0)
            trainer.training_step(model, rows)
            if micro_batch % accumulation == 0:
                trainer._get_grad_norm(model, trainer._clip_grad_norm(model))
                trained = {
                    name: x.grad
                    for name, x in trainer.actor_critic.named_parameters()
                    if x.requires_grad
                }
                model.zero_grad()
                trainer.state.global_step += 1
    return {
        "rollout": dict(rollout),
        "updates": dict(gpu.waits - rollout),
        "micro_batches": trainer.plan.micro_steps,
        "optimizer_steps": trainer.plan.optimizer_steps,
        "without_gradient": [
            name for name, x in trained.items() if x is None or x.device != DEVICE
        ],
        "peak_bytes": gpu.peak_bytes,
    }


def main(path, *names):
    # autocast for CUDA needs a GPU only to be switched on
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.get_rng_state = lambda: None
    torch.cuda.set_rng_state = lambda state: None
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    results = {}
    for name in names or CONFIGURATIONS:
        settings = CONFIGURATIONS[name]
        with tempfile.TemporaryDirectory() as directory:
            trainer = build(directory, **settings)
            device = trainer.accelerator.device
            try:
                with SimulatedCuda() as gpu:
                    move(trainer, gpu)
                    results[name] = iterations(trainer, gpu)
            except Exception:
                results[name] = {"error": traceback.format_exc()}
            set_device(trainer, device)
    Path(path).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
