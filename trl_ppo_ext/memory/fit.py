"""Whether a run fits on a GPU, and which settings would make it fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

from .phases import OPTIMIZERS, RewardSizes, Workload, phases

GIB = 2**30
# usable memory as nvidia-smi tells it, in GiB
GPUS = {
    "T4": 15.0,
    "V100 16GB": 16.0,
    "V100 32GB": 32.0,
    "RTX 3060": 12.0,
    "RTX 3080": 10.0,
    "RTX 3090": 24.0,
    "RTX 4060 Ti 16GB": 16.0,
    "RTX 4070": 12.0,
    "RTX 4080": 16.0,
    "RTX 4090": 24.0,
    "RTX 5070 Ti": 16.0,
    "RTX 5080": 16.0,
    "RTX 5090": 31.8,
    "RTX A6000": 48.0,
    "A10": 22.5,
    "A10G": 22.5,
    "L4": 22.5,
    "L40S": 45.0,
    "A100 40GB": 40.0,
    "A100 80GB": 80.0,
    "H100": 79.6,
    "H200": 140.4,
}
# assumed, not measured: context and libraries, and the share of the allocator's memory that holds no tensor
CUDA_CONTEXT, FRAGMENTATION = 0.6 * GIB, 0.05


def gpu_memory(name: str) -> float:
    """Memory of a GPU."""
    known = {_plain(key): memory for key, memory in GPUS.items()}
    if _plain(name) not in known:
        raise ValueError(f"There is no GPU {name!r} in the table ({', '.join(GPUS)}); give `memory` in GiB instead.")
    return known[_plain(name)]


def _plain(name: str) -> str:
    return "".join(x for x in name.lower().replace("nvidia", "").replace("geforce", "") if x.isalnum())


def peak(load: Workload) -> float:
    """Tensors at the peak of a run."""
    return max(phase.bytes for phase in phases(load))


def needed(load: Workload) -> float:
    """What the device must have: the tensors and, on a GPU, what is assumed for the context and fragmentation."""
    return peak(load) * (1 + FRAGMENTATION) + CUDA_CONTEXT if load.on_gpu else peak(load)


@dataclass(frozen=True)
class Proposal:
    """Settings, and what the run needs with them."""

    settings: tuple[str, ...]  # what to set
    needed: float  # bytes
    fits: bool  # whether that is enough
    workload: Workload  # the run with them


# a change to the run that says how it is set
Change = tuple[str, Callable[[Workload], Workload]]


def _smaller(number: int, of: int) -> Iterator[int]:
    return (size for size in range(number - 1, 0, -1) if of % size == 0)


def _micro_batch(size: int, load: Workload) -> Change:
    steps = load.mini_batch // size
    told = f"per_device_train_batch_size: {size}, gradient_accumulation_steps: {steps} (the rollout stays)"
    return told, lambda x: replace(x, micro_batch=size)


def _generation_batch(size: int) -> Change:
    return f"per_device_generation_batch_size: {size}", lambda x: replace(x, generation_batch=size)


def _in_4_bits(load: Workload) -> Workload:
    return replace(load, quantization="nf4", double_quantization=True)


def _rewards_as_adapters(load: Workload) -> Workload:
    return replace(load, rewards=tuple(RewardSizes(adapter=load.adapter) for _ in load.rewards))


def changes(load: Workload) -> list[list[Change]]:
    """What could be set to need less, the least harm first."""
    found: list[list[Change]] = []
    if not load.checkpointing:
        found.append([("gradient_checkpointing: true", lambda x: replace(x, checkpointing=True))])
    found.append([_micro_batch(size, load) for size in _smaller(load.micro_batch, load.mini_batch)])
    found.append([_generation_batch(size) for size in _smaller(load.generation_batch, load.completions)])
    if load.quantization is None:
        found.append([("load_in_4bit: true, use_bnb_nested_quant: true", _in_4_bits)])
    if any(reward.model is not None for reward in load.rewards):
        if not load.offloaded[0] and all(reward.quantization != "int8" for reward in load.rewards):
            offloaded = (True, load.offloaded[1])
            found.append([("offload_rewards: true", lambda x: replace(x, offloaded=offloaded))])
        found.append([("rewards as adapters on the base (reward_funcs: adapter:PATH)", _rewards_as_adapters)])
    if OPTIMIZERS[load.optimizer] > 2:
        found.append([("optim: adamw_8bit", lambda x: replace(x, optimizer="adamw_8bit"))])
    return [values for values in found if values]


def _with(load: Workload, chosen: tuple[Change, ...], memory: float) -> Proposal:
    for _, change in chosen:
        load = change(load)
    bytes_needed = needed(load)
    return Proposal(tuple(told for told, _ in chosen), bytes_needed, bytes_needed <= memory, load)


def single_proposals(load: Workload, memory: float) -> list[Proposal]:
    """Each setting alone: its largest value with which the run fits, or else its smallest."""
    tried = [[_with(load, (value,), memory) for value in values] for values in changes(load)]
    return [next((x for x in values if x.fits), values[-1]) for values in tried]


def first_that_fits(load: Workload, memory: float) -> Proposal | None:
    """The fewest settings with which the run fits and, of as many, those that are tried first."""
    settings = changes(load)
    for count in range(1, len(settings) + 1):
        for chosen in combinations(settings, count):
            if not _with(load, tuple(values[-1] for values in chosen), memory).fits:
                continue  # nor with larger values
            for values in product(*chosen):
                proposal = _with(load, values, memory)
                if proposal.fits:
                    return proposal
    return None
