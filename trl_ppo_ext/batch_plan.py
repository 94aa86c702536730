"""Every batch size of a run, derived once from the config."""

import math
from dataclasses import dataclass, field

FEW_COMPLETIONS = 64  # smaller rollouts get a note
ADVISED = 128  # completions that it names at least


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of a rollout and its parts: minibatches (one optimizer step each) of micro-batches
    (one forward each)."""

    micro_batch_size: int  # completions per forward and backward, per process
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    num_mini_batches: int = 1  # optimizer steps per PPO epoch
    num_ppo_epochs: int = 1  # passes over a rollout
    num_generations: int = 1  # completions per prompt
    num_processes: int = 1  # world size

    mini_batch_size: int = field(init=False)  # completions per optimizer step, per process
    completions_per_process: int = field(init=False)  # completions per rollout, per process
    completions: int = field(init=False)  # completions per rollout, over all processes
    prompts: int = field(init=False)  # prompts per rollout, over all processes
    optimizer_steps: int = field(init=False)  # optimizer steps per rollout
    micro_steps: int = field(init=False)  # forward and backward passes per rollout, per process

    def __post_init__(self):
        mini_batch_size = self.micro_batch_size * self.gradient_accumulation_steps
        completions = mini_batch_size * self.num_mini_batches * self.num_processes
        optimizer_steps = self.num_ppo_epochs * self.num_mini_batches
        vars(self).update(  # the plan itself is frozen
            mini_batch_size=mini_batch_size,
            completions_per_process=mini_batch_size * self.num_mini_batches,
            completions=completions,
            prompts=completions // self.num_generations,
            optimizer_steps=optimizer_steps,
            micro_steps=optimizer_steps * self.gradient_accumulation_steps,
        )
        if self.completions % self.num_generations:
            valid = [n for n in range(1, 4 * self.num_generations + 1) if self.completions % n == 0]
            raise ValueError(
                f"`num_generations={self.num_generations}` does not divide the rollout of "
                f"{completions} completions (per_device_train_batch_size {self.micro_batch_size} × "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} × "
                f"num_mini_batches {self.num_mini_batches} × {self.num_processes} processes); use "
                f"one of {valid}, or change the rollout."
            )

    def summary(self, max_steps: int, epochs: float) -> str:
        """Sizes of a rollout and of the run; with a negative `max_steps` its length is `epochs`."""
        run = f"{epochs:g} passes over the dataset"
        note = ""
        if max_steps > 0:
            rollouts = -(-max_steps // self.optimizer_steps)
            total = f"{rollouts} rollouts = {rollouts * self.completions} completions"
            run = f"max_steps={max_steps} optimizer steps = {total}"
        if self.completions < FEW_COMPLETIONS:
            # whole micro-batches, and whole groups
            smallest = self.micro_batch_size * self.num_mini_batches * self.num_processes
            part = math.lcm(smallest, self.num_generations)
            size = -(-ADVISED // part) * part
            remedy = (
                f"`generation_batch_size={size}` with `num_mini_batches={self.num_mini_batches}` "
                "makes it larger"
            )
            note = (
                f"\nnote:    a rollout of {self.completions} completions has noisy advantages; "
                f"{remedy}"
            )
        return (
            f"rollout: {self.completions} completions of {self.prompts} prompts "
            f"({self.num_generations} each) = {self.micro_batch_size} per micro-batch × "
            f"{self.gradient_accumulation_steps} micro-batches × {self.num_mini_batches} "
            f"minibatches × {self.num_processes} processes\nupdates: {self.optimizer_steps} "
            f"optimizer steps per rollout = {self.num_ppo_epochs} epochs × {self.num_mini_batches} "
            f"minibatches of {self.completions // self.num_mini_batches} completions\nrun:     "
            f"{run}{note}"
        )


def factor_of(
    completions: int, name: str, factor: int, micro_batch_size: int, num_processes: int
) -> int:
    """Number of minibatches or accumulation steps of a rollout of this many completions, given
    the other one."""
    unit = factor * micro_batch_size * num_processes
    steps, rest = divmod(completions, unit)
    if rest:
        sizes = " or ".join(str(unit * n) for n in (steps, steps + 1) if n)
        raise ValueError(
            f"`generation_batch_size` must be a multiple of {unit} ({name} {factor} × "
            f"per_device_train_batch_size {micro_batch_size} × {num_processes} processes), got "
            f"{completions}; use {sizes}, or change the others."
        )
    return steps
