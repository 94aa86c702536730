"""Guards against NaN and inf: exclude them from the update, and report them."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers.utils import logging

from ..modeling import TokenScores
from ..sequences import Sequences
from .math import Reduction

logger = logging.get_logger(__name__)

MAX_SKIPPED_STEPS = 5  # in a row
_NAMES = {"logprobs": "log-probs", "ref_logprobs": "reference log-probs", "kls": "KLs"}


class NonFiniteError(RuntimeError):
    """Raised when no completion of a rollout is finite, or too many gradients in a row are not."""


def report_nonfinite(tokens: TokenScores, valid: Tensor, all_sum: Reduction, rank: int, step: int | None) -> None:
    """Log which scores of completions are not finite. All ranks must call it.

    Raises [`NonFiniteError`] if all valid completions of all ranks have one, unless `step` is `None` (evaluation).
    """
    names = [name for name, x in tokens._asdict().items() if x is not None]
    rows = [~getattr(tokens, name).isfinite().all(1) for name in names]
    # one reduction that every rank reaches, so that all continue or stop together
    counts = all_sum(torch.stack([(x & valid).sum() for x in (*rows, ~tokens.is_finite, valid)]))
    *by_name, excluded, completions = counts.tolist()
    parts = [f"the {_NAMES.get(name, name)} of {count}" for name, count in zip(names, by_name) if count]
    details = f"non-finite: {', '.join(parts)} of {completions} completions"
    if excluded == completions and step is not None:
        raise NonFiniteError(
            f"The rollout of optimizer step {step} has no finite completion on any rank; {details}. The weights "
            "are unchanged by this rollout. If the run went well so far, resume from an earlier checkpoint with a "
            "lower learning rate; if it has just begun, load the base in bfloat16 or float32 (float16 overflows), "
            "or check its weights for damage."
        )
    if rank == 0:
        logger.warning("%d of %d completions are excluded; %s.", excluded, completions, details)


def stand_ins(sequences: Sequences, excluded: Tensor, gather: Reduction) -> Sequences:
    """Sequences to train on; each excluded one is replaced by a finite one.

    A mask of 0 is not enough: 0 · inf is NaN, so any non-finite number in a forward, also at padding, makes the
    gradient NaN. The stand-in is the first two tokens of a finite sequence: no later token influences their hidden
    states, so they are finite, too.
    """
    row = int((~excluded).long().argmax())
    ids = sequences.input_ids[row][sequences.attention_mask[row].bool()][:2]
    # a rank without a finite sequence takes another's
    offered = gather(torch.cat([ids, (~excluded[row])[None].long()])[None])
    first, second, _ = offered[offered[:, 2].argmax()]
    prompt_ids, completion_ids = sequences.prompt_ids.clone(), sequences.completion_ids.clone()
    prompt_ids[excluded], completion_ids[excluded] = first, second
    replaced = excluded.to(sequences.prompt_lengths.device)
    stand_ins: dict[str, Tensor] = {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
    for name in ("prompt_lengths", "completion_lengths", "critic_prompt_lengths"):
        if (lengths := getattr(sequences, name)) is not None:
            stand_ins[name] = lengths.masked_fill(replaced, 1)
    if sequences.sampled is not None:
        first_only = torch.arange(completion_ids.shape[1]) == 0
        stand_ins["sampled"] = torch.where(replaced[:, None], first_only, sequences.sampled)
    if sequences.critic_prompt_ids is not None:
        stand_ins["critic_prompt_ids"] = sequences.critic_prompt_ids.masked_fill(excluded[:, None], first)
    return replace(sequences, **stand_ins)


def count_skipped(skipped: int, is_finite: bool, step: int) -> int:
    """Optimizer steps in a row whose gradient is not finite; raise [`NonFiniteError`] if there are too many."""
    if is_finite:
        return 0
    skipped += 1
    logger.warning("Optimizer step %d is skipped: its gradient is not finite.", step)
    if skipped >= MAX_SKIPPED_STEPS:
        raise NonFiniteError(
            f"{skipped} optimizer steps in a row, up to step {step}, had a non-finite gradient and were "
            "skipped. Lower the learning rate, or check the rewards."
        )
    return skipped
