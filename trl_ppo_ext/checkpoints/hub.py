"""Push a run to the Hub, in the background during training and at its end."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import create_repo, get_token, run_as_future, upload_folder
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy
from transformers.utils import PushInProgress, logging

from ..arguments import as_list
from ..config import PPOConfig
from ..redaction import shortened
from ..tracking.reading import REPORT, RUN_LOG
from .files import ADAPTER, CRITIC_FILES, STATE
from .resume import EARLIER

logger = logging.get_logger(__name__)

_WEIGHTS = [*ADAPTER, *CRITIC_FILES["adapter"]]
PUSHING = ".pushing-"  # prefix of the copies that are being pushed
# names in the run's folder that are not pushed: hidden ones, checkpoints, input of `trl-ppo report`, and the arguments
# that another Trainer has pickled, which hold the token
NOT_PUSHED = ("_*", ".*", f"{PREFIX_CHECKPOINT_DIR}-*", f"{EARLIER}*", RUN_LOG, TRAINING_ARGS_NAME)
REMEDIES = {
    401: "The token is missing or invalid: log in with `hf auth login`, or set HF_TOKEN or `hub_token`",
    403: "The token has no write access: grant it, or set another repository in `hub_model_id`",
    404: "The repository does not exist, or the token cannot read it: check `hub_model_id` and the token",
}


class PushError(RuntimeError):
    """Raised when a push to the Hub failed; every file is still on this machine."""


@contextmanager
def push_errors(repo: str, folder: str | None, token: str | None, when: str | None = None) -> Iterator[None]:
    """Turn any error into a [`PushError`], or a warning of the push `when`, without tokens and signed URLs."""
    try:
        yield
    except Exception as error:
        links = [error, error.__cause__ or error.__context__]  # the cause is the Hub's answer
        texts = [" ".join(str(link).split()) or type(link).__name__ for link in links if link is not None]
        reason = re.sub(r"\?\S+", "?...", ": ".join(dict.fromkeys(texts)))
        for secret in filter(None, (token, get_token())):
            reason = reason.replace(secret, "<HUB_TOKEN>")
        statuses = [getattr(getattr(link, "response", None), "status_code", None) for link in links]
        remedy = next((REMEDIES[x] for x in statuses if x in REMEDIES), "Check the connection to the Hub")
        kept = f"Nothing was trained for it yet. {remedy}."
        if folder is not None:
            again = "call `trainer.push_to_hub()` again; large files that arrived are not sent twice"
            kept = f"Nothing is lost: all files are in `{folder}`. {remedy}, and {again}."
        message = f"`{repo}` was not pushed to the Hub ({shortened(reason)}). {kept}"
        if when is None:
            raise PushError(message) from None
        logger.warning("The push of %s failed; training continues. %s", when, message)


def _repository(args: PPOConfig) -> str:
    return args.hub_model_id or Path(args.output_dir).absolute().name


def create_repository(args: PPOConfig) -> None:
    """Create the run's repository if it does not exist, before models are loaded."""
    with push_errors(_repository(args), None, args.hub_token):
        create_repo(_repository(args), token=args.hub_token, private=args.hub_private_repo, exist_ok=True)


def push_run(
    trainer: Trainer,
    commit_message: str | None = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    **metadata: Any,
) -> Any:
    """Save adapters, critic, card and report to `output_dir`, and push that folder without checkpoints.

    This is [`~transformers.Trainer.push_to_hub`]: all processes call it, and `metadata` are fields of the card.
    """
    args = trainer.args
    folder, token, revision = args.output_dir, token or args.hub_token, revision or args.hub_revision
    # 1. write everything to disk before the first request to the Hub
    trainer.save_model(_internal_call=True)
    if trainer.is_world_process_zero():
        _write_report(folder)
    if trainer.hub_model_id is None:
        with push_errors(_repository(args), folder, token):
            trainer.init_hf_repo(token, private)
    # 2. write the card; when a push begins, trackers add their page to the model's tags
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    if not trainer.is_world_process_zero():
        return None
    tags = [*as_list(metadata.get("tags")), *as_list(getattr(trainer.model, "model_tags", None))]
    trainer.create_model_card(**metadata | {"tags": tags})
    # 3. upload, after the pushes of checkpoints
    trainer._finish_current_push()

    def push() -> Any:
        with push_errors(trainer.hub_model_id, folder, token):
            return _upload(trainer.hub_model_id, folder, commit_message, token, revision)

    if blocking:
        return push()
    job = run_as_future(push)
    trainer.push_in_progress = PushInProgress([job])
    return job


