"""`trl-ppo estimate`: the memory of a run, from its arguments and the configs of its models."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from pandas import DataFrame
from transformers.hf_argparser import HfArg

from ..config import PPOConfig
from ..memory import GIB, PROMPT_LENGTH, MemoryEstimate, estimate_memory
from .launch import model_arguments, parse

_GPUS_BY_GIB = (  # usable, as nvidia-smi reports it
    "10: RTX 3080 | 12: RTX 3060, RTX 4070 | 15: T4 | 22.5: A10, A10G, L4 | 24: RTX 3090, RTX 4090 | "
    "16: V100 16GB, RTX 4060 Ti 16GB, RTX 4080, RTX 5070 Ti, RTX 5080 | 31.8: RTX 5090, V100 32GB | 40: A100 40GB | "
    "45: L40S | 48: RTX A6000 | 79.6: H100, A100 80GB | 140.4: H200"
)
_ROWS = (row.split(": ") for row in _GPUS_BY_GIB.split(" | "))
GPUS = {name: float(memory) for memory, names in _ROWS for name in names.split(", ")}


def gpu_memory(name: str) -> float:
    """GiB of a GPU; "NVIDIA GeForce RTX 4090" and "rtx4090" are the same."""
    wanted, *known = (re.sub(r"nvidia|geforce|\W", "", x.lower()) for x in (name, *GPUS))
    if wanted not in known:
        raise ValueError(f"Unknown `gpu` {name!r}; choose one of {', '.join(GPUS)}, or set `memory` in GiB.")
    return [*GPUS.values()][known.index(wanted)]


@dataclass
class EstimateConfig(PPOConfig):
    """[`PPOConfig`] of a run on another machine, which may have a GPU."""

    gpu: str | None = HfArg(default=None, help="GPU of the run, such as 'RTX 4090'.")
    memory: float | None = HfArg(default=None, help="Memory of the device in GiB, instead of `gpu`.")
    prompt_length: int = HfArg(default=PROMPT_LENGTH, help="Tokens of the longest prompt.")
    num_processes: int = HfArg(default=1, help="World size of the run.")

    def __post_init__(self):
        if self.deepspeed or self.fsdp:  # before they are initialized
            raise ValueError("`deepspeed` and `fsdp` are not estimated; omit them.")
        if self.gpu is not None and self.memory is not None:
            raise ValueError("Both `gpu` and `memory` are set; omit one.")
        if self.memory is not None and self.memory <= 0:
            raise ValueError(f"`memory` must be above 0 GiB, got {self.memory}.")
        if self.num_processes < 1:
            raise ValueError(f"`num_processes` must be at least 1, got {self.num_processes}.")
        self.memory = gpu_memory(self.gpu) if self.gpu is not None else self.memory
        on_cpu: bool = self.use_cpu  # type: ignore[has-type]
        self.target = "cpu" if on_cpu else "cuda"
        self.bf16 = not on_cpu and not self.fp16 if self.bf16 is None else self.bf16
        self.use_cpu = True  # of this process
        super().__post_init__()

    @property
    def world_size(self) -> int:
        """World size of the run."""
        return self.num_processes


def main(argv: Sequence[str]) -> None:
    """Print the estimate; exit with status 1 if the run does not fit."""
    description = "Estimate the memory of a run, and settings that make it fit. Status 1 if it does not fit."
    script, config, model, _ = parse("estimate", argv, description, EstimateConfig)
    config = cast(EstimateConfig, config)
    kwargs = model_arguments(script, config, model)
    estimate = estimate_memory(**kwargs, prompt_length=config.prompt_length, device=config.target)
    if not print_estimate(estimate, config.memory):
        raise SystemExit(1)


def print_estimate(estimate: MemoryEstimate, memory: float | None) -> bool:
    """Print an estimate, and how to fit it in `memory` GiB; return False if it does not fit."""
    phases, peak, needed = estimate.phases, estimate.peak_phase, estimate.needed / GIB
    table = DataFrame({phase.name: phase.parts for phase in phases}) / GIB
    table.loc["tensors"] = table.sum()
    print(f"GiB at the peak of each phase\n{table.to_string(float_format='{:.2f}'.format, na_rep='')}")
    where = "with context and fragmentation (assumed)" if estimate.on_gpu else "in tensors"
    print(f"peak: {peak.bytes / GIB:.2f} GiB in {peak.name}; {needed:.2f} GiB {where}")
    if memory is None:
        return True
    if estimate.base_of_vllm:
        base, share = estimate.base_of_vllm / GIB, estimate.args.vllm_gpu_memory_utilization * memory
        if base > share:
            print(f"vLLM needs {base:.1f} GiB for its base, and has {share:.1f}: raise `vllm_gpu_memory_utilization`")
            return False
        cache = estimate.cache_of_vllm(memory) / GIB
        needed += cache
        print(f"vLLM adds {cache:.2f} GiB of keys and values to the peak, of its share of {memory:g} GiB")
    if estimate.fits(memory):
        print(f"fits in {memory:g} GiB, with {memory - needed:.1f} GiB to spare")
        return True
    steps = estimate.proposals(memory)
    print(f"does not fit in {memory:g} GiB: {needed - memory:.1f} GiB too much. With these changes, each added:")
    for step in steps:
        change = ", ".join(f"{name}: {json.dumps(value)}" for name, value in step.settings[-1].items())
        print(f"  {step.needed / GIB:6.1f} GiB, {'fits' if step.fits(memory) else 'does not fit'}: {change}")
    if not (steps and steps[-1].fits(memory)):
        print("All of them together do not fit: use a smaller model or shorter completions.")
    return False
