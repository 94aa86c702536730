"""A run's directory: moved, copied, used twice, or shared by two runs."""

import json
import logging
import shutil
from pathlib import Path
from threading import Timer

import pytest
import torch
from runs_of_tiny import trainer
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.checkpoints import resume
from trl_ppo_ext.checkpoints.atomic import checkpoints, verify
from trl_ppo_ext.checkpoints.files import CheckpointError
from trl_ppo_ext.checkpoints.resume import EARLIER

SAVING = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "eval_reward",
    "load_best_model_at_end": True,
    "save_total_limit": 1,
}


def names(folder):
    return [path.name for path in checkpoints(folder)]


def best_at_first(folder, **settings):
    """A trainer for which the first checkpoint is the best."""
    built = trainer(folder, eval_dataset=prompts(4), **SAVING | BEST | settings)
    loop = built.evaluation_loop

    def worse(*args, **kwargs):
        output = loop(*args, **kwargs)
        output.metrics[BEST["metric_for_best_model"]] = -float(built.state.global_step)
        return output

    built.evaluation_loop = worse
    return built


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished")
    best_at_first(folder, save_total_limit=2, load_best_model_at_end=False).train()
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("metric", ["eval_reward", "reward"])
def test_copied_run_keeps_its_best_checkpoint(copy, metric):
    again = best_at_first(copy, max_steps=3, metric_for_best_model=metric)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(copy / "checkpoint-1")
    assert names(copy) == ["checkpoint-1"]  # as a run ends that loads the best one


@pytest.mark.parametrize(
    "change", [{"metric_for_best_model": "eval_entropy"}, {"greater_is_better": False}]
)
def test_run_that_resumes_with_another_metric_forgets_the_best_checkpoint(copy, change):
    """No value of one may be compared with one of the other."""
    again = best_at_first(copy, max_steps=3, **change)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_global_step == again.best_step == 3
    assert names(copy) == ["checkpoint-3"]


def test_moved_run_keeps_its_best_checkpoint(tmp_path):
    """The Trainer forgets a path that is gone."""
    best_at_first(tmp_path / "before", save_total_limit=2, load_best_model_at_end=False).train()
    run = (tmp_path / "before").rename(tmp_path / "run")
    again = best_at_first(run, max_steps=3, resume_with_changed_settings=True)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(run / "checkpoint-1") and names(run) == [
        "checkpoint-1"
    ]


def test_resume_at_an_early_step_moves_later_checkpoints_aside(copy):
    """Otherwise the next resume, if it is killed before their step, would take the course that
    was left."""
    again = best_at_first(copy, learning_rate=1e-5, save_steps=10, load_best_model_at_end=False)
    again.train(resume_from_checkpoint=str(copy / "checkpoint-1"))
    assert names(copy) == ["checkpoint-1"] and list(copy.glob(f"{EARLIER}*/checkpoint-2"))
    (copy / "latest").symlink_to(copy / "checkpoint-1")
    again.train(resume_from_checkpoint=str(copy / "latest"))
    assert names(copy) == ["checkpoint-1"]


def test_run_in_another_directory_keeps_its_last_checkpoint(finished, tmp_path):
    again = best_at_first(tmp_path, max_steps=3, resume_with_changed_settings=True)
    again.train(resume_from_checkpoint=str(finished / "checkpoint-2"))
    assert names(tmp_path) == ["checkpoint-3"] and names(finished) == [
        "checkpoint-2",
        "checkpoint-1",
    ]


@pytest.mark.parametrize("given", [True, "true", "run/checkpoint-1"])
def test_config_names_the_checkpoint_to_resume_from(copy, monkeypatch, given):
    monkeypatch.chdir(copy.parent)
    again = trainer("run", **SAVING, resume_from_checkpoint=given)
    steps = []
    again.add_callback(Notes(steps))
    again.train()
    assert steps == ([2] if given == "run/checkpoint-1" else []) and again.state.global_step == 2


class Notes(TrainerCallback):
    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def test_new_run_beside_earlier_checkpoints_is_refused(finished):
    before = {path: path.stat().st_mtime for path in finished.rglob("*.safetensors")}
    again = trainer(finished, **SAVING)
    with pytest.raises(
        CheckpointError, match=r"got checkpoint-2 .*another directory.*resume_from_checkpoint=False"
    ):
        again.train()
    assert again.state.global_step == 0 and before == {
        path: path.stat().st_mtime for path in before
    }


def test_earlier_run_is_named_before_anything_is_loaded(finished, caplog):
    unreadable = config(finished, max_prompt_length=1)  # fails before models are loaded
    with pytest.raises(ValueError):
        PPOTrainer(llama(), length_reward, unreadable, prompts(), processing_class=tokenizer())
    assert "has checkpoint-2 of an earlier run: `train(resume_from_checkpoint=True)`" in caplog.text
    caplog.clear()
    trainer(finished, **SAVING, resume_from_checkpoint="true")
    assert "earlier run" not in caplog.text


