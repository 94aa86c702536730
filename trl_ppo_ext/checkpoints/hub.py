"""Pushing a run to the Hub, while it trains and at its end."""

import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import filter_repo_objects
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy
from transformers.utils import PushInProgress, logging

from ..modeling.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CRITIC_FOLDER, VALUE_HEAD
from ..redaction import shortened
from ..tracking.report import write_report
from ..tracking.report.reading import REPORT, RUN_LOG
from .atomic import REPLACED, STAGING
from .files import AVERAGED, STATE
from .model_card import provenance

logger = logging.get_logger(__name__)

_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
_WEIGHTS = [os.path.join(folder, file) for folder in ("", CRITIC_FOLDER, AVERAGED) for file in _ADAPTER] + [VALUE_HEAD]
# of a checkpoint, what `save_model` writes; the tokenizer aside, which knows its own files
SAVED = [*_WEIGHTS, STATE, "README.md"]
PUSHING = ".pushing"  # what is on its way: later checkpoints overwrite and delete what lies elsewhere
# of the run's folder: reports on numbers that are not finite, checkpoints, and what `trl-ppo report` reads
NOT_PUSHED = ["_*", f"{PREFIX_CHECKPOINT_DIR}-*", f"{STAGING}/*", f"{REPLACED}/*", f"{PUSHING}/*", RUN_LOG]
REMEDIES = {
    None: "See that the Hub can be reached",
    401: "The token is missing or not valid: log in with `hf auth login`, or set HF_TOKEN or `hub_token`",
    403: "The token has no right to write there: give it that right, or name another repository in `hub_model_id`",
    404: "There is no such repository, or the token may not see it: check `hub_model_id` and the token",
}


class PushError(RuntimeError):
    """Raised when the Hub did not take what was pushed; every file is still on this machine."""


@dataclass
class _Push:
    """Uploads that go on in the background, and the copy that they read."""

    step: int
    copy: Path
    jobs: list[Any]


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _reason(error: BaseException, tokens: list[str | None]) -> str:
    """What went wrong, in one line: without tokens, and without the signatures in the addresses of uploads."""
    texts = [" ".join(str(link).split()) or type(link).__name__ for link in _chain(error)[:2]]
    text = re.sub(r"\?\S+", "?...", ": ".join(dict.fromkeys(texts)))
    for token in filter(None, [*tokens, get_token()]):
        text = text.replace(token, "<HUB_TOKEN>")
    return shortened(text)


def push_error(error: BaseException, repo: str, folder: str, tokens: list[str | None]) -> PushError:
    """Say why a push failed and what to do."""
    statuses = (getattr(getattr(link, "response", None), "status_code", None) for link in _chain(error))
    remedy = REMEDIES.get(next((status for status in statuses if status is not None), None), REMEDIES[None])
    said = f"`{repo}` was not pushed to the Hub ({_reason(error, tokens)})."
    if not os.path.isdir(folder):
        return PushError(f"{said} Nothing was trained for it yet. {remedy}.")
    return PushError(
        f"{said} Nothing is lost: all files are in `{folder}`. {remedy}, and call `trainer.push_to_hub()` again, or "
        f"`hf upload {repo} {folder}`; large files that have arrived are not sent twice."
    )


class PublishingTrainer(Trainer):
    """The part of [`PPOTrainer`] that speaks to the Hub: errors that say what to do, and pushes that fail aloud."""

    _pushes: list[_Push]
    _hub_api: Any = None

    def _card(self, output_dir: str, **metadata: Any) -> Any:
        return super()._card(output_dir, **provenance(self) | metadata)

    def _hub(self) -> Any:
        if self._hub_api is None:  # one client has one queue: commits come one after the other
            self._hub_api = HfApi()
        return self._hub_api

    def _push_error(self, error: BaseException, *tokens: str | None) -> PushError:
        repo = self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        return push_error(error, repo, self.args.output_dir, [self.args.hub_token, *tokens])

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, or find it, before anything is trained for it."""
        self._pushes = []
        try:
            super().init_hf_repo(token, private)
        except Exception as error:
            raise self._push_error(error, token) from None

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **metadata: Any,
    ) -> Any:
        """Save adapter, value head, card and report to `args.output_dir`, and push what is there but checkpoints."""
        args, token = self.args, token if token is not None else self.args.hub_token
        self.save_model(_internal_call=True)  # whatever the Hub says
        if self.is_world_process_zero():
            _report(args.output_dir)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.callback_handler.on_push_begin(args, self.state, self.control)  # a tracker may add tags for the card
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**self._card_metadata(metadata))
        self._finish_current_push()
        try:
            pushed = _upload(self, args.output_dir, commit_message, not blocking, token, revision)
        except Exception as error:
            raise self._push_error(error, token) from None
        if not blocking:
            self._pushes.append(_Push(self.state.global_step, Path(args.output_dir, PUSHING, "end"), [pushed]))
            self.push_in_progress = PushInProgress([pushed])
        return pushed

    def _card_metadata(self, given: dict[str, Any]) -> dict[str, Any]:
        tags = given.get("tags") or []
        tags = [tags] if isinstance(tags, str) else list(tags)
        tags += getattr(self.model, "model_tags", None) or []  # a tracker names its page there
        return {"model_name": self.hub_model_id.split("/")[-1]} | given | {"tags": tags}

    def _finish_current_push(self) -> None:
        """Wait for what is on its way, and tell what did not arrive."""
        super()._finish_current_push()
        self._tell_of_pushes()

    def _tell_of_pushes(self) -> None:
        for push in list(getattr(self, "_pushes", [])):
            if all(job.done() for job in push.jobs):
                self._pushes.remove(push)
                for job in push.jobs:
                    self._tell_of(job, push.step)
                shutil.rmtree(push.copy, ignore_errors=True)
                with suppress(OSError):  # others are on their way
                    push.copy.parent.rmdir()

    def _tell_of(self, job: Any, step: int) -> None:
        try:
            job.result()
        except Exception as error:
            logger.warning("The push of step %d failed; training went on. %s", step, self._push_error(error))


def _report(output_dir: str) -> None:
    """Write the run's report as far as it has come; for want of one nothing is held back."""
    if not os.path.isfile(os.path.join(output_dir, RUN_LOG)):
        return  # nothing was trained here
    try:
        write_report([output_dir], os.path.join(output_dir, REPORT))
    except (ValueError, OSError) as error:
        logger.warning("The report of the run cannot be written, and is not pushed: %s", error)


