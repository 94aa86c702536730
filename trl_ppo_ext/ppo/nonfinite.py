"""What is done with numbers that are none: they never reach the weights, and are told about."""

import json
import os
from collections.abc import Callable, Iterable, Mapping

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..sequences import Rollout, Sequences, rollout_tensors
from .metrics import Metrics
from .samples import Samples, TokenScores

logger = logging.get_logger(__name__)

Suspects = Mapping[str, list[int]]

# of `TokenScores`, in words
_NAMES = {
    "logprobs": "log-probability",
    "ref_logprobs": "reference log-probability",
    "entropies": "entropy",
    "values": "value",
    "kls": "KL",
}


class NonFiniteError(RuntimeError):
    """Raised when nothing of a rollout is finite, or too many gradients in a row are not."""


def finite_rows(tensors: Iterable[Tensor | None]) -> Tensor:
    """Rows in which every number is finite."""
    return torch.stack([x.isfinite().flatten(1).all(1) for x in tensors if x is not None]).all(0)


class Inspection:
    """Writes rollouts that hold, or led to, numbers that are not finite."""

    def __init__(self, output_dir: str, process_index: int, tokenizer: PreTrainedTokenizerBase):
        self.output_dir = output_dir
        self.process_index = process_index
        self.tokenizer = tokenizer

    def write(self, rollout: Rollout, step: int, suspects: Suspects, more: Mapping[str, Tensor | None]) -> str:
        """Write a rollout: its tensors to `rollout.safetensors`, the texts of suspicious rows to `affected.json`."""
        # what begins with an underscore is not pushed to the Hub
        directory = os.path.join(self.output_dir, f"_nonfinite_step_{step}", f"process_{self.process_index}")
        os.makedirs(directory, exist_ok=True)
        tensors = rollout_tensors(rollout) | {name: x for name, x in more.items() if x is not None}
        tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        save_file(tensors, os.path.join(directory, "rollout.safetensors"))
        texts = self.tokenizer.batch_decode(rollout.sequences.input_ids)
        found: dict[int, list[str]] = {}
        for name, rows in suspects.items():
            for row in rows:
                found.setdefault(row, []).append(name)
        affected = [{"row": row, "not_finite": found[row], "text": texts[row]} for row in sorted(found)]
        with open(os.path.join(directory, "affected.json"), "w") as file:
            json.dump(affected, file, indent=1)
        return f"The rollout is written to `{directory}`: {in_words(suspects)}."


def in_words(suspects: Suspects) -> str:
    """Say which rows are suspicious."""
    found = []
    for name, rows in suspects.items():
        if rows:
            more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
            found.append(f"the {name} of rows {', '.join(map(str, rows[:8]))}{more}")
    if not found:
        return "every log-probability, value and loss of its rows on this process is finite"
    return f"not finite are {'; '.join(found)}"


def suspects_of(rollout: Rollout) -> dict[str, list[int]]:
    """Rows of a rollout that hold numbers that are not finite."""
    names = ("old_logprobs", "ref_logprobs", "advantages", "old_values", "returns")
    tensors = {name: getattr(rollout, name) for name in names if getattr(rollout, name) is not None}
    rows = {name: (~finite_rows([x])).nonzero()[:, 0].tolist() for name, x in tensors.items()}
    return {name.replace("_", " "): of_name for name, of_name in rows.items() if of_name}


