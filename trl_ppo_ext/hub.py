"""Pushing a run to the Hub while it trains."""

import os
import shutil
from contextlib import suppress
from typing import Any

from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from .checkpoint import AVERAGED, STATE
from .modeling.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CRITIC_FOLDER, VALUE_HEAD

_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
# of a checkpoint, what `save_model` writes; the tokenizer aside, which knows its own files
SAVED = [os.path.join(folder, file) for folder in ("", CRITIC_FOLDER, AVERAGED) for file in _ADAPTER]
SAVED += [VALUE_HEAD, STATE, "README.md"]


def push_in_background(trainer: Any, checkpoint_folder: str) -> None:
    """Push as the Trainer does after a checkpoint, with the value head, and without its pickled arguments.

    Those would carry the Hub's token along.

    Args:
        trainer ([`PPOTrainer`]): The trainer.
        checkpoint_folder (`str`): The checkpoint that was just written.
    """
    args, under_way = trainer.args, trainer.push_in_progress
    busy = under_way is not None and not under_way.is_done()
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    if busy and not args.hub_always_push:
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    _copy_saved(trainer, checkpoint_folder)

    def upload(folder: str, **kwargs: Any) -> Any:
        return HfApi().upload_folder(
            repo_id=trainer.hub_model_id,
            folder_path=folder,
            commit_message=f"Training in progress, step {trainer.state.global_step}",
            token=args.hub_token,
            run_as_future=True,
            revision=args.hub_revision,
            **kwargs,
        )

    jobs = [upload(args.output_dir, ignore_patterns=["_*", "checkpoint-*", ".saving/*", ".replaced/*"])]
    if args.hub_strategy == HubStrategy.CHECKPOINT:
        jobs.append(upload(checkpoint_folder, path_in_repo="last-checkpoint"))
    elif args.hub_strategy == HubStrategy.ALL_CHECKPOINTS:
        jobs.append(upload(checkpoint_folder, path_in_repo=os.path.basename(checkpoint_folder)))
    if busy:
        under_way.jobs.extend(jobs)
    else:
        trainer.push_in_progress = PushInProgress(jobs)


def _copy_saved(trainer: Any, checkpoint_folder: str) -> None:
    """Do what `save_model` does, for which sharded weights would be gathered: and the other processes are not here."""
    for file in SAVED:
        source, target = os.path.join(checkpoint_folder, file), os.path.join(trainer.args.output_dir, file)
        if os.path.isfile(source):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(source, target)
        else:  # of a run with a critic of another kind: it would pass for a part of this one
            with suppress(FileNotFoundError):
                os.remove(target)
    trainer.processing_class.save_pretrained(trainer.args.output_dir)
