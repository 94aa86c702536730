"""vLLM in the process of the run samples from the policy as it is, and leaves nothing else
behind."""

import os
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from served import (
    CONTEXT,
    LONG,
    SHORT,
    largest_difference,
    logged,
    long_prompts,
    move,
    saved,
    served_trainer,
)
from served import small_llama as llama
from tiny import qwen2

from trl_ppo_ext.episodes import Environments, build_player
from trl_ppo_ext.episodes.engine import VLLMError
from trl_ppo_ext.ppo.guards import SamplerError

EXACT = 1e-4  # nats; measured 1e-6


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved(llama(), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, base):
    """A trainer that most tests share: each of them moves its policy."""
    return served_trainer(tmp_path_factory.mktemp("run"), base, dataset=long_prompts())


# ---- the same policy ----


def lora(**kwargs):
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | kwargs)


VARIANTS = {
    "default": {},
    "rsLoRA": {
        "peft_config": lora(use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"])
    },
    "patterns": {
        "peft_config": lora(
            rank_pattern={"q_proj": 12, "layers.1.mlp.down_proj": 2},
            alpha_pattern={"v_proj": 32, "up_proj": 1},
        )
    },
    "tied embeddings": {"temperature": 0.7, "stop_token_ids": [5, 6, 7], "num_generations": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_of_every_rollout_are_those_of_the_policy(variant, tmp_path, base):
    if variant == "tied embeddings":
        model = qwen2(hidden_size=128, max_position_embeddings=CONTEXT)
        assert model.config.tie_word_embeddings
        base = saved(model, tmp_path / "base")
    groups = []

    def reward(prompts, completion_ids, **kwargs):
        groups.append((prompts, completion_ids))
        return [sum(ids) / len(ids) for ids in completion_ids]

    settings = {
        "max_steps": 12,
        "learning_rate": 0.03,
        "max_grad_norm": 0.0,
        "kl_coef": 0.01,
    } | VARIANTS[variant]
    settings["vllm_importance_sampling_correction"] = True
    run = served_trainer(tmp_path / "run", base, reward, long_prompts(), **settings)
    run.train()
    differences = logged(run, "sampling/sampling_logp_difference/max")
    kl = logged(run, "kl")
    assert len(differences) == 3 and max(differences) < EXACT, differences
    assert kl[0] == 0 and kl[2] > 0.02, kl  # so an adapter that is not applied would be seen
    assert logged(run, "sampling/importance_sampling_ratio/max") == pytest.approx(
        [1, 1, 1], abs=EXACT
    )
    # exactly: old log-probs are those of the updates' forward
    assert logged(run, "ratio/max")[0] == 1
    stops = {1, *settings.get("stop_token_ids", [])}
    for prompts, completions in groups:
        assert all(
            (ids[-1] in stops or len(ids) == 8) and not stops & set(ids[:-1]) for ids in completions
        )
        copies = [
            [tuple(ids) for x, ids in zip(prompts, completions) if x == prompt]
            for prompt in set(prompts)
        ]
        assert {len(x) for x in copies} == {run.args.num_generations}
        assert run.args.num_generations == 1 or all(len(set(x)) > 1 for x in copies)


def test_greedy_completions_are_those_of_transformers(tmp_path, base):
    settings = {
        "top_k": 1,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": 16,
    }
    run = served_trainer(tmp_path, base, **settings)
    move(run, 0)
    prompts = [[(7 * row + 3 * k) % 28 + 4 for k in range(1 + row % 9)] for row in range(56)] + LONG
    with run.components.player.generator.awake():
        completions = run.components.player.generator.generate(prompts)
    policy = run.actor_critic.policy.eval()
    for prompt, ids in zip(prompts, completions, strict=True):
        expected = policy.generate(
            input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=1
        )
        assert ids == expected[0, len(prompt) :].tolist()
    assert len({tuple(ids) for ids in completions}) > 16


# ---- only the adapter as it is ----


def test_update_reaches_the_next_rollout(run):
    for seed in range(4):
        move(run, seed)
        assert largest_difference(run, SHORT + LONG) < EXACT


def test_every_adapter_has_a_new_name_and_leaves_the_disk(run, monkeypatch):
    generator = run.components.player.generator
    seen = []
    add_lora = generator.engine.llm.llm_engine.add_lora
    monkeypatch.setattr(
        generator.engine.llm.llm_engine, "add_lora", lambda x: seen.append(x) or add_lora(x)
    )
    for seed in range(3):
        move(run, seed)
        with generator.awake():
            assert not list(generator.folder.iterdir())
            # or it is read at every token
            assert not generator.engine.requests[generator.version].load_inplace
    assert (
        len({x.lora_name for x in seen})
        == len({x.lora_int_id for x in seen})
        == len({x.lora_path for x in seen})
        == 3
    )


@pytest.mark.parametrize(
    "scale, cause", [(0.0, "the policy's adapter is not applied"), (0.2, "an older adapter")]
)
def test_stale_adapter_ends_the_run_with_its_cause(run, monkeypatch, scale, cause):
    engine = run.components.player.generator.engine
    move(run, 1, scale)
    with run.components.player.generator.awake():
        pass
    (stale,) = engine.requests.values()
    monkeypatch.setattr(
        engine, "load", lambda name, directory: engine.requests.update({name: stale})
    )
    move(run, 2)
    with pytest.raises(SamplerError, match=cause):
        run.train()
    assert run.state.global_step == 0


def test_another_base_ends_the_run_before_training(tmp_path, base):
    other = saved(llama(seed=1), tmp_path / "other")
    run = served_trainer(tmp_path / "run", base, vllm_base_model=other)
    before = {name: x.clone() for name, x in run.actor_critic.trained_weights().items()}
    with pytest.raises(
        SamplerError, match=r"differ by .* nats per token.* another base than the policy"
    ):
        run.train()
    assert run.state.global_step == 0
    assert all(
        torch.equal(x, before[name]) for name, x in run.actor_critic.trained_weights().items()
    )


def test_adapter_that_vllm_does_not_apply_is_an_error(tmp_path, base):
    with pytest.raises(
        VLLMError, match=r"vLLM does not support this adapter: .*DoRA.*; change `peft_config`"
    ):
        served_trainer(tmp_path, base, peft_config=lora(use_dora=True))


# ---- the process ----


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_memory_that_is_too_small_for_a_completion_is_an_error(tmp_path, base):
    """Left to itself, vLLM cuts completions at what fits."""
    small = {
        "max_completion_length": 100,
        "generation_kwargs": {"kv_cache_memory_bytes": 3 * 2**17},
    }
    generator = served_trainer(tmp_path, base, **small).components.player.generator
    fits = generator.engine.llm.llm_engine.model_config.max_model_len
    assert 100 < fits < CONTEXT
    with generator.awake():
        assert generator.generate([[4] * (fits - 100)])
        with pytest.raises(
            VLLMError,
            match=rf"memory for {fits} tokens of a prompt and its .* not {fits + 1}; raise",
        ):
            generator.generate([[4] * (fits - 99)])


def test_engine_leaves_the_process_as_it_was(run):
    def process():
        return (
            dict(os.environ),
            torch.set_num_threads,
            torch.get_num_threads(),
            torch.get_default_dtype(),
        )

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    before = process()
    states = random_states()
    build_player(run.actor_critic, run.processing_class, run.args, Accelerator(), Environments())
    assert process() == before
    assert random_states() == states


def test_rollout_draws_one_number_per_prompt_and_no_other(run, monkeypatch):
    generator = run.components.player.generator
    asked = []
    sample = generator.engine.sample
    monkeypatch.setattr(
        generator.engine, "sample", lambda name, x: asked.append(x) or sample(name, x)
    )
    torch.manual_seed(6)
    python, numpy, _ = random_states()
    with generator.awake():
        completions = generator.generate([*SHORT, *SHORT])
    drawn = random_states()
    torch.manual_seed(6)
    seeds = torch.randint(2**31, (len(SHORT),)).tolist()
    assert [(x.prompt_ids, x.copies, x.seed) for x in asked[0]] == [
        (x, 2, y) for x, y in zip(SHORT, seeds)
    ]
    assert drawn == (python, numpy, torch.get_rng_state().tolist())
    torch.manual_seed(6)
    with generator.awake():
        assert generator.generate([*SHORT, *SHORT]) == completions
