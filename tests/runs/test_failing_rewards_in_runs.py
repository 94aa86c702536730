"""Runs with a failing judge: they stop with the cause and a usable checkpoint, or skip with
exact counts."""

import math
import time

import pytest
import torch
from http_rewards import judge, remote, serving
from runs_of_tiny import rollouts_of, trainer, weights
from tiny import SPECIAL, WORDS, length_reward, prompts, tokenizer
from transformers import TrainerCallback

from trl_ppo_ext import RewardError

WORDS_WITH_X = [*WORDS[:20], *(f"x{i}" for i in range(8))]


@pytest.fixture(scope="module")
def port():
    with serving() as (_, port):
        yield port


class BreaksAfter(TrainerCallback):
    """From some step on, the judge's address is that of a server that misbehaves."""

    def __init__(self, reward, port, mode, step):
        self.reward = reward
        self.address = f"http://127.0.0.1:{port}/{mode}/run"
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.reward.url = f"{self.address}/chat/completions"


SAVING = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, port):
    """Weights of a run whose judge does not fail."""
    built = trainer(
        tmp_path_factory.mktemp("whole"), reward_funcs=judge(port, "ok", timeout=10.0), **SAVING
    )
    built.train()
    return weights(built)


@pytest.mark.parametrize("mode, cause", [("silent", "timed out"), ("nan", "finite")])
def test_raise_names_the_judge_and_keeps_a_usable_checkpoint(tmp_path, port, whole, mode, cause):
    reward = judge(port, "ok", timeout=1.0, max_retries=1)
    broken = trainer(
        tmp_path, reward_funcs=reward, callbacks=[BreaksAfter(reward, port, mode, 4)], **SAVING
    )
    start = time.perf_counter()
    with pytest.raises(RewardError, match=f"`rubric`.*(?:{cause})"):
        broken.train()
    assert time.perf_counter() - start < 20
    assert broken.state.global_step == 4
    again = trainer(tmp_path / "again", reward_funcs=judge(port, "ok", timeout=10.0), **SAVING)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert all(torch.equal(weights(again)[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize("make", [judge, remote])
def test_skip_continues_with_exact_counts(tmp_path, port, make):
    reward = make(port, "broken_for_x", max_retries=0, timeout=10.0)
    built = trainer(
        tmp_path,
        reward_funcs=reward,
        processing_class=tokenizer(WORDS_WITH_X),
        reward_on_error="skip",
        max_reward_failures=1.0,
        max_steps=8,
    )
    rollouts = rollouts_of(built)
    built.train()
    assert built.state.global_step == 8
    first_x = len(SPECIAL) + 20
    failed = [
        sum(max(ids) >= first_x for ids in samples.batch.completion_ids) for _, samples in rollouts
    ]
    logged = [
        e[f"rewards/{reward.name}/failed"] for e in built.state.log_history if "reward_std" in e
    ]
    assert logged == failed and 0 < sum(failed) < 16


@pytest.mark.parametrize("metric", ["reward", "eval_rewards/reward/mean"])
def test_evaluation_whose_scores_all_fail_is_never_the_best(tmp_path, metric):
    def reward(completion_ids, trainer_state, split=None, **kwargs):
        if split and trainer_state.global_step != 4:
            raise ConnectionError("the judge is down")
        return [float(len(ids)) for ids in completion_ids]

    rows = prompts(4).add_column("split", ["eval"] * 4)
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": metric,
        "max_steps": 6,
    }
    settings |= {"save_strategy": "best", "reward_on_error": "skip"}
    built = trainer(tmp_path, reward_funcs=reward, eval_dataset=rows, **settings)
    built.train()
    name = f"eval_{metric.removeprefix('eval_')}"
    evaluated = [entry[name] for entry in built.state.log_history if name in entry]
    assert [math.isnan(x) for x in evaluated] == [True, False, True]
    assert built.state.best_global_step == 4


def test_too_many_failures_end_the_run_with_the_first_cause(tmp_path, port):
    reward = judge(port, "broken", timeout=10.0, max_retries=0)
    built = trainer(
        tmp_path, reward_funcs=[length_reward, reward], reward_on_error="skip", dataset=prompts(8)
    )
    with pytest.raises(
        RewardError, match=r"`rubric` failed for 8 of 8 completions, more than .*0.5.*CUDA"
    ):
        built.train()
