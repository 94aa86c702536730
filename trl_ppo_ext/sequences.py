"""Prompts and completions as padded token ids, and which of these the policy sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .ppo_math import turn_starts

ROLES = "critic", "reference"  # that may read another prompt than the policy
LENGTHS = "prompt_lengths", "completion_lengths", *(f"{role}_prompt_lengths" for role in ROLES)
ON_CPU = *LENGTHS, "sampled"


class Packed(NamedTuple):
    """Rows that follow each other without padding."""

    input_ids: Tensor  # [tokens]
    position_ids: Tensor  # [tokens]
    # [tokens], place of each one in rows padded on the right; None if they need no padding
    cells: Tensor | None
    starts: Tensor  # [rows + 1], first token of each row, then the number of tokens
    rows: int
    longest: int
    reads: Tensor  # token before each sampled one, whose state predicts it and holds its value
    turn_begins: Tensor  # token before the first one of the turn of each sampled one

    def pad(self, x: Tensor) -> Tensor:
        """Rows padded on the right, `[rows, longest, ...]`, of `[tokens, ...]`."""
        if self.cells is not None:
            # `index_copy` would keep `x` for its backward
            x = x.new_zeros(self.rows * self.longest, *x.shape[1:]).index_put((self.cells,), x)
        return x.unflatten(0, (self.rows, self.longest))

    def unpad(self, x: Tensor) -> Tensor:
        """Inverse of [`pad`]."""
        x = x.flatten(0, 1)
        return x if self.cells is None else x.index_select(0, self.cells)


def _send(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy from the CPU without waiting, for which a GPU needs pinned memory."""
    return (x.pin_memory() if torch.cuda.is_available() else x).to(device, non_blocking=True)


def _pad(
    rows: Sequence[Sequence[int]], pad_token_id: int, side: str, device: torch.device | str
) -> Tensor:
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return _send(nn.utils.rnn.pad_sequence(tensors, True, pad_token_id, side), device)


