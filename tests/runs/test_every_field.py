"""Every field of the config changes a run."""

import contextlib
import dataclasses
import gc
import hashlib
import io
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny import CHAT_TEMPLATE, WORDS, config, length_reward, llama, prompts, tokenizer

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.ppo.guards import NonFiniteError

FIELDS = [field.name for field in dataclasses.fields(PPOConfig) if field.name in PPOConfig.__annotations__]
FIELDS = [name for name in FIELDS if not name.startswith("vllm_")]  # tests/with_vllm

# ---- a run and what it does ----

SETTINGS = {
    "max_steps": 8,
    "max_completion_length": 10,
    "learning_rate": 1e-2,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
}
TIMED = ("time/", "tokens_per_second", "train_runtime", "train_samples_per_second", "train_steps_per_second")


class Run(NamedTuple):
    """Every number and file that a run gives its user, and counts of calls."""

    outcome: str
    start: dict
    weights: dict
    logs: list
    prompts: list
    completions: list
    calls: dict
    rates: list
    files: dict
    printed: str


def trained(built):
    return {name: x.detach().double().clone() for name, x in built.actor_critic.named_parameters() if x.requires_grad}


def counted(built):
    """Count calls of `generate`, and forwards of the trunk and of a classifier while a rollout is collected."""
    calls, doing = Counter(), []

    def during(name, method):
        def counting(*args, **kwargs):
            calls[name] += 1
            doing.append(name)
            try:
                return method(*args, **kwargs)
            finally:
                doing.pop()

        return counting

    def count(name):
        return lambda *_: calls.update([name]) if doing and doing[-1] == "collect" else None

    start = built.updates.start

    def starting(rollout, *args):
        start(rollout, *args)
        calls["offloaded"] += built.updates.rollout is not rollout

    built.updates.start = starting
    built.collector.collect = during("collect", built.collector.collect)
    built.actor_critic.sample = during("generate", built.actor_critic.sample)
    built.actor_critic.trunk.register_forward_pre_hook(count("trunk"))
    for reward in built.collector.rewards:
        if hasattr(reward, "model"):
            reward.model.base_model.register_forward_pre_hook(count("classifier"))
            reward.model.to = during("moved", reward.model.to)
    return calls


def sampled(built):
    """Record prompts and completions of every rollout, as token ids."""
    rollouts, collect = [], built.collector.collect

    def recording(*args):
        rollout, samples = collect(*args)
        rollouts.append(samples.batch)
        return rollout, samples

    built.collector.collect = recording
    return rollouts


def digests(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(folder).rglob("*.safetensors")
    }


def run(given, **settings):
    """Train, save, and record; an error is an outcome."""
    printed = io.StringIO()
    output_dir = f"run-{next(NUMBERS)}"
    try:
        with contextlib.redirect_stdout(printed):
            args = config(output_dir, **SETTINGS | settings)
            built = PPOTrainer(args=args, **given())
            built.remove_callback(built.terminal)  # its numbers are those of the logs, and times
            start, calls, rollouts = trained(built), counted(built), sampled(built)
            built.train(resume_from_checkpoint=args.resume_from_checkpoint)
            built.save_model()
    except (ValueError, NonFiniteError) as error:
        return Run(f"{type(error).__name__}: {error}", *[None] * (len(Run._fields) - 1))
    return Run(
        outcome="done",
        start=start,
        weights=trained(built),
        logs=[{k: x for k, x in log.items() if not k.startswith(TIMED)} for log in built.state.log_history],
        prompts=[batch.prompt_ids for batch in rollouts],
        completions=[batch.completion_ids for batch in rollouts],
        calls=dict(calls),
        rates=[group["initial_lr"] for group in built.optimizer.param_groups],
        files=digests(output_dir),
        printed=printed.getvalue(),
    )


NUMBERS = itertools.count()
RUNS: dict[str, Run] = {}


def cached_run(given, **settings):
    key = f"{given.__name__} {sorted(settings.items())}"
    if key not in RUNS:
        RUNS[key] = run(given, **settings)
    return RUNS[key]


def differ(one, other, part):
    """Return whether two runs differ in a part, or in the metric of that name, by more than rounding."""
    if part == "weights":
        names = one.weights.keys() & other.weights.keys()
        both = [name for name in names if one.weights[name].shape == other.weights[name].shape]
        apart, moved = (
            sum(((one.weights[name] - x[name]) ** 2).sum() for name in both) for x in (other.weights, one.start)
        )
        return bool(apart > 1e-6 * moved)
    if part in Run._fields:
        return getattr(one, part) != getattr(other, part)
    series = [[log[part] for log in logged.logs if part in log] for logged in (one, other)]
    assert any(series), f"nothing logs {part}"
    return series[0] != pytest.approx(series[1], rel=1e-4)


