"""Write a run's checkpoints on all ranks, and restore from them what the Trainer does not."""

import os
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

from ..distributed import on_every_rank, unsharded_optimizer_state
from ..environments import record
from ..ppo.guards import NonFiniteError
from ..rewards import RewardError
from . import files, resume
from .atomic import verify

logger = logging.get_logger(__name__)


def write_checkpoint(trainer: Any) -> Path | None:
    """Write a checkpoint from which the run continues bit for bit: aside first, then renamed; none with NaN."""
    args, state = trainer.args, trainer.state
    final = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
    # all ranks gather sharded weights and optimizer states together, before one of them can fail to write
    weights = trainer.actor_critic.trained_weights()
    nonfinite = next((name for name, x in weights.items() if not x.isfinite().all()), None)
    if nonfinite is not None:
        logger.warning(
            "`%s` is not written: %s has NaN or inf. Resume from an earlier one with a lower `learning_rate` and "
            "`resume_with_changed_settings=True`.",
            final,
            nonfinite,
        )
        return None
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = str(final)
    fsdp_state = unsharded_optimizer_state(trainer.optimizer) if trainer.is_fsdp_enabled else None
    is_writer, rank, wait = args.should_save, trainer.accelerator.process_index, trainer.accelerator.wait_for_everyone

    def write(directory: str) -> None:
        if is_writer:
            trainer._write_model(directory, str(final), weights)
            _write_trainer_state(trainer, directory, fsdp_state)
        if trainer.is_deepspeed_enabled:
            trainer.model_wrapped.save_checkpoint(directory, exclude_frozen_parameters=True)
        trainer._save_scaler(directory)
        trainer._save_rng_state(directory)
        save_file(_run_state(trainer), os.path.join(directory, resume.run_state_file(rank)))

    resume.write_checkpoint(final, write, is_writer, trainer.is_deepspeed_enabled, wait)
    trainer._validity[final] = True
    record.forget(args.output_dir, rank, before=state.global_step)
    return final


def _write_trainer_state(trainer: Any, directory: str, fsdp_state: dict[str, Any] | None) -> None:
    """Write optimizer, scheduler, and the Trainer's own state, as the Trainer does."""
    if not trainer.is_deepspeed_enabled:
        optimizer = trainer.optimizer.state_dict() if fsdp_state is None else fsdp_state
        torch.save(optimizer, os.path.join(directory, OPTIMIZER_NAME))
    if not isinstance(trainer.lr_scheduler, DeepSpeedSchedulerWrapper):
        torch.save(trainer.lr_scheduler.state_dict(), os.path.join(directory, SCHEDULER_NAME))
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    stateful = TrainerState(stateful_callbacks=[x for x in callbacks if isinstance(x, ExportableState)])
    trainer.state.stateful_callbacks = stateful.stateful_callbacks
    trainer.state.save_to_json(os.path.join(directory, TRAINER_STATE_NAME))


def _run_state(trainer: Any) -> dict[str, Tensor]:
    """Progress of this rank that the Trainer does not save: rollout, metrics, losses since the last log."""
    numbers = [trainer._tr_loss.item(), trainer._globalstep_last_logged, trainer.guard.skipped]
    parts = {
        "rollout": trainer.updates.state_dict(trainer.state.global_step),
        "metrics": trainer._metrics["train"].state_dict(),
        "trainer": {"numbers": torch.tensor(numbers, dtype=torch.float64)},
    }
    named = {f"{part}.{name}": x for part, tensors in parts.items() for name, x in tensors.items()}
    return {name: x.detach().cpu().contiguous() for name, x in named.items()}


def load_run_state(trainer: Any, tensors: dict[str, Tensor]) -> None:
    """Restore this rank's progress from the tensors that [`write_checkpoint`] saved for it."""
    parts: dict[str, dict[str, Tensor]] = {"rollout": {}, "metrics": {}, "trainer": {}}
    for key, x in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = x
    loss, last_logged, skipped = parts["trainer"]["numbers"].tolist()
    trainer._tr_loss = torch.tensor(loss, device=trainer.accelerator.device)
    trainer._total_loss_scalar = -loss  # the final mean is that of this `train()`
    trainer._globalstep_last_logged, trainer.guard.skipped = int(last_logged), int(skipped)
    if parts["rollout"]:
        trainer.updates.load_state_dict(parts["rollout"], trainer.state.global_step)
    trainer._metrics["train"].load_state_dict(parts["metrics"])


def check_checkpoint(trainer: Any, path: str) -> None:
    """Raise [`CheckpointError`] unless a checkpoint has all files, and settings and inputs are the run's."""
    files.check_settings(path, files.load_state(path).get("settings", {}), trainer.args, trainer._inputs)
    needed = [TRAINER_STATE_NAME, *([] if trainer.is_deepspeed_enabled else [OPTIMIZER_NAME, SCHEDULER_NAME])]
    missing = [name for name in needed if not os.path.isfile(os.path.join(path, name))]
    if missing:
        raise files.CheckpointError(f"`{path}` lacks {', '.join(missing)}; resume from another checkpoint.")


def save_after_error(trainer: Any, error: BaseException) -> None:
    """Save a checkpoint of the last optimizer step before an error leaves `train()`, and name it in a note."""
    return_to_step, trainer._return_to_step = trainer._return_to_step, None
    # ranks save together, and a rank that failed alone would wait: only these errors are raised by all ranks
    together = trainer.accelerator.num_processes == 1 or isinstance(error, RewardError | NonFiniteError)
    if return_to_step is None or not together or isinstance(error, files.CheckpointError):
        return
    try:
        return_to_step()
        final = write_checkpoint(trainer)
        if final is not None:
            error.add_note(f"`{final}` holds all optimizer steps so far; resume with `resume_from_checkpoint=True`.")
    except Exception as failure:  # must not hide the first one
        error.add_note(f"The optimizer steps since the last checkpoint are lost, saving failed too: {failure}")


def settle_best_checkpoint(trainer: Any) -> None:
    """Forget a damaged best checkpoint, and load that of another directory, before training ends."""
    args, state = trainer.args, trainer.state
    best = state.best_model_checkpoint
    if best is not None and (args.load_best_model_at_end or args.save_total_limit == 1):
        try:
            on_every_rank(partial(verify, best), *resume.READ_ERRORS, runs=args.should_save)
        except resume.READ_ERRORS as error:
            logger.warning(
                "The best checkpoint `%s` cannot be used (%s); the model keeps the weights of the last step, and no "
                "checkpoint is deleted for the best one.",
                best,
                error,
            )
            state.best_model_checkpoint = best = None
    if best is not None and not os.path.samefile(Path(best).parent, args.output_dir):
        # of the run that this one resumed from; the Trainer would delete every checkpoint of this one for it
        if args.load_best_model_at_end:
            trainer._load_best_model()
        state.best_model_checkpoint = None
