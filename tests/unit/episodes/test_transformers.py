"""Generators: completions of every cache and of continuous batching, adapters in sampling, bad settings."""

import gc
import threading
from types import SimpleNamespace

import peft
import pytest
import torch
from tiny import WORDS, config, length_reward, llama, prompts, qwen2, tokenizer
from transformers import BitsAndBytesConfig, GPTJConfig, GPTJForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.utils import logging

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.episodes import transformers as growing_cache
from trl_ppo_ext.episodes.continuous import ContinuousBatchingGenerator, reads_paged_cache
from trl_ppo_ext.episodes.transformers import TransformersGenerator, quick_adapters
from trl_ppo_ext.episodes.vllm import distinct

# several lengths, some repeated more often than others, and not all side by side
UNEVEN = [[5, 6, 7, 8], [5, 6, 7, 8], [9], [9], [4, 5, 6], [5, 6, 7, 8], [4, 5]]
EVEN = [[5, 6, 7, 8], [5, 6, 7, 8], [4, 5, 6], [4, 5, 6], [9, 4], [9, 4]]
MODELS = {"llama": llama, "qwen2": qwen2}
CONTINUOUS = {"generation_backend": "continuous_batching"}


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """A manager of continuous batching collects garbage; without what was imported that is soon done."""
    gc.freeze()
    yield
    gc.unfreeze()


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


def greedily(trainer, backend=TransformersGenerator, grows=True, **settings):
    """A generator of the trainer's policy that takes the likeliest token."""
    for name, value in settings.items():
        setattr(trainer.args, name, value)
    generator = backend(trainer.actor_critic, trainer.processing_class, trainer.args, trainer.accelerator)
    generator.config.do_sample = False
    if not grows:
        generator.grows = False
    return generator


def tokens_of_forwards(trainer, generate, rows):
    """Completions, and how many tokens each forward of the trunk took."""
    tokens = []
    hook = trainer.actor_critic.trunk.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    completions = generate(rows)
    hook.remove()
    return completions, tokens


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


@pytest.mark.parametrize("backend", ["transformers", "continuous_batching"])
def test_the_first_ratios_of_a_rollout_are_one(build, backend):
    """Old log-probabilities are those of the trained forward, whatever sampled."""
    settings = {"num_generations": 4, "num_ppo_epochs": 1, "num_mini_batches": 1, "per_device_train_batch_size": 8}
    trainer = build(**settings, max_steps=1, generation_backend=backend)
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


# ---- continuous batching ----


