"""Input, output and errors of a reward."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class RewardError(ValueError):
    """Raised when a reward fails or returns a score that cannot be trained on. The message names the reward."""


def _discard(*_: Any) -> None:
    return


@dataclass(frozen=True)
class ScoringBatch:
    """Input of a reward, with one list entry per completion."""

    prompts: list  # prompts as in the dataset: text or chat messages
    completions: list  # text, or a list with one assistant message if prompts are messages
    completion_ids: list[list[int]]  # token ids of the completions
    columns: dict[str, list] = field(default_factory=dict)  # other columns of the dataset
    prompt_ids: list[list[int]] = field(default_factory=list)  # token ids of the prompts
    trainer_state: Any = None  # for schedules in a reward
    log_extra: Callable[[str, list], None] = _discard
    log_metric: Callable[[str, float], None] = _discard

    def __len__(self) -> int:
        return len(self.prompts)


class Reward(Protocol):
    """Named scorer of a batch.

    `score` returns one entry per completion: a number; `None` if the reward does not apply; a list with one number
    per token; a list of `(position, reward)` pairs; or a [`RewardError`] if this completion failed.
    """

    name: str

    def score(self, batch: ScoringBatch) -> Any:
        """Score completions."""


class Scores(NamedTuple):
    """Checked scores of one reward."""

    totals: Tensor  # [batch] NaN if the reward does not apply or failed
    tokens: Tensor  # [batch, response] the same scores at their tokens; a plain number is at the last token
    failures: dict[int, RewardError]  # errors by completion


def finite_number(value: Any) -> float | None:
    """Return `value` as a number that float32 can hold, or `None` if it is not one."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= torch.finfo(torch.float32).max else None


def read_scores(name: str, scores: Any, lengths: Sequence[int]) -> Scores:
    """Check the scores that a reward returned and place them at their tokens."""
    expected = len(lengths)
    entries = scores.tolist() if hasattr(scores, "tolist") else scores
    listed = isinstance(entries, Sequence) and not isinstance(entries, str)
    if isinstance(entries, RewardError):
        entries = [entries] * expected
    elif not listed or len(entries) != expected:  # all fail, since entries cannot be assigned to completions
        returned = f"{len(entries)} scores" if listed else f"a {type(scores).__name__}"
        cause = f"The reward `{name}` returned {returned} for {expected} completions; "
        entries = [RewardError(cause + "it must return a list with one entry per completion.")] * expected

    totals = torch.full((expected,), torch.nan)
    tokens = torch.zeros(expected, max(lengths))
    failures: dict[int, RewardError] = {}
    for index, (entry, length) in enumerate(zip(entries, lengths)):
        if entry is None:
            continue
        try:
            if isinstance(entry, RewardError):
                raise entry
            for position, value in _positions(name, entry, index, length):
                number = None if isinstance(value, str) else finite_number(value)
                if number is None:
                    raise RewardError(
                        f"The reward `{name}` returned {value!r} for completion {index}; a score must be a finite "
                        "number, or None if the reward does not apply."
                    )
                tokens[index, position] += number
            totals[index] = tokens[index].sum()
        except RewardError as failure:
            failures[index] = failure
            tokens[index] = 0
    return Scores(totals, tokens, failures)


def _positions(name: str, entry: Any, index: int, length: int) -> list[tuple[int, Any]]:
    """Return the (position, reward) pairs of one completion."""
    if not isinstance(entry, list | tuple):
        return [(length - 1, entry)]
    if all(isinstance(pair, tuple | list) for pair in entry):
        if all(len(pair) == 2 and isinstance(pair[0], int) and 0 <= pair[0] < length for pair in entry):
            return [(position, value) for position, value in entry]
        raise RewardError(
            f"The reward `{name}` returned the pairs {list(entry)!r} for completion {index}; they must be (position, "
            f"reward) with positions from 0 to {length - 1}, the completion's last token."
        )
    if len(entry) != length:
        raise RewardError(
            f"The reward `{name}` returned {len(entry)} token rewards for completion {index}, which has {length} "
            "tokens; return one per token, or (position, reward) pairs."
        )
    return list(enumerate(entry))


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:  # a notebook already runs a loop, so this one gets a thread
        return pool.submit(asyncio.run, coroutine).result()
