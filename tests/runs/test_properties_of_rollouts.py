"""Invariants of advantages, coefficients and batches on the cases that hypothesis generates."""

import itertools
import math
from functools import cache
from itertools import chain

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from hypothesis import given
from hypothesis import strategies as st
from properties import GARBAGE, batches, close, property_test, seeds
from tiny import config
from torch.utils.data import BatchSampler

from trl_ppo_ext.batch_plan import BatchPlan, factor_of
from trl_ppo_ext.data import RolloutSampler
from trl_ppo_ext.ppo.advantages import Discounts, divide_by_unit, gae_with_critic, group_advantages
from trl_ppo_ext.ppo.metrics import Metrics
from trl_ppo_ext.ppo.progress import RolloutInProgress
from trl_ppo_ext.ppo.rollouts import Rollout
from trl_ppo_ext.ppo.updates import Updates
from trl_ppo_ext.ppo_math import (
    Moments,
    adapt_kl_coef,
    dr_grpo_advantages,
    explained_variance,
    grpo_advantages,
    length_adaptive_lambda,
    rloo_advantages,
    token_rewards,
    whiten,
)
from trl_ppo_ext.sequences import Sequences

# ---- rewards and advantages ----


@property_test
@given(batches(tensors=2), seeds, st.floats(0, 2), st.sampled_from(GARBAGE))
def test_token_rewards_add_up_to_the_score_minus_the_kl(batch, seed, kl_coef, garbage):
    tokens, kl, _ = batch
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens.shape[1] + 1, (len(tokens),), generator=generator)
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    shaped = torch.randn(len(tokens), generator=generator, dtype=torch.float64)
    tokens = tokens * mask
    rewards = token_rewards(tokens, shaped, kl.masked_fill(~mask, garbage), mask, kl_coef)
    close(rewards.sum(1), shaped - kl_coef * (kl * mask).sum(1), rtol=1e-7, atol=1e-7)
    assert (rewards[~mask] == 0).all()
    close(token_rewards(tokens, tokens.sum(1), kl, mask, 0.0), tokens)


@pytest.mark.parametrize("single", [False, True])
@property_test
@given(st.integers(1, 3), st.sampled_from([0.0, 1.0, -1e3, 0.1]), seeds)
def test_degenerate_rollouts_have_finite_advantages(single, groups, score, seed):
    """All scores equal, one token each, rows of which nothing counts."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * groups
    if single:
        width = 1
    else:
        width = 5
    mask = torch.rand(rows, width, generator=generator) < 0.5
    rewards = torch.full((rows, width), score)
    outputs = torch.zeros(rows, width)
    for lam, normalized in itertools.product(
        (0.95, length_adaptive_lambda(mask, 0.05)), (False, True)
    ):
        discounts = Discounts(1.0, lam, 0.95)
        result, seen = gae_with_critic(rewards, outputs, mask, Moments(), normalized, discounts)
        scaled, (white, _) = divide_by_unit(result, seen), whiten(result.advantages, mask)
        assert all(
            x.isfinite().all()
            for x in (result.advantages, result.returns, scaled.advantages, white)
        )
        assert (white[~mask] == 0).all()
        assert explained_variance(result.values, result.returns, mask).isfinite()
    counted = torch.rand(rows, generator=generator) < 0.5
    scores = torch.full((rows,), score)
    for estimator in ("grpo", "dr_grpo", "rloo"):
        assert not group_advantages(estimator, scores[:, None], counted, 2).advantages.any()
    failed = scores.masked_fill(~counted, math.nan)[:, None]
    assert torch.equal(
        group_advantages("reinforce", failed, counted, 2).advantages[:, 0], scores * counted
    )


@pytest.mark.parametrize("function", [grpo_advantages, dr_grpo_advantages, rloo_advantages])
@property_test
@given(st.integers(1, 4), st.integers(2, 5), seeds, st.floats(-50, 50), st.sampled_from(GARBAGE))
def test_order_of_groups_and_members_changes_nothing(function, groups, size, seed, shift, garbage):
    """And neither a shift of all scores nor what a failed one holds matters."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(groups * size, generator=generator, dtype=torch.float64)
    counts = torch.rand(groups * size, generator=generator) < 0.8
    expected = function(scores, counts, size)
    order = torch.stack(
        [group * size + torch.randperm(size, generator=generator) for group in range(groups)]
    )
    order = order[torch.randperm(groups, generator=generator)].flatten()
    close(function(scores[order], counts[order], size), expected[order])
    close(function(scores + shift, counts, size), expected, rtol=1e-6, atol=1e-6)
    close(function(scores.masked_fill(~counts, garbage), counts, size), expected)
    close(expected.reshape(groups, size).sum(1), expected.new_zeros(groups), atol=1e-6)


