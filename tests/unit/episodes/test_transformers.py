"""Generators: completions of every cache, adapters in sampling, bad settings."""

import peft
import pytest
import torch
from tiny import WORDS, config, length_reward, llama, prompts, qwen2, tokenizer
from transformers import BitsAndBytesConfig, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.episodes import transformers as growing_cache
from trl_ppo_ext.episodes.transformers import TransformersGenerator, quick_adapters

# several lengths, some repeated more often than others, and not all side by side
UNEVEN = [[5, 6, 7, 8], [5, 6, 7, 8], [9], [9], [4, 5, 6], [5, 6, 7, 8], [4, 5]]
EVEN = [[5, 6, 7, 8], [5, 6, 7, 8], [4, 5, 6], [4, 5, 6], [9, 4], [9, 4]]
MODELS = {"llama": llama, "qwen2": qwen2}


@pytest.fixture
def build(tmp_path):
    """Build a trainer whose policy is another than its base."""

    def build(model=None, quantization=None, processing_class=None, **settings):
        trainer = PPOTrainer(
            llama() if model is None else model,
            length_reward,
            config(tmp_path, **settings),
            prompts(),
            processing_class=processing_class or tokenizer(),
            quantization_config=quantization,
        )
        redraw(trainer)
        trainer.actor_critic.eval()
        return trainer

    return build


def redraw(trainer, seed=1):
    torch.manual_seed(seed)
    for weights in trainer.actor_critic.policy_parameters().values():
        torch.nn.init.normal_(weights, std=0.3)


def greedily(trainer, grows=True, **settings):
    """A generator of the trainer's policy that takes the likeliest token."""
    for name, value in settings.items():
        setattr(trainer.args, name, value)
    generator = TransformersGenerator(
        trainer.actor_critic, trainer.processing_class, trainer.args, trainer.accelerator
    )
    generator.config.do_sample = False
    if not grows:
        generator.grows = False
    return generator


# ---- the growing cache ----


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("critic", ["head", "adapter"])
@pytest.mark.parametrize("model", MODELS)
def test_growing_cache_gives_the_completions_of_transformers_cache(build, model, critic, attention):
    trainer = build(MODELS[model](attn_implementation=attention), critic=critic)
    for rows in (UNEVEN, EVEN, [[7, 8, 9]] * 4):
        growing, plain = (greedily(trainer, grows=grows).generate(rows) for grows in (True, False))
        assert growing == plain
        assert len({tuple(completion) for completion in growing}) == len({tuple(row) for row in rows})


def sliding():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "pad_token_id": None}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=3, max_position_embeddings=64)).eval()


OTHER_CACHES = {
    "sliding window": (sliding, {}),
    "static cache": (llama, {"cache_implementation": "static"}),
    "no cache": (llama, {"use_cache": False}),
    "prefill in chunks": (llama, {"prefill_chunk_size": 2}),
}


@pytest.mark.parametrize("case", OTHER_CACHES)
def test_other_kinds_of_caches_do_not_grow(build, case):
    model, kwargs = OTHER_CACHES[case]
    trainer = build(model(), generation_kwargs=kwargs)
    generator = greedily(trainer)
    assert not generator.grows
    expected = [greedily(trainer).generate([row])[0] for row in UNEVEN]  # one at a time
    assert generator.generate(UNEVEN) == expected


