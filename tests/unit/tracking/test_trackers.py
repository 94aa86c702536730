"""TensorBoard, Weights & Biases and trackio get the metrics through the Trainer; two of them
completions as tables."""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys

import pandas
import pytest
import torch
from tiny import config, length_reward, llama, prompts, tokenizer

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.tracking import completions

SECRET = "hf_secretSecretSecret"


def needs(name):
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(
        missing, reason=f"needs {name}, which is optional: `pip install {name}`"
    )


def hostile_reward(completion_ids, log_extra=None, **kwargs):
    """Adds a column of what a page or a terminal might obey."""
    log_extra("note", ["<script>alert(1)</script>\n| \x1b[31m \ud800"] * len(completion_ids))
    log_extra("mixed", [1, "two"] * (len(completion_ids) // 2))
    return [float(len(ids)) for ids in completion_ids]


def never(completion_ids, **kwargs):
    return [None] * len(completion_ids)


def run(tmp_path, report_to, reward=hostile_reward, **settings):
    base = llama()
    base.config._name_or_path = ""
    rollouts = {"max_steps": 2, "num_ppo_epochs": 1, "num_mini_batches": 1}  # one a step
    settings = (
        rollouts | {"report_to": report_to, "hub_token": SECRET, "log_completions": True} | settings
    )
    args = config(tmp_path / "run", **settings)
    rewards = [reward, never]
    given = {"processing_class": tokenizer(), "monitor_funcs": length_reward}
    return PPOTrainer(base, rewards, args, prompts(), eval_dataset=prompts(4), **given)


@needs("tensorboard")
def test_tensorboard_gets_every_metric_that_is_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    built = run(tmp_path, "tensorboard")
    built.train()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent))
    events.Reload()
    logged = [entry for entry in built.state.log_history if "loss" in entry]
    names = {f"train/{name}" for name in logged[0]} - {"train/step", "train/epoch"}
    assert names <= set(events.Tags()["scalars"]) and "train/rewards/hostile_reward/mean" in names
    seen = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert seen == [(entry["step"], pytest.approx(entry["reward"])) for entry in logged]
    assert not [
        file
        for file in tmp_path.rglob("*")
        if file.is_file() and SECRET.encode() in file.read_bytes()
    ]


