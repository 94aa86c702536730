"""A published adapter is the policy: a plain reload has its logits, or the trainer refuses it by name."""

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from runs_of_tiny import trainer
from tiny import llama, qwen2, tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging

IDS = torch.tensor([[5, 6, 7, 8, 9]])
KINDS = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rank pattern": {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
    "rank-stabilized": {"use_rslora": True},
    "saved norm": {"modules_to_save": ["norm"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "LoRA on the embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "token indices": {"trainable_token_indices": {"embed_tokens": [5, 6]}},
    "without a task type": {"task_type": None},
    "of another task": {"task_type": "SEQ_2_SEQ_LM"},
}


def lora(**changes):
    return LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]} | changes)


def varied(completion_ids, **kwargs):
    return [sum(token % 5 for token in ids) / len(ids) for ids in completion_ids]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture(params=[llama, qwen2], ids=["untied", "tied"])
def base(request, tmp_path):
    request.param().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    return request.param, str(tmp_path / "base")


@pytest.mark.parametrize("kind", KINDS)
def test_plain_reload_has_the_logits_of_the_policy(base, tmp_path, kind):
    build, path = base
    if kind == "token indices" and build is qwen2:
        with pytest.raises(ValueError, match="must not be on the output projection"):
            trainer(tmp_path / "run", model=path, peft_config=lora(**KINDS[kind]))
        return
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 3e-2}
    run = trainer(tmp_path / "run", model=path, reward_funcs=varied, peft_config=lora(**KINDS[kind]), **settings)
    run.train()
    run.save_model(tmp_path / "saved")
    run.model.save_pretrained(tmp_path / "by model")
    expected = logits(run.model)
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(path))).abs().max() > 1e-3
    for place in (tmp_path / "saved", tmp_path / "run" / "checkpoint-2", tmp_path / "by model"):
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), place)
        torch.testing.assert_close(logits(loaded), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")), expected)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_own_save_of_a_model_publishes_no_other_role(base, tmp_path, name):
    """A `PeftModel` that was passed as `model` gets the adapters of reference and critic."""
    _, path = base
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora(init_lora_weights=False), name)
    for folder in ("first", "run"):  # a second trainer finds the adapters of the first
        run = trainer(tmp_path / folder, model=model, critic="adapter", max_steps=2, learning_rate=3e-2)
        run.train()
    assert {"reference", "critic"} < {*model.peft_config}
    model.save_pretrained(tmp_path / "own")
    folders = sorted(file.parent for file in (tmp_path / "own").rglob("adapter_config.json"))
    assert folders == [tmp_path / "own" if name == "default" else tmp_path / "own" / name]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), folders[0])
    torch.testing.assert_close(logits(loaded), logits(run.model), atol=1e-6, rtol=0)


def test_adapter_on_a_tied_embedding_says_that_it_cannot_be_merged(base, tmp_path, caplog, monkeypatch):
    build, path = base
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    trainer(tmp_path / "run", model=path, peft_config=lora(target_modules=["embed_tokens", "q_proj"]))
    assert ("`merge_and_unload` changes both" in caplog.text) == (build is qwen2)


def test_two_active_adapters_are_refused(base, tmp_path):
    _, path = base
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora())
    model.add_adapter("other", lora())
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"`model` must have one active adapter.*\['default', 'other'\]"):
        trainer(tmp_path / "run", model=model)


def test_tied_adapter_of_the_projection_is_refused_by_name(tmp_path):
    config = lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(ValueError, match="`ensure_weight_tying=True` of `peft_config` adapts the output projection"):
        trainer(tmp_path / "run", model=qwen2(), peft_config=config)
