"""One prefill for all completions of a prompt."""

import inspect

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from ..modeling import ActorCritic
from ..modeling.sharding import is_sharded
from ..rollout import Sequences


def distinct(prompts: list[list[int]]) -> tuple[list[int], list[int]]:
    """Find the prompts that rows repeat.

    Args:
        prompts (`list[list[int]]`): Token ids of each row's prompt.

    Returns:
        `tuple(list[int], list[int])`: The row in which each distinct prompt comes first, and which of them each row
        has.
    """
    numbers: dict[tuple[int, ...], int] = {}
    which = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
    return [which.index(number) for number in range(len(numbers))], which


def can_share(actor_critic: ActorCritic, config: GenerationConfig) -> bool:
    """Whether the cache is one that rows may start from a copy of.

    Args:
        actor_critic ([`ActorCritic`]): What samples.
        config ([`~transformers.GenerationConfig`]): How it samples.

    Returns:
        `bool`: `False` for caches of other kinds, those that are asked for and those that the model has.
    """
    base = actor_critic.policy.get_base_model()
    # what the user asks of the cache is done by `generate` alone
    if not config.use_cache or config.cache_implementation is not None or config.prefill_chunk_size is not None:
        return False
    # code from elsewhere may take up a cache in a way of its own
    if base.is_remote_code() or "past_key_values" not in inspect.signature(actor_critic.trunk.forward).parameters:
        return False
    # sliding windows, linear attention and the like keep a state in place of a key and a value for each token
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)


@torch.no_grad()
def prefill(actor_critic: ActorCritic, batch: Sequences, prompts: list[list[int]]) -> Cache | None:
    """Compute keys and values once for each distinct prompt, and copy them for each row.

    Each row runs its prompt's last token itself: it takes the state from which its first token is sampled.

    Args:
        actor_critic ([`ActorCritic`]): What samples.
        batch ([`Sequences`]): The prompts, padded, without completions.
        prompts (`list[list[int]]`): The same as lists.

    Returns:
        [`~transformers.Cache`], *optional*: For all tokens of the prompts but the last; `None` if there is nothing to
        share, or weights are sharded.
    """
    base = actor_critic.policy.get_base_model()
    # a process whose rows repeat would take one forward more than another, and ZeRO-3 gathers weights in step
    if is_sharded(base.get_input_embeddings().weight):
        return None
    first, which = distinct(prompts)
    if len(first) == len(prompts) or batch.prompt_ids.shape[1] == 1:
        return None
    chosen = batch.rows(torch.tensor(first))  # all distinct prompts, so its width is that of the batch
    mask: Tensor = chosen.attention_mask[:, :-1]
    cache = DynamicCache(config=base.config)
    actor_critic.trunk(
        input_ids=chosen.prompt_ids[:, :-1],
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    )
    cache.batch_select_indices(torch.tensor(which, device=mask.device))
    return cache
