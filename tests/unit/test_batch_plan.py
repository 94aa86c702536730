"""Batch sizes: products over a grid, and errors whose remedies work."""

import itertools
import math
import re

import pytest

from trl_ppo_ext.batch_plan import BatchPlan, factor_of


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


@pytest.mark.parametrize(
    "micro, mini, group, processes", itertools.product((1, 8, 12), (1, 4, 5), (1, 3, 8), (1, 2))
)
def test_larger_rollout_that_a_note_advises_can_be_set(micro, mini, group, processes):
    sizes = {"num_mini_batches": mini, "num_generations": group, "num_processes": processes}
    plan = BatchPlan(micro, gradient_accumulation_steps=group, **sizes)
    if plan.completions >= 64:
        return
    [advised] = numbers_after("`generation_batch_size=", plan.summary(1, 1).split("note:")[1])[:1]
    assert advised >= 128
    larger = BatchPlan(micro, advised // (micro * mini * processes), **sizes)
    assert larger.completions == advised


def test_generations_must_divide_the_rollout():
    with pytest.raises(
        ValueError, match="num_generations=5` does not divide the rollout of 48 completions"
    ) as caught:
        BatchPlan(
            micro_batch_size=4,
            gradient_accumulation_steps=2,
            num_mini_batches=3,
            num_generations=5,
            num_processes=2,
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
        assert (
            BatchPlan(4, 2, 3, num_generations=num_generations, num_processes=2).prompts
            == 48 // num_generations
        )


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
