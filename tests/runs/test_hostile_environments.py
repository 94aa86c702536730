"""Environments and tools that fail in every way: each is counted and named, and none ends the
run."""

import asyncio
import json
import random
import time

import pytest
import torch
from runs_of_tiny import rollouts_of, weights
from scripted import call, write_turns
from tiny import byte_tokenizer, config, llama, prompts, tokenizer

from trl_ppo_ext import PPOTrainer, RewardError, StepResult
from trl_ppo_ext.rewards import scoring

TIMEOUT = 0.5


def raises(error):
    raise error


def failures_of(run, monkeypatch):
    """Errors of each batch that a run scores, by the row's column `how`."""
    seen = []
    collect = scoring.collect_scores

    def collected(rewards, batch):
        results = collect(rewards, batch)
        seen.append(
            {
                batch.columns["how"][row]: str(e)
                for scores in results
                for row, e in scores.failures.items()
            }
        )
        return results

    monkeypatch.setattr(scoring, "collect_scores", collected)
    before = weights(run)
    run.train()
    after = weights(run)
    assert all(x.isfinite().all() for x in after.values())
    assert any(not torch.equal(x, before[name]) for name, x in after.items())
    return seen


def check(failures, expected):
    """Compare the errors of a batch with the beginnings, or parts, of messages."""
    assert failures.keys() == {how for how, part in expected.items() if part is not None}
    assert not {how: message for how, message in failures.items() if expected[how] not in message}


# ---- plain environments ----

# what the environment does, and a part of the error if there is one
PLAIN = {
    "reset raises": "RuntimeError: no reset",
    "reset returns a number": "`reset` must return text, messages or None, got int",
    "reset returns 10 MB": "`reset` returned 10000000 characters",
    "reset returns messages of numbers": "failed with",
    "reset hangs": "no result within environment_timeout=0.5 s",
    "reset changes its row": None,
    "raises": "ZeroDivisionError: division by zero",
    "returns None": "must return (observation, reward, done), or Gymnasium's",
    "returns bytes": "`step` must return an observation that is text, got bytes",
    "returns no observation": "`step` must return an observation that is text, got NoneType",
    "returns 10 MB": None,
    "returns half an emoji": None,
    "rewards NaN": "returned nan for completion",
    "rewards too much": "at most 1e+09 in size",
    "rewards text": "The reward of a turn must be a number, got 'much'",
    "rewards None": "The reward of a turn must be a number, got None; use 0.0 for none",
    "hangs": "no result within environment_timeout=0.5 s",
    "exits": "SystemExit",
    "interrupts": "KeyboardInterrupt",
    "stops an iteration": "StopIteration",
    "is cancelled": "CancelledError",
    "changes its answers": None,
    "works": None,
}


class Hostile:
    """Environment that does what its row says."""

    def reset(self, row, seed):
        self.how = row["how"]
        starts = {
            "reset raises": lambda: raises(RuntimeError("no reset")),
            "reset returns a number": lambda: 5,
            "reset returns 10 MB": lambda: "w1 " * 3_333_333 + "w",
            "reset returns messages of numbers": lambda: [1, 2],
            "reset hangs": lambda: time.sleep(5),
            "reset changes its row": row.clear,
        }
        return starts.get(self.how, lambda: " w1")()

    def step(self, text):
        steps = {
            "raises": lambda: 1 / 0,
            "returns None": lambda: None,
            "returns bytes": lambda: (b"w1", 1.0, False),
            "returns no observation": lambda: (None, 1.0, False),
            "returns 10 MB": lambda: ("w1 " * 3_333_333, 1.0, False),
            "returns half an emoji": lambda: ("\ud83d", 1.0, False),
            "rewards NaN": lambda: ("w1", float("nan"), False),
            "rewards too much": lambda: ("w1", 1e30, True),
            "rewards text": lambda: ("w1", "much", False),
            "rewards None": lambda: ("w1", None, False),
            "hangs": lambda: time.sleep(5),
            "exits": exit,
            "interrupts": lambda: raises(KeyboardInterrupt),
            "stops an iteration": lambda: next(iter([])),
            "is cancelled": lambda: raises(asyncio.CancelledError),
            "changes its answers": lambda: (
                f" w{random.randrange(9)}",
                random.random(),
                random.random() < 0.5,
            ),
        }
        return steps.get(self.how, lambda: ("w1", float(len(text)), True))()


