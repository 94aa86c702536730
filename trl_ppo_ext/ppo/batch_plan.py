"""Every batch size of a run, derived once from the config."""

from dataclasses import dataclass
from typing import Any


def _divisors(number: int, largest: int) -> list[int]:
    return [d for d in range(1, min(number, largest) + 1) if number % d == 0]


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of a rollout and of its pieces.

    A rollout is cut into `num_mini_batches` minibatches, each is one optimizer step; a minibatch is cut into
    `gradient_accumulation_steps` micro-batches, each is one forward and backward. The rollout is passed over
    `num_ppo_epochs` times.
    """

    micro_batch_size: int  # completions in one forward and backward, on one process
    gradient_accumulation_steps: int = 1  # micro-batches in one optimizer step
    num_mini_batches: int = 1  # optimizer steps in one PPO epoch
    num_ppo_epochs: int = 1  # passes over a rollout
    num_generations: int = 1  # completions sampled for each prompt
    num_processes: int = 1  # processes that train together

    def __post_init__(self):
        if self.completions % self.num_generations:
            fitting = _divisors(self.completions, largest=4 * self.num_generations)
            raise ValueError(
                f"num_generations={self.num_generations} does not divide the rollout of {self.completions} "
                f"completions (per_device_train_batch_size {self.micro_batch_size} × gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} × num_mini_batches {self.num_mini_batches} × "
                f"{self.num_processes} processes); use one of {fitting}, or change the sizes of the rollout."
            )

    @classmethod
    def from_config(cls, config: Any, num_processes: int) -> "BatchPlan":
        """Read the sizes off a [`PPOConfig`]."""
        return cls(
            micro_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            num_mini_batches=config.num_mini_batches,
            num_ppo_epochs=config.num_ppo_epochs,
            num_generations=config.num_generations,
            num_processes=num_processes,
        )

    @property
    def mini_batch_size(self) -> int:
        """Completions of one optimizer step, on one process."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def completions_per_process(self) -> int:
        """Completions of one rollout, on one process."""
        return self.mini_batch_size * self.num_mini_batches

    @property
    def completions(self) -> int:
        """Completions of one rollout, over all processes."""
        return self.completions_per_process * self.num_processes

    @property
    def prompts(self) -> int:
        """Distinct draws of a prompt in one rollout, over all processes."""
        return self.completions // self.num_generations

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that one rollout feeds."""
        return self.num_ppo_epochs * self.num_mini_batches

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes that one rollout feeds, on each process."""
        return self.optimizer_steps * self.gradient_accumulation_steps


def accumulation_for(
    generation_batch_size: int, num_mini_batches: int, micro_batch_size: int, num_processes: int
) -> int:
    """Gradient accumulation steps that make a rollout of exactly `generation_batch_size` completions."""
    if generation_batch_size % num_mini_batches:
        near = [d for d in _divisors(generation_batch_size, generation_batch_size) if d <= 2 * num_mini_batches][-3:]
        raise ValueError(
            f"num_mini_batches={num_mini_batches} does not divide the rollout of {generation_batch_size} completions "
            f"(generation_batch_size); use {' or '.join(map(str, near))}."
        )
    mini_batch_size, one_pass = generation_batch_size // num_mini_batches, micro_batch_size * num_processes
    if mini_batch_size % one_pass:
        fitting = [d for d in _divisors(mini_batch_size, mini_batch_size) if d % num_processes == 0]
        remedy = (
            f"use a per_device_train_batch_size of {' or '.join(str(d // num_processes) for d in fitting[-4:])}"
            if fitting
            else f"make generation_batch_size a multiple of {num_mini_batches * num_processes}"
        )
        raise ValueError(
            f"A minibatch of {mini_batch_size} completions (generation_batch_size {generation_batch_size} / "
            f"num_mini_batches {num_mini_batches}) cannot be cut into micro-batches of {one_pass} "
            f"(per_device_train_batch_size {micro_batch_size} × {num_processes} processes); {remedy}."
        )
    return mini_batch_size // one_pass
