"""Score completions: all rewards, their failures, the shaping of their sum, and guards around
users' code."""

import inspect
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import chdir, contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor
from transformers.utils import logging

from ..concurrency import FAILURES, started
from ..data import REWARD_ARGUMENTS
from ..redaction import shortened
from .prefixes import UNKNOWN, Foresight, PrefixScores, pay_changes

logger = logging.get_logger(__name__)

CPU = torch.device("cpu")
# sums of squares of larger ones, in statistics and losses, may overflow float32
LARGEST_SCORE = 1e9
_SHARED: random.Random = random.random.__self__  # type: ignore[attr-defined]
_OWN = ContextVar("_OWN", default=_SHARED)  # generator from which the functions of `random` draw


class RewardError(ValueError):
    """Raised when a reward fails or returns a score that cannot be trained on.

    The message names the reward.
    """


@dataclass(frozen=True)
class ScoringBatch:
    """Input of a reward, with one list entry per completion."""

    prompts: list  # prompts as in the dataset: text or chat messages
    # text, or messages if prompts are messages: the assistant's and, in episodes, the answers
    completions: list
    completion_ids: list[list[int]]  # token ids of the completions
    columns: dict[str, list] = field(default_factory=dict)  # other columns of the dataset
    trainer_state: Any = None  # for schedules in a reward
    episodes: Sequence = ()  # that were sampled
    log_extra: Callable[[str, list], None] = lambda *_: None
    log_metric: Callable[[str, float], None] = lambda *_: None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def played(self) -> list[int]:
        """Completions whose environment has not failed."""
        failed = {row for row, episode in enumerate(self.episodes) if episode.error is not None}
        return [row for row in range(len(self)) if row not in failed]

    def only(self, rows: list[int]) -> "ScoringBatch":
        """A part of the batch; what is logged of it is `None` at the others."""

        def log_extra(column: str, values: list) -> None:
            self.log_extra(column, spread(values, rows, len(self)))

        def part(entries: Sequence) -> list:
            return [entries[row] for row in rows]

        return replace(
            self,
            prompts=part(self.prompts),
            completions=part(self.completions),
            completion_ids=part(self.completion_ids),
            columns={name: part(entries) for name, entries in self.columns.items()},
            episodes=part(self.episodes),
            log_extra=log_extra,
        )


def spread(entries: Any, rows: list[int], size: int) -> Any:
    """Entries of some rows among all, `None` at the others; as they are if their number is
    wrong."""
    if not hasattr(entries, "__len__") or len(entries) != len(rows):
        return entries
    by_row = dict(zip(rows, entries))
    return [by_row.get(row) for row in range(size)]


class Reward(Protocol):
    """Named scorer of a batch.

    `score` returns one entry per completion: a number; `None` if the reward does not apply; a list
    with one number per token; a list of `(position, reward)` pairs; [`PrefixScores`], if the reward
    has a `level` other than `"end"`; or a [`RewardError`] if this completion failed.
    """

    name: str

    def score(self, batch: ScoringBatch) -> Any:
        """Score completions."""


class FunctionReward:
    """Function with the signature of TRL's reward functions. It may be asynchronous."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.name = function_name(function)

    def score(self, batch: ScoringBatch) -> Any:
        """Call the function with the episodes that did not fail."""
        rows = batch.played
        if len(rows) == len(batch):
            return self._call(batch)
        if not rows:
            return [None] * len(batch)
        entries = self._call(batch.only(rows))
        if inspect.isawaitable(entries):
            return _spread_later(entries, rows, len(batch))
        return spread(entries, rows, len(batch))

    def _call(self, batch: ScoringBatch) -> Any:
        """Call the function with what TRL passes."""
        passed = {name: getattr(batch, name) for name in REWARD_ARGUMENTS} | batch.columns
        # a function may change its input, which other rewards, other completions of the prompt and
        # the log share
        copies = {}
        for name, x in passed.items():
            copies[name] = [deepcopy(entry) for entry in x] if isinstance(x, list) else x
        environments = [episode.environment for episode in batch.episodes]
        if any(environment is not None for environment in environments):
            copies["environments"] = environments  # themselves, as in TRL
        result = self.function(**copies)
        if isinstance(result, Iterator):
            return list(result)
        return result


async def _spread_later(entries: Awaitable, rows: list[int], size: int) -> Any:
    return spread(await entries, rows, size)


def function_name(function: Callable) -> str:
    """Name of a function or of the class of a callable."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


