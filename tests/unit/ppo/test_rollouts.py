"""Rollouts: rows, devices, checkpoints, and the order of their micro-batches."""

import pytest
import torch
from runs_of_tiny import rollout
from safetensors.torch import load_file, save_file

from trl_ppo_ext.ppo.rollouts import Rollout


def everything(batch):
    """All tensors of a rollout, those of its sequences included."""
    token_ids = {
        name: x for name, x in vars(batch.sequences).items() if isinstance(x, torch.Tensor)
    }
    return token_ids | batch.tensors


def same(one, other):
    one = everything(one)
    other = everything(other)
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )


def test_rows_keep_the_coefficient():
    part = rollout(kl_coef=0.3).rows(torch.tensor([1, 0])).to("cpu")
    assert part.kl_coef == 0.3


def test_moved_rollouts_keep_lengths_on_the_cpu():
    moved = rollout().to("meta")
    assert {name: x.device.type for name, x in everything(moved).items()} == {
        name: "cpu" if name.endswith("lengths") else "meta" for name in everything(moved)
    }


@pytest.mark.parametrize("critic", [True, False])
def test_rollout_survives_a_checkpoint_bit_for_bit(tmp_path, critic):
    batch = rollout(rows=6, critic=critic, kl_coef=1 / 3)
    save_file(batch.state_dict(), tmp_path / "rollout.safetensors")
    again = Rollout.from_state_dict(load_file(tmp_path / "rollout.safetensors"), "cpu")
    assert same(again, batch)
    assert again.kl_coef == 1 / 3
    assert (again.old_values is None) == (not critic)
