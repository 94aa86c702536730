"""Parameters that are spread over the processes, by DeepSpeed's ZeRO-3 or by FSDP: whole where they must be."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.integrations import deepspeed as transformers_deepspeed


def is_sharded(parameter: Tensor) -> bool:
    """Whether a process has only a part of a parameter."""
    return _of_deepspeed(parameter) or isinstance(parameter, DTensor)


def _of_deepspeed(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of a parameter, the parts of all processes together."""
    return tuple(parameter.ds_shape if _of_deepspeed(parameter) else parameter.shape)  # type: ignore[attr-defined]


@contextmanager
def gathered(parameters: Iterable[Tensor | None], changed: bool = False) -> Iterator[None]:
    """Within this context parameters that DeepSpeed has sharded are whole. All processes must enter it.

    Modules gather their own parameters when they are called; this is for parameters that are used from outside. FSDP
    has no such thing: what uses a parameter goes through a method that it knows of, and there the parameter is whole.
    """
    sharded: list[Any] = [x for x in parameters if x is not None and _of_deepspeed(x)]
    # whole already, within the forward of a module that DeepSpeed has seen using it: that forward lets go of it
    sharded = [parameter for parameter in sharded if changed or parameter.ds_status.name != "AVAILABLE"]
    if not sharded:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters  # what has sharded them is there

    with GatheredParameters(sharded, modifier_rank=0 if changed else None):
        yield


@contextmanager
def loading_whole() -> Iterator[None]:
    """Within this context models are loaded whole and onto a device, also under ZeRO-3, which never sees them."""
    known = transformers_deepspeed._hf_deepspeed_config_weak_ref  # whoever keeps it: the run's config or the launcher
    config = None if known is None else known()
    if config is None:
        yield
        return
    transformers_deepspeed.unset_hf_deepspeed_config()  # by which `from_pretrained` knows
    try:
        yield
    finally:
        transformers_deepspeed.set_hf_deepspeed_config(config)


def _whole(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach()
    return parameter.detach().clone() if _of_deepspeed(parameter) else parameter.detach()


def whole_weights(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as one process alone would have them. All processes must call it."""
    with gathered(parameters.values()):
        return {name: _whole(parameter) for name, parameter in parameters.items()}


@torch.no_grad()
def set_weights(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Overwrite parameters in place. All processes must call it, with the same weights."""
    with gathered(parameters.values(), changed=True):
        for name, parameter in parameters.items():
            parameter.copy_(as_sharded(weights[name].to(parameter.device), parameter))


def as_sharded(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor spread over the processes as FSDP has spread another; itself where there is no FSDP."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements)
