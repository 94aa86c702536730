"""Saved adapters load without this package, and interrupted runs resume."""

import json
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from runs_of_tiny import trainer
from safetensors.torch import load_file
from tiny import config, length_reward, prompts
from transformers import AutoModelForCausalLM

import trl_ppo_ext
from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.tracking import run_log

IDS = [[4, 5, 6, 7, 8]]
LOAD_WITHOUT_THE_PACKAGE = """
import sys, torch
sys.modules["trl_ppo_ext"] = None  # importing it would fail
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
AutoTokenizer.from_pretrained(sys.argv[2])
torch.save(model(input_ids=torch.tensor({ids})).logits, sys.argv[3])
"""


def trained(base, output_dir, **kwargs):
    built = PPOTrainer(base, length_reward, config(output_dir, **kwargs), prompts())
    built.train()
    return built


def logits(policy):
    with torch.no_grad():
        return policy.eval()(input_ids=torch.tensor(IDS)).logits


def test_saved_adapter_loads_with_plain_peft_without_this_package(base, tmp_path):
    built = trained(base, tmp_path / "run", learning_rate=1e-2)
    built.save_model()
    script = LOAD_WITHOUT_THE_PACKAGE.format(ids=IDS)
    out = tmp_path / "logits.pt"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script, base, str(tmp_path / "run"), str(out)], check=True, env=environment)
    expected = logits(built.actor_critic.policy)
    torch.testing.assert_close(torch.load(out), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), expected, atol=1e-3)


def test_adapter_with_another_name_loads_with_plain_peft(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"), adapter_name="mine")
    built = trainer(tmp_path, model, learning_rate=1e-2)
    built.train()
    built.save_model()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(built.actor_critic.policy))
    assert not any("reference" in key for key in load_file(tmp_path / "adapter_model.safetensors"))


def test_load_best_model_at_end_loads_the_best_checkpoint(base, tmp_path):
    built = PPOTrainer(
        base,
        length_reward,
        config(
            tmp_path,
            save_strategy="steps",
            eval_strategy="steps",
            save_steps=2,
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_reward",
            greater_is_better=True,
            learning_rate=1e-2,
        ),
        prompts(),
        eval_dataset=prompts(8),
    )
    built.train()
    best = load_file(os.path.join(built.state.best_model_checkpoint, "value_head.safetensors"))
    assert torch.equal(best["weight"], built.actor_critic.value_head.weight)
    rewards = [entry["eval_reward"] for entry in built.state.log_history if "eval_reward" in entry]
    assert built.state.best_metric == max(rewards)


def test_push_to_hub_uploads_adapter_value_head_and_card(base, tmp_path, monkeypatch):
    """A push while training copies files and saves nothing: saving gathers sharded weights on all processes."""
    uploads = []

    class Recorder:
        def create_repo(self, name, **kwargs):
            return type("Url", (), {"repo_id": f"me/{name}"})

    def record(folder_path, **kwargs):
        uploads.append(set(os.listdir(folder_path)))

    monkeypatch.setattr("transformers.trainer.hf_api", Recorder)
    monkeypatch.setattr("trl_ppo_ext.checkpoints.hub.create_repo", lambda name, **kwargs: None)
    monkeypatch.setattr("trl_ppo_ext.checkpoints.hub.upload_folder", record)
    settings = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 2}
    built = PPOTrainer(base, length_reward, config(tmp_path / "run", **settings), prompts())
    (tmp_path / "run" / "critic").mkdir(parents=True)
    (tmp_path / "run" / "critic" / "adapter_config.json").touch()  # of a run with a critic of another kind
    saved_to, write_model = [], built._write_model
    built._write_model = lambda directory, *args: saved_to.append(directory) or write_model(directory, *args)
    built.train()
    assert saved_to == [str(tmp_path / "run" / ".saving" / f"checkpoint-{step}") for step in (2, 4)]
    for name in ("adapter_model.safetensors", "value_head.safetensors", "ppo_state.json", "tokenizer.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "run" / "checkpoint-4" / name).read_bytes()
    assert not (tmp_path / "run" / "critic" / "adapter_config.json").exists()
    built.push_to_hub()
    wanted = {"adapter_model.safetensors", "adapter_config.json", "value_head.safetensors", "README.md"}
    assert len(uploads) == 3 and all(wanted <= files for files in uploads)
    assert not any("training_args.bin" in files for files in uploads)  # pickled, and it holds the Hub's token
    assert "me/run" in (tmp_path / "run" / "README.md").read_text()
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4


def test_base_directory_is_no_output_directory(base, tmp_path):
    """An adapter in it would make the base unusable."""
    files = sorted(os.listdir(base))
    with pytest.raises(ValueError, match=r"`output_dir` must not be the base model's own directory, .*use another"):
        PPOTrainer(base, length_reward, config(base), prompts())
    built = PPOTrainer(base, length_reward, config(tmp_path), prompts())
    with pytest.raises(ValueError, match=r"base model's own directory"):
        built.save_model(f"{base}/../{os.path.basename(base)}")
    assert sorted(os.listdir(base)) == files


def test_checkout_that_is_not_installed_saves(monkeypatch, tmp_path):
    def version(name):
        if name == "trl_ppo_ext":
            raise run_log.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(run_log, "version", version)
    built = trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    built.train()
    assert f"trl_ppo_ext {trl_ppo_ext.__version__}, trl 1.0" in (tmp_path / "checkpoint-1" / "README.md").read_text()


def test_policy_without_its_adapter_replaces_no_saved_one(tmp_path):
    built = trainer(tmp_path, max_steps=1)
    built.train()
    built.save_model()
    saved = load_file(tmp_path / "adapter_model.safetensors")
    built.model.merge_and_unload()
    with pytest.raises(ValueError, match=r"no adapter any more.*call `save_model"):
        built.save_model()
    assert saved and load_file(tmp_path / "adapter_model.safetensors").keys() == saved.keys()
