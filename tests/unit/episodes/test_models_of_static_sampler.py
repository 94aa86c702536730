"""Sampling by steps has the tokens of `generate` on many models beside those of families.py."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from families import SIZES, of_class
from test_static_sampler import (
    FILTERED,
    FROM_HOST,
    GREEDY,
    PLAIN,
    STOPS,
    Reads,
    generated,
    makes_no_tensors,
    noise_of,
    prompts_of,
    redrawn,
    rows_leave,
    sampler_of,
    stepped,
    tokens_of,
    turns_continue,
)
from tiny import config, tokenizer
from transformers import GenerationConfig

from trl_ppo_ext.episodes.transformers_generator import TransformersGenerator, why_not_stepped
from trl_ppo_ext.modeling.loading import load_actor_critic

COLUMNS = 10  # prompts have up to 9 tokens, so that windows of 8 slide
HOST_READ = "_local_scalar_dense"

# the others compute it
WITHOUT_HEADS = {name: size for name, size in SIZES.items() if name != "head_dim"}
HEADS = {"head_dim": 8}
WINDOW = {"sliding_window": 8}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
PADDED = {"pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = EXPERTS | {"n_routed_experts": 4, "topk_group": 1, "first_k_dense_replace": 1}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LATENT = {  # keys and values of different sizes
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
PER_LAYER = {  # the last layer reads keys and values of the first
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 32,
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA_3N = PER_LAYER | {
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.9, 0.0, 0.0],
}
GEMMA_4_MOE = {
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
ERNIE = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "moe_layer_start_index": 1,
}
LLAMA_4 = {
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 0],
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "interleave_moe_layer_step": 2,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def rotary(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


def long_rotary(original):
    """Other frequencies for all rows, once one is longer than `original`."""
    kind = rotary(
        "longrope",
        short_factor=[1.0] * 4,
        long_factor=[3.0] * 4,
        factor=4.0,
        original_max_position_embeddings=original,
    )
    return kind | {"original_max_position_embeddings": original}


YARN = rotary("yarn", factor=2.0, original_max_position_embeddings=32)
LLAMA_3 = rotary(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)

# name: beginning of the classes of model and config, and settings beside SIZES
STEPPED = {
    "Apertus": ("Apertus", {}),
    "Arcee": ("Arcee", {}),
    "Cohere": ("Cohere", PADDED),
    "Cohere 2": ("Cohere2", HEADS | PADDED | WINDOW | ALTERNATING),
    "DeepSeek-V2": ("DeepseekV2", LATENT | ROUTED | {"n_group": 1}),
    "DeepSeek-V3": ("DeepseekV3", LATENT | ROUTED | {"n_group": 2}),
    "ERNIE 4.5": ("Ernie4_5", HEADS),
    "ERNIE 4.5 MoE": ("Ernie4_5_Moe", HEADS | ERNIE),
    "Falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon 7B": ("Falcon", {"multi_query": True}),
    "Gemma": ("Gemma", HEADS),
    "Gemma 2": ("Gemma2", HEADS | WINDOW | {"query_pre_attn_scalar": 8}),
    "Gemma 3n": ("Gemma3n Text", HEADS | WINDOW | GEMMA_3N),
    "Gemma 4 MoE": ("Gemma4 Text", HEADS | WINDOW | ALTERNATING | GEMMA_4_MOE),
    "Gemma 4 with shared keys": (
        "Gemma4 Text",
        HEADS | WINDOW | PER_LAYER | {"global_head_dim": 16},
    ),
    "GLM": ("Glm", HEADS | PADDED),
    "GLM-4.7-Flash": ("Glm4MoeLite", LATENT | ROUTED | {"n_group": 1}),
    "GPT-2": ("GPT2 LMHead", GPT),
    "GPT-J": ("GPTJ", GPT | {"rotary_dim": 4}),
    "GPT-NeoX": ("GPTNeoX", {}),
    "Granite": ("Granite", {}),
    "Granite MoE": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "HunYuan MoE": ("HunYuanMoEV1", HEADS | {"num_experts": 4, "moe_topk": 2}),
    "Llama with Llama 3's rotary": ("Llama", LLAMA_3),
    "Llama with YaRN": ("Llama", YARN),
    "Llama with dynamic rotary": ("Llama", rotary("dynamic", factor=2.0)),
    "Llama with eager attention": ("Llama", {"attn_implementation": "eager"}),
    "Llama 4": ("Llama4 Text", HEADS | LLAMA_4),
    "MiniMax-M2": ("MiniMaxM2", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Ministral": ("Ministral", HEADS | WINDOW | ALTERNATING),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Nemotron": ("Nemotron", {}),
    "OLMo 2": ("Olmo2", {}),
    "OLMoE": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "OPT": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "Phi": ("Phi", {}),
    "Phi-3 with longrope": ("Phi3", long_rotary(48)),
    "Phi-3 with windows": ("Phi3", WINDOW),
    "Phi-3.5 MoE": ("Phimoe", {"num_local_experts": 4}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2 with windows": ("Qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "Qwen2 MoE": (
        "Qwen2Moe",
        EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "StableLM": ("StableLm", {}),
    "StarCoder2": ("Starcoder2", WINDOW),
    "XGLM": ("XGLM", {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
}

# models whose steps wait for a GPU or make a tensor on the host, so that no graph captures them
NOT_CAPTURED = {
    "Falcon": {FROM_HOST},  # indices as lists
    "Falcon 7B": {FROM_HOST},
    "Gemma 3n": {FROM_HOST},  # the quantile of its sparsity
    "Llama with dynamic rotary": {HOST_READ},  # the largest position
    "XGLM": {HOST_READ},  # the largest position
}

ALIBI = "reads positions off its mask"
OTHER_STATE = "keep another state than keys and values"
NO_CACHE = "takes neither `cache` nor `past_key_values`"
NOT_STEPPED = {
    "Bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}, OTHER_STATE),
    "BLOOM": ("Bloom", {"n_layer": 2, "n_head": 4}, ALIBI),
    "Falcon with ALiBi": ("Falcon", {"alibi": True}, ALIBI),
    "MPT": ("Mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, ALIBI),
    "GPT": ("OpenAIGPT LMHead", GPT, NO_CACHE),
    "GPT-Neo": (
        "GPTNeo",
        {
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 4,
            "window_size": 8,
        },
        "masks by the number of its keys",
    ),
    "RWKV": ("Rwkv", {}, NO_CACHE),
    "Qwen3-Next": (
        "Qwen3Next",
        EXPERTS
        | DELTA
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
        OTHER_STATE,
    ),
}


def model_named(name, **others):
    """A tiny model whose next tokens depend on all earlier ones."""
    classes, settings = (STEPPED | NOT_STEPPED)[name][:2]
    family, *kind = classes.split()
    model_class = family + ("LMHeadModel" if kind == ["LMHead"] else "ForCausalLM")
    config_class = family + ("TextConfig" if kind == ["Text"] else "Config")
    sizes = of_class(config_class, **WITHOUT_HEADS | settings | others)
    torch.manual_seed(0)
    return redrawn(of_class(model_class, sizes).eval())


def reason_of(model):
    """Reason why only `generate` samples a model, as that of an actor-critic's policy."""
    trunk = model.model if model.base_model is model else model.base_model
    policy = SimpleNamespace(get_base_model=lambda: model)
    actor_critic = SimpleNamespace(policy=policy, trunk=trunk)
    return why_not_stepped(actor_critic, GenerationConfig(use_cache=True))