# ---- coefficients ----

measurements = st.lists(
    st.one_of(st.floats(0, 1e6), st.sampled_from([math.nan, math.inf, -math.inf])), max_size=30
)


@property_test
@given(st.floats(1e-4, 10), st.floats(1e-3, 100), measurements)
def test_adaptive_kl_stays_positive_and_approaches_its_target(value, target, measured):
    for kl in measured:
        before = value
        value = adapt_kl_coef(value, kl, target, 100, 64)
        ratio = value / before
        assert 0 < value < math.inf and 1 - 0.2 * 0.64 - 1e-9 <= ratio <= 1 + 0.2 * 0.64 + 1e-9
        if math.isfinite(kl):
            assert (ratio >= 1) if kl > target else (ratio <= 1)
        else:
            assert ratio == 1


# ---- batches ----

small = st.integers(1, 4)


@st.composite
def plans(draw):
    sizes = {
        "micro_batch_size": draw(small),
        "gradient_accumulation_steps": draw(st.integers(1, 3)),
        "num_mini_batches": draw(st.integers(1, 3)),
        "num_ppo_epochs": draw(st.integers(1, 3)),
        "num_processes": draw(st.integers(1, 3)),
    }
    completions = BatchPlan(**sizes).completions
    divisors = [d for d in range(1, completions + 1) if completions % d == 0]
    return BatchPlan(**sizes, num_generations=draw(st.sampled_from(divisors)))


@property_test
@given(plans())
def test_sizes_of_a_plan_multiply_out(plan):
    assert plan.completions == plan.prompts * plan.num_generations
    per_epoch = plan.num_mini_batches * plan.gradient_accumulation_steps
    assert plan.completions == per_epoch * plan.micro_batch_size * plan.num_processes
    assert plan.micro_steps == per_epoch * plan.num_ppo_epochs
    again = factor_of(
        plan.completions,
        "num_mini_batches",
        plan.num_mini_batches,
        plan.micro_batch_size,
        plan.num_processes,
    )
    assert again == plan.gradient_accumulation_steps


def rollout_of(size, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(1, 5, (2,), generator=generator).tolist() for _ in range(size)]
    prompts, completions = (
        [[row + 1] * pair[side] for row, pair in enumerate(lengths)] for side in (0, 1)
    )
    sequences = Sequences.from_token_ids(prompts, completions, pad_token_id=0, device="cpu")
    numbers = sequences.completion_ids.float()  # every number says whose row it is; 0 is padding
    return Rollout(sequences, sequences.completion_mask, numbers, numbers, numbers)


@cache
def settings():
    return config("unused")


def updates_of(plan):
    return Updates(settings(), plan, Metrics(), lambda x: x)


