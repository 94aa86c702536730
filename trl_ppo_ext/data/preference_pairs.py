"""Preference pairs as a reward model reads them: rows checked, prompts and answers joined."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from trl import apply_chat_template, is_conversational


class Pairs(NamedTuple):
    """Chosen answers, then rejected ones, each with its prompt."""

    sequences: list  # texts or conversations
    lengths: list[int]  # tokens of each answer
    too_long: int  # pairs skipped, since one of the two exceeds the model's context


def encode_pairs(rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, context: int) -> Pairs:
    """Check rows, join prompts and answers, and count the tokens of answers."""
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
            both = [text.removesuffix(end) for text in both]  # the scorer adds it, as RewardTrainer does
        try:
            ids = [_token_ids(sequence, tokenizer) for sequence in both]
            # without a prompt, answers begin where the two begin to differ
            openings = [_token_ids(prompt, tokenizer)] * 2 if prompt else ids[::-1]
        except TemplateError as error:
            raise ValueError(f"The chat template does not take pair {index}: {error}; drop or reshape it.") from error
        if max(map(len, ids)) <= context:
            for side, sequence, own, opening in zip(sides, both, ids, openings):
                shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, opening)))
                side.append((sequence, len(own) - shared))
    if not sides[0]:
        raise ValueError(
            f"None of the {len(rows)} pairs fits in the model's context of {context} tokens; shorten them."
        )
    sequences, lengths = zip(*sides[0], *sides[1])
    return Pairs(list(sequences), list(lengths), len(rows) - len(sides[0]))


def _kind(entry: Any) -> str | None:
    if isinstance(entry, str):
        return "text"
    return "messages" if is_conversational({"messages": entry}) else None


def _check_row(row: dict[str, Any], index: int, kind: str | None) -> None:
    if not {"chosen", "rejected"} <= row.keys():
        raise ValueError(
            f"A preference dataset needs the columns 'chosen' and 'rejected'; this one has {sorted(row)}. Rename its "
            "columns, or give another dataset."
        )
    kinds = {name: _kind(row[name]) for name in ("prompt", "chosen", "rejected") if row.get(name) is not None}
    if kind is None or set(kinds.values()) != {kind} or not {"chosen", "rejected"} <= kinds.keys():
        shown = {name: found or str(row[name])[:40] for name, found in kinds.items()}
        raise ValueError(
            f"Pair {index} has {shown or 'nothing'}; 'chosen', 'rejected' and 'prompt' must all be text, or all be "
            "lists of messages with a role, in every row. Drop the prompt if the others are whole conversations."
        )


def _token_ids(sequence: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize as the scorer and TRL's `RewardTrainer` do."""
    if isinstance(sequence, str):
        return tokenizer(sequence + (tokenizer.eos_token or ""))["input_ids"]
    text = apply_chat_template({"messages": sequence}, tokenizer)["text"]
    return tokenizer(text, add_special_tokens=False)["input_ids"]
