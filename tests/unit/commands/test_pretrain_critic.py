"""A pretrained critic: what is measured and saved, and that PPO starts from it."""

import contextlib
import io
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from runs_of_tiny import rollouts_of
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers import EarlyStoppingCallback, TrainerCallback

from trl_ppo_ext import PPOTrainer, RewardAdapter
from trl_ppo_ext.commands import launch
from trl_ppo_ext.commands.launch import (
    PPOModelConfig,
    PPOScriptArguments,
    build_trainer,
    find_reward,
    load_datasets,
)
from trl_ppo_ext.config import CriticOptions
from trl_ppo_ext.modeling.loading import default_peft_config
from trl_ppo_ext.ppo.rollouts import observed_by_critic, score_tokens
from trl_ppo_ext.ppo_math import Moments
from trl_ppo_ext.tools.probe import held_out_rollouts

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))
import pretrain_critic as module
from pretrain_critic import explained_variance, pretrain_critic

RUN = """
model_name_or_path: policy
dataset_name: prompts.jsonl
reward_funcs: [cli_rewards.of_last_word]
use_cpu: true
bf16: false
report_to: none
disable_tqdm: true
save_strategy: "no"
logging_steps: 1
per_device_train_batch_size: 32
num_mini_batches: 2
num_ppo_epochs: 2
max_completion_length: 1
max_steps: 40
learning_rate: 0.03
lr_scheduler_type: constant
"""


def copies(parameters):
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


class Pretrained:
    """A run of `recipes/pretrain_critic.py`, with what it was before and after."""

    def __init__(self, workplace, kind, learning_rate):
        printed = io.StringIO()
        self.kind = kind
        self.directory = workplace / kind
        arguments = ["--critic", kind, "--output_dir", kind, "--learning_rate", str(learning_rate)]
        (workplace / "run.yaml").write_text(RUN)
        with (
            contextlib.chdir(workplace),
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(printed),
        ):
            patch.setattr(module, "build_trainer", self.build)
            module.main(["--config", "run.yaml", *arguments])
        self.printed = printed.getvalue()
        self.numbers = json.loads((self.directory / "critic.json").read_text())

    def build(self, *args, **kwargs):
        self.trainer = build_trainer(*args, **kwargs)
        self.before = copies(dict(self.trainer.actor_critic.named_parameters()))
        return self.trainer


@pytest.fixture(scope="module")
def head(workplace):
    return Pretrained(workplace, "head", 0.1)


@pytest.fixture(scope="module")
def adapter(workplace):
    return Pretrained(workplace, "adapter", 0.01)


@pytest.fixture(params=["head", "adapter"])
def pretrained(request):
    return request.getfixturevalue(request.param)


# ---- the command ----


def test_value_that_depends_on_the_prompt_is_learned(pretrained):
    assert pretrained.numbers["explained_variance_before"] == 0  # a fresh critic says 0 everywhere
    assert pretrained.numbers["explained_variance_after"] > 0.9  # measured: 0.99 and more


def test_only_the_critic_is_trained(pretrained):
    actor_critic = pretrained.trainer.actor_critic
    critic = pretrained.trainer.actor_critic.critic_parameters()
    for name, parameter in actor_critic.named_parameters():
        gae_with_critic = any(parameter is other for other in critic.values())
        assert torch.equal(parameter, pretrained.before[name]) != gae_with_critic, name
    # two layers of seven projections
    assert len(critic) == (2 if pretrained.kind == "head" else 2 + 2 * 14)


def test_command_prints_the_numbers_and_how_to_start(pretrained):
    for name in ("explained_variance_before", "explained_variance_after"):
        assert f"{name}: {pretrained.numbers[name]:.3f}\n" in pretrained.printed
    assert f"`critic_init='{pretrained.kind}'`" in pretrained.printed


