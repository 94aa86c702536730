"""Generators: completions of every cache, stop tokens and strings, bad settings."""

import inspect
from copy import copy

import peft
import pytest
import torch
from tiny import WORDS, config, length_reward, llama, prompts, tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig, Cache, MistralConfig, MistralForCausalLM
from transformers.utils import logging

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.episodes import transformers_generator
from trl_ppo_ext.episodes.transformers_generator import TransformersGenerator
from trl_ppo_ext.sequences import Sequences

# several lengths, some repeated more often than others, and not all side by side
UNEVEN = [[5, 6, 7, 8], [5, 6, 7, 8], [9], [9], [4, 5, 6], [5, 6, 7, 8], [4, 5]]
EVEN = [[5, 6, 7, 8], [5, 6, 7, 8], [4, 5, 6], [4, 5, 6], [9, 4], [9, 4]]


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


def greedily(trainer, **settings):
    """A generator of the trainer's policy that takes the likeliest token."""
    vars(trainer.args).update(settings)
    generator = TransformersGenerator(
        trainer.actor_critic, trainer.processing_class, trainer.args, trainer.accelerator
    )
    generator.config.do_sample = False
    return generator


def test_integers_sample_as_the_floats_that_they_are(build):
    """YAML reads 2 as an integer."""
    sampled = []
    for number in (int, float):
        trainer = build(temperature=number(2), repetition_penalty=number(3))
        torch.manual_seed(0)
        sampled.append(trainer.components.player.generator.generate(UNEVEN))
    assert sampled[0] == sampled[1]


# ---- caches ----


def sliding(window=3):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "pad_token_id": None,
    }
    return MistralForCausalLM(
        MistralConfig(**sizes, **heads, sliding_window=window, max_position_embeddings=64)
    ).eval()