def test_the_first_ratios_of_a_rollout_are_one(build):
    """Old log-probabilities are those of the trained forward, whatever sampled."""
    settings = {"num_generations": 4, "num_ppo_epochs": 1, "num_mini_batches": 1, "per_device_train_batch_size": 8}
    trainer = build(**settings, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["ratio/mean"] == log["ratio/max"] == 1


# ---- a cache that grows by blocks ----


@pytest.mark.parametrize("longest", [100, 13])
def test_a_growing_layer_holds_what_a_dynamic_one_holds(monkeypatch, longest):
    monkeypatch.setattr(growing_cache, "BLOCK", 4)
    grown, plain = growing_cache.GrowingLayer(longest), DynamicLayer()
    places = []
    for tokens in (3, *[1] * 10):
        new = torch.randn(2, 3, tokens, 5), torch.randn(2, 3, tokens, 7)
        for mine, theirs in zip(grown.update(*new), plain.update(*new)):
            assert torch.equal(mine, theirs)
        places.append(grown.keys.data_ptr())
    assert len(set(places)) == 4  # at 3, 5, 9 and 13 tokens
    assert grown.rooms["keys"].shape[2] == (16 if longest == 100 else 13)
    rows = torch.tensor([1, 1])
    for layer in (grown, plain):
        layer.batch_select_indices(rows)
    new = torch.randn(2, 3, 1, 5), torch.randn(2, 3, 1, 7)
    assert torch.equal(grown.update(*new)[0], plain.update(*new)[0])
    assert grown.get_seq_length() == plain.get_seq_length() == 14


def test_completions_are_those_of_a_dynamic_cache(build, monkeypatch):
    monkeypatch.setattr(growing_cache, "BLOCK", 4)
    trainer = build()
    rows = [[5, 6, 7], [8], [9, 10, 11, 12]]
    assert greedily(trainer).generate(rows) == greedily(trainer, grows=False).generate(rows)


# ---- what is quicker a token at a time ----


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_quick_adapters_compute_what_pefts_do(build, model, bf16):
    trainer = build(MODELS[model](), bf16=bf16)
    policy, ids = trainer.actor_critic.policy, torch.tensor([[5, 6, 7, 8]])
    calls = []
    layer = next(x for x in policy.modules() if isinstance(x, peft.tuners.lora.Linear))
    layer.lora_A["default"].register_forward_hook(lambda *args: calls.append(args))

    def logits():
        with torch.no_grad(), trainer.accelerator.autocast():
            return policy(ids).logits

    expected = logits()
    assert len(calls) == 1
    with trainer.accelerator.autocast(), quick_adapters(policy):
        close = {"rtol": 0.05, "atol": 0.05} if bf16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(logits(), expected, **close)
        assert len(calls) == 1  # PEFT's way was not taken
    assert torch.equal(logits(), expected) and len(calls) == 2


def test_a_forward_that_somebody_put_on_a_layer_is_called_and_stays(build):
    """A hook that moves weights, say."""
    policy, calls = build().actor_critic.policy, []
    layer = next(x for x in policy.modules() if isinstance(x, peft.tuners.lora.Linear))
    own = layer.forward
    layer.forward = hook = lambda *args, **kwargs: calls.append(args) or own(*args, **kwargs)
    with quick_adapters(policy):
        policy(torch.tensor([[5, 6]]))
    assert len(calls) == 1 and layer.forward is hook


def test_adapters_of_other_kinds_stay_as_they_are():
    policy = peft.get_peft_model(llama(), peft.LoraConfig(use_dora=True, target_modules=["q_proj"])).eval()
    with quick_adapters(policy):
        assert not any("forward" in vars(module) for module in policy.modules())
    plain = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.5))
    for training, count in ((True, 0), (False, 2)):  # dropout is PEFT's
        with quick_adapters(plain.train(training)):
            assert sum("forward" in vars(module) for module in plain.modules()) == count
    with plain.disable_adapter(), quick_adapters(plain.eval()):
        assert not any("forward" in vars(module) for module in plain.modules())


# ---- a static cache ----


@pytest.mark.parametrize("model", MODELS)
def test_a_static_cache_gives_the_same_completions(build, model):
    trainer = build(MODELS[model]())
    expected = greedily(trainer).generate(UNEVEN)
    generator = greedily(trainer, generation_kwargs={"cache_implementation": "static"})
    assert generator.generate(UNEVEN) == expected
    redraw(trainer, seed=2)  # and again, with other weights
    assert generator.generate(UNEVEN) == greedily(trainer, generation_kwargs=None).generate(UNEVEN) != expected


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
def test_what_a_config_leaves_open_does_not_come_from_the_model(tmp_path, task_type):
    """Also where PEFT makes an adapter without a task, whose `generate` asks the base."""
    model = llama()
    model.generation_config.suppress_tokens = [token for token in range(model.config.vocab_size) if token != 7]
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task_type)
    given = (model, length_reward, config(tmp_path), prompts())
    trainer = PPOTrainer(*given, processing_class=tokenizer(), peft_config=adapter)
    assert any({*ids} != {7} for ids in trainer.roles.player.generator.generate(UNEVEN))
    assert model.generation_config.suppress_tokens is not None


