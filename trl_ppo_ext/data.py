"""Prompts: datasets by name, token ids of a `"prompt"` column of text or chat messages, and
rollouts of rows."""

import inspect
import itertools
import json
import math
import os
import sys
from collections import UserList
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from trl import is_conversational

from . import __version__
from .batch_plan import BatchPlan
from .config import PRIVILEGED_STATE, PPOConfig
from .redaction import shortened, shown
from .sequences import ROLES
from .text import delimiter_in, encode_chat, encode_text, prefill, text_only, without_none

logger = logging.get_logger(__name__)

PROMPT_IDS = "_prompt_ids"  # no user's column has these names
OTHER_PROMPT_IDS = {role: f"_{role}_prompt_ids" for role in ROLES}
TOKEN_COLUMNS = {PROMPT_IDS} | set(OTHER_PROMPT_IDS.values())
# keyword arguments of every reward function, besides the dataset's columns
REWARD_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
# of a row that has none: an environment writes it
NO_PROMPT: list[dict] = [{"role": "user", "content": ""}]

# arguments of `apply_chat_template` that are none of a template
OF_TOKENIZING = frozenset(
    "conversation tokenize return_dict return_tensors padding truncation max_length "
    "tokenizer_kwargs return_assistant_tokens_mask".split()
)
CHECKED_FOR_DELIMITERS = 1000  # rows of a dataset

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_REMEDY = (
    "Name a dataset on the Hub (and its config), a .json, .jsonl, .csv or .parquet file, or a "
    "directory."
)


# ---- datasets by name ----


def load_splits(
    name: str,
    config: str | dict[str, Any] | None = None,
    streaming: bool = False,
    argument: str = "dataset_name",
) -> Mapping[str, Any]:
    """Load all splits of a dataset."""
    path = Path(name)
    # a name that can only be a path is not looked up on the Hub
    suffixes = [*FILE_FORMATS, ".txt"]
    is_path = name.startswith(("/", "./", "../")) or path.suffix in suffixes
    if is_path and not path.exists():
        raise ValueError(
            f"`{argument}={name!r}` does not exist; the working directory is {os.getcwd()}. "
            f"{_REMEDY}"
        )
    if path.is_file() and path.suffix not in FILE_FORMATS:
        raise ValueError(
            f"`{argument}={name!r}` must be a file of the types {', '.join(FILE_FORMATS)}; convert "
            "it."
        )
    saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    if config is not None and (saved or path.is_file()):
        raise ValueError(
            f"`dataset_config={config!r}` selects a part of a dataset on the Hub; remove it for "
            f"{name}."
        )
    if saved and streaming:
        raise ValueError(
            f"`dataset_streaming=True` does not support {name}, written by `save_to_disk`; remove "
            "it."
        )
    try:
        if saved:
            loaded = load_from_disk(name)
            if isinstance(loaded, Mapping):
                return loaded
            return {"train": loaded}
        if path.is_file():
            return load_dataset(FILE_FORMATS[path.suffix], data_files=name, streaming=streaming)
        selection: dict[str, Any] = config if isinstance(config, dict) else {"name": config}
        return load_dataset(name, **selection, streaming=streaming)
    except DatasetGenerationError as error:
        raise ValueError(
            f"`{argument}={name!r}` cannot be read: {error.__cause__ or error}"
        ) from error
    # missing, unreachable, of several configs, or a script
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`{argument}={name!r}` cannot be loaded ({shortened(error)}). {_REMEDY}"
        ) from error


def get_split(splits: Mapping[str, Any], split: str, argument: str) -> Any:
    """Select a split by name."""
    if split not in splits:
        raise ValueError(
            f"The dataset has no split {split!r}; set `{argument}` to one of {sorted(splits)}."
        )
    return splits[split]


