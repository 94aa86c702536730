"""KV cache that grows by blocks, so that it is not copied for every token."""

import inspect
from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from ..modeling import ActorCritic

BLOCK = 256  # tokens by which a layer's memory grows


class GrowingLayer(DynamicLayer):
    """A layer of [`~transformers.DynamicCache`] that allocates memory for many tokens at a time.

    A `DynamicLayer` copies all keys and values for every token. On a CPU that takes up to half of the sampling time,
    and on any device the memory of a second layer.
    """

    def __init__(self, longest: int):
        super().__init__()
        self.keys: Tensor
        self.values: Tensor
        self.longest = longest
        self.rooms: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def _append(self, name: str, held: Tensor, new: Tensor) -> Tensor:
        start = held.shape[-2] if held.ndim == new.ndim else 0  # an empty layer has one dimension
        end, room = start + new.shape[-2], self.rooms.get(name)
        # tensors are elsewhere in memory after rows were selected or reordered
        if room is None or end > room.shape[-2] or (start and held.data_ptr() != room.data_ptr()):
            tokens = max(end, min(-(-end // BLOCK) * BLOCK, self.longest))
            room = self.rooms[name] = new.new_empty(*new.shape[:-2], tokens, new.shape[-1])
            if start:
                room[..., :start, :] = held
        room[..., start:end, :] = new
        return room[..., :end, :]


def can_grow(actor_critic: ActorCritic, config: GenerationConfig) -> bool:
    """Return whether the cache of `generate` would hold one key and one value per token, and nothing else."""
    base = actor_critic.policy.get_base_model()
    # `generate` itself creates a cache that the user configured
    if not config.use_cache or config.cache_implementation is not None or config.prefill_chunk_size is not None:
        return False
    # remote code may use a cache differently
    if base.is_remote_code() or "past_key_values" not in inspect.signature(actor_critic.trunk.forward).parameters:
        return False
    # sliding windows, linear attention and the like keep a state instead of a key and a value per token
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)


def growing_cache(actor_critic: ActorCritic, longest: int) -> DynamicCache:
    """Create an empty cache."""
    cache = DynamicCache(config=actor_critic.policy.get_base_model().config)
    cache.layers = [GrowingLayer(longest) for _ in cache.layers]
    return cache
