"""Runs under ZeRO and FSDP2 that sample, save and resume, started by the launcher or as it would
start them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands import launch as launcher
from accelerate.utils import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from test_one_result import CHOICES, SPREADS, outcome, run_all, stage_of
from tiny import llama, tokenizer

HERE = Path(__file__).parent
TWO_PROCESSES = HERE.parent.parent / "recipes" / "accelerate" / "cpu_2_processes.yaml"
FSDP_FILE = """fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
"""


def launcher_file(path, stage):
    """Write the launcher's file for a stage of ZeRO, or FSDP2."""
    zero = (
        f"deepspeed_config: {{zero_stage: {stage}, gradient_accumulation_steps: auto, "
        "gradient_clipping: auto}\n"
    )
    text = TWO_PROCESSES.read_text().replace("MULTI_GPU", "DEEPSPEED" if stage else "FSDP")
    path.write_text(text + (zero if stage else FSDP_FILE))
    return path


def variables_of(path):
    """Environment variables that the launcher sets, without its processes, which take seconds to
    start."""
    prepared = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            launcher,
            "deepspeed_launcher",
            lambda args: prepared.append(prepare_deepspeed_cmd_env(args)[1]),
        )
        patch.setattr(
            launcher,
            "multi_gpu_launcher",
            lambda args: prepared.append(prepare_multi_gpu_env(args)),
        )
        launcher.launch_command(
            launcher.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        )
    return {name: x for name, x in prepared[0].items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def runs_of(tmp_path, how):
    """A run, and one that resumes from its checkpoint."""
    llama().save_pretrained(tmp_path / "base")
    for part in (llama(classifier=True, seed=1), tokenizer()):
        part.save_pretrained(tmp_path / "classifier")
    choices = CHOICES["all that is steered or added"] | {
        "critic": "adapter",
        "bf16": how == "FSDP2",
    }
    settings = (
        SPREADS["2 x 4"]
        | choices
        | {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "reward_quantization": "none"}
    )
    run = {
        "weighs": settings.pop("weighs"),
        "settings": settings,
        "sample": True,
        "model": str(tmp_path / "base"),
    }
    run["classifier"] = str(tmp_path / "classifier")
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")  # a rollout feeds two optimizer steps
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    return [
        run | {"output_dir": str(whole)},
        run | {"output_dir": str(resumed), "resume_from": checkpoint},
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of runs with the launcher's variables, all of which are forks."""
    folders = {how: tmp_path_factory.mktemp("runs") for how in ("ZeRO-3", "FSDP2")}
    lists = []
    for how, folder in folders.items():
        variables = variables_of(launcher_file(folder / "launch.yaml", stage_of(how)))
        lists.append([2, runs_of(folder, how), variables])
    run_all(lists)
    return folders


def check_resumed(folder, how):
    about, weights, log, state = outcome(folder / "resumed")
    assert about["num_processes"] == 2 and about["zero_stage"] == stage_of(how)
    assert (about["part"] is not None) == (how == "FSDP2")
    _, expected, expected_log, expected_state = outcome(folder / "whole")
    assert all(torch.equal(weights[name], x) for name, x in expected.items())
    assert log[:-1] == expected_log[:-1]
    assert log[0]["kl"] == 0 and log[0]["ratio/max"] == log[0]["ratio/mean"] == 1
    assert {k: v for k, v in state.items() if k != "settings"} == {
        k: v for k, v in expected_state.items() if k != "settings"
    }


@pytest.mark.parametrize("how", ["ZeRO-3", "FSDP2"])
def test_sharded_run_resumes_bit_for_bit_within_a_rollout(folders, how):
    """The launcher knows what shards here, and the base comes from a path: ZeRO-3 shards it as
    it loads."""
    check_resumed(folders[how], how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ZeRO-2", "ZeRO-3", "FSDP2"])
def test_sharded_run_of_the_launcher_resumes_bit_for_bit(tmp_path, how):
    file = launcher_file(tmp_path / "launch.yaml", stage_of(how))
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(file),
        str(HERE / "train.py"),
    ]
    # the package that lies beside the tests
    path = os.pathsep.join(map(str, (HERE.parent, HERE.parent.parent)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command.append(json.dumps(runs_of(tmp_path, how)))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    check_resumed(tmp_path, how)
