"""NaN, inf and missing scores never reach the weights, and are reported."""

import json
import math
import random
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from processes import finished, start
from runs_of_tiny import rollouts_of, trainer, weights, write_completions
from safetensors.torch import load_file
from tiny import length_reward, prompts

from trl_ppo_ext import RewardError, ppo_math
from trl_ppo_ext.data import PROMPT_IDS
from trl_ppo_ext.ppo.guards import NonFiniteError, count_skipped
from trl_ppo_ext.rewards.scoring import fixed_seed

BAD_TOKEN = 31  # no prompt has it
NAN = math.nan
INF = math.inf
TIMED = ("time/", "step_time", "tokens_per_second", "train_", "epoch")


def completions_of(prompts):
    """Completions that depend on the prompt alone: of different lengths, those of two-word
    prompts with BAD_TOKEN."""
    generators = [torch.Generator().manual_seed(sum(ids)) for ids in prompts]
    drawn = [
        torch.randint(4, BAD_TOKEN, (2 + sum(ids) % 7,), generator=g).tolist()
        for ids, g in zip(prompts, generators)
    ]
    for prompt, ids in zip(prompts, drawn):
        if len(prompt) == 2:
            ids[sum(prompt) // 2 % len(ids)] = BAD_TOKEN  # at any place
    return [[*ids, 1] for ids in drawn]


def is_bad(completion_ids):
    return torch.tensor([BAD_TOKEN in ids for ids in completion_ids])


def reward(completion_ids, **kwargs):
    return [sum(ids) / 50 for ids in completion_ids]


def failing(completion_ids, **kwargs):
    return [RewardError("no") if BAD_TOKEN in ids else sum(ids) / 50 for ids in completion_ids]


def failing_always(completion_ids, **kwargs):
    return [RewardError("no")] * len(completion_ids)


SKIP = {"reward_on_error": "skip", "max_reward_failures": 1.0}


def scripted(output_dir, reward_funcs=reward, **kwargs):
    """A trainer with fixed completions."""
    built = trainer(output_dir, reward_funcs=reward_funcs, **{"max_completion_length": 10} | kwargs)
    write_completions(built, completions_of)
    return built


def poisoned(built, quantity, value):
    """The rollout's forward says `value` at one token of every bad completion; the trained
    forward is fine."""
    if quantity == "ref_logprobs":
        name = "reference_logprobs"
    else:
        name = "score_responses"
    compute = getattr(built.actor_critic, name)

    def poisoning(sequences, *args, **kwargs):
        scores = compute(sequences, *args, **kwargs)
        if name == "reference_logprobs":
            x = scores
        else:
            x = getattr(scores, quantity)
        # what measures updates has log-probs only
        if not torch.is_grad_enabled() and x is not None:
            bad = (sequences.completion_ids == BAD_TOKEN).any(1)
            x[bad, 1] = value
        return scores

    setattr(built.actor_critic, name, poisoning)
    return built


def poison_embedding(built):
    """A forward over BAD_TOKEN is NaN from there on, in whatever role."""
    with torch.no_grad():
        built.actor_critic.policy.get_base_model().get_input_embeddings().weight[BAD_TOKEN] = NAN


def logs(built):
    return [
        {k: v for k, v in log.items() if not k.startswith(TIMED)} for log in built.state.log_history
    ]


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, expected in other.items():
        # by norm: Adam turns the rounding of a gradient near zero into a step of any size
        assert (one[name] - expected).norm() <= 1e-4 * expected.norm(), name


def moments(built):
    states = built.optimizer.state_dict()["state"]
    return {f"{i}.{name}": x.clone() for i, state in states.items() for name, x in state.items()}


def all_equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )


# ---- the rollout's forwards

STEERED = {
    "normalize_rewards": True,
    "kl_target": 0.5,
    "kl_horizon": 100,
    "entropy_coef": 0.01,
    "whiten_rewards": True,
    "max_steps": 8,
}
EXACT = {"kl_estimator": "exact", "kl_placement": "both"}