def test_resume_from_elsewhere_beside_checkpoints_raises(finished, copy):
    again = trainer(copy, **SAVING, save_total_limit=1)
    with pytest.raises(
        CheckpointError, match="`output_dir` must have no checkpoints of an earlier run"
    ):
        again.train(resume_from_checkpoint=str(finished / "checkpoint-1"))
    assert names(copy) == ["checkpoint-2", "checkpoint-1"]


@pytest.mark.parametrize(
    "settings, argument", [({}, False), ({"resume_from_checkpoint": "false"}, None)]
)
def test_run_begun_anew_moves_earlier_checkpoints_aside(copy, settings, argument):
    trainer(copy, **SAVING | settings | {"max_steps": 1}).train(resume_from_checkpoint=argument)
    assert names(copy) == ["checkpoint-1"]
    (aside,) = copy.glob(f"{EARLIER}*")
    assert names(aside) == ["checkpoint-2", "checkpoint-1"]
    verify(aside / "checkpoint-2")


def test_second_training_moves_earlier_checkpoints_aside(tmp_path):
    """Otherwise a resume of the second, if it is killed, would take those of the first."""
    run = trainer(tmp_path, **SAVING)
    run.train()
    run.args.max_steps = 1
    run.train()
    assert names(tmp_path) == ["checkpoint-1"]
    assert names(next(tmp_path.glob(f"{EARLIER}*"))) == ["checkpoint-2", "checkpoint-1"]


def test_checkpoints_of_another_trainer_are_moved_aside(tmp_path):
    """With two names changed, a script of GRPOTrainer runs in the directory that it had."""
    (tmp_path / "checkpoint-9").mkdir()
    trainer(tmp_path, **SAVING).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-1"] and list(
        tmp_path.glob(f"{EARLIER}*/checkpoint-9")
    )


class Meets(TrainerCallback):
    """Starts a second run in the directory of the first."""

    def on_step_end(self, args, state, control, **kwargs):
        with pytest.raises(CheckpointError, match="Another run is training in"):
            trainer(args.output_dir, **SAVING).train(resume_from_checkpoint=False)
        trainer(f"{args.output_dir}/other", max_steps=1).train()


def test_two_runs_in_one_directory_are_refused(tmp_path):
    built = trainer(tmp_path, callbacks=[Meets()], max_steps=1)
    built.train()
    built.train()  # the lock was released
    assert built.state.global_step == 1


