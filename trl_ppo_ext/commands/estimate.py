"""`trl-ppo estimate`: the memory of a run, from its arguments and the configs of its models."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from trl import ModelConfig, get_peft_config, get_quantization_config

from ..arguments import as_list
from ..config import PPOConfig
from ..memory import GIB, PROMPT_LENGTH, MemoryEstimate, estimate_memory
from .launch import find_reward, parse

_GPUS_BY_GIB = {  # usable, as nvidia-smi reports it
    10.0: "RTX 3080",
    12.0: "RTX 3060, RTX 4070",
    15.0: "T4",
    16.0: "V100 16GB, RTX 4060 Ti 16GB, RTX 4080, RTX 5070 Ti, RTX 5080",
    22.5: "A10, A10G, L4",
    24.0: "RTX 3090, RTX 4090",
    31.8: "RTX 5090, V100 32GB",
    40.0: "A100 40GB",
    45.0: "L40S",
    48.0: "RTX A6000",
    79.6: "H100, A100 80GB",
    140.4: "H200",
}
GPUS = {name: memory for memory, names in _GPUS_BY_GIB.items() for name in names.split(", ")}


def gpu_memory(name: str) -> float:
    """GiB of a GPU; "NVIDIA GeForce RTX 4090" and "rtx4090" are the same."""
    wanted, *known = (re.sub(r"nvidia|geforce|\W", "", x.lower()) for x in (name, *GPUS))
    if wanted not in known:
        raise ValueError(f"Unknown `gpu` {name!r}; choose one of {', '.join(GPUS)}, or set `memory` in GiB.")
    return [*GPUS.values()][known.index(wanted)]


@dataclass
class EstimateConfig(PPOConfig):
    """[`PPOConfig`] of a run on another machine, which may have a GPU."""

    gpu: str | None = field(default=None, metadata={"help": "GPU of the run, such as 'RTX 4090'."})
    memory: float | None = field(default=None, metadata={"help": "Memory of the device in GiB, instead of `gpu`."})
    prompt_length: int = field(default=PROMPT_LENGTH, metadata={"help": "Tokens of the longest prompt."})
    num_processes: int = field(default=1, metadata={"help": "World size of the run."})
    json: str | None = field(default=None, metadata={"help": "File to write the numbers to."})

    def __post_init__(self):
        invalid = {
            "`deepspeed` and `fsdp` are not estimated; omit them.": bool(self.deepspeed or self.fsdp),
            "Both `gpu` and `memory` are set; omit one.": self.gpu is not None and self.memory is not None,
            f"`memory` must be above 0 GiB, got {self.memory}.": self.memory is not None and self.memory <= 0,
            f"`num_processes` must be at least 1, got {self.num_processes}.": self.num_processes < 1,
            f"`json={self.json!r}` must be in an existing folder; create it.": (
                self.json is not None and not Path(self.json).absolute().parent.is_dir()
            ),
        }
        for message in (message for message, applies in invalid.items() if applies):
            raise ValueError(message)
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


def main(argv: Sequence[str] | None = None) -> None:
    """Print the estimate; exit with status 1 if the run does not fit."""
    description = "Estimate the memory of a run, and settings that make it fit. Status 1 if it does not fit."
    script, config, model_options, _ = parse("estimate", list(argv or []), description, EstimateConfig)
    args, model_options = cast(EstimateConfig, config), cast(ModelConfig, model_options)
    if model_options.model_name_or_path is None:
        raise ValueError("`model_name_or_path` is missing; set it to a model id or path.")
    init_kwargs = {"dtype": model_options.dtype, "attn_implementation": model_options.attn_implementation}
    init_kwargs = {name: value for name, value in init_kwargs.items() if value is not None}
    args.model_init_kwargs = cast(dict, args.model_init_kwargs or {}) | init_kwargs
    estimate = estimate_memory(
        model_options.model_name_or_path,
        args,
        reward_funcs=[find_reward(name) for name in as_list(script.reward_funcs)],
        monitor_funcs=[find_reward(name) for name in as_list(script.monitor_funcs)],
        quantization_config=get_quantization_config(replace(model_options, dtype=None)),
        peft_config=get_peft_config(replace(model_options, use_peft=True)),
        ptx=script.ptx_dataset_name is not None,
        prompt_length=config.prompt_length,
        device=config.target,
    )
    numbers = print_estimate(estimate, config.memory)
    if config.json is not None:
        Path(config.json).write_text(json.dumps(numbers, indent=2) + "\n")
    if numbers.get("fits") is False:
        raise SystemExit(1)


def print_estimate(estimate: MemoryEstimate, memory: float | None) -> dict[str, Any]:
    """Print an estimate, and how to fit it in `memory` GiB; return the numbers in bytes."""
    phases = estimate.phases
    rows = {"GiB at the peak of": [phase.name for phase in phases]}
    for part in dict.fromkeys(part for phase in phases for part in phase.parts):
        rows[part] = [f"{phase.parts[part] / GIB:.2f}" if part in phase.parts else "" for phase in phases]
    rows["tensors"] = [f"{phase.bytes / GIB:.2f}" for phase in phases]
    for title, cells in rows.items():
        print(f"{title:28}", *(f"{cell:>9}" for cell in cells))
    where = "with context and fragmentation (assumed)" if estimate.on_gpu else "in tensors"
    needed, peak = estimate.needed / GIB, estimate.peak / GIB
    print(f"peak: {peak:.2f} GiB in {estimate.peak_phase.name}; {needed:.2f} GiB {where}")
    numbers: dict[str, Any] = {
        "phases": {phase.name: {part: round(x) for part, x in phase.parts.items()} for phase in phases},
        "peak": round(estimate.peak),
        "peak_phase": estimate.peak_phase.name,
        "needed": round(estimate.needed),
    }
    if memory is None:
        return numbers
    numbers |= {"memory": round(memory * GIB), "fits": estimate.fits(memory)}
    if estimate.fits(memory):
        print(f"fits in {memory:g} GiB, with {memory - needed:.1f} GiB to spare")
        return numbers
    print(f"does not fit in {memory:g} GiB: {needed - memory:.1f} GiB too much. Each of these alone:")
    alone, first = estimate.proposals(memory)
    for proposal in alone:
        fits = "fits" if proposal.fits(memory) else "does not fit"
        print(f"  {proposal.needed / GIB:6.1f} GiB, {fits}: {_text(proposal.settings[0])}")
    if first is None:
        print("All of them together do not fit: use a smaller model or shorter completions.")
    else:
        print(f"First that fits, at {first.needed / GIB:.1f} GiB:", *map(_text, first.settings), sep="\n  ")
    proposals = [
        {"settings": list(x.settings), "needed": round(x.needed), "fits": x.fits(memory)}
        for x in (*alone, *([first] if first else []))
    ]
    return numbers | {"proposals": proposals[: len(alone)], "first_that_fits": proposals[-1] if first else None}


def _text(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {json.dumps(value)}" for name, value in settings.items())
