"""Write a run's checkpoints on all ranks."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..distributed import OtherRankError, on_every_rank, unsharded_optimizer_state
from ..episodes import record
from ..ppo.guards import NonFiniteError, SamplerError
from ..rewards import RewardError
from . import files, resume
from .atomic import STAGING, publish, verify

logger = logging.get_logger(__name__)

# `torch.save` and `tokenizers` report a full disk with errors of no particular type
FULL_DISK = ("inline_container", "iostream error", "(os error ")


def write_checkpoint(trainer: Any) -> Path | None:
    """Write a checkpoint from which the run continues bit for bit: aside first, then renamed;
    none with NaN."""
    state = trainer.state
    rank = trainer.accelerator.process_index
    is_writer = trainer.args.should_save
    final = Path(trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
    staged = final.parent / STAGING / final.name
    # 1. all ranks gather sharded weights and optimizer states together, before one of them can fail
    # to write
    weights = trainer.actor_critic.trained_weights()
    nonfinite = next((name for name, x in weights.items() if not x.isfinite().all()), None)
    if nonfinite is not None:
        remedy = (
            "Resume from an earlier one with a lower `learning_rate` and "
            "`resume_with_changed_settings=True`."
        )
        logger.warning("`%s` is not written: %s has NaN or inf. %s", final, nonfinite, remedy)
        return None
    # no interruption may choose the best
    if state.best_global_step == state.global_step and trainer._save_is_due:
        state.best_model_checkpoint = str(final)
    ahead = trainer.roles.player.generator.ahead
    sampled = {} if ahead is None else ahead.state_dict()
    if trainer.is_fsdp_enabled:
        fsdp_state = unsharded_optimizer_state(trainer.optimizer)
    else:
        fsdp_state = None

    def make_empty() -> None:
        shutil.rmtree(staged.parent, ignore_errors=True)
        staged.mkdir(parents=True)

    def write() -> None:
        if not staged.is_dir():
            raise OSError("this rank does not see the directory; all ranks must share a disk")
        if is_writer:
            trainer._write_model(str(staged), str(final), weights)
            # the Trainer's own state, in its files
            if not trainer.is_deepspeed_enabled:
                optimizer = trainer.optimizer.state_dict() if fsdp_state is None else fsdp_state
                torch.save(optimizer, staged / OPTIMIZER_NAME)
            if not isinstance(trainer.lr_scheduler, DeepSpeedSchedulerWrapper):
                torch.save(trainer.lr_scheduler.state_dict(), staged / SCHEDULER_NAME)
            stateful = [
                x for x in trainer.callback_handler.callbacks if isinstance(x, ExportableState)
            ]
            state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
            state.save_to_json(str(staged / TRAINER_STATE_NAME))
        trainer._save_scaler(str(staged))
        trainer._save_rng_state(str(staged))
        save_file(_run_state(trainer, sampled), staged / resume.RUN_STATE.format(rank=rank))

    # 2. write aside on all ranks, and rename when all are done
    try:
        on_every_rank(make_empty, *resume.WRITE_ERRORS, runs=is_writer)
        on_every_rank(write, Exception)
        # its ranks write together, and one that fails raises by itself
        if trainer.is_deepspeed_enabled:
            trainer.model_wrapped.save_checkpoint(str(staged), exclude_frozen_parameters=True)
            trainer.accelerator.wait_for_everyone()
        on_every_rank(partial(publish, staged, final), *resume.WRITE_ERRORS, runs=is_writer)
    except Exception as error:
        if not isinstance(error, resume.WRITE_ERRORS) and not any(
            sign in str(error) for sign in FULL_DISK
        ):
            raise
        raise files.CheckpointError(
            f"`{final}` cannot be written ({str(error).strip()}); earlier checkpoints are intact. "
            "Free space, check that the directory is writable, and resume with "
            "`train(resume_from_checkpoint=True)`."
        ) from error
    finally:
        if is_writer:
            shutil.rmtree(staged.parent, ignore_errors=True)
    trainer._validity[final] = True
    record.forget(str(final.parent), rank, before=state.global_step)
    return final


def _run_state(trainer: Any, ahead: dict[str, Tensor]) -> dict[str, Tensor]:
    """Progress of this rank that the Trainer does not save: rollout, metrics, losses since the
    last log."""
    numbers = [trainer._tr_loss.item(), trainer._globalstep_last_logged, trainer._skipped]
    parts = {
        "rollout": trainer.updates.state_dict(trainer.state.global_step),
        "ahead": ahead,
        "metrics": trainer._metrics["train"].state_dict(),
        "trainer": {
            "numbers": torch.tensor(numbers, dtype=torch.float64),
            "played": trainer.run_state.played,
        },
    }
    named = {f"{part}.{name}": x for part, tensors in parts.items() for name, x in tensors.items()}
    return {name: x.detach().cpu().contiguous() for name, x in named.items()}


def save_after_error(trainer: Any, error: BaseException) -> None:
    """Save a checkpoint of the last optimizer step before an error leaves `train()`, and name it
    in a note."""
    return_to_step = trainer._return_to_step
    trainer._return_to_step = None
    # ranks save together, and a rank that failed alone would wait: only these errors are raised by
    # all ranks
    everywhere = isinstance(error, RewardError | NonFiniteError | SamplerError | OtherRankError)
    together = (
        trainer.accelerator.num_processes == 1 or everywhere or hasattr(error, "is_on_every_rank")
    )
    if return_to_step is None or not together or isinstance(error, files.CheckpointError):
        return
    try:
        return_to_step()
        final = write_checkpoint(trainer)
        if final is not None:
            error.add_note(
                f"`{final}` holds all optimizer steps so far; resume with "
                "`resume_from_checkpoint=True`."
            )
    except Exception as failure:  # must not hide the first one
        error.add_note(
            f"The optimizer steps since the last checkpoint are lost, saving failed too: {failure}"
        )


def settle_best_checkpoint(trainer: Any) -> None:
    """Forget a damaged best checkpoint, and load that of another directory, before training
    ends."""
    args = trainer.args
    best = trainer.state.best_model_checkpoint
    if best is None:
        return
    try:
        on_every_rank(partial(verify, best), *resume.READ_ERRORS, runs=args.should_save)
    except resume.READ_ERRORS as error:
        logger.warning(
            "The best checkpoint cannot be used (%s); the model keeps its last weights.", error
        )
    else:
        if os.path.samefile(Path(best).parent, args.output_dir):
            return
        # of the run that this one resumed from; the Trainer would delete every checkpoint of this
        # one for it
        if args.load_best_model_at_end:
            trainer._load_best_model()
    trainer.state.best_model_checkpoint = None