@needs("wandb")
def test_wandb_gets_metrics_and_tables_offline(tmp_path, monkeypatch):
    for name, value in {
        "MODE": "offline",
        "DIR": str(tmp_path),
        "SILENT": "true",
        "DISABLE_GIT": "true",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    import wandb

    tables = []
    log = wandb.sdk.wandb_run.Run.log

    def noting(self, data, *args, **kwargs):
        tables.extend((key, value) for key, value in data.items() if isinstance(value, wandb.Table))
        return log(self, data, *args, **kwargs)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", noting)
    built = run(tmp_path, "wandb")
    built.train()
    built.evaluate()
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert (
        summary["train/reward"] == built.state.log_history[1]["reward"]
        and summary["train/global_step"] == 2
    )
    assert [key for key, _ in tables] == ["completions", "completions", "eval/completions"]
    check_table(built, [dict(zip(tables[0][1].columns, row)) for row in tables[0][1].data])
    assert not [
        file
        for file in tmp_path.rglob("*")
        if file.is_file() and SECRET.encode() in file.read_bytes()
    ]


def check_table(built, rows):
    """Each completion whole and as it is, its scores, and what the reward added."""
    assert len(rows) == built.plan.completions_per_process
    columns = [
        "step",
        "prompt",
        "completion",
        "hostile_reward",
        "never",
        "length_reward",
        "score",
        "note",
        "mixed",
    ]
    assert all(list(row) == columns for row in rows)
    for row in rows:
        assert row["note"] == "<script>alert(1)</script>\n| \x1b[31m \\ud800"
        assert row["score"] == row["hostile_reward"] == row["length_reward"] and row["step"] == 1
        # without the end of the text
        assert len(row["completion"].split()) in (row["score"], row["score"] - 1)
    assert {row["mixed"] for row in rows} == {"1", "two"}


@pytest.mark.slow
@needs("trackio")
def test_trackio_gets_metrics_and_tables_on_this_machine(tmp_path):
    """In a process of its own: where trackio writes is read when it is imported."""
    code = (
        "import sys; from pathlib import Path; import test_trackers as t; folder = "
        "Path(sys.argv[1])\nbuilt = t.run(folder, 'trackio', project='tiny', "
        "trackio_static_space_id=False)\nbuilt.train()\n(folder / "
        "'logged.json').write_text(t.json.dumps(built.state.log_history))\n"
    )
    variables = {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | variables | {"PYTHONPATH": ":".join(["tests", *sys.path])},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = [
            json.loads(metrics)
            for (metrics,) in connection.execute("SELECT metrics FROM metrics ORDER BY id")
        ]
    logged = [
        entry for entry in json.loads((tmp_path / "logged.json").read_text()) if "loss" in entry
    ]
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    assert rewards == [entry["reward"] for entry in logged]
    tables = [row["completions"] for row in rows if "completions" in row]
    assert len(tables) == 2 and {table["_type"] for table in tables} == {"trackio.table"}
    first = tables[0]["_value"]
    assert len(first) == 4 and first[0]["note"].startswith("<script>")
    assert first[0]["score"] == first[0]["length_reward"]


@pytest.mark.parametrize("on", ["log_completions", "main process"])
def test_only_the_main_process_logs_tables_and_only_on_request(tmp_path, monkeypatch, on):
    built = run(tmp_path, "none", log_completions=on != "log_completions")
    if on == "main process":
        monkeypatch.setattr(type(built.accelerator), "is_main_process", False)
    monkeypatch.setattr(
        "trl_ppo_ext.trainer.log_completions", lambda *_: pytest.fail("a table was logged")
    )
    built.train()


def test_a_tracker_whose_run_has_not_begun_is_left_alone(monkeypatch):
    class Silent:
        run = None

    monkeypatch.setattr(completions, "import_module", lambda name: Silent)
    completions.log_completions(["wandb"], None, 1, "completions")


def test_wandb_must_not_log_the_model(monkeypatch):
    """It would upload the base, and arguments with the token in them."""
    monkeypatch.setattr(completions, "get_available_reporting_integrations", lambda: ["wandb"])
    monkeypatch.setenv("WANDB_LOG_MODEL", "false")
    completions.check_trackers(["wandb"])
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    completions.check_trackers([])
    with pytest.raises(ValueError, match=r"WANDB_LOG_MODEL=end.*push_to_hub"):
        completions.check_trackers(["wandb"])


def test_optimizer_or_scheduler_made_before_is_refused(tmp_path):
    base = llama()
    args = config(tmp_path)
    optimizer = torch.optim.SGD(base.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"lacks `value_head.first.bias` and 31 others.*`optim`"):
        PPOTrainer(
            base,
            length_reward,
            args,
            prompts(),
            processing_class=tokenizer(),
            optimizers=(optimizer, None),
        )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match=r"must be of the optimizer in it.*lr_scheduler_type"):
        PPOTrainer(
            llama(),
            length_reward,
            args,
            prompts(),
            processing_class=tokenizer(),
            optimizers=(None, scheduler),
        )


def test_completions_are_written_as_parquet(tmp_path):
    """One row per completion of each log, with the scores of all rewards, of training and
    evaluation."""
    built = run(tmp_path, "none", eval_strategy="steps", eval_steps=2)
    built.train()
    folder = tmp_path / "run" / "completions"
    train = [f"completions_{step:05d}.parquet" for step in (1, 2)]
    assert sorted(path.name for path in folder.iterdir()) == [
        *train,
        "eval_completions_00002.parquet",
    ]
    for step, name in enumerate(train, 1):
        table = pandas.read_parquet(folder / name)
        assert table["step"].tolist() == [step] * built.plan.completions
        logged = next(x for x in built.state.log_history if x.get("step") == step and "reward" in x)
        assert table["score"].mean() == pytest.approx(logged["reward"])
        assert {"prompt", "completion", "hostile_reward", "length_reward"} <= set(table.columns)
    assert len(pandas.read_parquet(folder / "eval_completions_00002.parquet")) == 4


def test_each_evaluation_set_has_a_file_of_completions(tmp_path):
    built = run(tmp_path, "none", max_steps=1)
    rows = built.eval_dataset
    for prefix in ("eval_first", "eval_second", "eval_math/500"):
        built.evaluate(rows, metric_key_prefix=prefix)
    written = {path.name for path in (tmp_path / "run" / "completions").iterdir()}
    prefixes = ("eval_first", "eval_second", "eval_math_500")
    assert {f"{prefix}_completions_00000.parquet" for prefix in prefixes} <= written


def test_completions_that_cannot_be_written_end_no_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "completions").write_text("in the way")
    built = run(tmp_path, "none")
    built.train()
    assert (
        built.state.global_step == 2
        and (tmp_path / "run" / "completions").read_text() == "in the way"
    )


def test_completions_are_not_written_unless_asked(tmp_path):
    run(tmp_path, "none", log_completions=False).train()
    assert not (tmp_path / "run" / "completions").exists()
