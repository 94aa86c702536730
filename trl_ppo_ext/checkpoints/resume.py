"""Lock a run's directory, find a checkpoint and restore progress from it, and exit cleanly on a
signal."""

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..arguments import as_list
from ..config import LOCK, PPOConfig
from ..distributed import on_every_rank
from ..ppo.progress import Progress
from ..ppo.state import RunState
from .atomic import MANIFEST, checkpoints, latest_valid_checkpoint, restore_replaced, verify
from .files import (
    CURRICULUM,
    CheckpointError,
    SettingsChange,
    check_settings,
    load_state,
    run_settings,
)

logger = logging.get_logger(__name__)

RUN_STATE = "run_state_{rank}.safetensors"  # tensors of a rank's `Progress`
EARLIER = "earlier-"  # prefix of directories with checkpoints of earlier runs
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SHOWN_AFTER = 60.0  # seconds in which a shared disk shows a new directory
PREEMPTED = 75  # exit code of a run that saved after a signal: EX_TEMPFAIL, "try again later"
# seconds: a launcher forwards a signal that the process may have received already (Ctrl-C)
SAME_SIGNAL = 1.0
# what a schedule that follows a metric has counted; its other attributes are settings
METRIC_PROGRESS = set(
    "best num_bad_epochs num_good_epochs cooldown_counter warmup_counter reset_start last_epoch "
    "_streaming_avg".split()
)
WRITE_ERRORS = (OSError, SafetensorError)
READ_ERRORS = (CheckpointError,) + WRITE_ERRORS


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C after its checkpoint is saved: a script can catch `KeyboardInterrupt`, and others
    exit with a code. A notebook shows the message."""

    def __init__(self, message: str):
        super().__init__(PREEMPTED)
        self.message = message

    def __str__(self) -> str:
        return self.message


def how_to_continue(output_dir: str | None, step: int) -> str:
    """Sentence on a run that was stopped by a signal after this optimizer step."""
    checkpoint = Path(cast(str, output_dir), f"{PREFIX_CHECKPOINT_DIR}-{step}")
    if not checkpoint.is_dir():  # with NaN none is saved
        return f"stopped after step {step}, which no checkpoint holds"
    return (
        f"saved {checkpoint}; continue with `trainer.train(resume_from_checkpoint=True)` or "
        "`trl-ppo train --resume_from_checkpoint true`"
    )


def earlier_run(output_dir: str) -> Path | None:
    """The newest checkpoint of a run of this package in a directory."""
    return next((path for path in checkpoints(output_dir) if (path / MANIFEST).exists()), None)


def check_earlier_run(output_dir: str) -> None:
    """Raise [`CheckpointError`] if a new run would mix its checkpoints with those of another."""
    found = earlier_run(output_dir)  # others are of another trainer
    if found is not None:
        raise CheckpointError(
            f"`output_dir` must have no checkpoints of an earlier run, got {found.name} in "
            f"`{output_dir}`; use another directory, `resume_from_checkpoint=True` to continue "
            "that run, or `resume_from_checkpoint=False` to begin anew and move them aside."
        )


def warn_of_earlier_run(args: PPOConfig) -> None:
    """Name an earlier run in `output_dir` before anything is loaded: `train` may be told to
    continue it, and otherwise raises an error."""
    found = earlier_run(cast(str, args.output_dir))
    if found is None or args.resume_from_checkpoint is not None or args.process_index:
        return
    logger.warning(
        "`%s` has %s of an earlier run: `train(resume_from_checkpoint=True)` continues it, `False` "
        "begins anew and moves it aside, and `train()` raises an error.",
        args.output_dir,
        found.name,
    )


class StopSignals:
    """Handlers of SIGTERM, SIGINT and SIGHUP: save and exit; a repeated signal (after 1 s) ends
    the process."""

    received: int | None = None
    at = 0.0

    def _handle(self, number: int, frame: Any) -> None:
        if self.received is not None:
            if time.monotonic() - self.at >= SAME_SIGNAL:
                self._restore()
                signal.raise_signal(number)
            return
        self.received = number
        self.at = time.monotonic()
        then = f"saves a checkpoint after this optimizer step and exits with code {PREEMPTED}"
        logger.warning(
            "%s: the run %s. To exit at once, send it again.", signal.Signals(number).name, then
        )
        # writing to a closed terminal would end the run before it has saved
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    def _restore(self) -> None:
        for number, handler in self._before.items():  # `None` was not set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record signals within a context instead of ending the process."""
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            yield  # Python allows handlers only in the main thread
            return
        # an ignored signal stays ignored, such as SIGHUP under `nohup`
        self._before = {
            x: signal.getsignal(x) for x in STOPPING if signal.getsignal(x) != signal.SIG_IGN
        }
        for number in self._before:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            self._restore()


