"""A run that is killed, or asked to stop, at any moment, goes on as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from killed_runs import SETTINGS
from runs_of_tiny import trainer
from tiny import config, prompts

from trl_ppo_ext.checkpoints.files import CheckpointError, check_settings, run_settings
from trl_ppo_ext.checkpoints.resume import PREEMPTED

HERE = Path(__file__).parent
# by name: processes, signal or what fails, to how many or from which step on or on which process,
# how often
SCENARIOS = {
    "killed": (1, "SIGKILL", 5, 1),
    "asked": (1, "SIGTERM", 4, 1),
    # the second epoch of 20 prompts, in rollouts of 16, begins there
    "one of two asked": (2, "SIGTERM", 8, 1),
    "one of two killed": (2, "SIGKILL", 5, 1),
    "one of two fails": (2, "fails", 1, 1),
    "one of two has no room": (2, "disk", 1, 1),
}


def killed_runs(folder, scenarios, **settings):
    arguments = [str(folder), json.dumps(scenarios), json.dumps({"rows": 20} | settings)]
    # the package that lies beside the tests
    path = os.pathsep.join(map(str, (HERE.parent, HERE.parents[1])))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "killed_runs.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        name: [run for run in told if run["scenario"] == name] for name in scenarios
    }, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def told(folder):
    """What came of every scenario, and what was said; what takes seconds to start is started
    once."""
    return killed_runs(folder, SCENARIOS)


def check_resumed(runs, stderr):
    """Bit for bit: adapters, value head, average, and every metric that was logged; and no step
    beyond the last."""
    for run in runs:
        assert set(run["ended"]) == {0} and run["equal"] and run["last"] == ["checkpoint-12"], (
            run,
            stderr[-4000:],
        )


def check_kills(runs, stderr, kills):
    assert len(runs) == kills
    check_resumed(runs, stderr)
    assert all(code in (-9, 0) for run in runs for code in run["codes"])
    assert any(-9 in run["codes"] for run in runs)


def check_asked(runs, stderr):
    check_resumed(runs, stderr)
    for run in runs:
        if PREEMPTED in run["codes"]:
            assert set(run["codes"]) == {PREEMPTED} and run["step"] > 0
        else:  # before training begins, the signal does what it always does
            assert set(run["codes"]) <= {-15, 0, 1}


def test_killed_run_ends_as_the_uninterrupted_one(told):
    runs, stderr = told
    check_kills(runs["killed"], stderr, 1)


def test_sigterm_saves_exits_with_its_code_and_resumes(told):
    runs, stderr = told
    (run,) = runs["asked"]
    assert run["codes"] == [PREEMPTED] and run["step"] >= 4
    check_asked(runs["asked"], stderr)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_runs_killed_many_times_end_as_uninterrupted_ones(tmp_path, processes, stream):
    if processes == 1:
        one = "all"
    else:
        one = "one"
    scenarios = {
        "killed": (processes, "SIGKILL", "all", 20),
        "asked": (processes, "SIGTERM", one, 10),
        "lost": (processes, "SIGKILL", one, 10),
    }
    runs, stderr = killed_runs(tmp_path, scenarios, stream=stream)
    check_kills(runs["killed"], stderr, 20)
    assert len({run["step"] for run in runs["killed"]}) >= 2  # they were killed at different steps
    check_asked(runs["asked"], stderr)
    check_resumed(runs["lost"], stderr)


def test_sigterm_to_one_rank_stops_both_with_a_checkpoint(told):
    runs, stderr = told
    (run,) = runs["one of two asked"]
    assert run["codes"] == [PREEMPTED, PREEMPTED] and run["step"] >= 8
    check_resumed([run], stderr)


def test_killed_rank_does_not_hang_the_other(told):
    runs, stderr = told
    (run,) = runs["one of two killed"]
    assert sorted(run["codes"]) == [-9, 1], run
    check_resumed([run], stderr)


def test_reward_error_on_one_rank_does_not_hang_the_other(told):
    runs, stderr = told
    (run,) = runs["one of two fails"]
    assert run["codes"] == [1, 1], run
    assert run["checkpoints"] == ["checkpoint-4"]  # of both ranks, though nothing else saves
    assert "the judge is on strike" in stderr


def test_full_disk_on_one_rank_raises_on_both(told):
    runs, stderr = told
    (run,) = runs["one of two has no room"]
    assert run["codes"] == [1, 1], run
    # and nothing was published without it
    assert run["checkpoints"] == ["checkpoint-2", "checkpoint-1"]
    said = [line for line in stderr.splitlines() if "checkpoint-3` cannot be written" in line]
    assert len(said) == 2 and any("on rank 1" in line for line in said), said


def test_checkpoint_of_two_ranks_does_not_resume_with_one(told, folder):
    """Not even where settings may change: a process has half of the rollout and of the random
    states."""
    settings = SETTINGS | {"resume_with_changed_settings": True, "learning_rate": 1.0}
    built = trainer(folder / "2" / "one of two fails-0", dataset=prompts(20), **settings)
    with pytest.raises(
        CheckpointError, match=r"under other settings: num_processes \(was 2, is 1\)\. Restore"
    ):
        built.train(resume_from_checkpoint=True)


def test_every_setting_that_changed_is_named(tmp_path):
    trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    changed = {"gamma": 0.5, "lam": 0.125, "seed": 3}
    with pytest.raises(CheckpointError) as refused:
        trainer(tmp_path, **changed).train(resume_from_checkpoint=True)
    for name, value in changed.items():
        assert (
            f"{name} (was {getattr(config(tmp_path, max_steps=1), name)!r}, is {value!r})"
            in str(refused.value)
        )
    assert str(refused.value).count("(was") == len(changed)


@pytest.mark.parametrize("may_change", [False, True])
@pytest.mark.parametrize(
    "name, now", [("num_processes", 2), ("zero_stage", 3), ("fsdp_version", 2)]
)
def test_other_processes_or_backend_never_resume(tmp_path, name, now, may_change):
    """The Trainer would not find the optimizer, and begin it anew in silence."""
    saved = run_settings(config(tmp_path))
    check_settings("here", saved, saved, may_change)
    for was, other in ((saved, saved | {name: now}), (saved | {name: now}, saved)):
        with pytest.raises(CheckpointError, match=rf"{name} \(was .*\)\. Restore them\."):
            check_settings("here", was, other, may_change)


def test_settings_have_the_backend(tmp_path, monkeypatch):
    args = config(tmp_path)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    settings = run_settings(args)
    assert (settings["num_processes"], settings["zero_stage"], settings["fsdp_version"]) == (
        1,
        2,
        2,
    )


@pytest.mark.parametrize("name", ["save_only_model", "ignore_data_skip"])
def test_settings_that_break_exact_resume_raise(tmp_path, name):
    with pytest.raises(ValueError, match=f"`{name}=True` is not supported"):
        config(tmp_path, **{name: True})