def test_command_does_not_advise_a_critic_that_explains_nothing(there, monkeypatch, capsys):
    trainer = SimpleNamespace(accelerator=SimpleNamespace(print=print), end=lambda: None)
    monkeypatch.setattr(module, "build_trainer", lambda *settings: trainer)
    numbers = {"explained_variance_before": 0.0, "explained_variance_after": 0.002}
    monkeypatch.setattr(module, "pretrain_critic", lambda built: numbers)
    (there / "run.yaml").write_text(RUN)
    module.main(["run.yaml", "--output_dir", "critic"])
    printed = capsys.readouterr().out
    assert "hardly predicts the returns" in printed and "critic_init" not in printed


def test_folder_holds_critic_and_numbers_without_local_paths(pretrained, workplace):
    directory = pretrained.directory
    names = {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    }
    of_adapter = {"critic/adapter_config.json", "critic/adapter_model.safetensors"}
    critic = {"value_head.safetensors"} | (of_adapter if pretrained.kind == "adapter" else set())
    assert names - {".lock"} == critic | {"critic.json"}
    for name in names:
        assert str(workplace).encode() not in (directory / name).read_bytes(), name
    expected = {"base_model": "policy", "rewards": ["of_last_word"], "gamma": 1.0, "steps": 40}
    assert expected.items() <= pretrained.numbers.items()


def test_ppo_run_starts_with_the_values_of_the_critic(pretrained, there, tmp_path):
    def first_rollout(**start):
        args = config(
            tmp_path,
            critic=pretrained.kind,
            normalize_values=True,  # as in pretraining
            max_completion_length=1,
            max_steps=1,
            per_device_train_batch_size=32,
            **start,
        )
        trainer = PPOTrainer(
            "policy", find_reward("cli_rewards.of_last_word"), args, load_prompts()
        )
        rollouts = rollouts_of(trainer)
        trainer.train()
        return rollouts[0][0], trainer.state.log_history[0]["value/explained_variance"]

    rollout, explained = first_rollout(critic_init=pretrained.kind)
    values = score_tokens(pretrained.trainer.components, rollout.sequences).values
    assert torch.equal(rollout.old_values, values) and rollout.old_values.std() > 0.5
    assert explained > 0.9 > 0.1 > first_rollout()[1]


def load_prompts():
    return load_datasets(PPOScriptArguments(dataset_name="prompts.jsonl"))["train"]


@pytest.mark.parametrize(
    "option, remedy", [("--push_to_hub", "hf upload"), ("--num_ppo_epoch=3", "did you mean")]
)
def test_wrong_arguments_are_refused_by_name(there, option, remedy):
    with pytest.raises(ValueError, match=remedy) as raised:
        module.main(["--config", "run.yaml", option, "--output_dir", "refused"])
    assert (
        option.split("=")[0].removeprefix("--") in str(raised.value)
        and not (there / "refused").exists()
    )


# ---- what is measured ----


def trainer(output_dir, reward=length_reward, train=None, evaluation=None, **kwargs):
    args = config(output_dir, lam_critic=1.0, **kwargs)
    train = prompts() if train is None else train
    return PPOTrainer(llama(), reward, args, train, evaluation, processing_class=tokenizer())


def shaken(run):
    """With a critic that says something."""
    torch.nn.init.normal_(run.actor_critic.value_head.weight, std=0.3)
    return run


