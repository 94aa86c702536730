"""The run log holds every metric and some completions, has no secrets, and never ends a run."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
import torch
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers import TrainerControl, TrainerState

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.episodes import Episode
from trl_ppo_ext.ppo.batch_plan import BatchPlan
from trl_ppo_ext.ppo.rollouts import Samples, TokenScores
from trl_ppo_ext.rewards import Scored, ScoringBatch
from trl_ppo_ext.sequences import Sequences
from trl_ppo_ext.tracking.reading import RUN_LOG, read_run
from trl_ppo_ext.tracking.run_log import LONGEST, ROWS, TIMES, RunLog, environment


def parity(completion_ids, **kwargs):
    return [float(len(ids) % 2) for ids in completion_ids]


def run(output_dir, resume=None, **kwargs):
    args = config(output_dir, **kwargs)
    tools = {"processing_class": tokenizer(), "monitor_funcs": parity}
    built = PPOTrainer(llama(), length_reward, args, prompts(), prompts(4), **tools)
    built.train(resume_from_checkpoint=resume)
    return built


def lines(directory):
    return [json.loads(line) for line in (directory / RUN_LOG).read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 4 steps, evaluated at its end, that was begun again from its checkpoint at step 2."""
    place = tmp_path_factory.mktemp("runs") / "run"
    settings = {"save_strategy": "steps", "save_steps": 2, "hub_token": "hf_secret"}
    first = run(place, eval_strategy="steps", eval_steps=4, **settings)
    again = run(place, resume=str(place / "checkpoint-2"), eval_strategy="steps", eval_steps=4, **settings)
    return place, first, again


def test_run_log_has_every_log_of_the_run(finished):
    place, first, again = finished
    entries = lines(place)
    begun = [entry["step"] for entry in entries if entry["kind"] == "run"]
    assert begun == [0, 2]
    second = entries.index([entry for entry in entries if entry["kind"] == "run"][1])
    for part, history in ((entries[:second], first.state.log_history), (entries[second:], again.state.log_history)):
        written = [entry["metrics"] | {"step": entry["step"]} for entry in part if entry["kind"] == "metrics"]
        assert len(written) >= 4 and written == history[-len(written) :]
    assert entries[0]["rewards"] == ["length_reward"] and entries[0]["monitors"] == ["parity"]
    assert entries[0]["config"]["kl_coef"] == 0.05 and entries[0]["trainer_config"]["max_steps"] == 4
    assert entries[0]["environment"]["packages"]["torch"] == torch.__version__
    assert "hf_secret" not in (place / RUN_LOG).read_text()


def test_repeated_steps_count_once_with_the_later_value(finished):
    place, _, again = finished
    read = read_run(place)
    assert read.resumed_at == [2]
    history = {entry["step"]: entry for entry in again.state.log_history if "loss" in entry}
    assert read.curves["loss"].index.tolist() == [1, 2, 3, 4]
    assert read.curves["loss"].iloc[2:].tolist() == [history[step]["loss"] for step in (3, 4)]
    keys = [sheet[:2] for sheet in read.sheets]
    assert keys == sorted(set(keys)) and (4, "eval") in keys


def test_evaluations_between_logs_keep_completions_of_training(tmp_path):
    run(tmp_path, eval_strategy="steps", eval_steps=1, logging_steps=2, logging_first_step=False, max_steps=2)
    sheets = [(entry["step"], entry["mode"]) for entry in lines(tmp_path) if entry["kind"] == "completions"]
    assert (2, "train") in sheets and (1, "eval") in sheets


def test_completions_have_their_scores(finished):
    place, _, _ = finished
    for sheet in read_run(place).sheets:
        assert 0 < len(sheet.rows) <= ROWS
        for row in sheet.rows:
            assert row["rewards"] == {"length_reward": row["tokens"]} and row["score"] == row["tokens"]
            assert row["monitors"] == {"parity": row["tokens"] % 2}
            (turn,) = row["turns"]
            assert turn["role"] == "" and len(turn["text"].split()) <= row["tokens"]
            assert turn["reward"] == row["score"] and type(turn["value"]) is float
            assert (turn["advantage"] is None) == (sheet.mode == "eval")


def test_failing_log_warns_once_and_ends_no_run(tmp_path, caplog):
    (tmp_path / "run" / RUN_LOG).mkdir(parents=True)
    built = run(tmp_path / "run", max_steps=2)
    assert built.state.global_step == 2
    assert len([record for record in caplog.records if RUN_LOG in record.getMessage()]) == 1