class Breaks(TrainerCallback):
    """Makes a weight NaN after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                model.value_head.weight[0, 0] = torch.nan


def test_non_finite_weights_are_not_saved(tmp_path, caplog):
    built = trainer(
        tmp_path, callbacks=[Breaks(3)], save_total_limit=2, **SAVING | {"max_steps": 4}
    )
    with caplog.at_level(logging.WARNING):
        built.train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-1"]
    assert "checkpoint-3` is not written: value_head.weight has NaN or inf" in caplog.text


# ---- what callbacks and epochs leave for later ----


def test_early_stopping_goes_on_counting(tmp_path):
    """With the patience of the script, which has changed."""
    settings = {"load_best_model_at_end": False, "resume_with_changed_settings": True}
    counted = best_at_first(tmp_path, **settings, save_total_limit=None)
    counted.add_callback(EarlyStoppingCallback(3))
    counted.train()
    stops = EarlyStoppingCallback(4)
    again = best_at_first(tmp_path, **settings, max_steps=6)
    again.add_callback(stops)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5 and stops.early_stopping_patience_counter == 4
    state = json.loads((checkpoints(tmp_path)[0] / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]


def test_first_evaluation_is_not_repeated_by_a_resumed_run(tmp_path):
    """Early stopping would count it twice."""
    settings = {"load_best_model_at_end": False, "save_total_limit": None, "eval_on_start": True}
    counted = best_at_first(tmp_path, **settings)
    counted.add_callback(EarlyStoppingCallback(9))
    counted.train()
    again = best_at_first(tmp_path / "again", **settings)
    stops = EarlyStoppingCallback(9)
    again.add_callback(stops)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    evaluated = [
        [row["step"] for row in run.state.log_history if "eval_reward" in row]
        for run in (counted, again)
    ]
    assert evaluated[0] == evaluated[1] and evaluated[0][0] == 0
    (first,) = counted._early_stops
    assert stops.early_stopping_patience_counter == first.early_stopping_patience_counter


def test_run_that_was_stopped_early_goes_on_with_another_metric(tmp_path):
    settings = {"load_best_model_at_end": False, "save_total_limit": None, "max_steps": 6}
    stopped = best_at_first(tmp_path, **settings)
    stopped.add_callback(EarlyStoppingCallback(1))
    stopped.train()
    assert stopped.state.global_step == 2
    again = best_at_first(tmp_path, **settings, metric_for_best_model="eval_entropy")
    again.add_callback(EarlyStoppingCallback(1))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step > 2


@pytest.mark.parametrize("save", ["steps", "epoch"])
def test_checkpoint_has_what_is_due_at_the_end_of_its_epoch(tmp_path, save):
    """Logs and evaluations of an epoch used to be lost by a run that was killed at its last
    step."""
    settings = {
        "logging_strategy": "epoch",
        "logging_first_step": False,
        "eval_strategy": "epoch",
        "eval_dataset": prompts(4),
        "save_strategy": save,
        "save_steps": 4,
        "max_steps": 8,
    }
    trainer(tmp_path, dataset=prompts(8), **settings).train()
    first, last = (
        json.loads(Path(tmp_path, f"checkpoint-{step}", "trainer_state.json").read_text())
        for step in (4, 8)
    )
    assert [entry["step"] for entry in first["log_history"]] == [4, 4]
    assert [entry["step"] for entry in last["log_history"]] == [4, 4, 8, 8]


@pytest.mark.parametrize("name", [".vllm", ".answers"])
def test_link_whose_target_would_be_emptied_is_named(tmp_path, name):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(
        ValueError,
        match=rf"`output_dir` must not have a link `{name}`, got .*precious`; remove the",
    ):
        trainer(tmp_path / "run")
    assert (tmp_path / "precious" / "thesis").exists()


class Counts(TrainerCallback, ExportableState):
    """Counts steps in a property, which a restored state must set as an attribute."""

    def __init__(self, weight=1.0):
        self.weight = weight
        self.counted = []

    @property
    def steps(self):
        return len(self.counted)

    @steps.setter
    def steps(self, count):
        self.counted = [None] * count

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def state(self):
        return {"args": {"weight": self.weight}, "attributes": {"steps": self.steps}}


@pytest.mark.parametrize("restores", [False, True])
def test_callbacks_continue_and_restore_their_arguments_if_asked(tmp_path, restores):
    settings = SAVING | {"max_steps": 4, "restore_callback_states_from_checkpoint": restores}
    trainer(tmp_path, callbacks=[Counts(2.0), Counts(4.0)], **settings).train()
    again = [Counts(3.0), Counts(3.0)]
    built = trainer(tmp_path, callbacks=again, **settings)
    built.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [x.steps for x in again] == [4, 4]
    assert [x.weight for x in again] == ([2.0, 4.0] if restores else [3.0, 3.0])
    assert all(x in built.callback_handler.callbacks for x in again)  # the script's objects


class CountsWithoutArguments(Counts):
    """The Trainer takes a state that has only one of its two parts."""

    def state(self):
        return {"attributes": {"steps": self.steps}}


def test_callback_may_have_no_arguments(tmp_path):
    settings = SAVING | {"max_steps": 4, "restore_callback_states_from_checkpoint": True}
    trainer(tmp_path, callbacks=[CountsWithoutArguments()], **settings).train()
    again = CountsWithoutArguments()
    built = trainer(tmp_path, callbacks=[again], **settings)
    built.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.steps == 4


@pytest.mark.parametrize("restores", [False, True])
def test_patience_is_restored_if_asked(tmp_path, restores):
    settings = {
        "load_best_model_at_end": False,
        "resume_with_changed_settings": True,
        "save_total_limit": None,
    }
    first = best_at_first(tmp_path, **settings)
    first.add_callback(EarlyStoppingCallback(3))
    first.train()
    stops = EarlyStoppingCallback(4)
    again = best_at_first(
        tmp_path, **settings, max_steps=6, restore_callback_states_from_checkpoint=restores
    )
    again.add_callback(stops)
    again.train(resume_from_checkpoint=True)
    assert stops.early_stopping_patience == (3 if restores else 4)
    assert again.state.global_step == (4 if restores else 5)


def test_answers_belong_to_settings_and_inputs_but_not_to_rates(tmp_path):
    runs = {
        "same": trainer(tmp_path / "a"),
        "rates": trainer(tmp_path / "b", learning_rate=0.5, max_steps=9),
        "temperature": trainer(tmp_path / "c", temperature=0.5),
        "seed": trainer(tmp_path / "d", seed=3),
        "rows": trainer(tmp_path / "e", dataset=prompts(15)),
    }
    digests = {name: built.components.player.run for name, built in runs.items()}
    assert digests["same"] == digests["rates"] != ""
    assert len(set(digests.values())) == 4


def test_directory_that_a_rank_does_not_see_is_named_before_training(tmp_path, monkeypatch):
    """As on two machines, each with a disk of its own."""
    run = trainer(tmp_path / "run", **SAVING)
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setattr(resume, "SHOWN_AFTER", 0.6)
    see = resume.see
    monkeypatch.setattr(resume, "see", lambda _: see(str(elsewhere)))
    with pytest.raises(CheckpointError, match=r"that all processes see.*`save_on_each_node=True`"):
        run.train()
    assert run.state.global_step == 0
    # one that a shared disk shows late
    Timer(0.2, elsewhere.mkdir).start()
    run.train()
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-1"]


def test_run_that_was_stopped_early_says_why_it_does_not_go_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    settings = {"load_best_model_at_end": False, "save_total_limit": None, "max_steps": 4}
    for resumed in (False, True):
        run = best_at_first(tmp_path, **settings)
        run.add_callback(EarlyStoppingCallback(1))
        run.train(resume_from_checkpoint=resumed)
        assert run.state.global_step == 2
        assert ("raise `early_stopping_patience`" in caplog.text) is resumed
