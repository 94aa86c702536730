"""One step of sampling over static memory, which a CUDA graph can replay."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from .static_memory import StaticMemory, Window

logger = logging.get_logger(__name__)

# float64 has 53 bits, and shares of a vocabulary sum to at most 2^51
FIXED_POINT = 2.0**50
MOST_GRAPHS = 256  # that are kept at a time


# ---- from logits to a token ----


def draw_tokens(scores: Tensor, noise: Tensor) -> Tensor:
    """Draw a token of each row: the one whose share of [0, 1) contains the row's noise.

    Shares are integers, since sums of floats may depend on their order, and a token without
    probability has none.

    Args:
        scores (`torch.Tensor`): Logits after temperature and filters, `[rows, vocabulary]`.
        noise (`torch.Tensor`): Uniform numbers of [0, 1) in float64, `[rows, 1]`.

    Returns:
        `torch.Tensor`: Token ids, `[rows, 1]`.
    """
    probabilities = scores.softmax(-1).double()
    shares = probabilities.mul_(FIXED_POINT).long()
    ends = shares.cumsum_(-1)
    total = ends[:, -1:]
    places = (noise * total).long()
    tokens = torch.searchsorted(ends, places, right=True)
    # scores that are not finite would be an index out of range, which ends a process on a GPU
    largest = scores.shape[1] - 1
    return tokens.clamp_(max=largest)


def score_filters(config: GenerationConfig) -> LogitsProcessorList:
    """Filters of a config in the order of transformers, without the temperature."""
    filters = LogitsProcessorList()
    if config.top_k:
        filters.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1:
        filters.append(TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        filters.append(MinPLogitsWarper(config.min_p))
    return filters


# ---- a token of each row ----


class StaticStep:
    """Samples the next token of the first rows of a memory.

    A step reads nothing on the host and changes only tensors that stay where they are, so a GPU
    replays it as a CUDA graph: one for each number of rows, and of columns that it attends to.

    Args:
        model (`PreTrainedModel`): Model whose layers keep a key and a value for each token.
        memory (`StaticMemory`): Rows of tokens, with their keys and values.
        cache_name (`str`): Argument of the model's forward that takes the keys and values.
        filters (`Callable`): Function of token ids and scores that returns filtered scores.
        stop_token_ids (`Sequence[int]`): Tokens that end a completion.
        pad_token_id (`int`): Token in columns without one.
        min_new_tokens (`int`): Number of tokens before a stop token may follow.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: StaticMemory,
        cache_name: str,
        filters: Callable[[Tensor, Tensor], Tensor],
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        min_new_tokens: int,
    ):
        self.model = model
        self.memory = memory
        self.cache_name = cache_name
        self.filters = filters
        self.pad_token_id = pad_token_id
        self.min_new_tokens = min_new_tokens

        # 1. What a step reads beside the rows.
        device = model.device
        self.at = torch.zeros(1, dtype=torch.long, device=device)  # column that a step reads
        self.first_stop = torch.zeros_like(self.at)  # column whose next token may be a stop token
        self.temperature = torch.ones(1, device=device)
        self.is_greedy = False
        head: Any = model.get_output_embeddings()
        vocabulary = getattr(head, "out_features", len(head.weight))
        is_stop = torch.zeros(vocabulary, dtype=torch.bool)
        is_stop[list(stop_token_ids)] = True
        self.is_stop = is_stop.to(device)

        # 2. Graphs, by rows, columns that are attended to, and kind of the draw.
        self.captures = device.type == "cuda"
        self.graphs: dict[tuple[int, int, bool], Any] = {}
        self.pool: Any = None
        self.stream: Any = None

    def start(self, column: int, temperature: float) -> None:
        """Set the column that the next step reads, and the temperature; 0 is greedy."""
        self.at.fill_(column)
        self.first_stop.fill_(column + self.min_new_tokens)
        self.is_greedy = temperature == 0
        self.temperature.fill_(1.0 if self.is_greedy else temperature)

    def advance(self, rows: int, end: int) -> None:
        """Run a step of the first rows over the columns before `end`: on a GPU the first step of
        a shape by itself, and later ones as a graph."""
        self.memory.window = Window(slice(rows), written=self.at, first=self.at[0], end=end)
        shape = (rows, end, self.is_greedy)
        if shape in self.graphs:
            self.graphs[shape].replay()
            return
        if not self.captures:
            self.run(rows)
            return
        # groups of episodes have any number of rows
        if len(self.graphs) >= MOST_GRAPHS:
            self.drop_graphs()
        # the first step warms up its kernels on the stream of captures
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.at.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.run(rows)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = self._captured(rows)
        if graph is not None:
            self.graphs[shape] = graph

    def _captured(self, rows: int) -> Any:
        """Graph of the next step, which does not run; `None` if a step cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            # threads of environments may use the device meanwhile
            with torch.cuda.graph(
                graph,
                pool=self.pool,
                stream=self.stream,
                capture_error_mode="thread_local",
            ):
                self.run(rows)
        except RuntimeError as error:
            self.captures = False
            logger.warning_once(
                f"Sampling runs without CUDA graphs, because a step of {type(self.model).__name__} "
                f"cannot be captured: {error}"
            )
            return None
        self.pool = graph.pool()
        return graph

    def drop_graphs(self) -> None:
        """Drop all graphs, e.g. once addresses have changed."""
        self.graphs.clear()
        self.pool = None  # torch frees it with its last graph

    def run(self, rows: int) -> None:
        """Sample the next token of the first rows."""
        # 1. Scores after the column at `at`. Those at the temperature are compared with training.
        front = self.memory.rows.front(rows)
        ids = front.ids.index_select(1, self.at)
        visible = front.visible[:, : self.memory.window.end]
        positions = front.prompt_end + front.length
        logits = self.forward(ids, visible, positions[:, None])
        scores = logits / self.temperature

        # 2. Tokens. Rows that ended get padding.
        allowed = scores
        if self.min_new_tokens:
            is_early = self.is_stop & (self.at < self.first_stop)
            allowed = scores.masked_fill(is_early, float("-inf"))
        if self.is_greedy:
            tokens = allowed.argmax(-1, keepdim=True)
        else:
            noise = front.noise.index_select(1, self.at)
            filtered = self.filters(ids, allowed)
            tokens = draw_tokens(filtered, noise)
        has_ended = front.room <= 0
        tokens = tokens.masked_fill(has_ended[:, None], self.pad_token_id)
        tokens_by_row = tokens.flatten()
        logprobs = -nn.functional.cross_entropy(scores, tokens_by_row, reduction="none")

        # 3. Write them into the next column.
        self.at.add_(1)
        front.ids.index_copy_(1, self.at, tokens)
        front.logprobs.index_copy_(1, self.at, logprobs[:, None])
        front.length.add_(~has_ended)
        is_last = self.is_stop[tokens_by_row]
        front.room.sub_(1)
        front.room.masked_fill_(is_last, 0)

    def forward(self, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """Logits in float32 after the last of the columns that the memory's window writes."""
        options = {self.cache_name: self.memory.cache, "use_cache": True, "logits_to_keep": 1}
        inputs = self.model.prepare_inputs_for_generation(
            ids, attention_mask=visible, position_ids=positions, **options
        )
        if ids.shape[1] == 1:  # SDPA would make a mask to add of booleans in every layer
            as_added = partial(_additive, self._dtype())
            # a mask for each kind of layer, or one for all
            inputs["attention_mask"] = tree_map(as_added, inputs["attention_mask"])
        outputs = self.model(**inputs)
        return outputs.logits[:, -1].float()

    def _dtype(self) -> torch.dtype:
        """Dtype of queries, keys and values."""
        device = self.at.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.model.dtype


def _additive(dtype: torch.dtype, mask: Tensor) -> Tensor:
    """Mask to add to attention scores."""
    if mask.is_floating_point():
        return mask
    lowest = torch.finfo(dtype).min
    zeros = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill_(~mask, lowest)
