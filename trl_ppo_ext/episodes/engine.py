"""Requests to vLLM in this process, or behind a server."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed import OtherRankError, on_every_rank


class VLLMError(RuntimeError):
    """Raised when vLLM cannot be reached, refuses the adapter, or does not sample from the
    policy."""


class Request(NamedTuple):
    """Completions of one prompt."""

    prompt_ids: list[int]
    copies: int
    seed: int
    max_tokens: int


class Sampled(NamedTuple):
    """A completion, with the log-prob of each token under the sampler."""

    ids: list[int]
    logprobs: list[float]


class Ahead(NamedTuple):
    """A rollout that a server samples while the trainer learns from the one before."""

    prompts: list[list[int]]
    wait: Callable[[], list[list[Sampled]]]  # returns the completions of each request

    def state_dict(self) -> dict[str, Tensor]:
        """Its completions, for a checkpoint; all ranks must call it.

        Nothing if they cannot be had.
        """
        with suppress(VLLMError, OtherRankError):
            text = json.dumps([self.prompts, on_every_rank(self.wait, VLLMError)])
            return {"json": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}
        return {}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "Ahead":
        """Restore the state returned by [`state_dict`]."""
        prompts, sampled = json.loads(bytes(state["json"].tolist()))
        completions = [[Sampled(*x) for x in request] for request in sampled]
        return cls(prompts, lambda: completions)
