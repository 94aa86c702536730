"""What is sampled and what is learned from it: named tensors with checked shapes, and their minibatches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .ppo.batch_plan import BatchPlan


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int, left: bool, device: torch.device | str) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    fill = [[pad_token_id] * (width - len(row)) for row in rows]
    padded = [space + list(row) if left else list(row) + space for row, space in zip(rows, fill)]
    return torch.tensor(padded, dtype=torch.long, device=device).reshape(len(rows), width)


def _lengths_to_mask(lengths: Tensor, width: int, left: bool) -> Tensor:
    positions = torch.arange(width, device=lengths.device)
    return positions >= width - lengths[:, None] if left else positions < lengths[:, None]


@dataclass(frozen=True)
class Sequences:
    """Prompts and the completions sampled for them, as token ids.

    Prompts are padded on the left and completions on the right, so that position `prompt` of every row is the first
    sampled token. Lengths are kept on the CPU: cutting padding off never waits for the device.
    """

    prompt_ids: Tensor  # [batch, prompt] Token ids of the prompts
    completion_ids: Tensor  # [batch, response] Token ids of the completions, EOS included
    prompt_lengths: Tensor  # [batch] Tokens of each prompt, on the CPU
    completion_lengths: Tensor  # [batch] Tokens of each completion, on the CPU

    @classmethod
    def from_token_ids(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        pad_token_id: int,
        device: torch.device | str,
    ) -> "Sequences":
        """Pad lists of token ids."""
        return cls(
            prompt_ids=_pad(prompts, pad_token_id, left=True, device=device),
            completion_ids=_pad(completions, pad_token_id, left=False, device=device),
            prompt_lengths=torch.tensor([len(row) for row in prompts]),
            completion_lengths=torch.tensor([len(row) for row in completions]),
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> Tensor:
        """`[batch]`, real tokens of each row, on the CPU."""
        return self.prompt_lengths + self.completion_lengths

    @property
    def completion_mask(self) -> Tensor:
        """`[batch, response]`, 1 at sampled tokens."""
        lengths = self.completion_lengths.to(self.completion_ids.device, non_blocking=True)
        return _lengths_to_mask(lengths, self.completion_ids.shape[1], left=False)

    @property
    def attention_mask(self) -> Tensor:
        """`[batch, prompt + response]`, 1 at real tokens."""
        lengths = self.prompt_lengths.to(self.prompt_ids.device, non_blocking=True)
        prompt_mask = _lengths_to_mask(lengths, self.prompt_ids.shape[1], left=True)
        return torch.cat([prompt_mask, self.completion_mask], 1).long()

    @property
    def input_ids(self) -> Tensor:
        """`[batch, prompt + response]`, prompts followed by completions."""
        return torch.cat([self.prompt_ids, self.completion_ids], 1)

    @cached_property
    def _sampled(self) -> tuple[Tensor, Tensor]:
        """Rows and positions of the sampled tokens in `[batch, response]`, made from lengths without waiting."""
        lengths, device = self.completion_lengths, self.completion_ids.device
        rows = torch.arange(len(lengths)).repeat_interleave(lengths)
        positions = torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows]
        return rows.to(device, non_blocking=True), positions.to(device, non_blocking=True)

    def pick(self, x: Tensor) -> Tensor:
        """What belongs to the sampled tokens; with a mask the device would have to be waited for."""
        return x[self._sampled]

    def spread(self, per_token: Tensor) -> Tensor:
        """The reverse of [`Sequences.pick`]."""
        return per_token.new_zeros(self.completion_ids.shape).index_put(self._sampled, per_token)

    def to(self, device: torch.device | str) -> "Sequences":
        """The same on another device; lengths stay on the CPU."""
        return replace(self, prompt_ids=self.prompt_ids.to(device), completion_ids=self.completion_ids.to(device))

    def rows(self, index: Tensor) -> "Sequences":
        """The rows of `index`, without the padding that none of them needs."""
        prompt_lengths, completion_lengths = self.prompt_lengths[index], self.completion_lengths[index]
        start = self.prompt_ids.shape[1] - int(prompt_lengths.max())
        end = int(completion_lengths.max())
        on_device = index.to(self.prompt_ids.device, non_blocking=True)
        return Sequences(
            prompt_ids=self.prompt_ids[on_device, start:],
            completion_ids=self.completion_ids[on_device, :end],
            prompt_lengths=prompt_lengths,
            completion_lengths=completion_lengths,
        )


@dataclass(frozen=True)
class Rollout:
    """Sampled sequences with all that the updates need. Every tensor is `[batch, response]`."""

    sequences: Sequences  # prompts and completions
    response_mask: Tensor  # 1 where the policy sampled a token that counts
    old_logprobs: Tensor  # log-probabilities under the policy that sampled
    ref_logprobs: Tensor  # log-probabilities under the reference
    advantages: Tensor  # advantages
    old_values: Tensor | None = None  # values at the time of sampling, if there is a critic
    returns: Tensor | None = None  # targets of the values, if there is a critic

    def __post_init__(self):
        expected = self.sequences.completion_ids.shape
        for name, tensor in self._tensors().items():
            if tensor.shape != expected:
                raise ValueError(
                    f"Rollout.{name} must have the shape [batch, response] of the completions, "
                    f"{tuple(expected)}, got {tuple(tensor.shape)}."
                )

    def _tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def __len__(self) -> int:
        return len(self.sequences)

    def to(self, device: torch.device | str) -> "Rollout":
        """The same on another device."""
        return Rollout(self.sequences.to(device), **{name: x.to(device) for name, x in self._tensors().items()})

    def rows(self, index: Tensor) -> "Rollout":
        """The rows of `index`, without the padding that none of them needs."""
        sequences = self.sequences.rows(index)
        on_device = index.to(self.response_mask.device, non_blocking=True)
        end = sequences.completion_ids.shape[1]
        return Rollout(sequences, **{name: tensor[on_device, :end] for name, tensor in self._tensors().items()})


class MicroBatch(NamedTuple):
    """One forward and backward."""

    rollout: Rollout  # the rows
    step: int  # which of the rollout's optimizer steps this belongs to
    ptx: Sequences | None = None  # supervised rows that are learned beside it

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same on another device."""
        return MicroBatch(self.rollout.to(device), self.step, None if self.ptx is None else self.ptx.to(device))