def spread_indices(length: int, count: int) -> list[int]:
    """Row numbers at equal distances, so that a dataset sorted by source is sampled evenly."""
    count = min(count, length)
    return [index * length // count for index in range(count)]


def spread_rows(dataset: Any, count: int) -> Any:
    """Select rows at equal distances, of a stream the first ones."""
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream:
        return dataset.take(count)
    return dataset.select(spread_indices(len(dataset), count))


def as_dataset(dataset: Any) -> Any:
    """Turn a list of rows, or a dataset of torch or of one's own that has a length, into a
    `datasets.Dataset`."""
    if isinstance(dataset, Dataset | Mapping) or not hasattr(dataset, "__len__"):
        return dataset
    try:
        rows = [dataset[index] for index in range(len(dataset))]
    except (LookupError, TypeError):  # no rows by number, e.g. a DataFrame
        return dataset
    is_rows = all(isinstance(row, dict) for row in rows)
    if is_rows:
        return Dataset.from_list(rows, on_mixed_types="use_json")
    return dataset


# ---- token ids of prompts ----


class PromptError(ValueError):
    """Raised for an unusable dataset or row, before training."""


def described(prompt: Any) -> str:
    """One line of a prompt, for an error message."""
    return shortened(repr(prompt), 200)


def message_text(message: dict[str, Any]) -> str:
    """Content of a chat message, with its tool calls."""
    parts = message.get("content") or []
    if isinstance(parts, str):
        texts = [parts]
    else:
        texts = [part.get("text") or f"[{part.get('type')}]" for part in parts]
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    called = [f"{call.get('name')}({json.dumps(call.get('arguments'))})" for call in calls]
    return " ".join(texts + called).strip()


def as_text(entry: Any) -> str:
    """A prompt or completion as text, with a line per message."""
    if isinstance(entry, list) and all(isinstance(message, dict) for message in entry):
        return "\n".join(f"{message.get('role')}: {message_text(message)}" for message in entry)
    return str(entry)


def encode(
    prompt: Any, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict, opening: bool = True
) -> list[int]:
    """Token ids of a prompt, with `opening` for an answer; what others wrote in it is marked."""
    if isinstance(prompt, str):
        try:
            start, ids, end = encode_text(prompt, tokenizer)
        except (TypeError, ValueError) as error:  # e.g. an unpaired surrogate
            raise PromptError(
                f"The tokenizer cannot read {described(prompt)}: {shortened(error)}"
            ) from error
        if opening:
            return start + ids
        return start + ids + end
    if not (isinstance(prompt, list) and is_conversational({"prompt": prompt[:1]})):
        raise PromptError(
            f"A prompt must be text or a list of chat messages, got {described(prompt)}."
        )
    for place, message in enumerate(prompt):
        if isinstance(message, dict):
            fields = message
        else:
            fields = {}
        # templates write None as "None"
        kinds: Any = str | list
        if fields.get("tool_calls"):
            kinds = str | list | None
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), kinds):
            raise PromptError(
                f'Message {place} must be a mapping with a "role" and a "content" that are text, '
                f"got {described(message)}."
            )
    if tokenizer.chat_template is None and "chat_template" not in template_kwargs:
        raise PromptError(
            "The row has chat messages, but the tokenizer has no chat template; set "
            "`tokenizer.chat_template`, or use text."
        )
    parts = [message["content"] for message in prompt if isinstance(message.get("content"), list)]
    if any(
        not (isinstance(part, dict) and part.get("type") == "text")
        or not isinstance(part.get("text"), str)
        for content in parts
        for part in content
    ):
        raise PromptError(
            "Parts of a message must be of the type 'text' (images are not supported), got "
            f"{described(parts)}."
        )
    if opening and prefill(prompt):
        ends = {"continue_final_message": True}
    else:
        ends = {"add_generation_prompt": opening}
    kwargs = ends | template_kwargs
    try:
        ids = encode_chat(prompt, tokenizer, kwargs)
        if parts:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, **kwargs)
        else:
            text = ""
    except Exception as error:  # a template raises anything, e.g. if roles do not alternate
        if not parts:
            raise PromptError(
                f"The chat template fails with {type(error).__name__} ({shortened(error)}) for "
                f"{described(prompt)}."
            ) from error
        text = str(parts)
    is_lost = any(part["text"].strip() not in text for content in parts for part in content)
    # the template reads text only: it writes parts as Python does, or nothing
    if is_lost or any(str(part) in text for part in parts):
        return encode(list(map(text_only, prompt)), tokenizer, template_kwargs, opening)
    return ids


