"""Prompts and completions as padded token ids, and which of these the policy sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int, left: bool, device: torch.device | str) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    fill = [[pad_token_id] * (width - len(row)) for row in rows]
    padded = [space + list(row) if left else list(row) + space for row, space in zip(rows, fill)]
    return torch.tensor(padded, dtype=torch.long).reshape(len(rows), width).to(device, non_blocking=True)


@dataclass(frozen=True)
class Sequences:
    """Prompts and the completions sampled for them, as token ids.

    Prompts are padded on the left and completions on the right, so position `prompt` of every row is the first token
    of its completion. A completion holds what the policy sampled and, between its turns, what an environment wrote:
    the policy reads all of it, and only sampled tokens have log-probs and values. Lengths and `sampled` stay on the
    CPU: trimming padding never waits for the device.
    """

    prompt_ids: Tensor  # [batch, prompt]
    completion_ids: Tensor  # [batch, response], EOS included
    prompt_lengths: Tensor  # [batch], on the CPU
    completion_lengths: Tensor  # [batch], on the CPU
    critic_prompt_ids: Tensor | None = None  # [batch, critic prompt], what only the critic reads as the prompt
    critic_prompt_lengths: Tensor | None = None  # [batch], on the CPU
    earned: Tensor | None = None  # [batch, response], rewards before each token, which only the critic reads
    sampled: Tensor | None = None  # [batch, response], on the CPU, as in `turns`; None if completions are one turn

    @classmethod
    def from_token_ids(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        pad_token_id: int,
        device: torch.device | str,
        critic_prompts: Sequence[Sequence[int]] | None = None,
        sampled: Sequence[Sequence[int]] | None = None,
    ) -> "Sequences":
        """Pad lists of token ids; `sampled` has the number of the turn at each sampled token, else 0."""
        optional: dict[str, Tensor] = {}
        if critic_prompts is not None:
            optional["critic_prompt_ids"] = _pad(critic_prompts, pad_token_id, left=True, device=device)
            optional["critic_prompt_lengths"] = torch.tensor([len(row) for row in critic_prompts])
        if sampled is not None:
            optional["sampled"] = _pad(sampled, 0, left=False, device="cpu")
        return cls(
            prompt_ids=_pad(prompts, pad_token_id, left=True, device=device),
            completion_ids=_pad(completions, pad_token_id, left=False, device=device),
            prompt_lengths=torch.tensor([len(row) for row in prompts]),
            completion_lengths=torch.tensor([len(row) for row in completions]),
            **optional,
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def for_critic(self) -> "Sequences":
        """The same completions after what the critic reads as the prompt."""
        ids, lengths = self.critic_prompt_ids, self.critic_prompt_lengths
        if ids is None or lengths is None:
            return self
        return replace(self, prompt_ids=ids, prompt_lengths=lengths)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row without padding, `[batch]`, on the CPU."""
        return self.prompt_lengths + self.completion_lengths

    @property
    def turns(self) -> Tensor:
        """Number of the turn at each sampled token, from 1, else 0, `[batch, response]`."""
        if self.sampled is None:
            return self._response_mask
        return self.sampled.to(self.completion_ids.device, non_blocking=True)

    @property
    def completion_mask(self) -> Tensor:
        """1 at sampled tokens, `[batch, response]`."""
        return self.turns.bool()

    @property
    def _response_mask(self) -> Tensor:
        """1 at tokens of completions, `[batch, response]`."""
        lengths = self.completion_lengths.to(self.completion_ids.device, non_blocking=True)
        return torch.arange(self.completion_ids.shape[1], device=lengths.device) < lengths[:, None]

    @property
    def attention_mask(self) -> Tensor:
        """1 at tokens that are not padding, `[batch, prompt + response]`."""
        lengths, width = self.prompt_lengths.to(self.prompt_ids.device, non_blocking=True), self.prompt_ids.shape[1]
        prompt_mask = torch.arange(width, device=lengths.device) >= width - lengths[:, None]
        return torch.cat([prompt_mask, self._response_mask], 1).long()

    @property
    def input_ids(self) -> Tensor:
        """Prompts followed by completions, `[batch, prompt + response]`."""
        return torch.cat([self.prompt_ids, self.completion_ids], 1)

    @cached_property
    def _sampled(self) -> tuple[Tensor, Tensor]:
        """Rows and positions of the sampled tokens, found on the CPU: on the device, a boolean mask would wait."""
        lengths, device = self.completion_lengths, self.completion_ids.device
        if self.sampled is not None:
            rows, positions = self.sampled.nonzero(as_tuple=True)
        else:
            rows = torch.arange(len(lengths)).repeat_interleave(lengths)
            positions = torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows]
        return rows.to(device, non_blocking=True), positions.to(device, non_blocking=True)

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
        names = ("prompt_ids", "completion_ids", "critic_prompt_ids", "earned")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})

    def rows(self, index: Tensor) -> "Sequences":
        """Select rows (`index` on the CPU) and trim the padding that none of them needs."""
        on_device = index.to(self.prompt_ids.device, non_blocking=True)
        lengths = self.completion_lengths[index]
        width = int(lengths.max())
        selected = {"completion_ids": self.completion_ids[on_device, :width], "completion_lengths": lengths}
        if self.earned is not None:
            selected["earned"] = self.earned[on_device, :width]
        if self.sampled is not None:
            selected["sampled"] = self.sampled[index, :width]
        for kind in ("prompt", "critic_prompt"):
            ids, lengths = getattr(self, f"{kind}_ids"), getattr(self, f"{kind}_lengths")
            if ids is not None:
                selected[f"{kind}_lengths"] = lengths[index]
                selected[f"{kind}_ids"] = ids[on_device, ids.shape[1] - int(lengths[index].max()) :]
        return Sequences(**selected)
