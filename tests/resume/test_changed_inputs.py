"""A checkpoint is not resumed with another model, tokenizer, reward or dataset, unless that is allowed."""

import shutil

import pytest
import torch
from peft import LoraConfig
from runs_of_tiny import trainer
from tiny import CHAT_TEMPLATE, WORDS, length_reward, llama, prompts, tokenizer
from transformers import BitsAndBytesConfig

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.checkpoints.files import CheckpointError

SAVING = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}


def brevity(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]


def lora(**changes):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes)


def given(**changes):
    """All that a run is given besides its config."""
    usual = {
        "model": llama(),
        "reward_funcs": [length_reward, llama(classifier=True)],
        "dataset": prompts(),
        "processing_class": tokenizer(chat_template=CHAT_TEMPLATE),
        "peft_config": lora(),
    }
    return usual | changes


def mapped(**columns):
    return prompts().map(lambda row: columns)


def stored(folder, **kwargs):
    """A model in a directory, so that it is loaded by the trainer."""
    llama().save_pretrained(folder)
    return str(folder)


# by the name in the message: what differs
CHANGES = {
    "base weights": lambda: {"model": llama(seed=1)},
    "dtype": lambda: {"model": llama(dtype=torch.bfloat16)},
    "attn_implementation": lambda: {"model": llama(attn_implementation="eager")},
    "tokenizer": lambda: {"processing_class": tokenizer(WORDS[::-1], CHAT_TEMPLATE)},
    "chat_template": lambda: {"processing_class": tokenizer(chat_template="{{ messages }}")},
    "chat_template of the config": lambda: {"chat_template_kwargs": {"enable_thinking": True}},
    "rewards": lambda: {"reward_funcs": [brevity, llama(classifier=True)]},
    "rewards of another model": lambda: {"reward_funcs": [length_reward, llama(classifier=True, seed=1)]},
    "train_dataset": lambda: {"dataset": prompts(15)},
    "train_dataset of other columns": lambda: {"dataset": mapped(answer="4")},
    "train_dataset of other rows": lambda: {"dataset": mapped(target=3)},
    "peft_config.lora_alpha": lambda: {"peft_config": lora(lora_alpha=16)},
    "peft_config.use_rslora": lambda: {"peft_config": lora(use_rslora=True)},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, **given(), **SAVING).train()
    return folder


def test_same_inputs_resume(run, tmp_path):
    again = trainer(shutil.copytree(run, tmp_path / "run"), **given(), **SAVING)
    again.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert again.state.global_step == 2


@pytest.mark.parametrize("change", CHANGES)
def test_changed_input_is_refused_by_name(run, change):
    with pytest.raises(CheckpointError, match=rf"{change.partition(' of ')[0]} \(was .*resume_with_changed_settings"):
        trainer(run, **given(**CHANGES[change]()), **SAVING).train(resume_from_checkpoint=True)


def test_changed_input_is_allowed_by_a_setting(run, tmp_path):
    copy, changed = shutil.copytree(run, tmp_path / "run"), given(model=llama(seed=1), dataset=prompts(15))
    again = trainer(copy, **changed, **SAVING, resume_with_changed_settings=True)
    again.train(resume_from_checkpoint=str(copy / "checkpoint-1"))
    assert again.state.global_step == 2


def test_changed_quantization_is_refused_by_name(tmp_path):
    args = {"reward_funcs": length_reward, "train_dataset": prompts(), "processing_class": tokenizer()}
    base, built = stored(tmp_path / "base"), trainer(tmp_path / "run", **SAVING)
    built.train()
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    other = PPOTrainer(base, args=built.args, quantization_config=nf4, **args)
    with pytest.raises(CheckpointError, match=r"quantization_config \(was None, is .*nf4"):
        other.train(resume_from_checkpoint=True)