def warn_of_other_tools(tools: Any) -> None:
    """Tell that tools of a row are not shown, if it has any."""
    if tools:
        logger.warning_once(
            "The tools of a row are not shown: only those of the trainer, or of the row's "
            "environment, can be called. Remove the column `tools`, or pass them as `tools`."
        )


def row_template_kwargs(row: dict, template_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments of a row's chat template, with its columns `"tools"` and
    `"chat_template_kwargs"`."""
    tools = row.get("tools") or None
    try:
        if isinstance(tools, str):
            tools = json.loads(tools)
        else:
            tools = without_none(tools)
    except ValueError as error:
        raise PromptError(f'its "tools" must be JSON or a list of schemas ({error}).') from error
    of_row = row.get("chat_template_kwargs") or {}
    if isinstance(of_row, str):
        with suppress(ValueError):  # text that is not JSON raises below
            of_row = json.loads(of_row) or {}
    if not isinstance(of_row, dict):
        raise PromptError(
            "`chat_template_kwargs` must be a mapping or its JSON, got "
            f"{shown('chat_template_kwargs', of_row)}; use e.g. "
            "'{\"enable_thinking\": false}'."
        )
    of_row = without_none(of_row)
    kwargs = {"tools": tools, **(template_kwargs or {}), **of_row}
    if callable_tools := (template_kwargs or {}).get("tools"):
        warn_of_other_tools(tools or of_row.get("tools"))
        kwargs["tools"] = callable_tools
    if reserved := kwargs.keys() & OF_TOKENIZING:
        raise PromptError(
            "`chat_template_kwargs` must be arguments of the chat template, got "
            f"{sorted(reserved)} of `apply_chat_template`, which the trainer sets itself; remove "
            "them."
        )
    return kwargs


def prompt_limit(
    max_completion_length: int,
    context_length: int | None,
    max_prompt_length: int | None,
    reason: str = "",
) -> int:
    """Tokens of the longest prompt that fits."""
    limit = sys.maxsize if context_length is None else context_length - max_completion_length
    if limit < 1:
        raise PromptError(
            f"{max_completion_length=} leaves no room for a prompt in the model's context of "
            f"{context_length} tokens{reason}; lower it."
        )
    return min(limit, max_prompt_length or limit)


def _columns(dataset: Dataset | IterableDataset) -> list[str]:
    """Names of the columns; a stream may know only those of its rows."""
    return dataset.column_names or list(next(iter(dataset), {}))


def _check_columns(dataset: Any, name: str, others: Mapping[str, str]) -> None:
    if not isinstance(dataset, Dataset | IterableDataset):
        got = type(dataset).__name__
        if isinstance(dataset, list) and dataset:
            got += f" of {type(dataset[0]).__name__}"
        raise TypeError(
            f"`{name}` must be a `datasets.Dataset`, an `IterableDataset` or a list of dicts, got "
            f"{got}; `Dataset.from_pandas`, `Dataset.from_dict` or "
            "`IterableDataset.from_generator` makes one."
        )
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise PromptError(
            f"`{name}` has a transform (`set_transform`), which tokenizing skips; use "
            "`dataset.map`."
        )
    columns = _columns(dataset)
    if not columns or (isinstance(dataset, Dataset) and not len(dataset)):
        raise PromptError(f"`{name}` is empty; PPO needs at least one prompt.")
    if "prompt" not in columns:
        raise PromptError(
            f'`{name}` needs a column "prompt" (text, or a list of chat messages), got '
            f'{sorted(columns)}; `dataset.rename_column("question", "prompt")` or a `map_function` '
            "of `trl-ppo` makes one."
        )
    for role, column in others.items():
        if column not in columns:
            if role == "critic":
                setting = "critic_kwargs['prompt']"
            else:
                setting = f"{role}_prompt"
            raise PromptError(
                f"`{name}` needs the column {column!r} of `{setting}`, got {sorted(columns)}."
            )
    for column in set(REWARD_ARGUMENTS) & set(columns):
        raise PromptError(
            f"`{name}` has a column {column!r}, but reward functions have an argument of that "
            "name; rename it (`dataset.rename_column`), or drop it."
        )
    for column in {"image", "images"} & set(columns):
        raise PromptError(
            f"`{name}` has a column {column!r}, but images are not supported; drop it "
            f"(`dataset.remove_columns({column!r})`) to train on the text."
        )


def _ids_of(
    prompt: Any, row: dict, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any] | None
) -> list[int]:
    """Token ids of a row's prompt, or of another role's, with these keyword arguments of the
    chat template."""
    is_text = isinstance(prompt, str)
    if is_text and kwargs:
        logger.warning_once("`chat_template_kwargs` has no effect on prompts of text.")
    if is_text:
        template_kwargs = {}
    else:
        template_kwargs = row_template_kwargs(row, kwargs)
    if prompt == []:
        ids = []
    else:
        ids = encode(without_none(prompt), tokenizer, template_kwargs)
    if is_text and not ids:
        ids = [x for x in (tokenizer.bos_token_id, tokenizer.eos_token_id) if x is not None][:1]
    if not ids:
        raise PromptError("The prompt is empty; drop it, or give it at least one token.")
    return ids


def _warn_of_delimiters(
    prompt: Any,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any] | None,
) -> None:
    """Warn if a message spells a delimiter, which the model reads as one: it may hold a rendered
    chat."""
    if not (
        isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
    ):
        return  # text is as its script has rendered it, and what is no prompt has its own error
    delimiter = delimiter_in(
        without_none(prompt), tokenizer, (template_kwargs or {}).get("chat_template")
    )
    if delimiter is not None:
        logger.warning_once(
            f"A message of `{name}` spells {delimiter!r}, a delimiter of the chat template, and "
            "the model reads it as one, also when it is served. If the message holds a rendered "
            "chat, pass that as a prompt of text, or its messages; otherwise remove the delimiter."
        )


def with_prompts(dataset: Any, tokenizer: PreTrainedTokenizerBase, rows: int) -> Any:
    """Add empty prompts to a dataset without any, or make one of some rows, for environments
    that write prompts."""
    if tokenizer.chat_template:
        prompt = NO_PROMPT
    else:
        prompt = tokenizer.bos_token or tokenizer.eos_token
    if dataset is None:
        if rows:
            return Dataset.from_dict({"prompt": [prompt] * rows})
        return None
    dataset = as_dataset(dataset)
    if "prompt" in _columns(dataset):
        return dataset
    return dataset.map(lambda row: {"prompt": row.get("prompt") or prompt})


def tokenize_prompts(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    args: PPOConfig,
    context_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    vocab_size: int | None = None,
    reason: str = "",  # for the length of the context
) -> Dataset | IterableDataset:
    """Add the token ids of each prompt, and of what other roles read in its place, and check
    every prompt."""
    # the functions below must not hold `args`: the cache of `datasets` would depend on every field
    overlong = args.overlong_prompts
    others = {
        role: column for role, column in args.other_prompts.items() if column != PRIVILEGED_STATE
    }
    max_prompt_length = args.max_prompt_length
    max_completion_length = args.max_completion_length
    dataset = as_dataset(dataset)
    _check_columns(dataset, name, others)
    dataset = dataset.with_format(None)  # token ids are lists
    limit = prompt_limit(max_completion_length, context_length, max_prompt_length, reason)
    room = f"the context of {context_length}{reason} minus {max_completion_length=} leaves {limit}"
    if limit == max_prompt_length:
        room = f"{max_prompt_length=}"
    room_for_others = prompt_limit(max_completion_length, context_length, None)
    kinds: set[type] = set()  # of the prompts so far
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream:  # outside of `map`, which a cache may skip
        some_rows = dataset.select(spread_indices(len(dataset), CHECKED_FOR_DELIMITERS))
        for prompt in some_rows["prompt"]:
            _warn_of_delimiters(prompt, name, tokenizer, chat_template_kwargs)

    def encode_row(row: dict) -> dict[str, list]:
        prompt = row.get("prompt")
        ids = _ids_of(prompt, row, tokenizer, chat_template_kwargs)
        if is_stream:
            _warn_of_delimiters(prompt, name, tokenizer, chat_template_kwargs)
        if vocab_size is not None and max(ids) >= vocab_size:
            raise PromptError(
                f"The prompt has the token {tokenizer.convert_ids_to_tokens(max(ids))!r} with id "
                f"{max(ids)}, but the model has {vocab_size} tokens; use its tokenizer."
            )
        kinds.add(type(prompt))
        if len(kinds) > 1:  # completions are all text or all messages
            raise PromptError(
                f"Prompts must be all text or all chat messages, got {described(prompt)}."
            )
        if len(ids) > limit and overlong == "error":
            raise PromptError(
                f"The prompt has {len(ids)} tokens, but {room}. Set `overlong_prompts='truncate'`, "
                "or drop it (`dataset.filter`)."
            )
        encoded = {PROMPT_IDS: ids[-limit:] if overlong == "truncate" else ids}
        for role, column in others.items():
            try:
                ids = _ids_of(row.get(column), row, tokenizer, chat_template_kwargs)
            except PromptError as error:
                raise PromptError(
                    f"The {role}'s prompt, in the column {column!r}: {error}"
                ) from error
            if len(ids) > room_for_others:
                raise PromptError(
                    f"The {role}'s prompt has {len(ids)} tokens, but its context{reason} has room "
                    f"for {room_for_others}; shorten it."
                )
            encoded[OTHER_PROMPT_IDS[role]] = ids
        return encoded

    # the version invalidates what another one cached: `datasets` identifies `encode` by its name
    def encode_numbered(row: dict, index: int, version: str = __version__) -> dict[str, list]:
        try:
            return encode_row(row)
        except PromptError as error:
            raise PromptError(f"Row {index} of `{name}`: {error}") from error.__cause__

    with PartialState().main_process_first():  # one process fills the cache, the others read it
        return dataset.map(encode_numbered, with_indices=True)


# ---- rollouts of prompts ----


class Rows(UserList):
    """Collator of [`PPOTrainer`]: a batch without tensors, which is neither pinned nor moved."""

    def pin_memory(self) -> "Rows":
        """Return itself, because torch would traverse every token id in Python."""
        return self


@dataclass(eq=False)
class RolloutSampler(Sampler[int]):
    """Row numbers of prompts, rollout by rollout, each repeated for the micro-batches that the
    Trainer draws.

    An incomplete last rollout is filled from the next permutation: no prompt is dropped, and a
    dataset may be smaller than a rollout. The epoch follows from the optimizer steps so far, so
    that resuming needs no state.
    """

    num_rows: int
    plan: BatchPlan
    shuffle: bool
    seed: int
    steps: Callable[[], tuple[int, int]] = lambda: (0, 1)  # returns (global_step, max_steps)

    def __post_init__(self):
        self.rollouts = -(-self.num_rows // self.plan.prompts)  # per epoch

    def __len__(self) -> int:
        return self.rollouts * self.plan.completions * self.plan.micro_steps

    def order(self, epoch: int) -> list[int]:
        """Row numbers of an epoch, repeated for completions."""
        wanted = self.rollouts * self.plan.prompts
        generator = torch.Generator().manual_seed(self.seed + epoch)
        permuted: Callable = torch.arange
        if self.shuffle:
            permuted = partial(torch.randperm, generator=generator)
        passes = [permuted(self.num_rows) for _ in range(-(-wanted // self.num_rows))]
        return torch.cat(passes)[:wanted].repeat_interleave(self.plan.num_generations).tolist()

    def rollout(self, step: int) -> list[int]:
        """Row numbers of the rollout that begins at an optimizer step, repeated for completions."""
        epoch, number = divmod(step // self.plan.optimizer_steps, self.rollouts)
        return self.order(epoch)[number * self.plan.completions :][: self.plan.completions]

    def __iter__(self) -> Iterator[int]:
        global_step, max_steps = self.steps()
        if 0 < max_steps <= global_step:
            return
        order = self.order(global_step // (self.rollouts * self.plan.optimizer_steps))
        for start in range(0, len(order), self.plan.completions):
            for _ in range(self.plan.micro_steps):
                yield from order[start : start + self.plan.completions]


def weighted_rows(curriculum: Callable, played: Tensor, plan: BatchPlan, seed: int) -> list[int]:
    """Row numbers of a rollout, each as often as its share of the weights of a curriculum, up to
    rounding."""
    episodes, sums = played.clone()
    returned = curriculum(episodes, sums / episodes.clamp(min=1))
    if inspect.iscoroutine(returned):
        returned.close()
    try:
        weights = torch.as_tensor(returned, device="cpu").double()
        is_valid = (
            weights.shape == episodes.shape
            and bool((weights >= 0).all())
            and 0 < weights.sum() < math.inf
        )
    except (TypeError, ValueError, RuntimeError):  # e.g. None
        weights = returned
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"`curriculum` must return a weight of at least 0 for each of the {len(episodes)} "
            f"rows, and not only zeros, got {type(returned).__name__}: {shortened(weights)}."
        )
    generator = torch.Generator().manual_seed(seed)
    # neighbors may be alike, and are drawn evenly
    order = torch.randperm(len(weights), generator=generator)
    ends = weights[order].cumsum(0)
    # float32 could round up to the end
    first = torch.rand((), generator=generator, dtype=torch.float64)
    places = (torch.arange(plan.prompts, dtype=torch.float64) + first) / plan.prompts * ends[-1]
    return (
        order[torch.searchsorted(ends, places, right=True)]
        .repeat_interleave(plan.num_generations)
        .tolist()
    )


class StreamedRows:
    """Rows of a stream by number, read once and in order; its beginning fills a rollout within
    which it ends."""

    def __init__(self, dataset: IterableDataset, prompts_per_rollout: int):
        self.dataset = dataset
        self.prompts_per_rollout = prompts_per_rollout
        self._rows = self._read()
        self._next = 0

    def _read(self) -> Iterator[dict]:
        for epoch in itertools.count():
            self.dataset.set_epoch(epoch)
            rows = 0
            for row in self.dataset:
                yield row
                rows += 1
            if rows == 0:
                raise PromptError("The training stream has no rows; PPO needs at least one prompt.")
            again = itertools.chain.from_iterable(itertools.repeat(self.dataset))
            yield from itertools.islice(again, -rows % self.prompts_per_rollout)

    def __getitems__(self, numbers: list[int]) -> list[dict]:
        """Rows of increasing numbers; named as in a `datasets.Dataset`, which is read alike."""
        rows = []
        for number in numbers:
            rows.append(next(itertools.islice(self._rows, number - self._next, None)))
            self._next = number + 1
        return rows