@contextmanager
def locked(output_dir: str, is_writer: bool) -> Iterator[None]:
    """Hold the lock of a run's directory on all ranks; when a process dies, the system releases
    it."""
    lock = FileLock(os.path.join(output_dir, LOCK))

    def acquire() -> None:
        try:
            os.makedirs(output_dir, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            raise CheckpointError(
                f"Another run is training in `{output_dir}`; set another `output_dir`, or end that "
                "run."
            ) from None
        except (OSError, NotImplementedError) as error:
            if not os.access(output_dir, os.W_OK):
                raise CheckpointError(
                    f"`output_dir` must be a writable directory, got `{output_dir}` ({error}); use "
                    "another."
                ) from None
            logger.warning(
                "`%s` cannot be locked (%s); start no other run in it.", output_dir, error
            )

    on_every_rank(acquire, CheckpointError, runs=is_writer)
    try:
        on_every_rank(partial(see, output_dir), CheckpointError)
        yield
    finally:
        lock.release()


def see(output_dir: str) -> None:
    """Wait until this rank sees the run's directory, which a shared disk may show late; or raise
    [`CheckpointError`]."""
    given_up = time.monotonic() + SHOWN_AFTER
    while not os.path.isdir(output_dir):
        if time.monotonic() > given_up:
            raise CheckpointError(
                f"`output_dir` must be on a disk that all processes see, got `{output_dir}`; use "
                "another, or set `save_on_each_node=True`."
            )
        time.sleep(0.5)


def prepare_directory(
    output_dir: str, is_writer: bool, begin_anew: bool, resumed_from: str | None
) -> None:
    """Move aside the checkpoints of an earlier run, or raise [`CheckpointError`] unless
    `begin_anew`.

    With `resumed_from`, move only the later ones: the next resume must not return to the abandoned
    branch.
    """

    def check() -> None:
        restore_replaced(output_dir)
        earlier = checkpoints(output_dir)
        if resumed_from is not None:
            names = [path.name for path in earlier]
            name = Path(resumed_from).resolve().name
            if name in names:
                earlier = earlier[: names.index(name)]
            else:
                earlier = []
        elif not begin_anew:
            check_earlier_run(output_dir)
        if earlier:
            aside = Path(output_dir, f"{EARLIER}{time.strftime('%Y%m%d-%H%M%S')}")
            aside.mkdir()
            for path in earlier:
                os.rename(path, aside / path.name)
            logger.warning(
                "Checkpoints of an earlier run were moved to `%s`: this run %s.",
                aside,
                f"continues `{resumed_from}`" if resumed_from else "begins anew",
            )

    on_every_rank(check, *READ_ERRORS, runs=is_writer)


class Checkpoint(NamedTuple):
    """A valid checkpoint, as this rank has read it."""

    directory: str
    progress: Progress
    change: SettingsChange  # from its settings to those of the run


def find_checkpoint(resume_from: str | bool, args: PPOConfig, inputs: dict[str, Any]) -> Checkpoint:
    """Find a valid checkpoint (a path, or `True` for the latest) on all ranks, and read it.

    `inputs` are the fingerprints of what the run is given besides its config.
    """

    def find() -> str:
        if resume_from is True:
            return str(latest_valid_checkpoint(cast(str, args.output_dir)))
        restore_replaced(Path(str(resume_from)).parent)
        verify(str(resume_from))
        return str(resume_from)

    try:
        # one rank of those that share a disk verifies the whole checkpoint
        path = on_every_rank(find, *READ_ERRORS, runs=args.should_save)
        places = sorted({entry for entry in gather_object([path]) if entry is not None})
        if len(places) > 1:  # with `save_on_each_node`
            raise CheckpointError(
                f"The nodes hold different checkpoints: {places}. Name one that all have."
            )
        checkpoint = on_every_rank(partial(_read, places[0], args, inputs), *READ_ERRORS)
        on_every_rank(partial(_check_files, places[0], args), *READ_ERRORS)
    except WRITE_ERRORS as error:
        raise CheckpointError(f"The run cannot be resumed: {error}") from error
    if checkpoint.change.listed and args.should_save:
        logger.warning("The run resumes under other settings: %s.", checkpoint.change)
    return checkpoint


def _read(directory: str, args: PPOConfig, inputs: dict[str, Any]) -> Checkpoint:
    state = load_state(directory)
    change = check_settings(
        directory,
        saved=state["settings"],
        current=run_settings(args) | inputs,
        may_change=args.resume_with_changed_settings,
    )
    tensors = load_file(os.path.join(directory, RUN_STATE.format(rank=args.process_index)))
    try:
        run = RunState.from_json(state["run"])
        progress = Progress.from_tensors(tensors, run, args.device)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"`{directory}` has other contents than this version of the package writes "
            f"({type(error).__name__}: {error}); resume with the version that wrote it."
        ) from error
    # a constant coefficient is the config's, and so is one that was changed; others were adapted
    if args.kl_target is None or "kl_coef" in change.listed:
        progress = progress._replace(run=progress.run._replace(kl_coef=args.kl_coef))
    return Checkpoint(directory, progress, change)


