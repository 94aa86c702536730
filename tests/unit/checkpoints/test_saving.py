"""Saved adapters load without this package, and interrupted runs resume."""

import os
from types import SimpleNamespace

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


def logits(policy):
    with torch.no_grad():
        return policy.eval()(input_ids=torch.tensor(IDS)).logits


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


def test_push_while_training_copies_files_and_saves_nothing(base, tmp_path, monkeypatch):
    """Saving gathers sharded weights on all processes."""
    uploads = []
    creation = SimpleNamespace(
        create_repo=lambda name, **kwargs: SimpleNamespace(repo_id=f"me/{name}")
    )
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: creation)
    monkeypatch.setattr("trl_ppo_ext.checkpoints.hub.create_repo", creation.create_repo)
    recorder = lambda folder_path, **kwargs: uploads.append(set(os.listdir(folder_path)))  # noqa: E731
    monkeypatch.setattr("trl_ppo_ext.checkpoints.hub.upload_folder", recorder)
    monkeypatch.setattr("trl_ppo_ext.tracking.report.draw_all", lambda curves: {})  # takes seconds
    run = tmp_path / "run"
    settings = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 2}
    built = PPOTrainer(base, length_reward, config(run, **settings), prompts())
    (run / "critic").mkdir(parents=True)
    (run / "critic" / "adapter_config.json").touch()  # of a run with a critic of another kind
    saved_to = []
    write_model = built._write_model
    built._write_model = lambda directory, *args: (
        saved_to.append(directory) or write_model(directory, *args)
    )
    built.train()
    assert saved_to == [str(run / ".saving" / f"checkpoint-{step}") for step in (2, 4)]
    for name in (
        "adapter_model.safetensors",
        "value_head.safetensors",
        "ppo_state.json",
        "tokenizer.json",
    ):
        assert (run / name).read_bytes() == (run / "checkpoint-4" / name).read_bytes()
    assert not (run / "critic" / "adapter_config.json").exists()
    wanted = {
        "adapter_model.safetensors",
        "adapter_config.json",
        "value_head.safetensors",
        "README.md",
    }
    assert len(uploads) == 2 and all(wanted <= files for files in uploads)
    assert "me/run" in (run / "README.md").read_text()


def test_base_directory_is_no_output_directory(base, tmp_path):
    """An adapter in it would make the base unusable."""
    files = sorted(os.listdir(base))
    with pytest.raises(
        ValueError, match=r"`output_dir` must not be the base model's own directory, .*use another"
    ):
        PPOTrainer(base, length_reward, config(base), prompts())
    built = PPOTrainer(base, length_reward, config(tmp_path), prompts())
    with pytest.raises(ValueError, match=r"base model's own directory"):
        built.save_model(f"{base}/../{os.path.basename(base)}")
    assert sorted(os.listdir(base)) == files


def test_checkout_that_is_not_installed_has_a_version(monkeypatch):
    def version(name):
        raise run_log.PackageNotFoundError(name)

    monkeypatch.setattr(run_log, "version", version)
    assert run_log.package_versions(["trl"]) == {"trl_ppo_ext": trl_ppo_ext.__version__}


@pytest.mark.parametrize("name", ["embed_tokens", "norm"])
def test_adapter_with_whole_modules_is_merged_after_training(tmp_path, name):
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[name])
    built = trainer(tmp_path, max_steps=1, peft_config=lora, kl_coef=0.1)
    built.train()
    expected = logits(built.actor_critic.policy)
    torch.testing.assert_close(logits(built.model.merge_and_unload()), expected)


def test_policy_without_its_adapter_replaces_no_saved_one(tmp_path):
    built = trainer(tmp_path, max_steps=1)
    built.train()
    built.save_model()
    saved = load_file(tmp_path / "adapter_model.safetensors")
    built.model.merge_and_unload()
    with pytest.raises(ValueError, match=r"no adapter any more.*call `save_model"):
        built.save_model()
    assert saved and load_file(tmp_path / "adapter_model.safetensors").keys() == saved.keys()
