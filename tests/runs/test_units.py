"""Units of values, advantages and rewards so far over whole runs: no scale of the rewards is
left in a run."""

from dataclasses import replace

import pytest
import torch
from runs_of_tiny import rollouts_of, trainer, weights

from trl_ppo_ext import ppo_math
from trl_ppo_ext.checkpoints.files import CheckpointError
from trl_ppo_ext.modeling.critics import Units, rewards_so_far
from trl_ppo_ext.ppo.rollouts import score_tokens

SIDE = {"critic": "side", "normalize_values": True, "whiten_advantages": False}


def reward_per_token(completion_ids, **kwargs):
    return [[float(token % 3) for token in ids] for ids in completion_ids]


def letters(scale, shift):
    def reward(completion_ids, **kwargs):
        return [scale * sum(token % 2 for token in ids) + shift for ids in completion_ids]

    return reward


def relative_distance(plain, other):
    """Distance of two policies, relative to how far the first one has moved."""
    policy = [name for name in plain if "default" in name]
    moved = sum((plain[name] ** 2).sum() for name in policy).sqrt()
    return sum(((plain[name] - other[name]) ** 2).sum() for name in policy).sqrt() / moved


@pytest.mark.parametrize("critic, whiten", [("head", True), ("side", False), ("adapter", False)])
def test_run_does_not_depend_on_scale_and_shift_of_the_rewards(tmp_path, critic, whiten):
    settings = SIDE | {"critic": critic, "critic_backprop": critic == "adapter", "kl_coef": 0.0}
    settings["whiten_advantages"] = whiten
    runs = []
    for name, numbers in (("plain", (1, 0)), ("shifted", (1, 50)), ("scaled", (100, 0))):
        run = trainer(tmp_path / name, reward_funcs=letters(*numbers), max_steps=12, **settings)
        run.train()
        runs.append(run)
    plain, *others = map(weights, runs)
    logs = [[x["loss/value"] for x in run.state.log_history if "reward" in x] for run in runs]
    assert any(logs[0]) and all(log == pytest.approx(logs[0], abs=1e-3) for log in logs)
    assert all(relative_distance(plain, other) < 0.01 for other in others)


@pytest.mark.parametrize("placement, whiten", [("reward", False), ("loss", False), ("both", True)])
def test_kl_penalty_is_in_units_of_the_reward(tmp_path, placement, whiten):
    """Rewards and penalty times 100 give the same policy wherever the penalty enters."""
    settings = SIDE | {
        "kl_placement": placement,
        "kl_estimator": "k2" if placement == "loss" else "exact",
    }
    settings |= {"whiten_advantages": whiten, "max_steps": 12}
    runs = []
    for scale in (1, 100):
        run = {"reward_funcs": letters(scale, 0), "kl_coef": 0.3 * scale}
        runs.append(trainer(tmp_path / str(scale), **run, **settings))
        runs[-1].train()
    assert relative_distance(*map(weights, runs)) < 0.01


def test_kl_in_the_loss_has_the_unit_of_whitened_rewards(tmp_path, monkeypatch):
    units = []
    whiten = ppo_math.whiten

    def recorded(x, mask, *given, **kwargs):
        units.append(x[mask].std().item())
        return whiten(x, mask, *given, **kwargs)

    monkeypatch.setattr(ppo_math, "whiten", recorded)
    settings = {
        "kl_placement": "both",
        "kl_estimator": "exact",
        "kl_coef": 0.3,
        "whiten_rewards": True,
    }
    settings |= {
        "normalize_values": False,
        "whiten_advantages": False,
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
    }
    run = trainer(tmp_path, reward_funcs=letters(9, 0), max_steps=1, **settings)
    rollouts = rollouts_of(run)
    run.train()
    assert units[0] > 1.5
    assert rollouts[0][0].kl_coef == pytest.approx(0.3 / units[0], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "critic": "none",
            "advantage_estimator": "rebn",
            "kl_placement": "loss",
            "kl_estimator": "k2",
        },
        {
            "whiten_rewards": True,
            "kl_placement": "both",
            "kl_estimator": "exact",
            "normalize_values": False,
        },
    ],
    ids=["advantages", "rewards"],
)
@pytest.mark.parametrize("score", [0.0, 3.0])
def test_kl_in_the_loss_keeps_its_weight_with_equal_scores(tmp_path, settings, score):
    """There is nothing to whiten."""
    settings = {
        "whiten_advantages": settings["kl_placement"] == "loss",
        "max_steps": 1,
        "kl_coef": 0.3,
    } | settings
    settings |= {"num_ppo_epochs": 1, "num_mini_batches": 1, "max_completion_length": 1}
    run = trainer(
        tmp_path, reward_funcs=lambda completions, **kwargs: [score] * len(completions), **settings
    )
    rollouts = rollouts_of(run)
    run.train()
    assert rollouts[0][0].kl_coef == pytest.approx(0.3, rel=1e-6)


