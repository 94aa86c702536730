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
    files = sorted(output_dir.glob("**/*.safetensors"))
    weights = {f"{file.relative_to(output_dir)}:{name}": x for file in files for name, x in load_file(file).items()}
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
    for name in single[2].keys() - {"settings"}:
        assert state[name] == pytest.approx(single[2][name], rel=1e-9)  # running statistics of the rewards
    assert state["rewards"]["count"] == 4 * 8
    compare(weights, log, single)


def compare(weights, log, single):
    assert weights.keys() == single[0].keys()
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


CHOICES = {
    "critic adapter": {"critic": "adapter", "critic_learning_rate": 1e-3, "value_warmup_steps": 2},
    "all that is steered or added": {
        "kl_target": 0.01,
        "kl_horizon": 100,
        "entropy_target": 3.0,
        "target_kl": 1e-3,
        "kl_estimator": "exact",
        "kl_placement": "both",
        "ptx_coef": 0.5,
        "ema_decay": 0.5,
    },
    # a group of 8 lies on two processes of 4 completions
    "GRPO": {"critic": "none", "num_generations": 8, "importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_no_choice_makes_the_result_depend_on_the_processes(choice, tmp_path):
    settings = CHOICES[choice]
    single = train(1, tmp_path / "single", per_device_train_batch_size=8, **settings)
    weights, log, state = train(2, tmp_path / "two", per_device_train_batch_size=4, **settings)
    assert state["kl_coef"] == pytest.approx(single[2]["kl_coef"], rel=1e-5)
    assert state["entropy_coef"] == pytest.approx(single[2]["entropy_coef"], rel=1e-6)
    compare(weights, log, single)
