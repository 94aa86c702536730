"""What is done with numbers that are none: they never reach the weights, and are told about."""

import json
import os
from collections.abc import Iterable

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .rollout import Rollout, rollout_tensors

logger = logging.get_logger(__name__)


class NonFiniteError(RuntimeError):
    """Raised when too many optimizer steps in a row had gradients that are not finite."""


def finite_rows(tensors: Iterable[Tensor | None]) -> Tensor:
    """Rows in which every number is finite.

    Args:
        tensors (`Iterable[Tensor]`): Tensors of shape `[batch, ...]`; `None` is passed over.

    Returns:
        `Tensor` of shape `[batch]`: Whether a row is finite in all of them.
    """
    return torch.stack([x.isfinite().flatten(1).all(1) for x in tensors if x is not None]).all(0)


def _write(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, directory: str, affected: list[int]) -> None:
    os.makedirs(directory, exist_ok=True)
    tensors = {key: x.detach().cpu().contiguous() for key, x in rollout_tensors(rollout).items()}
    save_file(tensors, os.path.join(directory, "rollout.safetensors"))
    texts = tokenizer.batch_decode(rollout.sequences.input_ids)
    with open(os.path.join(directory, "affected.json"), "w") as file:
        json.dump([{"row": row, "text": texts[row]} for row in affected], file, indent=1)


class StepGuard:
    """Counts optimizer steps that were skipped because a gradient was not finite, and ends a run that has too many.

    Args:
        most (`int`): The run ends at this many skipped steps in a row.
        output_dir (`str`): Where the rollout of each process is written then.
        process_index (`int`): Number of this process.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the policy.
    """

    def __init__(self, most: int, output_dir: str, process_index: int, tokenizer: PreTrainedTokenizerBase):
        self.most = most
        self.output_dir = output_dir
        self.process_index = process_index
        self.tokenizer = tokenizer
        self.skipped = 0

    def see(self, finite: bool, step: int, model: nn.Module, rollout: Rollout | None) -> None:
        """Take notice of an optimizer step.

        Args:
            finite (`bool`): Whether its gradient was finite.
            step (`int`): Its number.
            model (`nn.Module`): What is trained, with the gradient.
            rollout ([`Rollout`], *optional*): The rollout it belongs to.

        Raises:
            [`NonFiniteError`]: If it was one skipped step too many.
        """
        if finite:
            self.skipped = 0
            return
        self.skipped += 1
        names = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        report = f"Optimizer step {step} is skipped: the gradient of {len(names)} parameters is not finite"
        report += f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
        logger.warning("%s.", report)
        if self.skipped < self.most:
            return
        where = ""
        if rollout is not None:
            numbers = [rollout.old_logprobs, rollout.ref_logprobs, rollout.advantages, rollout.old_values]
            affected = (~finite_rows([*numbers, rollout.returns])).nonzero()[:, 0].tolist()
            # what begins with an underscore is not pushed to the Hub
            directory = os.path.join(self.output_dir, f"_nonfinite_step_{step}", f"process_{self.process_index}")
            _write(rollout, self.tokenizer, directory, affected)
            rows = (
                f"rows {affected[:8]} of it hold numbers that are not finite" if affected else "its numbers are finite"
            )
            where = f" The rollout is written to `{directory}`: {rows}."
        raise NonFiniteError(
            f"{self.skipped} optimizer steps in a row had a gradient that is not finite; the weights are those before "
            f"them. {report}.{where} Lower the learning rate, or look at the rewards."
        )