CACHES = {
    "dynamic cache": (llama, {}),
    "sliding window": (sliding, {}),
    "static cache": (llama, {"cache_implementation": "static"}),
    "no cache": (llama, {"use_cache": False}),
    "prefill in chunks": (llama, {"prefill_chunk_size": 2}),
    "words of the prompt": (llama, {"no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5}),
}


@pytest.mark.parametrize("case", CACHES)
def test_uneven_prompts_have_the_same_completions_in_a_batch(build, case):
    model, kwargs = CACHES[case]
    trainer = build(model(), generation_kwargs=kwargs)
    generator = greedily(trainer)
    assert (generator.static_sampler() is None) == bool(kwargs)
    expected = [greedily(trainer).generate([row])[0] for row in UNEVEN]  # one at a time
    assert generator.generate(UNEVEN) == expected


# ---- steps over static memory, which test_static_sampler.py has by themselves ----


def only_generates(generator):
    """Let `generate` sample."""
    generator.why_not_stepped = "a test compares with it"
    return generator


@pytest.mark.parametrize(
    "model, settings, steps",
    [
        (llama, {}, True),
        (sliding, {"top_p": 0.9}, True),
        (llama, {"repetition_penalty": 1.2}, False),
        (llama, {"generation_kwargs": {"cache_implementation": "static"}}, False),
    ],
)
def test_generator_samples_by_steps_where_it_can(build, model, settings, steps):
    trainer = build(model(), **settings)
    generator = trainer.components.player.generator
    assert (generator.static_sampler() is not None) == steps
    calls = []
    sample = trainer.actor_critic.sample

    def counted(*args, **kwargs):
        calls.append(args)
        return sample(*args, **kwargs)

    trainer.actor_critic.sample = counted
    generator.generate(UNEVEN)
    assert bool(calls) != steps


@pytest.mark.parametrize("model", [llama, sliding])
def test_steps_have_the_greedy_tokens_of_generate_after_an_update(build, model):
    trainer = build(model())
    for seed in range(2):
        redraw(trainer, seed)
        generator = greedily(trainer)
        by_steps = generator.generate(UNEVEN)
        assert only_generates(generator).generate(UNEVEN) == by_steps


def test_fallback_to_generate_is_said_once(build, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    logging.get_logger(TransformersGenerator.__module__).warning_once.__func__.cache_clear()
    for _ in range(2):
        build(repetition_penalty=1.2)
    said = "Sampling calls `generate`"
    assert caplog.text.count(said) == 1 and "because `repetition_penalty` is set" in caplog.text


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({}, "got True for a base without 4-bit layers"),
        ({"repetition_penalty": 1.2}, "because `repetition_penalty` is set"),
    ],
)
def test_dequantizing_needs_4_bits_and_steps(build, tmp_path, settings, reason):
    model = llama()
    quantization = None
    if settings:
        model.save_pretrained(tmp_path / "base")
        model = str(tmp_path / "base")
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with pytest.raises(ValueError, match=f"`dequantize_for_generation` must be False, .*{reason}"):
        build(model, quantization, dequantize_for_generation=True, **settings)


def test_a_run_with_a_dequantized_base_frees_the_copy(build, tmp_path):
    llama(hidden_size=64).save_pretrained(tmp_path / "base")
    trainer = build(
        str(tmp_path / "base"),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        dequantize_for_generation=True,
        max_steps=2,
    )
    generator = trainer.components.player.generator
    copied = []
    generate = generator.generate

    def noted(*args):
        completions = generate(*args)
        copied.append(len(generator._weights))
        return completions

    generator.generate = noted
    trainer.train()
    assert copied[0] == 14 and not generator._weights
    first = trainer.state.log_history[0]
    assert first["ratio/mean"] == first["ratio/max"] == 1


@pytest.mark.parametrize(
    "case, stays",
    [("graphs", True), ("no graphs", False), ("sharded", False), ("copy", False), ("large", False)],
)
def test_memory_stays_between_rollouts_where_graphs_read_it_again(build, monkeypatch, case, stays):
    """Gathered weights and copies of a base have other addresses in the next rollout."""
    generator = build().components.player.generator
    sampler = generator.static_sampler()
    released = []
    generator.release = lambda: released.append(case)
    sampler.step.captures = case != "no graphs"
    monkeypatch.setattr(transformers_generator, "is_sharded", lambda model: case == "sharded")
    if case == "copy":
        generator._weights[torch.nn.Identity()] = torch.zeros(1)
    size = transformers_generator.KEPT + 1 if case == "large" else 1
    monkeypatch.setattr(sampler.memory, "nbytes", lambda: size)
    with generator.awake():
        pass
    assert bool(released) != stays


def test_memory_of_a_rollout_that_failed_is_freed(build, monkeypatch):
    generator = build().components.player.generator
    sampler = generator.static_sampler()
    monkeypatch.setattr(sampler.step, "captures", True)
    released = []
    generator.release = lambda: released.append(1)
    with pytest.raises(MemoryError), generator.awake():
        raise MemoryError
    assert released == [1]


def test_memory_of_sampling_is_freed_after_training(build):
    trainer = build(max_steps=1)
    generator = trainer.components.player.generator
    steps = []
    generator.release = lambda: steps.append(trainer.state.global_step)
    trainer.train()
    assert steps[-1] == 1  # and those before are after rollouts


def test_batches_of_a_rollout_sample_as_one(build):
    generator = build().components.player.generator
    results = []
    for generator.batch_size in (None, 3):
        torch.manual_seed(0)
        results.append(generator.generate(UNEVEN))
        assert list(map(len, generator.sampled_logprobs)) == list(map(len, results[-1]))
    assert results[0] == results[1]


def test_conversations_in_turn_do_not_take_each_others_keys(build):
    trainer = build(llama(max_position_embeddings=256))
    generator = greedily(trainer)
    conversations = [generator.conversation(), generator.conversation()]
    prompts = [UNEVEN, EVEN]
    for _ in range(3):
        for number, turns in enumerate(conversations):
            ids = prompts[number]
            sampled = turns(ids, [4] * len(ids), list(range(len(ids))))
            assert sampled == greedily(trainer).generate(ids, [4] * len(ids))
            prompts[number] = [x + new + [5] for x, new in zip(ids, sampled)]


@pytest.mark.parametrize("window, continues", [(8, False), (64, True)])
def test_windows_do_not_end_at_columns_between_turns(build, window, continues):
    """A row whose turn is shorter than those of others has hidden columns after it."""
    trainer = build(sliding(window))

    def without_end():
        generator = greedily(trainer)
        generator.stop_token_ids = frozenset()
        generator.config.eos_token_id = None
        return generator

    turns = without_end().conversation()
    episodes = [[5, 6, 7, 8], [9, 10, 11, 12]]
    rooms = [2, 8]
    for _ in range(3):
        sampled = turns(episodes, rooms, [0, 1])
        assert sampled == without_end().generate(episodes, rooms)
        read_anew = max(map(len, episodes)) + max(rooms) - 1
        episodes = [ids + new + [5] for ids, new in zip(episodes, sampled)]
        rooms.reverse()
    assert (turns.last.width > read_anew) == continues


def test_memory_of_a_rollout_is_freed_on_a_cpu(build):
    generator = build().components.player.generator
    with generator.awake():
        generator.generate(UNEVEN)
        assert generator.static_sampler().memory.nbytes() > 0
    assert generator.static_sampler().memory.nbytes() == 0


def renamed(trunk, name):
    """A model whose forward has another name for its cache."""

    class Renamed(type(trunk)):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    parameters = list(inspect.signature(trunk.forward).parameters.values())
    known = ("cache", "past_key_values")
    changed = [x.replace(name=name) if x.name in known else x for x in parameters]
    Renamed.forward.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *changed]
    )
    return Renamed