@pytest.mark.parametrize(
    "quantity, value, settings",
    [
        ("logprobs", -INF, STEERED),
        ("ref_logprobs", NAN, STEERED),
        ("values", INF, STEERED),
        ("entropies", NAN, STEERED),
        ("kls", INF, STEERED | EXACT),
        ("ref_logprobs", -INF, {"critic": "none", "num_generations": 2, "kl_estimator": "k2"}),
    ],
)
def test_nonfinite_completions_are_excluded_as_failed_ones(tmp_path, quantity, value, settings):
    built = poisoned(scripted(tmp_path / "a", **settings), quantity, value)
    rollouts = rollouts_of(built)
    built.train()
    expected = scripted(tmp_path / "b", failing, **settings | SKIP)
    expected.train()
    assert_close(weights(built), weights(expected))
    counts = [is_bad(samples.batch.completion_ids).sum().item() for _, samples in rollouts]
    assert min(counts) > 0 and max(counts) < 8
    assert [
        log["nonfinite_completions"] for log in built.state.log_history if "reward" in log
    ] == counts
    assert [
        log["nonfinite_completions"] for log in expected.state.log_history if "reward" in log
    ] == [0] * len(counts)
    for log, other in zip(logs(built), logs(expected), strict=True):
        for name in other.keys() - {"num_tokens", "nonfinite_completions"}:
            if not name.startswith("rewards/"):  # the reward itself did not fail
                assert log[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("settings", [{}, {"critic": "adapter"}, {"entropy_coef": 0.01} | EXACT])
def test_nonfinite_forwards_taint_no_gradient(tmp_path, settings):
    """The same completions are not finite in the trained forward, and a mask of 0 does not stop
    a NaN."""
    built = scripted(tmp_path / "a", **settings)
    poison_embedding(built)
    rollouts = rollouts_of(built)
    built.train()
    expected = scripted(tmp_path / "b", failing, **settings | SKIP)
    expected.train()
    assert sum(log.get("skipped_steps", 0) for log in built.state.log_history) == 0
    assert_close(weights(built), weights(expected))
    rollout, samples = rollouts[0]
    bad = is_bad(samples.batch.completion_ids)
    assert torch.equal(samples.excluded, bad) and torch.equal(~rollout.response_mask.any(1), bad)
    # samples are reported as they were
    assert (samples.sequences.completion_ids == BAD_TOKEN).any(1).equal(bad)
    assert not (rollout.sequences.completion_ids == BAD_TOKEN).any()
    assert all(
        x.isfinite().all() for x in (rollout.old_logprobs, rollout.advantages, rollout.targets)
    )


def test_rollout_without_finite_completions_ends_the_run(tmp_path):
    two_words = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(16)]})
    built = scripted(tmp_path, dataset=two_words)
    poison_embedding(built)
    before = weights(built)
    with pytest.raises(
        NonFiniteError,
        match=r"the log-probs of 8, .*the values of 8, the reference log-probs of 8 of 8 completions",
    ):
        built.train()
    assert all_equal(weights(built), before)