def _check_files(directory: str, args: PPOConfig) -> None:
    """Raise [`CheckpointError`] without a file of this rank that the Trainer would do without, in
    silence."""
    alone = args.world_size == 1
    needed = [
        TRAINER_STATE_NAME,
        "rng_state.pth" if alone else f"rng_state_{args.process_index}.pth",
    ]
    if not args.uses_deepspeed:  # It has files of its own, and raises without them.
        needed += [OPTIMIZER_NAME, SCHEDULER_NAME]
    missing = [name for name in needed if not os.path.isfile(os.path.join(directory, name))]
    if missing:
        raise CheckpointError(
            f"`{directory}` has no {', '.join(missing)}, without which the run would not continue; "
            "resume from another checkpoint."
        )


def usable_progress(checkpoint: Checkpoint, played: Tensor) -> Progress:
    """Progress of a checkpoint, without what is of other settings or other rows; `played` is that
    of a new run."""
    _, progress, change = checkpoint
    if change.refused:
        # its log-probs, values and rewards are those of the settings under which it was collected
        if progress.rollout is not None:
            logger.warning(
                "The checkpoint's unfinished rollout is of the earlier settings; another one is "
                "collected."
            )
        progress = progress._replace(run=progress.run.without_scores(), rollout=None, ahead=None)
    # a run without a curriculum counts no rows
    is_same_size = progress.run.played.shape == played.shape
    are_same_rows = change.listed.keys().isdisjoint(("train_dataset", CURRICULUM))
    if not (is_same_size and are_same_rows):
        progress = progress._replace(run=progress.run._replace(played=played))
    return progress


def load_without_optimizer(optimizer: Any, load: Callable[[], None]) -> None:
    """Load the state of the schedule only: that of another optimizer does not fit."""
    logger.warning("`optim` is another one: its state begins anew, and the schedule goes on.")
    optimizer.load_state_dict = lambda state: None
    try:
        load()
    finally:
        del optimizer.load_state_dict  # that of its class again


def load_under_own_rates(
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    load: Callable[[], None],
    follows_same_metric: bool = True,
) -> None:
    """Load the states of optimizer and schedule, but keep the config's rates and schedule.

    A schedule that follows another metric than before counts anew.
    """
    groups = [
        {name: x for name, x in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    attributes = dict(vars(scheduler))
    load()
    follows_metric = hasattr(scheduler, "num_bad_epochs")  # a plateau's, or a greedy one
    if not (isinstance(scheduler, LambdaLR) or follows_metric):
        return  # of a script, or of DeepSpeed, which has loaded its rates
    saved_rates = [(group["lr"], group.get("initial_lr")) for group in optimizer.param_groups]
    for group, settings in zip(optimizer.param_groups, groups):
        group.update(settings)
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [settings["initial_lr"] for settings in groups]
        scheduler.last_epoch -= 1
        scheduler.step()  # computes the rates anew
        return
    # the schedule has reduced or raised the saved rates, and so these
    for group, (rate, initial_rate) in zip(optimizer.param_groups, saved_rates):
        if initial_rate:  # an earlier version did not save it
            # this quotient is exactly 1 if the rate is the same
            group["lr"] = rate * (group["initial_lr"] / initial_rate)
    kept = METRIC_PROGRESS if follows_same_metric else {"last_epoch"}
    progress = {name: x for name, x in vars(scheduler).items() if name in kept}
    vars(scheduler).update(attributes | progress)


def restore_callbacks(
    callbacks: list[TrainerCallback], states: Mapping[str, Any], constructs: bool
) -> None:
    """Restore the script's callbacks in place; with `constructs`, also from the arguments of their
    construction."""
    for name, saved_states in states.items():
        of_name = [x for x in callbacks if type(x).__name__ == name]
        for callback, saved in zip(of_name, as_list(saved_states)):
            if constructs:
                type(callback).__init__(callback, **saved.get("args", {}))
            for attribute, value in saved.get("attributes", {}).items():
                setattr(callback, attribute, value)


def best_checkpoint_in(output_dir: str, checkpoint: str) -> str | None:
    """Path of a checkpoint's best one, if it lies in a run's directory: the run may have been
    moved or copied, and then the Trainer has dropped the path."""
    state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
    if not state.best_model_checkpoint:
        return None
    here = Path(output_dir, Path(state.best_model_checkpoint).name)
    return str(here) if here.is_dir() else None