@pytest.mark.parametrize("name", ["cache", "past_key_values", "renamed_again"])
def test_steps_take_a_cache_of_either_name_and_a_new_one_warns(build, name, caplog, monkeypatch):
    """Names of another package change: a faster way that is not taken says so."""
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    logging.get_logger(TransformersGenerator.__module__).warning_once.__func__.cache_clear()
    trainer = build(llama())
    trunk = trainer.actor_critic.trunk
    monkeypatch.setattr(trunk, "__class__", renamed(trunk, name))
    generator = greedily(trainer)
    assert (generator.why_not_stepped is None) == (name != "renamed_again")
    said = "takes neither `cache` nor `past_key_values`" in caplog.text
    assert said == (name == "renamed_again")


@pytest.mark.parametrize("case", ["dynamic cache", "sliding window"])
def test_each_row_samples_within_its_own_room(build, case):
    generator = greedily(build(CACHES[case][0]()))
    generator.stop_token_ids = frozenset()
    generator.config.eos_token_id = None
    completions = generator.generate(UNEVEN)
    rooms = [1 + place % 4 for place in range(len(UNEVEN))]
    short = generator.generate(UNEVEN, rooms)
    assert [len(ids) for ids in completions] == [generator.config.max_new_tokens] * len(UNEVEN)
    assert short == [ids[:room] for ids, room in zip(completions, rooms)]


def test_keys_and_values_are_allocated_once(build, monkeypatch):
    """No allocator reserves more than all bytes that are ever allocated."""
    allocated = []
    caches = []
    update = Cache.update

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            given = {id(x.untyped_storage()) for x in tensors((args, kwargs))}
            allocated.extend(
                x.untyped_storage() for x in tensors(result) if id(x.untyped_storage()) not in given
            )
            return result

    def tensors(tree):
        return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]

    def counted(cache, *args, **kwargs):
        caches.append(cache)
        with Allocations():
            return update(cache, *args, **kwargs)

    monkeypatch.setattr(Cache, "update", counted)
    trainer = build(max_completion_length=40, generation_kwargs={"min_new_tokens": 40})
    generator = trainer.components.player.generator
    ratios = []
    for sampling in (generator, only_generates(copy(generator))):
        allocated.clear()
        sampling.generate(UNEVEN)
        used = sum(x.nbytes for layer in caches[-1].layers for x in (layer.keys, layer.values))
        ratios.append(sum(x.nbytes() for x in allocated) / used)
    assert ratios[0] < 1.1 and ratios[1] > 10


# ---- rows that end before others ----

LENGTHS = (
    torch.empty(31)
    .log_normal_(2.5, 0.8, generator=torch.Generator().manual_seed(0))
    .clamp(3, 50)
    .long()
)


def ends(completions, scores):
    """End completions at lengths that their first tokens determine."""
    lengths = LENGTHS[completions[:, :3].sum(1) % 31]
    if completions.shape[1] > 2:
        return completions.shape[1] >= lengths
    return torch.zeros_like(lengths).bool()


def anew(generator):
    """Function that samples a turn without a cache of the last one."""
    return lambda prompts, rooms, rows: generator.generate(prompts, rooms)


