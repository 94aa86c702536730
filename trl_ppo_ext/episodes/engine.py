"""Interface of vLLM in this process, or behind a server."""

from collections.abc import Sequence
from pathlib import Path
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


class Engine:
    """Base of both, which inherit what they need not do."""

    def load(self, name: str, directory: Path) -> None:
        """Wake up, and load an adapter under a new name: vLLM caches keys and values of prompts by name and path."""

    def unload(self, name: str) -> None:
        """Forget an adapter, if the next one has not taken its slot."""

    def sample(self, name: str, requests: Sequence[Request]) -> list[list[Sampled]]:
        """Sample the completions of each request."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Free what only sampling needs."""
