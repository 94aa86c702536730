"""A published adapter is the policy: a plain reload has its logits, or the trainer refuses it by
name."""

import pytest
import torch
from families import build
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from runs_of_tiny import trainer
from safetensors.torch import save_file
from tiny import llama, prompts, qwen2, tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM
from transformers.utils import logging

from trl_ppo_ext.modeling.base_files import check_base_is_in_its_files
from trl_ppo_ext.modeling.loading import name_of_loader

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
    run = trainer(
        tmp_path / "run",
        model=path,
        reward_funcs=varied,
        peft_config=lora(**KINDS[kind]),
        **settings,
    )
    run.train()
    run.save_model(tmp_path / "saved")
    run.model.save_pretrained(tmp_path / "by model")
    expected = logits(run.model)
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(path))).abs().max() > 1e-3
    for place in (tmp_path / "saved", tmp_path / "run" / "checkpoint-2", tmp_path / "by model"):
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), place)
        torch.testing.assert_close(logits(loaded), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")), expected
    )
    # the merge of a tied one is warned of below
    if kind != "LoRA on the embedding" or build is llama:
        torch.testing.assert_close(logits(loaded.merge_and_unload()), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["LoRA", "saved norm", "saved embedding"])
def test_best_model_is_that_of_its_checkpoint(base, tmp_path, kind):
    _, path = base
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 3,
    }
    settings |= {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_reward",
        "learning_rate": 3e-2,
    }
    run = trainer(
        tmp_path / "run",
        model=path,
        reward_funcs=varied,
        peft_config=lora(**KINDS[kind]),
        eval_dataset=prompts(4),
        **settings,
    )
    run.train()
    run.save_model(tmp_path / "saved")
    best = run.state.best_model_checkpoint
    for place in (best, tmp_path / "saved"):
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), place)
        torch.testing.assert_close(logits(loaded), logits(run.model), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_own_save_of_a_model_publishes_no_other_role(base, tmp_path, name):
    """A `PeftModel` that was passed as `model` gets the adapters of reference and critic."""
    _, path = base
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path), lora(init_lora_weights=False), name
    )
    for folder in ("first", "run"):  # a second trainer finds the adapters of the first
        run = trainer(
            tmp_path / folder, model=model, critic="adapter", max_steps=2, learning_rate=3e-2
        )
        run.train()
    assert {"reference", "critic"} < set(model.peft_config)
    model.save_pretrained(tmp_path / "own")
    folders = sorted(file.parent for file in (tmp_path / "own").rglob("adapter_config.json"))
    assert folders == [tmp_path / "own" if name == "default" else tmp_path / "own" / name]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), folders[0])
    torch.testing.assert_close(logits(loaded), logits(run.model), atol=1e-6, rtol=0)


def test_adapter_on_a_tied_embedding_warns_against_merging(base, tmp_path, caplog, monkeypatch):
    build, path = base
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    trainer(
        tmp_path / "run", model=path, peft_config=lora(target_modules=["embed_tokens", "q_proj"])
    )
    assert ("`merge_and_unload` changes both" in caplog.text) == (build is qwen2)


def test_two_active_adapters_are_refused(base, tmp_path):
    _, path = base
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora())
    model.add_adapter("other", lora())
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(
        ValueError, match=r"`model` must have one active adapter.*\['default', 'other'\]"
    ):
        trainer(tmp_path / "run", model=model)


def test_tied_adapter_of_the_projection_is_refused_by_name(tmp_path):
    config = lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(
        ValueError, match="`ensure_weight_tying=True` of `peft_config` adapts the output projection"
    ):
        trainer(tmp_path / "run", model=qwen2(), peft_config=config)


# ---- bases that were changed in memory ----


def merged(path):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path), lora(init_lora_weights=False)
    )
    return model.merge_and_unload()


def resized(path, rows):
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(model.config.vocab_size + rows)
    return model


