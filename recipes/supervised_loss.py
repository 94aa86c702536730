"""PPO-ptx, as a subclass of `PPOTrainer`: the policy also learns from supervised rows.

PTXTrainer(..., ptx_dataset=dataset, ptx_coef=27.8)

The loss is that of PPO plus `ptx_coef` times the negative log-likelihood of the rows per token, at
temperature 1 (https://huggingface.co/papers/2203.02155). Every optimizer step takes as many rows as
completions. Those of a step that the policy does not take are lost: with `target_kl`, which the
supervised loss may reach by itself, and in a warm-up of the critic. Set `target_kl=None`.

Chats are rendered as prompts of the run are, with `chat_template_kwargs` of the config and the row.
A template of a reasoning model may put an empty block of thoughts before an answer without any,
which is then learned, too.
"""

import torch
from datasets import Dataset

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.data import encode, row_template_kwargs
from trl_ppo_ext.sequences import Sequences


def tokenize(
    row: dict, tokenizer, max_length: int, template_kwargs: dict | None = None
) -> dict[str, list[int]]:
    """Split a row into given and learned tokens: learned are its `"completion"`, `"text"` or
    `"messages"`."""
    # 1. Tokens of the row. A chat template ends its own chats; text gets an EOS.
    if "prompt" in row:
        whole = row["prompt"] + row["completion"]
    else:
        whole = row.get("text") or row.get("messages")
    if not whole:
        raise ValueError(f"A row of `ptx_dataset` must have text or messages, got {row}.")
    kwargs = row_template_kwargs(row, template_kwargs)
    ids = encode(whole, tokenizer, kwargs, opening=False)
    eos = tokenizer.eos_token_id
    if isinstance(whole, str) and ids[-1:] != [eos]:
        ids = [*ids, eos]
    # 2. Learned tokens begin where the prompt ends or, if tokens merge there, where they differ
    # from the prompt's. The first token is never learned, because nothing predicts it.
    if "prompt" in row:
        prompt = encode(row["prompt"], tokenizer, kwargs)
    else:
        prompt = []
    shared = next(
        (n for n, (one, other) in enumerate(zip(prompt, ids)) if one != other), len(prompt)
    )
    start = max(shared, 1)
    if start >= min(len(ids), max_length):
        raise ValueError(
            f"No token to learn after the first {start} of {len(ids)} ({max_length=}) in {row}."
        )
    return {"prompt_ids": ids[:start], "completion_ids": ids[start:max_length]}


def check(dataset: Dataset) -> None:
    """Raise if rows cannot be drawn, or not be read."""
    if not isinstance(dataset, Dataset) or not len(dataset):
        raise ValueError(
            "`ptx_dataset` must be a `Dataset` or a list with at least one row, got "
            f"{type(dataset).__name__}; of a stream take some, `Dataset.from_list(list(s.take(n)))`."
        )
    columns = set(dataset.column_names)
    if "prompt" in columns:
        learned = columns & {"completion"}
    else:
        learned = columns & {"text", "messages"}
    if not learned:
        raise ValueError(
            "`ptx_dataset` needs the columns 'prompt' and 'completion', or 'text', or 'messages', "
            f"got {sorted(columns)}."
        )


class PTXTrainer(PPOTrainer):
    def __init__(
        self,
        *args,
        ptx_dataset: Dataset | list[dict],
        ptx_coef: float = 1.0,
        ptx_max_length: int = 512,
        **kwargs,
    ):
        if isinstance(ptx_dataset, list):
            ptx_dataset = Dataset.from_list(ptx_dataset)
        check(ptx_dataset)
        super().__init__(*args, **kwargs)
        settings = {
            "tokenizer": self.processing_class,
            "max_length": ptx_max_length,
            "template_kwargs": self.args.chat_template_kwargs,
        }
        self.ptx_rows = ptx_dataset.map(
            tokenize, fn_kwargs=settings, remove_columns=ptx_dataset.column_names
        )
        self.ptx_coef = ptx_coef
        self.ptx_step = -1
        self.ptx_batches = iter(())

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.ptx_step != self.state.global_step:
            self.draw(self.state.global_step)
        rows = next(self.ptx_batches)
        nll = -model(rows, with_values=False).logprobs  # 0 at padding
        self.metrics["train"].mean("loss/ptx", nll, rows.completion_mask)
        # DDP averages gradients over ranks; the divisor is that of the optimizer step, over all
        # ranks
        return loss + self.ptx_coef * nll.sum() / self.ptx_tokens * self.accelerator.num_processes

    def draw(self, step: int) -> None:
        """Draw this rank's rows of an optimizer step; they depend only on seed and step, so a
        resumed run has them."""
        size = len(self.ptx_rows)
        count = self.plan.mini_batch_size
        start = (step * self.plan.num_processes + self.accelerator.process_index) * count
        passes = range(start // size, (start + count - 1) // size + 1)
        generators = [torch.Generator().manual_seed(self.args.seed + number) for number in passes]
        order = torch.cat([torch.randperm(size, generator=generator) for generator in generators])
        ids = self.ptx_rows[order[start % size : start % size + count].tolist()]
        lists = ids["prompt_ids"], ids["completion_ids"]
        rows = Sequences.from_token_ids(
            *lists, self.processing_class.pad_token_id, self.accelerator.device
        )
        self.ptx_tokens = self.accelerator.reduce(rows.completion_mask.sum(), reduction="sum")
        batches = torch.arange(count).split(self.plan.micro_batch_size)
        self.ptx_step = step
        self.ptx_batches = iter([rows.rows(batch) for batch in batches])
