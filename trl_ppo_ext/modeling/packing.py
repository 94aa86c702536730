"""Attention within rows that follow each other without padding, in transformers' own attention functions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..sequences import Packed


def allow_packing(model: PreTrainedModel) -> bool:
    """Let the attention function of a model take packed rows; return `False` if the model would mix them."""
    config = model.config.get_text_config()
    name, kinds = config._attn_implementation, {*(getattr(config, "layer_types", None) or ())}
    # such a model needs nothing of the mask, e.g. no chunks
    by_arguments = model.is_backend_compatible() and model._supports_flash_attn
    if not (by_arguments and kinds <= {"full_attention", "sliding_attention"} and (name == "sdpa" or "flash" in name)):
        return False
    function = ALL_ATTENTION_FUNCTIONS[name]
    if getattr(function, "func", None) is not attend:
        AttentionInterface.register(name, partial(attend, function))
    return True


def attend(
    function: Callable, module: nn.Module, *inputs: Any, packed: Packed | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call an attention function of transformers, on packed rows each by itself."""
    if packed is None:
        return function(module, *inputs, **kwargs)
    kwargs["attention_mask"] = None
    if function is not sdpa_attention_forward:  # flash attention packs by itself
        lengths = {"cu_seq_lens": packed.starts, "max_length": packed.longest}
        kwargs |= {f"{name}_{of}": x for name, x in lengths.items() for of in "qk"}
        return function(module, *inputs[:3], **kwargs)
    # only SDPA gets padding, which is on the right: causality masks it
    padded = [packed.pad(x[0].transpose(0, 1)).transpose(1, 2) for x in inputs[:3]]
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    if window is not None and packed.longest > window:
        every = torch.ones(packed.longest, packed.longest, dtype=torch.bool, device=padded[0].device)
        kwargs["attention_mask"] = every.tril().triu(1 - window)[None, None]
    output, weights = function(module, *padded, **kwargs)
    return packed.unpad(output)[None], weights
