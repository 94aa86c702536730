"""What a reward is, what it may give, and how several make one score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class RewardError(ValueError):
    """Raised when a reward gives something that cannot be trained on, or fails; the message names the reward."""


def _ignore(*_: Any) -> None:
    return


@dataclass(frozen=True)
class ScoringBatch:
    """What a reward is given, a list entry for each completion."""

    prompts: list  # prompts as they are in the dataset: text, or chat messages
    completions: list  # completions as text, or as a list with one assistant message where prompts are messages
    completion_ids: list[list[int]]  # token ids of the completions
    columns: dict[str, list] = field(default_factory=dict)  # the dataset's other columns
    prompt_ids: list[list[int]] = field(default_factory=list)  # token ids of the prompts
    trainer_state: Any = None  # state of the run, for schedules in a reward
    log_extra: Callable[[str, list], None] = _ignore
    log_metric: Callable[[str, float], None] = _ignore

    def __len__(self) -> int:
        return len(self.prompts)


class Reward(Protocol):
    """Anything with a name that scores a batch, with an entry for each completion.

    An entry is a number; `None` where the reward does not apply; a list of numbers, one for each token of the
    completion; a list of `(position, reward)` pairs; or a [`RewardError`] where this completion failed.
    """

    name: str

    def score(self, batch: ScoringBatch) -> Any:
        """Score completions."""


class Scores(NamedTuple):
    """What one reward gave."""

    totals: Tensor  # [batch] Score of each completion; NaN where the reward does not apply or failed
    tokens: Tensor  # [batch, response] The same, at the tokens where it enters; a number enters at the last
    failures: dict[int, RewardError]  # what went wrong, by completion


def _number(name: str, value: Any, index: int) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardError(
            f"The reward `{name}` gave {value!r} for completion {index}; it must give a number, or None where it does "
            "not apply."
        ) from None
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise RewardError(
            f"The reward `{name}` gave {value} for completion {index}; scores must be finite. Give None where it does "
            "not apply."
        )
    return number


def _per_token(name: str, entries: Sequence[Any], index: int, length: int) -> list[tuple[int, float]]:
    """Token rewards of one completion as (position, reward) pairs."""
    if all(isinstance(entry, tuple | list) for entry in entries):
        pairs = [(entry[0], _number(name, entry[1], index)) for entry in entries if len(entry) == 2]
        wrong = [position for position, _ in pairs if not (isinstance(position, int) and 0 <= position < length)]
        if wrong or len(pairs) < len(entries):
            raise RewardError(
                f"The reward `{name}` gave the pairs {list(entries)!r} for completion {index}; they must be "
                f"(position, reward) with positions from 0 to {length - 1}, the completion's last token."
            )
        return pairs
    if len(entries) != length:
        raise RewardError(
            f"The reward `{name}` gave {len(entries)} token rewards for completion {index}, which has {length} "
            "tokens; give one for each, or (position, reward) pairs."
        )
    return list(enumerate(_number(name, entry, index) for entry in entries))


def _as_entries(name: str, given: Any, expected: int) -> list:
    entries = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise RewardError(
            f"The reward `{name}` gave a {type(given).__name__}; it must give a list with one entry for each of the "
            f"{expected} completions."
        )
    if len(entries) != expected:
        raise RewardError(
            f"The reward `{name}` gave {len(entries)} scores for {expected} completions; it must give exactly one for "
            "each."
        )
    return list(entries)


def read_scores(name: str, given: Any, lengths: Sequence[int]) -> Scores:
    """Check what a reward gave, and put it where it enters."""
    totals = torch.full((len(lengths),), torch.nan)
    tokens = torch.zeros(len(lengths), max(lengths))
    failures: dict[int, RewardError] = {}
    entries = [given] * len(lengths) if isinstance(given, RewardError) else _as_entries(name, given, len(lengths))
    for index, (entry, length) in enumerate(zip(entries, lengths)):
        if entry is None:
            continue
        try:
            if isinstance(entry, RewardError):
                raise entry
            dense = isinstance(entry, list | tuple)
            pairs = _per_token(name, entry, index, length) if dense else [(length - 1, _number(name, entry, index))]
        except RewardError as failure:
            failures[index] = failure
            continue
        for position, reward in pairs:
            tokens[index, position] += reward
        totals[index] = tokens[index].sum()
    return Scores(totals, tokens, failures)


def combine(scores: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Weighted sum of the rewards that apply to each completion."""
    weight = scores.new_ones(scores.shape[1]) if weights is None else scores.new_tensor(weights)
    return (scores * weight).nansum(1)
