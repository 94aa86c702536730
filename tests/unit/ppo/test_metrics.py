"""Metrics: exact over uneven batches, masks and ranks."""

from types import SimpleNamespace

import pytest
import torch

from trl_ppo_ext.ppo.metrics import Metrics, log_episodes, log_rewards
from trl_ppo_ext.rewards.scoring import Scored


def alone(values):
    """Reduction over one rank."""
    return values


def uneven_batches():
    """Values and masks of micro-batches with 5, 1 and 12 tokens that count, NaN where none does."""
    generator = torch.Generator().manual_seed(0)
    for shape, counts in (((2, 5), 5), ((1, 4), 1), ((3, 4), 12)):
        values = torch.randn(shape, generator=generator)
        mask = torch.zeros(shape).flatten()
        mask[torch.randperm(mask.numel(), generator=generator)[:counts]] = 1
        mask = mask.reshape(shape)
        yield values.masked_fill(mask == 0, torch.nan), mask


def test_mean_and_extremes_of_uneven_batches_are_over_tokens():
    metrics = Metrics()
    for values, mask in uneven_batches():
        metrics.mean("mean", values, mask)
        metrics.maximum("largest", values, mask)
        metrics.minimum("smallest", values, mask)
    everything = torch.cat([values[mask.bool()] for values, mask in uneven_batches()])
    assert len(everything) == 18
    expected = {"largest": everything.max().item(), "smallest": everything.min().item()}
    assert metrics.compute(alone, alone) == expected | {
        "mean": pytest.approx(everything.mean().item(), rel=1e-6)
    }


@pytest.mark.parametrize("hidden", [torch.nan, torch.inf, -torch.inf])
def test_masked_values_never_leak(hidden):
    values = torch.tensor([[1.0, hidden], [3.0, hidden]])
    mask = torch.tensor([[1, 0], [1, 0]])
    for kind in (mask, mask.bool()):
        metrics = Metrics()
        metrics.mean("mean", values, kind)
        metrics.maximum("max", values, kind)
        metrics.minimum("min", values, kind)
        assert metrics.compute(alone, alone) == {"mean": 2.0, "max": 3.0, "min": 1.0}


def test_metrics_without_values_are_omitted():
    metrics = Metrics()
    values = torch.tensor([1.0, 2.0])
    nothing = torch.zeros(2)
    metrics.mean("mean", values, nothing)
    metrics.maximum("max", values, nothing)
    metrics.minimum("min", values, nothing)
    metrics.mean("no rows", torch.zeros(0))
    metrics.maximum("no rows at all", torch.zeros(0))
    metrics.mean("one", values)
    assert metrics.compute(alone, alone) == {"one": 1.5}


def test_ranks_weigh_by_their_counts():
    """A rank with 3 tokens and one with 1: the mean over 4 tokens, the extremes over both."""
    here = torch.tensor([1.0, 2.0, 3.0])
    there = torch.tensor([10.0])

    def filled(values):
        metrics = Metrics()
        metrics.mean("mean", values)
        metrics.mean("only here", values, torch.full_like(values, float(len(values) > 1)))
        metrics.maximum("max", values)
        metrics.minimum("min", values)
        return metrics

    given = {}

    def record(kind):
        return lambda values: given.setdefault(kind, values)

    filled(there).compute(record("sum"), record("max"))  # what the other process would send
    computed = filled(here).compute(
        lambda x: x + given["sum"], lambda x: torch.maximum(x, given["max"])
    )
    assert computed == {"mean": 4.0, "only here": 2.0, "max": 10.0, "min": 1.0}


def test_metrics_continue_from_a_checkpoint():
    whole = Metrics()
    stopped = Metrics()
    resumed = Metrics()

    def add(metrics, values, mask):
        metrics.mean("mean", values, mask)
        metrics.total("total", mask)
        metrics.maximum("max", values, mask)
        metrics.minimum("a:min", values, mask)

    first, *others = uneven_batches()
    add(stopped, *first)
    resumed.load_state_dict({name: x.clone() for name, x in stopped.state_dict().items()})
    add(whole, *first)
    for batch in others:
        add(whole, *batch), add(resumed, *batch)
    assert resumed.compute(alone, alone) == whole.compute(alone, alone)


def test_reward_that_applies_to_none_has_no_deviation():
    """Such as that of tools which pay nothing; a 0 would be taken for equal scores."""
    scores = torch.tensor([[1.0, torch.nan], [3.0, torch.nan]])
    zeros = torch.zeros(2, 1)
    every = torch.ones(2, dtype=torch.bool)
    scored = Scored(
        scores,
        zeros,
        zeros.bool(),
        every,
        torch.zeros(2, 2, dtype=torch.bool),
        torch.zeros(2),
        is_whole=every,
        foresight={},
    )
    metrics = Metrics()
    log_rewards(metrics, ["a", "tools"], scored, every, alone)
    logged = metrics.compute(alone, alone)
    assert logged["rewards/a/std"] == pytest.approx(2**0.5)
    assert {name for name in logged if "tools" in name} == {"rewards/tools/failed"}


def test_deviation_of_a_reward_that_applies_on_another_rank_only_counts():
    """Each rank weighs the batch in the mean over batches."""
    nothing = torch.zeros(2, 1, dtype=torch.bool)
    every = torch.ones(2, dtype=torch.bool)
    scored = Scored(
        rewards=torch.full((2, 1), torch.nan),
        tokens=torch.zeros(2, 1),
        places=nothing,
        usable=every,
        failed=nothing,
        unpaid=torch.zeros(2),
        is_whole=every,
        foresight={},
    )
    metrics = Metrics()
    log_rewards(metrics, ["a"], scored, every, lambda x: x + 2)  # sums of the other rank
    logged = metrics.compute(alone, alone)
    assert "rewards/a/std" in logged and "rewards/a/mean" not in logged


def test_lengths_of_episodes_are_of_those_with_a_score_and_failures_of_all():
    def episode(turns, ending="stopped", **more):
        plain = {"messages": ["played"], "columns": {}, "is_overlong": False, "error": None}
        return SimpleNamespace(turns=turns, ending=ending, failed_calls=[], **plain | more)

    episodes = [
        episode(2),
        episode(4, ending="limited"),
        episode(9, ending="limited", error=OSError(), is_overlong=True),
    ]
    metrics = Metrics()
    log_episodes(metrics, episodes, None, torch.tensor([True, True, False]), [], {})
    found = metrics.compute(torch.clone, torch.clone)
    assert (found["episodes/turns"], found["episodes/limited"]) == (3, 0.5)
    assert (found["episodes/overlong"], found["episodes/failed"]) == (0, 1)