class RolloutGuard:
    """Leaves out of a rollout the completions about which a forward said a number that is not finite."""

    def __init__(
        self, inspection: Inspection, all_sum: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]
    ):
        self.inspection = inspection
        self.all_sum = all_sum
        self.gather = gather

    def leave_out(self, samples: Samples, counted: Tensor, metrics: Metrics, step: int | None) -> Samples:
        """Make completions unusable whose log-probabilities, entropies or values are not finite."""
        tokens = {name: x for name, x in samples.tokens._asdict().items() if x is not None}
        bad = {name: ~finite_rows([x]) & counted for name, x in tokens.items()}
        finite = finite_rows(tokens.values())
        affected = ~finite & counted
        metrics.total("nonfinite_completions", affected)
        # the one reduction, which every process reaches: all see the same numbers, and go on or stop together
        *by_name, left_out, completions = self.all_sum(
            torch.stack([x.sum() for x in (*bad.values(), affected, counted)])
        ).tolist()
        if not left_out:
            return samples
        which = ", ".join(
            f"the {_NAMES[name]} of {count} of {completions}" for name, count in zip(bad, by_name) if count
        )
        if left_out == completions and step is not None:
            self._give_up(samples, bad, step, which)
        if self.inspection.process_index == 0:
            logger.warning("%d of %d completions are left out: not finite are %s.", left_out, completions, which)
        cleaned = {name: x.masked_fill(~finite[:, None], 0) for name, x in tokens.items()}
        scored = samples.scored
        scored = scored._replace(usable=scored.usable & finite, tokens=scored.tokens.masked_fill(~finite[:, None], 0))
        return samples._replace(tokens=TokenScores(**cleaned), scored=scored, left_out=~finite)

    def _give_up(self, samples: Samples, bad: Mapping[str, Tensor], step: int, which: str) -> None:
        tokens, sequences = samples.tokens, samples.sequences
        nothing = torch.zeros_like(tokens.logprobs)  # no advantages are computed from such numbers
        mask = sequences.completion_mask
        rollout = Rollout(sequences, mask, tokens.logprobs, tokens.ref_logprobs, nothing, tokens.values)
        suspects = {_NAMES[name]: rows.nonzero()[:, 0].tolist() for name, rows in bad.items()}
        more = {"entropies": tokens.entropies, "kls": tokens.kls, "scores": samples.scored.tokens}
        where = self.inspection.write(rollout, step, suspects, more)
        raise NonFiniteError(
            f"The rollout of optimizer step {step} has nothing to learn from: of its completions, over all processes, "
            f"not finite are {which}. The weights are those before it. {where} If the run went well before, go on "
            "from an earlier checkpoint with a lower learning rate; if it has just begun, load the base in bfloat16 "
            "or float32 (float16 overflows), or look for damage in its weights."
        )

    def stand_ins(self, samples: Samples) -> Sequences:
        """Sequences to train on, with a harmless one in place of each that is left out.

        A mask of 0 would not be enough: what is not finite in a forward makes the gradient NaN whatever it is
        multiplied with, also at padding. The stand-in is the first two tokens of a sequence that was finite: as
        nothing after them has a say in their hidden states, they are finite too. The row is filled up with them.
        """
        sequences, left_out = samples.sequences, samples.left_out
        if left_out is None:  # on no process
            return sequences
        row = int((~left_out).long().argmax())
        ids = sequences.input_ids[row][sequences.attention_mask[row].bool()][:2]
        # a process may have none that is finite, and takes another's
        offered = self.gather(torch.cat([ids, (~left_out[row])[None].long()])[None])
        first, second, _ = offered[offered[:, 2].argmax()]
        prompt_ids, completion_ids = sequences.prompt_ids.clone(), sequences.completion_ids.clone()
        prompt_ids[left_out], completion_ids[left_out] = first, second
        replaced = left_out.to(sequences.prompt_lengths.device)
        return Sequences(
            prompt_ids,
            completion_ids,
            sequences.prompt_lengths.masked_fill(replaced, 1),
            sequences.completion_lengths.masked_fill(replaced, 1),
        )


class StepGuard:
    """Counts optimizer steps that were skipped because a gradient was not finite, and ends a run that has too many."""

    def __init__(self, most: int, output_dir: str, process_index: int, tokenizer: PreTrainedTokenizerBase):
        self.most = most
        self.inspection = Inspection(output_dir, process_index, tokenizer)
        self.skipped = 0

    def see(
        self,
        finite: bool,
        step: int,
        rollout: Rollout | None,
        suspects: Callable[[], Suspects] | None = None,
    ) -> None:
        """Take notice of an optimizer step."""
        if finite:
            self.skipped = 0
            return
        self.skipped += 1
        found = {} if suspects is None else dict(suspects())
        report = f"Optimizer step {step} is skipped: its gradient is not finite; {in_words(found)}"
        logger.warning("%s.", report)
        if self.skipped < self.most:
            return
        where = ""
        if rollout is not None:
            where = " " + self.inspection.write(rollout, step, found | suspects_of(rollout), {})
        raise NonFiniteError(
            f"{self.skipped} optimizer steps in a row had a gradient that is not finite; the weights are those before "
            f"them. {report}.{where} Lower the learning rate, or look at the rewards."
        )
