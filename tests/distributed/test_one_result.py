"""One result, however it is spread over processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

HERE = Path(__file__).parent
TWO_PROCESSES = HERE.parent.parent / "recipes" / "accelerate" / "cpu_2_processes.yaml"


def train(processes, output_dir, **settings):
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(TWO_PROCESSES)] if processes == 2 else []
    command = [sys.executable, *launcher, str(HERE / "train.py"), str(output_dir), json.dumps(settings)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    weights = load_file(output_dir / "adapter_model.safetensors") | load_file(output_dir / "value_head.safetensors")
    log = json.loads((output_dir / "log.json").read_text())
    assert log[0]["num_processes"] == processes
    return weights, log, json.loads((output_dir / "ppo_state.json").read_text())


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train(1, tmp_path_factory.mktemp("single"), per_device_train_batch_size=8)


@pytest.mark.parametrize(
    "processes, settings",
    [
        (2, {"per_device_train_batch_size": 4}),
        (1, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}),
    ],
    ids=["2 processes x 4", "8 micro-batches of 1"],
)
def test_weights_and_metrics_do_not_depend_on_how_the_batch_is_spread(single, tmp_path, processes, settings):
    weights, log, state = train(processes, tmp_path, **settings)
    assert state == pytest.approx(single[2], rel=1e-9)  # running statistics of the rewards
    assert state["count"] == 4 * 8
    for name, expected in single[0].items():
        # by norm: Adam turns the rounding of a gradient near zero into a step of any size
        assert (weights[name] - expected).norm() <= 1e-4 * expected.norm(), name
    for got, expected in zip(log, single[1]):
        for name in expected:
            if (
                name != "num_processes"
                and not name.startswith(("time/", "tokens_per", "train_", "eval_time", "eval_runtime"))
                and "per_s" not in name
            ):
                assert got[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
