"""A checkpoint is not resumed with another model, tokenizer, reward or dataset, unless that is
allowed."""

import functools
import logging
import re
import shutil
from functools import partial

import pytest
import torch
from peft import LoraConfig
from runs_of_tiny import weights
from tiny import CHAT_TEMPLATE, WORDS, config, length_reward, llama, prompts, tokenizer
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import BitsAndBytesConfig, LlamaForTokenClassification

from trl_ppo_ext import PPOConfig, PPOTrainer, ProcessReward
from trl_ppo_ext.checkpoints.files import (
    CheckpointError,
    SettingsChange,
    _tokenizer_digest,
    digest_of_function,
    run_settings,
)
from trl_ppo_ext.checkpoints.resume import load_under_own_rates
from trl_ppo_ext.rewards.process import ProcessScorer

SAVING = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}


def brevity(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]


def lora(**changes):
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        | changes
    )


def trainer(folder, **changes):
    args = SAVING | {
        name: changes.pop(name) for name in changes.keys() & PPOConfig.__dataclass_fields__.keys()
    }
    usual = {
        "model": llama(),
        "reward_funcs": [length_reward, llama(classifier=True)],
        "train_dataset": prompts(),
        "processing_class": tokenizer(chat_template=CHAT_TEMPLATE),
        "reward_processing_classes": [None, tokenizer()],
        "peft_config": lora(),
    }
    return PPOTrainer(args=config(folder, **args), **usual | changes)


def mapped(**columns):
    return prompts().map(lambda row: columns)


def favors(weight):
    def curriculum(episodes, scores):
        return 1 + weight * scores

    return curriculum


def other_row(number, rows=1000):
    """A dataset of which one row differs, that a sample of all rows misses."""
    dataset = prompts(rows)
    return dataset.map(
        lambda row, index: {"target": 9 if index == number else row["target"]}, with_indices=True
    )


