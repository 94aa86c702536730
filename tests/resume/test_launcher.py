"""What `accelerate launch` makes of signals, as docs/resume.md says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trl_ppo_ext.checkpoints.atomic import latest_valid_checkpoint

HERE = Path(__file__).parent
TWO_PROCESSES = HERE.parent.parent / "recipes" / "accelerate" / "cpu_2_processes.yaml"
LAUNCHER = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(TWO_PROCESSES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "whom, number, said",
    [
        ("launcher", signal.SIGTERM, ["SignalException", "exits with code 75"]),
        ("process", signal.SIGTERM, ["exitcode  : 75", "exits with code 75"]),
        ("process", signal.SIGKILL, ["exitcode  : -9"]),
    ],
)
def test_signal_under_a_launcher_ends_all_ranks(tmp_path, whom, number, said):
    settings = {"max_steps": 400, "save_total_limit": 2}
    path = os.pathsep.join(map(str, (HERE.parent, HERE.parents[1])))  # the package that lies beside the tests
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [*LAUNCHER, str(HERE / "launched_run.py"), str(tmp_path / "run"), json.dumps(settings)]
    with open(tmp_path / "stderr", "w") as stderr:
        launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
    end = time.monotonic() + 200
    while not list(tmp_path.glob("run/checkpoint-*")) and time.monotonic() < end:
        time.sleep(0.05)
    processes = [int((tmp_path / "run" / f"process-{rank}").read_text()) for rank in (0, 1)]
    os.kill(launcher.pid if whom == "launcher" else processes[1], number)
    assert launcher.wait(60) == 1
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]
    told = (tmp_path / "stderr").read_text()
    for part in said:
        assert part in told, told[-3000:]
    assert latest_valid_checkpoint(tmp_path / "run") is not None
