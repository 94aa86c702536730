"""Generators: completions of every cache, stop tokens and strings, bad settings."""

import inspect

import peft
import pytest
import torch
from tiny import WORDS, config, length_reward, llama, prompts, tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig, Cache, MistralConfig, MistralForCausalLM
from transformers.utils import logging

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.episodes.decoder import LEAVING, TransformersGenerator
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
    for name, value in settings.items():
        setattr(trainer.args, name, value)
    generator = TransformersGenerator(
        trainer.actor_critic, trainer.processing_class, trainer.args, trainer.accelerator
    )
    generator.config.do_sample = False
    return generator


# ---- caches ----


def sliding():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "pad_token_id": None,
    }
    return MistralForCausalLM(
        MistralConfig(**sizes, **heads, sliding_window=3, max_position_embeddings=64)
    ).eval()


CACHES = {
    "dynamic cache": (llama, {}),
    "sliding window": (sliding, {}),
    "static cache": (llama, {"cache_implementation": "static"}),
    "no cache": (llama, {"use_cache": False}),
    "prefill in chunks": (llama, {"prefill_chunk_size": 2}),
}


@pytest.mark.parametrize("case", CACHES)
def test_uneven_prompts_have_the_same_completions_in_a_batch(build, case):
    model, kwargs = CACHES[case]
    trainer = build(model(), generation_kwargs=kwargs)
    generator = greedily(trainer)
    assert generator.reuses == (case == "dynamic cache")  # in the turns of episodes
    expected = [greedily(trainer).generate([row])[0] for row in UNEVEN]  # one at a time
    assert generator.generate(UNEVEN) == expected


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
def test_rows_leave_a_cache_of_either_name_and_a_new_one_warns(build, name, caplog, monkeypatch):
    """Names of another package change: a faster way that is not taken says so."""
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    logging.get_logger("trl_ppo_ext.episodes.decoder").warning_once.__func__.cache_clear()
    trainer = build(llama())
    trunk = trainer.actor_critic.trunk
    monkeypatch.setattr(trunk, "__class__", renamed(trunk, name))
    generator = greedily(trainer)
    assert generator.reuses == (name != "renamed_again")
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


def test_cache_is_allocated_once_and_samples_like_transformers(build, monkeypatch):
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
    sampled = []
    ratios = []
    for generator.reuses in (False, True):
        torch.manual_seed(0)
        allocated.clear()
        sampled.append(generator.generate(UNEVEN))
        used = sum(x.nbytes for layer in caches[-1].layers for x in (layer.keys, layer.values))
        ratios.append(sum(x.nbytes() for x in allocated) / used)
    assert sampled[0] == sampled[1]
    assert ratios[0] > 10 and ratios[1] < 1.1


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
    for generator.leaving in (1, LEAVING):
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
def test_logprobs_of_sampled_tokens_follow_their_rows(build, in_turns):
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


def test_logprobs_at_another_temperature_are_not_kept(build):
    generator = build(eval_temperature=0.0).components.player.generator
    generator.evaluates = True
    generator.generate(UNEVEN)
    assert generator.sampled_logprobs is None


@pytest.mark.parametrize(
    "settings", [{"generation_kwargs": {"min_new_tokens": 2}}, {"repetition_penalty": 1.2}]
)
def test_rows_that_ended_wait_if_a_batch_must_be_one_call(build, settings):
    trainer = build(stop_token_ids=list(range(16, 32)), **settings)
    calls = []
    generator = trainer.components.player.generator
    sample = trainer.actor_critic.sample

    def counted(*args, **kwargs):
        calls.append(args)
        return sample(*args, **kwargs)

    trainer.actor_critic.sample = counted
    lengths = {len(ids) for ids in generator.generate(UNEVEN * 4)}
    assert len(calls) == 1 and len(lengths) > 2


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
def test_completions_end_at_the_token_completing_a_stop_string(build, pad_token):
    strings = ["w1", "w20 w", "w9"]  # also within w10 to w19; two tokens; w9
    trainer = build(processing_class=readable(), stop_strings=strings, pad_token=pad_token)
    generator = trainer.components.player.generator
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
