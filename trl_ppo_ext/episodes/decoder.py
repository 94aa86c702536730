"""Sampling with `generate` of transformers."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMode
from transformers.utils import logging

from ..config import PPOConfig
from ..distributed import unsharded
from ..modeling import ActorCritic
from ..sequences import Sequences
from .generator import SAMPLING, Generator, cut_at_stop, stop_token_ids

logger = logging.get_logger(__name__)

# share and number of a call's rows that must have ended before they leave
LEAVING = 0.25
FEWEST = 8
# settings that count or read from the start of a call
RESTARTING = (
    "min_new_tokens",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "guidance_scale",
)


class _Layer(DynamicLayer):
    """Keys and values in memory that is allocated once, for a known length."""

    length = 0  # columns to allocate
    memory: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the next columns of the first rows, and return views of all columns of these
        rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.memory = key_states[:, :, :0], value_states[:, :, :0]
        start = self.get_seq_length()
        size = self.memory[0].shape[2]
        rows, _, new, _ = key_states.shape
        end = start + new
        if end > size:  # zeros, since masked columns that no row has written must be finite
            self.memory = tuple(
                nn.functional.pad(x, (0, 0, 0, max(end, self.length) - size)) for x in self.memory
            )
        for x, states in zip(self.memory, (key_states, value_states)):
            x[:rows, :, start:end] = states
        self.keys, self.values = (x[:rows, :, :end] for x in self.memory)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Move these rows to the front; the next update may be of the first ones only."""
        end = self.get_seq_length()
        for x in self.memory:
            x[: len(indices), :, :end] = x[indices, :, :end]


class _Ends(StoppingCriteria):
    """Ends rows at stop tokens and stop strings of the completion, and a call when a share of
    its rows has ended."""

    def __init__(self, generator: "TransformersGenerator", input_ids: Tensor, rooms: list[int]):
        self.start = input_ids.shape[1]
        self.strings = generator.stop_strings
        self.stops = generator._on_device(list(generator.stop_token_ids))
        self.share = generator.leaving
        self.lengths = generator._on_device(rooms)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        completions = input_ids[:, self.start :]
        done = (completions[:, -1:] == self.stops).any(1)
        if self.strings is not None:  # transformers would also search the prompt
            done |= self.strings(completions, None)
        self.lengths = torch.where(done, self.lengths.clamp(max=completions.shape[1]), self.lengths)
        ended = self.lengths <= completions.shape[1]
        return ended | (ended.sum() >= max(FEWEST, self.share * len(ended)))


class _SampledLogprobs(StoppingCriteria):
    """Keeps log-probs of sampled tokens under the logits that they were sampled from, before
    filters; ends no row."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.logits: Tensor | None = None  # of the step, `[batch, vocabulary]`
        self.steps: list[Tensor] = []  # `[batch]`

    def read(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Keep the logits of a forward of the model, as a hook."""
        self.logits = output.logits[:, -1]

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if self.logits is not None:
            logits = self.logits.float() / self.temperature
            self.steps.append(
                -nn.functional.cross_entropy(logits, input_ids[:, -1], reduction="none")
            )
            self.logits = None
        return torch.zeros_like(input_ids[:, 0], dtype=torch.bool)