def test_a_4bit_base(build, tmp_path):
    llama().save_pretrained(tmp_path / "base")
    trainer = build(str(tmp_path / "base"), BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    expected = greedily(trainer, grows=False).generate(EVEN)
    assert greedily(trainer).generate(EVEN) == expected


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"generation_backend": "sglang"}, "must be one of 'transformers', 'vllm'"),
        ({"generation_backend": "vllm", "stop_strings": ["."]}, "`stop_strings` needs"),
        ({"generation_backend": "vllm", "generation_kwargs": {"seed": 4}}, "holds `seed`, which follows from the run"),
        ({"generation_backend": "vllm", "vllm_mode": "server", "vllm_enable_sleep_mode": True}, "colocated vLLM"),
        ({"generation_kwargs": {"page_size": 4}}, "holds `page_size`, an unknown field of `GenerationConfig`"),
    ],
)
def test_what_a_backend_cannot_honour_is_refused_by_the_config(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(str(tmp_path), **settings)


@pytest.mark.gpu
def test_static_cache_agrees_on_a_gpu(build):
    """In float32; a static cache is compiled there."""
    trainer = build(use_cpu=False)
    expected = greedily(trainer).generate(UNEVEN)
    assert greedily(trainer, generation_kwargs={"cache_implementation": "static"}).generate(UNEVEN) == expected


# ---- the end of a completion ----


def test_stop_token_ids_end_a_completion(build):
    trainer = build(stop_token_ids=[*range(16, 32)])
    generator = trainer.roles.player.generator
    for ids in generator.generate(UNEVEN * 4):
        assert {1, *range(16, 32)}.isdisjoint(ids[:-1])
        assert generator.has_stopped(ids) == (ids[-1] in {1, *range(16, 32)}) and (
            len(ids) == 8 or generator.has_stopped(ids)
        )


def readable():
    """Stop strings look up how tokens are written after a word."""
    return tokenizer(["abcdef", *WORDS[:27]])


@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>", "w3"])
def test_stop_strings_end_a_completion_at_the_token_that_completes_one(build, pad_token):
    strings = ["w1", "w20 w", "w9"]  # also within w10 to w19; two tokens; w9
    trainer = build(processing_class=readable(), stop_strings=strings, pad_token=pad_token)
    generator, decode = trainer.roles.player.generator, trainer.processing_class.decode
    prompts = [[6, 7, 25], [5], [9, 25]] * 20  # the prompt's w1 and w20 do not count
    completions = generator.generate(prompts)
    ends = [any(string in decode(ids) for string in strings) for ids in completions]
    assert 5 < sum(ends) < 60 and generator.has_stopped([5] * 7 + [6]) and not generator.has_stopped([5] * 8)
    for ids, end in zip(completions, ends):
        assert not any(string in decode(ids[:-1]) for string in strings) and 1 not in ids[:-1]
        assert generator.has_stopped(ids) == (end or ids[-1] == 1)
        assert len(ids) == 8 or generator.has_stopped(ids)


def test_completions_that_a_stop_string_ended_are_not_truncated(build):
    trainer = build(processing_class=readable(), stop_strings=["w"], missing_eos_penalty=100.0, max_steps=1)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["completions/mean_length"] < 8 and logs["completions/clipped_ratio"] == 0 and logs["objective"] > -50


def test_stop_strings_need_a_tokenizer_that_writes_them(build):
    with pytest.raises(ValueError, match=r"`stop_strings` are not supported by this tokenizer.*use `stop_token_ids`"):
        build(stop_strings=["w1"])


def test_tokenizer_without_pad_token_pads_with_eos(build, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    losses = []
    for pad_token in ("<pad>", None):
        policy_tokenizer = tokenizer()
        policy_tokenizer.pad_token = pad_token
        trainer = build(processing_class=policy_tokenizer, max_steps=4)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert "no pad token, so '<eos>' pads" in caplog.text and policy_tokenizer.pad_token == "<eos>"
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def test_ids_beyond_the_tokenizer_are_logged(build, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    build(processing_class=tokenizer(WORDS[:4]), max_steps=1).train()
    assert "samples token ids that the tokenizer does not have" in caplog.text
