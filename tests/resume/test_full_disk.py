"""A full or read-only disk ends a run with a remedy; earlier checkpoints stay intact."""

import errno
import shutil

import pytest
from runs_of_tiny import trainer

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.checkpoints import save as saving
from trl_ppo_ext.checkpoints.atomic import checkpoints, verify
from trl_ppo_ext.checkpoints.files import CheckpointError
from trl_ppo_ext.modeling import adapters

SAVING = {
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 6,
    "lr_scheduler_type": "constant",
}
REMEDY = r"checkpoint-4` cannot be written .*earlier checkpoints are intact. Free space.*resume_from_checkpoint"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that has taken two steps."""
    folder = tmp_path_factory.mktemp("begun")
    trainer(folder, **SAVING | {"max_steps": 2}).train()
    return folder


def run(disk):
    return trainer(disk / "run", **SAVING, resume_with_changed_settings=True)


WRITERS = [
    (adapters, "save_file"),  # adapters and critic
    (saving.torch, "save"),  # optimizer and scheduler
    (PPOTrainer, "_save_rng_state"),
    (saving, "save_file"),  # the rank's state
    (saving, "publish"),
    (saving.Path, "mkdir"),
]


@pytest.mark.parametrize(
    "module, writer", WRITERS, ids=lambda part: getattr(part, "__name__", part)
)
def test_failing_writer_raises_with_a_remedy(tmp_path, begun, monkeypatch, module, writer):
    """The same where nothing can be mounted."""
    shutil.copytree(begun, tmp_path / "run")
    built = run(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, writer, full)
        with pytest.raises(
            CheckpointError, match=REMEDY.replace("written .*", "written .*No space left.*")
        ):
            built.train(resume_from_checkpoint=True)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    verify(tmp_path / "run" / "checkpoint-2")


def test_other_errors_are_raised_unchanged(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(PPOTrainer, "_save_rng_state", broken)
    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        trainer(tmp_path, **SAVING).train()
    assert not checkpoints(tmp_path)