@pytest.mark.parametrize(
    "scale",
    [
        {"critic": "adapter", "normalize_rewards": True},
        {"critic": "side", "normalize_values": True},
    ],
)
def test_measuring_leaves_no_trace_in_the_run(tmp_path, monkeypatch, scale):
    monkeypatch.setattr(module, "HELD_OUT", 24)
    steered = scale | {"kl_target": 1.0}

    def weights(run):
        return copies(
            run.actor_critic.critic_parameters() | run.actor_critic.value_head.state_dict()
        )

    measured = trainer(tmp_path, **steered)
    before = weights(measured)
    noise = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    state = measured.run_state
    held_out_rollouts(measured, completions=24)
    assert measured.run_state == state
    assert all(torch.equal(weight, before[name]) for name, weight in weights(measured).items())
    assert torch.equal(torch.get_rng_state(), noise[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == noise[1:]
    pretrain_critic(measured)

    plain = trainer(tmp_path, **steered)
    for parameter in plain.actor_critic.policy_parameters().values():
        parameter.requires_grad_(False)
    plain.train()
    assert plain.run_state.to_json() == measured.run_state.to_json()
    for name, weight in weights(plain).items():
        assert torch.equal(weight, weights(measured)[name]), name


@pytest.mark.parametrize(
    "lams", [{"lam": 0.5}, {"critic_options": CriticOptions(lam_length_alpha=0.2, lam=0.3)}]
)
def test_held_out_returns_are_monte_carlo_for_any_lambda(tmp_path, lams):
    run = shaken(trainer(tmp_path, gamma=0.9, reward=length_reward))
    vars(run.args).update(lams)
    ((rollout, samples),) = held_out_rollouts(run, completions=8)
    lengths = rollout.sequences.completion_lengths[:, None]
    left = (lengths - 1 - torch.arange(samples.returns.shape[1])).clamp(min=0)
    expected = lengths * 0.9**left * rollout.response_mask
    torch.testing.assert_close(
        samples.returns * rollout.response_mask, expected, rtol=1e-5, atol=1e-5
    )
    assert {name: getattr(run.args, name) for name in lams} == lams


@pytest.mark.parametrize("size", [1, 4, 16])
def test_held_out_rollouts_seed_environments_once_per_prompt(tmp_path, monkeypatch, size):
    run = trainer(tmp_path)
    seeds = []
    play = run.components.player.play
    monkeypatch.setattr(
        run.components.player, "play", lambda rows, given: seeds.extend(given) or play(rows, given)
    )
    held_out_rollouts(run, 32, num_generations=size)
    groups = [set(seeds[start : start + size]) for start in range(0, 32, size)]
    assert (
        all(len(group) == 1 for group in groups)
        and len(set.union(*groups)) == len(groups) == 32 // size
    )


def test_held_out_rollouts_are_sampled_as_those_of_training(tmp_path):
    run = trainer(tmp_path, eval_temperature=0.0)
    evaluates = []
    generator = run.components.player.generator
    generate = generator.generate
    generator.generate = lambda *args, **kwargs: (
        evaluates.append(generator.evaluates) or generate(*args, **kwargs)
    )
    held_out_rollouts(run, completions=8)
    run.evaluate(prompts(4))
    assert evaluates[0] is False and evaluates[-1] is True


def test_explained_variance_covers_all_tokens_of_all_rollouts(tmp_path):
    # units, of values or of rewards so far, move while rollouts are held out
    run = shaken(trainer(tmp_path, critic="head", normalize_values=False))
    rollouts = held_out_rollouts(run, completions=24)
    assert len(rollouts) == 3
    values = np.concatenate([x.values[each.response_mask].numpy() for each, x in rollouts])
    returns = np.concatenate([x.returns[each.response_mask].numpy() for each, x in rollouts])
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert explained_variance(run, rollouts) == pytest.approx(expected, abs=1e-5)
    assert abs(expected) > 0.01


def token_rewards(completion_ids, **kwargs):
    return [[float(token % 2) for token in ids] for ids in completion_ids]


def test_explained_variance_reads_past_rewards_in_current_units(tmp_path):
    run = shaken(trainer(tmp_path, critic="side", reward=token_rewards))
    ((rollout, samples),) = held_out_rollouts(run, completions=8)
    critic = run.run_state.critic._replace(rewards=Moments(2.0, 0.0, 0.5))
    run.run_state = run.run_state._replace(critic=critic)
    sequences = observed_by_critic(
        run.actor_critic.value_head,
        rollout.sequences,
        samples.scored.tokens,
        rollout.response_mask,
        run.run_state,
    )
    assert sequences.observed.any() and not rollout.sequences.observed.any()
    mask = rollout.response_mask
    values = score_tokens(run.components, sequences).values[mask].numpy()
    returns = samples.returns[mask].numpy()
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert explained_variance(run, [(rollout, samples)]) == pytest.approx(expected, abs=1e-5)


def asked_for(run, completions):
    """Prompts that rewards are asked about while something is measured."""
    asked = []
    run.components.rewards[0].function = lambda prompts, **kwargs: (
        asked.extend(prompts) or [0.0] * len(prompts)
    )
    held_out_rollouts(run, completions)
    return asked


def named(count, prefix=""):
    return Dataset.from_list([{"prompt": f"{prefix}w{n}"} for n in range(count)])


def test_held_out_prompts_come_from_the_evaluation_sets(tmp_path):
    run = trainer(tmp_path, evaluation=named(16, "w0 "))
    assert asked_for(run, 8) == [f"w0 w{2 * n}" for n in range(8)]  # spread evenly
    assert asked_for(run, 9) == [f"w0 w{n}" for n in range(16)]  # two rollouts
    run = trainer(
        tmp_path, evaluation={"a": named(2, "w0 "), "b": named(3, "w1 ").to_iterable_dataset()}
    )
    assert asked_for(run, 8) == [
        "w0 w0",
        "w0 w1",
        "w1 w0",
        "w1 w1",
        "w1 w2",
        "w0 w0",
        "w0 w1",
        "w1 w0",
    ]
    # without any, the first of a stream
    run = trainer(tmp_path, train=named(24).to_iterable_dataset())
    assert asked_for(run, 8) == [f"w{n}" for n in range(8)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_held_out_prompts_are_those_that_training_reaches_last(tmp_path, shuffle):
    seen = []
    run = trainer(
        tmp_path,
        reward=lambda prompts, **kwargs: seen.extend(prompts) or [1.0] * len(prompts),
        train=named(24),
        max_steps=8,  # two rollouts of 8
        shuffle_dataset=shuffle,
    )
    run.train()
    held_out = asked_for(run, 8)
    assert len(set(seen)) == 16 and len(set(held_out)) == 8
    assert not set(seen) & set(held_out)


def test_noise_of_rewards_differs_between_held_out_rollouts(tmp_path):
    seen = []
    run = trainer(
        tmp_path,
        lambda prompts, **kwargs: seen.append([random.random() for _ in prompts]) or seen[-1],
    )
    held_out_rollouts(run, 24)
    assert len(seen) == 3 and len({tuple(scores) for scores in seen}) == 3


def test_monitored_rewards_are_not_measured(tmp_path):
    def watched(prompts, **kwargs):
        pytest.fail("a monitored reward was measured")

    args = config(tmp_path)
    words = tokenizer()
    run = PPOTrainer(
        llama(), length_reward, args, prompts(), processing_class=words, monitor_funcs=watched
    )
    assert held_out_rollouts(run, 8)


# ---- pretrain_critic ----


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_reward"}


def test_metric_of_the_frozen_policy_chooses_no_critic(tmp_path):
    """It stays as it is, so the first evaluation would be the best one, and the last."""
    saved = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    settings = config(tmp_path, max_steps=4, **EVALUATED, **saved)
    stops = [EarlyStoppingCallback(1), EarlyStoppingCallback(2)]
    trainer = PPOTrainer(
        llama(),
        length_reward,
        settings,
        prompts(),
        prompts(4),
        processing_class=tokenizer(),
        callbacks=stops,
    )
    weights = []
    trainer.add_callback(AfterSteps(lambda: weights.append(critic_of(trainer))))
    assert pretrain_critic(trainer)["steps"] == 4
    assert all(torch.equal(x, y) for x, y in zip(critic_of(trainer), weights[-1]))
    assert any(not torch.equal(x, y) for x, y in zip(critic_of(trainer), weights[0]))


def critic_of(trainer):
    return [x.detach().clone() for x in trainer.actor_critic.critic_parameters().values()]


class AfterSteps(TrainerCallback):
    """Calls a function after each optimizer step."""

    def __init__(self, call):
        self.call = call

    def on_step_end(self, args, state, control, **kwargs):
        self.call()


@pytest.mark.parametrize(
    ("name", "value"), [("lr_scheduler_type", "reduce_lr_on_plateau"), ("save_strategy", "best")]
)
def test_what_follows_the_frozen_policy_is_refused(tmp_path, name, value):
    settings = config(tmp_path, **EVALUATED | {name: value})
    trainer = PPOTrainer(
        llama(), length_reward, settings, prompts(), prompts(4), processing_class=tokenizer()
    )
    with pytest.raises(ValueError, match=f"`{name}='{value}'` follows a metric of the policy"):
        pretrain_critic(trainer)


def test_run_without_critic_is_refused(tmp_path):
    args = config(tmp_path, critic="none", num_generations=2)
    run = PPOTrainer(llama(), length_reward, args, prompts(), processing_class=tokenizer())
    with pytest.raises(ValueError, match="critic='none'"):
        pretrain_critic(run)


@pytest.mark.parametrize("is_main", [True, False])
def test_main_process_saves_in_output_dir(tmp_path, monkeypatch, is_main):
    monkeypatch.setattr(module, "HELD_OUT", 8)
    run = trainer(tmp_path / "run", max_steps=1, gamma=0.5)
    monkeypatch.setattr(run, "is_world_process_zero", lambda: is_main)
    numbers = pretrain_critic(run, tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere").exists() == is_main and not (
        tmp_path / "run" / "critic.json"
    ).exists()
    if is_main:
        saved = json.loads((tmp_path / "elsewhere" / "critic.json").read_text())
        assert numbers.items() <= saved.items() and saved["gamma"] == 0.5


# ---- from arguments to a trainer ----


def test_rewards_are_resolved_in_every_form(there, monkeypatch):
    from trl.rewards import think_format_reward

    assert (
        find_reward("Skywork/Skywork-Reward-V2-Qwen3-0.6B")
        == "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
    )
    assert find_reward("gpt2") == "gpt2" and find_reward("./policy") == "./policy"
    assert find_reward("Qwen2.5-0.5B") == "Qwen2.5-0.5B"
    (there / "runs.reward").mkdir(exist_ok=True)
    assert find_reward("runs.reward") == "runs.reward"
    assert find_reward("adapter:my/reward") == RewardAdapter("my/reward")
    assert find_reward("think_format_reward") is think_format_reward
    punishment = find_reward("get_soft_overlong_punishment", max_completion_length=10)
    punished = punishment(completion_ids=[[0] * n for n in (8, 9, 10, 11)])
    assert punished == [0, -0.5, -1, -1]
    assert find_reward("cli_rewards.of_last_word")(prompts=["w3 w7"]) == [3.0]
    (there / "library").mkdir(exist_ok=True)
    (there / "library" / "scores_of_mine.py").write_text(
        "import math\n\nclass Judge:\n    score = math.sqrt\n"
    )
    monkeypatch.syspath_prepend(str(there / "library"))
    assert find_reward("scores_of_mine.Judge").score(4) == 2


def test_reward_module_with_a_missing_import_raises_it(there):
    (there / "broken_rewards.py").write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        find_reward("broken_rewards.reward")


def rows(named_so, **kwargs):
    return list(load_datasets(PPOScriptArguments(dataset_name=str(named_so), **kwargs))["train"])


def test_datasets_are_read_from_files_and_directories(tmp_path):
    given = [{"prompt": "w1", "target": 2}, {"prompt": "w2", "target": 3}]
    made = Dataset.from_list(given)
    made.to_json(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text(json.dumps(given))
    made.to_parquet(tmp_path / "c.parquet")
    made.to_csv(tmp_path / "d.csv")
    made.save_to_disk(tmp_path / "saved")
    DatasetDict(train=made, test=made).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    made.to_json(tmp_path / "folder" / "train.jsonl")
    for name in ("a.jsonl", "b.json", "c.parquet", "d.csv", "saved", "splits", "folder"):
        assert rows(tmp_path / name) == given, name
    assert load_datasets(PPOScriptArguments(dataset_name=str(tmp_path / "splits"))).keys() == {
        "train",
        "test",
    }
    assert rows(tmp_path / "a.jsonl", dataset_streaming=True) == given


@pytest.mark.parametrize(
    "name, content, arguments, says",
    [
        ("a.txt", "prompt\nw1\n", {}, "must be a file of the types .json"),
        ("a.json", "{", {}, "cannot be "),
        ("a.json", "[]", {"dataset_config": "main"}, "`dataset_config='main'` selects a part"),
        (
            "state.json",
            "{}",
            {"dataset_streaming": True},
            "`dataset_streaming=True` does not support",
        ),
    ],
)
def test_unreadable_dataset_is_refused(tmp_path, name, content, arguments, says):
    (tmp_path / name).write_text(content)
    if name == "state.json":
        path = tmp_path
    else:
        path = tmp_path / name
    with pytest.raises(ValueError, match=re.escape(says)):
        rows(path, **arguments)


@pytest.fixture
def built(monkeypatch, there):
    """What PPOTrainer would be built with."""

    def build(model_args=None, script_args=None, args=None, dataset=None, **kwargs):
        monkeypatch.setattr(launch, "PPOTrainer", dict)
        script_args = PPOScriptArguments(
            "prompts.jsonl", reward_funcs=["gpt2"], **(script_args or {})
        )
        model_args = model_args or PPOModelConfig("policy")
        dataset = load_datasets(script_args) if dataset is None else dataset
        return build_trainer(
            script_args, config(there, **(args or {})), model_args, dataset, **kwargs
        )

    return build


def test_default_adapter_and_dtype_are_those_of_the_trainer(built):
    given = built()
    assert given["model"] == "policy" and given["args"].model_init_kwargs is None
    assert given["peft_config"] == default_peft_config() and given["quantization_config"] is None
    assert "eval_dataset" not in given
    assert [row["prompt"] for row in given["train_dataset"]][:2] == ["w9 w0", "w10 w1"]


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj"]},
        {"target_modules": r".*\.q_proj"},
    ],
)
def test_lora_argument_changes_only_its_field(built, settings):
    arguments = {f"lora_{name}": value for name, value in settings.items()}
    assert built(PPOModelConfig("policy", **arguments))["peft_config"] == replace(
        default_peft_config(), **settings
    )


def test_model_init_kwargs_come_from_the_model_arguments(built):
    model_args = PPOModelConfig("policy", "v2", dtype="bfloat16", attn_implementation="eager")
    expected = {"revision": "v2", "dtype": "bfloat16", "attn_implementation": "eager"}
    assert built(model_args)["args"].model_init_kwargs == expected
    both = built(model_args, args={"model_init_kwargs": {"dtype": "bfloat16", "use_cache": False}})
    assert both["args"].model_init_kwargs == expected | {"use_cache": False}
    quantized = built(
        PPOModelConfig("policy", load_in_4bit=True, bnb_4bit_quant_type="fp4", dtype="bfloat16")
    )
    assert quantized["quantization_config"].bnb_4bit_quant_type == "fp4"
    assert quantized["quantization_config"].bnb_4bit_compute_dtype == torch.bfloat16
    assert built(PPOModelConfig("policy", load_in_4bit=True, dtype="auto"))[
        "quantization_config"
    ].load_in_4bit
    assert built(PPOModelConfig("policy", load_in_8bit=True))["quantization_config"].load_in_8bit


def test_datasets_are_passed_by_split(built, there):
    made = {name: named(3, f"{name} ") for name in ("train", "test", "other")}
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    given = built(args=evaluating, dataset=made)
    assert given["train_dataset"] is made["train"] and given["eval_dataset"] is made["test"]
    given = built(
        script_args={"dataset_test_split": "other"},
        args=evaluating,
        dataset=made,
        callbacks=["mine"],
    )
    assert given["eval_dataset"] is made["other"] and given["callbacks"] == ["mine"]
    assert built(script_args={"monitor_funcs": ["gpt2", "./policy"]})["monitor_funcs"] == [
        "gpt2",
        "./policy",
    ]


def test_trainer_of_a_pretrained_critic_trains_no_frozen_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HELD_OUT", 8)
    run = trainer(tmp_path, max_steps=1)
    pretrain_critic(run)
    with pytest.raises(RuntimeError, match="`train` needs a new trainer with `critic_init`"):
        run.train(resume_from_checkpoint=False)
    assert run.evaluate(prompts(2))["eval_reward"]  # what does not train still works
