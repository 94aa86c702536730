"""A GRPO script becomes a PPO script by changing two names."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import stand_ins
import trl
import trl.scripts.grpo
import yaml
from pages import ROOT, blocks

import trl_ppo_ext

PAGE = ROOT / "docs" / "from_grpo.md"
SCRIPTS = [block.code for block in blocks(PAGE) if block.code.startswith("# train_")]
PACKAGES = ("trl", "trl_ppo_ext")
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

    def imports(match):
        indent, names = match[1], match[2].split(", ")
        ours = {package: ", ".join(n for n in names if ("GRPO" in n) == (package != "trl")) for package in PACKAGES}
        return "\n".join(f"{indent}from {package} import {names}" for package, names in ours.items() if names)

    script = re.sub(r"^( *)from trl import (?=.*GRPO)(.*)$", imports, script, flags=re.MULTILINE)
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


IN_A_FILE = {
    "model_name_or_path": "Qwen/Qwen2-0.5B-Instruct",
    "dataset_name": "trl-lib/tldr",
    "reward_funcs": ["my_rewards.brevity"],
    "output_dir": "out",
    "max_steps": 2,
    "max_completion_length": 4,
    "per_device_train_batch_size": 2,
    "use_vllm": False,
    "loss_type": "grpo",
    "steps_per_generation": 2,
}
ON_A_LINE = "--beta 0.04 --epsilon 0.1 --num_iterations 1 --scale_rewards none --num_generations 4"


@pytest.mark.parametrize("place", ["file", "line"])
def test_script_of_trl_heeds_every_field_of_grpo(place, working_directory, monkeypatch):
    """`trl/scripts/grpo.py` drops keys of the file that its config class lacks."""
    Path("my_rewards.py").write_text(
        "def brevity(completions, **kwargs):\n    return [-float(len(c)) for c in completions]\n"
    )
    settings = IN_A_FILE | {"vllm_gpu_memory_utilization": 0.5} if place == "file" else IN_A_FILE
    flags = ON_A_LINE.split()
    if place == "file":
        settings |= {k[2:]: yaml.safe_load(v) for k, v in zip(flags[::2], flags[1::2])}
        flags = []
    Path("grpo.yaml").write_text(yaml.safe_dump(settings))
    stand_ins.install(monkeypatch, trains=False)
    trainers, train = [], trl_ppo_ext.PPOTrainer.train
    monkeypatch.setattr(trl_ppo_ext.PPOTrainer, "train", lambda self, **kw: trainers.append(self) or train(self, **kw))
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--config", "grpo.yaml", *flags])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = with_two_names_changed(inspect.getsource(trl.scripts.grpo))
    exec(compile(script, "grpo.py", "exec"), {"__name__": "__main__"})
    [trainer] = trainers
    args = trainer.args
    assert trainer.state.global_step == 2 and Path("out", "adapter_model.safetensors").exists()
    assert (args.kl_coef, args.cliprange, args.num_ppo_epochs, args.num_mini_batches) == (0.04, 0.1, 1, 2)
    assert (args.loss_aggregation, args.whiten_advantages) == ("sequence_mean", False)
    sys.modules.pop("my_rewards")
