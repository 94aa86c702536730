"""Write a run's checkpoints on all ranks: aside first, then renamed."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..distributed import OtherRankError, on_every_rank
from ..ppo.guards import NonFiniteError, SamplerError
from ..rewards import RewardError
from .atomic import STAGING, publish, verify
from .files import CheckpointError
from .resume import READ_ERRORS, RUN_STATE, WRITE_ERRORS

logger = logging.get_logger(__name__)

# `torch.save` and `tokenizers` report a full disk with errors of no particular type; the last is
# how messages of libraries in Rust end
FULL_DISK = ("inline_container", "iostream error", "(os error ")
# errors that all ranks raise together
ON_EVERY_RANK = (RewardError, NonFiniteError, SamplerError, OtherRankError)


def checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Directory of the checkpoint of an optimizer step."""
    return Path(cast(str, args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def are_finite(weights: Mapping[str, Tensor], final: Path) -> bool:
    """Whether weights may be saved; warns of NaN or inf, from which no run continues."""
    nonfinite = next((name for name, x in weights.items() if not x.isfinite().all()), None)
    if nonfinite is not None:
        logger.warning(
            "`%s` is not written: %s has NaN or inf. Resume from an earlier one with a lower "
            "`learning_rate` and `resume_with_changed_settings=True`.",
            final,
            nonfinite,
        )
    return nonfinite is None


def write_aside(
    final: Path,
    write: Callable[[Path], None],
    write_together: Callable[[Path], None] | None,
    is_writer: bool,
) -> None:
    """Write a checkpoint into a temporary directory, and rename it when all ranks are done.

    Args:
        final (`Path`): Its name.
        write (`Callable`):
            Writes the files of this rank. It must not wait for others, of which one may fail.
        write_together (`Callable` or `None`): Writes files with the other ranks.
        is_writer (`bool`): Whether this rank makes the directory, and renames it.

    Raises:
        [`CheckpointError`]: If the disk is full, or cannot be written.
    """
    staged = final.parent / STAGING / final.name

    def make_empty() -> None:
        shutil.rmtree(staged.parent, ignore_errors=True)
        staged.mkdir(parents=True)

    def write_own() -> None:
        if not staged.is_dir():
            raise OSError(
                "this rank does not see the directory; all must share a disk, unless "
                "`save_on_each_node=True`"
            )
        write(staged)

    try:
        on_every_rank(make_empty, *WRITE_ERRORS, runs=is_writer)
        on_every_rank(write_own, Exception)
        if write_together is not None:
            write_together(staged)
        on_every_rank(partial(publish, staged, final), *WRITE_ERRORS, runs=is_writer)
    except Exception as error:
        is_of_disk = isinstance(error, WRITE_ERRORS)
        if not is_of_disk and not any(sign in str(error) for sign in FULL_DISK):
            raise
        raise CheckpointError(
            f"`{final}` cannot be written ({str(error).strip()}); earlier checkpoints are intact. "
            "Free space, check that the directory is writable, and resume with "
            "`train(resume_from_checkpoint=True)`."
        ) from error
    finally:
        if is_writer:
            shutil.rmtree(staged.parent, ignore_errors=True)


def write_trainer_files(
    directory: Path,
    optimizer: Mapping[str, Any] | None,
    scheduler: Any,
    state: TrainerState,
    callbacks: list[TrainerCallback],
) -> None:
    """Write the state of the Trainer itself, in its own files; `optimizer` is `None` with
    DeepSpeed, which writes its own."""
    if optimizer is not None:
        torch.save(optimizer, directory / OPTIMIZER_NAME)
    if not isinstance(scheduler, DeepSpeedSchedulerWrapper):
        torch.save(scheduler.state_dict(), directory / SCHEDULER_NAME)
    stateful = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
    state.save_to_json(str(directory / TRAINER_STATE_NAME))


def write_progress(directory: Path, rank: int, tensors: dict[str, Tensor]) -> None:
    """Write the tensors of a rank's [`Progress`]."""
    save_file(tensors, directory / RUN_STATE.format(rank=rank))


def may_save_after(error: BaseException, num_processes: int) -> bool:
    """Whether a checkpoint can be saved after an error: of several ranks only after one that all
    have raised, since saving waits for all."""
    if isinstance(error, CheckpointError):  # it would fail again
        return False
    on_all = isinstance(error, ON_EVERY_RANK) or hasattr(error, "is_on_every_rank")
    return num_processes == 1 or on_all


def damage_of(checkpoint: Path, is_writer: bool) -> Exception | None:
    """Why a checkpoint cannot be loaded, on all ranks; `None` if it can."""
    try:
        on_every_rank(partial(verify, checkpoint), *READ_ERRORS, runs=is_writer)
    except READ_ERRORS as error:
        return error
    return None