def test_evaluation_counts_nonfinite_completions_and_continues(tmp_path):
    two_words = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(5)]})
    built = scripted(
        tmp_path, eval_dataset={"bad": two_words, "mixed": prompts(5)}, per_device_eval_batch_size=4
    )
    poison_embedding(built)
    metrics = built.evaluate()
    assert metrics["eval_bad_nonfinite_completions"] == 5 and "eval_bad_reward" not in metrics
    assert metrics["eval_mixed_nonfinite_completions"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    lengths = [
        len(c)
        for c in completions_of(built.eval_dataset["mixed"][PROMPT_IDS])
        if BAD_TOKEN not in c
    ]
    assert metrics["eval_mixed_completions/mean_length"] == pytest.approx(
        sum(lengths) / len(lengths)
    )


# ---- optimizer steps without a token


def fails_from(call):
    """A reward that works before its `call`-th rollout, and never again."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(0)
        if len(calls) >= call:
            return failing_always(completion_ids)
        return length_reward(completion_ids)

    return reward


@pytest.mark.parametrize("aggregation", ["token", "sequence_mean", "sequence_sum", "constant"])
def test_steps_without_a_token_are_not_taken(tmp_path, aggregation):
    settings = {"weight_decay": 0.1, "loss_aggregation": aggregation, "entropy_coef": 0.01}
    seen = []
    fails = fails_from(2)

    def reward(**kwargs):
        seen.append((weights(built), moments(built)))
        return fails(**kwargs)

    built = scripted(tmp_path, reward, max_steps=8, lr_scheduler_type="constant", **settings | SKIP)
    built.train()
    (at_start, _), (after_first, adam) = seen
    assert not all_equal(at_start, after_first) and any(x.any() for x in adam.values())
    assert all_equal(weights(built), after_first) and all_equal(moments(built), adam)
    history = built.state.log_history[:-1]
    assert [log["empty_steps"] for log in history] == [0] * 4 + [1] * 4
    assert [log["loss"] for log in history[4:]] == [0] * 4
    assert all(math.isfinite(value) for log in history for value in log.values())


def test_steps_of_only_masked_completions_are_not_taken(tmp_path):
    built = trainer(
        tmp_path,
        max_completion_length=2,
        mask_truncated_completions=True,
        max_steps=4,
        dataset=prompts(8),
        critic="none",  # a critic learns from truncated completions
        advantage_estimator="reinforce",
    )
    write_completions(built, lambda prompts: [[5, 6]] * 4 + [[5, 1]] * (len(prompts) - 4))
    built.train()
    # rows 0 to 3 are the first step of the first epoch; the second epoch mixes them
    assert [log["empty_steps"] for log in built.state.log_history[:2]] == [1, 0]
    assert built.state.log_history[0]["loss"] == 0 and built.state.log_history[1]["loss"] != 0


# ---- degenerate rollouts


def only_first(completion_ids, **kwargs):
    return [1.0, *failing_always(completion_ids[1:])]


CRITIC_FREE = {"critic": "none", "num_generations": 2}
DEGENERATE = {
    "equal scores": {"whiten_rewards": True, "normalize_rewards": True},
    "equal scores, GRPO": CRITIC_FREE | {"normalize_rewards": True},
    "equal scores, RLOO": CRITIC_FREE | {"advantage_estimator": "rloo"},
    "equal scores, whitened REINFORCE": {
        "critic": "none",
        "advantage_estimator": "reinforce",
        "whiten_advantages": True,
    },
    "suppressed tokens": {"generation_kwargs": {"suppress_tokens": list(range(6, 32))}, **EXACT},
    "one token": {"max_completion_length": 1, "missing_eos_penalty": 1.0},
    "one token, length-adaptive": {"max_completion_length": 1, "lam_length_alpha": 0.05},
    "one row": {
        "per_device_train_batch_size": 1,
        "num_mini_batches": 1,
        "normalize_rewards": True,
        "whiten_rewards": True,
    },
    "one row of one token": {
        "per_device_train_batch_size": 1,
        "num_mini_batches": 1,
        "max_completion_length": 1,
        "normalize_rewards": True,
        "whiten_rewards": True,
        "target_kl": 1e-3,
    },
    "one that is left": {
        "reward_funcs": only_first,
        "num_mini_batches": 1,
        "normalize_rewards": True,
    }
    | SKIP,
    "one that is left of a group": {
        "reward_funcs": only_first,
        "num_mini_batches": 1,
        **CRITIC_FREE,
    }
    | SKIP,
}


def always_one(completion_ids, **_):
    return [1.0] * len(completion_ids)


def run_degenerate(tmp_path, generate=None, **settings):
    reward = only_first if "reward_funcs" in settings else always_one
    settings = {"entropy_coef": 0.01, "max_steps": 6, **settings, "reward_funcs": reward}
    built = trainer(tmp_path, **settings)
    if generate is not None:
        write_completions(built, generate)
    rollouts = rollouts_of(built)
    built.train()
    assert all(math.isfinite(value) for log in built.state.log_history for value in log.values())
    assert all(x.isfinite().all() for x in weights(built).values())
    assert built.state.global_step == 6
    assert sum(log.get("skipped_steps", 0) for log in built.state.log_history) == 0
    return rollouts


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_rollouts_keep_everything_finite(tmp_path, case):
    rollouts = run_degenerate(tmp_path, **DEGENERATE[case])
    for rollout, samples in rollouts:
        assert rollout.advantages.isfinite().all()
        if case == "suppressed tokens":
            assert samples.sequences.completion_ids.max() < 6
        if "one token" in case:
            assert samples.sequences.completion_ids.shape[1] == 1


@pytest.mark.parametrize(
    "settings", [{}, CRITIC_FREE, {"whiten_rewards": True, "loss_aggregation": "sequence_mean"}]
)
def test_completions_that_end_at_once_keep_everything_finite(tmp_path, settings):
    rollouts = run_degenerate(tmp_path, generate=lambda prompts: [[1]] * len(prompts), **settings)
    assert all(rollout.response_mask.sum() == len(rollout) for rollout, _ in rollouts)


# ---- log-ratios of any size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_of_huge_log_ratios_have_finite_gradients(dtype, estimator):
    logprobs = torch.tensor([[-1e5, -1e-3, -88.8, -3e4]], dtype=dtype, requires_grad=True)
    reference = torch.tensor([[-1e-3, -1e5, -5e-8, -1e5]], dtype=dtype)
    kl = ppo_math.kl_estimate(logprobs, reference, estimator)
    kl.sum().backward()
    assert kl.isfinite().all() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_policy_loss_of_huge_log_ratios_has_finite_gradients(dtype, dual_clip):
    logprobs = torch.tensor([[0.0, 0.0, -1e5, -1e5]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-1e5, -1e5, 0.0, 0.0]], dtype=dtype)
    advantages = torch.tensor([[1e3, -1e3, 1e3, -1e3]], dtype=dtype)
    loss = ppo_math.clipped_policy_loss(logprobs, old, advantages, 0.2, 0.2, dual_clip)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


# ---- gradients that are not finite


def break_after_collecting(built):
    """The rollout's forward is fine; those of the updates are NaN for completions with
    BAD_TOKEN."""
    compute_loss = built.compute_loss

    def breaking(*args, **kwargs):
        poison_embedding(built)
        return compute_loss(*args, **kwargs)

    built.compute_loss = breaking


@pytest.fixture
def ends_after_two(monkeypatch):
    monkeypatch.setattr("trl_ppo_ext.ppo.guards.MAX_SKIPPED_STEPS", 2)


def test_nonfinite_gradients_end_the_run_with_unchanged_weights(tmp_path, ends_after_two):
    """After two in a row."""
    built = scripted(tmp_path, shuffle_dataset=False, num_mini_batches=1, max_steps=8)
    break_after_collecting(built)
    before = weights(built)
    with pytest.raises(NonFiniteError, match=r"^2 optimizer steps in a row, up to step 2"):
        built.train()
    assert all_equal(weights(built), before)


def check_gradients(*finite):
    """Check one optimizer step after the other."""
    skipped = 0
    for step, is_finite in enumerate(finite):
        skipped = count_skipped(skipped, is_finite, 7 + step)


def test_only_skipped_steps_in_a_row_end_a_run(caplog, ends_after_two):
    check_gradients(False, True, False, True)
    assert "Optimizer step 7 is skipped: its gradient is not finite" in caplog.text
    with pytest.raises(
        NonFiniteError, match=r"^2 optimizer steps in a row.*Lower the learning rate"
    ):
        check_gradients(False, False)


# ---- random numbers of an evaluation


def draws():
    return [torch.rand(2).tolist(), np.random.rand(2).tolist(), [random.random(), random.random()]]


def test_fixed_seed_leaves_other_random_numbers_alone():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = draws() + draws()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    first = draws()
    cpu = torch.device("cpu")
    with fixed_seed(5, cpu):
        apart = draws()
    with pytest.raises(ZeroDivisionError), fixed_seed(5, cpu):
        assert draws() == apart
        _ = 1 / 0
    with fixed_seed(6, cpu):
        assert all(one != other for one, other in zip(draws(), apart))
    assert first + draws() == expected


def test_evaluations_change_no_run_and_sample_alike(tmp_path):
    often = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
    plain = trainer(tmp_path / "plain", max_steps=8)
    plain.train()
    sampled = []
    rows = prompts(6).map(lambda row: {"target": -1})

    def reward(completion_ids, target, **kwargs):
        if target[0] < 0:
            sampled.append(completion_ids)
        return length_reward(completion_ids)

    evaluated = trainer(
        tmp_path / "evaluated", reward_funcs=reward, max_steps=8, eval_dataset=rows, **often
    )
    evaluated.train()
    assert len(sampled) >= 3 and all_equal(weights(plain), weights(evaluated))
    evaluated.evaluate()
    evaluated.evaluate()
    # the same draws, and so the same completions of the same policy
    assert sampled[-1] == sampled[-2]
    evaluated.args.seed += 1
    evaluated.evaluate()
    assert sampled[-1] != sampled[-2]


# ---- ranks that have nothing to learn from

DRIVER = Path(__file__).parents[1] / "resume" / "uneven_processes.py"


def saved(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {f"{file.name}:{name}": x for file in files for name, x in load_file(file).items()}


def test_rank_without_usable_completions_takes_the_others_step(tmp_path):
    """Its rewards failed, or its forwards were not finite: it learns from the completions of the
    other rank."""
    train = runpy.run_path(str(DRIVER))["main"]
    (tmp_path / "two").mkdir()
    single = train(str(tmp_path / "one"), 8)

    def train_one_of_two():
        AcceleratorState._reset_state(reset_partial_state=True)
        train(str(tmp_path / "two"), 4).end()

    assert finished(start(train_one_of_two, 2), 120) == [0, 0]
    assert_close(saved(tmp_path / "two"), saved(tmp_path / "one"))
    processes, *log = json.loads((tmp_path / "two" / "log.json").read_text())
    assert processes["num_processes"] == 2
    assert [entry["rewards/reward/failed"] for entry in log if "reward" in entry] == [4, 0]
    assert [entry["nonfinite_completions"] for entry in log if "reward" in entry] == [0, 4]
    assert [entry["empty_steps"] for entry in log[:-1]] == [0] * 4
    for entry, expected in zip(log, single.state.log_history, strict=True):
        compared = {"reward", "kl", "entropy", "loss", "loss/value", "grad_norm", "objective"}
        for name in expected.keys() & (compared | {f"row/{row}" for row in range(7)}):
            assert entry[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
