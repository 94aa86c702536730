"""Tokens, keys and values of rows at addresses that stay, as a CUDA graph needs them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


@dataclass
class Window:
    """Rows and columns of keys and values that a forward writes and attends to."""

    rows: slice
    written: Tensor  # columns that the forward writes, on the device
    first: Tensor | int = 0  # the first of them
    end: int = 0  # the forward attends to the columns before this one


class StaticColumns(DynamicLayer):
    """Keys and values of a layer, `[rows, heads, columns, size]`.

    All rows write the same columns. A mask hides what a row or a sliding window must not see.
    """

    is_compileable = True  # otherwise transformers reads the mask on the host in each forward

    def __init__(self, memory: "StaticMemory"):
        super().__init__()
        self.memory = memory

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the window's columns of its rows, and return the columns to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = self._zeros_for(key_states)
            self.values = self._zeros_for(value_states)
        window = self.memory.window
        keys = self.keys[window.rows]
        values = self.values[window.rows]
        keys.index_copy_(2, window.written, key_states)
        values.index_copy_(2, window.written, value_states)
        return keys[:, :, : window.end], values[:, :, : window.end]

    def _zeros_for(self, states: Tensor) -> Tensor:
        """Memory for states of all rows and columns; masked columns must be finite."""
        _, heads, _, size = states.shape
        rows, columns = self.memory.rows.ids.shape
        return states.new_zeros(rows, heads, columns, size)

    def get_seq_length(self) -> Tensor | int:
        """Number of columns before those that are written."""
        return self.memory.window.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of columns that the forward attends to, and the first of them."""
        return self.memory.window.end, 0


@dataclass
class RowState:
    """Tokens and numbers of some rows."""

    ids: Tensor  # `[rows, columns]`
    visible: Tensor  # false at padding; causality hides columns that no step has written yet
    noise: Tensor  # that draws the token after a column
    logprobs: Tensor  # of the token in a column, if it was sampled
    prompt_end: Tensor  # `[rows]`, position of the last token of the prompt
    length: Tensor  # number of sampled tokens
    room: Tensor  # tokens that may still be sampled; 0 or less once a row has ended

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return dict(vars(self))

    def front(self, rows: int) -> "RowState":
        """Views of the first rows."""
        return RowState(**{name: x[:rows] for name, x in self.tensors().items()})


class StaticMemory:
    """Rows of tokens with their keys and values.

    Args:
        model (`PreTrainedModel`): Model whose layers keep a key and a value for each token.
        block (`int`): Number of columns by which the memory grows.
    """

    def __init__(self, model: PreTrainedModel, block: int):
        self.block = block
        by_column = torch.zeros(0, 0, dtype=torch.long, device=model.device)
        by_row = by_column.flatten()
        self.rows = RowState(
            ids=by_column,
            visible=by_column.bool(),
            noise=by_column.double(),
            logprobs=by_column.float(),
            prompt_end=by_row,
            length=by_row,
            room=by_row,
        )
        self.window = Window(slice(0), by_row)
        layers = DynamicCache(config=model.config).layers
        self.cache = Cache(layers=[StaticColumns(self) for _ in layers])
        windows = [x.sliding_window for x in layers if hasattr(x, "sliding_window")]
        self.smallest_window = min(windows, default=math.inf)  # of a layer, in columns

    def keys_and_values(self) -> list[Tensor]:
        """Keys and values of all layers."""
        tensors = []
        for layer in self.cache.layers:
            if layer.is_initialized:
                tensors += [layer.keys, layer.values]
        return tensors

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.nbytes for x in self.keys_and_values())

    def grow(self, rows: int, columns: int, keeps: bool) -> bool:
        """Make room for rows and columns; return `True` if addresses have changed."""
        old_rows, old_columns = self.rows.ids.shape
        rows = max(rows, old_rows)
        columns = max(whole_blocks(columns, self.block), old_columns)
        if (rows, columns) == (old_rows, old_columns):
            return False
        if not keeps:
            self.free()
        grown_rows = {}
        for name, x in self.rows.tensors().items():
            shape = (rows, columns) if x.dim() > 1 else (rows,)
            grown_rows[name] = _grown(x, shape)
        self.rows = RowState(**grown_rows)
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys = _with_columns(layer.keys, rows, columns)
                layer.values = _with_columns(layer.values, rows, columns)
        return True

    def free(self) -> None:
        """Free keys and values."""
        for layer in self.cache.layers:
            layer.keys = None
            layer.values = None
            layer.is_initialized = False

    def move(self, sources: Tensor, targets: Tensor, end: int) -> None:
        """Copy rows onto others, with their columns before `end`."""
        for x in self.rows.tensors().values():
            _move(x, sources, targets)
        self.move_keys(sources, targets, end)

    def move_keys(self, sources: Tensor, targets: Tensor, end: int) -> None:
        """Copy keys and values of rows, of the columns before `end`, onto those of others."""
        for x in self.keys_and_values():
            _move(x.narrow(2, 0, end), sources, targets)

    def clear(self, start: int) -> None:
        """Set keys and values to zero from a column on: a NaN would pass through a mask."""
        for x in self.keys_and_values():
            x[:, :, start:] = 0


def whole_blocks(columns: int, block: int) -> int:
    """Smallest number of columns in whole blocks."""
    blocks = -(-columns // block)
    return blocks * block


def _with_columns(x: Tensor, rows: int, columns: int) -> Tensor:
    """Keys or values with more rows and columns."""
    _, heads, _, size = x.shape
    return _grown(x, (rows, heads, columns, size))


def _grown(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Copy of a tensor at the beginning of a larger one."""
    larger = x.new_zeros(shape)
    corner = larger
    for axis, size in enumerate(x.shape):
        corner = corner.narrow(axis, 0, size)
    corner.copy_(x)
    return larger


def _move(x: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy rows of a tensor onto others."""
    moved = x.index_select(0, sources)
    x.index_copy_(0, targets, moved)
