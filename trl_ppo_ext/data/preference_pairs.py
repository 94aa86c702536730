"""Preference pairs as a reward model reads them: rows checked, prompts and completions put together."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
EVALUATION_SPLITS = ("test", "validation", "train")  # in the order in which they are looked for


class Pairs(NamedTuple):
    """What is scored: all that was chosen, then all that was rejected."""

    tokenizer: "PreTrainedTokenizerBase"  # tokenizer of the classifier
    sequences: list  # prompt and completion in one, as text or messages
    completion_ids: list[list[int]]  # token ids of each sequence after its prompt
    too_long: int  # pairs that were left out, as one of the two is longer than the model's context


def load_rows(
    dataset: str | Sequence[dict[str, Any]], split: str | None, max_pairs: int | None
) -> list[dict[str, Any]]:
    """Read rows from a file, the Hub or memory, spread evenly over the dataset."""
    loaded = _load(dataset, split) if isinstance(dataset, str) else dataset
    if not len(loaded):
        raise ValueError(f"{_named(dataset)} has no rows; give at least one pair.")
    kept = min(max_pairs or len(loaded), len(loaded))
    # the rows of one source often stand side by side: every n-th row gives all of them their share
    return [loaded[index * len(loaded) // kept] for index in range(kept)]


def _load(dataset: str, split: str | None) -> Any:
    from datasets import get_dataset_split_names, load_dataset
    from datasets.exceptions import DatasetGenerationError

    file_format = FILE_FORMATS.get(Path(dataset).suffix)
    try:
        if file_format is not None:  # all of a file is its split "train"
            return load_dataset(file_format, data_files=dataset, split=split or "train")
        if split is None:
            names = get_dataset_split_names(dataset)
            split = next((name for name in EVALUATION_SPLITS if name in names), None)
            if split is None:
                raise ValueError(f"{dataset} has none of the splits {EVALUATION_SPLITS}; pick one of {names}.")
        return load_dataset(dataset, split=split)
    except DatasetGenerationError as error:
        raise ValueError(f"{dataset} cannot be read: {error.__cause__ or error}") from error


def _named(dataset: Any) -> str:
    return dataset if isinstance(dataset, str) else "The dataset"


def _kind(entry: Any) -> str | None:
    if isinstance(entry, str):
        return "text"
    messages = isinstance(entry, list) and entry and all(isinstance(m, dict) and "role" in m for m in entry)
    return "messages" if messages else None


def _check_row(row: dict[str, Any], index: int, kind: str | None) -> None:
    missing = {"chosen", "rejected"} - row.keys()
    if missing:
        raise ValueError(
            f"A preference dataset needs the columns 'chosen' and 'rejected'; this one has {sorted(row)}. Rename its "
            "columns, or give another dataset."
        )
    kinds = {name: _kind(row[name]) for name in ("prompt", "chosen", "rejected") if row.get(name) is not None}
    if kind is None or set(kinds.values()) != {kind} or not {"chosen", "rejected"} <= kinds.keys():
        given = {name: found or str(row[name])[:40] for name, found in kinds.items()}
        raise ValueError(
            f"Pair {index} has {given or 'nothing'}; 'chosen', 'rejected' and 'prompt' must all be text, or all be "
            "lists of messages with a role, in every row. Drop the prompt where the others hold whole conversations."
        )


def _token_ids(sequence: Any, tokenizer: "PreTrainedTokenizerBase", index: int) -> list[int]:
    """Token ids as the scorer, and TRL's `RewardTrainer`, make them."""
    from jinja2.exceptions import TemplateError
    from trl import apply_chat_template

    if isinstance(sequence, str):
        return tokenizer(sequence + (tokenizer.eos_token or ""))["input_ids"]
    try:
        text = apply_chat_template({"messages": sequence}, tokenizer)["text"]
    except TemplateError as error:
        raise ValueError(f"The chat template does not take pair {index}: {error}; drop or reshape it.") from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _shared(ids: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(ids, other)))


def encode_pairs(rows: Sequence[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", context: int) -> Pairs:
    """Check rows, put prompts and completions together, and find what the completions are.

    Without a prompt, the completions begin where `chosen` and `rejected` begin to differ.
    """
    kind = _kind(rows[0].get("chosen"))
    if kind == "messages" and tokenizer.chat_template is None:
        raise ValueError(
            "The pairs are chat messages, but the reward model's tokenizer has no chat template; save it with the one "
            "it was trained with, or give the pairs as text."
        )
    end = tokenizer.eos_token or ""
    sides: tuple[list, list] = ([], [])
    for index, row in enumerate(rows):
        _check_row(row, index, kind)
        prompt = row.get("prompt") or ("" if kind == "text" else [])
        both = [prompt + row[name] for name in ("chosen", "rejected")]
        if kind == "text":
            both = [text.removesuffix(end) for text in both]  # the scorer adds it; RewardTrainer does not add a second
        ids = [_token_ids(sequence, tokenizer, index) for sequence in both]
        if max(map(len, ids)) > context:
            continue
        openings = [_token_ids(prompt, tokenizer, index)] * 2 if prompt else ids[::-1]
        for side, sequence, own, opening in zip(sides, both, ids, openings):
            side.append((sequence, own[_shared(own, opening) :]))
    if not sides[0]:
        raise ValueError(
            f"None of the {len(rows)} pairs fits in the model's context of {context} tokens; shorten them."
        )
    sequences, completion_ids = zip(*sides[0], *sides[1])
    return Pairs(tokenizer, list(sequences), list(completion_ids), len(rows) - len(sides[0]))
