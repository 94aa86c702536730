"""Whether a model's attention reads the paged cache of continuous batching."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "probe_of_the_paged_cache"


@torch.no_grad()
def reads_paged_cache(base: PreTrainedModel) -> bool:
    """Run two tokens with a stand-in for the cache, and see whether it arrives at the attention, once for a layer.

    transformers hands the cache over by its attention interface. Layers with attention of their own pass over it
    without an error: sequences that share a forward would attend to one another. Layers that attend twice write to it
    twice.
    """
    cache, layers = object(), []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple:
        layers.append(id(module) if kwargs.get("cache") is cache else None)
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(NAME, attention)
    own, ids = base.config._attn_implementation, torch.zeros(1, 2, dtype=torch.long, device=base.device)
    try:
        base.set_attn_implementation(NAME)
        base(input_ids=ids, cache=cache, use_cache=False)
    except (TypeError, ValueError, RuntimeError):
        pass  # it knows no such argument, or expects more of an attention than zeros: what was called counts
    finally:
        base.set_attn_implementation(own)
    return bool(layers) and None not in layers and len({*layers}) == len(layers)
