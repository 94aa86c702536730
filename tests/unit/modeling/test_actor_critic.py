"""One base in three roles: what each says, and that switching roles leaves no trace."""

import copy

import bitsandbytes as bnb
import pytest
import torch
from runs_of_tiny import COMPLETIONS, PROMPTS, plain_logprobs, sequences
from tiny import LOGIT_MAPS, config, llama, qwen2, tokenizer, with_mapped_logits
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BitsAndBytesConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from trl_ppo_ext.modeling.loading import load_actor_critic


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
    built.check_logits()
    outputs = built(sequences(), temperature=0.7, with_entropy=True, with_kl=True)
    along, parts = torch.randn(3, 3, 5), []
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        given, places = torch.tensor([prompt + completion]), slice(len(prompt) - 1, -1)
        log_p = (built.policy(input_ids=given).logits[0, places] / 0.7).log_softmax(-1)
        with built.reference(), torch.no_grad():
            log_q = (built.policy(input_ids=given).logits[0, places] / 0.7).log_softmax(-1)
        p, tokens = log_p.exp(), torch.tensor(completion)[:, None]
        expected = log_p.gather(1, tokens)[:, 0], -(p * log_p).sum(1), (p * (log_p - log_q)).sum(1)
        assert (log_p - log_q).abs().max() > 0.01
        for number, value in enumerate(expected):
            torch.testing.assert_close(outputs[number][row, : len(completion)], value, rtol=0, atol=1e-6)
            parts.append((along[number, row, : len(completion)] * value).sum())
    trained = list(built.policy_parameters().values())
    wanted = torch.autograd.grad(sum(parts), trained)
    got = torch.autograd.grad(sum((a * x).sum() for a, x in zip(along, outputs)), trained)
    for name, x, y in zip(built.policy_parameters(), got, wanted):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_values_are_of_the_state_in_which_each_token_was_sampled(tmp_path):
    built = actor_critic(tmp_path, critic="head")
    values = built(sequences()).values
    hidden = built.policy(input_ids=torch.tensor([PROMPTS[0] + COMPLETIONS[0]]), output_hidden_states=True)
    states = hidden.hidden_states[-1][0, len(PROMPTS[0]) - 1 : -1]
    torch.testing.assert_close(values[0, :3], built.value_head(states)[:, 0])


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
    alone, among = sequences().rows(row), sequences()
    assert alone.input_ids.shape[1] < among.input_ids.shape[1]
    torch.testing.assert_close(built(alone).logprobs[0], built(among).logprobs[0, :3])
    torch.testing.assert_close(built(alone).values[0], built(among).values[0, :3])
    summed = [gradients(built, sequences().rows(torch.tensor([r]))) for r in range(3)]
    for name, gradient in gradients(built, among).items():
        torch.testing.assert_close(gradient, sum(part[name] for part in summed), rtol=1e-4, atol=1e-5)


def test_dropout_is_off_also_where_it_is_a_number(tmp_path):
    built = load_actor_critic(llama(attention_dropout=0.5), config(tmp_path))
    assert torch.equal(built.train()(sequences()).logprobs, built.eval()(sequences()).logprobs)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trunk_keeps_only_states_that_the_side_critic_reads(tmp_path, checkpointing):
    model = LlamaForCausalLM(LlamaConfig(**llama().config.to_dict() | {"num_hidden_layers": 8}))
    built, calls = actor_critic(tmp_path, model).train(), []
    if checkpointing:
        built.gradient_checkpointing_enable()
    hook = built.trunk.register_forward_hook(
        lambda _, args, kwargs, outputs: calls.append((kwargs, outputs.hidden_states)), with_kwargs=True
    )
    gradients(built, sequences())
    hook.remove()
    [(kwargs, states)], layers = calls, built.value_head.layers
    every = built.trunk(**kwargs | {"output_hidden_states": True}).hidden_states
    assert len(layers) == 4 and [layer for layer, x in enumerate(states) if x is not None] == layers
    assert all(torch.equal(states[layer], every[layer]) for layer in layers)


def test_sampling_projects_last_states_without_a_copy_of_the_projection_per_row(tmp_path):
    built = actor_critic(tmp_path)
    prompts, expanded = torch.randint(3, 10, (5, 6)), []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.bmm.default and args[1].shape[-1] == built.config.vocab_size:
                expanded.append(args[1].shape)
            return func(*args, **(kwargs or {}))

    with Products():
        built.sample(prompts, torch.ones_like(prompts), GenerationConfig(max_new_tokens=3, do_sample=True))
    assert not expanded


def test_sampling_takes_nothing_from_the_models_own_generation_config(tmp_path):
    model = llama()
    model.generation_config.min_p, model.generation_config.suppress_tokens = 1.0, list(range(4, 32))
    built = actor_critic(tmp_path, model)
    settings = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=4, eos_token_id=1, pad_token_id=0)
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
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        built = load_actor_critic(str(path), config(path, **kwargs), quantization_config=quantization)
        move_adapter(built)
        return built

    return make


def test_base_is_quantised_and_adapters_are_float32(nf4):
    built = nf4(bf16=True)
    assert sum(isinstance(module, bnb.nn.Linear4bit) for module in built.modules()) == 14  # 7 in each layer
    layers = [module for module in built.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert {layer.compute_dtype for layer in layers} == {torch.bfloat16}  # not bitsandbytes' float32
    named = nf4(bf16=True, model_init_kwargs={"dtype": "float32"}).modules()
    assert {x.compute_dtype for x in named if isinstance(x, bnb.nn.Linear4bit)} == {torch.float32}
    assert {p.dtype for p in built.parameters() if p.requires_grad} == {torch.float32}
    assert built.policy.get_base_model().get_input_embeddings().weight.dtype == torch.bfloat16
