"""LoRA for sampling: a token takes hundreds of small layers, whose calls cost more than their products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners import lora
from torch import Tensor, nn

from ..distributed import is_sharded

_PLAIN = tuple(getattr(lora, name) for name in ("Linear", "Linear4bit", "Linear8bitLt") if hasattr(lora, name))


def _is_plain(layer: Any) -> bool:
    """Whether a layer is its base, and one low-rank product added, and nothing else."""
    if type(layer) not in _PLAIN or layer.disable_adapters or layer.merged:
        return False
    if "forward" in vars(layer):  # somebody else's, such as a hook that moves weights
        return False
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or names[0] in layer.lora_variant:
        return False
    dropout, product = layer.lora_dropout[names[0]], (layer.lora_A[names[0]], layer.lora_B[names[0]])
    if layer.training and not isinstance(dropout, nn.Identity):
        return False
    return all(type(x) is nn.Linear and x.bias is None and not is_sharded(x.weight) for x in product)


def _quick_forward(layer: Any, autocast_dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    name = next(name for name in layer.active_adapters if name in layer.lora_A)
    base, scaling = layer.base_layer, layer.scaling[name]
    dtype = autocast_dtype or layer.lora_A[name].weight.dtype
    down, up = (x[name].weight.to(dtype).T for x in (layer.lora_A, layer.lora_B))

    def forward(x: Tensor) -> Tensor:
        out = base(x)
        inner = torch.mm(x.reshape(-1, x.shape[-1]).to(dtype), down)
        flat = out.reshape(-1, out.shape[-1])
        return torch.addmm(flat.to(dtype), inner, up, alpha=scaling).to(out.dtype).reshape(out.shape)

    return forward


@contextmanager
def quick_adapters(policy: PeftModel) -> Iterator[None]:
    """Within this context plain LoRA layers are two products in the dtype of autocast, cast once for all tokens.

    The results are PEFT's, up to rounding: what is learned from is never computed here. Layers of other kinds stay as
    they are.
    """
    kind = next(policy.parameters()).device.type
    autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    layers: list[Any] = [module for module in policy.modules() if _is_plain(module)]
    try:
        for layer in layers:
            layer.forward = _quick_forward(layer, autocast_dtype)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
