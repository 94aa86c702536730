"""Sequences, rollouts and their minibatches: padding is exact, and every row is learned from
once an epoch."""

import itertools
from dataclasses import fields, replace

import pytest
import torch
from tiny import config

from trl_ppo_ext.batch_plan import BatchPlan
from trl_ppo_ext.ppo.rollouts import Rollout, cut, micro_batches
from trl_ppo_ext.ppo.updates import schedule
from trl_ppo_ext.sequences import ROLES, Sequences

PAD = 99
PROMPTS = [[11, 12, 13], [21], [31, 32], [41, 42, 43, 44]]
COMPLETIONS = [[15], [25, 26, 27], [35, 36, 37, 38, 39], [45, 46]]
TENSORS = ["response_mask", "old_logprobs", "advantages", "ref_logprobs", "old_values", "targets"]


def sequences(rows=range(4), pad=PAD):
    return Sequences.from_token_ids(
        [PROMPTS[r] for r in rows], [COMPLETIONS[r] for r in rows], pad, "cpu"
    )


def rollout(rows=4):
    """A rollout in which every number says where it comes from: 100·row + position, and 1000
    more by field."""
    part = sequences([r % 4 for r in range(rows)])
    place = 100 * torch.arange(rows)[:, None] + torch.arange(part.completion_ids.shape[1])
    return Rollout(
        part, part.completion_mask, *(place + 1000 * (k + 1) for k in range(len(TENSORS) - 1))
    )


def same(one, other):
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(Sequences)]
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


def test_prompts_are_padded_left_and_completions_right():
    padded = sequences()
    assert padded.prompt_ids[:2].tolist() == [[PAD, 11, 12, 13], [PAD, PAD, PAD, 21]]
    assert padded.completion_ids[:2].tolist() == [[15, PAD, PAD, PAD, PAD], [25, 26, 27, PAD, PAD]]
    assert padded.prompt_lengths.tolist() == [3, 1, 2, 4]
    assert padded.completion_lengths.tolist() == [1, 3, 5, 2]
    assert len(padded) == 4


def test_masks_recover_the_tokens_with_any_padding_id():
    for pad in (PAD, 11, 25, 39):  # also with an id that is a real token elsewhere
        padded = sequences(pad=pad)
        for row in range(4):
            mask = padded.attention_mask[row].bool()
            assert padded.input_ids[row][mask].tolist() == PROMPTS[row] + COMPLETIONS[row]
            assert (
                padded.completion_ids[row][padded.completion_mask[row]].tolist() == COMPLETIONS[row]
            )
        assert torch.equal(padded.attention_mask[:, 4:].bool(), padded.completion_mask)


@pytest.mark.parametrize(
    "make", [sequences, lambda rows=range(4): episodes(rows)], ids=["one turn", "turns"]
)
def test_rows_are_what_padding_those_rows_alone_gives(make):
    for rows in (rows for n in (1, 2, 3, 4) for rows in itertools.permutations(range(4), n)):
        part = make().rows(torch.tensor(rows))
        alone = make(rows)
        assert same(
            replace(part, prompt_ids=part.prompt_ids[:, -alone.prompt_ids.shape[1] :]), alone
        ), rows
        assert all(
            x is y or bool(torch.as_tensor(x == y).all()) for x, y in zip(part.packed, alone.packed)
        )


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


def test_packed_rows_are_chained_and_read_before_sampled_tokens():
    packed = episodes().packed
    rows = [PROMPTS[r] + COMPLETIONS[r] for r in range(4)]
    assert packed.input_ids.tolist() == list(itertools.chain(*rows))
    assert packed.position_ids.tolist() == list(itertools.chain(*(range(len(row)) for row in rows)))
    assert packed.starts.tolist() == [0, *itertools.accumulate(map(len, rows))]
    following = packed.input_ids[packed.reads + 1]
    assert torch.equal(following, episodes().pick(episodes().completion_ids))
    begins = [PROMPTS[0][-1], PROMPTS[1][-1], COMPLETIONS[1][1]]
    begins += [PROMPTS[2][-1]] * 2 + [COMPLETIONS[2][3]] + [PROMPTS[3][-1]] * 2
    assert packed.input_ids[packed.turn_begins].tolist() == begins
    padded = packed.pad(packed.input_ids)
    assert [
        ids[: len(row)].tolist() for ids, row in zip(padded, rows)
    ] == rows and padded.shape == (4, 7)
    assert torch.equal(packed.unpad(padded), packed.input_ids)


def test_padding_keeps_only_places_for_its_backward():
    packed = episodes().packed
    kept = []
    x = torch.randn(len(packed.input_ids), 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: kept.append(saved) or saved, lambda saved: saved
    ):
        padded = packed.pad(x)
    assert all(torch.equal(saved, packed.cells) for saved in kept)
    (gradient,) = torch.autograd.grad(padded.square().sum(), x)
    assert torch.equal(gradient, 2 * x)


def test_tokens_of_the_environment_are_read_and_not_picked():
    mixed = episodes()
    plain = sequences()
    assert torch.equal(mixed.attention_mask, plain.attention_mask) and torch.equal(
        mixed.lengths, plain.lengths
    )
    assert mixed.pick(mixed.completion_ids).tolist() == [15, 25, 27, 35, 36, 39, 45, 46]
    assert mixed.positions.tolist() == [0, 0, 2, 0, 1, 4, 0, 1]
    assert torch.equal(mixed.spread(torch.ones(8)).bool(), mixed.completion_mask)
    assert mixed.completion_mask.long().tolist()[2] == SAMPLED[2]


def test_rollout_in_progress_keeps_the_mask_of_sampled_tokens():
    saved = Rollout(episodes(), *(torch.ones(4, 5) for _ in range(3))).state_dict()
    assert same(Rollout.from_state_dict(saved, "cpu").sequences, episodes())


# ---- minibatches ----


def test_minibatches_of_an_epoch_hold_every_row_once():
    rows = schedule(BatchPlan(2, 3, 2, num_ppo_epochs=3))
    assert rows.shape == (6, 6) and rows[:2].flatten().tolist() == list(range(12))
    assert all(epoch.flatten().sort().values.tolist() == list(range(12)) for epoch in rows.split(2))


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7])
def test_cut_makes_the_largest_micro_batch_as_small_as_possible(parts):
    lengths = torch.randint(1, 12, (7,), generator=torch.Generator().manual_seed(parts))
    cut_rows = cut(torch.tensor([6, 0, 3, 1, 5, 2, 4]), lengths, parts)
    assert len(cut_rows) == parts and torch.cat(cut_rows).sort().values.tolist() == list(range(7))
    best = lengths.sort(descending=True).values

    def largest(batches):
        return max(len(x) * int(x.max()) for x in batches)

    others = itertools.combinations(range(1, 7), parts - 1)
    assert largest([lengths[rows] for rows in cut_rows]) == min(
        largest(best.tensor_split(ends)) for ends in others
    )


@pytest.mark.parametrize("role", ROLES)
def test_micro_batches_are_cut_by_the_role_that_reads_most(role, tmp_path):
    others = {role: [[1] * n for n in (1, 9, 2, 3)]}
    batch = Sequences.from_token_ids(PROMPTS, COMPLETIONS, PAD, "cpu", others)
    assert batch.longest_lengths.tolist() == [4, 12, 7, 6]
    args = config(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert [rows.tolist() for rows in micro_batches(args, batch)] == [[1], [2, 3, 0]]


def test_cut_of_rows_of_one_length_makes_equal_micro_batches():
    assert [len(rows) for rows in cut(torch.arange(12), torch.full((12,), 5), 4)] == [3] * 4
