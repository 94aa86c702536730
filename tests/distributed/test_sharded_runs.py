"""Runs under ZeRO and FSDP2 that sample, save and resume, started by the launcher."""

import pytest
import torch
from test_one_result import CHOICES, SPREADS, TWO_PROCESSES, launch, outcome, stage_of
from tiny import llama, tokenizer

FSDP_FILE = """fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
"""


@pytest.mark.parametrize("how", [pytest.param("ZeRO-2", marks=pytest.mark.slow), "ZeRO-3", "FSDP2"])
def test_sharded_run_resumes_bit_for_bit_within_a_rollout(tmp_path, how):
    """The launcher knows what shards here, and the base comes from a path: ZeRO-3 shards it as it loads."""
    stage, launcher = stage_of(how), TWO_PROCESSES.read_text()
    zero = f"deepspeed_config: {{zero_stage: {stage}, gradient_accumulation_steps: auto, gradient_clipping: auto}}\n"
    launcher = launcher.replace("MULTI_GPU", "DEEPSPEED" if stage else "FSDP") + (zero if stage else FSDP_FILE)
    (tmp_path / "launch.yaml").write_text(launcher)
    llama().save_pretrained(tmp_path / "base")
    for part in (llama(classifier=True, seed=1), tokenizer()):
        part.save_pretrained(tmp_path / "classifier")
    choices = CHOICES["all that is steered or added"] | {"critic": "adapter", "bf16": how == "FSDP2"}
    settings = (
        SPREADS["2 x 4"]
        | choices
        | {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "reward_quantization": "none"}
    )
    run = {"settings": settings, "sample": True, "model": str(tmp_path / "base")}
    run["classifier"] = str(tmp_path / "classifier")
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")  # a rollout feeds two optimizer steps
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    runs = [run | {"output_dir": str(whole)}, run | {"output_dir": str(resumed), "resume_from": checkpoint}]
    launch(runs, tmp_path / "launch.yaml")
    about, weights, log, state = outcome(resumed)
    assert about["num_processes"] == 2 and about["zero_stage"] == stage
    assert (about["part"] is not None) == (how == "FSDP2")
    _, expected, expected_log, expected_state = outcome(whole)
    assert all(torch.equal(weights[name], x) for name, x in expected.items())
    assert log[:-1] == expected_log[:-1]
    assert log[0]["kl"] == 0 and log[0]["ratio/max"] == log[0]["ratio/mean"] == 1
    assert {k: v for k, v in state.items() if k != "settings"} == {
        k: v for k, v in expected_state.items() if k != "settings"
    }
