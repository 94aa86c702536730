"""Loading the base: what must not differ from one forward to the next."""

import sys
from types import ModuleType

import peft
import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from runs_of_tiny import plain_logprobs, trainer, weights
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FalconConfig,
    FalconForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)
from transformers.utils import logging

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.modeling.loading import load_actor_critic
from trl_ppo_ext.sequences import Sequences

MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
SIZES = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def falcon():
    """Reads its rates off the config in every forward."""
    return FalconForCausalLM(FalconConfig(**SIZES, attention_dropout=0.5, hidden_dropout=0.5))


def opt():
    """Leaves out whole layers."""
    return OPTForCausalLM(
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, layerdrop=0.9, dropout=0.5)
    )


def mixtral():
    """Multiplies the input of its routers by noise."""
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, **experts, router_jitter_noise=0.9, initializer_range=0.5)
    )


@pytest.mark.parametrize(
    ("make", "adapter"),
    [
        (falcon, None),
        (opt, None),
        (mixtral, None),
        (llama, LoHaConfig(rank_dropout=0.5, target_modules=["v_proj"])),
    ],
    ids=["falcon", "opt", "mixtral", "adapter"],
)
def test_noise_is_off_wherever_its_rate_is_kept(tmp_path, make, adapter):
    torch.manual_seed(0)
    built = load_actor_critic(make(), config(tmp_path), peft_config=adapter)
    # or a new adapter would change nothing
    torch.nn.init.normal_(list(built.policy_parameters().values())[-1])
    sequences = Sequences.from_token_ids([[4, 5], [6]], [[7, 8, 9], [10, 11, 12]], 0, "cpu")
    scored, trained = (built.train(mode)(sequences).logprobs for mode in (False, True))
    assert torch.equal(scored, trained)


SPARSE = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
STREAMS = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 32,
    "num_kv_shared_layers": 2,
}
STREAMS |= {
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "intermediate_size": 64,
    "activation_sparsity_pattern": [0.0] * 4,
}
STREAMS |= {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("phimoe", SPARSE),  # its router returns several tensors, and is a linear layer
        # so is this one; its trunk is unnamed
        ("llama4_text", SPARSE | {"head_dim": 8, "intermediate_size_mlp": 64}),
        ("gemma3n_text", STREAMS | {"num_key_value_heads": 2}),  # its layers' states have four axes
        # its config asks for the loss of its routers, which reads a mask of all tokens
        ("mixtral", SPARSE | {"output_router_logits": True}),
    ],
)
def test_models_of_unusual_parts_score_what_they_sample(tmp_path, kind, sizes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES | sizes, pad_token_id=0)
    )
    run = trainer(tmp_path, model, max_steps=2, num_ppo_epochs=1)
    run.train()
    first = run.state.log_history[0]
    assert (first["ratio/max"], first["kl"]) == (1, 0)
    prompt = [4, 5, 6]
    completion = [7, 8, 9]
    scores = run.actor_critic.eval()(Sequences.from_token_ids([prompt], [completion], 0, "cpu"))
    torch.testing.assert_close(
        scores.logprobs[0],
        plain_logprobs(run.actor_critic.policy, prompt, completion),
        atol=1e-4,
        rtol=0,
    )


# ---- adapters that a model brings ----

IDS = torch.tensor([[4, 5, 6, 7]])


@pytest.fixture
def saved(tmp_path):
    """Paths of a base and of a trained adapter on it, and their logits."""
    llama().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora)
    policy.save_pretrained(tmp_path / "sft")
    return str(tmp_path / "base"), str(tmp_path / "sft"), policy(IDS).logits


def starts_from(built, logits):
    """Whether policy and reference compute these logits, and only the policy is trained."""
    with torch.no_grad():
        policy = built.policy(IDS).logits
        with built.reference():
            reference = built.policy(IDS).logits
    assert all(x.requires_grad for x in built.policy_parameters().values())
    torch.testing.assert_close(policy, logits)
    return torch.equal(policy, reference)


def test_path_of_an_adapter_starts_the_policy(tmp_path, saved):
    base, sft, logits = saved
    built = trainer(tmp_path, base, peft_config=sft, processing_class=None)
    assert starts_from(built.actor_critic, logits)


