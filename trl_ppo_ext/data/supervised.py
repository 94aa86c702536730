"""Supervised data of PPO-ptx: texts, completions and chats as token ids, and the rows of each rollout."""

from itertools import takewhile
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..config import PPOConfig
from ..ppo.batch_plan import BatchPlan
from ..sequences import Sequences
from .prompts import PROMPT_IDS, PromptError, described, encode, map_rows, row_template_kwargs

logger = logging.get_logger(__name__)

FORMS = (("prompt", "completion"), ("messages",), ("text",))
COMPLETION_IDS = "completion_ids"
_DIFFERENT_PROMPT = (
    "PTX: the tokens of a prompt are not those at the beginning of prompt + completion, because tokens merge or the "
    "chat template renders it differently. All tokens from the first difference are learned. End prompts at the end "
    "of a token (spaces belong to the completion), or change the template."
)


def _form(dataset: Any) -> tuple[str, ...]:
    """Supervised columns of a dataset: one of `FORMS`."""
    if not isinstance(dataset, Dataset):
        raise PromptError(
            "The PTX dataset must be a `datasets.Dataset`, because its rows are drawn at random, got "
            f"{type(dataset).__name__}; use `Dataset.from_list(rows)` for a list of dicts, "
            '`Dataset.from_list(list(stream.take(n)))` for a stream, `dataset["train"]` for a `DatasetDict`.'
        )
    if not len(dataset):
        raise PromptError("The PTX dataset is empty; pass at least one row.")
    columns = dataset.column_names
    forms = [form for form in FORMS if set(form) <= set(columns)]
    if len(forms) == 1:
        return forms[0]
    remedy = f"select_columns({list(forms[0])})" if forms else "rename_column('content', 'text')"
    raise PromptError(
        'The PTX dataset needs the columns "prompt" and "completion", or "messages", or "text", and only one of these '
        f"forms, got {sorted(columns)}; use e.g. `dataset.{remedy}`."
    )


def tokenize_ptx(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset:
    """Tokenize supervised rows in one of TRL's forms as `SFTTrainer` does, and check every row.

    All tokens but the first of `"text"` and `"messages"` are learned, and only the completion of `"prompt"` and
    `"completion"`. The columns `"tools"` and `"chat_template_kwargs"` are passed to the chat template of their row.
    """
    form, eos = _form(dataset), tokenizer.eos_token_id

    def encode_row(row: dict) -> dict[str, list]:
        entries = [row[column] for column in form]
        if len({*map(type, entries)}) > 1 or not all(x.strip() if isinstance(x, str) else x for x in entries):
            needed = f"its {' and '.join(form)} must not be empty, and all text or all chat messages"
            raise PromptError(f"{needed}, got {described(entries)}; drop the row.")
        # 1. Tokens of the row. A chat template ends its own chats; text gets an EOS.
        template_kwargs = row_template_kwargs(row, chat_template_kwargs)
        sequence = entries[0] if len(entries) == 1 else entries[0] + entries[1]
        ids = encode(sequence, tokenizer, template_kwargs, opening=False)
        if isinstance(sequence, str) and eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        # 2. The completion begins where the tokens of the prompt end or, if some merge with it, where the two differ.
        # The first token is never learned, because nothing predicts it.
        prompt_length = 1
        if len(entries) == 2:
            prompt_ids = encode(entries[0], tokenizer, template_kwargs)
            shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(prompt_ids, ids)))
            prompt_length = max(shared, 1)
            if prompt_ids[shared:]:
                logger.warning_once(_DIFFERENT_PROMPT)
        learned = len(ids) - prompt_length
        if learned < 1:
            remedy = f"none to learn after the first {prompt_length}; drop or lengthen it"
            raise PromptError(f"it has {len(ids)} tokens, {remedy}.")
        if prompt_length >= max_length:
            raise PromptError(
                f"its prompt has {prompt_length} tokens, and {max_length=} leaves none of the {learned} tokens of its "
                f"completion; raise `ptx_max_length` above {prompt_length}, or drop or shorten the row."
            )
        return {PROMPT_IDS: ids[:prompt_length], COMPLETION_IDS: ids[prompt_length:max_length]}

    dataset = dataset.with_format(None)
    return map_rows(dataset, encode_row, "the PTX dataset", remove_columns=dataset.column_names)


class PTXSampler:
    """Draws the supervised rows of each rollout (https://huggingface.co/papers/2203.02155).

    All processes share one random permutation of the dataset per pass. A draw depends only on the seed and the
    rollout's number, so no state is saved, and a resumed run continues with the same rows.
    """

    def __init__(self, dataset: Dataset, plan: BatchPlan, args: PPOConfig, pad_token_id: int):
        self.dataset, self.plan, self.args, self.pad_token_id = dataset, plan, args, pad_token_id

    def draw(self, rollout: int) -> Sequences:
        """Rows of a rollout, one per completion."""
        size, count = len(self.dataset), self.plan.completions_per_process
        start = (rollout * self.plan.num_processes + self.args.process_index) * count
        passes = range(start // size, (start + count - 1) // size + 1)
        generators = [torch.Generator().manual_seed(self.args.prompt_seed + number) for number in passes]
        order = torch.cat([torch.randperm(size, generator=generator) for generator in generators])
        rows = self.dataset[order[start % size : start % size + count].tolist()]
        return Sequences.from_token_ids(rows[PROMPT_IDS], rows[COMPLETION_IDS], self.pad_token_id, self.args.device)