class Scores(NamedTuple):
    """Checked scores of one reward."""

    # [batch, response] a plain number is at the last token; NaN if the reward does not apply or
    # failed
    tokens: Tensor
    # [batch, response] True where the reward may enter: all tokens of a list, or those of pairs
    places: Tensor
    is_whole: Tensor  # [batch] True if the score is a number for the completion as a whole
    failures: dict[int, RewardError]  # errors by completion
    # [batch, 1 + response], score of the prompt and of each prefix that has one; NaN elsewhere
    prefixes: Tensor

    @property
    def totals(self) -> Tensor:
        """`[batch]`, the score of each completion."""
        return self.tokens.sum(1)


def read_scores(
    name: str, scores: Any, lengths: Sequence[int], nan_is_none: bool = False
) -> Scores:
    """Check the scores that a reward returned, or its exception, and place them at their tokens."""
    expected = len(lengths)
    if hasattr(scores, "tolist"):
        entries = scores.tolist()
    else:
        entries = scores
    # if entries cannot be assigned to completions, all of them fail
    if isinstance(scores, RewardError):
        entries = [scores] * expected
    elif isinstance(scores, FAILURES):
        failure = RewardError(
            f"The reward `{name}` failed with {type(scores).__name__}: {shortened(scores, 2000)}"
        )
        failure.__cause__ = scores
        entries = [failure] * expected
    elif not isinstance(entries, list | tuple) or len(entries) != expected:
        if isinstance(entries, list | tuple):
            returned = f"{len(entries)} scores"
        else:
            returned = f"a {type(scores).__name__}"
        cause = f"The reward `{name}` returned {returned} for {expected} completions; "
        entries = [
            RewardError(cause + "it must return a list with one entry per completion.")
        ] * expected

    # a reward may set the default
    tokens = torch.full((expected, max(lengths)), torch.nan, dtype=torch.float32)
    places = torch.zeros_like(tokens, dtype=torch.bool)
    prefixes = torch.full((expected, 1 + max(lengths)), torch.nan, dtype=torch.float32)
    is_whole = torch.zeros(expected, dtype=torch.bool)
    failures = {}
    for index, (entry, length) in enumerate(zip(map(_without_array, entries), lengths)):
        if isinstance(entry, RewardError):
            failures[index] = entry
        elif entry is not None and not (
            nan_is_none and isinstance(entry, float | np.floating) and math.isnan(entry)
        ):
            pairs = entry.pairs if isinstance(entry, PrefixScores) else entry
            try:
                tokens[index], places[index] = _at_tokens(pairs, length, max(lengths))
            except ValueError as error:
                cause, remedy = error.args
                failures[index] = RewardError(
                    f"The reward `{name}` returned {cause} for completion {index}{remedy}"
                )
                continue
            is_whole[index] = not isinstance(entry, list | tuple)
            if isinstance(entry, PrefixScores):
                prefixes[index, 0] = entry.prompt
                prefixes[index, 1:] = tokens[index].where(places[index], torch.nan)
                tokens[index] = 0
                tokens[index, length - 1] = prefixes[index, length]
                # unless its changes are paid
                is_whole[index] = True
                places[index] = False
    return Scores(tokens, places, is_whole, failures, prefixes)


def _without_array(entry: Any) -> Any:
    """A number or lists in place of a tensor or an array, of which one with a single element is a
    number."""
    if not isinstance(entry, Tensor | np.ndarray):
        return entry
    numbers = entry.flatten().tolist()
    if len(numbers) == 1:
        return numbers[0]
    return entry.tolist()


