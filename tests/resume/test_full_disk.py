"""A full or read-only disk ends a run with a remedy; earlier checkpoints stay intact."""

import errno
import shutil
import subprocess

import pytest
import torch
from runs_of_tiny import trainer, weights

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.checkpoints import resume
from trl_ppo_ext.checkpoints import save as saving
from trl_ppo_ext.checkpoints.atomic import checkpoints, verify
from trl_ppo_ext.checkpoints.files import CheckpointError
from trl_ppo_ext.modeling import adapter_files

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "lr_scheduler_type": "constant"}
REMEDY = r"checkpoint-4` cannot be written .*earlier checkpoints are intact. Free space.*resume_from_checkpoint"


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that has taken two steps."""
    folder = tmp_path_factory.mktemp("begun")
    trainer(folder, **SAVING | {"max_steps": 2}).train()
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    whole = trainer(tmp_path_factory.mktemp("whole"), **SAVING)
    whole.train()
    return weights(whole)


def run(disk):
    return trainer(disk / "run", **SAVING, resume_with_changed_settings=True)


def check_it_goes_on(disk, expected):
    built = run(disk)
    built.train(resume_from_checkpoint=True)
    assert [path.name for path in checkpoints(disk / "run")] == ["checkpoint-6", "checkpoint-4", "checkpoint-2"]
    assert all(torch.equal(x, expected[name]) for name, x in weights(built).items())


def test_full_disk_raises_and_keeps_earlier_checkpoints(small_disk, begun, expected):
    """At whatever file it is full: torch, safetensors and Python each have an error of their own for it."""
    shutil.copytree(begun, small_disk / "run")
    size = sum(path.stat().st_size for path in (begun / "checkpoint-2").rglob("*"))
    built = run(small_disk)
    for share in (0, 0.1, 0.45, 0.85):
        with open(small_disk / "filler", "wb") as filler:
            filler.write(b"x" * (shutil.disk_usage(small_disk).free - int(share * size)))
        with pytest.raises(CheckpointError, match=REMEDY):
            built.train(resume_from_checkpoint=True)
        names = {path.name for path in (small_disk / "run").iterdir()}
        assert names - {"run_log.jsonl", ".lock"} == {"checkpoint-2"}  # the log has what there was room for
        verify(small_disk / "run" / "checkpoint-2")
        (small_disk / "filler").unlink()
    check_it_goes_on(small_disk, expected)


def test_read_only_disk_raises_before_training(small_disk, begun):
    shutil.copytree(begun, small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"`output_dir` must be a directory that can be written.*Read-only"):
        run(small_disk).train(resume_from_checkpoint=True)
    verify(small_disk / "run" / "checkpoint-2")


WRITERS = [
    (adapter_files, "save_file"),  # adapters and critic
    (saving.torch, "save"),  # optimizer and scheduler
    (PPOTrainer, "_save_rng_state"),
    (saving, "save_file"),  # the rank's state
    (resume, "publish"),
    (resume.Path, "mkdir"),
]


@pytest.mark.parametrize("module, writer", WRITERS, ids=lambda part: getattr(part, "__name__", part))
def test_failing_writer_raises_with_a_remedy(tmp_path, begun, monkeypatch, module, writer):
    """The same where nothing can be mounted."""
    shutil.copytree(begun, tmp_path / "run")
    built = run(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, writer, full)
        with pytest.raises(CheckpointError, match=REMEDY.replace("written .*", "written .*No space left.*")):
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
