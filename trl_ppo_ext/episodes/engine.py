"""Requests to vLLM in this process, or behind a server."""

from typing import NamedTuple


class VLLMError(RuntimeError):
    """Raised when vLLM cannot be reached, refuses the adapter, or does not sample from the policy."""


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