@pytest.mark.parametrize("in_turns", [False, True])
def test_rows_that_ended_leave_and_greedy_completions_stay(build, in_turns):
    trainer = build(llama(max_position_embeddings=256), max_completion_length=50)
    steps = []
    generator = greedily(trainer)
    prompts = torch.randint(4, 32, (64, 7)).tolist()
    generator.stop_strings = ends
    trainer.actor_critic.trunk.register_forward_pre_hook(
        lambda _, args, kwargs: steps.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    completions = []
    ratios = []
    answered = list(range(0, 64, 3))[::-1]
    sampler = generator.static_sampler()
    fewer_rows = sampler._fewer_rows
    for sampler._fewer_rows in (lambda rows, live: rows, fewer_rows):
        turns = generator.conversation() if in_turns else anew(generator)
        steps.clear()
        first = turns(prompts, [50] * 64, list(range(64)))
        ratios.append(sum(steps) / sum(map(len, first)))
        second = turns(
            [prompts[row] + first[row] + [5] * (row % 4) for row in answered], [50] * 22, answered
        )
        completions.append((first, second))
    assert completions[0] == completions[1] and len({len(ids) for ids in completions[0][0]}) > 10
    assert ratios[0] > 2 and ratios[1] < 1.35


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("steps", [True, False])
def test_logprobs_of_sampled_tokens_follow_their_rows(build, steps, in_turns):
    """Through rows that leave, turns with a cache, stop tokens and rooms; before filters, at the
    temperature."""
    settings = {
        "max_completion_length": 50,
        "temperature": 0.7,
        "top_k": 9,
        "stop_token_ids": [6, 7],
    }
    trainer = build(llama(max_position_embeddings=256), **settings)
    generator = trainer.components.player.generator
    if not steps:
        only_generates(generator)
    ids = torch.randint(8, 32, (64, 7)).tolist()
    turns = generator.conversation() if in_turns else anew(generator)
    rows = list(range(64))
    completions = [[]] * 64
    for rooms in ([50] * 64, [5 + row % 9 for row in range(22)]):
        ids = [ids[row] + completions[row] + [5] * (row % 4) for row in rows]
        completions = turns(ids, rooms, rows)
        scored = trainer.actor_critic(
            Sequences.from_token_ids(ids, completions, 0, "cpu"), 0.7
        ).logprobs
        assert [len(x) for x in generator.sampled_logprobs] == [len(x) for x in completions]
        for expected, got in zip(scored, generator.sampled_logprobs):
            torch.testing.assert_close(
                torch.tensor(got), expected[: len(got)], rtol=1e-4, atol=1e-4
            )
        rows = list(range(0, 64, 3))[::-1]


@pytest.mark.parametrize("steps", [True, False])
def test_logprobs_at_another_temperature_are_not_kept(build, steps):
    generator = build(eval_temperature=0.0).components.player.generator
    if not steps:
        only_generates(generator)
    generator.evaluates = True
    generator.generate(UNEVEN)
    assert generator.sampled_logprobs is None


@pytest.mark.parametrize("kwargs, hooks", [({"cache_implementation": "static"}, 0), ({}, 1)])
def test_logits_of_generate_are_read_only_if_logprobs_are_kept(build, kwargs, hooks):
    """A hook would be compiled with the forward of a static cache."""
    trainer = build(generation_kwargs=kwargs)
    generator = only_generates(trainer.components.player.generator)
    base = trainer.actor_critic.policy.get_base_model()
    seen = []
    sample = trainer.actor_critic.sample

    def noted(*args, **kwargs):
        seen.append(len(base._forward_hooks))
        return sample(*args, **kwargs)

    trainer.actor_critic.sample = noted
    generator.generate(UNEVEN)
    assert seen == [hooks]


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
def test_what_a_config_leaves_open_does_not_come_from_the_model(tmp_path, task_type):
    """Also where PEFT makes an adapter without a task, whose `generate` asks the base."""
    model = llama()
    model.generation_config.suppress_tokens = [
        token for token in range(model.config.vocab_size) if token != 7
    ]
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task_type)
    given = (model, length_reward, config(tmp_path), prompts())
    trainer = PPOTrainer(*given, processing_class=tokenizer(), peft_config=adapter)
    assert any(set(ids) != {7} for ids in trainer.components.player.generator.generate(UNEVEN))
    assert model.generation_config.suppress_tokens is not None


def test_a_4bit_base(build, tmp_path):
    llama().save_pretrained(tmp_path / "base")
    trainer = build(
        str(tmp_path / "base"), BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    expected = [greedily(trainer).generate([row])[0] for row in EVEN]
    assert greedily(trainer).generate(EVEN) == expected


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"generation_backend": "sglang"}, "must be one of 'transformers', 'vllm'"),
        ({"generation_backend": "vllm", "stop_strings": ["."]}, "`stop_strings` needs"),
        (
            {"generation_backend": "vllm", "dequantize_for_generation": True},
            "`dequantize_for_generation` needs",
        ),
        (
            {"generation_backend": "vllm", "generation_kwargs": {"seed": 4}},
            "holds `seed`, which follows from the run",
        ),
        (
            {"generation_backend": "vllm", "vllm_mode": "server", "vllm_enable_sleep_mode": True},
            "colocated vLLM",
        ),
        (
            {"generation_kwargs": {"page_size": 4}},
            "holds `page_size`, an unknown field of `GenerationConfig`",
        ),
        (
            {"generation_kwargs": {"sequence_bias": {(5,): -10.0}}},
            "`generation_kwargs` must have keys that are text .* write `sequence_bias` as a list",
        ),
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
    assert (
        greedily(trainer, generation_kwargs={"cache_implementation": "static"}).generate(UNEVEN)
        == expected
    )


