"""A checkpoint is not resumed with another model, tokenizer, reward or dataset, unless that is allowed."""

import shutil

import pytest
import torch
from peft import LoraConfig
from tiny import CHAT_TEMPLATE, WORDS, config, length_reward, llama, prompts, tokenizer
from transformers import BitsAndBytesConfig

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.checkpoints.files import CheckpointError

SAVING = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}


def brevity(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]


def lora(**changes):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes)


def trainer(folder, chat_template_kwargs=None, resume_with_changed_settings=False, **changes):
    args = SAVING | {"chat_template_kwargs": chat_template_kwargs}
    usual = {
        "model": llama(),
        "reward_funcs": [length_reward, llama(classifier=True)],
        "train_dataset": prompts(),
        "processing_class": tokenizer(chat_template=CHAT_TEMPLATE),
        "reward_processing_classes": [None, tokenizer()],
        "peft_config": lora(),
    }
    args = config(folder, **args, resume_with_changed_settings=resume_with_changed_settings)
    return PPOTrainer(args=args, **usual | changes)


def mapped(**columns):
    return prompts().map(lambda row: columns)


# by the name in the message: what differs
CHANGES = {
    "base weights": lambda: {"model": llama(seed=1)},
    "dtype": lambda: {"model": llama(dtype=torch.bfloat16)},
    "tokenizer": lambda: {"processing_class": tokenizer(WORDS[::-1], CHAT_TEMPLATE)},
    "chat_template": lambda: {"processing_class": tokenizer(chat_template="{{ messages }}")},
    "rewards": lambda: {"reward_funcs": [brevity, llama(classifier=True)]},
    "rewards of another model": lambda: {"reward_funcs": [length_reward, llama(classifier=True, seed=1)]},
    "train_dataset": lambda: {"train_dataset": prompts(15)},
    "train_dataset of other rows": lambda: {"train_dataset": mapped(target=3)},
    "peft_config.lora_alpha": lambda: {"peft_config": lora(lora_alpha=16)},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer(folder).train()
    return folder


def test_same_inputs_resume(run, tmp_path):
    again = trainer(shutil.copytree(run, tmp_path / "run"))
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert again.state.global_step == 2


@pytest.mark.parametrize("change", CHANGES)
def test_changed_input_is_refused_by_name(run, change):
    with pytest.raises(CheckpointError, match=rf"{change.partition(' of ')[0]} \(was .*resume_with_changed_settings"):
        trainer(run, **CHANGES[change]()).train(resume_from_checkpoint=True)


def test_changed_input_is_allowed_by_a_setting(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    again = trainer(copy, resume_with_changed_settings=True, model=llama(seed=1), train_dataset=prompts(15))
    again.train(resume_from_checkpoint=str(copy / "checkpoint-1"))
    assert again.state.global_step == 2


def test_changed_quantization_is_refused_by_name(run, tmp_path):
    llama().save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with pytest.raises(CheckpointError, match=r"quantization_config \(was None, is .*nf4"):
        trainer(run, model=str(tmp_path), quantization_config=nf4).train(resume_from_checkpoint=True)
