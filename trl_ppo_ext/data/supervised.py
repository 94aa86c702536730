"""Supervised data of PPO-ptx: texts, completions and chats become token ids, and every rollout gets its rows."""

import json
import warnings
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from jinja2.exceptions import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl import is_conversational

from ..ppo.batch_plan import BatchPlan
from ..sequences import Sequences

FORMS = (("prompt", "completion"), ("messages",), ("text",))
COMPLETION_IDS, PROMPT_IDS = "completion_ids", "prompt_ids"
_TEXT, _CHAT = "text", "a list of chat messages"


class PTXError(ValueError):
    """Raised when a supervised dataset or a row in it cannot be used, before anything is trained on it."""


# ---- which form ----


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise PTXError(
            "The PTX dataset is an `IterableDataset`, but its rows are drawn in random order; take as many as are "
            "needed: `Dataset.from_list(list(stream.take(n)))`."
        )
    if not isinstance(dataset, Dataset):
        raise PTXError(
            f"The PTX dataset must be a `datasets.Dataset`, got {type(dataset).__name__}; `Dataset.from_list(rows)` "
            'makes one of a list of dicts, `dataset["train"]` picks the split of a `DatasetDict`.'
        )
    if not len(dataset):
        raise PTXError("The PTX dataset is empty; give at least one row.")


def _form(columns: list[str]) -> tuple[str, ...]:
    accepted = ", or ".join(" and ".join(f'"{column}"' for column in form) for form in FORMS)
    found = [form for form in FORMS if set(form) <= set(columns)]
    if not found:
        raise PTXError(
            f"The PTX dataset needs the columns {accepted}; it has {sorted(columns)}. "
            '`dataset.rename_column("content", "text")` renames one.'
        )
    if len(found) > 1:
        raise PTXError(
            f"The PTX dataset must have one of the forms {accepted}; it has {sorted(columns)}, which is several. "
            f"`dataset.select_columns({list(found[0])})` keeps one."
        )
    return found[0]


def _kind(entry: Any) -> str | None:
    if isinstance(entry, str):
        return _TEXT
    return _CHAT if isinstance(entry, list) and entry and is_conversational({"messages": entry}) else None


def _check_entries(entries: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    for column, entry in entries.items():
        if entry == [] or (isinstance(entry, str) and not entry.strip()):
            remedy = 'drop the row, or give it as "text"' if column == "prompt" else "drop the row"
            raise PTXError(f'its "{column}" is empty; {remedy}.')
        fixed = {"text": _TEXT, "messages": _CHAT}.get(column)
        needed = fixed or _kind(entries["prompt"]) or f"{_TEXT} or {_CHAT}"
        if _kind(entry) != needed:
            like_prompt = ", as its prompt is" if column == "completion" else ""
            raise PTXError(f'its "{column}" must be {needed}{like_prompt}, got {str(entry)[:80]!r}.')
    if _CHAT in map(_kind, entries.values()) and tokenizer.chat_template is None:
        raise PTXError(
            "it has chat messages, but the tokenizer has no chat template; set `tokenizer.chat_template`, or give "
            "text."
        )


# ---- tokenising ----


def _encode(
    entry: Any, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any], opening: bool = False
) -> list[int]:
    if isinstance(entry, str):
        return tokenizer(entry)["input_ids"]
    try:
        return tokenizer.apply_chat_template(
            entry, add_generation_prompt=opening, tokenize=True, return_dict=True, **template_kwargs
        )["input_ids"]
    except (TemplateError, TypeError, ValueError) as error:  # a template and what prepares its arguments
        raise PTXError(f"the chat template does not take it ({error}); drop or reshape it.") from error


def _with_eos(ids: list[int], entry: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    end = tokenizer.eos_token_id
    if not isinstance(entry, str) or end is None or ids[-1:] == [end]:  # where a chat ends, its template says
        return ids
    return [*ids, end]


def _prompt_length(prompt_ids: list[int], ids: list[int], eos_token_id: int | None) -> int:
    shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(prompt_ids, ids)))
    if prompt_ids[shared:] not in ([], [eos_token_id]):  # some tokenizers end every text with EOS
        warnings.warn(
            "PTX: prompts alone give other tokens than at the beginning of prompt + completion, as tokens merge "
            "where the two meet or the chat template renders them differently. All tokens from the first difference "
            "on are learned. End prompts where a token ends (the space belongs to the completion), or use a chat "
            "template that renders both alike.",
            stacklevel=2,
        )
    return max(shared, 1)  # nothing stands before the first token from which it could be predicted


