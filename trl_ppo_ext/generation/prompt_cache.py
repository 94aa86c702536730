"""One prefill for all completions of a prompt."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from ..distributed import is_sharded
from ..modeling import ActorCritic
from ..sequences import Sequences


def distinct(prompts: list[list[int]]) -> tuple[list[int], list[int]]:
    """Find the prompts that rows repeat."""
    numbers: dict[tuple[int, ...], int] = {}
    which = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
    return [which.index(number) for number in range(len(numbers))], which


@torch.no_grad()
def prefill(actor_critic: ActorCritic, cache: Cache, batch: Sequences, prompts: list[list[int]]) -> None:
    """Compute keys and values once for each distinct prompt, and copy them for each row.

    The cache stays empty, and each row computes its whole prompt, if there is nothing to share or weights are sharded.

    Each row runs its prompt's last token itself: it takes the state from which its first token is sampled.
    """
    base = actor_critic.policy.get_base_model()
    # a process whose rows repeat would take one forward more than another, and sharded weights are gathered in step
    if is_sharded(actor_critic.embedding):
        return
    first, which = distinct(prompts)
    if len(first) == len(prompts) or batch.prompt_ids.shape[1] == 1:
        return
    chosen = batch.rows(torch.tensor(first))  # all distinct prompts, so its width is that of the batch
    mask: Tensor = chosen.attention_mask[:, :-1]
    of_each = DynamicCache(config=base.config)
    actor_critic.trunk(
        input_ids=chosen.prompt_ids[:, :-1],
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=of_each,
        use_cache=True,
    )
    rows = torch.tensor(which, device=mask.device)
    for number in range(len(cache.layers)):
        layer = of_each.layers.pop(0)  # gone once it is copied
        cache.update(layer.keys[rows], layer.values[rows], number)
