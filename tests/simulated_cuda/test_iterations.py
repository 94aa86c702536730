"""Whole iterations of PPO with backward on a simulated GPU: no operation across devices, few
waits of the host."""

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
    "play.py:_sample": 1,  # sampled tokens
    "scoring.py:score_all": 1,  # failed rewards over all ranks
    "rollouts.py:without_nonfinite": 1,  # completions that are not finite
    "metrics.py:log_hacking": 1,  # completions that occurred before
    "updates.py:start": 1,  # optimizer steps without a token
    "trainer.py:_collect": 1,  # tokens over all ranks
}
# moments of the rewards and of the returns; the warning of a score beyond all others; what scores
# tell for λ
WITH_CRITIC = {
    "ppo_math.py:of": 2,
    "credit.py:outlying": 1,
    "places.py:add": 1,
}
PLAIN = WITH_CRITIC | {"ppo_math.py:whiten": 1}
OF_CRITIC = {"no critic": {}, "value head": PLAIN, "reward model": PLAIN | {"model.py:score": 1}}
# per optimizer step: skip it if its gradient is not finite
UPDATE = {"trainer.py:_get_grad_norm": 1}


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """Results by configuration, from one process for those that the session runs."""
    if sys.platform != "linux" or not all(map(shutil.which, ("c++", "ninja"))):
        pytest.skip("needs Linux, a C++ compiler and ninja, to compile the simulated GPU's guard")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("needs a torch without CUDA, whose own guard would be replaced; see tests/gpu")
    path = tmp_path_factory.mktemp("simulated") / "results.json"
    script = Path(__file__).with_name("iterations.py")
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == Path(__file__)
    ]
    command = [sys.executable, str(script), str(path), *names]
    subprocess.run(command, env=os.environ | compile_guard(), check=True, timeout=300)
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_iteration_stays_on_one_device_and_waits_as_listed(results, name):
    result = results[name]
    assert "error" not in result, result["error"]
    assert result["without_gradient"] == []
    assert result["rollout"] == ROLLOUT | OF_CRITIC.get(name, WITH_CRITIC)
    updates = {key: n * result["optimizer_steps"] for key, n in UPDATE.items()}
    # `target_kl`, but not at a rollout's first step
    stops = {"updates.py:may_step": result["optimizer_steps"] - 1}
    assert result["updates"] == updates | stops
    assert sum(result["rollout"].values()) <= 13
    assert sum(result["updates"].values()) <= 3 * result["micro_batches"]
