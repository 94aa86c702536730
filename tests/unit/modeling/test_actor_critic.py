"""One base in three roles: what each says, and that switching roles leaves no trace."""

import copy
import itertools
import re

import bitsandbytes as bnb
import pytest
import torch
from peft import IA3Config, LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from runs_of_tiny import COMPLETIONS, PROMPTS, plain_logprobs, sequences
from tiny import LOGIT_MAPS, config, llama, qwen2, tokenizer, with_mapped_logits
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    BloomConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from trl_ppo_ext.modeling import actor_critic as actor_critic_module
from trl_ppo_ext.modeling.actor_critic import fused
from trl_ppo_ext.modeling.loading import load_actor_critic
from trl_ppo_ext.sequences import Sequences


def all_linear():
    return LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")


def actor_critic(tmp_path, model=None, moved=True, critic="side", **kwargs):
    built = load_actor_critic(model or llama(), config(tmp_path, critic=critic), **kwargs)
    if moved:
        move_adapter(built)
    return built


def move_adapter(built):
    """Take the adapter away from zero, as training does."""
    torch.manual_seed(1)
    for name, parameter in built.policy.named_parameters():
        if "lora_B" in name and parameter.requires_grad:
            parameter.data.normal_(std=0.2)
    built.value_head.weight.data.normal_()


@pytest.mark.parametrize("make", [llama, qwen2])
def test_logprobs_are_those_of_the_plain_model_without_padding(tmp_path, make):
    built = actor_critic(tmp_path, make())
    outputs = built(sequences(), temperature=0.7)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        expected = plain_logprobs(built.policy, prompt, completion, 0.7)
        torch.testing.assert_close(outputs.logprobs[row, : len(completion)], expected)
        assert not outputs.logprobs[row, len(completion) :].any()


@pytest.mark.parametrize("family", LOGIT_MAPS)
def test_capped_and_scaled_logits_score_as_the_plain_forward(tmp_path, family):
    built = actor_critic(tmp_path, with_mapped_logits(family))
    built.prepare_forwards()
    outputs = built(sequences(), temperature=0.7, with_entropy=True, with_kl=True)
    along = torch.randn(3, 3, 5)
    parts = []
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        given = torch.tensor([prompt + completion])
        places = slice(len(prompt) - 1, -1)
        log_p = (built.policy(input_ids=given).logits[0, places] / 0.7).log_softmax(-1)
        with built.reference(), torch.no_grad():
            log_q = (built.policy(input_ids=given).logits[0, places] / 0.7).log_softmax(-1)
        p = log_p.exp()
        tokens = torch.tensor(completion)[:, None]
        expected = log_p.gather(1, tokens)[:, 0], -(p * log_p).sum(1), (p * (log_p - log_q)).sum(1)
        assert (log_p - log_q).abs().max() > 0.01
        for number, value in enumerate(expected):
            torch.testing.assert_close(
                outputs[number][row, : len(completion)], value, rtol=0, atol=1e-6
            )
            parts.append((along[number, row, : len(completion)] * value).sum())
    trained = list(built.policy_parameters().values())
    wanted = torch.autograd.grad(sum(parts), trained)
    got = torch.autograd.grad(sum((a * x).sum() for a, x in zip(along, outputs)), trained)
    for name, x, y in zip(built.policy_parameters(), got, wanted):
        torch.testing.assert_close(
            x,
            y,
            rtol=1e-5,
            atol=4e-6 * max(1, y.abs().max().item()),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_values_are_of_the_state_in_which_each_token_was_sampled(tmp_path):
    built = actor_critic(tmp_path, critic="head")
    values = built(sequences()).values
    hidden = built.policy(
        input_ids=torch.tensor([PROMPTS[0] + COMPLETIONS[0]]), output_hidden_states=True
    )
    states = hidden.hidden_states[-1][0, len(PROMPTS[0]) - 1 : -1]
    torch.testing.assert_close(values[0, :3], built.value_head(states))


def test_first_values_are_zero_and_float32(tmp_path):
    values = actor_critic(tmp_path, llama(dtype=torch.bfloat16), moved=False)(sequences()).values
    assert values.dtype == torch.float32 and not values.any()


def test_fresh_adapter_is_the_reference_bit_for_bit(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        built = actor_critic(tmp_path, llama(dtype=dtype), moved=False)
        policy = built(sequences()).logprobs
        with built.reference(), torch.no_grad():
            assert torch.equal(built(sequences()).logprobs, policy)


def test_reference_is_the_base_model(tmp_path):
    base = llama()
    expected = plain_logprobs(base, PROMPTS[0], COMPLETIONS[0])
    built = actor_critic(tmp_path, copy.deepcopy(base))
    with built.reference():
        torch.testing.assert_close(built(sequences()).logprobs[0, :3], expected)
    assert not torch.allclose(built(sequences()).logprobs[0, :3], expected)


def gradients(built, batch):
    built.zero_grad()
    outputs = built(batch, with_entropy=True)
    (outputs.logprobs.sum() + outputs.values.sum() + outputs.entropies.sum()).backward()
    return {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}


def test_padding_changes_neither_outputs_nor_gradients(tmp_path):
    built = actor_critic(tmp_path)
    row = torch.tensor([0])
    alone = sequences().rows(row)
    among = sequences()
    assert alone.packed.cells is None and among.packed.cells is not None  # it has padding
    torch.testing.assert_close(built(alone).logprobs[0], built(among).logprobs[0, :3])
    torch.testing.assert_close(built(alone).values[0], built(among).values[0, :3])
    summed = [gradients(built, sequences().rows(torch.tensor([r]))) for r in range(3)]
    for name, gradient in gradients(built, among).items():
        torch.testing.assert_close(
            gradient, sum(part[name] for part in summed), rtol=1e-4, atol=1e-5
        )


WINDOW = {"sliding_window": 3, "head_dim": 8}
SLIDING = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 3}
PACKING = {
    "llama": llama,
    "qwen2, one sliding layer": lambda: qwen2(**SLIDING),
    "mistral": lambda: of_llama("mistral", **WINDOW),
    "gemma3_text": lambda: of_llama(
        "gemma3_text", **WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen2_moe": lambda: of_llama(
        "qwen2_moe", **SLIDING, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8
    ),
    "exaone4": lambda: of_llama(
        "exaone4", **WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=32, n_embd=32, n_head=4, n_layer=2, initializer_range=0.1)
    ).eval(),
}
NOT_PACKING = {
    "eager": lambda: llama(attn_implementation="eager"),
    "lfm2": lambda: of_llama("lfm2", layer_types=["conv", "full_attention"]),
    "bloom": lambda: AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=32, hidden_size=32, n_head=4)
    ).eval(),
}


