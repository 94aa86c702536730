"""Push a run to the Hub: its folder at the end, and while it trains in the background."""

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import (  # of one client: commits queue up in order
    create_repo,
    get_token,
    run_as_future,
    upload_folder,
)
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy
from transformers.utils import PushInProgress, logging

from ..modeling.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ..redaction import shortened
from ..tracking.report.reading import REPORT, RUN_LOG
from .atomic import REPLACED, STAGING
from .files import AVERAGED, CRITIC_FILES, STATE
from .model_card import as_list

logger = logging.get_logger(__name__)

_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
_WEIGHTS = [*_ADAPTER, *(os.path.join(AVERAGED, file) for file in _ADAPTER), *CRITIC_FILES["adapter"]]
PUSHING = ".pushing-"  # prefix of the copies that are being pushed
# names in the run's folder that are not pushed: rollouts with NaN gradients, checkpoints, input of `trl-ppo report`,
# and the arguments that another Trainer has pickled, which hold the token
NOT_PUSHED = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*", STAGING, REPLACED, f"{PUSHING}*", RUN_LOG, TRAINING_ARGS_NAME)
REMEDIES = {
    401: "The token is missing or invalid: log in with `hf auth login`, or set HF_TOKEN or `hub_token`",
    403: "The token has no right to write to it: grant it, or set another repository in `hub_model_id`",
    404: "The repository does not exist, or the token cannot read it: check `hub_model_id` and the token",
}
Upload = partial[Any]  # `upload_folder` to the run's repository


class PushError(RuntimeError):
    """Raised when a push to the Hub failed; every file is still on this machine."""


@contextmanager
def push_errors(args: Any, repo: str | None, token: str | None = None) -> Iterator[None]:
    """Turn any error into a [`PushError`] with a remedy, without tokens and signed addresses."""
    try:
        yield
    except Exception as error:
        links = [error, error.__cause__ or error.__context__]  # the cause is the Hub's answer
        texts = [" ".join(str(link).split()) or type(link).__name__ for link in links if link is not None]
        reason = re.sub(r"\?\S+", "?...", ": ".join(dict.fromkeys(texts)))
        for secret in filter(None, (token, args.hub_token, get_token())):
            reason = reason.replace(secret, "<HUB_TOKEN>")
        statuses = [getattr(getattr(link, "response", None), "status_code", None) for link in links]
        remedy = next(
            (REMEDIES[status] for status in statuses if status in REMEDIES), "Check the connection to the Hub"
        )
        folder = args.output_dir
        repo = repo or args.hub_model_id or Path(folder).absolute().name
        message = f"`{repo}` was not pushed to the Hub ({shortened(reason)})."
        if not os.path.isdir(folder):
            raise PushError(f"{message} Nothing was trained for it yet. {remedy}.") from None
        raise PushError(
            f"{message} Nothing is lost: all files are in `{folder}`. {remedy}, and call `trainer.push_to_hub()` "
            f"again, or `hf upload {repo} {folder}`; large files that arrived are not sent twice."
        ) from None


def create_repository(args: Any) -> None:
    """Create the run's repository, or find it, before anything is loaded for it."""
    if args.process_index == 0:
        repo = args.hub_model_id or Path(args.output_dir).absolute().name
        with push_errors(args, repo):
            create_repo(repo, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)


def push_run(
    trainer: Trainer,
    message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    private: bool | None,
    metadata: dict[str, Any],
) -> Any:
    """Save the run and push its folder, as [`~transformers.Trainer.push_to_hub`] does. All processes call it."""
    args = trainer.args
    token, revision = token or args.hub_token, revision or args.hub_revision
    # 1. everything is on the disk before the Hub is asked for anything
    trainer.save_model(_internal_call=True)
    if trainer.is_world_process_zero():
        _write_report(args.output_dir)
    if trainer.hub_model_id is None:
        with push_errors(args, None, token):
            trainer.init_hf_repo(token, private)
    # 2. the card: a tracker names its page in the model's tags when a push begins
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    if not trainer.is_world_process_zero():
        return None
    tags = [*as_list(metadata.get("tags")), *as_list(getattr(trainer.model, "model_tags", None))]
    trainer.create_model_card(**{"model_name": trainer.hub_model_id.split("/")[-1]} | metadata | {"tags": tags})
    # 3. the upload, after those of checkpoints
    trainer._finish_current_push()
    upload = partial(upload_folder, repo_id=trainer.hub_model_id, token=token, revision=revision)
    if not blocking:
        job = _upload_copy(trainer, upload, message, token)
        trainer.push_in_progress = PushInProgress([job])
        return job
    with push_errors(args, trainer.hub_model_id, token):
        return _upload_run(upload, args.output_dir, message)


