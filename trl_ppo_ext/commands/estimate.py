"""`trl-ppo estimate`: the memory of a run, from its arguments and the configs of its models."""

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

from transformers.hf_argparser import HfArg

from ..config import PPOConfig
from ..tools.memory import GIB, PROMPT_LENGTH, MemoryEstimate, estimate_memory
from .launch import model_arguments, parse


@dataclass
class EstimateConfig(PPOConfig):
    """[`PPOConfig`] of a run on another machine, which may have a GPU."""

    memory: float | None = HfArg(default=None, help="Memory of the device in GiB, e.g. 24.")
    prompt_length: int | None = HfArg(
        default=None,
        help=(
            f"Tokens of the longest prompt (default: {PROMPT_LENGTH}, or what the context leaves)."
        ),
    )
    num_processes: int = HfArg(default=1, help="World size of the run.")

    def __post_init__(self):
        on_cpu: bool = self.use_cpu  # type: ignore[has-type]
        if on_cpu:
            self.target = "cpu"
        else:
            self.target = "cuda"
        self.bf16 = not on_cpu and not self.fp16 if self.bf16 is None else self.bf16
        # of this process
        self.use_cpu = True
        self.tf32 = None
        super().__post_init__()

    @property
    def world_size(self) -> int:
        """World size of the run."""
        return self.num_processes


def main(argv: Sequence[str]) -> None:
    """Print the estimate; exit with status 1 if the run does not fit."""
    description = (
        "Estimate the memory of a run, and settings that make it fit. Status 1 if it does not fit."
    )
    script, config, model = parse("trl-ppo estimate", argv, description, EstimateConfig)
    config = cast(EstimateConfig, config)
    run = model_arguments(script, config, model)
    # An estimate may omit rewards; a run may only with a reference that sees more.
    if config.reference_prompt and not (run["reward_funcs"] or script.environment_factory):
        run["args"] = config.without_rewards()
    estimate = estimate_memory(**run, prompt_length=config.prompt_length, device=config.target)
    print(work_of(config, config.num_processes))
    if not print_estimate(estimate, config.memory):
        raise SystemExit(1)


def work_of(args: PPOConfig, processes: int) -> str:
    """Completions and tokens of a run, or of a rollout if its length is counted in epochs."""
    plan = args.plan(processes)
    completions = plan.completions
    unit = "per rollout"
    if args.max_steps > 0:
        completions *= -(-args.max_steps // plan.optimizer_steps)
        unit = "in the run"
    tokens = completions * args.max_completion_length
    return (
        f"work:    {completions:,} completions {unit}, with at most {tokens:,} tokens in all, each "
        f"sampled once, and learned from {args.num_ppo_epochs} times"
    )


def divisors(number: int) -> list[int]:
    """Divisors of a number, the largest first."""
    return [x for x in range(number, 0, -1) if number % x == 0]


def largest_that_fits(
    estimate: MemoryEstimate, values: list[dict[str, Any]], memory: float
) -> tuple[dict[str, Any], MemoryEstimate]:
    """The first change to a setting with which the run fits in `memory` GiB, else the last."""
    tried = [(change, changed(estimate, change)) for change in values]
    return next((x for x in tried if x[1].fits(memory)), tried[-1])


def proposals(
    estimate: MemoryEstimate, memory: float
) -> list[tuple[dict[str, Any], MemoryEstimate]]:
    """Changes, each of which lowers the peak, until the run fits in `memory` GiB, and the
    estimates with them."""
    plan = estimate.args.plan(estimate.processes)
    minibatch = plan.mini_batch_size
    completions = plan.completions_per_process
    sizes = divisors(minibatch)
    samples = divisors(completions)
    kept = {"num_mini_batches": plan.num_mini_batches}  # which `steps_per_generation` would change
    # the least costly first, each with its values from the largest
    changes: list[list[dict[str, Any]]] = [
        [{"gradient_checkpointing": True}],
        [
            {"per_device_train_batch_size": x, "gradient_accumulation_steps": minibatch // x} | kept
            for x in sizes
        ],
        [{"per_device_generation_batch_size": x} for x in samples],
    ]
    if estimate.base.quantization is None:
        changes.append([{"load_in_4bit": True, "use_bnb_nested_quant": True}])
    steps: list[tuple[dict[str, Any], MemoryEstimate]] = []
    while not estimate.fits(memory):
        chosen = [largest_that_fits(estimate, values, memory) for values in changes]
        step = next((x for x in chosen if x[1].needed < estimate.needed), None)
        if step is None:
            break
        steps.append(step)
        estimate = step[1]
    return steps


def changed(estimate: MemoryEstimate, setting: dict[str, Any]) -> MemoryEstimate:
    """Estimate a run with another setting."""
    args = copy(estimate.args)
    args.__dict__.update(setting)
    if "load_in_4bit" in setting:
        base = replace(estimate.base, quantization="4bit double")
    else:
        base = estimate.base
    return replace(estimate, args=args, base=base)


def print_estimate(estimate: MemoryEstimate, memory: float | None) -> bool:
    """Print an estimate, and how to fit it in `memory` GiB; return False if it does not fit."""
    table = estimate.phases / GIB
    needed = estimate.needed / GIB
    table.loc["tensors"] = totals = table.sum()
    print(
        f"GiB at the peak of each phase\n{table.to_string(float_format='{:.2f}'.format, na_rep='')}"
    )
    if estimate.on_gpu:
        hint = "with context and fragmentation (assumed)"
    else:
        hint = "in tensors"
    print(f"peak: {totals.max():.2f} GiB in {totals.idxmax()}; {needed:.2f} GiB {hint}")
    if memory is None:
        return True
    if share := estimate.share_of_vllm(memory) / GIB:
        needed += share
        print(f"vLLM adds {share:.2f} GiB to the peak (`vllm_gpu_memory_utilization`)")
        base = estimate.base_of_vllm / GIB
        if base > (room := estimate.args.vllm_gpu_memory_utilization * memory):
            print(
                f"does not fit: vLLM's share of {room:.1f} GiB does not hold its base of "
                f"{base:.1f} GiB"
            )
            return False
    if estimate.fits(memory):
        print(f"fits in {memory:g} GiB, with {memory - needed:.1f} GiB to spare")
        return True
    print(
        f"does not fit in {memory:g} GiB: {needed - memory:.1f} GiB too much. With these changes, "
        "each added:"
    )
    fits = False
    for setting, step in proposals(estimate, memory):
        fits = step.fits(memory)
        change = ", ".join(f"{name}: {json.dumps(value)}" for name, value in setting.items())
        if "num_mini_batches" in setting and "steps_per_generation" in estimate.args.given:
            change += ", in place of `steps_per_generation`"
        needed = (step.needed + step.share_of_vllm(memory)) / GIB
        print(f"  {needed:6.1f} GiB, {'fits' if fits else 'does not fit'}: {change}")
    if not fits:
        print("All of them together do not fit: use a smaller model or shorter completions.")
    return False