REASONS = {
    "eager": "`attn_implementation` is 'eager'",
    "lfm2": "Lfm2ForCausalLM has layers of conv",
    "bloom": "BloomForCausalLM does not support flash",
}


def of_llama(kind, **kwargs):
    """A model of another family with the sizes of a tiny Llama."""
    sizes = llama().config.to_dict()
    for name in (
        "model_type",
        "architectures",
        "head_dim",
        "dtype",
        "layer_types",
        "transformers_version",
    ):
        sizes.pop(name, None)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | kwargs)).eval()


def with_turns():
    completions = [list(range(5, 12)), [14, 15, 16, 17, 1], [1]]
    sampled = [[1, 1, 0, 0, 0, 2, 2], [1, 0, 2, 2, 2], [1]]
    return Sequences.from_token_ids(PROMPTS, completions, 0, "cpu", sampled=sampled)


def assert_packed_like_padded(built, batch):
    built.prepare_forwards()
    assert built.why_not_packed is None
    packed = gradients(built, batch)
    expected = built(batch)
    built.why_not_packed = "of a test"
    padded = gradients(built, batch)
    outputs = built(batch)
    for one, other in zip(expected[:2] + expected[3:4], outputs[:2] + outputs[3:4]):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6)
    assert packed.keys() == padded.keys()
    for name, gradient in packed.items():
        assert (gradient - padded[name]).norm() <= 1e-6 * padded[name].norm() + 1e-8, name


@pytest.mark.parametrize("kind", PACKING)
@pytest.mark.parametrize("batch", [sequences, with_turns])
def test_packed_rows_have_the_gradients_of_padded_ones(tmp_path, kind, batch):
    assert_packed_like_padded(
        actor_critic(tmp_path, PACKING[kind](), peft_config=all_linear()), batch()
    )


@pytest.mark.parametrize("critic", ["head", "adapter"])
@pytest.mark.parametrize("recompute", [False, True])
def test_packing_changes_no_gradient_with_any_critic(tmp_path, critic, recompute):
    built = actor_critic(tmp_path, critic=critic)
    if recompute:
        built.train()
        built.gradient_checkpointing_enable()
    assert_packed_like_padded(built, with_turns())


@pytest.mark.parametrize("kind", NOT_PACKING)
def test_models_that_would_mix_packed_rows_get_them_padded(tmp_path, kind):
    built = actor_critic(tmp_path, NOT_PACKING[kind](), peft_config=all_linear())
    built.prepare_forwards()
    assert re.search(REASONS[kind], built.why_not_packed)
    outputs = built(sequences()).logprobs
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        expected = plain_logprobs(built.policy, prompt, completion)
        torch.testing.assert_close(outputs[row, : len(completion)], expected, rtol=1e-4, atol=1e-5)


