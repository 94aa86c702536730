"""Every algorithmic choice against [`plain_ppo`]: the trainer's gradients and losses are those of
the oracle.

The trainer is watched from outside: a reward function sees what is sampled, callbacks see gradients
and weights.
"""

import copy
import json
import math
from dataclasses import fields, replace
from functools import lru_cache
from typing import NamedTuple

import plain_ppo
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import SPECIAL, WORDS, config, llama, tokenizer
from torch import nn
from transformers import TrainerCallback

from trl_ppo_ext import PPOTrainer

EOS = 1
LONGEST = 10
GROUP = 4
FEW_WORDS = WORDS[:8]  # so that completions end
# two epochs of one minibatch each, and unclipped gradients: every second step is off policy
SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_mini_batches": 1,
    "num_ppo_epochs": 2,
    "max_steps": 4,
    "max_completion_length": LONGEST,
    "temperature": 0.8,
    "learning_rate": 2e-2,
    "max_grad_norm": 0.0,
    # the classical critic and clip, of which each choice is a variant; test_oracle.py has the
    # defaults
    "critic": "head",
    "normalize_values": False,
    "cliprange": 0.2,
    "vf_coef": 0.1,
    "kl_coef": 0.05,
    "lam": 0.95,
    "lam_critic": 0.95,
    "target_kl": None,
    "adam_epsilon": 1e-5,  # a smaller one amplifies the rounding of small gradients
}
NO_CRITIC = {"critic": "none", "num_generations": GROUP, "lam": None, "lam_critic": None}


# ---- a run and its record


def base():
    return llama(vocab_size=len(SPECIAL + FEW_WORDS))


def questions(rows=16):
    return Dataset.from_dict(
        {"prompt": [" ".join(FEW_WORDS[row % 4 : row % 4 + 1 + row % 5]) for row in range(rows)]}
    )


def varied_reward(completion_ids, **kwargs):
    """Scores that differ between completions of one length."""
    return [0.5 * len(ids) + ids[0] % 5 for ids in completion_ids]


def trained(model):
    return {name: x.detach().clone() for name, x in model.named_parameters() if x.requires_grad}


class Rollout(NamedTuple):
    """Sampled token IDs, their scores, and the weights that sampled them."""

    prompts: list
    completions: list
    scores: list
    weights: dict


class Step(NamedTuple):
    """An optimizer step: its rows, the gradient, and the state before and after it."""

    rows: list  # prompts and completions of each micro-batch
    gradient: dict
    before: dict
    after: dict
    adam_before: dict
    adam_after: dict


def token_ids(sequences):
    """Unpadded prompt and completion of each row of a batch of the package."""
    ids = sequences.input_ids.tolist()
    middle = sequences.prompt_ids.shape[1]
    lengths = zip(sequences.prompt_lengths.tolist(), sequences.completion_lengths.tolist())
    return [
        (row[middle - prompt : middle], row[middle : middle + end])
        for row, (prompt, end) in zip(ids, lengths)
    ]


class Record(TrainerCallback):
    """Every rollout and every optimizer step of a trainer."""

    def __init__(self, rewards, scores):
        self.scores = scores
        self.rollouts = []
        self.steps = []
        self.rewards = [self.watched, *rewards[1:]]
        self.reward = rewards[0]
        self.inputs = []

    def attach(self, built):
        self.built = built
        self.compute_loss = built.compute_loss
        built.compute_loss = self.watched_loss
        built.add_callback(self)

    def watched(self, prompts, completion_ids, **kwargs):
        ids = tokenizer(FEW_WORDS)(prompts)["input_ids"]
        self.rollouts.append(
            Rollout(ids, completion_ids, self.scores(completion_ids), trained(self.built.model))
        )
        return self.reward(prompts=prompts, completion_ids=completion_ids, **kwargs)

    def watched_loss(self, model, inputs, **kwargs):
        self.inputs.append(inputs)
        return self.compute_loss(model, inputs, **kwargs)

    def adam(self):
        return copy.deepcopy(self.built.optimizer.state_dict()["state"])

    def on_pre_optimizer_step(self, *args, **kwargs):
        gradient = {
            name: x.grad.clone()
            for name, x in self.built.model.named_parameters()
            if x.grad is not None
        }
        rows = [token_ids(micro_batch.rollout.sequences) for micro_batch in self.inputs]
        self.begun = (rows, gradient, trained(self.built.model), self.adam())
        self.inputs = []

    def on_step_end(self, *args, **kwargs):
        *begun, adam = self.begun
        self.steps.append(Step(*begun, trained(self.built.model), adam, self.adam()))