def push_in_background(trainer: Trainer, checkpoint_folder: str) -> None:
    """Push what a checkpoint holds, as `hub_strategy` says; a failure is a warning, and training continues."""
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return  # other processes have no repository
    state = trainer.state
    if trainer.push_in_progress is None or trainer.push_in_progress.is_done():
        for left in Path(args.output_dir).glob(f"{PUSHING}*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        trainer.push_in_progress = PushInProgress([])
    elif not args.hub_always_push:
        return
    at = f"step {state.global_step}" if args.save_strategy == SaveStrategy.STEPS else f"epoch {int(state.epoch)}"
    try:
        with push_errors(args, trainer.hub_model_id):
            trainer.callback_handler.on_push_begin(args, state, trainer.control)
            # `save_model` would gather sharded weights, and the other processes are not here
            _copy_saved(checkpoint_folder, args.output_dir)
            trainer.processing_class.save_pretrained(args.output_dir)
            _write_report(args.output_dir)
            repo, token, revision = trainer.hub_model_id, args.hub_token, args.hub_revision
            upload = partial(upload_folder, repo_id=repo, token=token, revision=revision)
            job = _upload_copy(trainer, upload, f"Training in progress, {at}", token, checkpoint_folder)
            trainer.push_in_progress.jobs.append(job)
    except PushError as error:
        logger.warning("The push of step %d failed; training continues. %s", state.global_step, error)


def _write_report(output_dir: str) -> None:
    """Write the report of the run so far; without it, the push continues."""
    from ..tracking.report import write_report  # imports plots

    if not os.path.isfile(os.path.join(output_dir, RUN_LOG)):
        return  # nothing was trained here
    try:
        write_report([output_dir], os.path.join(output_dir, REPORT))
    except (ValueError, OSError) as error:
        logger.warning("The report of the run cannot be written, and is not pushed: %s", error)


def _upload_run(upload: Upload, folder: str, message: str | None) -> Any:
    # the repository may hold files of a run with another kind of critic
    stale = [file for file in _WEIGHTS if not os.path.isfile(os.path.join(folder, file))]
    skipped = [pattern for name in NOT_PUSHED for pattern in (name, f"{name}/*")]
    return upload(folder_path=folder, commit_message=message, ignore_patterns=skipped, delete_patterns=stale or None)


def _upload_copy(
    trainer: Trainer, upload: Upload, message: str | None, token: str | None, checkpoint: str | None = None
) -> Future:
    """Push the run's folder, and a checkpoint, from a copy: the run overwrites and deletes files meanwhile."""
    output_dir, step, place = trainer.args.output_dir, trainer.state.global_step, None
    copy = TemporaryDirectory(prefix=PUSHING, dir=output_dir, ignore_cleanup_errors=True)
    run_copy, checkpoint_copy = os.path.join(copy.name, "run"), os.path.join(copy.name, "checkpoint")
    skipped = shutil.ignore_patterns(*NOT_PUSHED)
    shutil.copytree(output_dir, run_copy, ignore=lambda at, names: skipped(at, names) if at == output_dir else ())
    if checkpoint is not None:
        places = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: os.path.basename(checkpoint)}
        place = places.get(trainer.args.hub_strategy)
    if checkpoint is not None and place is not None:
        shutil.copytree(checkpoint, checkpoint_copy, copy_function=_link)

    def push() -> Any:
        try:
            with copy, push_errors(trainer.args, trainer.hub_model_id, token):
                commit = _upload_run(upload, run_copy, message)
                if place is not None:  # "*" deletes files of an older checkpoint that this one lacks
                    text = f"{message}, checkpoint"
                    upload(folder_path=checkpoint_copy, path_in_repo=place, commit_message=text, delete_patterns="*")
                return commit
        except PushError as error:
            logger.warning("The push of step %d failed; training continues. %s", step, error)
            raise

    return run_as_future(push)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # nothing writes to a published checkpoint any more
    except OSError:  # the disk has no links
        shutil.copyfile(source, target)


def _copy_saved(checkpoint: str, output_dir: str) -> None:
    """Copy the files that `save_model` writes, without the tokenizer's; delete those of another kind of critic."""
    for file in (*_WEIGHTS, STATE, "README.md"):
        source, target = Path(checkpoint, file), Path(output_dir, file)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        else:
            target.unlink(missing_ok=True)
