"""Parameters that DeepSpeed's ZeRO-3 has spread over the processes: whole for as long as they are needed."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.integrations import deepspeed as transformers_deepspeed


def is_sharded(parameter: Tensor) -> bool:
    """Whether a process has only a part of a parameter.

    Args:
        parameter (`Tensor`): The parameter.

    Returns:
        `bool`: `False` everywhere but under ZeRO-3.
    """
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(parameters: Iterable[Tensor | None], changed: bool = False) -> Iterator[None]:
    """Within this context parameters are whole. All processes must enter it.

    Modules gather their own parameters when they are called; this is for parameters that are used from outside.

    Args:
        parameters (`Iterable[Tensor]`): The parameters; those that are not sharded, and `None`, are passed over.
        changed (`bool`, *optional*, defaults to `False`):
            Whether they are written to; all processes then take what the first one wrote.
    """
    sharded: list[Any] = [parameter for parameter in parameters if parameter is not None and is_sharded(parameter)]
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


def whole_weights(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Weights as one process alone would have them. All processes must call it.

    Args:
        parameters (`dict[str, nn.Parameter]`): Parameters by name.

    Returns:
        `dict[str, Tensor]`: The weights: copies of those that are sharded, the others themselves.
    """
    with gathered(parameters.values()):
        return {name: x.detach().clone() if is_sharded(x) else x.detach() for name, x in parameters.items()}
