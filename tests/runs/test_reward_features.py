"""Rewards that are asynchronous, per-token, failing, normalized or monitored."""

import asyncio
import itertools
import os
import random
import re
import time

import numpy
import pytest
import torch
import trl.rewards
from pandas import read_parquet
from runs_of_tiny import rollouts_of, trainer, weights, write_completions
from tiny import WORDS, length_reward, prompts, tokenizer
from tokenizers import decoders, pre_tokenizers

from trl_ppo_ext import RewardError
from trl_ppo_ext.ppo.metrics import check_metric_name
from trl_ppo_ext.rewards import FunctionReward, ScoringBatch, monitor, read_scores, score_all
from trl_ppo_ext.rewards.scoring import collect_scores

NAN = float("nan")
SKIPS = {"reward_on_error": "skip"}
ALONE = {"all_sum": lambda total: total, "device": torch.device("cpu")}


def batch(rows=3, length=4):
    return ScoringBatch(["p"] * rows, [f"c{row}" for row in range(rows)], [[5] * length] * rows)


def gives(*entries):
    return FunctionReward(lambda **kwargs: list(entries))


# ---- functions


def test_asynchronous_functions_of_a_batch_run_together():
    """Also inside a running loop, such as that of a notebook."""

    async def slow(completions, **kwargs):
        await asyncio.sleep(0.2)
        return [1.0] * len(completions)

    async def notebook():
        return collect_scores([FunctionReward(slow)] * 5, batch())

    start = time.perf_counter()
    assert [scores.totals.tolist() for scores in asyncio.run(notebook())] == [[1.0] * 3] * 5
    assert time.perf_counter() - start < 0.5


def test_functions_log_columns_and_metrics(tmp_path, capsys):
    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("note", [f"note {row}" for row in range(len(completions))])
        log_metric("my/metric", 7)
        return [0.0] * len(completions)

    built = trainer(tmp_path, reward_funcs=reward, log_completions=True, max_steps=1)
    built.train()
    assert built.state.log_history[0]["my/metric"] == 7
    assert "note 1" in capsys.readouterr().out


def test_a_logged_column_of_numbers_may_lack_some(tmp_path):
    def reward(completions, log_extra, **kwargs):
        log_extra("share", [None if row == 0 else 0.5 for row in range(len(completions))])
        log_extra("nothing", [None] * len(completions))
        return [0.0] * len(completions)

    settings = {"log_completions": True, "num_completions_to_print": 0, "max_steps": 1}
    trainer(tmp_path, reward_funcs=reward, **settings).train()
    table = read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert table["share"].isna().tolist()[:2] == [True, False] and table["share"].mean() == 0.5
    assert set(table["nothing"]) == {"None"}


def test_asynchronous_functions_share_one_loop_over_rollouts():
    slots = asyncio.Semaphore(1)
    loops = set()

    async def reward(completions, **kwargs):
        loops.add(asyncio.get_running_loop())
        async with slots:  # a contended semaphore belongs to its loop
            await asyncio.sleep(0.01)
        return [1.0] * len(completions)

    for _ in range(2):
        scores = collect_scores([FunctionReward(reward)] * 2, batch())
        assert [x.totals.tolist() for x in scores] == [[1.0] * 3] * 2
    assert len(loops) == 1


def test_judge_inside_an_async_reward_does_not_deadlock():
    async def inner(completions, **kwargs):
        return [2.0] * len(completions)

    async def outer(**kwargs):
        (scores,) = collect_scores([FunctionReward(inner)], batch())
        return scores.totals

    assert collect_scores([FunctionReward(outer)], batch())[0].totals.tolist() == [2.0] * 3


# of `exit()` in the code of a completion
@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [False, True])
def test_reward_that_exits_fails_as_with_an_error(is_async, error):
    def exits(**kwargs):
        raise error

    async def exits_later(**kwargs):
        raise error

    reward = FunctionReward(exits_later if is_async else exits)
    for _ in range(2):  # the event loop still runs
        (scores,) = collect_scores([reward], batch())
        assert len(scores.failures) == 3 and error.__name__ in str(scores.failures[0])


