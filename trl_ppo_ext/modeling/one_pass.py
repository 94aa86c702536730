"""Policy, reference, critic and reward adapters in one forward: each row of a mixed batch under its own adapter.

The adapter of each row is the argument `adapter_names`, with which PEFT's layers take a mixed batch. A `PeftModel`
hands it to them in its own forward, which would project every row to the vocabulary; here it surrounds the trunk.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from ..sequences import Sequences
from .actor_critic import ActorCritic
from .logprobs import TokenOutputs, TokenStatistics

NO_ADAPTER = "__base__"  # PEFT's name for it in a mixed batch


class AdapterRows(NamedTuple):
    """Rows that one adapter reads."""

    adapter: str | None  # its name; None is the base alone
    input_ids: Tensor  # [rows, length] Token ids
    attention_mask: Tensor  # [rows, length] 1 at real tokens


class RewardRows(NamedTuple):
    """Texts that a reward adapter reads."""

    adapter: str  # its name
    token_ids: list[list[int]]  # token ids of each text


class OnePass(NamedTuple):
    """What all adapters say about a micro-batch."""

    tokens: TokenOutputs  # what policy and critic say
    ref_logprobs: Tensor  # [batch, response] Log-probabilities under the reference
    reward_states: list[Tensor]  # for each reward the hidden states of its last tokens, [batch, hidden]


@contextmanager
def _adapter_of_each_row(policy: PeftModel, names: list[str]) -> Iterator[None]:
    def tell(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"adapter_names": names}

    layers = [layer for layer in policy.modules() if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    hooks = [layer.register_forward_pre_hook(tell, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def mixed_hidden_states(actor_critic: ActorCritic, parts: Sequence[AdapterRows]) -> list[Tensor]:
    """Last hidden states of rows under different adapters, from one forward of the trunk.

    The rows are padded on the right to the longest.
    """
    width = max(part.input_ids.shape[1] for part in parts)

    def together(tensors: list[Tensor]) -> Tensor:
        return torch.cat([nn.functional.pad(x, (0, width - x.shape[1])) for x in tensors])

    mask = together([part.attention_mask for part in parts])
    names = [part.adapter or NO_ADAPTER for part in parts for _ in range(len(part.input_ids))]
    with _adapter_of_each_row(actor_critic.policy, names):
        hidden = actor_critic.trunk(
            input_ids=together([part.input_ids for part in parts]),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
    by_part = hidden.split([len(part.input_ids) for part in parts])
    return [states[:, : part.input_ids.shape[1]] for states, part in zip(by_part, parts)]


def check_mixing(actor_critic: ActorCritic, reward_adapters: Sequence[str], mixed_precision: bool) -> None:
    """Check that PEFT can take the run's adapters in one batch."""
    if actor_critic.dtype != torch.float32 and not mixed_precision:
        raise ValueError(
            f"`one_pass_scoring=True` on a base in {actor_critic.dtype} needs mixed precision: in a mixed batch PEFT "
            "rounds an adapter's output before it is added, in the trained forward after it, and the ratio of the "
            "first update would be off. Set `bf16` or `fp16` as the base has it, or load the base in float32."
        )
    names = [actor_critic.policy_adapter, actor_critic.reference_adapter, actor_critic.critic_adapter]
    ids = torch.arange(2, device=actor_critic.device)[None]
    parts = [AdapterRows(name, ids, torch.ones_like(ids)) for name in [*names, *reward_adapters]]
    try:
        mixed_hidden_states(actor_critic, parts)
    except Exception as error:
        raise ValueError(
            f"`one_pass_scoring=True` mixes {', '.join(sorted({part.adapter or 'no adapter' for part in parts}))} in "
            f"one batch, which PEFT cannot do with these: {type(error).__name__}: {error} Use plain LoRA without DoRA "
            "and `modules_to_save`, or leave `one_pass_scoring` False."
        ) from error


def _padded(rows: RewardRows, device: torch.device) -> AdapterRows:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows.token_ids], batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows.token_ids], device=device)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    return AdapterRows(rows.adapter, ids, mask.long())


def _last_states(hidden: Tensor, rows: AdapterRows) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), rows.attention_mask.sum(1) - 1]


@torch.no_grad()
def one_pass(
    actor_critic: ActorCritic,
    sequences: Sequences,
    rewards: Sequence[RewardRows] = (),
    temperature: float = 1.0,
    with_kl: bool = False,
) -> OnePass:
    """Score a micro-batch with policy, reference, critic and reward adapters in one forward of the trunk.

    Rewards with a text longer than the policy's padded rows take a second forward together: wider rows would change
    the last bits of the policy's log-probabilities, and the ratio of the first update would not be exactly 1.
    """
    ids, mask = sequences.input_ids, sequences.attention_mask
    policy = AdapterRows(actor_critic.policy_adapter, ids, mask)
    roles = [policy, policy._replace(adapter=actor_critic.reference_adapter)]
    if actor_critic.critic_adapter is not None:
        roles.append(policy._replace(adapter=actor_critic.critic_adapter))
    padded = [_padded(rows, ids.device) for rows in rewards]
    fitting = [rows for rows in padded if rows.input_ids.shape[1] <= ids.shape[1]]
    wider = [rows for rows in padded if rows.input_ids.shape[1] > ids.shape[1]]
    hidden = mixed_hidden_states(actor_critic, [*roles, *fitting])
    of_rewards = hidden[len(roles) :] + (mixed_hidden_states(actor_critic, wider) if wider else [])
    states = {rows.adapter: _last_states(x, rows) for rows, x in zip([*fitting, *wider], of_rewards)}
    tokens, ref_logprobs = _token_outputs(actor_critic, sequences, hidden[: len(roles)], temperature, with_kl)
    return OnePass(tokens, ref_logprobs, [states[rows.adapter] for rows in padded])


def _token_outputs(
    actor_critic: ActorCritic, sequences: Sequences, hidden: list[Tensor], temperature: float, with_kl: bool
) -> tuple[TokenOutputs, Tensor]:
    """Heads on the hidden states of policy, reference and, if it has an adapter, critic."""
    start, tokens = sequences.prompt_ids.shape[1] - 1, sequences.pick(sequences.completion_ids)
    policy, reference, *others = (sequences.pick(states[:, start:-1]) for states in hidden)

    # a projection for each, of the very rows that it has in a forward of its own: the bits are the same
    def project(states: Tensor, ref_states: Tensor | None = None, with_entropy: bool = False) -> TokenStatistics:
        return actor_critic.project(states, tokens, temperature, with_entropy=with_entropy, ref_hidden=ref_states)

    of_policy = project(policy, reference if with_kl else None, with_entropy=True)
    values = None if actor_critic.value_head is None else actor_critic.values_of(others[0] if others else policy)
    optional = (values, of_policy.entropies, of_policy.kls)
    spread = sequences.spread
    outputs = TokenOutputs(spread(of_policy.logprobs), *(None if x is None else spread(x) for x in optional))
    return outputs, spread(project(reference).logprobs)