def build(output_dir, model=None, reward_funcs=(varied_reward,), scores=varied_reward, **settings):
    """A trainer with its record; `scores` are the rewards as the oracle has them."""
    record = Record(reward_funcs, scores)
    built = PPOTrainer(
        model or base(),
        record.rewards,
        config(output_dir, **SETTINGS | settings),
        questions(),
        processing_class=tokenizer(FEW_WORDS),
    )
    record.attach(built)
    return built, record


def run(output_dir, **settings):
    built, record = build(output_dir, **settings)
    built.train()
    return built, record


def logged(built, name):
    return [entry[name] for entry in built.state.log_history if name in entry]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


# ---- the same in float64


def plain_settings(settings):
    names = {field.name for field in fields(plain_ppo.Settings)}
    return plain_ppo.Settings(
        **{name: x for name, x in (SETTINGS | settings).items() if name in names}
    )


@lru_cache(maxsize=2)
def float64_copy(built):
    """A trainer's model, and the reference that it has by then."""
    module = copy.deepcopy(built.model).double()
    reference = copy.deepcopy(module.policy)
    if module.reference_adapter is None:
        reference.base_model.disable_adapter_layers()
    else:
        reference.set_adapter(module.reference_adapter)
    return module, reference


def plain_models(built, weights):
    """The models of a trainer in float64, with the weights that its policy and critic had; valid
    until the next."""
    module, reference = float64_copy(built)
    module.load_state_dict({name: x.double() for name, x in weights.items()}, strict=False)
    head = module.value_head
    if head is not None:
        plain = nn.Linear(head.in_features, 1)
        plain.weight = head.weight
        plain.bias = head.bias
        head = plain
    return plain_ppo.Models(module.policy, reference, head)


def plain_samples(built, rollout, s):
    """A rollout as the oracle collects it."""
    rows = zip(rollout.prompts, rollout.completions, rollout.scores)
    samples = [
        plain_ppo.Sample(prompt, ids, score, truncated=ids[-1] != EOS)
        for prompt, ids, score in rows
    ]
    plain_ppo.collect(plain_models(built, rollout.weights), samples, s)
    return samples


def samples_of(step, samples):
    """The samples that an optimizer step learns from."""
    by_ids = {(tuple(sample.prompt), tuple(sample.ids)): sample for sample in samples}
    return [by_ids[tuple(prompt), tuple(ids)] for rows in step.rows for prompt, ids in rows]


