"""The run log holds every metric and some completions, has no secrets, and never ends a run; the
terminal."""

import json
import os
import platform
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.batch_plan import BatchPlan
from trl_ppo_ext.episodes import Episode
from trl_ppo_ext.ppo.rollouts import Samples, TokenScores
from trl_ppo_ext.rewards import Scored, ScoringBatch
from trl_ppo_ext.sequences import Sequences
from trl_ppo_ext.tracking.completions import completions_table
from trl_ppo_ext.tracking.reading import RUN_LOG, read_run
from trl_ppo_ext.tracking.run_log import LONGEST, ROWS, TIMES, RunLog, Terminal, environment


def parity(completion_ids, **kwargs):
    return [float(len(ids) % 2) for ids in completion_ids]


def trainer(output_dir, **kwargs):
    tools = {"processing_class": tokenizer(), "monitor_funcs": parity}
    return PPOTrainer(
        llama(), length_reward, config(output_dir, **kwargs), prompts(), prompts(4), **tools
    )


def run(output_dir, resume=None, **kwargs):
    built = trainer(output_dir, **kwargs)
    built.train(resume_from_checkpoint=resume)
    return built


def lines(directory):
    return [json.loads(line) for line in (directory / RUN_LOG).read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 4 steps, evaluated at its end, that was begun again from its checkpoint at step
    2."""
    place = tmp_path_factory.mktemp("runs") / "run"
    settings = {"save_strategy": "steps", "save_steps": 2, "hub_token": "hf_secret"}
    first = run(place, eval_strategy="steps", eval_steps=4, **settings)
    again = run(
        place, resume=str(place / "checkpoint-2"), eval_strategy="steps", eval_steps=4, **settings
    )
    return place, first, again


def test_run_log_has_every_log_of_the_run(finished):
    place, first, again = finished
    entries = lines(place)
    begun = [index for index, entry in enumerate(entries) if entry["kind"] == "run"]
    assert [entries[index]["step"] for index in begun] == [0, 2]
    second = begun[1]
    for part, history in (
        (entries[:second], first.state.log_history),
        (entries[second:], again.state.log_history),
    ):
        written = [
            entry["metrics"] | {"step": entry["step"]}
            for entry in part
            if entry["kind"] == "metrics"
        ]
        assert len(written) >= 4 and written == history[-len(written) :]
    assert entries[0]["rewards"] == ["length_reward"] and entries[0]["monitors"] == ["parity"]
    assert (
        entries[0]["config"]["kl_coef"] == 0.05 and entries[0]["trainer_config"]["max_steps"] == 4
    )
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


def test_completions_have_their_scores(finished):
    place, _, _ = finished
    for sheet in read_run(place).sheets:
        assert 0 < len(sheet.rows) <= ROWS
        for row in sheet.rows:
            assert (
                row["rewards"] == {"length_reward": row["tokens"]} and row["score"] == row["tokens"]
            )
            assert row["monitors"] == {"parity": row["tokens"] % 2}
            (turn,) = row["turns"]
            assert turn["role"] == "" and len(turn["text"].split()) <= row["tokens"]
            assert turn["reward"] == row["score"] and type(turn["value"]) is float
            assert (turn["advantage"] is None) == (sheet.mode == "eval")


class Door:
    def reset(self, row, seed):
        return " w1"

    def step(self, text):
        return "w9", 1.0, True


def test_unread_last_observation_is_in_the_transcript(tmp_path):
    args = config(tmp_path, max_steps=1)
    PPOTrainer(llama(), args=args, environment_factory=Door, processing_class=tokenizer()).train()
    (sheet,) = read_run(tmp_path).sheets
    for row in sheet.rows:
        assert [turn["role"] for turn in row["turns"]] == ["assistant", "user"]
        assert row["turns"][1]["text"] == "w9" and row["tokens"] <= 8


def test_failing_log_warns_once_and_ends_no_run(tmp_path, caplog):
    (tmp_path / "run" / RUN_LOG).mkdir(parents=True)
    built = run(tmp_path / "run", max_steps=2)
    assert built.state.global_step == 2
    assert len([record for record in caplog.records if RUN_LOG in record.getMessage()]) == 1


def samples(rows=20, text="word", score=1.0):
    ids = [[4, 5]] * rows
    tokens = torch.zeros(rows, 2)
    episodes = [Episode("p", [4, 5], completion_ids=[4, 5], starts=[0], completion=text)] * rows
    yes = torch.ones(rows).bool()
    monitored = torch.full((rows, 1), float("nan"))
    at_tokens = torch.full((rows, 2), score / 2)
    nowhere = torch.zeros(rows, 2).bool()
    failed = torch.zeros(rows, 1)
    unpaid = torch.zeros(rows)
    scores = torch.full((rows, 1), score)
    scored = Scored(scores, at_tokens, nowhere, yes, failed, unpaid, is_whole=yes, foresight={})
    batch = ScoringBatch(["p"] * rows, [text] * rows, ids, episodes=episodes)
    sequences = Sequences.from_token_ids(ids, ids, 0, torch.device("cpu"))
    scores = TokenScores(tokens + 1, ref_logprobs=tokens)
    return Samples(sequences, yes, batch, scored, monitored, {}, scores, None, None)


def opened(tmp_path, max_steps, main=True):
    log = RunLog("model", ["a"], ["b"], BatchPlan(1))
    state = TrainerState(
        max_steps=max_steps, is_world_process_zero=main, is_local_process_zero=main
    )
    args = config(tmp_path / "run")
    log.on_train_begin(args, state, TrainerControl())
    return log, state, args


def test_logged_rows_characters_and_times_are_bounded(tmp_path):
    log, state, _ = opened(tmp_path, max_steps=10_000)
    long = samples(text="x" * 5_000)
    for step in range(1, 10_001):
        state.global_step = step
        log.completions(long, state, "train")
    sheets = [entry for entry in lines(tmp_path / "run") if entry["kind"] == "completions"]
    assert TIMES - 2 <= len(sheets) <= TIMES + 2
    assert (sheets[0]["step"], sheets[-1]["step"]) == (1, 10_000)
    assert all(len(sheet["rows"]) == ROWS for sheet in sheets)
    assert all(
        LONGEST < len(row["turns"][0]["text"]) < LONGEST + 50
        for sheet in sheets
        for row in sheet["rows"]
    )


def test_logged_text_has_no_keys_of_known_forms(tmp_path):
    log, state, _ = opened(tmp_path, 1)
    key = "hf_" + "aZ3kP9qLm2XvB7tRw5Yc"
    log.completions(samples(text=f"key=1; login({key}) at http://u:hunter2@proxy"), state, "train")
    table = completions_table(samples(text=f"key=1; login({key})"), ["reward"], [], 1)
    for text in ((tmp_path / "run" / RUN_LOG).read_text(), table.to_json()):
        assert "key=1; login(***)" in text and key not in text and "hunter2" not in text


def test_completions_of_every_evaluation_set_are_logged(tmp_path):
    evaluated = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_steps": 2,
        "logging_first_step": False,
    }
    args = config(tmp_path / "run", max_steps=2, **evaluated)
    sets = {"easy": prompts(2), "hard": prompts(3)}
    PPOTrainer(llama(), length_reward, args, prompts(), sets, processing_class=tokenizer()).train()
    sheets = {sheet[:2]: len(sheet.rows) for sheet in read_run(tmp_path / "run").sheets}
    assert (sheets[1, "eval_easy"], sheets[2, "eval_hard"]) == (2, 3)
    assert (2, "train") in sheets  # an evaluation before the log keeps them


def timed_reward(completion_ids, log_metric, **kwargs):
    log_metric("sandbox_runtime", 1.0)
    return [float(len(ids)) for ids in completion_ids]


def test_rows_of_a_script_are_not_logged_as_those_of_an_evaluation(tmp_path):
    """What a script evaluates under a name of its own has a sheet of its own, predictions none."""
    args = config(tmp_path / "run", max_steps=1, eval_strategy="steps", eval_steps=1)
    data = prompts(), prompts(2)
    built = PPOTrainer(llama(), length_reward, args, *data, processing_class=tokenizer())
    built.train()
    built.evaluate(prompts(3), metric_key_prefix="test")
    built.predict(prompts(4), metric_key_prefix="eval")
    built.log({"own": 1.0})
    sheets = {(x.step, x.mode): len(x.rows) for x in read_run(args.output_dir).sheets}
    assert (sheets[1, "eval"], sheets[1, "eval_test"]) == (2, 3)


@pytest.mark.parametrize("sets", [["eval"], ["eval_easy", "eval_hard"]])
def test_metric_named_runtime_does_not_end_an_evaluation(tmp_path, capsys, sets):
    args = config(tmp_path / "run", max_steps=1, eval_strategy="steps", eval_steps=1)
    evaluated = {name.removeprefix("eval_"): prompts(2) for name in sets}
    if sets == ["eval"]:
        evaluated = prompts(2)
    tools = {"processing_class": tokenizer()}
    PPOTrainer(llama(), timed_reward, args, prompts(), evaluated, **tools).train()
    assert {sheet.mode for sheet in read_run(tmp_path / "run").sheets} == {"train", *sets}
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    places = ["step 1/1", *(f"step 1/1  {name}" for name in sets)]
    assert len(steps) == len(places)
    for line, place in zip(steps, places):
        assert line.startswith(f"{place}  reward ")


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


def test_run_continues_the_log_after_an_unfinished_line(tmp_path):
    opened(tmp_path, max_steps=2)
    with open(tmp_path / "run" / RUN_LOG, "a") as file:
        file.write('{"kind": "metrics", "st')
    log, state, args = opened(tmp_path, max_steps=3)
    log.on_log(args, state, TrainerControl(), logs={"loss": 1.0})
    read = read_run(tmp_path / "run")
    assert read.start["max_steps"] == 3 and read.curves["loss"].tolist() == [1.0]


def test_environment_has_versions_and_gpus_but_nothing_private(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("WANDB_API_KEY", "verysecret")
    logged = environment()
    assert json.loads(json.dumps(logged)) == logged
    assert logged["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert logged["packages"]["trl_ppo_ext"] and logged["python"] == ".".join(
        map(str, sys.version_info[:3])
    )
    assert len(logged["gpus"]) == torch.cuda.device_count()
    for private in ("verysecret", str(Path.home()), platform.node(), os.getcwd()):
        assert private not in json.dumps(logged) or private == "/", private


# ---- the terminal ----

EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}


def test_log_is_one_line_between_plan_and_report(tmp_path, capsys):
    run(tmp_path / "a run", **EVALUATED)
    # of DeepSpeed's import
    printed = [line for line in capsys.readouterr().out.splitlines() if line[0] != "["]
    assert [line.split(":")[0] for line in printed[:4]] == ["rollout", "updates", "run", "note"]
    assert printed[0].startswith("rollout: 8 completions of 8 prompts")
    assert "updates: 4 optimizer steps per rollout" in printed[1]
    assert "max_steps=4 optimizer steps = 1 rollouts = 8 completions" in printed[2]
    number = r"-?[\d.,e+-]+"
    labels = ("reward", "KL", "entropy", "length", "explained", "tokens/s")
    assert re.fullmatch(
        "  ".join(["step 1/4", *(f"{label} {number}" for label in labels)]), printed[4]
    )
    for step in (2, 3, 4):  # they update on the same rollout
        assert re.fullmatch(f"step {step}/4  loss {number}  grad_norm {number}", printed[3 + step])
    assert re.match(f"step 4/4  eval  reward {number}  KL {number}", printed[8])
    assert printed[9:] == [f"see `trl-ppo report '{tmp_path}/a run'`"]


def test_terminal_warns_once_per_kind_while_it_happens(tmp_path, capsys):
    terminal = Terminal(["a"], BatchPlan(1), disable_tqdm=True)
    state = TrainerState(max_steps=99)
    args = config(tmp_path, kl_coef=0.02)
    terminal.on_train_begin(args, state, TrainerControl())
    for step in range(1, 61):
        state.global_step = step
        astray = {
            "kl_per_completion": 4.0 * step,
            "kl": 0.2 * step,
            "entropy": 2.0 if step < 30 else 0.1,
        }
        logs = {
            "reward": 1.0,
            "reward_std": 0.5,
            "value/explained_variance": -3.0 * (step > 40),
        } | astray
        state.log_history.append(logs | {"step": step})
        terminal.on_log(args, state, TrainerControl(), logs=logs)
    printed = capsys.readouterr().out.splitlines()
    warned = {
        line.split(":")[1].strip(): place
        for place, line in enumerate(printed)
        if line.startswith("warning: ")
    }
    assert list(warned) == ["The policy is far from its reference"]  # the others follow from it
    assert 16 < warned["The policy is far from its reference"] < 25
    assert "`kl_per_completion` from 4 to 5" in " ".join(printed) and "(now 0.02)" in " ".join(
        printed
    )


def length_half(completion_ids, **kwargs):
    return [len(ids) / 2 for ids in completion_ids]


def test_line_has_rewards_in_the_order_of_the_run(tmp_path, capsys):
    """A resumed rollout logs them in another one."""
    terminal = Terminal(["short", "half"], BatchPlan(1), disable_tqdm=True)
    state = TrainerState(max_steps=9, global_step=1)
    terminal.on_train_begin(config(tmp_path), state, TrainerControl())
    logs = {"reward": 3.0, "rewards/half/mean": 1.0, "rewards/short/mean": 2.0}
    terminal.on_log(config(tmp_path), state, TrainerControl(), logs=logs)
    assert "reward 3  (short 2, half 1)" in capsys.readouterr().out


def test_line_has_the_mean_of_each_of_several_rewards_and_the_time_left(tmp_path, capsys):
    args = config(tmp_path, max_steps=8, logging_steps=2)
    rewards = [length_reward, length_half]
    PPOTrainer(llama(), rewards, args, prompts(), processing_class=tokenizer()).train()
    printed = capsys.readouterr().out
    number = r"([\d.]+)"
    found = re.findall(
        rf"reward {number}  \(length_reward {number}, length_half {number}\)  KL", printed
    )
    assert len(found) == 2  # rollouts of four steps
    for total, first, second in found:
        assert float(first) + float(second) == pytest.approx(float(total), rel=5e-3)
    lines = [line for line in printed.splitlines() if line.startswith("step")]
    # after a whole rollout, until the last step
    assert [line.endswith(" left") for line in lines] == [False, False, True, True, False]
    assert re.search(r"  0:00:0\d left$", lines[-2])


def test_time_left_of_a_run_resumed_within_a_rollout_is_of_whole_rollouts(tmp_path, capsys):
    terminal = Terminal(["a"], BatchPlan(1, num_mini_batches=4), disable_tqdm=True)
    state = TrainerState(max_steps=16, global_step=3)
    terminal.on_train_begin(config(tmp_path), state, TrainerControl())
    paces = []
    for step in range(4, 13):
        state.global_step = step
        terminal.on_step_end(config(tmp_path), state, TrainerControl())
        paces.append(terminal._pace)
    # one update of a rollout that was sampled before says nothing
    assert paces[:4] == [None] * 4 and None not in paces[4:]


def test_terminal_names_an_early_stop_and_the_best_checkpoint(tmp_path, capsys):
    class StopsAtTwo(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    saving = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    built = trainer(tmp_path, **best, **saving)
    built.add_callback(StopsAtTwo())
    built.train()
    step = built.best_step
    assert step in (1, 2)
    printed = capsys.readouterr().out.splitlines()
    (loaded,) = [line for line in printed if line.startswith("loaded")]
    assert loaded.startswith(f"loaded the best checkpoint, of step {step} (eval_reward ")
    assert "stopped at step 2 of 4" in printed
    read = read_run(tmp_path)
    assert read.has_ended and read.best_step == step
    entries = lines(tmp_path)
    assert [entry["kind"] for entry in entries[-2:]] == ["best", "end"]


def test_tables_of_completions_are_above_the_line_of_their_step(tmp_path, capsys):
    run(tmp_path, log_completions=True, num_completions_to_print=1)
    printed = capsys.readouterr().out
    assert -1 < printed.index("Step 1") < printed.index("step 1/4")


def test_batches_are_not_pinned_and_torch_does_not_warn(tmp_path):
    built = trainer(tmp_path)
    built.args.dataloader_pin_memory = True  # the default without `use_cpu`
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*pin_memory")
        for loader in (built.get_train_dataloader(), built.get_eval_dataloader()):
            assert next(iter(loader))
    assert built.args.dataloader_pin_memory


def test_first_rollout_is_logged_at_the_first_step(tmp_path):
    history = run(tmp_path, logging_steps=3, max_steps=6).state.log_history
    assert [entry["step"] for entry in history if "loss" in entry] == [
        1,
        3,
        6,
    ] and "reward" in history[0]
    for settings in ({"logging_strategy": "no"}, {"logging_first_step": False}):
        assert PPOConfig("out", use_cpu=True, **settings).logging_first_step is False


def test_progress_bar_starts_at_the_resumed_step(tmp_path, capsys):
    settings = {"save_strategy": "steps", "save_steps": 2, "disable_tqdm": False, **EVALUATED}
    run(tmp_path, **settings)
    assert "4/4" in capsys.readouterr().err
    run(tmp_path, str(tmp_path / "checkpoint-2"), **settings)
    shown = capsys.readouterr()
    assert "| 2/4 [00:00<?" in shown.err and "4/4" in shown.err
    assert "step 4/4" in shown.out and "{" not in shown.out


def test_removing_the_printer_silences_the_terminal(tmp_path, capsys):
    """As scripts for other trainers do."""
    built = trainer(tmp_path)
    built.remove_callback(PrinterCallback)
    built.train()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("completions", "advised"), [(32, 128), (63, 189), (64, None)])
def test_small_rollout_gets_a_note(completions, advised):
    """Of a size that it can have: 128 is no number of micro-batches of 63."""
    summary = BatchPlan(completions).summary(10, 1.0)
    assert ("note:" in summary) == (advised is not None)
    assert advised is None or f"`generation_batch_size={advised}`" in summary
