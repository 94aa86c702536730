"""A Trainer that survives its machine: whole checkpoints at any optimizer step, and a clean way out on a signal."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from transformers.utils import logging

from ..agreement import on_every_process
from .atomic import STAGING, latest_valid_checkpoint, publish, restore_replaced, rotate, verify
from .files import CheckpointError
from .hub import push_in_background

logger = logging.get_logger(__name__)

PREEMPTED = 75  # exit code of a run that a signal ended and that saved: EX_TEMPFAIL, "try again later"
SAME_SIGNAL = 1.0  # seconds: a launcher passes on what the process has had already, as with Ctrl-C in a terminal
TRAINER_STATE = "trainer_state.json"
UNWRITTEN = (OSError, SafetensorError)
UNREADABLE = (CheckpointError, *UNWRITTEN)
# what `torch.save` and `tokenizers` say of a full disk, in errors of no kind of their own
SIGNS_OF_UNWRITTEN = ("inline_container", "iostream error", "(os error ")


def run_state_file(process_index: int) -> str:
    """Name of the file in a checkpoint that holds what a process had under way."""
    return f"run_state_{process_index}.safetensors"


class StopSignals:
    """SIGTERM and SIGINT ask a run to save and leave; a second one, a second later or more, makes it leave at once."""

    def __init__(self):
        self.received: int | None = None
        self.at = 0.0

    def _handle(self, number: int, frame: Any) -> None:
        if self.received is not None:
            if time.monotonic() - self.at >= SAME_SIGNAL:
                os._exit(128 + number)
            return
        self.received, self.at = number, time.monotonic()
        logger.warning(
            "%s: the run saves a checkpoint after this optimizer step and leaves with exit code %d. Send it once "
            "more, after a second, to leave at once.",
            signal.Signals(number).name,
            PREEMPTED,
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context the signals are kept instead of ending the process."""
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            yield  # Python lets only the main thread have handlers
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                # one that Python did not set is unknown to it
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _RunCallback(TrainerCallback):
    """Takes up what was under way when training begins, and stops it where a process got a signal."""

    def __init__(self, trainer: "ResumableTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """The state of the loop is fresh now, and can be set."""
        self.trainer._take_up()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """All processes agree on whether to stop: they meet here after every optimizer step."""
        received = self.trainer.signals.received is not None
        if args.world_size > 1:
            anywhere = torch.tensor(float(received), device=args.device)
            received = self.trainer.accelerator.reduce(anywhere, reduction="sum").item() > 0
        if received:
            self.trainer.preempted = True
            control.should_save = control.should_training_stop = True


class ResumableTrainer(Trainer):
    """A Trainer whose checkpoints are written aside and renamed, and hold what is under way within a rollout.

    What a subclass has under way it gives in `_run_state` and takes up in `_load_run_state`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.signals = StopSignals()
        self.preempted = False
        self._resumed_from: str | None = None
        self._resumed: dict[str, Tensor] = {}
        self._epoch_began = (0, 0)  # number of the epoch, and the optimizer step at which it began
        self._staging: Path | None = None
        self._unwritten: Exception | None = None
        self._whole: dict[Path, bool] = {}  # of checkpoints: whether they are, once it was looked
        self.add_callback(_RunCallback(self))

    def _run_state(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _load_run_state(self, state: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _check_resumed(self, directory: str) -> None:
        """Refuse a checkpoint that this run would not continue."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> Any:
        """Train, from the beginning or from a checkpoint."""
        self._resumed_from = self._find_checkpoint(resume_from_checkpoint)
        self.preempted = False
        with self.signals.watched():
            output = super().train(self._resumed_from, *args, **kwargs)
        if self.preempted:
            if self.args.world_size > 1:
                self.end()  # one that leaves the others without a word may be aborted, and its exit code be another
            raise SystemExit(PREEMPTED)
        if self.signals.received is not None:  # after the last step: nobody has seen to it
            signal.raise_signal(self.signals.received)
        return output

    # ---- taking up a run ----

    def _find_checkpoint(self, given: str | bool | None) -> str | None:
        self._resumed = {}  # what a `train()` that failed has left
        if not given:
            return None
        find = partial(self._whole_checkpoint, given)
        try:
            # one process of those that share a disk reads all of it
            found = on_every_process(lambda: find() if self.args.should_save else None, *UNREADABLE)
            places = sorted({path for path in gather_object([found]) if path is not None})
            if len(places) > 1:  # with `save_on_each_node`
                raise CheckpointError(f"The nodes hold different checkpoints: {places}. Name one that all have.")
            found = places[0]
            self._resumed = on_every_process(partial(self._read_resumed, found), *UNREADABLE)
        except UNWRITTEN as error:
            raise CheckpointError(f"The run cannot be resumed: {error}") from error
        return found

    def _whole_checkpoint(self, given: str | bool) -> str:
        if given is True:
            found = latest_valid_checkpoint(self.args.output_dir)
            if found is None:
                raise CheckpointError(
                    f"There is no checkpoint in `{self.args.output_dir}` to resume from; call `train()` without "
                    "`resume_from_checkpoint`, or name one."
                )
            return os.path.join(self.args.output_dir, found.name)
        named = str(given)
        restore_replaced(Path(named).parent)
        verify(named)
        return named

    def _read_resumed(self, directory: str) -> dict[str, Tensor]:
        self._check_resumed(directory)
        path = os.path.join(directory, run_state_file(self.args.process_index))
        if not os.path.isfile(path):
            raise CheckpointError(
                f"`{directory}` has nothing for process {self.args.process_index} of {self.args.world_size}; "
                "resume with as many processes as the run had, and a directory that all of them see."
            )
        return load_file(path)

    def _take_up(self) -> None:
        if self._resumed_from is None:
            return
        state, self._resumed = self._resumed, {}
        loss, last_logged = state.pop("loss").tolist()
        self._tr_loss, self._globalstep_last_logged = torch.tensor(loss, device=self.args.device), int(last_logged)
        self._total_loss_scalar = -loss  # the mean at the end is that of this `train()` alone
        self._load_run_state(state)

    # ---- position in the data ----

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        """Which epoch it is, and how many batches of it are read."""
        number, batches = super()._init_training_state(*args, **kwargs)
        position = self._resumed.pop("position", None)
        if position is not None:  # the length of a stream is unknown: the Trainer takes it for one epoch
            number, steps = position.tolist()
            batches = steps * self.args.gradient_accumulation_steps
        self._epoch_began = (number, self.state.global_step - batches // self.args.gradient_accumulation_steps)
        return number, batches

    def _run_epoch(self, model: nn.Module, epoch: int, train_dataloader: DataLoader, *args, **kwargs) -> None:
        """One epoch, of which the Trainer skips what was read before the checkpoint."""
        if self.state.global_step >= self.state.max_steps:  # it ended before: the Trainer would take one step more
            self.control.should_training_stop = True
            return
        if epoch != self._epoch_began[0]:
            self._epoch_began = (epoch, self.state.global_step)
        # with several processes, the loader that skips batches does not pass the epoch on to the sampler
        train_dataloader.set_epoch(epoch)
        super()._run_epoch(model, epoch, train_dataloader, *args, **kwargs)

    # ---- writing ----

    def _determine_best_metric(self, *args, **kwargs) -> bool:
        """Whether to save, which with `save_strategy="best"` an evaluation decides: a run that is stopped does."""
        return super()._determine_best_metric(*args, **kwargs) or self.preempted

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint aside, and rename it when it is whole."""
        run_dir, name = Path(self._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staged, final = run_dir / STAGING / name, run_dir / name
        try:
            on_every_process(partial(self._make_place, staged), *UNWRITTEN)
            self._staging = staged.parent
            self._write_on_every_process(partial(self._write_checkpoint, model, trial, staged))
            on_every_process(partial(self._publish, staged, final), *UNWRITTEN)
        except UNWRITTEN as error:
            if self.args.should_save:
                shutil.rmtree(staged.parent, ignore_errors=True)
            raise CheckpointError(
                f"The checkpoint of step {self.state.global_step} cannot be written to `{run_dir}` ({error}); earlier "
                "ones are as they were. Make room, see that the directory can be written to, and go on with "
                "`train(resume_from_checkpoint=True)`."
            ) from error
        finally:
            self._staging = None
        if self.state.best_model_checkpoint == str(staged):  # so every process has it from the Trainer
            self.state.best_model_checkpoint = str(final)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _make_place(self, staged: Path) -> None:
        if self.args.should_save:
            shutil.rmtree(staged.parent, ignore_errors=True)
            staged.mkdir(parents=True)

    def _write_on_every_process(self, write: partial) -> None:
        if self.is_deepspeed_enabled:  # the processes write parts of one state, and meet while they do
            write()  # one that fails raises alone: the others wait for it until its end ends them
            self.accelerator.wait_for_everyone()
        else:
            on_every_process(write, *UNWRITTEN)

    def _write_checkpoint(self, model: nn.Module, trial: Any, staged: Path) -> None:
        self._unwritten = None
        with self._noting():
            super()._save_checkpoint(model, trial)
        with self._noting():
            if not staged.is_dir():
                raise OSError(f"process {self.args.process_index} does not see it; all of them must share a disk")
            save_file(self._progress(), staged / run_state_file(self.args.process_index))
        if self._unwritten is not None:
            raise self._unwritten

    def _progress(self) -> dict[str, Tensor]:
        """What this process has under way."""
        state = {key: x.detach().cpu().contiguous() for key, x in self._run_state().items()}
        state["loss"] = torch.tensor([self._tr_loss.item(), self._globalstep_last_logged], dtype=torch.float64)
        if not has_length(self.train_dataset):
            number, began = self._epoch_began
            state["position"] = torch.tensor([number, self.state.global_step - began])
        return state

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep an error of writing until all processes are told: the Trainer meets the others after `save_model`."""
        try:
            yield
        except Exception as error:
            named = isinstance(error, UNWRITTEN)
            if self._staging is None or not (named or any(sign in str(error) for sign in SIGNS_OF_UNWRITTEN)):
                raise
            unwritten = error if named else OSError(str(error).strip())
            if self.is_deepspeed_enabled:
                raise unwritten from None
            self._unwritten = self._unwritten or unwritten

    def save_model(self, *args, **kwargs) -> None:
        """Save what [`~transformers.Trainer.save_model`] saves."""
        with self._noting():
            super().save_model(*args, **kwargs)

    def _publish(self, staged: Path, final: Path) -> None:
        if not self.args.should_save:
            return
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(final)
            self.state.save_to_json(str(staged / TRAINER_STATE))  # it names the place aside
        publish(staged, final)
        shutil.rmtree(staged.parent, ignore_errors=True)
        self._whole[final] = True
        rotate(final, self.args.save_total_limit, self.state.best_model_checkpoint, self._whole)

    # ---- the end ----

    def _finalize_training(self, *args, **kwargs) -> Any:
        """The Trainer's, which deletes all but the best checkpoint if `save_total_limit` is 1."""
        if self.preempted:  # it would delete what was saved a moment ago
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            self._finish_current_push()
            self.is_in_train = False
            return None
        best = self.state.best_model_checkpoint
        if best is not None and (self.args.load_best_model_at_end or self.args.save_total_limit == 1):
            self._check_best(best)
        return super()._finalize_training(*args, **kwargs)

    def _check_best(self, best: str) -> None:
        """Do without a best checkpoint that is damaged: the run is over, and its last weights are good."""
        try:
            on_every_process(lambda: verify(best) if self.args.should_save else None, *UNREADABLE)
        except UNREADABLE as error:
            logger.warning(
                "The best checkpoint `%s` cannot be used (%s); the model keeps the weights of the last step, and no "
                "checkpoint is deleted for the best one.",
                best,
                error,
            )
            self.state.best_model_checkpoint = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:  # what is still written aside is pushed when it is whole
            push_in_background(self, checkpoint_folder)

    def final_place(self, directory: str) -> str:
        """Where a directory will be found when what is written is whole."""
        path = Path(directory)
        return str(path.parent.parent / path.name) if path.parent == self._staging else directory
