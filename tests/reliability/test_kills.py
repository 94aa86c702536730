"""A run that is killed, or asked to stop, at any moment, goes on as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_ppo_ext.resumable import PREEMPTED

HERE = Path(__file__).parent


def killed_runs(folder, kills, signal, **settings):
    command = [sys.executable, str(HERE / "killed_runs.py"), str(folder), str(kills), signal, json.dumps(settings)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_as_the_run_that_was_not(tmp_path, kills):
    """Bit for bit: adapters, value head, average, and every metric that was logged."""
    runs, stderr = killed_runs(tmp_path, kills, "SIGKILL")
    assert len(runs) == kills
    for run in runs:
        assert run["code"] in (-9, 0) and run["ended"] == 0 and run["equal"], (run, stderr[-2000:])
    assert len({run["step"] for run in runs}) > kills // 4  # they were killed at different steps
    assert any(run["code"] == -9 for run in runs)


def test_a_run_that_gets_sigterm_saves_and_leaves_with_a_code_of_its_own_and_goes_on(tmp_path):
    runs, stderr = killed_runs(tmp_path, 3, "SIGTERM")
    asked = [run for run in runs if run["code"] == PREEMPTED]
    assert asked, runs
    for run in runs:
        assert run["ended"] == 0 and run["equal"], (run, stderr[-2000:])
        assert run["code"] in (PREEMPTED, -15)  # before training begins, the signal does what it always does
    assert all(run["step"] > 0 for run in asked)