def rollout_tensors(rollout: Rollout) -> dict[str, Tensor]:
    """Everything in a rollout, for a file."""
    sequences = rollout.sequences
    named = {f"sequences.{field.name}": getattr(sequences, field.name) for field in fields(sequences)}
    named |= {field.name: getattr(rollout, field.name) for field in fields(rollout)[1:]}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def rollout_from_tensors(tensors: Mapping[str, Tensor], device: torch.device | str) -> Rollout:
    """The rollout whose tensors [`rollout_tensors`] gave."""
    prefix = "sequences."
    of_sequences = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
    sequences = Sequences(**{key: x if key.endswith("lengths") else x.to(device) for key, x in of_sequences.items()})
    return Rollout(sequences, **{key: x.to(device) for key, x in tensors.items() if not key.startswith(prefix)})


def longest_first(rows: Tensor, lengths: Tensor) -> Tensor:
    """Sort the rows of each minibatch by length.

    Its micro-batches, cut from it afterwards, then hold rows of about the same length and little padding. The
    minibatch's loss is the same.
    """
    return rows.gather(1, lengths[rows].argsort(dim=1, descending=True, stable=True))


def schedule(lengths: Tensor, plan: BatchPlan) -> Tensor:
    """Draw which rows each micro-batch of a rollout takes.

    The minibatches of the first epoch take the rows in their order, so that its micro-batches are the very ones in
    which the old log-probabilities were computed, and its first ratios are exactly 1; later epochs are shuffled.
    """
    size = len(lengths)
    epochs = [torch.arange(size)] + [torch.randperm(size) for _ in range(plan.num_ppo_epochs - 1)]
    minibatches = longest_first(torch.stack(epochs).reshape(plan.optimizer_steps, plan.mini_batch_size), lengths)
    return minibatches.reshape(plan.optimizer_steps, plan.gradient_accumulation_steps, plan.micro_batch_size)


def micro_batches(
    rollout: Rollout, rows: Tensor, start: int = 0, ptx: Sequences | None = None
) -> Iterator[MicroBatch]:
    """Cut a rollout into the micro-batches of its schedule."""
    flat, per_step = rows.flatten(0, 1), rows.shape[1]
    for position in range(start, len(flat)):
        index = flat[position]
        yield MicroBatch(rollout.rows(index), position // per_step, None if ptx is None else ptx.rows(index))
