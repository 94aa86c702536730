"""Batch sizes: products that hold over a grid, and errors whose remedy works."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest

from trl_ppo_ext.ppo.batch_plan import BatchPlan, accumulation_for


def numbers_after(text, message):
    """The numbers that a remedy names: "use 4 or 6." -> [4, 6]."""
    assert text in message, message
    return [int(number) for number in re.findall(r"\d+", message.split(text)[1].split(",")[0])]


def test_every_size_of_a_rollout_by_hand():
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


def test_a_plan_takes_each_size_from_the_config():
    config = SimpleNamespace(
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
        num_mini_batches=2,
        num_ppo_epochs=4,
        num_generations=6,
    )
    assert BatchPlan.from_config(config, num_processes=7) == BatchPlan(3, 5, 2, 4, 6, 7)


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BatchPlan(2).micro_batch_size = 3


def test_epochs_pass_over_every_completion_exactly_once():
    for *sizes, processes in itertools.product([1, 3], [1, 2], [1, 4], [1, 2], [1, 2]):
        plan = BatchPlan(*sizes, num_processes=processes)
        seen = plan.micro_steps * plan.micro_batch_size * plan.num_processes
        assert seen == plan.num_ppo_epochs * plan.completions, plan
        assert plan.micro_steps == plan.optimizer_steps * plan.gradient_accumulation_steps, plan


def test_generations_that_do_not_divide_the_rollout_are_refused_with_all_numbers():
    with pytest.raises(ValueError, match="num_generations=5 does not divide the rollout of 48 completions") as caught:
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


def test_accumulation_multiplies_back_to_the_rollout_or_cannot():
    for completions, num_mini_batches, micro, processes in GRID:
        if completions % (num_mini_batches * micro * processes):
            with pytest.raises(ValueError, match=str(completions)):
                accumulation_for(completions, num_mini_batches, micro, processes)
        else:
            steps = accumulation_for(completions, num_mini_batches, micro, processes)
            plan = BatchPlan(micro, steps, num_mini_batches, num_processes=processes)
            assert plan.completions == completions, plan


def remedies(message, sizes):
    """The sizes that an error of `accumulation_for` tells a user to take instead."""
    if "does not divide" in message:
        return [sizes | {"num_mini_batches": n} for n in numbers_after("use", message)]
    if "use a per_device_train_batch_size of" in message:
        offered = numbers_after("use a per_device_train_batch_size of", message)
        return [sizes | {"micro_batch_size": n} for n in offered]
    (multiple,) = numbers_after("make generation_batch_size a multiple of", message)
    return [sizes | {"generation_batch_size": multiple * k} for k in (1, 2)]


def test_following_the_remedies_ends_in_a_plan():
    names = ("generation_batch_size", "num_mini_batches", "micro_batch_size", "num_processes")
    for start in GRID:
        open_ends = [dict(zip(names, start))]
        for _ in range(4):  # an error for each of three sizes, then none
            unsolved = []
            for sizes in open_ends:
                try:
                    accumulation_for(**sizes)
                except ValueError as error:
                    unsolved += remedies(str(error), sizes)
            open_ends = unsolved
        assert not open_ends, start


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((96, 5, 4, 1), r"num_mini_batches=5 does not divide the rollout of 96 completions.*use .*4 or 6"),
        (
            (96, 4, 5, 1),
            r"minibatch of 24 completions \(generation_batch_size 96 / num_mini_batches 4\).*micro-batches of 5 ",
        ),
        (
            (96, 4, 5, 2),
            r"micro-batches of 10 \(per_device_train_batch_size 5 × 2 processes\).* of 3 or 4 or 6 or 12\.",
        ),
        ((15, 5, 1, 2), r"minibatch of 3 completions.*make generation_batch_size a multiple of 10\."),
    ],
)
def test_a_rollout_that_cannot_be_cut_up_is_refused_with_numbers_and_remedy(sizes, message):
    with pytest.raises(ValueError, match=message):
        accumulation_for(*sizes)