def test_hostile_plain_environments_are_counted_and_skipped(tmp_path, monkeypatch):
    rows = [row | {"how": how} for row, how in zip(prompts(len(PLAIN)).to_list(), PLAIN)]
    settings = {
        "per_device_train_batch_size": len(PLAIN),
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "max_steps": 2,
    }
    failing = {
        "reward_on_error": "skip",
        "environment_timeout": TIMEOUT,
        "max_reward_failures": 1.0,
    }
    run = PPOTrainer(
        llama(),
        args=config(
            tmp_path,
            stop_token_ids=list(range(16, 32)),
            max_completion_length=16,
            **settings | failing,
        ),
        train_dataset=rows,
        processing_class=tokenizer(),
        environment_factory=Hostile,
    )
    first, second = failures_of(run, monkeypatch)
    check(first, PLAIN)
    check(second, PLAIN)
    logs = [entry for entry in run.state.log_history if "rewards/Hostile/failed" in entry]
    assert [entry["rewards/Hostile/failed"] for entry in logs] == [len(first), len(second)]
    # NaN and too much are scores
    assert [entry["episodes/failed"] for entry in logs] == [len(first) - 2] * 2
    assert all(row["prompt"] for row in run.train_dataset)


class Fragile:
    """Environment whose `reset` fails for one row, before it has what a reward function reads."""

    def reset(self, row, seed):
        if row["target"] == 3:
            raise OSError("connection lost")
        self.total = row["target"]

    def step(self, text):
        return "", 0.0, True


def total(environments, log_extra, **kwargs):
    log_extra("total", [environment.total for environment in environments])
    return [float(environment.total) for environment in environments]


async def total_later(environments, **kwargs):
    return [float(environment.total) for environment in environments]


def fragile_run(output_dir, reward, **settings):
    sizes = {"per_device_train_batch_size": 7, "num_mini_batches": 1, "max_steps": 1}
    return PPOTrainer(
        llama(),
        reward,
        args=config(output_dir, **sizes | settings),
        train_dataset=prompts(7),
        processing_class=tokenizer(),
        environment_factory=Fragile,
    )


@pytest.mark.parametrize("reward", [total, total_later])
def test_reward_functions_get_the_episodes_that_did_not_fail(tmp_path, reward):
    run = fragile_run(tmp_path, reward, reward_on_error="skip")
    [(_, samples)] = (rollouts_of(run), run.train())[0]
    targets = [episode.columns["target"] for episode in samples.batch.episodes]
    scored = samples.scored
    assert sorted(targets) == list(range(7))
    assert scored.usable.tolist() == [target != 3 for target in targets]
    assert scored.totals.tolist() == [0.0 if target == 3 else target for target in targets]
    assert not scored.failed[:, 0].any()
    if reward is total:
        expected = [None if target == 3 else target for target in targets]
        assert samples.extra["total"] == expected


def test_environment_alone_takes_an_empty_list_of_weights(tmp_path):
    rows = prompts(7).filter(lambda row: row["target"] != 3)
    sizes = {"per_device_train_batch_size": 6, "num_mini_batches": 1, "max_steps": 1}
    run = PPOTrainer(
        llama(),
        args=config(tmp_path, reward_weights=[], **sizes),
        train_dataset=rows,
        processing_class=tokenizer(),
        environment_factory=Fragile,
    )
    run.train()
    assert run.components.reward_weights == [1.0]


def test_error_of_an_environment_is_not_hidden_by_that_of_a_reward_function(tmp_path):
    with pytest.raises(RewardError, match="`Fragile` failed with OSError: connection lost"):
        fragile_run(tmp_path, total).train()


# ---- environments with tools ----