def test_what_a_reward_changes_stays_its_own():
    chat = [{"role": "user", "content": "w1"}]
    seen = []

    def changes(prompts, completions, completion_ids, answers, **kwargs):
        for prompt, ids, answer in zip(prompts, completion_ids, answers):
            prompt.append(completions.pop())
            seen.append(len(prompt))
            ids.pop(), answer.clear()
        return [1.0] * len(prompts)

    def reads(**kwargs):
        assert all(
            kwargs[name] == getattr(given, name)
            for name in ("prompts", "completions", "completion_ids")
        )
        return [2.0 if answer else 0.0 for answer in kwargs["answers"]]

    # the completions of a prompt share its row
    given = ScoringBatch(
        [chat] * 3, ["a", "b", "c"], [[5], [5, 6], [7, 8, 9]], {"answers": [["yes"]] * 3}
    )
    first, second = collect_scores([FunctionReward(changes), FunctionReward(reads)], given)
    assert seen == [2] * 3 and second.totals.tolist() == [2.0] * 3
    assert first.tokens.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]  # at their last tokens


def test_reward_that_changes_the_process_changes_no_run(tmp_path, monkeypatch):
    def reward(completion_ids, **kwargs):
        os.chdir("elsewhere")
        torch.set_grad_enabled(False), torch.set_default_dtype(torch.float64)
        return length_reward(completion_ids)

    monkeypatch.chdir(tmp_path)
    os.mkdir("elsewhere")
    built = trainer("run", reward_funcs=reward, max_steps=2, save_strategy="steps", save_steps=2)
    built.train()
    assert (tmp_path / "run" / "checkpoint-2").is_dir() and not os.listdir("elsewhere")
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


def test_reward_that_seeds_does_not_repeat_rollouts(tmp_path):
    drawn = []

    def draws():
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    def seeding(completion_ids, **kwargs):
        drawn.append(draws())
        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
        return length_reward(completion_ids)

    trained = []
    for reward in (seeding, length_reward):
        built = trainer(tmp_path, reward_funcs=reward, num_ppo_epochs=1)
        built.train()
        trained.append(weights(built))
    assert all(torch.equal(x, trained[1][name]) for name, x in trained[0].items())
    assert drawn[0] != drawn[1]  # its own random numbers differ between rollouts


def test_metric_with_a_name_of_the_trainer_raises(tmp_path):
    def reward(completion_ids, log_metric, **kwargs):
        log_metric("kl", 1.0)
        return length_reward(completion_ids)

    with pytest.raises(
        RewardError, match="`log_metric` got the name 'kl', which the trainer logs itself"
    ):
        trainer(tmp_path, reward_funcs=reward, max_steps=1).train()


def test_every_logged_name_is_reserved(tmp_path):
    reward = length_reward
    other = gives(*[1.0] * 8)
    other.name = "other"
    settings = {
        "monitor_funcs": other,
        "eval_dataset": prompts(8),
        "dual_clip": 3.0,
        "target_kl": 1.0,
    }
    built = trainer(tmp_path, reward_funcs=[reward, reward], num_generations=2, **settings)
    built.evaluate()
    built.train()
    for name in {name for log in built.state.log_history for name in log}:
        with pytest.raises(ValueError, match="which the trainer logs"):
            check_metric_name(name)


def test_extra_column_of_another_length_names_it(tmp_path):
    def reward(completion_ids, log_extra, **kwargs):
        log_extra("note", ["x"] * (len(completion_ids) - 1))
        return length_reward(completion_ids)

    with pytest.raises(
        RewardError, match=r"`log_extra` must get one value per completion in 'note', got 7 for 8"
    ):
        trainer(tmp_path, reward_funcs=reward, max_steps=1).train()


# ---- texts


