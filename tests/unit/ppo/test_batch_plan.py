"""Batch sizes: products over a grid, and errors whose remedies work."""

import dataclasses
import itertools
import math
import re
from types import SimpleNamespace

import pytest

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.ppo.batch_plan import BatchPlan, factor_of


def numbers_after(text, message):
    """The numbers that a remedy names: "use 4 or 6." -> [4, 6]."""
    assert text in message, message
    return [int(number) for number in re.findall(r"\d+", message.split(text)[1].split(",")[0])]


def test_sizes_match_a_plan_by_hand():
    plan = BatchPlan(
        micro_batch_size=3,
        gradient_accumulation_steps=5,
        num_mini_batches=2,
        num_ppo_epochs=4,
        num_generations=6,
        num_processes=7,
    )
    assert plan.mini_batch_size == 15
    assert plan.completions_per_process == 30
    assert plan.completions == 210
    assert plan.prompts == 35
    assert plan.optimizer_steps == 8
    assert plan.micro_steps == 40


def test_plan_takes_each_size_from_the_config():
    config = SimpleNamespace(
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
        num_mini_batches=2,
        num_ppo_epochs=4,
        num_generations=6,
    )
    assert PPOConfig.plan(config, num_processes=7) == BatchPlan(3, 5, 2, 4, 6, 7)


def test_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BatchPlan(2).micro_batch_size = 3


def test_epochs_use_every_completion_once():
    for *sizes, processes in itertools.product([1, 3], [1, 2], [1, 4], [1, 2], [1, 2]):
        plan = BatchPlan(*sizes, num_processes=processes)
        seen = plan.micro_steps * plan.micro_batch_size * plan.num_processes
        assert seen == plan.num_ppo_epochs * plan.completions, plan
        assert plan.micro_steps == plan.optimizer_steps * plan.gradient_accumulation_steps, plan


def test_generations_must_divide_the_rollout():
    with pytest.raises(ValueError, match="num_generations=5` does not divide the rollout of 48 completions") as caught:
        BatchPlan(
            micro_batch_size=4, gradient_accumulation_steps=2, num_mini_batches=3, num_generations=5, num_processes=2
        )
    message = str(caught.value)
    for number in (
        "per_device_train_batch_size 4",
        "gradient_accumulation_steps 2",
        "num_mini_batches 3",
        "2 processes",
    ):
        assert number in message
    offered = numbers_after("use one of", message.replace(", ", " "))
    assert {4, 6} <= set(offered)  # those next to what was asked for
    for num_generations in offered:
        assert BatchPlan(4, 2, 3, num_generations=num_generations, num_processes=2).prompts == 48 // num_generations


GRID = list(itertools.product([1, 6, 16, 24, 96, 97], [1, 2, 3, 5], [1, 2, 3, 4], [1, 2, 3]))


def test_accumulation_multiplies_back_to_the_rollout():
    for completions, num_mini_batches, micro, processes in GRID:
        if completions % (num_mini_batches * micro * processes):
            with pytest.raises(ValueError, match=str(completions)):
                factor_of(completions, "num_mini_batches", num_mini_batches, micro, processes)
        else:
            steps = factor_of(completions, "num_mini_batches", num_mini_batches, micro, processes)
            plan = BatchPlan(micro, steps, num_mini_batches, num_processes=processes)
            assert plan.completions == completions, plan


def test_accumulation_remedies_make_a_plan():
    for completions, *sizes in GRID:
        if completions % math.prod(sizes):
            with pytest.raises(ValueError, match="must be a multiple of") as caught:
                factor_of(completions, "num_mini_batches", *sizes)
            offered = numbers_after("use", str(caught.value).split("; ")[1])
            assert offered
            for size in offered:
                assert factor_of(size, "num_mini_batches", *sizes) * math.prod(sizes) == size
                assert abs(size - completions) < math.prod(sizes)  # the nearest


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((96, 5, 4, 1), r"multiple of 20 \(num_mini_batches 5 × .* × 1 processes\), got 96; use 80 or 100, or"),
        ((96, 4, 5, 1), r"multiple of 20 .*per_device_train_batch_size 5 .*got 96; use 80 or 100, or"),
        ((96, 4, 5, 2), r"multiple of 40 .*per_device_train_batch_size 5 × 2 processes.*use 80 or 120, or"),
        ((15, 5, 1, 2), r"multiple of 10 .*got 15; use 10 or 20, or"),
        ((3, 5, 1, 2), r"multiple of 10 .*got 3; use 10, or"),
    ],
)
def test_accumulation_refuses_uneven_rollouts(sizes, message):
    with pytest.raises(ValueError, match=message):
        factor_of(sizes[0], "num_mini_batches", *sizes[1:])