TOOLS = {
    "is unknown": (call("gone"), None, "Tool gone not found."),
    "is called with a list": (
        call("act").replace("{}", "[1]"),
        None,
        "must be a mapping, not list",
    ),
    "is called without arguments": (
        call("act"),
        None,
        "missing 1 required positional argument: 'how'",
    ),
    "is called with half an emoji": (call("act", how="\ud83d"), None, "'?'"),
    "raises": (call("act", how="raises"), None, "division by zero"),
    "exits": (call("act", how="exits"), None, "SystemExit"),
    "stops an iteration": (call("act", how="stops"), None, "StopIteration"),
    "returns bytes": (call("act", how="bytes"), None, "b'\\xff'"),
    "returns 10 MB": (call("act", how="flood"), None, None),
    "hangs": (call("act", how="hangs"), "no result within environment_timeout=0.5 s", None),
    "rewards NaN": (call("act", how="nan"), "returned nan for completion", "x"),
    "rewards text": (call("act", how="text"), "reward of a turn must be a number", None),
    "reward raises": ("no", "ZeroDivisionError: division by zero", None),
    "reward exits": ("no", "SystemExit", None),
    "reward hangs": ("no", "no result within environment_timeout=0.5 s", None),
    "reward is NaN": ("no", "returned nan for completion", None),
    "reward is text": ("no", "returned 'much' for completion", None),
    "reward is None": ("no", None, None),
    "works": (call("act", how="works"), None, "'works'"),
}


class HostileTools:
    """Environment whose tool and reward do what the policy and the row say."""

    def reset(self, how, **row):
        self.how = how
        row.clear()

    def act(self, how: str) -> str:
        """
        Act.

        Args:
            how: A way.
        """
        ways = {
            "raises": lambda: 1 / 0,
            "exits": exit,
            "stops": lambda: next(iter([])),
            "bytes": lambda: b"\xff",
            "flood": lambda: "x" * 10_000_000,
            "hangs": lambda: time.sleep(5),
            "nan": lambda: StepResult("x", reward=float("nan")),
            "text": lambda: StepResult("x", reward="much"),
        }
        return ways.get(how, lambda: f"'{how}'")()

    def get_reward(self):
        rewards = {
            "reward raises": lambda: 1 / 0,
            "reward exits": exit,
            "reward hangs": lambda: time.sleep(5),
            "reward is NaN": lambda: float("nan"),
            "reward is text": lambda: "much",
            "reward is None": lambda: None,
        }
        return rewards.get(self.how, lambda: random.random())()


def test_hostile_tools_are_read_by_the_policy_or_counted(tmp_path, monkeypatch):
    rows = [
        {"prompt": [{"role": "user", "content": f"Q{n:02}"}], "how": how}
        for n, how in enumerate(TOOLS)
    ]
    settings = {
        "max_completion_length": 400,
        "per_device_train_batch_size": len(TOOLS),
        "num_mini_batches": 1,
    }
    failing = {
        "reward_on_error": "skip",
        "environment_timeout": TIMEOUT,
        "max_reward_failures": 1.0,
    }
    run = PPOTrainer(
        llama(vocab_size=259, max_position_embeddings=2048),
        args=config(
            tmp_path,
            max_steps=1,
            num_ppo_epochs=1,
            log_completions=True,
            shuffle_dataset=False,
            **settings | failing,
        ),
        train_dataset=rows,
        processing_class=byte_tokenizer(),
        environment_factory=HostileTools,
    )
    turns = {f"Q{n:02}": [turn, "done"] for n, (turn, _, _) in enumerate(TOOLS.values())}
    write_turns(run, turns)
    rollouts = rollouts_of(run)
    [failures] = failures_of(run, monkeypatch)
    check(failures, {how: failure for how, (_, failure, _) in TOOLS.items()})
    answers = {}
    for episode, how in zip(rollouts[0][1].batch.episodes, TOOLS):
        answers[how] = [
            message["content"] for message in episode.messages if message["role"] == "tool"
        ]
    for how, (_, _, part) in TOOLS.items():
        assert [part in answer for answer in answers[how]] == (
            [True] if part is not None else []
        ), how
    logs = run.state.log_history[0]
    assert logs["rewards/HostileTools/failed"] == len(failures)
    assert logs["tools/failure_frequency"] == pytest.approx(6 / 11)
    assert json.loads((tmp_path / "run_log.jsonl").read_text().splitlines()[0])
