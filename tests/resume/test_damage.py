"""Damaged or unfinished checkpoints are named, skipped, and never used."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from runs_of_tiny import trainer
from safetensors.torch import load_file
from tiny import prompts
from transformers import TrainerCallback

from trl_ppo_ext import distributed
from trl_ppo_ext.checkpoints.atomic import (
    MANIFEST,
    REPLACED,
    STAGING,
    checkpoints,
    latest_valid_checkpoint,
    rotate,
    seal,
    verify,
)
from trl_ppo_ext.checkpoints.files import CheckpointError

SAVING = {"save_strategy": "steps", "save_steps": 1, "critic": "adapter"}
FILES = sorted(
    """README.md adapter_config.json adapter_model.safetensors critic/adapter_config.json
    critic/adapter_model.safetensors manifest.json optimizer.pt
    ppo_state.json rng_state.pth run_state_0.safetensors scheduler.pt tokenizer.json tokenizer_config.json
    trainer_state.json value_head.safetensors
    """.split()
)
# without these the Trainer goes on with new ones, and says nothing
PROGRESS = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


def one_bit_flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def emptied(file):
    os.truncate(file, 0)


def removed(file):
    file.unlink()


def files_of(directory):
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, max_steps=2, **SAVING).train()
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def test_checkpoint_has_exactly_these_files(run):
    assert files_of(run / "checkpoint-2") == FILES
    assert set(json.loads((run / "checkpoint-2" / MANIFEST).read_text())) == set(FILES) - {MANIFEST}


@pytest.mark.parametrize("damage", [one_bit_flipped, emptied, removed])
@pytest.mark.parametrize("file", FILES)
def test_damaged_file_is_named_and_the_older_checkpoint_used(copy, file, damage, caplog):
    assert latest_valid_checkpoint(copy).name == "checkpoint-2" and not caplog.records
    damage(copy / "checkpoint-2" / file)
    with pytest.raises(CheckpointError, match=file):
        verify(copy / "checkpoint-2")
    assert latest_valid_checkpoint(copy).name == "checkpoint-1"
    assert file in caplog.text and "checkpoint-2" in caplog.text
    damage(copy / "checkpoint-1" / file)
    with pytest.raises(CheckpointError, match="2 are damaged"):
        latest_valid_checkpoint(copy)


def test_other_directories_are_not_called_damaged(tmp_path):
    for other in (tmp_path, tmp_path / "chekpoint-2"):
        with pytest.raises(
            CheckpointError, match=r"` has no manifest.json: it does not exist, or is of another"
        ):
            verify(other)


def test_run_falls_back_unless_a_damaged_checkpoint_is_named(run, copy):
    expected = weights_of(run / "checkpoint-2")
    emptied(copy / "checkpoint-2" / "optimizer.pt")
    built = trainer(copy, max_steps=2, **SAVING)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        built.train(resume_from_checkpoint=str(copy / "checkpoint-2"))
    assert built.state.global_step == 0
    built.train(resume_from_checkpoint=True)
    verify(copy / "checkpoint-2")  # it was written anew, over the damaged one
    assert weights_of(copy / "checkpoint-2") == expected
    for name in ("checkpoint-1", "checkpoint-2"):
        emptied(copy / name / "trainer_state.json")
    with pytest.raises(CheckpointError, match="2 are damaged"):
        built.train(resume_from_checkpoint=True)


def weights_of(directory):
    return {
        name: (directory / name).read_bytes()
        for name in FILES
        if "adapter_model" in name or "value_head" in name
    }


def test_unfinished_checkpoint_is_never_used(copy):
    (copy / STAGING).mkdir()
    os.rename(copy / "checkpoint-2", copy / STAGING / "checkpoint-2")
    assert latest_valid_checkpoint(copy).name == "checkpoint-1"
    trainer(copy, max_steps=2, **SAVING).train(resume_from_checkpoint=True)
    assert latest_valid_checkpoint(copy).name == "checkpoint-2" and not (copy / STAGING).exists()


@pytest.mark.parametrize("named", [False, True])
def test_kill_between_two_renames_is_repaired(copy, named):
    (copy / REPLACED).mkdir()
    os.rename(copy / "checkpoint-2", copy / REPLACED / "checkpoint-2")
    built = trainer(copy, max_steps=2, **SAVING)
    built.train(resume_from_checkpoint=str(copy / "checkpoint-2") if named else True)
    assert built.state.global_step == 2
    verify(copy / "checkpoint-2")


def test_checkpoint_left_aside_survives_the_next_save(copy):
    (copy / REPLACED).mkdir()
    os.rename(copy / "checkpoint-2", copy / REPLACED / "checkpoint-2")
    built = trainer(copy, max_steps=2, **SAVING)
    built._begun = True  # as in a second `train()`
    built.train()
    verify(copy / "checkpoint-1")
    verify(copy / "checkpoint-2")


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_limit_deletes_damaged_checkpoints_first(copy, limit):
    """Whatever their numbers are: `checkpoint-9` looks like the newest."""
    shutil.copytree(copy / "checkpoint-2", copy / "checkpoint-9")
    one_bit_flipped(copy / "checkpoint-9" / "optimizer.pt")
    shutil.copytree(copy / "checkpoint-1", copy / "checkpoint-3")
    rotate(copy / "checkpoint-3", limit, None, {})
    kept = [path.name for path in checkpoints(copy)]
    assert len(kept) == limit and kept[0] == "checkpoint-3" and "checkpoint-9" not in kept
    for name in kept:
        verify(copy / name)


def test_limit_keeps_the_best_however_its_path_is_spelled(copy, monkeypatch):
    monkeypatch.chdir(copy.parent)
    rotate(copy / "checkpoint-2", 1, "run/../run/checkpoint-1", {})
    assert [path.name for path in checkpoints(copy)] == ["checkpoint-2", "checkpoint-1"]


@pytest.mark.parametrize(
    "limit, kept", [(None, "54321"), (0, "54321"), (1, "41"), (2, "41"), (3, "541"), (9, "54321")]
)
def test_limit_keeps_the_latest_and_the_best(copy, limit, kept):
    for number in (3, 4, 5):
        shutil.copytree(copy / "checkpoint-1", copy / f"checkpoint-{number}")
    for number in (1, 2, 3, 4, 5):  # the run went back to 3, and has written 4 anew
        os.utime(copy / f"checkpoint-{number}", (100, 100))
    rotate(copy / "checkpoint-4", limit, str(copy / "checkpoint-1"), {})
    assert [path.name[-1] for path in checkpoints(copy)] == list(kept)


def test_limit_never_deletes_the_last_valid_checkpoint(copy):
    one_bit_flipped(copy / "checkpoint-2" / "optimizer.pt")
    os.rename(copy / "checkpoint-2", copy / "checkpoint-7")
    built = trainer(
        copy, max_steps=3, save_total_limit=1, **SAVING | {"resume_with_changed_settings": True}
    )
    built.train(resume_from_checkpoint=True)
    assert [path.name for path in checkpoints(copy)] == ["checkpoint-3"]
    verify(copy / "checkpoint-3")


class Damages(TrainerCallback):
    """Damages the best checkpoint when the run has taken its last step and saved, and counts its
    ends."""

    def __init__(self):
        self.ends = 0

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            one_bit_flipped(Path(state.best_model_checkpoint) / "adapter_model.safetensors")

    def on_train_end(self, args, state, control, **kwargs):
        self.ends += 1


def test_damaged_best_checkpoint_leaves_the_last_weights(tmp_path, caplog):
    settings = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 3,
    }
    settings |= {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_reward",
        "save_total_limit": 1,
    }
    damages = Damages()
    built = trainer(
        tmp_path, eval_dataset=prompts(4), callbacks=[damages], learning_rate=1e-2, **settings
    )
    built.train()
    assert built.state.best_global_step < 3 and damages.ends == 1
    assert "best checkpoint" in caplog.text and "adapter_model.safetensors" in caplog.text
    verify(tmp_path / "checkpoint-3")
    last = load_file(tmp_path / "checkpoint-3" / "value_head.safetensors")
    assert torch.equal(last["weight"], built.actor_critic.value_head.weight)


def test_unreadable_run_state_is_reported_to_all_ranks(copy, monkeypatch):
    """It is whole, as its manifest says."""
    told = []
    monkeypatch.setattr(distributed, "gather_object", lambda given: told.extend(given) or given)
    (copy / "checkpoint-2" / "run_state_0.safetensors").write_bytes(b"\0" * 100)
    seal(copy / "checkpoint-2")
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        trainer(copy, max_steps=2, **SAVING).train(resume_from_checkpoint=True)
    assert told[-1].startswith("SafetensorError")


def test_checkpoint_of_another_version_is_told_as_such(copy):
    path = copy / "checkpoint-2" / "ppo_state.json"
    state = json.loads(path.read_text())
    state["run"].pop("critic")
    path.write_text(json.dumps(state))
    seal(copy / "checkpoint-2")
    message = r"checkpoint-2` has other contents .* 'critic'\); resume with the version that wrote"
    with pytest.raises(CheckpointError, match=message):
        trainer(copy, max_steps=3, **SAVING).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("source", [True, "checkpoint-2"])
@pytest.mark.parametrize("names", [*[[name] for name in PROGRESS], PROGRESS[:2]], ids=" ".join)
def test_sealed_checkpoint_without_its_progress_is_named(run, tmp_path, names, source):
    """A folder may be thinned out for publishing, and sealed again."""
    copy = shutil.copytree(run, tmp_path / "run")
    for name in names:
        (copy / "checkpoint-2" / name).unlink()
    seal(copy / "checkpoint-2")
    verify(copy / "checkpoint-2")
    again = trainer(copy, max_steps=3, **SAVING)
    with pytest.raises(
        CheckpointError,
        match=rf"checkpoint-2` has no {', '.join(names)}, without which .*; resume from",
    ):
        again.train(resume_from_checkpoint=source if source is True else str(copy / source))