class TransformersGenerator(Generator):
    """Samples from the actor-critic's policy."""

    def __init__(
        self,
        actor_critic: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        args: PPOConfig,
        accelerator: Accelerator,
    ):
        self.actor_critic = actor_critic
        self.args = args
        self.accelerator = accelerator
        settings: dict[str, Any] = {
            "max_new_tokens": args.max_completion_length,
            "do_sample": True,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": stop_token_ids(
                tokenizer, actor_critic.policy.generation_config, args.stop_token_ids
            ),
            "use_cache": True,
        } | {name: getattr(args, name) for name in SAMPLING}
        self.config = GenerationConfig(**settings | cast(dict, args.generation_kwargs or {}))
        self.stop_token_ids = frozenset(self.config.eos_token_id)
        try:
            self.stop_strings = None
            if args.stop_strings:
                self.stop_strings = StopStringCriteria(tokenizer, args.stop_strings)
        except ValueError as error:
            raise ValueError(
                f"`stop_strings` are not supported by this tokenizer ({error}); use "
                "`stop_token_ids`."
            ) from error
        self.batch_size = args.per_device_generation_batch_size
        self.cache_argument = cache_argument(actor_critic.trunk)
        why_not = why_not_reused(actor_critic, self.config)
        self.reuses = why_not is None
        if why_not is not None and accelerator.is_main_process:
            logger.warning_once(
                "Sampling keeps rows that ended in the batch, and reads earlier turns again, "
                f"because {why_not}."
            )
        if self.reuses and not any(getattr(self.config, x) for x in RESTARTING):
            self.leaving = LEAVING
        else:
            self.leaving = 1
        # one forward of the policy per token; a static cache may be compiled, and guidance runs a
        # second forward
        self.keeps_logprobs = self.config.get_generation_mode() == GenerationMode.SAMPLE
        self.keeps_logprobs &= not (self.config.cache_implementation or self.config.guidance_scale)

    def awake(self) -> AbstractContextManager[None]:
        """Gather sharded weights: ranks then sample by themselves."""
        return unsharded(self.actor_critic)

    def new_cache(self) -> Cache:
        """Empty cache, if it can be reused."""
        layers = DynamicCache(config=self.actor_critic.policy.get_base_model().config).layers
        return Cache(layers=[_Layer() for _ in layers])

    def _generate_batch(
        self, inputs: tuple[Tensor, Tensor], rooms: list[int], cache: Cache | None = None
    ) -> list[list[int]]:
        """Sample completions of prompts (ids and mask), maybe with keys and values of their first
        tokens.

        Log-probs of their tokens are appended to `sampled_logprobs`, unless that is `None`.
        """
        ids, mask = inputs
        prompt_width = ids.shape[1]
        is_turn = cache is not None
        longest_room = max(rooms)
        ends = _Ends(self, ids, rooms)
        options = dict[str, Any](synced_gpus=False)
        sampled_logprobs = _SampledLogprobs(self.temperature or 1.0)
        options["stopping_criteria"] = StoppingCriteriaList([ends, sampled_logprobs])
        if self.reuses:
            cache = cache or self.new_cache()
            options[str(self.cache_argument)] = cache
            for layer in cache.layers:
                layer.length = prompt_width + longest_room
        config = copy(self.config)
        is_greedy = self.temperature == 0
        config.temperature = 1.0 if is_greedy else self.temperature
        if is_greedy:
            config.top_k = 1
        # rows by place in the cache
        rows = list(range(len(ids)))
        completions = dict[int, list[int]]()
        logprobs: list[list[float]] = [[] for _ in rows]
        while True:
            config.max_new_tokens = prompt_width + longest_room - ids.shape[1]
            begin = ids.shape[1]
            with self.accelerator.autocast(), self._recording(sampled_logprobs):
                ids = self.actor_critic.sample(ids, mask, config, **options)
            self._note_logprobs(sampled_logprobs, rows, ids.shape[1] - begin, logprobs)
            sampled = torch.cat([ends.lengths[:, None], ids[:, prompt_width:]], 1).tolist()
            completions |= {
                row: cut_at_stop(x[:end], self.stop_token_ids)
                for row, (end, *x) in zip(rows, sampled)
            }
            staying = [place for place, (end, *x) in enumerate(sampled) if end > len(x)]
            # a replaced `sample` ends no row
            if cache is None or len(staying) in (0, len(sampled)):
                break
            # rows that ended leave; those of a conversation rest behind the others, for its next
            # turn
            order = staying + (sorted(set(range(len(rows))) - set(staying)) if is_turn else [])
            cache.batch_select_indices(self._on_device(order))
            rows = [rows[place] for place in order]
            index = self._on_device(staying)
            ids = ids[index]
            ends.lengths = ends.lengths[index]
            mask = nn.functional.pad(mask[index], (0, ids.shape[1] - mask.shape[1]), value=1)
        if cache is not None and rows != sorted(rows):
            cache.batch_select_indices(
                self._on_device(sorted(range(len(rows)), key=rows.__getitem__))
            )
        if self.sampled_logprobs is not None:
            self.sampled_logprobs += [
                logprobs[row][: len(completions[row])] for row in sorted(completions)
            ]
        return [completions[row] for row in sorted(completions)]

    @contextmanager
    def _recording(self, sampled_logprobs: _SampledLogprobs) -> Iterator[None]:
        """Let log-probs be kept, if `sampled_logprobs` is not `None`."""
        if self.sampled_logprobs is None:
            yield
            return
        hook = self.actor_critic.policy.get_base_model().register_forward_hook(
            sampled_logprobs.read
        )
        try:
            yield
        finally:
            hook.remove()

    def _note_logprobs(
        self, sampled: _SampledLogprobs, rows: list[int], columns: int, logprobs: list[list[float]]
    ) -> None:
        """Append the log-probs of a call's new columns to those of its rows."""
        if self.sampled_logprobs is None:
            return
        if len(sampled.steps) != columns:  # a replaced `sample`
            self.sampled_logprobs = None
            return
        for row, new in zip(rows, torch.stack(sampled.steps, 1).tolist()):
            logprobs[row] += new
        sampled.steps.clear()

    def has_stopped(self, completion: list[int]) -> bool:
        """Check for a stop token or a stop string at the end."""
        ended = super().has_stopped(completion)
        strings = self.stop_strings
        return ended or (strings is not None and bool(strings(torch.tensor([completion]), None)))

    def generate(self, prompts: list[list[int]], rooms: list[int] | None = None) -> list[list[int]]:
        """Sample a completion for each prompt, of at most so many tokens."""
        size = self.batch_size or len(prompts)
        rooms = rooms or [self.config.max_new_tokens] * len(prompts)
        self.begin_logprobs()
        parts = [slice(start, start + size) for start in range(0, len(prompts), size)]
        return [
            ids for x in parts for ids in self._generate_batch(self._padded(prompts[x]), rooms[x])
        ]

    def begin_logprobs(self) -> None:
        """Begin the log-probs of a call; they are comparable at the temperature of the policy
        only."""
        is_comparable = self.keeps_logprobs and self.temperature == self.args.temperature
        if is_comparable:
            self.sampled_logprobs = []
        else:
            self.sampled_logprobs = None

    def conversation(self) -> "Conversation":
        """Sample turn after turn of the same episodes."""
        return Conversation(self)

    def _padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        pad = self.config.pad_token_id
        device = self.accelerator.device
        batch = Sequences.from_token_ids(prompts, [[]] * len(prompts), pad, device)
        return batch.input_ids, batch.attention_mask

    def _on_device(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers).to(self.accelerator.device, non_blocking=True)