def _encode_row(
    entries: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int, template_kwargs: dict[str, Any]
) -> tuple[list[int], list[int]]:
    _check_entries(entries, tokenizer)
    whole, *rest = entries.values()
    for entry in rest:
        whole = whole + entry
    ids, prompt_length = _with_eos(_encode(whole, tokenizer, template_kwargs), whole, tokenizer), 1
    if rest:
        opening = _encode(entries["prompt"], tokenizer, template_kwargs, opening=True)
        prompt_length = _prompt_length(opening, ids, tokenizer.eos_token_id)
    learned = max(len(ids) - prompt_length, 0)
    if not learned:
        raise PTXError(
            f"it has {len(ids)} tokens and none to learn after its first {prompt_length}; drop or lengthen it."
        )
    if prompt_length >= max_length:
        raise PTXError(
            f"its prompt has {prompt_length} tokens: cut to max_length={max_length}, nothing is left of the {learned} "
            f"tokens of its completion. Raise `max_length` above {prompt_length}, or drop or shorten the row."
        )
    return ids[:prompt_length], ids[prompt_length:max_length]


def _template_kwargs(row: dict[str, Any], chat_template_kwargs: dict[str, Any]) -> dict[str, Any]:
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise PTXError(f'its "tools" are text, but no JSON ({error}); give JSON or a list of schemas.') from error
    return {"tools": tools, **chat_template_kwargs, **(row.get("chat_template_kwargs") or {})}


def _tokenize_rows(
    rows: dict[str, list],
    indices: list[int],
    form: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    chat_template_kwargs: dict[str, Any],
) -> dict[str, list]:
    encoded: dict[str, list] = {PROMPT_IDS: [], COMPLETION_IDS: []}
    for position, index in enumerate(indices):
        row = {column: values[position] for column, values in rows.items()}
        entries = {column: row[column] for column in form}
        try:
            template_kwargs = _template_kwargs(row, chat_template_kwargs)
            prompt_ids, completion_ids = _encode_row(entries, tokenizer, max_length, template_kwargs)
        except PTXError as error:
            raise PTXError(f"Row {index} of the PTX dataset: {error}") from error.__cause__
        encoded[PROMPT_IDS].append(prompt_ids)
        encoded[COMPLETION_IDS].append(completion_ids)
    return encoded


def tokenize_ptx(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset:
    """Tokenise supervised rows in one of TRL's forms as `SFTTrainer` does, and check every row.

    `"text"`, and `"messages"` with the chat template: every token but the first is learned. `"prompt"` and
    `"completion"`, both text or both messages: the completion is learned; it begins where the tokens of the prompt
    alone and of both together part, so a token merged across the boundary is learned. Text gets an EOS at its end.
    The columns `"tools"` and `"chat_template_kwargs"` go to the chat template of their row.
    """
    _check_dataset(dataset)
    form = _form(dataset.column_names)
    if max_length < 2:
        raise PTXError(f"max_length={max_length} leaves nothing to learn after the first token; it must be above 1.")
    tokenize = partial(
        _tokenize_rows,
        form=form,
        tokenizer=tokenizer,
        max_length=max_length,
        chat_template_kwargs=chat_template_kwargs or {},
    )
    # one process fills the cache that the others then read
    with PartialState().main_process_first():
        return dataset.with_format(None).map(
            tokenize, batched=True, with_indices=True, remove_columns=dataset.column_names, desc="Tokenizing PTX data"
        )


# ---- drawing ----


class PTXSampler:
    """Draw the supervised rows of each rollout.

    All processes together walk through one random permutation of the dataset after the other: no row repeats before
    all were drawn. A draw depends on the seed and the rollout's number alone, so there is no state to save, and a run
    that stopped goes on with the rows it would have had.

    Source: https://huggingface.co/papers/2203.02155
    """

    def __init__(
        self,
        dataset: Dataset,
        rows_per_process: int,
        process_index: int,
        num_processes: int,
        seed: int,
        pad_token_id: int,
        device: torch.device | str,
    ):
        self.dataset = dataset
        self.rows_per_process = rows_per_process
        self.process_index = process_index
        self.num_processes = num_processes
        self.seed = seed
        self.pad_token_id = pad_token_id
        self.device = device

    @classmethod
    def from_config(cls, dataset: Dataset, plan: BatchPlan, args: Any, pad_token_id: int) -> "PTXSampler":
        """As many rows for each rollout as it has completions."""
        return cls(
            dataset,
            plan.completions_per_process,
            args.process_index,
            args.world_size,
            args.seed if args.data_seed is None else args.data_seed,
            pad_token_id,
            args.device,
        )

    def _permutation(self, number: int) -> Tensor:
        return torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + number))

    def _rows(self, rollout: int) -> list[int]:
        start = (rollout * self.num_processes + self.process_index) * self.rows_per_process
        size, end = len(self.dataset), start + self.rows_per_process
        first = start // size
        order = torch.cat([self._permutation(number) for number in range(first, (end - 1) // size + 1)])
        return order[start - first * size : end - first * size].tolist()

    def draw(self, rollout: int) -> Sequences:
        """Take the rows of a rollout."""
        rows = self.dataset[self._rows(rollout)]
        return Sequences.from_token_ids(rows[PROMPT_IDS], rows[COMPLETION_IDS], self.pad_token_id, self.device)