@property_test
@given(plans(), seeds, st.data())
def test_every_row_comes_once_per_epoch_also_when_resumed(plan, seed, data):
    torch.manual_seed(seed)
    size = plan.completions_per_process
    updates = updates_of(plan)
    updates.start(rollout_of(size, seed), 0)
    start = data.draw(st.integers(1, plan.optimizer_steps))
    updates.stopped_early = data.draw(st.booleans())
    unfinished = updates.in_progress(start)
    whole = list(updates.micro_batches)
    assert len(whole) == plan.micro_steps
    seen = [batch.rollout.sequences.completion_ids[:, 0].sub(1).tolist() for batch in whole]
    per_epoch = len(whole) // plan.num_ppo_epochs
    for epoch in range(plan.num_ppo_epochs):
        of_epoch = list(chain(*seen[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert sorted(of_epoch) == list(range(size))
    assert [batch.step for batch in whole] == [
        step
        for step in range(plan.optimizer_steps)
        for _ in range(plan.gradient_accumulation_steps)
    ]
    if start == plan.optimizer_steps:  # between two rollouts
        assert unfinished is None
        return
    resumed = updates_of(plan)
    saved = unfinished.tensors()
    resumed.resume(RolloutInProgress.from_tensors(saved, "cpu"), start)
    assert resumed.stopped_early == updates.stopped_early
    rest = list(resumed.micro_batches)
    done = start * plan.gradient_accumulation_steps
    assert len(rest) == len(whole) - done
    for one, other in zip(whole[done:], rest):
        assert one.step == other.step and torch.equal(one.denominator, other.denominator)
        for name, tensor in one.rollout.state_dict().items():
            assert torch.equal(tensor, other.rollout.state_dict()[name]), name


@property_test
@given(plans(), seeds)
def test_micro_batch_has_only_the_padding_it_needs(plan, seed):
    updates = updates_of(plan)
    updates.start(rollout_of(plan.completions_per_process, seed), 0)
    for batch in updates.micro_batches:
        part = batch.rollout
        mask = part.sequences.completion_mask
        assert mask.any(0).all() and torch.equal(mask, part.response_mask)
        assert len(part.sequences.packed.input_ids) == part.sequences.lengths.sum()
        for numbers, row in zip(part.advantages, part.sequences.prompt_ids[:, -1]):
            assert set(numbers.tolist()) <= {0.0, float(row)}


@property_test
@given(
    plans(), st.integers(1, 25), st.booleans(), st.integers(0, 1000), st.integers(0, 3), st.data()
)
def test_ranks_share_each_rollout_in_whole_groups(plan, rows, shuffle, seed, epoch, data):
    """Cut into batches and shares as Accelerate does it, also when a run resumes."""
    rollouts = -(-rows // plan.prompts)
    steps = epoch * rollouts * plan.optimizer_steps
    sampler = RolloutSampler(rows, plan, shuffle, seed, lambda: (steps, steps + 1))
    drawn = list(sampler)
    assert drawn == list(sampler) and len(drawn) == len(sampler)
    assert set(drawn) == set(range(rows))  # no prompt is dropped
    counts = [drawn.count(row) for row in range(rows)]
    # nor drawn twice before the others
    assert max(counts) - min(counts) <= plan.num_generations * plan.micro_steps

    def share(rank):
        whole = BatchSampler(sampler, plan.completions_per_process, drop_last=True)
        return BatchSamplerShard(whole, plan.num_processes, rank, split_batches=False)

    shares = [list(share(rank)) for rank in range(plan.num_processes)]
    assert {len(of_rank) for of_rank in shares} == {sampler.rollouts * plan.micro_steps}
    for position, parts in enumerate(zip(*shares)):
        together = list(chain(*parts))
        first = position - position % plan.micro_steps
        assert together == list(
            chain(*(of_rank[first] for of_rank in shares))
        )  # the rollout, for each of its micro-steps
        groups = [
            together[i : i + plan.num_generations]
            for i in range(0, len(together), plan.num_generations)
        ]
        assert all(len(set(group)) == 1 for group in groups) and len(groups) == plan.prompts
        rollout = position // plan.micro_steps * plan.completions * plan.micro_steps
        assert together == drawn[rollout : rollout + plan.completions]
    done = data.draw(st.integers(0, len(shares[0])))
    for rank, batches_of_rank in enumerate(shares):
        assert list(SkipBatchSampler(share(rank), done)) == batches_of_rank[done:]