def test_adapter_of_another_base_is_refused(tmp_path, saved):
    base, sft, _ = saved
    llama(seed=1).save_pretrained(tmp_path / "other")
    for model, adapter, message in (
        (str(tmp_path / "other"), sft, r"was trained on .*base.*pass a `PeftModel`"),
        (base, base, "has no adapter_config.json; name a saved"),
        (
            AutoModelForCausalLM.from_pretrained(sft),
            None,
            r"not a `PeftModel`; pass the base and .*`peft_config`",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, model, peft_config=adapter)


def adapter_of(base, path, settings, **saving):
    """Path of an adapter whose base may have changed before it was saved."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], **settings)
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    if saving:
        policy.get_input_embeddings().weight.data.mul_(1.5)
    policy.save_pretrained(path, **saving)
    return str(path)


def test_adapter_that_would_change_the_base_of_all_roles_is_refused(tmp_path, saved):
    base = saved[0]
    changed = adapter_of(base, tmp_path / "pissa", {"init_lora_weights": "pissa"})
    with pytest.raises(ValueError, match=r"pissa` has `init_lora_weights='pissa'`: it works on"):
        trainer(tmp_path, base, peft_config=changed, processing_class=None)
    brought = adapter_of(base, tmp_path / "embedding", {}, save_embedding_layers=True)
    with pytest.raises(ValueError, match=r"must have the weights of its files .*embed_tokens"):
        trainer(tmp_path, base, peft_config=brought, processing_class=None)


def test_adapter_of_another_revision_of_the_base_is_refused(tmp_path, saved):
    path = adapter_of(saved[0], tmp_path / "v1", {"revision": "v1"})
    given = {"peft_config": path, "processing_class": None}
    with pytest.raises(ValueError, match=r"trained on revision 'v1' .*'revision': 'v1'"):
        trainer(tmp_path, saved[0], **given)
    built = trainer(tmp_path, saved[0], **given, model_init_kwargs={"revision": "v1"})
    assert built.actor_critic.policy.active_peft_config.revision == "v1"


@pytest.mark.parametrize("task", [None, "SEQ_CLS", "FEATURE_EXTRACTION"])
@pytest.mark.parametrize("loaded", [False, True])
def test_adapter_that_starts_the_policy_is_saved_as_one_of_a_language_model(
    tmp_path, saved, task, loaded
):
    path = adapter_of(saved[0], tmp_path / "other", {"task_type": task})
    if loaded:
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved[0]), path)
        given = {"model": model, "processing_class": tokenizer()}
    else:
        given = {"model": saved[0], "peft_config": path, "processing_class": None}
    trainer(tmp_path / "run", **given).save_model()
    reloaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run")
    expected = AutoModelForCausalLM.from_pretrained(saved[0])(IDS).logits
    torch.testing.assert_close(reloaded(IDS).logits, expected)


def test_base_of_another_trainer_is_refused_until_it_is_unloaded(tmp_path):
    base = llama()
    first = trainer(tmp_path, base, critic="adapter")
    before = weights(first)
    first.train()
    trained = weights(first)
    with pytest.raises(
        ValueError, match=r"holds an adapter.*after another trainer, save and `unload\(\)`"
    ):
        trainer(tmp_path, base)
    assert all(torch.equal(x, trained[name]) for name, x in weights(first).items())
    assert first.actor_critic.policy.unload() is base
    second = weights(trainer(tmp_path, base, critic="adapter"))
    assert before.keys() == second.keys() and all(
        torch.equal(x, second[name]) for name, x in before.items()
    )


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (peft.VeraConfig(r=4, target_modules=["q_proj"]), "VERA saves other tensors.*`LoraConfig`"),
        (
            LoraConfig(alora_invocation_tokens=[4], task_type="CAUSAL_LM"),
            "`alora_invocation_tokens` must be None",
        ),
        (LoraConfig(init_lora_weights="pissa"), "`init_lora_weights='pissa'` changes the base"),
        (
            peft.IA3Config(
                init_ia3_weights=False, target_modules=["k_proj"], feedforward_modules=[]
            ),
            "`init_ia3_weights=False` begins with another policy",
        ),
        (
            peft.C3AConfig(block_size=8, target_modules=["q_proj"]),
            "`init_weights='xavier_uniform'` begins with another policy",
        ),
        (peft.AdaLoraConfig(total_step=9, task_type="CAUSAL_LM"), "must not be AdaLoRA"),
        (LoraConfig(layer_replication=[[0, 2], [1, 2]]), "nor have `layer_replication`"),
    ],
    ids=[
        "other tensors",
        "activated",
        "changes base",
        "not the base",
        "random circulants",
        "moving ranks",
        "layers twice",
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(tmp_path, adapter, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, peft_config=adapter)


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_quantized_output_projection_is_refused(tmp_path, bits):
    """Modules to skip replace the default, which is `lm_head`."""
    llama(hidden_size=64).save_pretrained(tmp_path / "base")
    quantization = BitsAndBytesConfig(**{bits: True}, llm_int8_skip_modules=["gate_proj"])
    with pytest.raises(ValueError, match=r"must not be quantized, got numbers of .*add 'lm_head'"):
        trainer(tmp_path / "run", str(tmp_path / "base"), quantization_config=quantization)


@pytest.mark.parametrize("name", ["norm", "embed_tokens"])
def test_saved_module_of_a_base_in_16_bits_needs_autocast(tmp_path, name):
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=[name])
    base = llama(dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"`modules_to_save` .* float32.*bfloat16; set `bf16=True`"
    ):
        trainer(tmp_path, base, peft_config=lora)
    trainer(tmp_path, llama(dtype=torch.bfloat16), peft_config=lora, bf16=True).train()


def test_dropout_of_an_adapter_is_set_to_zero_with_a_line(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    load_actor_critic(llama(), config(tmp_path), peft_config=LoraConfig(lora_dropout=0.25))
    assert "`lora_dropout=0.25` of `peft_config` is set to 0" in caplog.text


def test_models_that_read_padding_are_refused(tmp_path):
    sizes = {
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    model = RwkvForCausalLM(RwkvConfig(vocab_size=32, context_length=64, **sizes))
    built = trainer(tmp_path, model, peft_config=LoraConfig(target_modules=["key", "value"]))
    with pytest.raises(
        ValueError, match=r"RwkvForCausalLM does not ignore padding.*attention mask"
    ):
        built.train()


@pytest.mark.parametrize("part", ["lm_head", "model.layers.0.mlp.up_proj"])
def test_base_with_nan_is_refused_for_its_weights(tmp_path, part):
    model = llama()
    model.get_submodule(part).weight.data[3] = torch.nan
    with pytest.raises(
        ValueError, match="logits of LlamaForCausalLM must be finite, got NaN or inf; check its"
    ):
        trainer(tmp_path, model).train()


def test_reward_model_on_the_layers_of_the_policy_is_refused(tmp_path):
    model = llama()
    classifier = llama(classifier=True)
    classifier.model = model.model
    with pytest.raises(ValueError, match="shares its layers with `model`, and freezes"):
        trainer(tmp_path, model, classifier, reward_processing_classes=tokenizer())


def test_default_adapter_on_mamba_excludes_what_peft_refuses(tmp_path):
    policy = load_actor_critic(
        MambaForCausalLM(MambaConfig(vocab_size=32, **MAMBA)), config(tmp_path)
    ).policy
    # of `dt_proj` only the weight is read
    assert {name.split(".")[-4] for name, _ in policy.named_parameters() if "lora_A" in name} == {
        "in_proj",
        "x_proj",
    }


def test_default_adapter_is_on_layers_that_text_runs_through(tmp_path):
    """Not on a vision tower, which would have no gradient, an error of DDP."""
    text = SIZES | {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )
    built = load_actor_critic(model, config(tmp_path))
    sequences = Sequences.from_token_ids([[4, 5]], [[7, 8, 9]], 0, "cpu")
    built(sequences).logprobs.sum().backward()
    trained = built.policy_parameters().values()
    assert len(trained) == 2 * 7 * 2 and all(x.grad is not None for x in trained)


@pytest.mark.parametrize("kwargs", [None, {"ignore_mismatched_sizes": True}])
def test_base_without_all_weights_raises(tmp_path, kwargs):
    if kwargs is None:
        llama().model.save_pretrained(tmp_path / "base")  # without its output projection
    else:
        llama(vocab_size=40).save_pretrained(tmp_path / "base")
        llama().config.save_pretrained(tmp_path / "base")
    with pytest.raises(
        ValueError,
        match=r"must be a causal .*lack [12] weights, which would be random: .*lm_head.weight",
    ):
        load_actor_critic(str(tmp_path / "base"), config(tmp_path, model_init_kwargs=kwargs))


@pytest.mark.parametrize("critic", ["side", "adapter"])
def test_critic_reads_a_last_state_of_another_width(tmp_path, critic):
    # as in OPT-350m
    small = OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False)
    built = trainer(tmp_path, OPTForCausalLM(small), critic=critic, max_steps=1)
    before = weights(built)["value_head.weight"]
    built.train()
    assert (weights(built)["value_head.weight"] != before).any()


def test_liger_gets_the_base_once_and_not_its_loss(tmp_path, monkeypatch, caplog):
    given = []
    liger = ModuleType("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance = lambda **kwargs: given.append(kwargs)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    args = config(
        tmp_path,
        liger_kernel_config={"rope": False, "fused_linear_cross_entropy": True},
        max_steps=1,
    )
    args.use_liger_kernel = True  # as on a GPU
    built = PPOTrainer(llama(), length_reward, args, prompts(), processing_class=tokenizer())
    built.train()
    (kwargs,) = given
    assert kwargs.pop("model") is built.actor_critic.policy.get_base_model()
    assert kwargs == {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    assert "No liger kernels" not in caplog.text
    assert args.use_liger_kernel  # for the next trainer