# by the name in the message: what differs
CHANGES = {
    "base weights": lambda: {"model": llama(seed=1)},
    "dtype": lambda: {"model": llama(dtype=torch.bfloat16)},
    "tokenizer": lambda: {"processing_class": tokenizer(WORDS[::-1], CHAT_TEMPLATE)},
    "chat_template": lambda: {"processing_class": tokenizer(chat_template="{{ messages }}")},
    "rewards": lambda: {"reward_funcs": [brevity, llama(classifier=True)]},
    "rewards of another model": lambda: {
        "reward_funcs": [length_reward, llama(classifier=True, seed=1)]
    },
    # their weights would be those of each other
    "rewards of another order": lambda: {
        "reward_funcs": [llama(classifier=True), length_reward],
        "reward_processing_classes": [tokenizer(), None],
    },
    "reward_processing_classes": lambda: {
        "reward_processing_classes": [None, tokenizer(chat_template=CHAT_TEMPLATE)]
    },
    "reward_processing_classes of other words": lambda: {
        "reward_processing_classes": [None, tokenizer(WORDS[::-1])]
    },
    "train_dataset": lambda: {"train_dataset": prompts(15)},
    "train_dataset of other rows": lambda: {"train_dataset": mapped(target=3)},
    "curriculum": lambda: {"curriculum": lambda episodes, scores: 1 + scores},
    "curriculum of other code": lambda: {"curriculum": favors(2.0)},
    "peft_config.lora_alpha": lambda: {"peft_config": lora(lora_alpha=16)},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer(folder).train()
    return folder


def test_same_inputs_resume_and_the_terminal_says_so(run, tmp_path, capsys):
    again = trainer(shutil.copytree(run, tmp_path / "run"))
    checkpoint = tmp_path / "run" / "checkpoint-1"
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == 2
    assert f"resumed: {checkpoint}, after step 1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize("change", CHANGES)
def test_changed_input_is_refused_by_name(run, change):
    with pytest.raises(
        CheckpointError,
        match=rf"{change.partition(' of ')[0]} \(was .*resume_with_changed_settings",
    ):
        trainer(run, **CHANGES[change]()).train(resume_from_checkpoint=True)


def test_checkpoint_of_an_earlier_version_is_compared_by_what_it_has():
    """It had rewards by name, and nothing of their tokenizers."""
    current = run_settings(PPOConfig("unused", use_cpu=True)) | {
        "rewards": [["long", "1"], ["short", "2"]],
        "reward_processing_classes": [None, "3"],
    }
    before = {name: x for name, x in current.items() if name != "reward_processing_classes"}
    same = SettingsChange.between(before | {"rewards": {"long": "1", "short": "2"}}, current)
    assert not same.listed
    swapped = SettingsChange.between(before | {"rewards": {"short": "2", "long": "1"}}, current)
    assert swapped.refused == {"rewards"}


def test_tokenizer_and_steps_of_a_process_reward_are_compared():
    model = LlamaForTokenClassification(llama(classifier=True).config)
    digests = {
        _tokenizer_digest(ProcessScorer(ProcessReward("prm", *steps), model, words, words))
        for steps in (["a"], ["b"], ["a", "b"])
        for words in (tokenizer(), tokenizer(WORDS[::-1]))
    }
    assert len(digests) == 6


def test_changed_input_is_allowed_by_a_setting(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    changes = {
        "model": llama(seed=1),
        "train_dataset": prompts(15),
        "curriculum": lambda episodes, scores: 1 + episodes,
    }
    again = trainer(copy, resume_with_changed_settings=True, **changes)
    again.train(resume_from_checkpoint=str(copy / "checkpoint-1"))
    assert again.state.global_step == 2


def test_scores_of_another_scale_begin_anew(tmp_path):
    """Deviations of the earlier rewards would silence those that are a thousandth as large."""
    first = {"reward_weights": [1000.0, 0.0], "max_steps": 2}
    trainer(tmp_path, **first).train()
    again = trainer(
        tmp_path,
        reward_weights=[1.0, 0.0],
        max_steps=4,
        resume_with_changed_settings=True,
    )
    again.train(resume_from_checkpoint=True)
    state = again.run_state
    assert 0 < max(state.spreads) < 100 and state.critic.returns.unit < 100


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.05), (0.05, 0.5)])
def test_changed_kl_coef_takes_the_place_of_an_adapted_one(tmp_path, before, after):
    saving = {"save_strategy": "steps", "save_steps": 4, "resume_with_changed_settings": True}
    target = {"kl_target": 0.5} if before else {}
    trainer(tmp_path, kl_coef=before, max_steps=4, **target, **saving).train()
    resumed = trainer(tmp_path, kl_coef=after, kl_target=0.5, max_steps=6, **saving)
    resumed.train(resume_from_checkpoint=True)
    logged = [entry["kl_coef"] for entry in resumed.state.log_history if "kl_coef" in entry]
    assert logged[-1] == pytest.approx(after)


@pytest.mark.parametrize("rates", [(None, 1e-2), (1e-2, None)], ids=str)
@pytest.mark.parametrize("critic", ["head", "adapter"])
def test_own_rate_of_a_critic_may_be_set_or_removed(tmp_path, critic, rates):
    first, second = ({} if rate is None else {"critic_learning_rate": rate} for rate in rates)
    constant = {"critic": critic, "lr_scheduler_type": "constant"}
    trainer(tmp_path, **constant, **first).train()
    again = trainer(tmp_path, **constant, **second, max_steps=3)
    again.train(resume_from_checkpoint=True)
    own = {id(x) for x in again.actor_critic.critic_parameters().values()}
    found = {
        (id(x) in own, group["lr"])
        for group in again.optimizer.param_groups
        for x in group["params"]
    }
    assert found == {(False, 1e-3), (True, rates[1] or 1e-3)}