@pytest.mark.parametrize("name", STEPPED)
def test_model_has_the_tokens_of_generate(name):
    model = model_named(name)
    reason = reason_of(model)
    if reason is not None and "version of transformers" in reason:
        pytest.skip(reason)
    assert reason is None
    first, *others = prompts_of()[0]
    changed = [first % 31 + 1, *others]
    with torch.no_grad():
        logits = model(torch.tensor([[first, *others], changed])).logits[:, -1]
    assert (logits[0] - logits[1]).abs().max() > 0.02
    prompts = prompts_of()
    noise = noise_of(columns=COLUMNS)
    for settings in (GREEDY, PLAIN, FILTERED):
        expected = generated(model, prompts, noise, settings)
        assert settings is not PLAIN or len({len(ids) for ids in expected}) > 1
        assert stepped(model, prompts, noise, settings) == expected


@makes_no_tensors
@pytest.mark.parametrize("name", STEPPED)
def test_steps_of_few_models_read_on_the_host(name):
    sampler = sampler_of(model_named(name))
    prompts = prompts_of(2, 4)
    tokens_of(sampler, prompts, [2, 2])
    with Reads() as reads, torch.no_grad():
        sampler.step.run(2)
    assert set(reads.names) == NOT_CAPTURED.get(name, set())


@pytest.mark.parametrize("name", NOT_STEPPED)
def test_model_that_cannot_step_has_a_reason(name):
    assert NOT_STEPPED[name][2] in reason_of(model_named(name))


def test_rows_past_a_change_of_frequencies_are_sampled_by_generate(tmp_path):
    model = model_named("Phi-3 with longrope", **long_rotary(12))
    args = config(tmp_path, max_completion_length=COLUMNS, stop_token_ids=STOPS)
    actor_critic = load_actor_critic(model, args)
    base = actor_critic.policy.get_base_model().eval()
    generator = TransformersGenerator(actor_critic, tokenizer(), args, Accelerator(cpu=True))
    generator.config.do_sample = False
    assert generator.stop_token_ids == set(STOPS)
    calls = []
    sample = actor_critic.sample

    def noted(*args, **kwargs):
        calls.append(args)
        return sample(*args, **kwargs)

    actor_critic.sample = noted
    for longest, room in ((6, 6), (9, COLUMNS)):
        prompts = prompts_of(6, longest)
        expected = generated(base, prompts, noise_of(6, room), GREEDY)
        assert generator.generate(prompts, [room] * 6) == expected
        assert bool(calls) == (longest + room > 12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_turns_continue_keys_and_values_of_different_sizes(temperature):
    model = model_named("DeepSeek-V3")
    sampler = sampler_of(model)
    tokens_of(sampler, [[10, 11]], [1])
    layer = sampler.memory.cache.layers[0]
    assert layer.keys.shape[-1] != layer.values.shape[-1]
    turns_continue(model, temperature)


@pytest.mark.parametrize("name", ["Qwen2 with windows", "Llama 4", "DeepSeek-V2"])
def test_rows_that_leave_by_halves_change_no_completion(name):
    model = model_named(name)
    if reason := reason_of(model):
        pytest.skip(reason)
    rows_leave(model, "by halves")
