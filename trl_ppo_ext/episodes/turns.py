"""Turns of a rollout's episodes, each of which runs by itself until it needs one."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from itertools import count, repeat
from typing import Any, NamedTuple, Protocol

from ..concurrency import started
from .record import Record

# seconds for which ready episodes wait for others at least, so that groups, and with them random
# numbers, do not depend on the timing of quick tools
QUICK = 0.25


class Turn(NamedTuple):
    """Token ids of a turn, with their log-probs if what samples has some."""

    ids: list[int]
    logprobs: list[float] | None


class Conversation(Protocol):
    """Samples turns after everything so far, up to each one's room.

    `rows` are the episodes' numbers in the call before, `None` if one was not in it.
    """

    def __call__(
        self, prompts: list[list[int]], rooms: list[int], rows: list[int] | None
    ) -> list[list[int]]:
        """Sample a turn of each episode."""


class Converses(Protocol):
    """Backend that samples turns in this process."""

    # of the turns of the last call, per token; None if the backend has none
    sampled_logprobs: list[list[float]] | None

    def conversation(self) -> Conversation:
        """Function that samples turns of the episodes of a rollout."""


class TurnSampler(ABC):
    """Runs the episodes of a rollout, and samples their turns.

    A guard protects the run's random numbers while tools and environments answer; its number
    chooses those that they draw.
    """

    @abstractmethod
    def play(
        self,
        episodes: Sequence[Coroutine[Any, Any, None]],
        record: Record,
        guard: Callable[[int], AbstractContextManager],
    ) -> None:
        """Run episodes to their ends; their numbers are their rows."""

    @abstractmethod
    async def sample(self, row: int, number: int, ids: list[int], room: int) -> Turn:
        """Sample a turn of an episode after everything so far, of at most `room` tokens."""


async def together(episodes: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run episodes; an error of the run in one cancels the others."""
    tasks = [asyncio.ensure_future(episode) for episode in episodes]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Waiting(NamedTuple):
    """An episode that is ready for its next turn."""

    row: int
    ids: list[int]
    room: int
    turn: "asyncio.Future[Turn]"


class GroupedSampler(TurnSampler):
    """Samples in this process the turns of all episodes that are ready, while tools of others
    run.

    Ready episodes wait for the others for as long as the last group took to sample: so a rollout
    takes at most twice as long as with the best groups. Random numbers depend on the groups, so
    these are recorded, and a resumed run samples them again.
    """

    def __init__(self, generator: Converses):
        self.generator = generator
        self.sample_turns = generator.conversation()
        self.patience = math.inf  # seconds; the first group has all episodes
        self.last: list[int] = []  # rows of the last group
        # the event loop alone changes these
        self.unfinished: set[int] = set()
        self.waiting: dict[int, Waiting] = {}
        self.recorded: deque[list[int]] = deque()  # groups of a run that was killed

    def play(
        self,
        episodes: Sequence[Coroutine[Any, Any, None]],
        record: Record,
        guard: Callable[[int], AbstractContextManager],
    ) -> None:
        """Run episodes in an event loop, and sample in this thread."""
        self.unfinished = set(range(len(episodes)))
        self.recorded = deque(record.groups)
        self.record = record
        self.changed = asyncio.Event()
        parts = [self._until_end(row, episode) for row, episode in enumerate(episodes)]
        playing: Future[None] | None = None
        turns: list[Turn] = []
        group: list[Waiting] = []
        try:
            for number in count():
                with guard(number):
                    if playing is None:
                        playing = started(together(parts), waits=True)
                    group = started(self._next_group(group, turns), waits=True).result()
                if not group:
                    return playing.result()
                turns = self._sampled(group)
        finally:
            if playing is not None:
                playing.cancel()

    async def sample(self, row: int, number: int, ids: list[int], room: int) -> Turn:
        """Wait for the group of an episode."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting[row] = Waiting(row, ids, room, turn)
        self.changed.set()
        return await turn

    async def _until_end(self, row: int, episode: Coroutine[Any, Any, None]) -> None:
        try:
            await episode
        finally:
            self.unfinished.discard(row)
            self.changed.set()

    async def _next_group(self, last: Sequence[Waiting], turns: Sequence[Turn]) -> list[Waiting]:
        """Let the last group go on with its turns, and return the next; none if all episodes have
        ended."""
        for waiting, turn in zip(last, turns):
            del self.waiting[waiting.row]
            if not waiting.turn.done():  # otherwise it was cancelled
                waiting.turn.set_result(turn)
        clock = asyncio.get_running_loop().time
        latest = math.inf  # moment at which the wait ends
        while self.unfinished:
            self.changed.clear()
            if self.waiting and latest == math.inf:
                latest = clock() + self.patience
            is_recorded = self._forget_ended()
            if is_recorded:
                rows = self.recorded[0]
                is_due = self.waiting.keys() >= set(rows)
            else:
                rows = sorted(self.waiting)
                is_due = self.waiting.keys() == self.unfinished or clock() >= latest
            if is_due:
                if is_recorded:
                    self.recorded.popleft()
                else:
                    self.record.add_group(rows)
                return [self.waiting[row] for row in rows]
            with suppress(TimeoutError):
                has_end = not is_recorded and latest < math.inf
                async with asyncio.timeout_at(latest if has_end else None):
                    await self.changed.wait()
        return []

    def _forget_ended(self) -> bool:
        """Remove episodes that have ended, e.g. now with an error, from the next recorded group;
        return if there is one."""
        while self.recorded:
            rows = [row for row in self.recorded[0] if row in self.unfinished]
            if rows:
                self.recorded[0] = rows
                return True
            self.recorded.popleft()
        return False

    def _sampled(self, group: Sequence[Waiting]) -> list[Turn]:
        """Sample a turn for each episode of a group."""
        start = time.monotonic()
        rows = [waiting.row for waiting in group]
        places = None
        if set(rows) <= set(self.last):
            places = [self.last.index(row) for row in rows]
        completions = self.sample_turns(
            [waiting.ids for waiting in group], [waiting.room for waiting in group], places
        )
        self.last = rows
        self.patience = max(QUICK, time.monotonic() - start)
        logprobs = self.generator.sampled_logprobs or repeat(None)
        return [Turn(ids, x) for ids, x in zip(completions, logprobs)]