def _upload(
    trainer: Any, folder: str, message: str | None, in_background: bool, token: str | None, revision: str | None
) -> Any:
    """Upload what lies in the run's folder, in one commit; what another critic has left in the repository goes."""
    stale = [file for file in _WEIGHTS if not os.path.isfile(os.path.join(folder, file))]
    return trainer._hub().upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=folder,
        commit_message=message,
        token=token,
        run_as_future=in_background,
        revision=revision if revision is not None else trainer.args.hub_revision,
        ignore_patterns=list(NOT_PUSHED),
        delete_patterns=stale or None,
    )


def push_in_background(trainer: Any, checkpoint_folder: str) -> None:
    """Push as the Trainer does after a checkpoint, with the value head, and without its pickled arguments.

    Those would carry the Hub's token along. What is pushed is copied first, since the run overwrites and deletes it
    while it is on its way. A push that fails is told by a warning, and does not end the run.
    """
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return  # other processes know of no push in progress
    under_way = trainer.push_in_progress
    busy = under_way is not None and not under_way.is_done()
    trainer._tell_of_pushes()
    if busy and not args.hub_always_push:
        return
    try:
        trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
        _copy_saved(trainer, checkpoint_folder)
        _report(args.output_dir)
        push = _begin(trainer, checkpoint_folder)
    except Exception as error:
        step = trainer.state.global_step
        logger.warning("The push of step %d failed; training goes on. %s", step, trainer._push_error(error))
        return
    trainer._pushes.append(push)
    if busy:
        under_way.jobs.extend(push.jobs)
    else:
        trainer.push_in_progress = PushInProgress(list(push.jobs))


def _begin(trainer: Any, checkpoint_folder: str) -> _Push:
    args, state = trainer.args, trainer.state
    name = os.path.basename(checkpoint_folder)
    place = Path(args.output_dir, PUSHING)
    if not trainer._pushes:
        shutil.rmtree(place, ignore_errors=True)  # of a run that was killed
    place.mkdir(exist_ok=True)
    copy = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))
    step = f"step {state.global_step}" if args.save_strategy == SaveStrategy.STEPS else f"epoch {int(state.epoch)}"
    message = f"Training in progress, {step}"
    _copy_of_run(args.output_dir, copy / "run")
    jobs = [_upload(trainer, str(copy / "run"), message, True, args.hub_token, None)]
    places = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: name}
    if args.hub_strategy in places:
        shutil.copytree(checkpoint_folder, copy / "checkpoint", copy_function=_link)
        job = trainer._hub().upload_folder(
            repo_id=trainer.hub_model_id,
            folder_path=str(copy / "checkpoint"),
            path_in_repo=places[args.hub_strategy],
            commit_message=f"{message}, checkpoint",
            token=args.hub_token,
            run_as_future=True,
            revision=args.hub_revision,
            delete_patterns="*",  # of the checkpoint before, what this one does not have
        )
        jobs.append(job)
    return _Push(state.global_step, copy, jobs)


def _copy_of_run(output_dir: str, target: Path) -> None:
    root = Path(output_dir)
    files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    for file in filter_repo_objects(files, ignore_patterns=list(NOT_PUSHED)):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, target / file)


def _link(source: str, target: str) -> None:
    """A second name for a file of a checkpoint, which nothing writes to any more; a copy where there is no such."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


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