def _at_tokens(entry: Any, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Scores of one completion at its tokens, and where they enter; an error has a cause and a
    remedy."""
    pairs: Iterable[Any] = [(length - 1, entry)]
    if isinstance(entry, list | tuple) and all(isinstance(pair, list | tuple) for pair in entry):
        pairs = entry
        kinds = int | np.integer
        if not all(
            len(pair) == 2 and isinstance(pair[0], kinds) and 0 <= pair[0] < length
            for pair in entry
        ):
            raise ValueError(
                f"the pairs {shortened(list(entry))}",
                f"; they must be (position, reward) with positions from 0 to {length - 1}, the "
                "last token.",
            )
    elif isinstance(entry, list | tuple):
        pairs = enumerate(entry)
        if len(entry) != length:
            column = " (`scores.squeeze(1)` of a column)" if len(entry) == 1 else ""
            remedy = (
                f", which has {length} tokens; return a number{column}, or a list with one per "
                "token or of (position, reward) pairs."
            )
            raise ValueError(f"{len(entry)} token rewards", remedy)
    tokens = torch.zeros(width, dtype=torch.float32)
    places = torch.zeros(width, dtype=torch.bool)
    for position, value in pairs:
        number = math.nan
        with suppress(TypeError, ValueError, OverflowError):
            if isinstance(value, str):
                number = math.nan
            else:
                number = float(value)
        if not abs(number) <= LARGEST_SCORE:
            remedy = "; a score must be a finite number, or None if the reward does not apply"
            remedy += f", and at most {LARGEST_SCORE:g} in size."
            raise ValueError(shortened(repr(value), 80), remedy)
        tokens[position] += number
        places[position] = True
    return tokens, places


class Scored(NamedTuple):
    """Scores of all rewards."""

    rewards: Tensor  # [batch, rewards] score of each reward; NaN if it does not apply
    tokens: Tensor  # [batch, response] weighted sum of the rewards at their tokens
    places: Tensor  # [batch, response] True where a reward may enter
    usable: Tensor  # [batch] False if the completion is skipped: a reward failed, or none applies
    failed: Tensor  # [batch, rewards] True if a reward failed
    unpaid: Tensor  # [batch] part of the sum that no token earned
    is_whole: Tensor  # [batch] True if a reward scored the completion as a whole
    # by name of a reward whose prefixes have scores, with those of earlier rollouts
    foresight: dict[str, Foresight]

    @property
    def paid(self) -> Tensor:
        """`[batch]`, the sum of what the tokens of each completion are paid."""
        return self.tokens.sum(1)

    @property
    def totals(self) -> Tensor:
        """`[batch]`, the weighted sum of the rewards of each completion."""
        return self.paid + self.unpaid

    @property
    def sizes(self) -> Tensor:
        """`[batch]`, the size of what a total is the sum of, to which its rounding is relative."""
        return self.tokens.abs().sum(1) + self.unpaid.abs()

    @property
    def unscored(self) -> Tensor:
        """`[batch]`, True if no reward applies and none failed."""
        return self.rewards.isnan().all(1) & ~self.failed.any(1)


def collect_scores(rewards: Sequence[Reward], batch: ScoringBatch) -> list[Scores]:
    """Score a batch with each reward.

    Asynchronous rewards run together, and exceptions become failures.
    """
    results: list[Any] = []
    for reward in rewards:
        try:
            results.append(reward.score(batch))
        except FAILURES as error:  # the code of a completion may call `exit()`
            results.append(error)
    waits = [getattr(reward, "only_waits", False) for reward in rewards]
    results = [started(x, only) if inspect.isawaitable(x) else x for x, only in zip(results, waits)]
    for index, result in enumerate(results):
        if isinstance(result, Future):
            try:
                results[index] = result.result()
            except Exception as error:
                results[index] = error
    lengths = [len(ids) for ids in batch.completion_ids]
    return [
        read_scores(reward.name, result, lengths, isinstance(reward, FunctionReward))  # as in TRL
        for reward, result in zip(rewards, results)
    ]


def score_all(
    rewards: Sequence[Reward],
    batch: ScoringBatch,
    weights: Sequence[float] | None,
    on_error: str,
    max_failures: float,
    all_sum: Callable[[Tensor], Tensor],
    device: torch.device,
    foresight: Mapping[str, Foresight] = MappingProxyType({}),  # of earlier rollouts
) -> Scored:
    """Score a batch with each reward, and sum the scores."""
    all_scores = collect_scores(rewards, batch)

    # 1. Count failures, or end the run.
    failed = torch.zeros(len(batch), len(rewards), dtype=torch.bool)
    for column, scores in enumerate(all_scores):
        failed[list(scores.failures), column] = True
    # every process reaches this reduction, so that all of them stop together
    local = torch.cat([failed.sum(0), torch.tensor([len(batch)])])
    counts = all_sum(local.to(device, non_blocking=True)).tolist()
    for reward, scores, count in zip(rewards, all_scores, counts):
        first = next(iter(scores.failures.values()), None)
        if count and on_error == "raise":
            raise first or RewardError(f"The reward `{reward.name}` failed on another process.")
        if count > max_failures * counts[-1]:
            raise RewardError(
                f"The reward `{reward.name}` failed for {count} of {counts[-1]} completions, more "
                f"than max_reward_failures={max_failures} allows. First cause: "
                f"{first or 'it failed on another process'}"
            ) from first
        if first:
            logger.warning("%s; %d of %d completions are skipped.", first, count, counts[-1])

    # 2. Sum the scores, and skip completions without any, or with a failed one.
    totals = torch.stack([scores.totals for scores in all_scores], 1)
    unscored = totals.isnan().all(1)
    if unscored.all() and not any(scores.failures for scores in all_scores):
        logger.warning(
            "No reward applies to any of %d completions; nothing is learned from them.", len(batch)
        )
    usable = (~(failed.any(1) | unscored)).to(device, non_blocking=True)
    # a reward may set the default
    tokens = torch.zeros(all_scores[0].tokens.shape, dtype=torch.float32, device=device)
    unpaid = torch.zeros(len(batch), dtype=torch.float32, device=device)
    foresights = {}
    counted = [weights is None or weights[index] != 0 for index in range(len(rewards))]
    places = torch.stack([x.places & is_on for x, is_on in zip(all_scores, counted)]).any(0)
    places = places.to(device, non_blocking=True)
    is_whole = torch.zeros(len(batch), dtype=torch.bool, device=device)
    for index, (reward, scores) in enumerate(zip(rewards, all_scores)):
        weight = 1.0 if weights is None else weights[index]
        own = scores.tokens.nan_to_num(0.0).to(device, non_blocking=True)
        whole = scores.is_whole.to(device, non_blocking=True) & (weight != 0)
        if getattr(reward, "level", "end") in ("token", "turn"):
            prefixes = scores.prefixes.to(device, non_blocking=True)
            changes = pay_changes(prefixes, foresight.get(reward.name, UNKNOWN), all_sum)
            own = torch.where(prefixes.isfinite().any(1, keepdim=True), changes.tokens, own)
            unpaid += weight * changes.unpaid
            if weight != 0:
                places = places | changes.places
            foresights[reward.name] = changes.foresight
            whole = whole & ~changes.places.any(1)
        tokens += weight * own
        is_whole |= whole
    return Scored(
        rewards=totals.to(device, non_blocking=True),
        tokens=tokens * usable[:, None],
        places=places,
        usable=usable,
        failed=failed.to(device, non_blocking=True),
        unpaid=unpaid * usable,
        is_whole=is_whole,
        foresight=foresights,
    )


def monitor(monitors: Sequence[Reward], batch: ScoringBatch, device: torch.device) -> Tensor:
    """Score a batch with rewards that are only logged, `[batch, monitors]`; NaN if one fails or
    does not apply."""
    all_scores = collect_scores(monitors, batch)
    for first in [next(iter(scores.failures.values())) for scores in all_scores if scores.failures]:
        logger.warning("Of the monitored rewards one failed: %s", first)
    return torch.stack([scores.totals for scores in all_scores], 1).to(device, non_blocking=True)


class RandomState(NamedTuple):
    """Random numbers of Python, NumPy and PyTorch, on the CPU and on the device."""

    device: torch.device
    python: Any
    numpy: Any
    cpu: Tensor
    on_device: Tensor | None  # None on a CPU

    @classmethod
    def capture(cls, device: torch.device) -> "RandomState":
        """State of this moment."""
        on_device = None
        if device.type != "cpu":
            on_device = torch.get_device_module(device).get_rng_state()
        return cls(
            device=device,
            python=random.getstate(),
            numpy=np.random.get_state(),
            cpu=torch.get_rng_state(),
            on_device=on_device,
        )

    def restore(self) -> None:
        """Continue from this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.on_device)