def test_flash_attention_gets_the_lengths_of_packed_rows(tmp_path):
    """With a stand-in for its function, which needs a GPU."""

    def flash(
        module, query, key, value, attention_mask, cu_seq_lens_q=None, cu_seq_lens_k=None, **kwargs
    ):
        if cu_seq_lens_q is None:
            causal = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
            mask = (
                causal if attention_mask is None else causal & attention_mask.bool()[:, None, None]
            )
            return sdpa_attention_forward(module, query, key, value, mask)
        assert attention_mask is None and kwargs["max_length_q"] == kwargs["max_length_k"]
        assert cu_seq_lens_q is cu_seq_lens_k and cu_seq_lens_q.dtype == torch.int32
        rows = itertools.pairwise(cu_seq_lens_q.tolist())
        parts = [[x[:, :, a:b] for x in (query, key, value)] for a, b in rows]
        return torch.cat(
            [sdpa_attention_forward(module, *part, None)[0] for part in parts], 1
        ), None

    AttentionInterface.register("flash_stand_in", flash)
    AttentionMaskInterface.register("flash_stand_in", flash_attention_mask)
    model = llama()
    model.config._attn_implementation = "flash_stand_in"
    assert_packed_like_padded(actor_critic(tmp_path, model), with_turns())


def test_dropout_is_off_also_where_it_is_a_number(tmp_path):
    built = load_actor_critic(llama(attention_dropout=0.5), config(tmp_path))
    assert torch.equal(built.train()(sequences()).logprobs, built.eval()(sequences()).logprobs)


@pytest.mark.skipif(
    not actor_critic_module.SELECTS_STATES, reason="this version of transformers keeps all states"
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trunk_keeps_only_states_that_the_side_critic_reads(tmp_path, checkpointing):
    model = LlamaForCausalLM(LlamaConfig(**llama().config.to_dict() | {"num_hidden_layers": 8}))
    built = actor_critic(tmp_path, model).train()
    calls = []
    if checkpointing:
        built.gradient_checkpointing_enable()
    hook = built.trunk.register_forward_hook(
        lambda _, args, kwargs, outputs: calls.append((args, kwargs, outputs.hidden_states)),
        with_kwargs=True,
    )
    gradients(built, sequences())
    hook.remove()
    [(args, kwargs, states)], layers = calls, built.value_head.layers
    every = built.trunk(*args, **kwargs | {"output_hidden_states": True}).hidden_states
    assert len(layers) == 4 and [layer for layer, x in enumerate(states) if x is not None] == layers
    assert all(torch.equal(states[layer], every[layer]) for layer in layers)


def test_sampling_does_not_copy_the_projection_per_row(tmp_path):
    """All rows share one projection of their last states."""
    built = actor_critic(tmp_path)
    prompts = torch.randint(3, 10, (5, 6))
    expanded = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.bmm.default and args[1].shape[-1] == built.config.vocab_size:
                expanded.append(args[1].shape)
            return func(*args, **(kwargs or {}))

    with Products():
        built.sample(
            prompts, torch.ones_like(prompts), GenerationConfig(max_new_tokens=3, do_sample=True)
        )
    assert not expanded


def gpt2_conv1d():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    )


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("make", [llama, qwen2, gpt2_conv1d])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "kwargs", [{}, {"use_rslora": True}, {"rank_pattern": {"o_proj|c_proj": 3}}]
)
def test_fused_lora_computes_the_products_of_peft(tmp_path, kwargs, autocast, make, quantized):
    if quantized and make is gpt2_conv1d:
        pytest.skip("bitsandbytes quantizes no Conv1D")
    make().save_pretrained(tmp_path / "base")
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    lora = LoraConfig(
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        fan_in_fan_out=make is gpt2_conv1d,
        **kwargs,
    )
    built = actor_critic(
        tmp_path,
        str(tmp_path / "base"),
        peft_config=lora,
        quantization_config=nf4 if quantized else None,
    ).eval()
    ids = torch.tensor([[3, 5, 7, 11], [4, 6, 8, 10]])

    def logits():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return built.policy(ids).logits.float()

    expected = logits()
    with built.reference():
        base = logits()
    with fused(built.policy, built.policy_adapter):
        replaced = [module for module in built.modules() if "forward" in vars(module)]
        actual = logits()
    assert len(replaced) == sum(isinstance(module, LoraLayer) for module in built.modules()) > 0
    assert (expected - base).abs().max() > 0.1
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=(0.05 if autocast else 1e-5) * expected.abs().max()
    )
    assert torch.equal(logits(), expected) and not any(
        "forward" in vars(module) for module in built.modules()
    )


@pytest.mark.parametrize(
    "kwargs", [{"use_dora": True}, {"lora_bias": True}, {"init_lora_weights": "pissa"}, None]
)
def test_adapters_other_than_plain_lora_are_computed_by_peft(tmp_path, kwargs):
    ia3 = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    if kwargs:
        lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **kwargs)
    else:
        lora = ia3
    built = actor_critic(tmp_path, peft_config=lora, moved=False)
    with fused(built.policy, built.policy_adapter):
        replaced = [module for module in built.modules() if "forward" in vars(module)]
    assert bool(replaced) == ("init_lora_weights" in (kwargs or {}))


