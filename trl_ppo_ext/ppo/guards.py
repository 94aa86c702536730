"""Guards against NaN and inf: exclude them from the update, and report them."""

import json
import os
from collections.abc import Callable, Iterable, Mapping

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..modeling import TokenScores
from ..sequences import Sequences
from .metrics import Metrics

logger = logging.get_logger(__name__)

Suspects = Mapping[str, list[int]]  # rows by the name of the non-finite tensor
_NAMES = {
    "logprobs": "log-prob",
    "ref_logprobs": "reference log-prob",
    "entropies": "entropy",
    "values": "value",
    "kls": "KL",
}


class NonFiniteError(RuntimeError):
    """Raised when no completion of a rollout is finite, or too many gradients in a row are not."""


def finite_rows(tensors: Iterable[Tensor | None]) -> Tensor:
    """Rows that are finite in all tensors, `[batch]`."""
    return torch.stack([x.isfinite().flatten(1).all(1) for x in tensors if x is not None]).all(0)


class NonFiniteGuard:
    """Excludes completions with non-finite scores, and ends a run that has too many non-finite gradients in a row."""

    def __init__(
        self,
        output_dir: str,
        rank: int,
        tokenizer: PreTrainedTokenizerBase,
        max_skipped_steps: int,
        all_sum: Callable[[Tensor], Tensor],
        gather: Callable[[Tensor], Tensor],
    ):
        self.output_dir = output_dir
        self.rank = rank
        self.tokenizer = tokenizer
        self.max_skipped_steps = max_skipped_steps
        self.all_sum = all_sum
        self.gather = gather
        self.skipped = 0  # optimizer steps in a row

    def find_nonfinite(
        self, sequences: Sequences, tokens: TokenScores, valid: Tensor, metrics: Metrics, step: int | None
    ) -> Tensor | None:
        """Find completions with a non-finite score, `[batch]`; `None` if no rank has one.

        Raises [`NonFiniteError`] if all valid completions of all ranks have one, unless `step` is `None` (evaluation).
        """
        scores = {name: x for name, x in tokens._asdict().items() if x is not None}
        bad = {name: ~finite_rows([x]) & valid for name, x in scores.items()}
        nonfinite = ~finite_rows(scores.values())
        affected = nonfinite & valid
        metrics.total("nonfinite_completions", affected)
        # one reduction that every rank reaches, so that all continue or stop together
        *by_name, excluded, completions = self.all_sum(
            torch.stack([x.sum() for x in (*bad.values(), affected, valid)])
        ).tolist()
        if not excluded:
            return None
        counts = ", ".join(
            f"the {_NAMES[name]} of {count} of {completions}" for name, count in zip(bad, by_name) if count
        )
        if excluded == completions and step is not None:
            suspects = {_NAMES[name]: rows.nonzero()[:, 0].tolist() for name, rows in bad.items()}
            report = self._write(sequences, scores, step, suspects)
            raise NonFiniteError(
                f"The rollout of optimizer step {step} has no finite completion on any rank: not finite are {counts}. "
                f"The weights are those before it. {report} If the run went well so far, resume from an earlier "
                "checkpoint with a lower learning rate; if it has just begun, load the base in bfloat16 or float32 "
                "(float16 overflows), or check its weights for damage."
            )
        if self.rank == 0:
            logger.warning("%d of %d completions are excluded: not finite are %s.", excluded, completions, counts)
        return nonfinite

    def stand_ins(self, sequences: Sequences, excluded: Tensor) -> Sequences:
        """Sequences to train on; each excluded one is replaced by a finite one.

        A mask of 0 is not enough: 0 · inf is NaN, so any non-finite number in a forward, also at padding, makes the
        gradient NaN. The stand-in is the first two tokens of a finite sequence: no later token influences their hidden
        states, so they are finite, too.
        """
        row = int((~excluded).long().argmax())
        ids = sequences.input_ids[row][sequences.attention_mask[row].bool()][:2]
        # a rank without a finite sequence takes another's
        offered = self.gather(torch.cat([ids, (~excluded[row])[None].long()])[None])
        first, second, _ = offered[offered[:, 2].argmax()]
        prompt_ids, completion_ids = sequences.prompt_ids.clone(), sequences.completion_ids.clone()
        prompt_ids[excluded], completion_ids[excluded] = first, second
        replaced = excluded.to(sequences.prompt_lengths.device)
        return Sequences(
            prompt_ids,
            completion_ids,
            sequences.prompt_lengths.masked_fill(replaced, 1),
            sequences.completion_lengths.masked_fill(replaced, 1),
        )

    def check_gradient(
        self, finite: bool, step: int, suspects: Suspects, sequences: Sequences, tensors: Mapping[str, Tensor]
    ) -> None:
        """Count skipped steps in a row; raise [`NonFiniteError`] if there are too many.

        `suspects` are rows whose loss was not finite; `tensors` are the rollout's, `[batch, response]`.
        """
        if finite:
            self.skipped = 0
            return
        self.skipped += 1
        message = f"Optimizer step {step} is skipped: its gradient is not finite; {_in_words(suspects)}"
        logger.warning("%s.", message)
        if self.skipped < self.max_skipped_steps:
            return
        rows = {name: (~finite_rows([x])).nonzero()[:, 0].tolist() for name, x in tensors.items()}
        nonfinite = {name.replace("_", " "): numbers for name, numbers in rows.items() if numbers}
        report = self._write(sequences, tensors, step, {**suspects, **nonfinite})
        raise NonFiniteError(
            f"{self.skipped} optimizer steps in a row had a non-finite gradient; the weights are those before them. "
            f"{message}. {report} Lower the learning rate, or check the rewards."
        )

    def _write(self, sequences: Sequences, tensors: Mapping[str, Tensor], step: int, suspects: Suspects) -> str:
        """Write a rollout and the texts of its suspicious rows; return a sentence about it."""
        # names that begin with an underscore are not pushed to the Hub
        directory = os.path.join(self.output_dir, f"_nonfinite_step_{step}", f"process_{self.rank}")
        os.makedirs(directory, exist_ok=True)
        contents = {f"sequences.{name}": x for name, x in vars(sequences).items() if isinstance(x, Tensor)} | {
            **tensors
        }
        contents = {name: x.detach().cpu().contiguous() for name, x in contents.items()}
        save_file(contents, os.path.join(directory, "rollout.safetensors"))
        texts = self.tokenizer.batch_decode(sequences.input_ids)
        by_row: dict[int, list[str]] = {}
        for name, rows in suspects.items():
            for row in rows:
                by_row.setdefault(row, []).append(name)
        affected = [{"row": row, "not_finite": by_row[row], "text": texts[row]} for row in sorted(by_row)]
        with open(os.path.join(directory, "affected.json"), "w") as file:
            json.dump(affected, file, indent=1)
        return f"The rollout is in `{directory}`: {_in_words(suspects)}."


def _in_words(suspects: Suspects) -> str:
    parts = []
    for name, rows in suspects.items():
        if rows:
            more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
            parts.append(f"the {name} of rows {', '.join(map(str, rows[:8]))}{more}")
    if not parts:
        return "every log-prob, value and loss of its rows on this rank is finite"
    return f"not finite are {'; '.join(parts)}"
