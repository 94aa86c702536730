"""Lock a run's directory, find a checkpoint and restore progress from it, and exit cleanly on a
signal."""

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import logging

from ..config import LOCK
from ..distributed import on_every_rank
from ..episodes.engine import Ahead
from .atomic import MANIFEST, checkpoints, latest_valid_checkpoint, restore_replaced, verify
from .files import CURRICULUM, CheckpointError, check_settings, load_state, run_settings

logger = logging.get_logger(__name__)

RUN_STATE = "run_state_{rank}.safetensors"  # a rank's rollout in progress and metrics
EARLIER = "earlier-"  # prefix of directories with checkpoints of earlier runs
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PREEMPTED = 75  # exit code of a run that saved after a signal: EX_TEMPFAIL, "try again later"
# seconds: a launcher forwards a signal that the process may have received already (Ctrl-C)
SAME_SIGNAL = 1.0
WRITE_ERRORS = (OSError, SafetensorError)
READ_ERRORS = (CheckpointError,) + WRITE_ERRORS


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C after its checkpoint is saved: a script can catch `KeyboardInterrupt`, and others
    exit with a code."""


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
        yield
    finally:
        lock.release()


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
        # others are of another trainer
        elif not begin_anew and any((path / MANIFEST).exists() for path in earlier):
            raise CheckpointError(
                f"`output_dir` must have no checkpoints of an earlier run, got {earlier[0].name} "
                f"in `{output_dir}`; use another directory, `resume_from_checkpoint=True` to "
                "continue that run, or `resume_from_checkpoint=False` to begin anew and move them "
                "aside."
            )
        if earlier:
            aside = Path(output_dir, f"{EARLIER}{time.strftime('%Y%m%d-%H%M%S')}")
            aside.mkdir()
            for path in earlier:
                os.rename(path, aside / path.name)
            logger.warning("Checkpoints that do not belong to this run were moved to `%s`.", aside)

    on_every_rank(check, *READ_ERRORS, runs=is_writer)


def files_of_progress(trainer: Any) -> list[str]:
    """Files of this rank that the Trainer would do without, in silence."""
    rank = trainer.accelerator.process_index
    names = [
        TRAINER_STATE_NAME,
        "rng_state.pth" if trainer.args.world_size == 1 else f"rng_state_{rank}.pth",
    ]
    if not trainer.is_deepspeed_enabled:  # It has files of its own, and raises without them.
        names += [OPTIMIZER_NAME, SCHEDULER_NAME]
    return names


def find_checkpoint(
    trainer: Any, resume_from: str | bool, output_dir: str, is_writer: bool
) -> tuple[str, dict[str, Tensor]]:
    """Find a valid checkpoint (a path, or `True` for the latest) on all ranks; return it and
    this rank's run state."""

    def find() -> str:
        if resume_from is True:
            return str(latest_valid_checkpoint(output_dir))
        restore_replaced(Path(str(resume_from)).parent)
        verify(str(resume_from))
        return str(resume_from)

    def check_files() -> None:
        needed = files_of_progress(trainer)
        missing = [name for name in needed if not os.path.isfile(os.path.join(directory, name))]
        if missing:
            raise CheckpointError(
                f"`{directory}` has no {', '.join(missing)}, without which the run would not "
                "continue; resume from another checkpoint."
            )

    def read() -> dict[str, Tensor]:
        saved = load_state(directory)["settings"]
        current = run_settings(trainer.args) | trainer._inputs
        change = check_settings(
            directory, saved, current, trainer.args.resume_with_changed_settings
        )
        trainer._change = change
        if change.listed and is_writer:
            logger.warning("The run resumes under other settings: %s.", change)
        return load_file(
            os.path.join(directory, RUN_STATE.format(rank=trainer.accelerator.process_index))
        )

    try:
        # one rank of those that share a disk reads all of it
        path = on_every_rank(find, *READ_ERRORS, runs=is_writer)
        places = sorted({entry for entry in gather_object([path]) if entry is not None})
        if len(places) > 1:  # with `save_on_each_node`
            raise CheckpointError(
                f"The nodes hold different checkpoints: {places}. Name one that all have."
            )
        directory = places[0]
        tensors = on_every_rank(read, *READ_ERRORS)
        on_every_rank(check_files, *READ_ERRORS)
        return directory, tensors
    except WRITE_ERRORS as error:
        raise CheckpointError(f"The run cannot be resumed: {error}") from error


def load_rates(trainer: Any, load: Callable[[], None]) -> None:
    """Load optimizer and schedule, but keep their settings if the config has other ones than the
    checkpoint."""
    groups = [
        {name: x for name, x in group.items() if name != "params"}
        for group in trainer.optimizer.param_groups
    ]
    load()
    if trainer._change.listed and isinstance(scheduler := trainer.lr_scheduler, LambdaLR):
        for group, settings in zip(trainer.optimizer.param_groups, groups):
            group.update(settings)
        scheduler.base_lrs = [settings["initial_lr"] for settings in groups]
        scheduler.last_epoch -= 1
        scheduler.step()  # computes the rates anew


def load_run_state(trainer: Any, tensors: dict[str, Tensor]) -> None:
    """Restore this rank's progress from the tensors that `write_checkpoint` saved for it."""
    parts: dict[str, dict[str, Tensor]] = {"rollout": {}, "ahead": {}, "metrics": {}, "trainer": {}}
    for key, x in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = x
    loss, last_logged, skipped = parts["trainer"]["numbers"].tolist()
    trainer._tr_loss = torch.tensor(loss, device=trainer.accelerator.device)
    trainer._total_loss_scalar = -loss  # the final mean is that of this `train()`
    trainer._globalstep_last_logged = int(last_logged)
    trainer._skipped = int(skipped)
    if parts["rollout"]:
        with trainer.accelerator.autocast():
            # the rest of the rollout is packed as its beginning was
            trainer.actor_critic.prepare_forwards()
        trainer.updates.load_state_dict(parts["rollout"], trainer.state.global_step)
        # its log-probs, values and rewards are those of the settings under which it was collected
        if trainer._change.refused:
            trainer.updates.reset()
            logger.warning(
                "The checkpoint's unfinished rollout is of the earlier settings; another one is "
                "collected."
            )
    if parts["ahead"] and not trainer._change.refused:
        trainer.roles.player.generator.ahead = Ahead.from_state_dict(parts["ahead"])
    trainer._metrics["train"].load_state_dict(parts["metrics"])
    played = parts["trainer"]["played"]
    # not for a run without a curriculum
    is_same_size = played.shape == trainer.run_state.played.shape
    are_same_rows = trainer._change.listed.keys().isdisjoint(("train_dataset", CURRICULUM))
    if trainer.curriculum is not None and are_same_rows and is_same_size:
        trainer.run_state = trainer.run_state._replace(played=played)