def spaced_tokenizer():
    """A tokenizer of sentencepiece's kind: the space before a word is a part of its token."""
    plain = tokenizer(words=[f"▁{word}" for word in WORDS])
    inner = plain.backend_tokenizer
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return plain


@pytest.mark.parametrize("make", [tokenizer, spaced_tokenizer])
def test_completion_is_the_continuation_of_its_prompt(tmp_path, make):
    def reward(prompts, completions, completion_ids, **kwargs):
        ids = [p + c for p, c in zip(make()(prompts)["input_ids"], completion_ids)]
        assert [p + c for p, c in zip(prompts, completions)] == make().batch_decode(
            ids, skip_special_tokens=True
        )
        assert all(re.fullmatch(r"( (w\d+|<unk>))*", text) for text in completions)
        return length_reward(completion_ids)

    trainer(tmp_path, reward_funcs=reward, processing_class=make(), max_steps=1).train()


# ---- rewards that do not apply


def unparsed(completion_ids, **kwargs):
    absent = None, NAN  # as in TRL
    return [absent[ids[0] % 4 // 2] if ids[0] % 2 else float(len(ids)) for ids in completion_ids]


def unparsed_as_failure(completion_ids, **kwargs):
    return [RewardError("no") if ids[0] % 2 else float(len(ids)) for ids in completion_ids]


def test_completion_without_a_score_is_skipped_and_counted(tmp_path):
    dataset = prompts(8)
    built = trainer(tmp_path / "a", reward_funcs=unparsed, dataset=dataset)
    rollouts = rollouts_of(built)
    built.train()
    skip = {"reward_on_error": "skip", "max_reward_failures": 1.0}
    failing = trainer(tmp_path / "b", reward_funcs=unparsed_as_failure, dataset=dataset, **skip)
    failing.train()
    assert all(torch.equal(x, weights(failing)[name]) for name, x in weights(built).items())
    counts = [sum(ids[0] % 2 for ids in samples.batch.completion_ids) for _, samples in rollouts]
    assert [
        log["unscored_completions"] for log in built.state.log_history if "reward" in log
    ] == counts
    assert sum(counts) > 0 and all(
        samples.scored.unscored.sum() == n for n, (_, samples) in zip(counts, rollouts)
    )
    assert {
        log["unscored_completions"] for log in failing.state.log_history if "reward" in log
    } == {0}


def test_rollouts_without_a_score_have_no_statistics(tmp_path):
    """They would look as if all completions and all their scores were equal."""
    rollouts = []

    def reward(completion_ids, **kwargs):
        rollouts.append(len(completion_ids))
        return [None if len(rollouts) > 1 else float(len(ids)) for ids in completion_ids]

    built = trainer(tmp_path, reward_funcs=reward, max_steps=12)
    built.train()
    first, *later = [log for log in built.state.log_history if "unscored_completions" in log]
    names = {"reward_std", "reward/length_correlation", "completions/repeated_ratio"}
    assert names <= first.keys() and later
    assert not any(names & log.keys() for log in later if log["unscored_completions"])


def test_rollout_without_any_score_warns_and_changes_no_weight(tmp_path, caplog):
    built = trainer(
        tmp_path, reward_funcs=lambda completions, **kwargs: [None] * len(completions), max_steps=4
    )
    before = weights(built)
    built.train()
    assert "No reward applies to any of 8 completions" in caplog.text
    assert all(torch.equal(x, before[name]) for name, x in weights(built).items())


# ---- token-level rewards


def test_token_rewards_enter_where_they_belong():
    scores = read_scores(
        "r",
        [[0.5, 0.0, 2.0], [(0, 1.0), (numpy.int64(2), -1.0), (2, 0.5)], 3.0, None],
        [3, 3, 2, 1],
    )
    assert scores.tokens[:3].tolist() == [[0.5, 0, 2], [1, 0, -0.5], [0, 3, 0]]
    assert scores.totals[:3].tolist() == [2.5, 0.5, 3.0] and scores.totals[3].isnan()


def outcome(completion_ids, **kwargs):
    return [0.1 * sum(ids) for ids in completion_ids]


def outcome_as_pair(completion_ids, **kwargs):
    return [[(len(ids) - 1, 0.1 * sum(ids))] for ids in completion_ids]


@pytest.mark.parametrize("shaped", [{}, {"normalize_rewards": True, "missing_eos_penalty": 1.0}])
def test_outcome_on_the_last_token_trains_as_a_scalar(tmp_path, shaped):
    results = []
    for reward in (outcome, outcome_as_pair):
        built = trainer(tmp_path, reward_funcs=reward, **shaped)
        built.train()
        results.append(weights(built))
    assert all(torch.equal(results[1][name], weight) for name, weight in results[0].items())


def test_step_rewards_reach_the_tokens_before_them_only(tmp_path):
    def reward(completion_ids, **kwargs):
        return [[(0, 5.0)] for _ in completion_ids]

    built = trainer(
        tmp_path, reward_funcs=reward, whiten_advantages=False, kl_coef=0.0, lam=1.0, max_steps=1
    )
    rollouts = rollouts_of(built)
    built.train()
    returns = rollouts[0][1].returns
    mask = rollouts[0][0].response_mask
    assert (returns[:, 0] == 5).all() and not returns[:, 1:][mask[:, 1:]].any()


def test_normalizing_scales_rewards_where_they_enter(tmp_path):
    """Only the part at last tokens is centered, in every completion alike, also in one without
    rewards before."""

    def reward(completion_ids, **kwargs):
        return [
            [
                (0, 30.0 * (sum(ids) % 2)),
                (len(ids) // 2, float(ids[0])),
                (len(ids) - 1, 0.5 * len(ids)),
            ]
            for ids in completion_ids
        ]

    plain = {"normalize_values": False, "whiten_advantages": False, "kl_coef": 0.0, "max_steps": 4}
    built = trainer(tmp_path, reward_funcs=reward, normalize_rewards=True, **plain)
    rollouts = rollouts_of(built)
    built.train()
    seen_totals = torch.tensor([])
    seen_ends = torch.tensor([])
    for rollout, samples in rollouts:
        last = rollout.response_mask.sum(1, keepdim=True) - 1
        tokens = samples.scored.tokens
        ends = tokens.gather(1, last)
        seen_totals = torch.cat([seen_totals, tokens.sum(1)])
        seen_ends = torch.cat([seen_ends, ends])
        shaped = tokens.scatter_add(1, last, -seen_ends.mean().expand_as(ends)) / seen_totals.std()
        torch.testing.assert_close(
            rollout.targets, shaped.flip(1).cumsum(1).flip(1), rtol=1e-4, atol=1e-5
        )


def test_normalizing_adds_no_reward_after_the_last_one_earned(tmp_path):
    def reward(completion_ids, **kwargs):
        return [[(0, float(sum(ids)))] for ids in completion_ids]

    plain = {"normalize_values": False, "whiten_advantages": False, "kl_coef": 0.0, "max_steps": 1}
    settings = plain | {"generation_kwargs": {"min_new_tokens": 2}, "lam": 0.8}
    built = trainer(tmp_path, reward_funcs=reward, normalize_rewards=True, **settings)
    rollouts = rollouts_of(built)
    built.train()
    (rollout, samples), deviation = rollouts[0], built.run_state.scores[""].sample_deviation
    torch.testing.assert_close(rollout.targets[:, 0], samples.scored.totals / deviation)
    torch.testing.assert_close(
        rollout.targets[:, 1:], torch.zeros_like(rollout.targets[:, 1:]), rtol=0, atol=1e-5
    )


def spread(completion_ids, **kwargs):
    return [[sum(ids) / len(ids)] * len(ids) for ids in completion_ids]


def penalty(completion_ids, **kwargs):
    return [[-0.1] * len(ids) for ids in completion_ids]


def test_critic_that_reads_scores_spread_over_tokens_raises(tmp_path):
    sizes = {
        "per_device_train_batch_size": 16,
        "generation_kwargs": {"min_new_tokens": 3},
        "max_steps": 1,
    }
    with pytest.raises(ValueError, match=r"spread over tokens.*return one number per completion"):
        trainer(tmp_path / "side", reward_funcs=spread, **sizes).train()
    for name, given in {
        "head": {"reward_funcs": spread, "critic": "head"},
        "same": {"reward_funcs": penalty},
    }.items():
        trainer(tmp_path / name, **given, **sizes).train()


# ---- failures


def fails_for(rows):
    return gives(*(RewardError(f"row {row}") if row in rows else float(row) for row in range(4)))


def test_skip_drops_the_completion():
    rewards = [fails_for([2]), gives(1.0, 1.0, 1.0, 1.0)]
    skipped = score_all(rewards, batch(4), [2.0, 1.0], "skip", 0.5, **ALONE)
    assert skipped.usable.tolist() == [True, True, False, True]
    assert skipped.totals.tolist() == [1.0, 3.0, 0.0, 7.0]
    assert skipped.failed.tolist() == [
        [False, False],
        [False, False],
        [True, False],
        [False, False],
    ]


def test_too_many_failures_raise_the_first_cause():
    with pytest.raises(RewardError, match="row 1"):
        score_all([fails_for([1, 2, 3])], batch(4), None, "raise", 1.0, **ALONE)
    with pytest.raises(
        RewardError, match=r"failed for 3 of 4 completions.*max_reward_failures=0.5.*row 1"
    ):
        score_all([fails_for([1, 2, 3])], batch(4), None, "skip", 0.5, **ALONE)
    score_all([fails_for([1, 2])], batch(4), None, "skip", 0.5, **ALONE)


def test_failures_that_end_no_run_are_told(caplog):
    score_all([fails_for([1, 2])], batch(4), None, "skip", 0.5, **ALONE)
    assert "row 1; 2 of 4 completions are skipped" in caplog.text
    monitor([fails_for([3])], batch(4), ALONE["device"])
    assert "Of the monitored rewards one failed: row 3" in caplog.text


def test_failures_of_an_evaluation_do_not_end_it(tmp_path):
    """Its batches may be small, so that one failure is all of a batch."""

    def reward(completions, **kwargs):
        return [RewardError("the judge is away") if next(calls) == 1 else 1.0 for _ in completions]

    built = trainer(
        tmp_path,
        reward_funcs=reward,
        eval_dataset=prompts(4),
        per_device_eval_batch_size=1,
        **SKIPS,
    )
    calls = itertools.count()
    measured = built.evaluate()
    assert measured["eval_rewards/reward/failed"] == 1 and measured["eval_reward"] == 1


def test_evaluation_that_failed_leaves_nothing_to_the_next(tmp_path):
    built = trainer(tmp_path, eval_dataset=prompts(4), per_device_eval_batch_size=1)
    measured = built.evaluate()["eval_reward"]
    score = built.components.rewards[0].score
    calls = itertools.count()
    built.components.rewards[0].score = lambda batch: [1e6] if next(calls) < 2 else [None, None]
    with pytest.raises(RewardError, match="returned 2 scores"):
        built.evaluate()
    built.components.rewards[0].score = score
    assert built.evaluate()["eval_reward"] == measured


def test_wrong_count_fails_all_completions_but_no_monitor():
    short = gives(1.0)
    with pytest.raises(RewardError, match="returned 1 scores for 3 completions"):
        score_all([short], batch(), None, "raise", 1.0, **ALONE)
    skipped = score_all([short, gives(1.0, 1.0, 1.0)], batch(), None, "skip", 1.0, **ALONE)
    assert skipped.failed.tolist() == [[True, False]] * 3 and not skipped.usable.any()
    assert monitor([short], batch(), ALONE["device"]).isnan().all()


def test_exception_in_a_function_names_the_reward():
    def broken(**kwargs):
        return {}["key"]

    with pytest.raises(RewardError, match="`broken` failed with KeyError") as error:
        score_all([FunctionReward(broken)], batch(), None, "raise", 1.0, **ALONE)
    assert isinstance(error.value.__cause__, KeyError)


def test_skipped_completions_get_no_gradient_nor_statistic(tmp_path):
    """A run in which half of the completions fail learns what the other half alone teaches."""

    def reward(completion_ids, prompts, **kwargs):
        return [
            RewardError("no") if len(p.split()) % 2 else float(len(ids))
            for p, ids in zip(prompts, completion_ids)
        ]

    built = trainer(
        tmp_path, reward_funcs=reward, reward_on_error="skip", max_reward_failures=0.9, max_steps=1
    )
    rollouts = rollouts_of(built)
    built.train()
    rollout, samples = rollouts[0]
    usable = torch.tensor([len(p.split()) % 2 == 0 for p in samples.batch.prompts])
    assert 0 < usable.sum() < len(usable)
    assert torch.equal(rollout.response_mask.any(1), usable)
    assert not rollout.advantages[~usable].any()
    log = built.state.log_history[0]
    lengths = torch.tensor([len(ids) for ids in samples.batch.completion_ids]).float()
    assert log["reward"] == pytest.approx(lengths[usable].mean().item())
    assert log["completions/mean_length"] == pytest.approx(lengths[usable].mean().item())
    assert log["rewards/reward/failed"] == (~usable).sum().item()


# ---- shaping


def test_normalized_scores_use_running_mean_and_deviation(tmp_path):
    run = trainer(tmp_path, normalize_rewards=True, kl_coef=0.0, max_steps=8)
    rollouts = rollouts_of(run)
    objectives = []
    run.train()
    seen = torch.tensor([])
    for _, samples in rollouts:
        seen = torch.cat([seen, samples.scored.totals])
        objectives.append(((samples.scored.totals - seen.mean()) / seen.std()).mean().item())
    assert len(rollouts) == 2 and any(objectives)
    assert [x["objective"] for x in run.state.log_history if "objective" in x] == pytest.approx(
        objectives, abs=1e-5
    )
    assert run.run_state.scores[""].weight == len(seen)


# ---- hacking made visible


def test_monitored_rewards_are_logged_and_change_nothing(tmp_path):
    def watched(completions, **kwargs):
        return [None if row == 0 else 2.0 for row in range(len(completions))]

    def failing(**kwargs):
        raise RuntimeError

    plain = trainer(tmp_path)
    plain.train()
    monitored = trainer(tmp_path, monitor_funcs=[watched, failing])
    monitored.train()
    log = monitored.state.log_history[0]
    assert log["monitor/watched/mean"] == 2 and "monitor/failing/mean" not in log
    assert all(
        torch.equal(weights(plain)[name], weight) for name, weight in weights(monitored).items()
    )
    assert log["reward"] == plain.state.log_history[0]["reward"]


def test_length_correlation_and_repetition_are_logged(tmp_path):
    built = trainer(tmp_path, reward_funcs=[length_reward], max_steps=1)
    rollouts = rollouts_of(built)
    built.train()
    log = built.state.log_history[0]
    texts = rollouts[0][1].batch.completions
    assert log["reward/length_correlation"] == pytest.approx(1.0, abs=1e-5)
    assert log["completions/repeated_ratio"] == pytest.approx(1 - len(set(texts)) / len(texts))


# ---- TRL's own


@pytest.mark.parametrize(
    "name, arguments, expected",
    [
        ("accuracy_reward", None, [1.0, 0.0]),
        ("reasoning_accuracy_reward", None, [1.0, 0.0]),
        ("get_cosine_scaled_reward", {"max_len": 10}, None),
        ("think_format_reward", None, [1.0, 0.0]),
        ("get_repetition_penalty_reward", {"ngram_size": 2}, None),
        (
            "get_soft_overlong_punishment",
            {"max_completion_len": 6, "soft_punish_cache": 2},
            [0.0, -1.0],
        ),
    ],
)
def test_every_reward_of_trl_works_unchanged(name, arguments, expected):
    function = (
        getattr(trl.rewards, name) if arguments is None else getattr(trl.rewards, name)(**arguments)
    )
    completions = [
        [{"role": "assistant", "content": text}]
        for text in (r"<think>a</think>\boxed{4}", r"\boxed{5}")
    ]
    given = ScoringBatch(
        [[{"role": "user", "content": "2 + 2"}]] * 2,
        completions,
        [[5] * 4, [5] * 9],
        {"solution": [r"\boxed{4}"] * 2},
    )
    scored = score_all([FunctionReward(function)], given, None, "raise", 1.0, **ALONE)
    if expected is None:
        expected = list(
            function(completions=completions, completion_ids=given.completion_ids, **given.columns)
        )
    assert scored.rewards[:, 0].tolist() == pytest.approx(expected)


def test_groups_that_only_a_penalty_tells_apart_are_kept(tmp_path):
    settings = {
        "critic": "none",
        "num_generations": 2,
        "kl_coef": 0,
        "drop_equal_groups": True,
        "max_steps": 1,
    }
    run = trainer(
        tmp_path,
        None,
        lambda prompts, **kwargs: [0.0] * len(prompts),
        missing_eos_penalty=1.0,
        **settings,
    )
    write_completions(
        run, lambda ids: [[5, 6, 7, 8 if place % 2 else 1] for place in range(len(ids))]
    )
    run.train()
    assert (
        run.state.log_history[0]["frac_reward_zero_std"] == 1
        and run.state.log_history[0]["grad_norm"] > 0
    )


def test_groups_that_only_rounding_tells_apart_are_dropped(tmp_path):
    """The same rewards in another order, whose sum is next to nothing beside them."""
    orders = [[0.1, 0.2, -0.3], [-0.3, 0.1, 0.2]]
    assert torch.tensor(orders).sum(1).unique().numel() == 2
    settings = {"critic": "none", "num_generations": 2, "kl_coef": 0, "max_steps": 1}
    run = trainer(
        tmp_path,
        None,
        lambda prompts, **kwargs: [orders[place % 2] for place in range(len(prompts))],
        drop_equal_groups=True,
        **settings,
    )
    write_completions(run, lambda ids: [[5, 6, 1]] * len(ids))
    run.train()
    assert run.state.log_history[0]["empty_steps"] > 0


@pytest.mark.parametrize(
    "choice", [{}, {"advantage_estimator": "rloo"}, {"whiten_advantages": True}], ids=str
)
def test_dropped_groups_leave_the_step_of_the_others(tmp_path, choice):
    """As if the prompts whose completions have equal scores were not in the rollout."""

    def step(name, rows, **settings):
        settings |= {
            "num_ppo_epochs": 1,
            "num_mini_batches": 1,
            "max_steps": 1,
            "shuffle_dataset": False,
        }
        settings |= {
            "critic": "none",
            "num_generations": 2,
            "kl_coef": 0,
            "per_device_train_batch_size": 2 * len(rows),
        }

        def reward(completion_ids, target, **kwargs):
            return [float(ids[0] % 2 or even % 2 == 0) for ids, even in zip(completion_ids, target)]

        built = trainer(tmp_path / name, None, reward, prompts().select(rows), **settings | choice)
        write_completions(
            built,
            lambda ids: [[4 + place % 2, *[7] * (len(x) - 1), 1] for place, x in enumerate(ids)],
        )
        built.train()
        return weights(built), built.state.log_history[0]

    (dropped, logs), (kept, _) = (
        step("all", range(6), drop_equal_groups=True),
        step("some", [1, 3, 5]),
    )
    same = step("diluted", range(6))[1]
    assert logs["frac_reward_zero_std"] == same["frac_reward_zero_std"] == 0.5
    torch.testing.assert_close(dropped, kept)
    assert logs["grad_norm"] > 1.2 * same["grad_norm"]