def one_row_edited(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_input_embeddings().weight[-1] += 0.1
    return model


def adapted_after_a_merge(path):
    return get_peft_model(merged(path), lora())


def embedding_grown_and_saved(path):
    return get_peft_model(resized(path, 4), lora(modules_to_save=["embed_tokens"]))


CHANGED = {
    "merged": merged,
    "grown": lambda path: resized(path, 4),
    "shrunk": lambda path: resized(path, -4),
    "one row": one_row_edited,
    "adapter on a merged base": adapted_after_a_merge,
    "grown and saved": embedding_grown_and_saved,
}


@pytest.mark.parametrize("change", CHANGED)
def test_base_that_differs_from_its_files_is_refused(base, tmp_path, change):
    _, path = base
    with pytest.raises(
        ValueError, match=r"`model` must have the weights of its files in .*, e\.g\. `.*`\. If you"
    ):
        trainer(tmp_path / "run", model=CHANGED[change](path))


@pytest.mark.parametrize("change", ["merged", "grown"])
def test_changed_base_that_was_saved_is_published(base, tmp_path, change):
    _, path = base
    saved = str(tmp_path / "changed")
    CHANGED[change](path).save_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved)
    run = trainer(
        tmp_path / "run", model=model, reward_funcs=varied, max_steps=2, learning_rate=3e-2
    )
    run.train()
    run.save_model(tmp_path / "saved")
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(saved), tmp_path / "saved"
    )
    torch.testing.assert_close(logits(loaded), logits(run.model), atol=1e-6, rtol=0)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
def test_rounded_base_is_that_of_its_files(tmp_path, stored, loaded, sizes):
    llama().to(stored).save_pretrained(tmp_path, **sizes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=loaded)
    check_base_is_in_its_files(model)
    check_base_is_in_its_files(model.float())
    check_base_is_in_its_files(get_peft_model(model, lora(modules_to_save=["embed_tokens"])))
    with pytest.raises(ValueError, match="merged an adapter"):
        check_base_is_in_its_files(merged(tmp_path).to(loaded))


def test_files_of_the_decoder_alone_are_compared(tmp_path):
    llama().model.save_pretrained(tmp_path)
    model = llama()
    model.config._name_or_path = str(tmp_path)
    check_base_is_in_its_files(model)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(ValueError, match=r"got 1 others, e\.g\. `model.norm.weight`"):
        check_base_is_in_its_files(model)


@pytest.mark.parametrize("name", [None, "", "no/such-model", "not a name", "/no/such/place"])
def test_base_without_files_here_is_not_compared(name):
    model = llama()
    model.config._name_or_path = name
    check_base_is_in_its_files(model)


def test_base_that_was_rounded_twice_is_that_of_its_files(tmp_path):
    llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    check_base_is_in_its_files(model.to(torch.bfloat16))


def test_small_change_in_the_dtype_of_the_files_is_seen(tmp_path):
    llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        model.model.norm.weight *= 1.001
    with pytest.raises(ValueError, match=r"got 1 others, e\.g\. `model.norm.weight`"):
        check_base_is_in_its_files(model)


def test_dequantized_base_is_not_compared_with_packed_numbers(tmp_path):
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    llama(hidden_size=64).save_pretrained(tmp_path / "plain")
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=nf4, device_map="cpu"
    )
    quantized.save_pretrained(tmp_path / "nf4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", device_map="cpu")
    check_base_is_in_its_files(model.dequantize())


@pytest.mark.parametrize("width", [16, 32])
def test_experts_with_axes_swapped_in_files_are_not_compared(tmp_path, width):
    """As transformers does for some while it loads them, also with square ones."""
    model = build("Qwen3 MoE")
    experts = torch.randn(4, 32, width)
    save_file({"model.experts": experts}, tmp_path / "model.safetensors")
    model.model.experts = torch.nn.Parameter(experts.transpose(1, 2).contiguous())
    model.config._name_or_path = str(tmp_path)
    check_base_is_in_its_files(model)


class Mine(LlamaForCausalLM):
    pass


def test_card_names_the_class_that_loads_the_base(tmp_path):
    """Neither a class that transformers does not have, nor one that loads a whole for a part."""
    assert name_of_loader(llama()) == "AutoModelForCausalLM"
    assert name_of_loader(Mine(llama().config)) == "AutoModelForCausalLM"
    assert name_of_loader(build("Gemma 3")) == "Gemma3ForCausalLM"
    assert name_of_loader(build("Gemma 4 with images")) == "AutoModelForCausalLM"
    assert name_of_loader(build("Ministral 3 with images")) == "AutoModelForImageTextToText"
