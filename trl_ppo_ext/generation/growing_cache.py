"""Keys and values of a rollout, in memory that is not copied for every token."""

import inspect
from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from ..modeling import ActorCritic

BLOCK = 256  # tokens by which a layer's memory grows


class GrowingLayer(DynamicLayer):
    """A layer of [`~transformers.DynamicCache`] that takes memory for many tokens at a time.

    The layer that it stands for copies all that it holds for each token: on a CPU that is up to half of the time of
    sampling, and anywhere the memory of a second layer.
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
        start = held.shape[-2] if held.ndim == new.ndim else 0  # what is empty has one dimension
        end, room = start + new.shape[-2], self.rooms.get(name)
        # what is held is elsewhere if rows were picked or reordered
        if room is None or end > room.shape[-2] or (start and held.data_ptr() != room.data_ptr()):
            tokens = max(end, min(-(-end // BLOCK) * BLOCK, self.longest))
            room = self.rooms[name] = new.new_empty(*new.shape[:-2], tokens, new.shape[-1])
            if start:
                room[..., :start, :] = held
        room[..., start:end, :] = new
        return room[..., :end, :]


def can_grow(actor_critic: ActorCritic, config: GenerationConfig) -> bool:
    """Whether the cache that `generate` would make holds a key and a value for each token, and nothing else."""
    base = actor_critic.policy.get_base_model()
    # what the user asks of the cache is done by `generate` alone
    if not config.use_cache or config.cache_implementation is not None or config.prefill_chunk_size is not None:
        return False
    # code from elsewhere may take up a cache in a way of its own
    if base.is_remote_code() or "past_key_values" not in inspect.signature(actor_critic.trunk.forward).parameters:
        return False
    # sliding windows, linear attention and the like keep a state in place of a key and a value for each token
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)


def growing_cache(actor_critic: ActorCritic, longest: int) -> DynamicCache:
    """An empty cache."""
    cache = DynamicCache(config=actor_critic.policy.get_base_model().config)
    cache.layers = [GrowingLayer(longest) for _ in cache.layers]
    return cache