def test_merged_layers_and_those_with_a_hook_stay_as_they_are(tmp_path):
    built = actor_critic(tmp_path)
    merged, hooked, plain, *_ = (
        module for module in built.modules() if isinstance(module, LoraLinear)
    )
    merged.merge()
    hooked.forward = forward = hooked.base_layer.forward
    with (
        pytest.raises(RuntimeError, match="interrupted"),
        fused(built.policy, built.policy_adapter),
    ):
        assert (
            "forward" in vars(plain) and "forward" not in vars(merged) and hooked.forward is forward
        )
        raise RuntimeError("interrupted")
    assert "forward" not in vars(plain) and hooked.forward is forward


def test_sampling_does_without_the_forward_of_peft(tmp_path, monkeypatch):
    built = actor_critic(tmp_path)
    settings = GenerationConfig(max_new_tokens=3, do_sample=True, pad_token_id=0)
    ids = torch.tensor([[3, 5, 7]])

    def failing(*args, **kwargs):
        raise RuntimeError("slow")

    monkeypatch.setattr(LoraLinear, "forward", failing)
    assert built.sample(ids, torch.ones_like(ids), settings).shape == (1, 6)
    with pytest.raises(RuntimeError, match="slow"):
        built.policy(ids)
    # compiled on a GPU, which would see new forwards at each call
    settings.cache_implementation = "static"
    with pytest.raises(RuntimeError, match="slow"):
        built.sample(ids, torch.ones_like(ids), settings)


@pytest.mark.parametrize("with_bias", [False, True])
def test_cast_head_samples_from_logits_in_float32(tmp_path, with_bias):
    """Also of a base in bfloat16, which returns rounded logits; its trunk rounds as before."""
    model = llama()
    if with_bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(32))
    else:
        model.lm_head.bias = None
    built = load_actor_critic(model.bfloat16(), config(tmp_path, cast_lm_head_to_fp32=True))
    settings = GenerationConfig(
        do_sample=True, max_new_tokens=1, top_k=0, pad_token_id=0, output_logits=True
    )
    settings.return_dict_in_generate = True
    ids = torch.tensor([[3, 5, 7]])
    head = built.policy.get_base_model().get_output_embeddings()
    [logits] = built.sample(ids, torch.ones_like(ids), settings).logits
    hidden = built.trunk(ids).last_hidden_state[:, -1]
    expected = torch.nn.functional.linear(
        hidden.float(), head.weight.float(), head.bias.float() if with_bias else None
    )
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(logits, logits.bfloat16().float()) and "forward" not in vars(head)
    built.cast_lm_head_to_fp32 = False
    [rounded] = built.sample(ids, torch.ones_like(ids), settings).logits
    assert torch.equal(rounded, rounded.bfloat16().float())


def test_sampling_ignores_the_models_own_generation_config(tmp_path):
    model = llama()
    model.generation_config.min_p = 1.0
    model.generation_config.suppress_tokens = list(range(4, 32))
    built = actor_critic(tmp_path, model)
    settings = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=4, eos_token_id=1, pad_token_id=0
    )
    prompts = torch.full((64, 2), 5)
    ids = built.sample(prompts, torch.ones_like(prompts), settings)[:, 2:]
    assert len(ids.unique()) > 10 and (ids >= 4).any()
    assert model.generation_config.min_p == 1.0


# ---- a 4-bit base


@pytest.fixture(scope="module")
def nf4(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    llama(hidden_size=64).save_pretrained(path)
    tokenizer().save_pretrained(path)

    def make(**kwargs):
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
        built = load_actor_critic(
            str(path), config(path, **kwargs), quantization_config=quantization
        )
        move_adapter(built)
        return built

    return make


def test_base_is_quantised_and_adapters_are_float32(nf4):
    built = nf4(bf16=True)
    # 7 in each layer
    assert sum(isinstance(module, bnb.nn.Linear4bit) for module in built.modules()) == 14
    layers = [module for module in built.modules() if isinstance(module, bnb.nn.Linear4bit)]
    # not bitsandbytes' float32
    assert {layer.compute_dtype for layer in layers} == {torch.bfloat16}
    named = nf4(bf16=True, model_init_kwargs={"dtype": "float32"}).modules()
    assert {x.compute_dtype for x in named if isinstance(x, bnb.nn.Linear4bit)} == {torch.float32}
    assert {p.dtype for p in built.parameters() if p.requires_grad} == {torch.float32}
    assert built.policy.get_base_model().get_input_embeddings().weight.dtype == torch.bfloat16