def samples(rows=20, text="word", score=1.0):
    ids = [[4, 5]] * rows
    tokens = torch.zeros(rows, 2)
    episodes = [Episode("p", [4, 5], completion_ids=[4, 5], starts=[0], completion=text)] * rows
    scored = Scored(
        torch.full((rows, 1), score), torch.full((rows, 2), score / 2), torch.ones(rows).bool(), torch.zeros(rows, 1)
    )
    return Samples(
        Sequences.from_token_ids(ids, ids, 0, torch.device("cpu")),
        torch.ones(rows).bool(),
        ScoringBatch(["p"] * rows, [text] * rows, ids, episodes=episodes),
        scored,
        torch.full((rows, 1), float("nan")),
        {},
        TokenScores(tokens + 1, ref_logprobs=tokens),
        None,
        None,
    )


def opened(tmp_path, max_steps, main=True):
    log = RunLog("model", ["a"], ["b"], BatchPlan(1))
    state = TrainerState(max_steps=max_steps, is_world_process_zero=main, is_local_process_zero=main)
    args = config(tmp_path / "run")
    log.on_train_begin(args, state, TrainerControl())
    return log, state, args


def test_logged_rows_characters_and_times_are_bounded(tmp_path):
    log, state, _ = opened(tmp_path, max_steps=10_000)
    for step in range(1, 10_001):
        state.global_step = step
        log.completions(samples(text="x" * 5_000) if step % 100 == 1 or step > 9_990 else samples(), state, "train")
    sheets = [entry for entry in lines(tmp_path / "run") if entry["kind"] == "completions"]
    assert TIMES - 2 <= len(sheets) <= TIMES + 2
    assert (sheets[0]["step"], sheets[-1]["step"]) == (1, 10_000)
    assert all(len(sheet["rows"]) == ROWS for sheet in sheets)
    texts = [row["turns"][0]["text"] for sheet in sheets for row in sheet["rows"]]
    assert LONGEST < max(map(len, texts)) < LONGEST + 50


def test_completions_of_every_evaluation_set_are_logged(tmp_path):
    args = config(tmp_path / "run", max_steps=2, eval_strategy="steps", eval_steps=1, num_mini_batches=1)
    sets = {"easy": prompts(2), "hard": prompts(3)}
    PPOTrainer(llama(), length_reward, args, prompts(), sets, processing_class=tokenizer()).train()
    sheets = {sheet[:2]: len(sheet.rows) for sheet in read_run(tmp_path / "run").sheets}
    assert (sheets[2, "eval_easy"], sheets[2, "eval_hard"]) == (2, 3)


def test_nonfinite_numbers_become_null(tmp_path):
    log, state, args = opened(tmp_path, max_steps=2)
    state.global_step = 1
    log.completions(samples(score=float("nan")), state, "train")
    log.on_log(args, state, TrainerControl(), logs={"loss": float("nan"), "reward": float("inf")})
    text = (tmp_path / "run" / RUN_LOG).read_text()
    assert "NaN" not in text and "Infinity" not in text
    row = lines(tmp_path / "run")[1]["rows"][0]
    assert row["score"] is None and row["monitors"] == {"b": None} and row["kl"] == 2.0


def test_only_the_main_process_writes_the_log(tmp_path):
    log, state, args = opened(tmp_path, max_steps=2, main=False)
    log.on_log(args, state, TrainerControl(), logs={"loss": 1.0})
    log.completions(samples(), state, "train")
    assert not (tmp_path / "run" / RUN_LOG).exists()


def test_log_continues_after_an_unfinished_line(tmp_path):
    log, state, args = opened(tmp_path, max_steps=2)
    with open(tmp_path / "run" / RUN_LOG, "a") as file:
        file.write('{"kind": "metrics", "st')
    log.on_log(args, state, TrainerControl(), logs={"loss": 1.0})
    *_, cut, last = (tmp_path / "run" / RUN_LOG).read_text().splitlines()
    assert cut.endswith('"st') and json.loads(last)["metrics"] == {"loss": 1.0}


def test_environment_has_versions_and_gpus_but_nothing_private(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("WANDB_API_KEY", "verysecret")
    logged = environment()
    assert json.loads(json.dumps(logged)) == logged
    assert logged["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert logged["packages"]["trl_ppo_ext"] and logged["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(logged["gpus"]) == torch.cuda.device_count()
    for private in ("verysecret", str(Path.home()), platform.node(), os.getcwd()):
        assert private not in json.dumps(logged) or private == "/", private
