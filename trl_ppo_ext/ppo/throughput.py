"""Tokens a second, and how much of a GPU's arithmetic they use."""

import re
import time

import torch
from torch import nn

from ..modeling import ActorCritic
from .batch_plan import BatchPlan

# dense TFLOP/s in 16 bits, from the makers' data sheets, by words of the device's name; the longer names first
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200 NVL": 835,
    "H200": 989,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}


def peak_flops(device: torch.device) -> float | None:
    """What a GPU can do at most."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # whole words: an L40 is no L4, an RTX A1000 no A100
    return next((tera * 1e12 for card, tera in PEAK_TFLOPS.items() if re.search(rf"\b{card}\b", name)), None)


def step_flops(
    trunk: int, head: int, prompt_tokens: int, completion_tokens: int, epochs: int, with_critic_adapter: bool = False
) -> float:
    """Arithmetic of one PPO step: two FLOP for each weight that a token meets, attention and rewards left out.

    Sampling, then policy and reference, then each epoch a forward and a backward; the base is frozen, so the backward
    goes through the activations alone. The vocabulary is met at completions only.
    """
    tokens, critic = prompt_tokens + completion_tokens, int(with_critic_adapter)
    through_trunk = 1 + (2 + critic) + 2 * epochs * (1 + critic)  # sampling, scoring, updates
    through_head = 1 + 2 + 2 * epochs
    return 2.0 * (trunk * tokens * through_trunk + head * completion_tokens * through_head)


def _weights(actor_critic: ActorCritic) -> tuple[int, int]:
    """Numbers of weights that a token meets in the trunk and in the output projection."""

    adapters = set(actor_critic.policy.peft_config)

    def numbers(module: nn.Module) -> int:
        of_base = [x for name, x in module.named_parameters() if adapters.isdisjoint(name.split("."))]
        # a 4-bit weight keeps its shape beside its packed numbers, a sharded one its size
        whole = (getattr(x, "ds_numel", x.numel()) for x in of_base)
        states = (getattr(x, "quant_state", None) for x in of_base)
        return sum(number if state is None else state.shape.numel() for number, state in zip(whole, states))

    base = actor_critic.policy.get_base_model()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    return numbers(actor_critic.trunk) - numbers(embedding), numbers(head)


class Throughput:
    """Counts tokens between two logs."""

    def __init__(self, actor_critic: ActorCritic, plan: BatchPlan, device: torch.device):
        self.plan = plan
        self.peak = peak_flops(device)
        self.trunk, self.head = _weights(actor_critic)
        self.with_critic_adapter = actor_critic.critic_adapter is not None
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self.since, self.tokens, self.flops = time.perf_counter(), 0, 0.0

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a rollout, over all processes."""
        sizes = (self.trunk, self.head, prompt_tokens, completion_tokens, self.plan.num_ppo_epochs)
        self.tokens += completion_tokens
        self.flops += step_flops(*sizes, self.with_critic_adapter)

    def since_last(self) -> dict[str, float]:
        """What was reached since it was asked last."""
        if not self.tokens:
            return {}
        seconds = time.perf_counter() - self.since
        reached = {"tokens_per_second": self.tokens / seconds}
        if self.peak is not None:
            reached["mfu"] = self.flops / (seconds * self.peak * self.plan.num_processes)
        self.restart()
        return reached