def test_advantages_do_not_grow_when_returns_no_longer_vary(tmp_path):
    """The unit of the returns then goes to 0, and faster than the critic's errors."""
    calls = []

    def solved(completion_ids, **kwargs):
        calls.append(None)
        return [sum(ids) % 7 if len(calls) <= 3 else 6.0 for ids in completion_ids]

    run = trainer(
        tmp_path, reward_funcs=solved, max_steps=128, learning_rate=1e-3, kl_coef=0.0, **SIDE
    )
    rollouts = rollouts_of(run)
    run.train()
    squares = [
        (rollout.advantages[rollout.response_mask] ** 2).mean().item() for rollout, _ in rollouts
    ]
    # those of a rollout are at most its returns' spread, of which the running variance has at least
    # a fifth
    assert len(squares) == 32 and max(squares) < 5 and max(squares[10:]) < 1


# ---- rewards so far


def test_updates_read_the_rewards_so_far_of_the_rollout(tmp_path):
    run = trainer(tmp_path, reward_funcs=reward_per_token, max_steps=8, **SIDE)
    start = run.updates.start
    differences = []

    def score_again(rollout, step):
        without = replace(rollout.sequences, observed=None)
        again, blind = (
            score_tokens(run.components, x).values for x in (rollout.sequences, without)
        )
        differences.append([float((x - rollout.old_values).abs().max()) for x in (again, blind)])
        start(rollout, step)

    run.updates.start = score_again
    run.train()
    assert [same < 1e-4 < other for same, other in differences[1:]] == [True] * (
        len(differences) - 1
    ), differences


def test_units_of_rewards_so_far_are_those_of_earlier_rollouts(tmp_path):
    run = trainer(tmp_path, reward_funcs=reward_per_token, max_steps=8, **SIDE)
    rollouts = rollouts_of(run)
    run.train()
    (first, first_samples), (second, second_samples) = rollouts[:2]
    assert not first.sequences.observed.any() and second.sequences.observed.any()
    earlier = first_samples.scored.tokens[first.response_mask]
    units = Units(earlier.mean().item(), earlier.std(correction=0).item())
    expected = rewards_so_far(
        second_samples.scored.tokens, second.response_mask, units, is_known=True
    )
    torch.testing.assert_close(second.sequences.observed, expected, rtol=1e-4, atol=1e-5)


def test_value_after_a_limit_reads_rewards_in_the_same_units(tmp_path, monkeypatch):
    """A rollout reads one state, before it and after its cuts."""
    from trl_ppo_ext.modeling import critics

    settings = SIDE | {"bootstrap_truncated": True, "max_completion_length": 4}
    steps = {"max_steps": 2, "num_mini_batches": 1, "num_ppo_epochs": 1}
    run = trainer(tmp_path, reward_funcs=reward_per_token, **settings, **steps)
    units = []

    def recorded(rewards, mask, units_read, is_known):
        units.append(units_read)
        return rewards_so_far(rewards, mask, units_read, is_known)

    monkeypatch.setattr(critics, "rewards_so_far", recorded)
    run.train()
    first, after_first, second, after_second = units
    assert first == after_first == Units() and second == after_second != first


# ---- what a checkpoint and a critic's file hold


@pytest.mark.parametrize("step", [1, 3])
def test_run_with_units_resumes_bit_for_bit(tmp_path, step):
    settings = SIDE | {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 6,
        "reward_funcs": reward_per_token,
    }
    whole, again = (trainer(tmp_path / name, **settings) for name in ("whole", "again"))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert whole.run_state.to_json() == again.run_state.to_json()
    fits = [run.run_state.critic.first_fit for run in (whole, again)]
    assert fits[0].any() and torch.equal(*fits)
    assert all(torch.equal(x, weights(again)[name]) for name, x in weights(whole).items())


def test_best_model_has_the_units_of_its_checkpoint(tmp_path):
    """Training may go on from it."""
    scores = iter(range(1, 100, 9))

    def growing(completion_ids, **kwargs):
        scale = next(scores)
        return [scale + scale * (sum(ids) % 5) for ids in completion_ids]

    settings = SIDE | {
        "save_strategy": "steps",
        "save_steps": 4,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
    }
    run = trainer(tmp_path, reward_funcs=growing, max_steps=8, **settings)
    states = []
    start = run.updates.start
    run.updates.start = lambda *args: (states.append(run.run_state), start(*args))
    run.train()
    run.state.best_model_checkpoint = str(tmp_path / "checkpoint-4")
    run._load_best_model()
    best, first, second = (x.critic.to_json() for x in (run.run_state, *states))
    assert best == first != second


@pytest.mark.parametrize("normalized", [False, True])
def test_critic_does_not_resume_in_other_units(tmp_path, normalized):
    """Its weights predict in one, and the config's scale the advantages."""
    settings = {
        "save_strategy": "steps",
        "save_steps": 3,
        "max_steps": 6,
        "resume_with_changed_settings": True,
    }
    first, again = (
        trainer(tmp_path / str(x), normalize_values=x, **settings)
        for x in (normalized, not normalized)
    )
    first.train()
    with pytest.raises(CheckpointError, match=f"units of another.*was {normalized}"):
        again.train(resume_from_checkpoint=str(tmp_path / str(normalized) / "checkpoint-3"))
