"""Push a run to the Hub: its folder at the end, and while it trains in the background."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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

from ..redaction import shortened
from ..tracking.report.reading import REPORT, RUN_LOG
from .atomic import REPLACED, STAGING
from .files import ADAPTER, AVERAGED_FILES, CRITIC_FILES, STATE
from .model_card import as_list

logger = logging.get_logger(__name__)

_WEIGHTS = [*ADAPTER, *AVERAGED_FILES, *CRITIC_FILES["adapter"]]
PUSHING = ".pushing-"  # prefix of the copies that are being pushed
# names in the run's folder that are not pushed: rollouts with NaN gradients, checkpoints, input of `trl-ppo report`,
# and the arguments that another Trainer has pickled, which hold the token
NOT_PUSHED = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*", STAGING, REPLACED, f"{PUSHING}*", RUN_LOG, TRAINING_ARGS_NAME)
REMEDIES = {
    401: "The token is missing or invalid: log in with `hf auth login`, or set HF_TOKEN or `hub_token`",
    403: "The token has no right to write to it: grant it, or set another repository in `hub_model_id`",
    404: "The repository does not exist, or the token cannot read it: check `hub_model_id` and the token",
}


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
        remedy = next((REMEDIES[x] for x in statuses if x in REMEDIES), "Check the connection to the Hub")
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

    def push() -> Any:
        with push_errors(trainer.args, trainer.hub_model_id, token):
            return _upload_run(trainer, args.output_dir, message, token, revision)

    if blocking:
        return push()
    job = run_as_future(push)
    trainer.push_in_progress = PushInProgress([job])
    return job


def push_in_background(trainer: Trainer, checkpoint_folder: str) -> None:
    """Push what a checkpoint holds, as `hub_strategy` says; a failure is a warning, and training continues."""
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return  # other processes have no repository
    state, output_dir = trainer.state, args.output_dir
    # 1. a checkpoint is not pushed if an earlier one still is
    if trainer.push_in_progress is None or trainer.push_in_progress.is_done():
        for copy_of_killed_run in Path(output_dir).glob(f"{PUSHING}*"):
            shutil.rmtree(copy_of_killed_run, ignore_errors=True)
        trainer.push_in_progress = PushInProgress([])
    elif not args.hub_always_push:
        return
    when = f"step {state.global_step}" if args.save_strategy == SaveStrategy.STEPS else f"epoch {int(state.epoch)}"
    with _failure_as_warning(trainer, when):
        trainer.callback_handler.on_push_begin(args, state, trainer.control)
        # 2. `save_model` would gather sharded weights, and the other processes are not here: files are copied
        _copy_saved(checkpoint_folder, output_dir)
        trainer.processing_class.save_pretrained(output_dir)
        _write_report(output_dir)
        # 3. the upload reads a copy, since the run overwrites and deletes its files meanwhile
        copy = TemporaryDirectory(prefix=PUSHING, dir=output_dir, ignore_cleanup_errors=True)
        skip, run_copy = shutil.ignore_patterns(*NOT_PUSHED), os.path.join(copy.name, "run")
        shutil.copytree(output_dir, run_copy, ignore=lambda at, x: skip(at, x) if at == output_dir else ())
        name = os.path.basename(checkpoint_folder)
        places = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: name}
        place = places.get(args.hub_strategy)
        if place is not None:
            shutil.copytree(checkpoint_folder, os.path.join(copy.name, "checkpoint"), copy_function=_link)
        trainer.push_in_progress.jobs.append(run_as_future(_push_copy, trainer, copy, place, when))


def _push_copy(trainer: Trainer, copy: TemporaryDirectory, place: str | None, when: str) -> None:
    args, message = trainer.args, f"Training in progress, {when}"
    with copy, _failure_as_warning(trainer, when):
        _upload_run(trainer, os.path.join(copy.name, "run"), message, args.hub_token, args.hub_revision)
        if place is not None:
            upload_folder(
                repo_id=trainer.hub_model_id,
                folder_path=os.path.join(copy.name, "checkpoint"),
                path_in_repo=place,
                commit_message=f"{message}, checkpoint",
                token=args.hub_token,
                revision=args.hub_revision,
                delete_patterns="*",  # files of an older checkpoint that this one lacks
            )


@contextmanager
def _failure_as_warning(trainer: Trainer, when: str) -> Iterator[None]:
    try:
        with push_errors(trainer.args, trainer.hub_model_id):
            yield
    except PushError as error:
        logger.warning("The push of %s failed; training continues. %s", when, error)


def _upload_run(trainer: Trainer, folder: str, message: str | None, token: str | None, revision: str | None) -> Any:
    # the repository may hold files of a run with another kind of critic
    stale = [file for file in _WEIGHTS if not os.path.isfile(os.path.join(folder, file))]
    return upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=folder,
        commit_message=message,
        token=token,
        revision=revision,
        ignore_patterns=[pattern for name in NOT_PUSHED for pattern in (name, f"{name}/*")],
        delete_patterns=stale or None,
    )


def _write_report(output_dir: str) -> None:
    """Write the report of the run so far; without it, the push continues."""
    from ..tracking.report import write_report  # imports plots

    if not os.path.isfile(os.path.join(output_dir, RUN_LOG)):
        return  # nothing was trained here
    try:
        write_report([output_dir], os.path.join(output_dir, REPORT))
    except (ValueError, OSError) as error:
        logger.warning("The report of the run cannot be written, and is not pushed: %s", error)


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
