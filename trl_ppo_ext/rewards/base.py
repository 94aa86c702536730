"""What a reward is, and how several make one score."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class RewardError(ValueError):
    """Raised when a reward gives something that cannot be trained on; the message names the reward."""


@dataclass(frozen=True)
class ScoringBatch:
    """What a reward is given, a list entry for each completion.

    Args:
        prompts (`list`): Prompts as they are in the dataset: text, or chat messages.
        completions (`list`): Completions as text, or as a list with one assistant message where prompts are messages.
        completion_ids (`list[list[int]]`): Token ids of the completions.
        columns (`dict[str, list]`): The dataset's other columns.
        trainer_state ([`~transformers.TrainerState`], *optional*): State of the run, for schedules in a reward.
    """

    prompts: list
    completions: list
    completion_ids: list[list[int]]
    columns: dict[str, list]
    trainer_state: Any = None

    def __len__(self) -> int:
        return len(self.prompts)


class Reward(Protocol):
    """Anything with a name that scores a batch: a number for each completion, `None` where it does not apply."""

    name: str

    def score(self, batch: ScoringBatch) -> Sequence[float | None]:
        """Score completions.

        Args:
            batch ([`ScoringBatch`]): Prompts and completions.

        Returns:
            `list[float or None]`: A score for each completion.
        """


def checked_scores(name: str, scores: Any, expected: int) -> Tensor:
    """Check what a reward gave.

    Args:
        name (`str`): Name of the reward, for error messages.
        scores (`list[float or None]` or `Tensor`): What it gave.
        expected (`int`): Number of completions.

    Returns:
        `Tensor` of shape `[expected]`: Scores in float32; NaN where the reward does not apply.

    Raises:
        [`RewardError`]: If there are too few or too many, or one is no finite number.
    """
    if not isinstance(scores, Sequence | Tensor) and not hasattr(scores, "__array__"):
        raise RewardError(
            f"The reward `{name}` gave a {type(scores).__name__}; it must give a list with one number for each of the "
            f"{expected} completions."
        )
    scores = scores.tolist() if hasattr(scores, "tolist") else list(scores)
    if not isinstance(scores, list) or len(scores) != expected:
        given = len(scores) if isinstance(scores, list) else 1
        raise RewardError(
            f"The reward `{name}` gave {given} scores for {expected} completions; it must give exactly one for each."
        )
    numbers = []
    for index, score in enumerate(scores):
        try:
            if isinstance(score, str):
                raise TypeError
            number = float("nan") if score is None else float(score)
        except (TypeError, ValueError, OverflowError):
            raise RewardError(
                f"The reward `{name}` gave {score!r} for completion {index}; it must give a number, or None where it "
                "does not apply."
            ) from None
        if score is not None and not abs(number) <= torch.finfo(torch.float32).max:
            raise RewardError(
                f"The reward `{name}` gave {score} for completion {index}; scores must be finite. Give None where it "
                "does not apply."
            )
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float32)


def combine(scores: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Weighted sum of the rewards that apply to each completion.

    Args:
        scores (`Tensor` of shape `[batch, rewards]`): Scores, NaN where a reward does not apply.
        weights (`list[float]`, *optional*): Weight of each reward; all are 1 by default.

    Returns:
        `Tensor` of shape `[batch]`: One score for each completion.

    Raises:
        [`RewardError`]: If no reward applies to some completion.
    """
    nothing_applies = scores.isnan().all(1)
    if nothing_applies.any():
        raise RewardError(
            f"No reward applies to {int(nothing_applies.sum())} of {len(scores)} completions: every reward gave None, "
            "for the first time at completion "
            f"{int(nothing_applies.nonzero()[0])}. Add a reward that gives a number for every completion."
        )
    weight = scores.new_ones(scores.shape[1]) if weights is None else scores.new_tensor(weights)
    return (scores * weight).nansum(1)