@pytest.mark.parametrize("rows", [UNEVEN, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("model, attention", [("llama", "sdpa"), ("qwen2", "eager")])
def test_continuous_batching_gives_the_completions_of_generate(build, model, attention, rows):
    trainer = build(MODELS[model](attn_implementation=attention), critic="adapter")
    base = trainer.actor_critic.policy.get_base_model()
    continuous = greedily(trainer, ContinuousBatchingGenerator)
    assert base.config._attn_implementation == attention
    assert continuous.generate(rows) == greedily(trainer).generate(rows)
    assert base.config._attn_implementation == attention
    redraw(trainer, seed=2)  # an update
    assert continuous.generate(rows) == greedily(trainer).generate(rows)


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
def test_what_a_config_leaves_open_does_not_come_from_the_model(tmp_path, task_type):
    """Also where PEFT makes an adapter without a task, whose `generate` asks the base."""
    model = llama()
    model.generation_config.suppress_tokens = [token for token in range(model.config.vocab_size) if token != 7]
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task_type)
    given = (model, length_reward, config(tmp_path), prompts())
    trainer = PPOTrainer(*given, processing_class=tokenizer(), peft_config=adapter)
    assert any({*ids} != {7} for ids in trainer.collector.generator.generate(UNEVEN))
    assert model.generation_config.suppress_tokens is not None


def test_continuous_batching_stops_at_every_stop_token(build):
    model = llama()
    model.generation_config.eos_token_id = [1, *range(16, 32)]
    trainer = build(model)
    continuous, plain = greedily(trainer, ContinuousBatchingGenerator), greedily(trainer)
    completions = continuous.generate(UNEVEN)
    assert completions == plain.generate(UNEVEN)
    assert any(len(ids) < 8 for ids in completions)
    for ids in completions:
        assert not continuous.stop_token_ids & {*ids[:-1]}
        assert len(ids) == 8 or ids[-1] in continuous.stop_token_ids


def test_continuous_batching_computes_a_prompt_once_but_for_its_last_token(build):
    trainer = build()
    generator = greedily(trainer, ContinuousBatchingGenerator)
    completions, tokens = tokens_of_forwards(trainer, generator.generate, EVEN)
    prompts_once = sum(len(EVEN[row]) - 1 for row in distinct(EVEN)[0])
    assert sum(tokens) == prompts_once + sum(map(len, completions))
    assert len(tokens) == 1 + max(map(len, completions))  # and nothing waits


def test_a_prompt_that_begins_like_another_is_computed_with_continuous_batching(build):
    """Pages found in the cache and copies of a request do not go together in transformers 5.23."""
    trainer = build()
    rows = [[4, 5, 6, 7, last] for last in (8, 9, 10) for _ in range(2)]
    expected = greedily(trainer).generate(rows)
    trainer.args.generation_kwargs = {"page_size": 4, "max_batch_tokens": 4}
    generator = greedily(trainer, ContinuousBatchingGenerator, per_device_generation_batch_size=2)
    assert generator.generate(rows) == expected


def test_per_device_generation_batch_size_bounds_what_continuous_batching_runs_at_a_time(build):
    trainer = build(per_device_generation_batch_size=2, **CONTINUOUS)
    generator = greedily(trainer, ContinuousBatchingGenerator)
    completions, tokens = tokens_of_forwards(trainer, generator.generate, [[9], [8], [7], [6], [5]])
    assert max(tokens) == 2 and sum(tokens) == sum(map(len, completions))


def sampled(trainer, seed, rows=EVEN):
    generator = greedily(trainer, ContinuousBatchingGenerator)
    generator.config.do_sample = True
    torch.manual_seed(seed)
    return generator.generate(rows)


def test_continuous_batching_draws_a_seed_from_the_run_and_leaves_the_rest(build):
    trainer = build()
    completions = sampled(trainer, 0)
    state = torch.get_rng_state()
    assert sampled(trainer, 0) == completions != sampled(trainer, 1)
    assert len({tuple(ids) for ids in completions}) == len(completions)
    torch.manual_seed(0)
    torch.randint(2**31, ())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str)
def test_sampling_fields_reach_continuous_batching(build, setting):
    """At their limits they leave the likeliest token alone."""
    trainer = build(**setting, **CONTINUOUS)
    assert sampled(trainer, 0) == greedily(trainer).generate(EVEN)


def test_a_failure_within_continuous_batching_ends_the_run_and_leaves_the_model_as_it_was(build):
    trainer = build(llama(attn_implementation="eager"))
    generator = greedily(trainer, ContinuousBatchingGenerator)

    def fail(*args):
        raise OSError("a broken layer")

    threads = threading.active_count()
    hook = trainer.actor_critic.trunk.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="Continuous batching failed: a broken layer"):
        generator.generate(EVEN)
    hook.remove()
    assert threading.active_count() == threads
    assert trainer.actor_critic.policy.get_base_model().config._attn_implementation == "eager"
    assert generator.generate(EVEN) == greedily(trainer).generate(EVEN)


def test_a_signal_ends_continuous_batching(build, monkeypatch):
    """Nothing goes on sampling behind a run that saves and leaves."""
    trainer = build(llama(attn_implementation="eager"))
    generator = greedily(trainer, ContinuousBatchingGenerator)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ContinuousBatchingManager, "get_result", interrupted)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        generator.generate(EVEN)
    assert threading.active_count() == threads
    assert trainer.actor_critic.policy.get_base_model().config._attn_implementation == "eager"


def test_a_cache_that_does_not_fit_ends_the_run(build):
    trainer = build()
    generator = greedily(trainer, ContinuousBatchingGenerator, generation_kwargs={"num_blocks": 10**9})
    with pytest.raises(RuntimeError, match="Continuous batching failed: Memory footprint"):
        generator.generate(EVEN)


def test_continuous_batching_is_not_reached_by_autocast(build):
    """The forward runs in another thread: a base in float32 computes in float32, one in bfloat16 in bfloat16."""
    expected = greedily(build()).generate(EVEN)
    trainer = build(bf16=True)
    assert greedily(trainer, ContinuousBatchingGenerator).generate(EVEN) == expected
    dtypes = []
    trainer = build(llama(dtype=torch.bfloat16), bf16=True)
    trainer.actor_critic.trunk.register_forward_hook(lambda *args: dtypes.append(args[-1].last_hidden_state.dtype))
    completions = greedily(trainer, ContinuousBatchingGenerator).generate(EVEN)
    assert set(dtypes) == {torch.bfloat16} and completions[::2] == completions[1::2]


