"""An error that ends a run leaves a checkpoint of the last optimizer step, from which the run
resumes bit for bit."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
from datasets import IterableDataset
from processes import finished, start
from runs_of_tiny import trainer, weights
from tiny import length_reward, prompts
from transformers import TrainerCallback

from trl_ppo_ext import RewardError
from trl_ppo_ext.checkpoints import save as saving
from trl_ppo_ext.checkpoints.atomic import checkpoints, verify

TIMED = ("time/", "step_time", "tokens_per_second", "train_")
SETTINGS = {
    "max_steps": 12,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 5,
    "normalize_rewards": True,
    "kl_target": 0.5,
    "kl_horizon": 100,
    "save_total_limit": 1,
    "normalize_values": True,
}
EVALUATED = SETTINGS | {"eval_strategy": "steps", "eval_steps": 5, "eval_dataset": prompts(4)}


class FaultError(Exception):
    pass


def fails_in_reward(built):
    """In the collection of a rollout, once tokens were sampled and metrics logged."""
    built.reward_funcs[0].fails = True


class Reward:
    fails = False

    def __call__(self, completion_ids, trainer_state, **kwargs):
        if self.fails and trainer_state.global_step == 8:
            raise FaultError
        return length_reward(completion_ids)


def fails_after(name, calls):
    """In the call of a method of the trainer after so many that succeed."""

    def install(built):
        method = getattr(built, name)
        left = iter(range(calls))

        def failing(*args, **kwargs):
            if next(left, None) is None:
                raise FaultError
            return method(*args, **kwargs)

        setattr(built, name, failing)

    return install


def logs(built):
    return [
        {name: x for name, x in log.items() if not name.startswith(TIMED)}
        for log in built.state.log_history
        if "reward" in log
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    built = trainer(tmp_path_factory.mktemp("whole"), reward_funcs=Reward(), **EVALUATED)
    built.train()
    return built


@pytest.mark.parametrize(
    ("install", "step"),
    [
        (fails_in_reward, 8),
        (fails_after("compute_loss", 13), 6),  # the second micro-batch of a step
        (fails_after("compute_loss", 17), 8),  # the second one of a rollout, with its new units
        (fails_after("_get_grad_norm", 6), 6),
        (fails_after("evaluate", 1), 10),
    ],
    ids=["reward", "second micro-batch", "new rollout", "before the step", "evaluation"],
)
def test_run_that_fails_resumes_at_its_last_step_bit_for_bit(whole, tmp_path, install, step):
    failing = trainer(tmp_path, reward_funcs=Reward(), **EVALUATED)
    install(failing)
    with pytest.raises(Exception) as error:
        failing.train()
    (checkpoint,) = checkpoints(tmp_path)
    assert checkpoint.name == f"checkpoint-{step}" and failing.state.global_step == step
    verify(checkpoint)
    assert any(str(checkpoint) in note for note in error.value.__notes__)
    again = trainer(tmp_path, reward_funcs=Reward(), **EVALUATED)
    again.train(resume_from_checkpoint=True)
    assert all(torch.equal(x, weights(whole)[name]) for name, x in weights(again).items())
    assert logs(again) == logs(whole)


@pytest.mark.parametrize("error", [FaultError, SystemExit])
def test_callback_that_fails_after_a_step_loses_nothing(whole, tmp_path, error):
    """Evaluations do not change a run."""

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise error

    with pytest.raises(error):
        trainer(tmp_path, reward_funcs=Reward(), callbacks=[Fails()], **SETTINGS).train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]
    again = trainer(tmp_path, reward_funcs=Reward(), **SETTINGS)
    again.train(resume_from_checkpoint=True)
    assert all(torch.equal(x, weights(whole)[name]) for name, x in weights(again).items())


@pytest.mark.parametrize("removes", [False, True])
def test_checkpoint_that_a_callback_changed_outlives_an_error(tmp_path, removes):
    """What it added is kept; one that it moved away is written again."""

    class Changes(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            checkpoint = tmp_path / f"checkpoint-{state.global_step}"
            (checkpoint / "mine").write_text("kept")
            if removes:
                shutil.rmtree(checkpoint)

    def fails(completion_ids, trainer_state, **kwargs):
        if trainer_state.global_step == 4:
            raise FaultError
        return length_reward(completion_ids)

    settings = SETTINGS | {"save_strategy": "steps", "save_steps": 4}
    with pytest.raises(RewardError) as error:
        trainer(tmp_path, reward_funcs=fails, callbacks=[Changes()], **settings).train()
    (checkpoint,) = checkpoints(tmp_path)
    assert (checkpoint / "mine").exists() != removes
    verify(checkpoint)
    assert any(str(checkpoint) in note for note in error.value.__notes__)


FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


def ends_on_two_ranks(built):
    """Train a run that fails, and write down why it ended on this rank."""
    try:
        built.train()
    except Exception as error:
        rank = built.accelerator.process_index
        Path(built.args.output_dir, f"error-{rank}").write_text(f"{error} {error.__notes__}")
        raise SystemExit(3) from error


def check_ends(folder, cause):
    """Both name the cause, and the last step is saved."""
    verify(folder / "checkpoint-4")
    first, second = ((folder / f"error-{rank}").read_text() for rank in range(2))
    assert first.startswith("on rank 1: ") and cause in first and second.startswith(cause)
    assert all("holds all optimizer steps so far" in text for text in (first, second))


@pytest.mark.parametrize("sharding", [{}, FSDP2], ids=["DDP", "FSDP2"])
def test_sampling_error_on_one_rank_ends_all_with_a_checkpoint(tmp_path, sharding):
    def fail():
        built = trainer(tmp_path, max_steps=8, **sharding)
        generator = built.components.player.generator
        sample = generator.generate

        def failing(*args, **kwargs):
            if built.state.global_step == 4 and built.accelerator.process_index == 1:
                raise FaultError("no memory")
            return sample(*args, **kwargs)

        generator.generate = failing
        ends_on_two_ranks(built)

    assert finished(start(fail, 2), bound=60) == [3, 3]
    check_ends(tmp_path, "no memory")


def test_bad_row_of_a_stream_on_one_rank_ends_all_with_a_checkpoint(tmp_path):
    """A rank reads its own rows only."""

    def rows():
        for number, row in enumerate(prompts(40)):
            yield {"prompt": None if number == 30 else row["prompt"]}

    def fail():
        stream = IterableDataset.from_generator(rows)
        ends_on_two_ranks(trainer(tmp_path, dataset=stream, max_steps=8, generation_batch_size=16))

    assert finished(start(fail, 2), bound=60) == [3, 3]
    check_ends(tmp_path, "Row 30 of `train_dataset`")


def test_curriculum_that_fails_on_one_rank_ends_all_with_a_checkpoint(tmp_path):
    def fail():
        def curriculum(episodes, scores):
            if built.state.global_step == 4 and built.accelerator.process_index == 1:
                raise FaultError("no weights")
            return 1 + episodes

        built = trainer(tmp_path, max_steps=8, curriculum=curriculum)
        ends_on_two_ranks(built)

    assert finished(start(fail, 2), bound=60) == [3, 3]
    check_ends(tmp_path, "no weights")


def test_error_in_the_optimizer_leaves_no_inexact_checkpoint(tmp_path):
    class Breaks(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise FaultError  # the weights have changed, the schedule has not

    failing = trainer(tmp_path, callbacks=[Breaks()], **SETTINGS)
    with pytest.raises(FaultError):
        failing.train()
    assert not checkpoints(tmp_path)


def test_error_before_the_first_step_writes_nothing(tmp_path):
    failing = trainer(tmp_path, **SETTINGS)
    fails_after("compute_loss", 0)(failing)
    with pytest.raises(FaultError) as error:
        failing.train()
    assert not checkpoints(tmp_path) and not hasattr(error.value, "__notes__")


def test_error_keeps_other_checkpoints(tmp_path):
    failing = trainer(
        tmp_path, reward_funcs=Reward(), save_strategy="steps", **SETTINGS | {"save_steps": 4}
    )
    fails_in_reward(failing)
    fails_after("compute_loss", 11)(failing)
    with pytest.raises(FaultError):
        failing.train()
    # `save_total_limit` would delete the older one, though the error may be due to the last steps
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-4"]


def test_training_again_after_a_failed_first_step_is_a_new_run(whole, tmp_path):
    """The rollout that nothing was learned from leaves no statistics."""
    built = trainer(tmp_path, reward_funcs=Reward(), **EVALUATED)
    compute_loss = built.compute_loss
    fails_after("compute_loss", 1)(built)
    with pytest.raises(FaultError):
        built.train()
    assert not checkpoints(tmp_path)
    built.compute_loss = compute_loss
    built.train()
    assert built.run_state.to_json() == whole.run_state.to_json()
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(built)[name]), name


def test_failing_disk_does_not_hide_the_error(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    failing = trainer(tmp_path, **SETTINGS)
    fails_after("compute_loss", 5)(failing)
    monkeypatch.setattr(saving, "save_file", full)
    with pytest.raises(FaultError) as error:
        failing.train()
    assert "No space left" in error.value.__notes__[0] and not checkpoints(tmp_path)