# ---- arguments of the runs ----


@pytest.fixture(scope="module", autouse=True)
def workplace(tmp_path_factory):
    """A working directory with models to load by name."""
    gc.freeze()  # Accelerate collects garbage before every run; without the imports that saves a second
    folder = tmp_path_factory.mktemp("fields")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
        patch.syspath_prepend(str(folder / "modules"))
        save("base", llama())
        save("classifier", llama(classifier=True, hidden_size=64, seed=3, num_labels=1))
        save("three_labels", llama(classifier=True, seed=3, num_labels=3))
        save_with_own_code("own_code", llama())
        Path("critic").mkdir()
        save_file({"weight": torch.randn(1, 32), "bias": torch.ones(1)}, "critic/value_head.safetensors")
        yield
    RUNS.clear()
    gc.unfreeze()


def save(path, model):
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)


def save_with_own_code(path, model):
    save(path, model)
    Path(path, "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    settings = json.loads(Path(path, "config.json").read_text())
    settings |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    Path(path, "config.json").write_text(json.dumps(settings))


def plain(**others):
    return {
        "model": llama(),
        "reward_funcs": length_reward,
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
    } | others


def by_name():
    return plain(model="base")


def hinted():
    return plain(train_dataset=prompts().add_column("hint", ["w3 w4"] * len(prompts())))


class Talk:
    """Environment that answers every turn of a word."""

    def reset(self, row, seed):
        self.turns = 0

    def step(self, text):
        time.sleep(0.1 * self.turns)
        self.turns += 1
        return " w3", float(len(text)), self.turns == 2


def talking():
    return plain(reward_funcs=None, environment_factory=Talk)


def own_code():
    return plain(model="own_code", processing_class=None)


def chat():
    template = CHAT_TEMPLATE + "{% if thinking %}w9 {% endif %}"
    messages = prompts().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    return plain(train_dataset=messages, processing_class=tokenizer(chat_template=template))


def readable():
    """A tokenizer that stop strings need: they look up how tokens are written after a word."""
    return plain(processing_class=tokenizer(["abcdef", *WORDS[:27]]))


def two_rewards():
    def first_token(completion_ids, **_):
        return [float(ids[0] % 5) for ids in completion_ids]

    return plain(reward_funcs=[length_reward, first_token])


def interrupted():
    """A checkpoint that was saved under another learning rate."""
    if not Path("interrupted").exists():
        args = config("interrupted", **SETTINGS | {"save_strategy": "steps", "save_steps": 4, "learning_rate": 5e-4})
        PPOTrainer(args=args, **plain()).train()
    return plain()


def overflowing():
    """A value loss that is more than float32 holds."""
    return plain(reward_funcs=lambda completion_ids, **_: [1e8 * len(ids) for ids in completion_ids])


def slow():
    """A reward that takes a tenth of a second."""

    def waits(completion_ids, **_):
        time.sleep(0.1)
        return length_reward(completion_ids)

    return plain(reward_funcs=waits)


def failing():
    """A reward that fails for one completion in four."""

    def fails(completion_ids, **_):
        return ["none" if ids[0] % 4 == 0 else ids[0] for ids in completion_ids]

    return plain(reward_funcs=fails)


def classifier():
    model = llama(classifier=True, seed=3, num_labels=1)
    return plain(reward_funcs=model, reward_processing_classes=tokenizer())


def classifier_by_name():
    return plain(reward_funcs="classifier")


def three_labels_by_name():
    return plain(reward_funcs="three_labels")


def started_from_an_adapter():
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return plain(model=get_peft_model(llama(), lora))


# ---- the fields ----


class Case(NamedTuple):
    """Values of a field, each of which changes the run.

    Args:
        values: At least two.
        differs: Parts of a [`Run`] or metrics, in each of which any two runs differ.
        same: Parts in which they do not.
        settings: Further fields.
        given: Function that makes the arguments of the trainer.
        exact: Returns whether the first and the last run differ as they should.
    """

    values: tuple
    differs: str = "weights"
    same: str = ""
    settings: Mapping[str, Any] = MappingProxyType({})
    given: Callable[..., dict] = plain
    exact: Callable[[Run, Run], bool] = lambda first, last: True


def rollout_sizes(run):
    return {len(rollout) for rollout in run.completions}


def lengths(run):
    return [len(ids) for rollout in run.completions for ids in rollout]


def policy_moved(run):
    return any(not torch.equal(x, run.start[name]) for name, x in run.weights.items() if "lora" in name)


NO_CRITIC = {"critic": "none", "num_generations": 4}
CASES = {
    # fields of the Trainer
    "learning_rate": Case((1e-2, 1e-3), "weights learning_rate"),
    "adam_epsilon": Case((1e-5, 1e-2)),
    "bf16": Case((False, True)),
    "logging_steps": Case((1, 2), "logs", same="weights", exact=lambda a, b: len(a.logs) == 9 and len(b.logs) == 6),
    # losses have nothing to filter: on a GPU, True only waits
    "logging_nan_inf_filter": Case((False, True), "", same="weights logs"),
    "logging_first_step": Case((True, False), "logs", same="weights", settings={"logging_steps": 2}),
    "remove_unused_columns": Case(
        (False, True), "outcome", exact=lambda a, b: "remove_unused_columns` must be False" in b.outcome
    ),
    # models
    "model_init_kwargs": Case((None, {"dtype": "bfloat16"}), given=by_name),
    "trust_remote_code": Case(
        (True, False), "outcome", given=own_code, exact=lambda a, b: "trust_remote_code=True" in b.outcome
    ),
    # data and sampling
    "shuffle_dataset": Case(
        (True, False),
        "prompts",
        exact=lambda a, b: (
            [*itertools.chain(*b.prompts)] == [tokenizer()(text)["input_ids"] for text in prompts()["prompt"]]
        ),
    ),
    "chat_template_kwargs": Case(
        (None, {"thinking": True}),
        "prompts",
        given=chat,
        exact=lambda a, b: [[*ids, 13] for ids in a.prompts[0]] == b.prompts[0],  # w9
    ),
    "max_prompt_length": Case(
        (None, 2),
        "prompts",
        settings={"overlong_prompts": "truncate"},
        exact=lambda a, b: (
            {*map(len, itertools.chain(*a.prompts))} > {*map(len, itertools.chain(*b.prompts))} == {1, 2}
        ),
    ),
    "overlong_prompts": Case(
        ("error", "truncate", "drop"),
        "outcome prompts",
        settings={"max_prompt_length": 2},
        exact=lambda a, b: (
            "Set `overlong_prompts` to" in a.outcome and len({*map(tuple, itertools.chain(*b.prompts))}) <= 8
        ),
    ),
    "pad_token": Case(
        ("<unk>", "<none>"),
        "outcome",
        exact=lambda a, b: "must be a token of the tokenizer, got '<none>'" in b.outcome,
    ),
    "num_generations": Case(
        (1, 4), "prompts", exact=lambda a, b: all(p[:4] == [p[0]] * 4 and p[4:] == [p[4]] * 4 for p in b.prompts)
    ),
    "generation_batch_size": Case(
        (None, 16), "completions", exact=lambda a, b: (rollout_sizes(a), rollout_sizes(b)) == ({8}, {16})
    ),
    "per_device_generation_batch_size": Case(
        (None, 2), "calls completions", exact=lambda a, b: a.calls["generate"] == 2 and b.calls["generate"] == 8
    ),
    "max_completion_length": Case((10, 4), "completions", exact=lambda a, b: max(lengths(a)) > max(lengths(b)) == 4),
    "stop_token_ids": Case(
        (None, [*range(16, 32)]), "completions", exact=lambda a, b: sum(lengths(a)) > sum(lengths(b))
    ),
    "stop_strings": Case(
        (None, ["w1"]), "completions", given=readable, exact=lambda a, b: sum(lengths(a)) > sum(lengths(b))
    ),
    "temperature": Case((1.0, 0.5), "completions"),
    "top_p": Case((1.0, 0.5), "completions"),
    "top_k": Case((0, 3), "completions"),
    "min_p": Case((None, 0.5), "completions"),
    "repetition_penalty": Case((1.0, 2.0), "completions"),
    "generation_kwargs": Case(
        (None, {"min_new_tokens": 10}), "completions", exact=lambda a, b: set(lengths(a)) > set(lengths(b)) == {10}
    ),
    "generation_backend": Case(
        ("transformers", "continuous_batching"),
        "calls completions",
        exact=lambda a, b: (
            a.calls["generate"] == a.calls["collect"] == b.calls["collect"] and "generate" not in b.calls
        ),
    ),
    # environments
    "max_tool_calling_iterations": Case(
        (None, 1),
        "completions",
        given=talking,
        settings={"stop_token_ids": [*range(16, 32)]},
        exact=lambda a, b: sum(lengths(a)) > sum(lengths(b)),
    ),
    "environment_timeout": Case(
        (None, 0.05),
        "outcome",
        given=talking,
        settings={"stop_token_ids": [*range(16, 32)]},
        exact=lambda a, b: "no result within environment_timeout=0.05 s" in b.outcome,
    ),
    # rewards
    "reward_weights": Case((None, [2.0, 0.1]), "weights reward", given=two_rewards),
    "reward_quantization": Case(
        ("none", "nf4", "fp4", "int8"), "weights rewards/classifier/mean", given=classifier_by_name
    ),
    "per_device_reward_batch_size": Case(
        (16, 3),
        "calls",
        same="weights reward",
        given=classifier,
        exact=lambda a, b: a.calls["classifier"] == 2 and b.calls["classifier"] == 2 * 3,
    ),
    "reward_label": Case(
        (0, 2), "weights reward", settings={"reward_quantization": "none"}, given=three_labels_by_name
    ),
    "reward_on_error": Case(
        ("raise", "skip", "3.0"),
        "outcome weights",
        given=failing,
        exact=lambda a, b: "must be a finite number" in a.outcome,
    ),
    "max_reward_failures": Case(
        (1.0, 0.0),
        "outcome",
        settings={"reward_on_error": "skip"},
        given=failing,
        exact=lambda a, b: "max_reward_failures=0.0" in b.outcome,
    ),
    "reward_timeout": Case(
        (None, 0.05), "outcome", given=slow, exact=lambda a, b: "no result within reward_timeout=0.05 s" in b.outcome
    ),
    "reward_baseline": Case((None, "reference"), "weights objective", same="reward"),
    "normalize_rewards": Case((False, True), "weights objective"),
    "reward_clip_range": Case((None, 2.0), "weights objective"),
    "missing_eos_penalty": Case((None, 3.0), "weights objective"),
    "mask_truncated_completions": Case((False, True)),
    "bootstrap_truncated": Case((False, True)),
    # the algorithm
    "num_ppo_epochs": Case((2, 1), "calls", exact=lambda a, b: a.calls["collect"] == 2 and b.calls["collect"] == 4),
    "num_mini_batches": Case(
        (2, 1), "completions", exact=lambda a, b: (rollout_sizes(a), rollout_sizes(b)) == ({8}, {4})
    ),
    "kl_coef": Case((0.05, 0.5), "weights kl_coef"),
    "kl_estimator": Case(("k1", "k2", "k3", "exact"), "weights objective", settings={"kl_coef": 1.0}),
    "kl_placement": Case(("reward", "loss", "both"), settings={"kl_estimator": "exact"}),
    "kl_target": Case((None, 1.0), "kl_coef"),
    "kl_horizon": Case((10000, 10), "kl_coef", settings={"kl_target": 1.0}),
    "target_kl": Case((None, 1e-3), "weights stopped_early"),
    "advantage_estimator": Case(("grpo", "dr_grpo", "rloo", "reinforce", "rebn"), settings=NO_CRITIC),
    "advantage_level": Case(("token", "turn"), given=talking, settings={"stop_token_ids": [*range(16, 32)]}),
    "critic": Case(("head", "side", "adapter", "none"), settings={"num_generations": 4}),
    "critic_backprop": Case((True, False)),
    "critic_learning_rate": Case(
        (None, 0.1), "weights rates", exact=lambda a, b: set(a.rates) == {1e-2} and set(b.rates) == {1e-2, 0.1}
    ),
    "normalize_values": Case((False, True), "weights loss/value"),
    "critic_init": Case((None, "critic"), "weights loss/value"),
    "critic_prompt": Case((None, "hint"), "weights loss/value", settings={"critic": "adapter"}, given=hinted),
    "value_warmup_steps": Case((0, 8), exact=lambda a, b: policy_moved(a) and not policy_moved(b)),
    "cliprange": Case((0.2, 0.02), "weights clip_ratio/region_mean"),
    "cliprange_high": Case((None, 0.02), "weights clip_ratio/high_mean"),
    "dual_clip": Case((None, 1.02)),
    "importance_sampling_level": Case(
        ("token", "turn", "sequence"), given=talking, settings={"stop_token_ids": [*range(16, 32)]}
    ),
    "loss_aggregation": Case(
        ("token", "sequence_mean", "sequence_sum", "constant"),
        "weights loss",
        settings={"adam_epsilon": 1.0, "max_grad_norm": 1e6},  # either would take the scale of the loss away
    ),
    "cliprange_value": Case((0.2, 0.02, None)),
    "value_range": Case((None, [1.0, 9.0])),
    "value_loss_weights": Case(("uniform", "prompt_std"), "weights loss/value", settings={"num_generations": 4}),
    "vf_coef": Case((0.1, 1.0)),
    "entropy_coef": Case((0.0, 0.1), "weights entropy_coef"),
    "entropy_target": Case((None, 10.0), "weights entropy_coef"),
    "gamma": Case((1.0, 0.9)),
    "lam": Case((0.95, 0.5)),
    "lam_critic": Case((None, 0.5)),
    "lam_length_alpha": Case((None, 0.2)),
    "whiten_rewards": Case((False, True)),
    "whiten_advantages": Case((True, False)),
    "offload_rollout": Case((False, True), "calls", same="weights logs", exact=lambda a, b: not a.calls["offloaded"]),
    "offload_rewards": Case(
        (False, True),
        "calls",
        given=classifier,
        same="weights logs",
        exact=lambda a, b: "moved" not in a.calls and b.calls["moved"] == 2 * b.calls["collect"],
    ),
    # failures and resuming
    "max_skipped_steps": Case(
        (100, 2),
        "outcome",
        given=overflowing,
        settings={"vf_coef": 1e25},
        exact=lambda a, b: a.outcome == "done" and "2 optimizer steps in a row" in b.outcome,
    ),
    "resume_with_changed_settings": Case(
        (False, True),
        "outcome",
        settings={"resume_from_checkpoint": "interrupted/checkpoint-4"},
        given=interrupted,
        exact=lambda a, b: "learning_rate (was 0.0005" in a.outcome and b.outcome == "done",
    ),
    # printing
    "log_completions": Case((False, True), "printed", same="weights logs", exact=lambda a, b: not a.printed),
    "num_completions_to_print": Case((8, 2), "printed", settings={"log_completions": True}, same="weights logs"),
}


def test_every_field_has_a_case():
    assert sorted(CASES) == sorted(FIELDS)


@pytest.mark.parametrize(
    "given, settings",
    [(plain, {}), (plain, {"critic": "adapter", "num_generations": 4}), (failing, {"reward_on_error": "skip"})],
)
def test_run_repeats(given, settings):
    """So below only the field makes a difference."""
    one, again = run(given, **settings), run(given, **settings)
    assert one.outcome == "done" and one.logs and one.completions and one.files
    for part, value in one._asdict().items():
        other = getattr(again, part)
        if part in ("start", "weights"):
            assert all(torch.equal(x, other[name]) for name, x in value.items())
            assert value and not differ(one, again, "weights")
        else:
            assert value == other, part


@pytest.mark.parametrize("field", CASES)
def test_field_changes_the_run(field):
    case = CASES[field]
    runs = [cached_run(case.given, **case.settings | {field: value}) for value in case.values]
    outcomes, differs = [one.outcome for one in runs], case.differs.split()
    if "outcome" in differs:
        assert "done" in outcomes and {*outcomes} != {"done"}, outcomes
    else:
        assert {*outcomes} == {"done"}, outcomes
    for (value, one), (other_value, other) in itertools.combinations(zip(case.values, runs), 2):
        if one.outcome != other.outcome:
            continue
        for part in (part for part in differs if part != "outcome"):
            if not differ(one, other, part):
                pytest.fail(f"`{field}` of {value!r} and of {other_value!r} give the same {part}")
        for part in case.same.split():
            if differ(one, other, part):
                pytest.fail(f"`{field}` of {value!r} and of {other_value!r} do not give the same {part}")
        if not {"prompts", "completions"} & {*differs} and one.completions[0] != other.completions[0]:
            pytest.fail(f"`{field}` of {value!r} and of {other_value!r} sample from other policies at the start")
    if not case.exact(runs[0], runs[-1]):
        pytest.fail(
            f"`{field}` of {case.values[0]!r} and of {case.values[-1]!r} differ in another way than they should"
        )