@contextmanager
def fixed_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all random numbers within a context; afterwards they continue as if none had been
    drawn."""
    before = RandomState.capture(device)
    try:
        set_seed(seed)
        yield
    finally:
        before.restore()


@contextmanager
def own_random() -> Iterator[None]:
    """Let the functions of `random` draw from the generator of what [`seeded`] awaits."""
    functions = vars(random).copy()
    for name, function in functions.items():
        if getattr(function, "__self__", None) is _SHARED:  # environments seed it in threads
            setattr(
                random,
                name,
                lambda *args, _name=name, **kwargs: getattr(_OWN.get(), _name)(*args, **kwargs),
            )
    try:
        yield
    finally:
        vars(random).update(functions)


@contextmanager
def guarded(seed: int, device: torch.device) -> Iterator[None]:
    """Run code of the user: random numbers, default dtype, gradients and working directory stay
    those of the run."""
    # code that seeds would repeat the next rollouts; one that changes the directory would move the
    # checkpoints
    dtype = torch.get_default_dtype()
    try:
        with own_random(), fixed_seed(seed, device), chdir("."), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)


async def seeded(awaitable: Awaitable, seed: int) -> Any:
    """Await something that draws from a generator of `random` of its own, also in threads."""
    _OWN.set(random.Random(seed))
    return await awaitable
