"""What a generator is."""

from typing import Protocol


class Generator(Protocol):
    """Anything that samples a completion for each prompt, as token ids."""

    stop_token_ids: frozenset[int]

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Sample completions."""


def cut_at_stop(completion: list[int], stop_token_ids: frozenset[int]) -> list[int]:
    """Cut a completion after its first stop token."""
    for position, token in enumerate(completion):
        if token in stop_token_ids:
            return completion[: position + 1]
    return completion
