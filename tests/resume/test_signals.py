"""A signal makes a run save and exit; a second one has its usual effect."""

import fcntl
import os
import signal
import termios
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from runs_of_tiny import trainer, weights
from tiny import prompts
from transformers import TrainerCallback

from trl_ppo_ext.checkpoints import resume as resumable
from trl_ppo_ext.checkpoints.atomic import checkpoints, verify
from trl_ppo_ext.checkpoints.resume import PREEMPTED, StopSignals

INTERRUPTED = 3


def left_with(numbers, pause):
    """Exit code of a process that gets signals at some distance; `INTERRUPTED` for a
    `KeyboardInterrupt`."""
    child = os.fork()
    if not child:
        for number in numbers:  # a run in the background begins with an ignored SIGINT
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        try:
            with StopSignals().watched():
                for number in numbers:
                    os.kill(os.getpid(), number)
                    time.sleep(pause)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, -15), (signal.SIGINT, INTERRUPTED), (signal.SIGHUP, -1)]
)
def test_second_signal_has_its_usual_effect(monkeypatch, number, code):
    """That of Ctrl-C is an exception: a notebook must survive it."""
    monkeypatch.setattr(resumable, "SAME_SIGNAL", 0.2)
    assert left_with([number], 0) == 0
    assert left_with([number, number, number], 0.12) == code
    assert left_with([signal.SIGTERM, number], resumable.SAME_SIGNAL) == code


def test_ignored_signal_stays_ignored():
    """As SIGHUP does under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stops = StopSignals()
    try:
        with stops.watched():
            os.kill(os.getpid(), signal.SIGHUP)
        assert stops.received is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_closed_terminal_leaves_a_checkpoint(tmp_path):
    """A run in a terminal writes to it in every step, and writing to a closed one raises."""
    terminal, end = os.openpty()
    child = os.fork()
    if not child:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
        fcntl.ioctl(end, termios.TIOCSCTTY, 0)
        for descriptor in (0, 1, 2):
            os.dup2(end, descriptor)
        os.close(terminal)
        try:
            built = trainer(tmp_path, max_steps=2000, save_total_limit=1)
            built.add_callback(Writes())
            built.train()
        except SystemExit as stopped:
            os._exit(stopped.code)
        except BaseException:
            (tmp_path / "error.txt").write_text(traceback.format_exc())
        finally:  # another error must not go on in pytest
            os._exit(1)
    os.close(end)
    shown = b""
    until = time.monotonic() + 60
    while b"step 3" not in shown and time.monotonic() < until:
        shown += os.read(terminal, 1024)
    os.close(terminal)
    left = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    error = tmp_path / "error.txt"
    assert left == PREEMPTED, error.read_text() if error.exists() else left
    verify(checkpoints(tmp_path)[0])


class Writes(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        os.write(1, f"step {state.global_step}\n".encode())


def test_signal_from_terminal_and_launcher_counts_once():
    assert left_with([signal.SIGINT, signal.SIGINT, signal.SIGTERM], 0.1) == 0


def test_training_in_a_thread_needs_no_signals(tmp_path):
    built = trainer(tmp_path, max_steps=1)
    thread = threading.Thread(target=built.train)
    thread.start()
    thread.join()
    assert built.state.global_step == 1


class Asks(TrainerCallback):
    """Sends the process a signal in some step."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step = step
        self.number = number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


BEST = {
    "max_steps": 6,
    "save_strategy": "best",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_dataset": prompts(4),
    "metric_for_best_model": "eval_reward",
    "load_best_model_at_end": True,
    "save_total_limit": 1,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    built = trainer(tmp_path_factory.mktemp("whole"), **BEST)
    built.train()
    return built


@pytest.mark.parametrize(
    "during, last", [(4, 5), (3, 4)], ids=["between evaluations", "where one is due"]
)
def test_checkpoint_of_a_signal_is_kept_beside_the_best(tmp_path, whole, during, last):
    """A run that ends deletes all but the best if `save_total_limit` is 1; one that is interrupted
    has not ended.

    An evaluation that is due at the last step finds nothing better, and would leave the checkpoint
    out.
    """
    asked = trainer(tmp_path, callbacks=[Asks(during)], **BEST)
    with pytest.raises(SystemExit) as left:
        asked.train()
    assert left.value.code == PREEMPTED and asked.state.global_step == last
    assert asked.state.best_global_step == 2
    newest = checkpoints(tmp_path)[0]
    assert newest.name == f"checkpoint-{last}"
    verify(newest)
    again = trainer(tmp_path, **BEST)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_global_step == whole.state.best_global_step
    assert all(torch.equal(x, weights(whole)[name]) for name, x in weights(again).items())


def test_signal_chooses_no_other_best_checkpoint(tmp_path):
    """That of a whole run is one that it saves, although a signal may save a better one."""

    def run(name, source=None, **kwargs):
        built = trainer(
            tmp_path / name, **BEST | {"eval_steps": 1, "load_best_model_at_end": False} | kwargs
        )
        loop = built.evaluation_loop

        def third_is_best(*args, **kwargs):
            output = loop(*args, **kwargs)
            output.metrics["eval_reward"] = -abs(built.state.global_step - 3.0)
            return output

        built.evaluation_loop = third_is_best
        built.train(resume_from_checkpoint=source)
        return built.state.best_global_step, Path(built.state.best_model_checkpoint).name

    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None, "max_steps": 4}
    expected = run("whole", **settings)
    assert expected == (3, "checkpoint-2")
    with pytest.raises(SystemExit):
        run("asked", callbacks=[Asks(2)], **settings)
    assert checkpoints(tmp_path / "asked")[0].name == "checkpoint-3"
    assert run("asked", True, **settings) == expected


def test_ctrl_c_can_be_caught_by_a_script(tmp_path, capsys):
    built = trainer(tmp_path, callbacks=[Asks(0, signal.SIGINT)], max_steps=2)
    with pytest.raises(KeyboardInterrupt) as left:
        built.train()
    assert left.value.code == PREEMPTED and checkpoints(tmp_path)[0].name == "checkpoint-1"
    # a notebook shows it as the last line
    saved = f"saved {tmp_path}/checkpoint-1; continue with `trainer.train(resume_from_checkpoint"
    assert str(left.value).startswith(saved)
    assert f"\n{saved}" in capsys.readouterr().out


class AsksAtTheEnd(Asks):
    """Sends it after the last step: within the evaluation that is due there, or when training
    ends."""

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, args, state, control, **kwargs):
        if self.step is None:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("step", [1, None], ids=["evaluation", "end"])
def test_signal_after_the_last_step_reaches_the_old_handler(tmp_path, monkeypatch, step):
    got = []
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: got.append((number, built.is_in_train))
    )
    try:
        settings = {
            "max_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_dataset": prompts(4),
        }
        built = trainer(tmp_path, callbacks=[AsksAtTheEnd(step)], **settings)
        assert built.train().global_step == 1
        assert got == [(signal.SIGTERM, False)]
        built.remove_callback(AsksAtTheEnd)
        built.train()
        assert len(got) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