class Conversation:
    """Turns of episodes, with the keys and values of earlier turns; the weights must stay as
    they are."""

    def __init__(self, generator: TransformersGenerator):
        self.generator = generator
        self.cache: Cache | None = None
        self.columns: tuple[Tensor, Tensor]  # ids and mask of the columns of the cache
        self.counts: list[int] = []  # tokens of each row that the cache has

    def __call__(
        self, prompts: list[list[int]], rooms: list[int], rows: list[int]
    ) -> list[list[int]]:
        """Sample the next turn of episodes; `rows` are their numbers in the call before."""
        generator = self.generator
        if not generator.reuses or len(prompts) > (generator.batch_size or len(prompts)):
            return generator.generate(prompts, rooms)
        # 1. Keys and values of the rows that go on, and the tokens that they lack.
        if self.cache is None:
            self.cache = generator.new_cache()
            inputs = generator._padded(prompts)
        else:
            index = generator._on_device(rows)
            self.cache.batch_select_indices(index)
            # padded on the left, so all rows continue in one column
            new = generator._padded([ids[self.counts[row] :] for ids, row in zip(prompts, rows)])
            ids, mask = (torch.cat([old[index], x], 1) for old, x in zip(self.columns, new))
            inputs = ids, mask

        # 2. Sample; the cache then has all columns but the last.
        generator.begin_logprobs()
        turns = generator._generate_batch(inputs, rooms, self.cache)
        width = inputs[0].shape[1]
        # 0 if a replaced `generate` does not use the cache
        end = max(width, self.cache.get_seq_length())
        # the last token of a turn is read again: the next turn follows it if the answer in between
        # has no token
        lengths = [min(len(turn) - 1, end - width) for turn in turns]
        # a column per token of the longest turn: shorter ones leave holes, which the mask hides
        columns = torch.arange(end - width)  # none after turns of one token
        mask = (
            (columns < torch.tensor(lengths)[:, None])
            .long()
            .to(inputs[1].device, non_blocking=True)
        )
        # the cache has their keys and values, so these ids are never read
        self.columns = (
            torch.cat([inputs[0], torch.zeros_like(mask)], 1),
            torch.cat([inputs[1], mask], 1),
        )
        self.counts = [len(ids) + length for ids, length in zip(prompts, lengths)]
        return turns


def cache_argument(trunk: nn.Module) -> str | None:
    """Name of the keys and values in a model's forward, which transformers 5.24 renamed; `None`
    if it takes none."""
    names = inspect.signature(trunk.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def why_not_reused(actor_critic: ActorCritic, config: GenerationConfig) -> str | None:
    """Reason why the cache of `generate` would not hold only a key and a value per token, for
    the next turn."""
    base = actor_critic.policy.get_base_model()
    if not config.use_cache:
        return "`use_cache` is off"
    # `generate` creates a cache that the user configured, and some processors read the ids of
    # earlier turns, which a cache does not have
    unfit = (
        "cache_implementation prefill_chunk_size no_repeat_ngram_size bad_words_ids sequence_bias"
    ).split()
    unfit += ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"]
    given = [name for name in unfit if getattr(config, name)]
    if config.repetition_penalty not in (None, 1):
        given.append("repetition_penalty")
    if given:
        return f"`{given[0]}` is set, which needs another cache, or ids that a cache does not have"
    if base.is_remote_code():
        return "the model's code is its own, which may use a cache differently"
    if cache_argument(actor_critic.trunk) is None:
        return (
            f"the forward of {type(actor_critic.trunk).__name__} takes neither `cache` nor "
            "`past_key_values`"
        )
    layers = DynamicCache(config=base.config).layers
    # e.g. sliding windows, linear attention
    if any(type(layer) is not DynamicLayer for layer in layers):
        return (
            f"the layers of {type(base).__name__} keep another state than keys and values of all "
            "tokens"
        )
    return None
