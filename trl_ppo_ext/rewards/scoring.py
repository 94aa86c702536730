"""Asking all rewards about a batch: failures dealt with, shaped, and summed into token rewards."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .asynchronous import run_coroutine
from .base import Reward, RewardError, Scores, ScoringBatch, read_scores
from .function import FunctionReward


class Scored(NamedTuple):
    """What all rewards together gave."""

    rewards: Tensor  # [batch, rewards] Score of each reward, NaN where it does not apply
    tokens: Tensor  # [batch, response] Weighted sum of the rewards, at the tokens where they enter
    usable: Tensor  # [batch] False where a reward failed and the completion is skipped
    failed: Tensor  # [batch, rewards] True where a reward failed

    @property
    def totals(self) -> Tensor:
        """`[batch]`, the weighted sum of the rewards of each completion."""
        return self.tokens.sum(1)


def _failure(reward: Reward, error: Exception) -> RewardError:
    if isinstance(error, RewardError):
        return error
    failure = RewardError(f"The reward `{reward.name}` failed with {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def ask(rewards: Sequence[Reward], batch: ScoringBatch) -> list[Any]:
    """Let every reward score the batch; asynchronous functions run together."""
    answers: list[Any] = [None] * len(rewards)
    pending = []
    for index, reward in enumerate(rewards):
        if isinstance(reward, FunctionReward) and reward.is_async:
            pending.append(index)
            continue
        try:
            answers[index] = reward.score(batch)
        except Exception as error:
            answers[index] = _failure(reward, error)

    async def together() -> list[Any]:
        return await asyncio.gather(*(rewards[i].score(batch) for i in pending), return_exceptions=True)

    if pending:
        for index, answer in zip(pending, run_coroutine(together())):
            answers[index] = _failure(rewards[index], answer) if isinstance(answer, Exception) else answer
    return answers


def _read(reward: Reward, given: Any, lengths: list[int]) -> Scores:
    try:
        return read_scores(reward.name, given, lengths)
    except RewardError as failure:  # of the whole answer: nobody can tell whose scores these are
        return read_scores(reward.name, failure, lengths)


def score_all(
    rewards: Sequence[Reward],
    batch: ScoringBatch,
    weights: Sequence[float] | None,
    on_error: str | float,
    max_failures: float,
    all_sum: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Scored:
    """Score a batch with every reward."""
    lengths = [len(ids) for ids in batch.completion_ids]
    all_scores = [_read(reward, given, lengths) for reward, given in zip(rewards, ask(rewards, batch))]
    if on_error == "raise":
        for failures in (scores.failures for scores in all_scores if scores.failures):
            raise next(iter(failures.values()))
    failed = torch.zeros(len(batch), len(rewards), dtype=torch.bool)
    for column, scores in enumerate(all_scores):
        failed[list(scores.failures), column] = True
    _stop_where_too_many_failed(rewards, all_scores, failed.to(device), max_failures, all_sum)
    if on_error not in ("raise", "skip"):
        all_scores = [_filled(scores, float(on_error), lengths) for scores in all_scores]

    totals = torch.stack([scores.totals for scores in all_scores], 1).to(device)
    weighted = [s.tokens * (1.0 if weights is None else weights[i]) for i, s in enumerate(all_scores)]
    tokens = torch.stack(weighted).sum(0).to(device)
    failed = failed.to(device)
    usable = ~failed.any(1) if on_error == "skip" else torch.ones_like(failed[:, 0])
    _check_that_one_applies(totals, usable)
    return Scored(totals, tokens * usable[:, None], usable, failed)


def _stop_where_too_many_failed(
    rewards: Sequence[Reward],
    all_scores: list[Scores],
    failed: Tensor,
    max_failures: float,
    all_sum: Callable[[Tensor], Tensor],
) -> None:
    # one reduction that every process reaches, so that all stop together
    counts = all_sum(torch.cat([failed.sum(0), failed.new_tensor([len(failed)], dtype=torch.long)])).tolist()
    for reward, scores, count in zip(rewards, all_scores, counts):
        if count > max_failures * counts[-1]:
            first = next(iter(scores.failures.values()), None)
            said = first or "it failed on another process"
            raise RewardError(
                f"The reward `{reward.name}` failed for {count} of {counts[-1]} completions, more than "
                f"max_reward_failures={max_failures} allows. The first cause: {said}"
            ) from first


def _filled(scores: Scores, value: float, lengths: list[int]) -> Scores:
    """A number in place of failures."""
    for index in scores.failures:
        scores.totals[index] = value
        scores.tokens[index, lengths[index] - 1] = value
    return scores


def _check_that_one_applies(totals: Tensor, usable: Tensor) -> None:
    nothing_applies = totals.isnan().all(1) & usable
    if nothing_applies.any():
        raise RewardError(
            f"No reward applies to {int(nothing_applies.sum())} of {len(totals)} completions: every reward gave None, "
            f"for the first time at completion {int(nothing_applies.nonzero()[0])}. Add a reward that gives a number "
            "for every completion."
        )


def monitor(monitors: Sequence[Reward], batch: ScoringBatch, device: torch.device) -> Tensor:
    """Score a batch with rewards that are only watched: a failure leaves its completion out and stops nothing."""
    lengths = [len(ids) for ids in batch.completion_ids]
    all_scores = [_read(reward, given, lengths) for reward, given in zip(monitors, ask(monitors, batch))]
    return torch.stack([scores.totals for scores in all_scores], 1).to(device)