def plain_step(built, record, number, s):
    """Gradient, loss and clipped shares of an optimizer step by the oracle."""
    step = record.steps[number]
    rollout = record.rollouts[number % len(record.steps) // s.num_ppo_epochs]
    samples = samples_of(step, plain_samples(built, rollout, s))
    models = plain_models(built, step.before)
    loss, shares = plain_ppo.loss_of(models, samples, s)
    return plain_ppo.gradient_of(models, loss), loss.item(), shares


def distance(gradient, other):
    """Relative to the size of the second."""
    difference, size = (
        math.sqrt(sum((x**2).sum().item() for x in tensors))
        for tensors in (
            [gradient[name].double() - other[name] for name in gradient],
            other.values(),
        )
    )
    return difference / size


ROUNDING = 2e-4  # of a gradient in float32


def check_step(built, record, number, s):
    """Compare an optimizer step and its log with the oracle's; return the clipped shares."""
    number %= len(record.steps)
    gradient, loss, shares = plain_step(built, record, number, s)
    assert record.steps[number].gradient.keys() == gradient.keys()
    assert distance(record.steps[number].gradient, gradient) < ROUNDING
    log = built.state.log_history[number]
    assert log["loss"] == pytest.approx(loss, abs=2e-4)
    metrics = {name: f"clip_ratio/{name}_mean" for name in ("low", "high", "dual")} | {
        "value": "value/clip_ratio"
    }
    for name, metric in metrics.items():
        assert log.get(metric, 0) == pytest.approx(shares[name]), metric
    assert log["clip_ratio/region_mean"] == pytest.approx(shares["low"] + shares["high"])
    return shares


# ---- one choice at a time

IN_LOSS = {"kl_placement": "loss", "kl_coef": 0.3}
SEQUENCE = {"importance_sampling_level": "sequence", "cliprange": 0.05}
TRUNCATED = {"mask_truncated_completions": True}
# each beside the settings that it is told apart from
CHOICES = {
    "cliprange_high": ({"cliprange": 0.1, "cliprange_high": 0.4}, {}),
    "dual_clip": ({"dual_clip": 1.1}, {}),
    "cliprange_value": ({"cliprange_value": 0.2}, {}),
    "sequence": (SEQUENCE, {"cliprange": 0.05}),
    "entropy_coef": ({"entropy_coef": 0.3}, {}),
    "negative entropy_coef": ({"entropy_coef": -0.3}, {}),
    "vf_coef": ({"vf_coef": 0.5}, {}),
    "kl_coef": ({"kl_coef": 0.3}, {}),
    "k2 in the reward": ({"kl_coef": 0.3, "kl_estimator": "k2"}, {"kl_coef": 0.3}),
    "k3 in the reward": ({"kl_coef": 0.3, "kl_estimator": "k3"}, {"kl_coef": 0.3}),
    "exact in the reward": ({"kl_coef": 0.3, "kl_estimator": "exact"}, {"kl_coef": 0.3}),
    "k1 in the loss": (IN_LOSS | {"kl_estimator": "k1"}, {"kl_coef": 0.3}),
    "k2 in the loss": (IN_LOSS | {"kl_estimator": "k2"}, IN_LOSS),
    "k3 in the loss": (IN_LOSS | {"kl_estimator": "k3"}, IN_LOSS),
    "exact in the loss": (IN_LOSS | {"kl_estimator": "exact"}, IN_LOSS),
    "exact in both": (IN_LOSS | {"kl_estimator": "exact", "kl_placement": "both"}, IN_LOSS),
    "missing_eos_penalty": ({"missing_eos_penalty": 1.5}, {}),
    "whiten_rewards": (
        {"whiten_rewards": True, "whiten_advantages": False},
        {"whiten_advantages": False},
    ),
    "whiten_advantages": ({"whiten_advantages": False}, {}),
    "gamma": ({"gamma": 0.9}, {}),
    "lam": ({"lam": 0.5}, {}),
    "lam_critic": ({"lam_critic": 0.5}, {}),
    "lam_critic of 1": ({"lam_critic": 1.0, "lam": 0.5}, {"lam": 0.5}),
    "lam_length_alpha": ({"lam_length_alpha": 0.3}, {}),
    "both lambdas": ({"lam_length_alpha": 0.3, "lam_critic": 1.0}, {"lam_length_alpha": 0.3}),
    "truncated": (TRUNCATED, {}),
    "grpo": (NO_CRITIC, NO_CRITIC | {"loss_aggregation": "token"}),
    "gspo": (NO_CRITIC | SEQUENCE, NO_CRITIC | {"cliprange": 0.05}),
    "dr_grpo": (NO_CRITIC | {"advantage_estimator": "dr_grpo"}, NO_CRITIC),
    "rloo": (NO_CRITIC | {"advantage_estimator": "rloo"}, NO_CRITIC),
    "reinforce": (NO_CRITIC | {"advantage_estimator": "reinforce"}, NO_CRITIC),
    "rebn": (NO_CRITIC | {"advantage_estimator": "rebn"}, NO_CRITIC),
    "discounted rebn": (
        NO_CRITIC | {"advantage_estimator": "rebn", "gamma": 0.8},
        NO_CRITIC | {"advantage_estimator": "rebn"},
    ),
    "kl_coef of groups": (NO_CRITIC | {"kl_coef": 0.5}, NO_CRITIC),
    **{
        f"truncated {name}": (NO_CRITIC | TRUNCATED | {"advantage_estimator": name}, NO_CRITIC)
        for name in ("grpo", "dr_grpo", "rloo", "reinforce", "rebn")
    },
}
CLIPS = {"dual_clip": ["dual"], "cliprange_value": ["value"]}


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_trains_as_plain_ppo(tmp_path, choice):
    settings, without = CHOICES[choice]
    built, record = run(tmp_path, **settings)
    shares = check_step(built, record, -1, plain_settings(settings))
    clipped = [shares["low"] + shares["high"], *(shares[clip] for clip in CLIPS.get(choice, ()))]
    assert all(0 < share < 1 for share in clipped), shares
    # the oracle without the choice has another gradient: the comparison can fail
    gradient, _, _ = plain_step(built, record, -1, plain_settings(without))
    assert distance(record.steps[-1].gradient, gradient) > 10 * ROUNDING
    assert logged(built, "kl")[0] == 0 and logged(built, "kl")[1] != 0  # the adapter was fresh


AGGREGATIONS = ["token", "sequence_mean", "sequence_sum", "constant"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("size, accumulation", [(3, 2), (2, 4)])
def test_gradient_does_not_depend_on_micro_batches(tmp_path, aggregation, size, accumulation):
    """With completions of different lengths, some of them masked."""
    settings = TRUNCATED | {"loss_aggregation": aggregation, "max_steps": 2, "seed": 1}
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    built, record = run(tmp_path, **settings | sizes)
    check_step(built, record, -1, plain_settings(settings))
    rows = record.steps[-1].rows
    learned = [len(ids) for batch in rows for _, ids in batch if ids[-1] == EOS]
    assert (
        len(rows) == accumulation and len(set(learned)) > 1 and len(learned) < size * accumulation
    )


def failing_reward(completion_ids, **kwargs):
    """Does not apply to some completions (NaN), and fails for others."""
    odd = {2: float("nan"), 3: "n/a", 4: float("inf")}
    return [
        odd.get(ids[0] % 5, score)
        for ids, score in zip(completion_ids, varied_reward(completion_ids))
    ]


def optional_reward(completion_ids, **kwargs):
    return [None if len(ids) > 3 else 2.0 for ids in completion_ids]


def scores_of_both(completion_ids):
    scores = []
    for ids, score in zip(completion_ids, varied_reward(completion_ids)):
        short = len(ids) <= 3
        if ids[0] % 5 in (3, 4) or (ids[0] % 5 == 2 and not short):  # failed, or no reward applies
            scores.append(None)
        else:
            scores.append(2.0 * short + (0.0 if ids[0] % 5 == 2 else score))
    return scores


SKIP = {"reward_on_error": "skip", "max_reward_failures": 1.0}


@pytest.mark.parametrize("estimator", ["gae", "grpo", "dr_grpo", "rloo", "reinforce", "rebn"])
def test_skipped_completions_do_not_train(tmp_path, estimator):
    """Nor are the others of their group compared with them."""
    settings = {"advantage_estimator": estimator} | ({} if estimator == "gae" else NO_CRITIC)
    rewards = {"reward_funcs": [failing_reward, optional_reward], "scores": scores_of_both}
    built, record = run(tmp_path, **settings, **rewards, **SKIP, per_device_train_batch_size=16)
    check_step(built, record, -1, plain_settings(settings))
    scores = record.rollouts[-1].scores
    assert len({scores[start : start + GROUP].count(None) for start in range(0, 16, GROUP)}) > 1


def adapted():
    """A model with an adapter that has learned something."""
    torch.manual_seed(1)
    lora = LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(base(), lora)


def test_exact_kl_of_a_given_adapter_is_from_its_start(tmp_path):
    settings = IN_LOSS | {"kl_estimator": "exact"}
    built, record = run(tmp_path, model=adapted(), **settings)
    check_step(built, record, -1, plain_settings(settings))
    assert logged(built, "loss/kl")[0] < 1e-12 and logged(built, "loss/kl")[-1] > 1e-3


def test_targets_are_monte_carlo_returns_by_default(tmp_path):
    (_, one), (_, other) = (run(tmp_path, lam=0.9, lam_critic=lam) for lam in (None, 1.0))
    assert equal(one.steps[-1].after, other.steps[-1].after)


# ---- target_kl

EARLY = {
    "num_mini_batches": 2,
    "num_ppo_epochs": 3,
    "max_steps": 18,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "weight_decay": 0.1,
}


def unchanged(step):
    """Neither weights nor Adam's moments and counts moved."""
    before = step.adam_before
    after = step.adam_after
    adam = before.keys() == after.keys() and all(equal(before[key], after[key]) for key in before)
    return equal(step.before, step.after) and adam


def check_early_end(built, record, target):
    """Steps are taken up to the first minibatch that moved further, and none after it; returns
    their numbers."""
    taken = []
    per_rollout = EARLY["num_mini_batches"] * EARLY["num_ppo_epochs"]
    s = plain_settings(EARLY)
    for number, (step, log) in enumerate(zip(record.steps, built.state.log_history)):
        if number % per_rollout == 0:
            ended = False
            samples = plain_samples(built, record.rollouts[number // per_rollout], s)
            taken.append(0)
        if not ended:
            moved = plain_ppo.distance(
                plain_models(built, step.before), samples_of(step, samples), s
            )
            ended = moved > target
        else:
            assert not step.rows
        is_last = number % per_rollout == per_rollout - 1
        assert ("approx_kl" in log) == is_last
        if is_last:  # of eight completions, which are all
            assert len(samples) == 8
            moved = plain_ppo.distance(plain_models(built, step.after), samples, s)
            assert log["approx_kl"] == pytest.approx(moved, rel=1e-2, abs=1e-7)
        assert unchanged(step) == ended == bool(log["stopped_early"]) == (log["grad_norm"] == 0)
        taken[-1] += not ended
    return taken


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_grad_norm": 1.0},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    ],
    ids=["unclipped", "clipped", "accumulated"],
)
def test_target_kl_ends_the_updates_of_a_rollout(tmp_path, settings):
    # with these, no rollout ends at its first or after its last step
    chosen = {"learning_rate": 4e-3, "seed": 4}
    built, record = run(tmp_path, target_kl=0.015, **EARLY | chosen | settings)
    taken = check_early_end(built, record, 0.015)
    assert len(record.rollouts) == len(taken) == 3
    assert len(set(taken)) > 1 and all(1 < steps < 6 for steps in taken), taken
    assert built.state.global_step == len(record.steps) == EARLY["max_steps"]
    rates = logged(built, "learning_rate")
    assert rates == pytest.approx([4e-3 * (1 - step / 18) for step in range(18)])


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_skipped_steps_do_not_reach_the_gradient_scaler(tmp_path, max_grad_norm):
    """With fp16 it would otherwise fail at the next one: "unscale_() has already been called"."""
    built, record = build(
        tmp_path, target_kl=0.02, **EARLY | {"max_grad_norm": max_grad_norm, "max_steps": 6}
    )
    unscaled = []
    built.accelerator.unscale_gradients = lambda *args: unscaled.append(built.state.global_step)
    built.train()
    taken = [number for number, step in enumerate(record.steps) if not unchanged(step)]
    assert len(taken) < 6 and set(unscaled) == set(taken)


def test_target_kl_never_skips_the_first_step_of_a_rollout(tmp_path):
    built, record = run(tmp_path, target_kl=1e-9, **EARLY)
    assert check_early_end(built, record, 1e-9) == [1, 1, 1]


def test_huge_target_kl_changes_nothing(tmp_path):
    (_, one), (_, other) = (
        run(tmp_path, target_kl=target, **EARLY | {"max_steps": 6}) for target in (None, 1e9)
    )
    assert all(equal(ours.after, theirs.after) for ours, theirs in zip(one.steps, other.steps))


# ---- steered coefficients


def test_kl_target_steers_kl_coef_by_zieglers_rule(tmp_path):
    settings = {"kl_coef": 0.2, "kl_target": 0.5, "kl_horizon": 40, "max_steps": 12}
    built, record = run(tmp_path, **settings)
    s = plain_settings(settings)
    errors = []
    for used, kl in zip(logged(built, "kl_coef"), logged(built, "kl_per_completion"), strict=True):
        assert used == pytest.approx(s.kl_coef)
        errors.append(kl / 0.5 - 1)
        applied = s
        s = replace(s, kl_coef=plain_ppo.steer_kl_coef(s.kl_coef, kl, 8, s))
    assert min(errors) < -0.2 and max(errors) > 0.2, errors
    check_step(built, record, -1, applied)


def scores_or_none(completion_ids):
    rows = zip(completion_ids, varied_reward(completion_ids))
    return [None if ids[0] % 5 in (2, 3, 4) else score for ids, score in rows]


def test_kl_target_counts_truncated_completions(tmp_path):
    """They are not learned from, but they were sampled and are in the logged KL; skipped ones
    are not."""
    settings = {
        "kl_target": 0.85,
        "kl_horizon": 40,
        "kl_coef": 0.2,
        "max_completion_length": 5,
        "max_steps": 6,
        "seed": 3,
    }
    settings |= TRUNCATED | {"per_device_train_batch_size": 16}
    built, record = run(
        tmp_path, reward_funcs=[failing_reward], scores=scores_or_none, **settings, **SKIP
    )
    s = plain_settings(settings)
    telling = []
    kls = logged(built, "kl_per_completion")
    for rollout, used, kl in zip(record.rollouts, logged(built, "kl_coef"), kls, strict=True):
        assert used == pytest.approx(s.kl_coef, rel=1e-5)
        scored = [
            ids for ids, score in zip(rollout.completions, rollout.scores) if score is not None
        ]
        s = replace(s, kl_coef=plain_ppo.steer_kl_coef(s.kl_coef, kl, len(scored), s))
        if abs(kl / 0.85 - 1) < 0.2 and len(scored) < 16:
            telling.append(sum(ids[-1] != EOS for ids in scored))
    assert any(telling), (telling, kls)


# ---- one run after the other


@pytest.mark.parametrize(
    "saved", [6, 7, 8], ids=["between rollouts", "within one", "after its updates ended"]
)
def test_run_with_every_stateful_choice_resumes_bit_for_bit(tmp_path, saved):
    def begin(name):
        return build(
            tmp_path / name,
            kl_coef=0.2,
            kl_target=1.0,
            kl_horizon=40,
            entropy_coef=0.01,
            target_kl=0.02,
            num_ppo_epochs=3,
            max_steps=12,
            save_strategy="steps",
            save_steps=saved,
        )

    (whole, one), (again, other) = begin("whole"), begin("again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{saved}"))
    assert logged(whole, "stopped_early")[6:9] == [0, 1, 1]
    state = json.loads((tmp_path / "whole" / f"checkpoint-{saved}" / "ppo_state.json").read_text())
    assert state["run"]["kl_coef"] == pytest.approx(logged(whole, "kl_coef")[math.ceil(saved / 3)])
    assert state["run"]["kl_coef"] != 0.2
    resumed = one.steps[saved:]
    for ours, theirs in zip(resumed, other.steps, strict=True):
        assert equal(ours.after, theirs.after)
    timed = ("time/", "step_time", "tokens_per_second", "train_", "epoch")
    for logs in zip(whole.state.log_history, again.state.log_history, strict=True):
        kept = [
            {key: value for key, value in log.items() if not key.startswith(timed)} for log in logs
        ]
        assert kept[0] == kept[1]


@pytest.mark.parametrize("is_trainable", [True, False])
def test_given_adapter_is_start_and_reference(tmp_path, is_trainable):
    first, _ = run(tmp_path / "first")
    first.save_model()
    loaded = PeftModel.from_pretrained(base(), tmp_path / "first", is_trainable=is_trainable)
    second, record = run(tmp_path / "second", model=loaded, kl_coef=0.5)
    assert logged(second, "kl")[0] == logged(second, "kl_per_completion")[0] == 0
    assert logged(second, "kl")[1] != 0
    check_step(second, record, -1, plain_settings({"kl_coef": 0.5}))
    ids = torch.tensor([[4, 5, 6, 7]])
    ended = plain_models(first, trained(first.model))
    reference = plain_models(second, record.rollouts[0].weights)
    with torch.no_grad():
        logits = [
            model(input_ids=ids).logits
            for model in (ended.policy, reference.reference, reference.policy)
        ]
    torch.testing.assert_close(logits[1], logits[0])
    torch.testing.assert_close(logits[2], logits[0])
