"""What a generator is."""

from typing import Protocol


class Generator(Protocol):
    """Anything that samples a completion for each prompt, as token ids."""

    stop_token_ids: frozenset[int]

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Sample completions.

        Args:
            prompts (`list[list[int]]`): Token ids of each prompt.

        Returns:
            `list[list[int]]`: Token ids of each completion; it ends with a stop token unless it was cut off.
        """


def cut_at_stop(completion: list[int], stop_token_ids: frozenset[int]) -> list[int]:
    """Cut a completion after its first stop token.

    Args:
        completion (`list[int]`): Token ids.
        stop_token_ids (`frozenset[int]`): Tokens that end a completion.

    Returns:
        `list[int]`: Token ids up to the stop token, included.
    """
    for position, token in enumerate(completion):
        if token in stop_token_ids:
            return completion[: position + 1]
    return completion
