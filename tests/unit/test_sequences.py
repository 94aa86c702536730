"""Sequences, rollouts and their minibatches: padding is exact, and every row is learned from once an epoch."""

import itertools
from dataclasses import fields

import pytest
import torch

from trl_ppo_ext.ppo.batch_plan import BatchPlan
from trl_ppo_ext.ppo.rollouts import Rollout
from trl_ppo_ext.ppo.updates import schedule
from trl_ppo_ext.sequences import Sequences

PAD = 99
PROMPTS = [[11, 12, 13], [21], [31, 32], [41, 42, 43, 44]]
COMPLETIONS = [[15], [25, 26, 27], [35, 36, 37, 38, 39], [45, 46]]
TENSORS = ["response_mask", "old_logprobs", "advantages", "ref_logprobs", "old_values", "returns"]


def sequences(rows=range(4), pad=PAD):
    return Sequences.from_token_ids([PROMPTS[r] for r in rows], [COMPLETIONS[r] for r in rows], pad, "cpu")


def rollout(rows=4):
    """A rollout in which every number says where it comes from: 100·row + position, and 1000 more by field."""
    part = sequences([r % 4 for r in range(rows)])
    place = 100 * torch.arange(rows)[:, None] + torch.arange(part.completion_ids.shape[1])
    return Rollout(part, part.completion_mask, *(place + 1000 * (k + 1) for k in range(len(TENSORS) - 1)))


def same(one, other):
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(Sequences)]
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    padded = sequences()
    assert padded.prompt_ids[:2].tolist() == [[PAD, 11, 12, 13], [PAD, PAD, PAD, 21]]
    assert padded.completion_ids[:2].tolist() == [[15, PAD, PAD, PAD, PAD], [25, 26, 27, PAD, PAD]]
    assert padded.prompt_lengths.tolist() == [3, 1, 2, 4]
    assert padded.completion_lengths.tolist() == [1, 3, 5, 2]
    assert len(padded) == 4


def test_masks_find_the_tokens_again_whatever_padding_is_filled_with():
    for pad in (PAD, 11, 25, 39):  # also with an id that is a real token elsewhere
        padded = sequences(pad=pad)
        for row in range(4):
            mask = padded.attention_mask[row].bool()
            assert padded.input_ids[row][mask].tolist() == PROMPTS[row] + COMPLETIONS[row]
            assert padded.completion_ids[row][padded.completion_mask[row]].tolist() == COMPLETIONS[row]
        assert torch.equal(padded.attention_mask[:, 4:].bool(), padded.completion_mask)


@pytest.mark.parametrize("make", [sequences, lambda rows=range(4): episodes(rows)], ids=["one turn", "turns"])
def test_rows_are_what_padding_those_rows_alone_gives(make):
    for rows in (rows for n in (1, 2, 3, 4) for rows in itertools.permutations(range(4), n)):
        assert same(make().rows(torch.tensor(rows)), make(rows)), rows


def test_rows_of_a_rollout_keep_each_number_at_its_token():
    whole = rollout()
    part = whole.rows(torch.tensor([3, 1]))
    assert same(part.sequences, sequences([3, 1]))
    for name in TENSORS:
        assert torch.equal(getattr(part, name), getattr(whole, name)[[3, 1], :3]), name


# ---- turns ----

SAMPLED = [[1], [1, 0, 1], [1, 1, 0, 0, 1], [1, 1]]


def episodes(rows=range(4)):
    ids = [PROMPTS[r] for r in rows], [COMPLETIONS[r] for r in rows]
    return Sequences.from_token_ids(*ids, PAD, "cpu", sampled=[SAMPLED[r] for r in rows])


def test_tokens_of_the_environment_are_read_and_not_picked():
    mixed, plain = episodes(), sequences()
    assert torch.equal(mixed.attention_mask, plain.attention_mask) and torch.equal(mixed.lengths, plain.lengths)
    assert mixed.pick(mixed.completion_ids).tolist() == [15, 25, 27, 35, 36, 39, 45, 46]
    assert mixed.positions.tolist() == [0, 0, 2, 0, 1, 4, 0, 1]
    assert torch.equal(mixed.spread(torch.ones(8)).bool(), mixed.completion_mask)
    assert mixed.completion_mask.long().tolist()[2] == SAMPLED[2]


def test_rollout_in_progress_keeps_the_mask_of_sampled_tokens():
    saved = Rollout(episodes(), *(torch.ones(4, 5) for _ in range(3))).state_dict()
    assert same(Rollout.from_state_dict(saved, "cpu").sequences, episodes())


# ---- minibatches ----


def test_micro_batches_of_a_minibatch_hold_rows_of_about_the_same_length():
    plan = BatchPlan(2, 3, 2, num_ppo_epochs=3)
    lengths = torch.tensor([5, 1, 9, 9, 2, 7, 3, 3, 8, 1, 6, 4])
    torch.manual_seed(0)
    unsorted = schedule(torch.ones(12), plan)
    torch.manual_seed(0)
    rows = schedule(lengths, plan)
    for step, (minibatch, drawn) in enumerate(zip(rows, unsorted)):
        assert sorted(minibatch.flatten().tolist()) == sorted(drawn.flatten().tolist()), step  # its loss is the same
        assert lengths[minibatch.flatten()].tolist() == sorted(lengths[drawn.flatten()].tolist(), reverse=True)