@pytest.mark.parametrize("backend", [TransformersGenerator, ContinuousBatchingGenerator])
def test_a_4bit_base(build, tmp_path, backend):
    llama().save_pretrained(tmp_path / "base")
    trainer = build(str(tmp_path / "base"), BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    expected = greedily(trainer, grows=False).generate(EVEN)
    assert greedily(trainer, backend).generate(EVEN) == expected


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"generation_backend": "sglang"}, "must be one of 'transformers', 'continuous_batching', 'vllm'"),
        ({"generation_backend": "vllm", "stop_strings": ["."]}, "`stop_strings` needs"),
        ({"generation_backend": "vllm", "generation_kwargs": {"seed": 4}}, "holds `seed`, which follows from the run"),
        ({"generation_backend": "vllm", "vllm_mode": "server", "vllm_enable_sleep_mode": True}, "colocated vLLM"),
        (CONTINUOUS | {"repetition_penalty": 1.2}, "`repetition_penalty` must be 1.0 .*got 1.2; use"),
        (CONTINUOUS | {"generation_kwargs": {"min_new_tokens": 4}}, "holds `min_new_tokens`.*takes .*page_size"),
        (CONTINUOUS | {"generation_kwargs": {"seed": 4}}, "holds `seed`"),
        (CONTINUOUS | {"stop_strings": ["w1"]}, "`stop_strings` needs `generation_backend='transformers'`"),
        ({"generation_kwargs": {"page_size": 4}}, "holds `page_size`, an unknown field of `GenerationConfig`"),
    ],
)
def test_what_a_backend_cannot_honour_is_refused_by_the_config(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(str(tmp_path), **settings)


def test_what_continuous_batching_cannot_honour_is_refused_when_the_trainer_is_built(build):
    trainer = build()
    plugin = SimpleNamespace(zero_stage=3)
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), device=torch.device("cpu"))
    with pytest.raises(ValueError, match="ZeRO-3 gathers weights for all processes in step"):
        ContinuousBatchingGenerator(trainer.actor_critic, trainer.processing_class, trainer.args, accelerator)
    accelerator.state = SimpleNamespace(fsdp_plugin=object())
    with pytest.raises(ValueError, match="FSDP gathers weights for all processes in step"):
        ContinuousBatchingGenerator(trainer.actor_critic, trainer.processing_class, trainer.args, accelerator)
    base = trainer.actor_critic.policy.get_base_model()
    base.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"is not supported by this model.*flex_attention is not supported"):
        greedily(trainer, ContinuousBatchingGenerator)
    assert base.config._attn_implementation == "flex_attention"
    base.config._attn_implementation = "sdpa"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base.config, "layer_types", ["linear_attention", "full_attention"], raising=False)
        with pytest.raises(ValueError, match=r"is not supported by this model.*linear_attention"):
            greedily(trainer, ContinuousBatchingGenerator)
    with pytest.raises(ValueError, match=r"is not supported by.*page_size must be at least"):
        greedily(trainer, ContinuousBatchingGenerator, generation_kwargs={"page_size": 1})


def test_continuous_batching_refuses_attention_that_would_not_read_its_cache(build):
    """GPT-J's layers would attend to all prompts of a batch, and nothing would fail."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    gptj = GPTJForCausalLM(GPTJConfig(**sizes, bos_token_id=2, eos_token_id=1))
    with pytest.raises(
        ValueError, match="is not supported by GPTJForCausalLM: its layers attend in a way of their own"
    ):
        build(gptj, **CONTINUOUS)
    assert gptj.config._attn_implementation == "eager"
    assert reads_paged_cache(sliding()) and reads_paged_cache(llama(attn_implementation="eager"))


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
def test_backends_agree_on_a_gpu(build, static):
    """In float32; a static cache is compiled there."""
    trainer = build(use_cpu=False)
    expected = greedily(trainer).generate(UNEVEN)
    if static:
        generator = greedily(trainer, generation_kwargs={"cache_implementation": "static"})
    else:
        generator = greedily(trainer, ContinuousBatchingGenerator, generation_kwargs={"max_memory_percent": 0.1})
    assert generator.generate(UNEVEN) == expected


# ---- the end of a completion ----


@pytest.mark.parametrize("settings", [{}, CONTINUOUS])
def test_stop_token_ids_end_a_completion(build, settings):
    trainer = build(stop_token_ids=[*range(16, 32)], **settings)
    generator = trainer.collector.generator
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
    generator, decode = trainer.collector.generator, trainer.processing_class.decode
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
