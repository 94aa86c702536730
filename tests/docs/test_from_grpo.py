"""A GRPO script becomes a PPO script by changing two names."""

import re

import pytest
import stand_ins
import trl
from pages import ROOT, blocks

import trl_ppo_ext

PAGE = ROOT / "docs" / "from_grpo.md"
SCRIPTS = [block.code for block in blocks(PAGE) if block.code.startswith("# train_")]
# with a config, as scripts in TRL's documentation have it that set anything
WITH_CONFIG = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/tldr", split="train")


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO", num_generations=4, temperature=0.9, logging_steps=1)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""


def with_two_names_changed(script):
    """The two names, and the package that they are imported from."""
    script = re.sub(r"^from trl import (?=.*GRPO)", "from trl_ppo_ext import ", script, flags=re.MULTILINE)
    return script.replace("GRPOTrainer", "PPOTrainer").replace("GRPOConfig", "PPOConfig")


def trained(script):
    namespace = {"__name__": "__main__"}
    exec(compile(script, "script.py", "exec"), namespace)
    return namespace["trainer"]


def test_documented_scripts_differ_only_in_two_names():
    grpo, ppo = SCRIPTS
    assert with_two_names_changed(grpo).replace("train_grpo", "train_ppo") == ppo
    assert ppo != grpo


@pytest.mark.parametrize("script", [SCRIPTS[0], WITH_CONFIG], ids=["documented", "with a config"])
def test_grpo_script_trains_with_two_names_changed(script, working_directory, monkeypatch):
    if "accuracy_reward" in script:
        pytest.importorskip("math_verify")
    stand_ins.install(monkeypatch, trains=True)
    of_grpo, of_ppo = trained(script), trained(with_two_names_changed(script))
    assert type(of_grpo) is trl.GRPOTrainer
    assert type(of_ppo) is trl_ppo_ext.PPOTrainer
    for trainer in (of_grpo, of_ppo):
        assert trainer.state.global_step == 2
    if script is WITH_CONFIG:
        for field in ("num_generations", "temperature", "logging_steps"):
            assert getattr(of_ppo.args, field) == getattr(of_grpo.args, field)
        assert {"reward", "kl", "entropy", "completions/mean_length"} <= of_ppo.state.log_history[0].keys()