@dataclass(frozen=True)
class Sequences:
    """Prompts and the completions sampled for them, as token ids.

    Prompts are padded on the left and completions on the right, so position `prompt` of every row
    is the first token of its completion. A completion holds what the policy sampled and, between
    its turns, what an environment wrote: the policy reads all of it, and only sampled tokens have
    log-probs and values. Lengths and `sampled` stay on the
    CPU: finding tokens never waits for the device.
    """

    prompt_ids: Tensor  # [batch, prompt]
    completion_ids: Tensor  # [batch, response], EOS included
    prompt_lengths: Tensor  # [batch], on the CPU
    completion_lengths: Tensor  # [batch], on the CPU
    # [batch, critic prompt], what only the critic reads as the prompt
    critic_prompt_ids: Tensor | None = None
    critic_prompt_lengths: Tensor | None = None  # [batch], on the CPU
    reference_prompt_ids: Tensor | None = None  # those of the reference
    reference_prompt_lengths: Tensor | None = None
    # [batch, response], what the critic reads at each token besides states
    observed: Tensor | None = None
    # [batch, response], on the CPU, as in `turns`; None if completions are one turn
    sampled: Tensor | None = None

    @classmethod
    def from_token_ids(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        pad_token_id: int,
        device: torch.device | str,
        other_prompts: Mapping[str, Sequence[Sequence[int]]] | None = None,
        sampled: Sequence[Sequence[int]] | None = None,
    ) -> "Sequences":
        """Pad lists of token ids; `sampled` has the number of the turn at each sampled token, else
        0.

        `other_prompts` are those of a role in place of the policy's.
        """
        optional: dict[str, Tensor] = {}
        for role, rows in (other_prompts or {}).items():
            optional[f"{role}_prompt_ids"] = _pad(rows, pad_token_id, "left", device)
            optional[f"{role}_prompt_lengths"] = torch.tensor([len(row) for row in rows])
        if sampled is not None:
            optional["sampled"] = _pad(sampled, 0, "right", "cpu")
        return cls(
            prompt_ids=_pad(prompts, pad_token_id, "left", device),
            completion_ids=_pad(completions, pad_token_id, "right", device),
            prompt_lengths=torch.tensor([len(row) for row in prompts]),
            completion_lengths=torch.tensor([len(row) for row in completions]),
            **optional,
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def for_critic(self) -> "Sequences":
        """The same completions after what the critic reads as the prompt."""
        return self._after(self.critic_prompt_ids, self.critic_prompt_lengths)

    @property
    def for_reference(self) -> "Sequences":
        """The same completions after what the reference reads as the prompt."""
        return self._after(self.reference_prompt_ids, self.reference_prompt_lengths)

    def _after(self, ids: Tensor | None, lengths: Tensor | None) -> "Sequences":
        if ids is None or lengths is None:
            return self
        return replace(self, prompt_ids=ids, prompt_lengths=lengths)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row without padding, `[batch]`, on the CPU."""
        return self.prompt_lengths + self.completion_lengths

    @property
    def longest_lengths(self) -> Tensor:
        """Tokens of each row in the role that reads most, `[batch]`, on the CPU."""
        return torch.stack([x.lengths for x in (self, self.for_critic, self.for_reference)]).amax(0)

    @property
    def _turns(self) -> Tensor:
        if self.sampled is not None:
            return self.sampled
        return torch.arange(self.completion_ids.shape[1]) < self.completion_lengths[:, None]

    @property
    def turns(self) -> Tensor:
        """Number of the turn at each sampled token, from 1, else 0, `[batch, response]`."""
        return _send(self._turns, self.completion_ids.device)

    @property
    def completion_mask(self) -> Tensor:
        """1 at sampled tokens, `[batch, response]`."""
        return self.turns.bool()

    @property
    def _tokens(self) -> Tensor:
        places = torch.arange(-self.prompt_ids.shape[1], self.completion_ids.shape[1])
        return (places >= -self.prompt_lengths[:, None]) & (
            places < self.completion_lengths[:, None]
        )

    @property
    def attention_mask(self) -> Tensor:
        """1 at tokens that are not padding, `[batch, prompt + response]`."""
        return _send(self._tokens.long(), self.prompt_ids.device)

    @property
    def input_ids(self) -> Tensor:
        """Prompts followed by completions, `[batch, prompt + response]`."""
        return torch.cat([self.prompt_ids, self.completion_ids], 1)

    @cached_property
    def _sampled(self) -> tuple[Tensor, ...]:
        """Rows and positions of the sampled tokens, found on the CPU: on the device, a boolean
        mask would wait."""
        return tuple(
            _send(x, self.completion_ids.device) for x in self._turns.nonzero(as_tuple=True)
        )

    @cached_property
    def packed(self) -> Packed:
        """All tokens without padding, found on the CPU."""
        is_token = self._tokens
        size = len(self)
        longest = int(self.lengths.max())
        send = partial(_send, device=self.prompt_ids.device)
        width = self.prompt_ids.shape[1]
        rows, columns = is_token.nonzero(as_tuple=True)
        positions = columns - (width - self.prompt_lengths)[rows]
        # of tokens of completions, from 1
        numbers = is_token.flatten().cumsum(0).view_as(is_token)[:, width:]
        starts = nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        is_sampled = self._turns.bool()
        _, first = turn_starts(self._turns)
        return Packed(
            self.input_ids.take(send(rows * is_token.shape[1] + columns)),
            send(positions),
            None if is_token.sum() == size * longest else send(rows * longest + positions),
            send(starts.int()),
            *(size, longest),
            send(numbers[is_sampled] - 2),
            send(numbers.gather(1, first)[is_sampled] - 2),
        )

    @property
    def positions(self) -> Tensor:
        """Tokens of the completion before each sampled token, `[tokens]`."""
        return self._sampled[1]

    def pick(self, x: Tensor) -> Tensor:
        """Entries of `[batch, response, ...]` at sampled tokens, `[tokens, ...]`."""
        return x[self._sampled]

    def spread(self, per_token: Tensor) -> Tensor:
        """Inverse of [`pick`]: `[tokens]` to `[batch, response]`, 0 elsewhere."""
        return per_token.new_zeros(self.completion_ids.shape).index_put(self._sampled, per_token)

    def to(self, device: torch.device | str) -> "Sequences":
        """Move all tensors except the lengths and `sampled`, which stay on the CPU."""
        tensors = {
            name: x
            for name, x in vars(self).items()
            if isinstance(x, Tensor) and name not in ON_CPU
        }
        return replace(self, **{name: x.to(device) for name, x in tensors.items()})

    def rows(self, index: Tensor) -> "Sequences":
        """Select rows (`index` on the CPU) and trim the padding that no completion of them
        needs."""
        on_device = index.to(self.prompt_ids.device, non_blocking=True)
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        selected = {name: x[index if name in ON_CPU else on_device] for name, x in tensors.items()}
        width = int(selected["completion_lengths"].max())
        trimmed = {
            x: selected[x][:, :width]
            for x in {"completion_ids", "observed", "sampled"} & selected.keys()
        }
        return Sequences(**selected | trimmed)
