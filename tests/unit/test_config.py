"""Fields of the config, and defaults that depend on the machine."""

import warnings
from dataclasses import fields

import pytest
import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import GRPOConfig

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.trl_names import NAMES


@pytest.mark.parametrize("emulated", [False, True])
def test_bf16_is_the_default_only_in_hardware(monkeypatch, emulated):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or not emulated
    )
    # cached, and perhaps asked before
    monkeypatch.setattr("trl_ppo_ext.config.is_torch_bf16_gpu_available", lambda: True)
    # it would use the GPU
    monkeypatch.setattr(
        TrainingArguments, "__post_init__", lambda self: setattr(self, "accelerator_config", AcceleratorConfig())
    )
    monkeypatch.setattr(PPOConfig, "world_size", 1)
    assert PPOConfig("run").bf16 is not emulated


def test_config_has_at_most_45_fields_that_neither_the_trainer_nor_trl_has():
    own, theirs, trainers = ({field.name for field in fields(x)} for x in (PPOConfig, GRPOConfig, TrainingArguments))
    assert len(own - theirs - trainers - NAMES.keys()) <= 45


def test_default_of_checkpointing_warns_of_nothing_and_can_be_switched_off(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert PPOConfig(str(tmp_path), use_cpu=True).gradient_checkpointing is True
        assert PPOConfig(str(tmp_path), use_cpu=True, gradient_checkpointing=False).gradient_checkpointing is False
        new_name = {"activation_checkpointing": False}
        if "activation_checkpointing" in PPOConfig.__dataclass_fields__:
            assert PPOConfig(str(tmp_path), use_cpu=True, **new_name).gradient_checkpointing is False
