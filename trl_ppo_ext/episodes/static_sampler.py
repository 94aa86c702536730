"""Sampling of completions by steps over static memory."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StopStringCriteria

from .static_memory import StaticMemory, Window, whole_blocks
from .static_step import StaticStep

# tokens between two reads of the host, and columns by which attention grows; on a CPU reads cost
# nothing, and no graph needs few shapes
READ_EVERY = 16
READ_EVERY_ON_CPU = 1
BLOCK = 256
BLOCK_ON_CPU = 32
# tokens of prompts that one forward reads
PROMPT_TOKENS = 8192
# share and number of rows that must have ended before the others leave them, without graphs
LEAVING = 0.25
FEWEST = 8


@dataclass
class Sampled:
    """Completions, and the rows of the memory that have their keys and values."""

    token_ids: list[list[int]]  # with their stop tokens
    logprobs: list[list[float]]  # of these tokens at the temperature, before filters
    places: list[int]  # row of the memory, of each completion
    counts: list[int]  # tokens of each prompt and completion that have keys and values
    ends: list[int]  # column after those
    width: int  # columns of all rows


class StaticSampler:
    """Samples completions of a causal language model, a token of all rows per step.

    The random numbers are drawn by the CPU before the first step, one for each row and token.
    Completions do not depend on other rows, nor on the device except through rounding.

    Args:
        model (`PreTrainedModel`): Model whose layers keep a key and a value for each token.
        cache_name (`str`): Argument of the model's forward that takes the keys and values.
        filters (`Callable`): Function of token ids and scores that returns filtered scores.
        stop_token_ids (`Sequence[int]`): Tokens that end a completion.
        pad_token_id (`int`): Token in columns without one.
        min_new_tokens (`int`, *optional*, defaults to 0): Tokens before a stop token may follow.
        stop_strings (`StopStringCriteria`, *optional*): Strings that end a completion.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache_name: str,
        filters: Callable[[Tensor, Tensor], Tensor],
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        min_new_tokens: int = 0,
        stop_strings: StopStringCriteria | None = None,
    ):
        self.device = model.device
        on_gpu = self.device.type == "cuda"
        self.read_every = READ_EVERY if on_gpu else READ_EVERY_ON_CPU
        self.pad_token_id = pad_token_id
        self.stop_strings = stop_strings
        self.memory = StaticMemory(model, BLOCK if on_gpu else BLOCK_ON_CPU)
        self.step = StaticStep(
            model,
            self.memory,
            cache_name,
            filters,
            stop_token_ids=stop_token_ids,
            pad_token_id=pad_token_id,
            min_new_tokens=min_new_tokens,
        )
        self.last: Sampled | None = None  # whose rows the memory has

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[list[int]],
        rooms: Sequence[int],
        temperature: float = 1.0,
        last: Sampled | None = None,
        rows: Sequence[int] = (),
        noise: Tensor | None = None,
    ) -> Sampled:
        """Sample a completion of each prompt.

        Args:
            prompts (`Sequence[list[int]]`): Token ids.
            rooms (`Sequence[int]`): Largest number of tokens of each completion.
            temperature (`float`, *optional*, defaults to 1.0): Temperature; 0 is greedy.
            last (`Sampled`, *optional*): Result of the last call, if prompts continue it.
            rows (`Sequence[int]`, *optional*): Completion of `last` that each prompt continues.
            noise (`torch.Tensor`, *optional*):
                Uniform numbers in float64, `[prompts, longest room]`. Defaults to new ones of the
                CPU's stream.

        Returns:
            `Sampled`: Completions and their log-probs.
        """
        # 1. Choose columns for the tokens without keys, which are padded on the left, and for
        # those to sample.
        number = len(prompts)
        counts = [0] * number
        start = 0
        if last is not None:
            counts = [last.counts[row] for row in rows]
            start = last.width
        new = [ids[count:] for ids, count in zip(prompts, counts)]
        first = start + max(map(len, new))  # column of the first sampled token
        end = first + max(rooms)
        self.reserve(number, end, keeps=last is not None)
        if last is not None:
            self._resume(last, rows)

        # 2. Write what the steps read. Noise draws the token of the column after it.
        if noise is None:
            noise = torch.rand(number, end - first, dtype=torch.float64)
        positions = self._write_prompts(new, counts, start)
        front = self.memory.rows.front(number)
        front.noise[:, first - 1 : end - 1] = noise.to(self.device)
        front.room.copy_(torch.tensor(rooms))
        self.step.start(first - 1, temperature)

        with without_autocast_cache():
            # 3. Read the prompts, except their last tokens, which the first step reads.
            if first - 1 > start:
                # in a turn, the columns before differ
                keys = range(number) if last is not None else map(tuple, prompts)
                self._read_prompts(keys, positions[:, :-1], start)
            self.memory.clear(first - 1)

            # 4. Sample until all rows have ended.
            order, end = self._sample_columns(number, first, end)
        self.last = self._collect(prompts, order, first, end)
        return self.last

    def may_continue(
        self,
        prompts: Sequence[list[int]],
        rooms: Sequence[int],
        last: Sampled,
        rows: Sequence[int],
    ) -> bool:
        """Check that no sliding window ends within the columns of a next turn: it counts columns,
        also those that are hidden between turns of a row."""
        longest_new = max(len(ids) - last.counts[row] for ids, row in zip(prompts, rows))
        columns = last.width + longest_new + max(rooms)
        return columns <= self.memory.smallest_window

    def reserve(self, rows: int, columns: int, keeps: bool = False) -> None:
        """Make room for rows and columns, e.g. of turns to come; `keeps` keeps earlier ones."""
        if self.memory.grow(rows, columns, keeps):
            self.step.drop_graphs()

    def release(self) -> None:
        """Free keys, values and graphs, e.g. while the model is trained."""
        self.step.drop_graphs()
        self.memory.free()
        self.last = None

    def _collect(
        self, prompts: Sequence[list[int]], order: Sequence[int], first: int, end: int
    ) -> Sampled:
        """Completions in columns from `first` to `end`, of rows in this order."""
        front = self.memory.rows.front(len(prompts))
        ids = front.ids[:, first:end].tolist()
        logprobs = front.logprobs[:, first:end].tolist()
        lengths = front.length.tolist()
        places = [0] * len(order)
        for place, row in enumerate(order):
            places[row] = place
        sampled = Sampled([], [], places, counts=[], ends=[], width=end - 1)
        for prompt, place in zip(prompts, places):
            length = lengths[place]
            sampled.token_ids.append(ids[place][:length])
            sampled.logprobs.append(logprobs[place][:length])
            # no step has read the last token of the longest completion, so a next turn reads it
            sampled.counts.append(len(prompt) + length - 1)
            sampled.ends.append(first + length - 1)
        return sampled

    # ---- prompts ----

    def _resume(self, last: Sampled, rows: Sequence[int]) -> None:
        """Move rows of the last call to the front, and hide the columns after their ends."""
        places = [last.places[row] for row in rows]
        ends = [last.ends[row] for row in rows]
        number = len(rows)
        targets = torch.arange(number, device=self.device)
        self.memory.move(self._on_device(places), targets, last.width)
        columns = torch.arange(last.width)
        is_kept = columns < torch.tensor(ends)[:, None]
        visible = self.memory.rows.visible
        visible[:number, : last.width] &= self._moved(is_kept)

    def _write_prompts(self, new: Sequence[list[int]], counts: Sequence[int], start: int) -> Tensor:
        """Write new tokens of each row from a column on, and return their positions."""
        width = max(map(len, new))
        padding = [width - len(ids) for ids in new]
        padded = [[self.pad_token_id] * pads + ids for pads, ids in zip(padding, new)]
        places = torch.arange(width) - torch.tensor(padding)[:, None]  # negative at padding
        positions = torch.tensor(counts)[:, None] + places.clamp(min=0)
        positions = self._moved(positions)
        end = start + width
        front = self.memory.rows.front(len(new))
        front.ids[:, start:end] = self._on_device(padded)
        front.visible[:, start:end] = self._moved(places >= 0)
        front.visible[:, end:] = True
        front.prompt_end.copy_(positions[:, -1])
        front.length.zero_()
        return positions

    def _read_prompts(self, keys: Iterable[Hashable], positions: Tensor, start: int) -> None:
        """Write keys and values of columns from `start` on; rows of equal keys are read once."""
        firsts, group_of = groups_of(keys)
        number, width = positions.shape
        end = start + width

        # 1. Read the first row of each group into the row of the group's number.
        written = torch.arange(start, end, device=self.device)
        rows_at_once = max(1, PROMPT_TOKENS // width)
        state = self.memory.rows
        for begin in range(0, len(firsts), rows_at_once):
            part = firsts[begin : begin + rows_at_once]
            places = slice(begin, begin + len(part))
            self.memory.window = Window(places, written, first=start, end=end)
            index = self._on_device(part)
            ids = state.ids[index, start:end]
            visible = state.visible[index, :end]
            self.step.forward(ids, visible, positions[index])

        # 2. Give all rows of a group its keys and values.
        if len(firsts) < number:
            targets = torch.arange(number, device=self.device)
            self.memory.move_keys(self._on_device(group_of), targets, end)

    # ---- completions ----

    def _sample_columns(self, rows: int, first: int, end: int) -> tuple[list[int], int]:
        """Sample columns until all rows have ended; return the order of the rows in the memory,
        and the column after the last sampled one."""
        order = list(range(rows))
        column = first
        while column < end:
            # 1. Sample some columns. The last step reads the column before its token.
            until = min(column + self.read_every, end)
            attended = self._attended(until - 1)
            for _ in range(column, until):
                self.step.advance(rows, attended)
            if self.stop_strings is not None:
                self._end_at_strings(self.stop_strings, rows, first, column, until)
            column = until

            # 2. Read which rows have ended: the only read of the host.
            has_ended = (self.memory.rows.room[:rows] <= 0).tolist()
            live = rows - sum(has_ended)
            if not live:
                break
            fewer = self._fewer_rows(rows, live)
            if fewer < rows:
                self._leave(order, has_ended, fewer, column - 1)
                rows = fewer
        return order, column

    def _attended(self, columns: int) -> int:
        """Number of columns that steps attend to; graphs share larger blocks, as each has its
        own number."""
        block = self.memory.block
        if self.step.captures:
            while columns > 4 * block:
                block *= 2
        allocated = self.memory.rows.ids.shape[1]
        return min(whole_blocks(columns, block), allocated)

    def _end_at_strings(
        self, stop_strings: StopStringCriteria, rows: int, first: int, column: int, until: int
    ) -> None:
        """End rows at the first of the new tokens that completes a stop string."""
        front = self.memory.rows.front(rows)
        for end in range(column + 1, until + 1):
            # transformers would also search the prompt
            is_complete: Any = stop_strings(front.ids[:, first:end], None)
            is_shorter = is_complete & (end - first <= front.length)
            front.length.masked_fill_(is_shorter, end - first)
            front.room.masked_fill_(is_shorter, 0)

    def _fewer_rows(self, rows: int, live: int) -> int:
        """Number of rows to go on with: with graphs a half of a half, since each has its own."""
        if not self.step.captures:
            leaves = rows - live >= max(FEWEST, LEAVING * rows)
            return live if leaves else rows
        half = (rows + 1) // 2
        while live <= half < rows:
            rows = half
            half = (rows + 1) // 2
        return rows

    def _leave(self, order: list[int], has_ended: Sequence[bool], fewer: int, end: int) -> None:
        """Exchange rows that ended with live ones behind the first `fewer`."""
        behind = [place for place in range(fewer, len(has_ended)) if not has_ended[place]]
        ended = [place for place in range(fewer) if has_ended[place]][: len(behind)]
        if not behind:
            return
        sources = behind + ended
        targets = ended + behind
        self.memory.move(self._on_device(sources), self._on_device(targets), end)
        exchanged = [order[place] for place in sources]
        for place, row in zip(targets, exchanged):
            order[place] = row

    def _on_device(self, numbers: Sequence[Any]) -> Tensor:
        return self._moved(torch.tensor(numbers))

    def _moved(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)


def groups_of(keys: Iterable[Hashable]) -> tuple[list[int], list[int]]:
    """First row of each group of equal keys, and the number of each row's group."""
    number_of: dict[Hashable, int] = {}
    firsts: list[int] = []
    group_of: list[int] = []
    for row, key in enumerate(keys):
        if key not in number_of:
            number_of[key] = len(firsts)
            firsts.append(row)
        group_of.append(number_of[key])
    return firsts, group_of


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Let autocast cast weights anew: a graph must not read casts that are freed with a context."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
