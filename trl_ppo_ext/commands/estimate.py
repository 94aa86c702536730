"""`trl-ppo estimate`: what memory a run will need, before it starts and from configs alone.

The arguments are those of a run, so that a run's YAML file is estimated as it is.
"""

import json as json_format
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from trl import ModelConfig, get_peft_config, get_quantization_config

from ..arguments import as_list
from ..config import PPOConfig
from ..memory import GIB, PROMPT_LENGTH, MemoryEstimate, Proposal, estimate_memory, gpu_memory
from .launch import find_reward, parse


@dataclass
class EstimateConfig(PPOConfig):
    """[`PPOConfig`] of a run on another machine: nothing asks for a GPU here."""

    gpu: str | None = field(default=None, metadata={"help": "GPU that the run is meant for, such as 'RTX 4090'."})
    memory: float | None = field(default=None, metadata={"help": "Memory of the device in GiB, in place of `gpu`."})
    prompt_length: int = field(default=PROMPT_LENGTH, metadata={"help": "Tokens of the longest prompt."})
    num_processes: int = field(default=1, metadata={"help": "Processes that train together."})
    json: str | None = field(default=None, metadata={"help": "Write the numbers to this file too."})

    def __post_init__(self):
        if self.deepspeed or self.fsdp:
            raise ValueError("`deepspeed` and `fsdp` are not estimated; leave them out.")
        if self.gpu is not None and self.memory is not None:
            raise ValueError("Both `gpu` and `memory` are given; leave one of them out.")
        if self.memory is not None and self.memory <= 0:
            raise ValueError(f"`memory` must be above 0, in GiB, got {self.memory}.")
        if self.num_processes < 1:
            raise ValueError(f"`num_processes` must be at least 1, got {self.num_processes}.")
        if self.json is not None and not Path(self.json).absolute().parent.is_dir():
            raise ValueError(f"`json={self.json!r}` lies in a folder that does not exist; create it.")
        if self.gpu is not None:
            self.memory = gpu_memory(self.gpu)
        on_cpu: bool = self.use_cpu  # type: ignore[has-type]
        self.target = "cpu" if on_cpu else "cuda"
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not on_cpu
        self.use_cpu = True  # of this process
        super().__post_init__()

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.num_processes


def main(argv: Sequence[str] | None = None) -> None:
    """Estimate, print the table and the verdict, and write the numbers where that is asked for."""
    said = "Say what memory a run will need, and which settings would make it fit. Status 1 if it does not fit."
    script_args, config, model_args, _ = parse("estimate", list(argv or []), said, EstimateConfig)
    args, model_args = cast(EstimateConfig, config), cast(ModelConfig, model_args)
    if model_args.model_name_or_path is None:
        raise ValueError("There is no model; give `model_name_or_path`.")
    named = {"dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    given = {key: value for key, value in named.items() if value is not None}
    args.model_init_kwargs = cast(dict, args.model_init_kwargs or {}) | given
    estimate = estimate_memory(
        model_args.model_name_or_path,
        args,
        reward_funcs=[find_reward(name) for name in as_list(script_args.reward_funcs)],
        monitor_funcs=[find_reward(name) for name in as_list(script_args.monitor_funcs)],
        quantization_config=get_quantization_config(replace(model_args, dtype=None)),
        peft_config=get_peft_config(replace(model_args, use_peft=True)),
        ptx=script_args.ptx_dataset_name is not None,
        prompt_length=args.prompt_length,
        device=args.target,
    )
    print_estimate(estimate, args.memory)
    if args.json is not None:
        Path(args.json).write_text(json_format.dumps(report(estimate, args.memory), indent=2) + "\n")
    if args.memory is not None and not estimate.fits(args.memory):
        raise SystemExit(1)


def report(estimate: MemoryEstimate, memory: float | None) -> dict[str, Any]:
    """The numbers for a file, in bytes."""
    told: dict[str, Any] = {
        "phases": {phase.name: {key: round(x) for key, x in phase.parts.items()} for phase in estimate.phases},
        "peak": round(estimate.peak),
        "peak_phase": estimate.peak_phase.name,
        "needed": round(estimate.needed),
    }
    if memory is None:
        return told
    told |= {"memory": round(memory * GIB), "fits": estimate.fits(memory)}
    if told["fits"]:
        return told
    alone, first = estimate.proposals(memory)

    def of(proposal: Proposal) -> dict[str, Any]:
        return {"settings": list(proposal.settings), "needed": round(proposal.needed), "fits": proposal.fits}

    return told | {"proposals": [of(x) for x in alone], "first_that_fits": None if first is None else of(first)}


def verdict(estimate: MemoryEstimate, memory: float) -> list[str]:
    """Lines that say whether a run fits, and what would make it fit."""
    margin = memory - estimate.needed / GIB
    if estimate.fits(memory):
        return [f"fits in {memory:g} GiB, with {margin:.1f} GiB to spare"]
    lines = [f"does not fit in {memory:g} GiB: {-margin:.1f} GiB too much. Each of these alone:"]
    alone, first = estimate.proposals(memory)
    for proposal in alone:
        fits = "fits" if proposal.fits else "does not fit"
        lines.append(f"  {proposal.needed / GIB:6.1f} GiB, {fits}: {proposal.settings[0]}")
    if first is None:
        return [*lines, "All of them together do not make it fit: take a smaller model or shorter completions."]
    return [*lines, f"First that fits, at {first.needed / GIB:.1f} GiB:", *(f"  {x}" for x in first.settings)]


def print_estimate(estimate: MemoryEstimate, memory: float | None) -> None:
    """Print the table and the verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("GiB at the peak of")
    for phase in estimate.phases:
        table.add_column(phase.name, justify="right")
    parts = dict.fromkeys(part for phase in estimate.phases for part in phase.parts)
    for part in parts:
        cells = [phase.parts.get(part) for phase in estimate.phases]
        table.add_row(part, *("" if x is None else f"{x / GIB:.2f}" for x in cells))
    table.add_section()
    table.add_row("tensors", *(f"{phase.bytes / GIB:.2f}" for phase in estimate.phases))
    console = Console(markup=False, highlight=False)
    console.print(table)
    where = "with context and fragmentation (assumed)" if estimate.workload.on_gpu else "in tensors"
    console.print(
        f"peak: {estimate.peak / GIB:.2f} GiB in {estimate.peak_phase.name}; {estimate.needed / GIB:.2f} GiB {where}",
        soft_wrap=True,
    )
    for line in [] if memory is None else verdict(estimate, memory):
        console.print(line, soft_wrap=True)
