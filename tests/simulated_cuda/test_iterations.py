"""Whole iterations of PPO with backward on a simulated GPU: no operation across devices, few waits of the host."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from iterations import CONFIGURATIONS
from simulation import compile_guard

# read by the host in every rollout, for what
ROLLOUT = {
    "transformers.py:_generate_batch": 1,  # sampled tokens
    "scoring.py:score_all": 1,  # failed rewards over all ranks
    "guards.py:find_nonfinite": 1,  # completions that are not finite
    "metrics.py:log_reward_hacking": 1,  # completions that occurred before
    "updates.py:_start": 1,  # optimizer steps without a token
    "trainer.py:_collect": 1,  # tokens over all ranks
}
WITH_CRITIC = {"rollouts.py:_scaled": 1}  # unit of the advantages
FURTHER = {
    "reward model": {"model.py:score": 1},
    "defaults": {"scoring.py:update": 2},  # moments of the returns and of the rewards
}
UPDATE = {"trainer.py:_get_grad_norm": 1}  # per optimizer step: skip it if its gradient is not finite


SLOW = {"value head", "no critic", "shared prompts", "reward model"}  # the others have a head too


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """Results by configuration, from one process for those that the session runs."""
    if sys.platform != "linux" or not all(map(shutil.which, ("c++", "ninja"))):
        pytest.skip("needs Linux, a C++ compiler and ninja, to compile the simulated GPU's guard")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("needs a torch without CUDA, whose own guard would be replaced; see tests/gpu")
    path = tmp_path_factory.mktemp("simulated") / "results.json"
    script = Path(__file__).with_name("iterations.py")
    names = [item.callspec.params["name"] for item in request.session.items if item.path == Path(__file__)]
    command = [sys.executable, str(script), str(path), *names]
    subprocess.run(command, env=os.environ | compile_guard(), check=True, timeout=300)
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CONFIGURATIONS])
def test_iteration_stays_on_one_device_and_waits_as_listed(results, name):
    result = results[name]
    assert "error" not in result, result["error"]
    assert result["without_gradient"] == []
    assert result["rollout"] == ROLLOUT | (WITH_CRITIC if name != "no critic" else {}) | FURTHER.get(name, {})
    assert result["updates"] == {key: n * result["optimizer_steps"] for key, n in UPDATE.items()}
    assert sum(result["rollout"].values()) <= 10
    assert sum(result["updates"].values()) <= 3 * result["micro_batches"]