def push_in_background(trainer: Trainer, checkpoint_folder: str) -> None:
    """Push a checkpoint according to `hub_strategy`; a failure is a warning, and training continues."""
    args = trainer.args
    strategy, folder, token, revision = args.hub_strategy, args.output_dir, args.hub_token, args.hub_revision
    if not trainer.is_world_process_zero() or strategy == HubStrategy.END:
        return  # other processes have no repository
    state, repo = trainer.state, trainer.hub_model_id
    # 1. skip the push while an earlier one is in progress
    if trainer.push_in_progress is None or trainer.push_in_progress.is_done():
        for copy_of_killed_run in Path(folder).glob(f"{PUSHING}*"):
            shutil.rmtree(copy_of_killed_run, ignore_errors=True)
        trainer.push_in_progress = PushInProgress([])
    elif not args.hub_always_push:
        return
    when = f"step {state.global_step}" if args.save_strategy == SaveStrategy.STEPS else f"epoch {int(state.epoch)}"

    def push(copy: TemporaryDirectory, place: str | None) -> None:
        message = f"Training in progress, {when}"
        with copy, push_errors(repo, folder, token, when):
            _upload(repo, f"{copy.name}/run", message, token, revision)
            if place is not None:
                _upload(repo, f"{copy.name}/checkpoint", f"{message}, checkpoint", token, revision, place)

    with push_errors(repo, folder, token, when):
        trainer.callback_handler.on_push_begin(args, state, trainer.control)
        # 2. copy what `save_model` writes: it would gather sharded weights, which needs all processes
        for file in (*_WEIGHTS, STATE, "README.md"):  # weights that are missing are of another kind of critic
            source, target = Path(checkpoint_folder, file), Path(folder, file)
            target.unlink(missing_ok=True)
            if source.is_file():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)
        trainer.processing_class.save_pretrained(folder)
        _write_report(folder)
        # 3. upload a copy, because the run overwrites and deletes its files meanwhile
        copy = TemporaryDirectory(prefix=PUSHING, dir=folder, ignore_cleanup_errors=True)
        skip = shutil.ignore_patterns(*NOT_PUSHED)
        shutil.copytree(folder, f"{copy.name}/run", ignore=lambda at, names: skip(at, names) if at == folder else ())
        places = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: Path(checkpoint_folder).name}
        if strategy in places:
            shutil.copytree(checkpoint_folder, f"{copy.name}/checkpoint")
        trainer.push_in_progress.jobs.append(run_as_future(push, copy, places.get(strategy)))


def _upload(
    repo: str, folder: str, message: str | None, token: str | None, revision: str | None, place: str | None = None
) -> Any:
    # the repository may hold files of a run with another kind of critic, and `place` those of an older checkpoint
    stale = [file for file in _WEIGHTS if not os.path.isfile(os.path.join(folder, file))] if place is None else ["*"]
    return upload_folder(
        repo_id=repo,
        folder_path=folder,
        path_in_repo=place,
        commit_message=message,
        token=token,
        revision=revision,
        ignore_patterns=[pattern for name in NOT_PUSHED for pattern in (name, f"{name}/*")],
        delete_patterns=stale or None,
    )


def _write_report(output_dir: str) -> None:
    """Write the report of the run so far, if it has a log; without it, the push continues."""
    if not os.path.isfile(os.path.join(output_dir, RUN_LOG)):
        return
    try:
        from ..tracking.report import write_report  # imports bokeh, an extra

        write_report(output_dir, os.path.join(output_dir, REPORT))
    except Exception as error:  # a report must not end a push
        logger.warning("The report of the run cannot be written, and is not pushed: %s", error)
