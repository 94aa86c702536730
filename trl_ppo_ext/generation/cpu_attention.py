"""Attention of one token at a time in 16 bits on a CPU.

There `scaled_dot_product_attention` takes five to eight times as long for one query as two products and a softmax.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_but_for_single_queries"
_PLAIN = {"attention_mask", "dropout", "scaling", "is_causal", "position_ids", "use_cache", "output_attentions"}


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    unusual = {name for name, given in kwargs.items() if given is not None} - _PLAIN
    if query.shape[2] > 1 or unusual:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch, heads, _, size = query.shape
    scaling = kwargs.get("scaling") or size**-0.5
    # the queries that share a key are rows of one product
    scores = (query.reshape(batch, key.shape[1], -1, size) @ key.mT).float() * scaling
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, -torch.inf)
    out = scores.softmax(-1).to(value.dtype) @ value
    return out.reshape(batch, 1, heads, -1), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def quick_single_queries(base: PreTrainedModel) -> Iterator[None]:
    """Within this context a model in 16 bits on a CPU attends to one token at a time without SDPA's kernel.

    Args:
        base (`PreTrainedModel`): The model; one on another device, in float32 or with other attention stays as it is.
    """
    if base.device.type != "cpu" or base.dtype == torch.float32 or base.config._attn_implementation != "sdpa":
        yield
        return
    base.set_attn_implementation(NAME)
    try:
        yield
    finally:
        base.set_attn_implementation("sdpa")
