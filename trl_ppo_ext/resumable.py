"""A Trainer that survives its machine: whole checkpoints at any optimizer step, and a clean way out on a signal."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging

from .checkpoint import CheckpointError
from .hub import push_in_background
from .whole_checkpoints import STAGING, newest_whole, publish, verify

logger = logging.get_logger(__name__)

PREEMPTED = 75  # exit code of a run that a signal ended and that saved: EX_TEMPFAIL, "try again later"
TRAINER_STATE = "trainer_state.json"


def run_state_file(process_index: int) -> str:
    """Name of the file in a checkpoint that holds what a process had under way.

    Args:
        process_index (`int`): Number of the process.

    Returns:
        `str`: The name.
    """
    return f"run_state_{process_index}.safetensors"


class StopSignals:
    """SIGTERM and SIGINT ask a run to save and leave; a second one makes it leave at once."""

    def __init__(self):
        self.received: int | None = None

    def _handle(self, number: int, frame: Any) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        logger.warning(
            "%s: the run saves a checkpoint after this optimizer step and leaves with exit code %d. Send it once more "
            "to leave at once.",
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
                signal.signal(number, handler)


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
        self._staging: Path | None = None
        self.add_callback(_RunCallback(self))

    def _run_state(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _load_run_state(self, state: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _check_resumed(self, directory: str) -> None:
        """Refuse a checkpoint that this run would not continue."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> Any:
        """Train, from the beginning or from a checkpoint.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint, or `True` for the newest whole one in `args.output_dir`.
            args (`tuple`): Further arguments of [`~transformers.Trainer.train`].
            kwargs (`dict`): Further arguments of [`~transformers.Trainer.train`].

        Returns:
            `TrainOutput`: What the Trainer returns.

        Raises:
            [`CheckpointError`]: If the checkpoint is damaged, or belongs to a run with other settings.
            `SystemExit`: With code 75 after SIGTERM or SIGINT, once a checkpoint is saved.
        """
        self._resumed_from = self._find_checkpoint(resume_from_checkpoint)
        self.preempted = False
        with self.signals.watched():
            output = super().train(self._resumed_from, *args, **kwargs)
        if self.preempted:
            raise SystemExit(PREEMPTED)
        return output

    def _find_checkpoint(self, given: str | bool | None) -> str | None:
        if not given:
            return None
        with PartialState().main_process_first():
            if given is True:
                found = newest_whole(self.args.output_dir)
                if found is None:
                    raise CheckpointError(
                        f"There is no checkpoint in `{self.args.output_dir}` to resume from; call `train()` without "
                        "`resume_from_checkpoint`, or name one."
                    )
                given = os.path.join(self.args.output_dir, found.name)
            else:
                verify(given)
        self._check_resumed(given)
        return given

    def _take_up(self) -> None:
        if self._resumed_from is None:
            return
        path = os.path.join(self._resumed_from, run_state_file(self.args.process_index))
        if not os.path.isfile(path):
            raise CheckpointError(
                f"`{self._resumed_from}` has nothing for process {self.args.process_index} of {self.args.world_size}; "
                "resume with as many processes as the run had."
            )
        state = load_file(path)
        loss, last_logged = state.pop("loss").tolist()
        self._tr_loss, self._globalstep_last_logged = torch.tensor(loss, device=self.args.device), int(last_logged)
        self._total_loss_scalar = -loss  # the mean at the end is that of this `train()` alone
        self._load_run_state(state)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint aside, and rename it when it is whole."""
        run_dir, name = Path(self._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staging = run_dir / STAGING
        try:
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
                (staging / name).mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self._staging = staging
            super()._save_checkpoint(model, trial)
            state = {key: x.detach().cpu().contiguous() for key, x in self._run_state().items()}
            progress = [self._tr_loss.item(), self._globalstep_last_logged]
            state["loss"] = torch.tensor(progress, dtype=torch.float64)
            save_file(state, staging / name / run_state_file(self.args.process_index))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._publish(staging / name, run_dir / name)
        except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
            shutil.rmtree(staging, ignore_errors=True)
            raise CheckpointError(
                f"The checkpoint of step {self.state.global_step} cannot be written to `{run_dir}` ({error}); earlier "
                "ones are as they were. Make room, and go on with `train(resume_from_checkpoint=True)`."
            ) from error
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()
        if self.state.best_model_checkpoint == str(staging / name):  # so every process has it from the Trainer
            self.state.best_model_checkpoint = str(run_dir / name)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))

    def _publish(self, staged: Path, final: Path) -> None:
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(final)
            self.state.save_to_json(str(staged / TRAINER_STATE))  # it names the place aside
        publish(staged, final)
        shutil.rmtree(staged.parent, ignore_errors=True)
        rotate_checkpoints(
            output_dir=str(final.parent),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:  # what is still written aside is pushed when it is whole
            push_in_background(self, checkpoint_folder)

    def final_place(self, directory: str) -> str:
        """Where a directory will be found when what is written is whole.

        Args:
            directory (`str`): A directory that is written, aside or not.

        Returns:
            `str`: Its path afterwards.
        """
        path = Path(directory)
        return str(path.parent.parent / path.name) if path.parent == self._staging else directory