def test_state_of_another_optimizer_begins_anew(run, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    again = trainer(tmp_path, optim="adafactor", max_steps=4, resume_with_changed_settings=True)
    again.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert "`optim` is another one: its state begins anew" in caplog.text
    rates = [row["learning_rate"] for row in again.state.log_history if "learning_rate" in row]
    assert rates[-1] == pytest.approx(2.5e-4)  # of step 4, as in a run of one optimizer


@pytest.mark.parametrize(
    ("changes", "listed", "rates"),
    [
        ({"max_steps": 4}, r"max_steps \(was 2, is 4\)", [7.5e-4, 5e-4, 2.5e-4]),
        ({"learning_rate": 1e-4}, r"learning_rate \(was 0.001, is 0.0001\)", [5e-5]),
        (
            {"lr_scheduler_type": "constant", "weight_decay": 0.1},
            r"lr_scheduler_type \(.*, weight_decay \(",
            [1e-3],
        ),
        ({"critic_learning_rate": 1e-2}, r"critic_learning_rate \(was None, is 0.01\)", [5e-4]),
    ],
    ids=str,
)
def test_changed_rates_and_length_continue_the_run(
    run, tmp_path, caplog, monkeypatch, changes, listed, rates
):
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    again = trainer(tmp_path, **changes)
    again.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert re.search(rf"The run resumes under other settings: {listed}", caplog.text)
    assert [
        log["learning_rate"]
        for log in again.state.log_history
        if log.get("step", 0) > 1 and "loss" in log
    ] == rates
    groups = again.optimizer.param_groups
    assert groups[0]["weight_decay"] == changes.get("weight_decay", 0.0)
    assert groups[-1]["initial_lr"] == changes.get("critic_learning_rate", 1e-3)


def constant(completion_ids, **kwargs):
    return [1.0] * len(completion_ids)


CONSTANT = {"reward_funcs": constant, "reward_processing_classes": None}
# the rate is halved after every evaluation but the first
PLATEAU = CONSTANT | {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0},
    "metric_for_best_model": "eval_reward",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "eval_dataset": prompts(2),
}