# ---- the end of a completion ----


def test_stop_token_ids_end_a_completion(build):
    trainer = build(stop_token_ids=list(range(16, 32)))
    generator = trainer.components.player.generator
    for ids in generator.generate(UNEVEN * 4):
        assert {1, *range(16, 32)}.isdisjoint(ids[:-1])
        assert generator.has_stopped(ids) == (ids[-1] in {1, *range(16, 32)})
        assert len(ids) == 8 or generator.has_stopped(ids)


def readable():
    """Stop strings look up how tokens are written after a word."""
    return tokenizer(["abcdef", *WORDS[:27]])


@pytest.mark.parametrize("pad_token", ["<eos>", "w3"])
@pytest.mark.parametrize("read_every", [1, 3, None])
def test_completions_end_at_the_token_completing_a_stop_string(build, read_every, pad_token):
    """Whether steps are read one by one, as on a CPU, or several at once; or with `generate`."""
    strings = ["w1", "w20 w", "w9"]  # also within w10 to w19; two tokens; w9
    trainer = build(processing_class=readable(), stop_strings=strings, pad_token=pad_token)
    generator = trainer.components.player.generator
    if read_every is None:
        only_generates(generator)
    else:
        generator.static_sampler().read_every = read_every
    decode = trainer.processing_class.decode
    prompts = [[6, 7, 25], [5], [9, 25]] * 20  # the prompt's w1 and w20 do not count
    completions = generator.generate(prompts)
    ends = [any(string in decode(ids) for string in strings) for ids in completions]
    assert (
        5 < sum(ends) < 60
        and generator.has_stopped([5] * 7 + [6])
        and not generator.has_stopped([5] * 8)
    )
    for ids, end in zip(completions, ends):
        assert not any(string in decode(ids[:-1]) for string in strings) and 1 not in ids[:-1]
        assert generator.has_stopped(ids) == (end or ids[-1] == 1)
        assert len(ids) == 8 or generator.has_stopped(ids)


@pytest.mark.parametrize("read_every", [1, 4])
def test_turns_that_a_stop_string_ended_continue_as_if_read_anew(build, read_every):
    """Tokens that were sampled after the string, until the next read, are hidden."""
    trainer = build(
        llama(max_position_embeddings=256), processing_class=readable(), stop_strings=["w1"]
    )
    generator = greedily(trainer)
    generator.static_sampler().read_every = read_every
    turns = generator.conversation()
    episodes = [[6, 7, 25], [5], [9, 25]] * 4
    for _ in range(4):
        completions = turns(episodes, [8] * 12, list(range(12)))
        assert completions == only_generates(greedily(trainer)).generate(episodes, [8] * 12)
        episodes = [ids + new + [12] for ids, new in zip(episodes, completions)]
    assert len({len(ids) for ids in completions}) > 1


def test_completions_that_a_stop_string_ended_are_not_truncated(build):
    trainer = build(
        processing_class=readable(), stop_strings=["w"], missing_eos_penalty=100.0, max_steps=1
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    assert (
        logs["completions/mean_length"] < 8
        and logs["completions/clipped_ratio"] == 0
        and logs["objective"] > -50
    )


def test_stop_strings_need_a_tokenizer_that_writes_them(build):
    with pytest.raises(
        ValueError,
        match=r"`stop_strings` are not supported by this tokenizer.*use `stop_token_ids`",
    ):
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


def test_turn_after_a_group_of_generate_continues_its_own_episode(build):
    """A long episode, for which `generate` samples, may join a later group."""
    trainer = build(llama(max_position_embeddings=256), max_completion_length=64)
    generator = greedily(trainer, max_completion_length=64)
    generator.longest_stepped = 40
    first = [5, 6, 7, 8, 9, 10]
    second = [11, 12, 4]
    turns = generator.conversation()
    _, turn = turns([first, second], [4, 4], None)
    second = second + turn + [4]
    turn, _ = turns([second, [13, 5] * 20], [4, 4], None)
    second = second + turn + [4]
    assert turns([second], [4], [0]) == generator.generate([second], [4])
