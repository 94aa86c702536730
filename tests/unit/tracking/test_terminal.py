"""The terminal shows the plan of a run, one line per log, and where the results are."""

import logging
import re

import pytest
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers import PrinterCallback

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.ppo.batch_plan import BatchPlan

EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}


def trainer(output_dir, **settings):
    args = config(output_dir, **settings)
    return PPOTrainer(llama(), length_reward, args, prompts(), prompts(4), processing_class=tokenizer())


def test_log_is_one_line_between_plan_and_report(tmp_path, capsys, caplog):
    with caplog.at_level(logging.INFO, "trl_ppo_ext.tracking.terminal"):
        trainer(tmp_path / "a run", **EVALUATED).train()
    printed = [line for line in capsys.readouterr().out.splitlines() if line[0] != "["]  # of DeepSpeed's import
    assert [line.split(":")[0] for line in printed[:4]] == ["rollout", "updates", "run", "note"]
    assert printed[0].startswith("rollout: 8 completions of 8 prompts")
    assert "updates: 4 optimizer steps per rollout" in printed[1]
    assert "max_steps=4 optimizer steps = 1 rollouts = 8 completions" in printed[2]
    number = r"-?[\d.,e+-]+"
    labels = ("reward", "KL", "entropy", "length", "critic", "tokens/s")
    assert re.fullmatch("  ".join(["step 1/4", *(f"{label} {number}" for label in labels)]), printed[4])
    for step in (2, 3, 4):  # they update on the same rollout
        assert re.fullmatch(f"step {step}/4  loss {number}  grad_norm {number}", printed[3 + step])
    assert re.match(f"step 4/4  eval  reward {number}  KL {number}", printed[8])
    assert re.fullmatch(rf"see `trl-ppo report '{tmp_path}/a run'`", printed[9])
    assert len(printed) == 10
    assert "'clip_ratio/low_mean': " in caplog.text


def test_end_names_the_extra_that_a_report_needs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trl_ppo_ext.tracking.terminal.find_spec", lambda name: None)
    trainer(tmp_path / "run").train()
    assert capsys.readouterr().out.endswith(f'report {tmp_path}/run` (needs pip install "trl_ppo_ext[report]")\n')
    assert (tmp_path / "run" / "run_log.jsonl").is_file()


def test_first_rollout_is_logged_at_the_first_step(tmp_path):
    built = trainer(tmp_path, logging_steps=3, max_steps=6)
    built.train()
    assert [entry["step"] for entry in built.state.log_history if "loss" in entry] == [1, 3, 6]
    assert "reward" in built.state.log_history[0]


@pytest.mark.parametrize("settings", [{"logging_strategy": "no"}, {"logging_first_step": False}])
def test_first_log_can_be_switched_off(settings):
    assert PPOConfig("out", use_cpu=True, **settings).logging_first_step is False


def test_resumed_run_names_its_checkpoint(tmp_path, capsys):
    settings = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, **settings).train()
    capsys.readouterr()
    trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert f"resumed from {tmp_path}/checkpoint-2, after step 2\nstep 3/4" in capsys.readouterr().out


def test_progress_bar_starts_at_the_resumed_step(tmp_path, capsys):
    settings = {"save_strategy": "steps", "save_steps": 2, "disable_tqdm": False, **EVALUATED}
    trainer(tmp_path, **settings).train()
    assert "4/4" in capsys.readouterr().err
    trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    shown = capsys.readouterr()
    assert "| 2/4 [00:00<?" in shown.err and "4/4" in shown.err
    assert "step 4/4" in shown.out and "{" not in shown.out


def test_removing_the_printer_silences_the_terminal(tmp_path, capsys):
    """As scripts for other trainers do."""
    built = trainer(tmp_path)
    built.remove_callback(PrinterCallback)
    built.train()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("completions", "noted"), [(8, True), (63, True), (64, False), (512, False)])
def test_small_rollout_gets_a_note(completions, noted):
    assert ("generation_batch_size=128" in BatchPlan(completions).summary(10, 1.0)) == noted