@pytest.fixture(scope="module")
def on_plateau(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("on_plateau")
    built = trainer(folder, **PLATEAU)
    built.train()
    assert rates_of(built) == [1e-3, 1e-3]
    assert built.optimizer.param_groups[0]["lr"] == 5e-4
    return folder


def rates_of(built, after=0):
    """Rates of the policy in the steps after one."""
    return [
        log["learning_rate"]
        for log in built.state.log_history
        if "learning_rate" in log and log["step"] > after
    ]


@pytest.mark.parametrize(
    ("changes", "listed", "rates"),
    [
        ({}, "", [5e-4, 2.5e-4]),
        ({"learning_rate": 1e-4}, r"learning_rate \(was 0.001, is 0.0001\)", [5e-5, 2.5e-5]),
        ({"critic_learning_rate": 1e-2}, r"critic_learning_rate \(", [5e-4, 2.5e-4]),
        (
            {"lr_scheduler_kwargs": {"factor": 0.1, "patience": 0}},
            r"lr_scheduler_kwargs \(",
            [5e-4, 5e-5],
        ),
        # what is best counts anew
        ({"greater_is_better": False}, r"greater_is_better \(", [5e-4, 5e-4]),
    ],
    ids=str,
)
def test_plateau_schedule_goes_on_under_changed_rates(
    on_plateau, tmp_path, caplog, monkeypatch, changes, listed, rates
):
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    again = trainer(tmp_path, **PLATEAU | {"max_steps": 4} | changes)
    again.train(resume_from_checkpoint=str(on_plateau / "checkpoint-2"))
    assert re.search(rf"The run resumes under other settings: {listed}", caplog.text)
    assert rates_of(again, after=2) == pytest.approx(rates)
    critic = again.optimizer.param_groups[-1]
    first = changes.get("critic_learning_rate", 1e-3)
    assert critic["initial_lr"] == first
    assert critic["lr"] / first == pytest.approx(
        again.optimizer.param_groups[0]["lr"] / again.args.learning_rate
    )


@pytest.mark.parametrize("rate, factor", [(5e-5, 0.5), (5e-5, 0.95), (3e-4, 0.1)])
def test_plateau_schedule_resumes_the_very_rates(rate, factor):
    def build():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
        optimizer.param_groups[0]["initial_lr"] = rate
        return optimizer, ReduceLROnPlateau(optimizer, factor=factor, patience=0)

    def load(*loaded):
        for own, saved in zip(loaded, (optimizer, schedule)):
            own.load_state_dict(saved.state_dict())

    optimizer, schedule = build()
    for _ in range(8):
        schedule.step(1.0)
        resumed = build()
        load_under_own_rates(*resumed, partial(load, *resumed))
        assert resumed[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("plateau_comes", ["first", "second"])
def test_plateau_schedule_and_one_of_steps_are_not_exchanged(
    run, on_plateau, tmp_path, plateau_comes
):
    if plateau_comes == "first":
        checkpoint = on_plateau / "checkpoint-2"
        settings = CONSTANT
    else:
        checkpoint = run / "checkpoint-1"
        settings = PLATEAU
    again = trainer(tmp_path, resume_with_changed_settings=True, **settings)
    with pytest.raises(CheckpointError, match=r"lr_scheduler_type \(was .*Restore them\."):
        again.train(resume_from_checkpoint=str(checkpoint))


def test_changed_timeout_continues_the_run(run, tmp_path):
    again = trainer(tmp_path, environment_timeout=60.0)
    again.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert again.state.global_step == 2


def test_changed_logging_takes_effect(run, tmp_path):
    again = trainer(tmp_path, max_steps=5, logging_steps=4)
    again.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert [log["step"] for log in again.state.log_history if "loss" in log] == [1, 4]


def test_minibatches_may_be_cut_otherwise(run, tmp_path):
    """Within a rollout; the weights differ by rounding."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = trainer(tmp_path / "whole")
    again = trainer(tmp_path / "again", **sizes)
    for built in (whole, again):
        built.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    torch.testing.assert_close(weights(again), weights(whole), rtol=0, atol=1e-6)
    with pytest.raises(CheckpointError, match=r"per_device_train_batch_size \(was 4, is 2\)"):
        other = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
        trainer(tmp_path / "other", **other).train(resume_from_checkpoint=str(run / "checkpoint-1"))


OTHERS = {
    "weight": lambda: favors(2.0),
    "code": lambda: lambda episodes, scores: 1 + scores**2,
    "constant": lambda: lambda episodes, scores: 2 + scores,
    "argument": lambda: partial(weighed, weight=2.0),
}
SAVED = {
    "argument": lambda: partial(weighed, weight=1.0),
    "weight": lambda: favors(1),
}


def weighed(episodes, scores, weight):
    return 1 + weight * scores


@pytest.mark.parametrize("change", OTHERS)
def test_curriculum_of_another_code_is_refused(tmp_path, change):
    saved = SAVED.get(change, lambda: lambda episodes, scores: 1 + scores)
    trainer(tmp_path, curriculum=saved(), max_steps=1).train()
    with pytest.raises(CheckpointError, match=r"curriculum \(was '.* \(\w+\)', is '.* \(\w+\)'\)"):
        trainer(tmp_path, curriculum=OTHERS[change](), max_steps=1).train(
            resume_from_checkpoint=True
        )
    trainer(tmp_path, curriculum=saved(), max_steps=1).train(
        resume_from_checkpoint=True
    )  # the same code, defined anew


def test_curriculum_notices_one_row_of_many(tmp_path):
    trainer(tmp_path, curriculum=favors(1.0), max_steps=1, train_dataset=prompts(1000)).train()
    with pytest.raises(CheckpointError, match=r"rows of the curriculum \(was '1000 rows"):
        again = trainer(tmp_path, curriculum=favors(1.0), max_steps=1, train_dataset=other_row(501))
        again.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("change", [None, "function", "rows"])
def test_scores_of_a_curriculum_are_those_of_its_rows(tmp_path, change):
    seen = []

    def watched(episodes, scores):
        seen.append(episodes.sum().item())
        return 1 + scores

    before = favors(1.0) if change == "function" else watched
    trainer(tmp_path, curriculum=before, max_steps=1).train()
    seen.clear()
    changes = {"curriculum": watched, "max_steps": 5}
    if change is not None:
        changes["resume_with_changed_settings"] = True
    if change == "rows":
        changes["train_dataset"] = prompts().select(range(15, -1, -1))
    again = trainer(tmp_path, **changes)
    again.train(resume_from_checkpoint=True)
    # an unfinished rollout of the other settings is replaced at once
    assert seen[0] == (0 if change == "rows" else 8)


def test_curriculum_that_is_added_changes_no_rows(tmp_path):
    trainer(tmp_path, max_steps=1, train_dataset=prompts(200)).train()
    again = trainer(tmp_path, max_steps=1, train_dataset=prompts(200), curriculum=favors(1.0))
    with pytest.raises(CheckpointError) as caught:
        again.train(resume_from_checkpoint=True)
    assert "train_dataset" not in str(caught.value) and "curriculum (was None" in str(caught.value)


class WithSlots:
    __slots__ = ("weight",)

    def __call__(self, episodes, scores):
        return 1 + scores


class Counts:
    """Its attributes change while it is used."""

    def __init__(self):
        self.seen = {(1, 2): 3}
        self.calls = 0

    def __call__(self, episodes, scores):
        self.calls += 1
        return 1 + scores

    def method(self, episodes, scores):
        return 1 + scores


def late_cell():
    def curriculum(episodes, scores):
        return scores + weight

    digest = digest_of_function(curriculum)
    weight = 1.0
    return digest


def decorated(weight):
    return functools.wraps(favors(1.0))(favors(weight))


HELD = {
    "wraps": (decorated(1.0), decorated(2.0)),
    "partial of a function": (partial(max, key=favors(1.0)), partial(max, key=favors(2.0))),
    "constant set": (lambda e, s: s in {"a", "b"}, lambda e, s: s in {"c", "d"}),
    "nested": (lambda e, s: [x for x in s if x > 1], lambda e, s: [x for x in s if x > 2]),
}


@pytest.mark.parametrize("kind", HELD)
def test_digest_of_a_function_tells_what_it_holds(kind):
    one, other = (digest_of_function(function) for function in HELD[kind])
    assert one != other
    assert one == digest_of_function(HELD[kind][0])


def test_digest_of_a_function_is_that_of_any_callable():
    counts = Counts()
    before = digest_of_function(counts)
    counts(torch.zeros(1), torch.zeros(1))
    assert digest_of_function(counts) == before
    for function in (WithSlots(), counts.method, max, late_cell):
        assert digest_of_function(function)
    assert late_cell()


def test_changed_quantization_is_refused_by_name(run, tmp_path):
    llama().save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with pytest.raises(CheckpointError, match=r"quantization_config \(was None, is .*nf4"):
        trainer(run, model=str(tmp_path), quantization_config=nf4).train(
            resume_from_checkpoint=True
        )


WITHIN = {
    "max_steps": 8,
    "save_steps": 2,
    "save_strategy": "steps",
    "learning_rate": 0.0,
    "num_ppo_epochs": 2,
}


@pytest.mark.parametrize(
    "changes, drops",
    [
        ({"temperature": 0.25}, True),
        ({"gamma": 0.9}, True),
        ({"max_completion_length": 6}, True),
        ({"cast_lm_head_to_fp32": True}, True),
        ({"max_steps": 12}, False),
        ({}, False),
    ],
    ids=str,
)
def test_unfinished_rollout_of_other_settings_is_dropped(
    tmp_path, changes, drops, caplog, monkeypatch
):
    """Its log-probs are those of the earlier settings: at a rate of 0, later ratios would not be
    1."""
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    first = trainer(tmp_path, **WITHIN | {"logging_steps": 1})
    first.train()
    settings = WITHIN | {"logging_steps": 1, "resume_with_changed_settings": True} | changes
    again = trainer(
        shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-again"), **settings
    )
    collected = []
    collect = again._collect
    monkeypatch.setattr(
        again, "_collect", lambda rows: (collected.append(again.state.global_step), collect(rows))
    )
    again.train(
        resume_from_checkpoint=str(tmp_path.parent / f"{tmp_path.name}-again" / "checkpoint-2")
    )
    assert collected[0] == (2 if drops else 4) and 4 in collected  # rollouts stay where they were
    assert ("unfinished rollout is of the earlier settings" in caplog.text) == drops
    ratios = [
        row["ratio/max"]
        for row in again.state.log_history
        if "ratio/max" in row and row["step"] > 2
    ]
    assert ratios and max(ratios) == pytest.approx(1, abs=1e-4)
