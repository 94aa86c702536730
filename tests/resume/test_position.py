"""A run that is resumed draws the prompts that it would have drawn."""

import pytest
from runs_of_tiny import trainer
from tiny import length_reward, prompts


def drawing(tmp_path, dataset, **settings):
    """A trainer, and where the prompts of each of its rollouts will be, by the optimizer steps
    before it."""
    drawn = {}

    def reward(completion_ids, prompts, trainer_state, **kwargs):
        drawn[trainer_state.global_step] = prompts
        return length_reward(completion_ids)

    settings = {"max_steps": 16, "save_strategy": "steps", "save_steps": 6} | settings
    return trainer(tmp_path, reward_funcs=reward, dataset=dataset, **settings), drawn


def check_position(tmp_path, dataset):
    whole, expected = drawing(tmp_path, dataset)
    whole.train()
    assert sorted(expected) == [0, 4, 8, 12]
    assert len({tuple(drawn) for drawn in expected.values()}) == 4
    for step in (6, 12):
        again, drawn = drawing(tmp_path / str(step), dataset)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert drawn == {at: prompts for at, prompts in expected.items() if at >= step}, step
        assert again.state.global_step == 16


# in rollouts of 8: three epochs of 12 or 13 prompts, seven of 5
@pytest.mark.parametrize("rows", [12, 5])
def test_dataset_continues_in_any_epoch(tmp_path, rows):
    check_position(tmp_path, prompts(rows))


def test_stream_continues_in_any_epoch(tmp_path):
    check_position(tmp_path, prompts(13).to_iterable_dataset().shuffle(seed=1, buffer_size=6))


def test_stream_continues_in_a_longer_run(tmp_path):
    """Its position does not depend on how long the run was meant to be."""
    stream = prompts(13).to_iterable_dataset().shuffle(seed=1, buffer_size=6)
    whole, expected = drawing(
        tmp_path / "whole", stream, save_strategy="no", lr_scheduler_type="constant"
    )
    whole.train()
    first, drawn = drawing(tmp_path, stream, max_steps=6, lr_scheduler_type="constant")
    first.train()
    longer, after = drawing(
        tmp_path, stream, lr_scheduler_type="constant", resume_with_changed_settings=True
    )
    longer.train(resume_from_checkpoint=True)
    assert drawn | after == expected and min(after) == 8


def test_finished_run_takes_no_further_step(tmp_path):
    first, _ = drawing(tmp_path, prompts(12), max_steps=5, save_steps=5)
    first.train()
    again, drawn = drawing(tmp_path, prompts(12), max_steps=5, save_steps=5)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5 and not drawn
