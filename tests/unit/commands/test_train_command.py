"""`trl-ppo train`: accepted and refused arguments, and the files of a run."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import llama
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from trl_ppo_ext import PPOConfig, data
from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.commands import train
from trl_ppo_ext.commands.launch import PPOScriptArguments, load_datasets, parse

RUN = {
    "model_name_or_path": "policy",
    "dataset_name": "prompts.jsonl",
    "reward_funcs": "cli_rewards.of_last_word",
    "output_dir": "run",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_steps": 2,
    "per_device_train_batch_size": 4,
    "num_mini_batches": 2,
    "num_ppo_epochs": 1,
    "max_completion_length": 6,
    "max_steps": 4,
    "learning_rate": 0.01,
}


def save(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*options, **changes):
    """A run from a config file: its exit status. `None` takes a key out of it."""
    given = {name: value for name, value in (RUN | changes).items() if value is not None}
    Path("configs/run.yaml").write_text(yaml.safe_dump(given))
    return cli.main(["train", "--config", "configs/run.yaml", *options])


def weights(directory):
    return load_file(Path(directory) / "adapter_model.safetensors")


# ---- training ----


def test_run_saves_an_adapter_that_peft_loads(there, capsys):
    assert run(output_dir="whole") == 0
    assert "Saved in whole." in capsys.readouterr().out
    loaded = PeftModel.from_pretrained(llama(), "whole")
    assert any(x.abs().sum() > 0 for name, x in loaded.named_parameters() if "lora_B" in name)
    assert (there / "whole" / "checkpoint-4").is_dir()


def test_earlier_run_is_refused_before_anything_is_loaded(there, capsys, monkeypatch):
    assert run(output_dir="twice", max_steps=2) == 0
    monkeypatch.setattr(train, "build_trainer", lambda *args: pytest.fail("it was loaded"))
    for options in ((), ("--dry_run",)):
        assert run(*options, output_dir="twice", max_steps=2) == 2
        assert "must have no checkpoints of an earlier run" in capsys.readouterr().err


def test_run_starts_from_an_adapter(there, capsys):
    torch.manual_seed(1)
    lora = LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained("policy"), lora).save_pretrained("sft")
    before = weights("sft")
    start = {"adapter_name_or_path": "sft", "learning_rate": 0.0}
    assert run("--dry_run", **start) == 0 and "peak:" in capsys.readouterr().out
    assert run(output_dir="continued", max_steps=1, **start) == 0
    after = weights("continued")
    assert before.keys() == after.keys() and all(
        torch.equal(x, after[name]) for name, x in before.items()
    )


def test_run_reads_the_tokenizer_of_its_initial_adapter(there, capsys):
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained("policy"), lora).save_pretrained("chats")
    saved = AutoTokenizer.from_pretrained("policy")
    saved.chat_template = "{% for m in messages %}w7 {{ m.content }}{% endfor %}"
    saved.save_pretrained("chats")
    save(there / "chats.jsonl", [{"prompt": [{"role": "user", "content": "w9"}]}] * 8)
    chats = {
        "adapter_name_or_path": "chats",
        "dataset_name": "chats.jsonl",
        "reward_funcs": "cli_rewards.length",
    }
    assert run("--dry_run", **chats) == 0
    assert capsys.readouterr().out.rstrip().endswith("w7 w9")
    assert run(**chats, max_steps=1, output_dir="chatted") == 0
    assert AutoTokenizer.from_pretrained("chatted").chat_template == saved.chat_template


def test_command_line_wins_over_the_file(there, capsys):
    assert run("--max_steps", "2", "--dry_run") == 0
    assert "2 optimizer steps" in capsys.readouterr().out
    assert cli.main(["train", "--config=configs/run.yaml", "--dry-run", "--max-steps=6"]) == 0
    assert "6 optimizer steps" in capsys.readouterr().out


def test_config_file_may_be_the_first_argument(there, capsys):
    run("--dry_run")
    assert cli.main(["train", "configs/run.yaml", "--dry_run", "--max_steps", "6"]) == 0
    assert "6 optimizer steps" in capsys.readouterr().out
    assert cli.main(["train", "configs/rum.yaml"]) == 2
    assert "`--config` must be a YAML file, got 'configs/rum.yaml'" in capsys.readouterr().err


def test_second_config_file_is_refused(there, capsys):
    run("--dry_run")
    for first in ([], ["--config"]):
        assert cli.main(["train", *first, "configs/run.yaml", "--config", "b.yaml"]) == 2
        assert (
            "There can be one config file, got 'configs/run.yaml' and 'b.yaml'"
            in capsys.readouterr().err
        )


def test_run_resumes_from_its_newest_checkpoint(there):
    assert run(output_dir="straight") == 0
    for folder, how in (("resumed", True), ("named", "named/checkpoint-2")):
        shutil.copytree("straight/checkpoint-2", f"{folder}/checkpoint-2")
        assert run(output_dir=folder, resume_from_checkpoint=how) == 0
        first = [
            Path(run_dir, "checkpoint-2", "adapter_model.safetensors")
            for run_dir in (folder, "straight")
        ]
        # a run from the beginning writes it again
        assert first[0].stat().st_mtime_ns == first[1].stat().st_mtime_ns
        again = weights(folder)
        before = weights("straight")
        assert all(torch.equal(again[name], before[name]) for name in before)


def test_run_is_evaluated_on_eval_rows(there, monkeypatch):
    found = {}
    built = train.build_trainer
    monkeypatch.setattr(
        train, "build_trainer", lambda *given: found.setdefault("trainer", built(*given))
    )
    evaluated = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_rows": 3,
        "dataset_name": "splits",
    }
    assert run(output_dir="evaluated", max_steps=2, **evaluated) == 0
    trainer = found["trainer"]
    # spread over all
    assert [row["prompt"] for row in trainer.eval_dataset] == ["w9 w0", "w13 w4", "w17 w8"]
    assert (
        "eval_reward" in trainer.state.log_history[-2]
        or "eval_reward" in trainer.state.log_history[-1]
    )


def test_test_split_is_evaluated_before_the_first_step(there, capsys):
    evaluated = {"eval_on_start": True, "eval_rows": 3, "dataset_name": "splits"}
    assert run(output_dir="at_start", max_steps=1, **evaluated) == 0
    assert "eval" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [{"eval_rows": 3}, {"dataset_test_split": "held_out"}])
def test_split_that_nothing_evaluates_is_warned_of(there, caplog, settings):
    assert run("--dry_run", dataset_name="splits", **settings) == 0
    split = settings.get("dataset_test_split", "test")
    assert f"The split {split!r} is not evaluated, because `eval_strategy`" in caplog.text


def test_map_function_adds_missing_prompts(there, capsys):
    mapped = {"dataset_name": "questions.jsonl", "map_function": "cli_rewards.to_prompt"}
    assert run("--dry_run", **mapped) == 0
    assert capsys.readouterr().out.rstrip().endswith("\nw1 w9 w0")


def test_environment_writes_missing_prompts(there):
    settings = {
        "dataset_name": "questions.jsonl",
        "environment_factory": "cli_rewards.Walk",
        "reward_funcs": None,
    }
    assert run("--dry_run", **settings) == 0


def test_environment_writes_all_prompts(there):
    settings = {
        "environment_factory": "cli_rewards.Walk",
        "reward_funcs": None,
        "dataset_name": None,
        "max_steps": 2,
    }
    assert run("--dry_run", **settings) == 0
    assert run(**settings, output_dir="walked") == 0


def test_environment_that_does_not_take_the_columns_is_an_error_in_a_line(there, capsys):
    settings = {"environment_factory": "cli_rewards.Narrow", "reward_funcs": None}
    assert run("--dry_run", dataset_name="questions.jsonl", **settings) == 2
    error = capsys.readouterr().err
    assert "error: `reset` of the environment `Narrow` must take `row`" in error
    assert "Traceback" not in error


def test_edited_map_function_maps_again(tmp_path):
    save(tmp_path / "rows.jsonl", [{"question": "w1"}])
    script = PPOScriptArguments(
        dataset_name=str(tmp_path / "rows.jsonl"), map_function="edited_rows.to_prompt"
    )
    script.directory = str(tmp_path)
    for suffix in ("w2", "w3 w4"):
        sys.modules.pop("edited_rows", None)
        source = f"def to_prompt(row):\n    return {{'prompt': row['question'] + ' {suffix}'}}\n"
        (tmp_path / "edited_rows.py").write_text(source)
        assert load_datasets(script)["train"][0]["prompt"] == f"w1 {suffix}"


def test_map_function_may_be_a_partial(tmp_path):
    save(tmp_path / "rows.jsonl", [{"question": "w1"}])
    source = (
        "from functools import partial\n\ndef ask(row, end):\n    return {'prompt': "
        "row['question'] + end}\n"
    )
    (tmp_path / "partial_rows.py").write_text(source + "to_prompt = partial(ask, end=' w2')\n")
    script = PPOScriptArguments(
        dataset_name=str(tmp_path / "rows.jsonl"), map_function="partial_rows.to_prompt"
    )
    script.directory = str(tmp_path)
    assert load_datasets(script)["train"][0]["prompt"] == "w1 w2"


def test_map_function_may_have_the_name_of_its_module(tmp_path):
    save(tmp_path / "rows.jsonl", [{"question": "w1"}])
    source = "def ask_twice(row):\n    return {'prompt': row['question'] * 2}\n"
    (tmp_path / "ask_twice.py").write_text(source)
    script = PPOScriptArguments(dataset_name=str(tmp_path / "rows.jsonl"), map_function="ask_twice")
    script.directory = str(tmp_path)
    assert load_datasets(script)["train"][0]["prompt"] == "w1w1"


class Stub:
    """Stands for a trainer, and records its calls."""

    def __init__(self):
        self.accelerator = self
        self.hub_model_id = "me/run"
        self.calls = {}

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.update({name: kwargs})


def test_run_is_pushed_with_its_datasets(there, monkeypatch):
    pushed = Stub()
    saved = Stub()
    for trainer in (pushed, saved):
        monkeypatch.setattr(train, "build_trainer", lambda *given, trainer=trainer: trainer)
        monkeypatch.setattr(train, "load_datasets", lambda *given: {})
        assert run(dataset_name="trl-lib/tldr", push_to_hub=trainer is pushed) == 0
    assert list(pushed.calls) == ["train", "push_to_hub", "print", "end"]
    assert list(saved.calls) == ["train", "save_model", "print", "end"]
    assert pushed.calls["push_to_hub"] == {"datasets": ["trl-lib/tldr"]}


def test_failing_run_reports_its_step_and_cause(there):
    says = r"failed after 2 optimizer steps.*--resume_from_checkpoint true"
    with pytest.raises(RuntimeError, match=says) as error:
        run(reward_funcs="cli_rewards.fails_late", output_dir="failed")
    cause = error.value.__cause__
    assert (
        "the disk is gone" in str(cause)
        and "checkpoint-2` holds all optimizer steps so far" in cause.__notes__[0]
    )


def test_resuming_without_checkpoint_is_refused_in_one_line(there, capsys):
    assert run(output_dir="nowhere", resume_from_checkpoint=True) == 2
    assert "`nowhere` has no checkpoint to resume from" in capsys.readouterr().err


def test_recipes_script_is_the_command(there, monkeypatch, capsys):
    script = Path(__file__).parents[3] / "recipes" / "ppo.py"
    run("--dry_run")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [str(script), "--config", "configs/run.yaml", "--dry_run"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 0 and "The first prompt" in capsys.readouterr().out


# ---- what a run would be ----


def test_dry_run_prints_a_preview(there, capsys):
    assert (
        run(
            "--dry_run", dataset_name="chat.jsonl", num_generations=2, gradient_accumulation_steps=3
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "24 completions of 12 prompts (2 each) = 4 per micro-batch × 3 micro-batches × 2 "
        "minibatches × 1 process" in said
    )
    assert "2 optimizer steps per rollout = 1 epochs × 2 minibatches of 12 completions" in said
    assert "4 optimizer steps = 2 rollouts = 48 completions" in said
    assert (
        "rewards: cli_rewards.of_last_word" in said
        and "tokens in 12 rows, of a context of 64" in said
    )
    assert "with prompts of 58 tokens" in said and "peak:" in said  # the context less a completion
    assert said.rstrip().endswith("\n<bos> <unk> w9 w0 <bos> <unk>")
    assert not (there / "run").exists()


def test_dry_run_without_rewards_counts_no_critic(there, capsys):
    """There is none in the run either."""
    save(there / "hints.jsonl", [{"prompt": "w9 w0", "hint": "w1 w9 w0"}] * 12)
    distilled = {"reward_funcs": None, "dataset_name": "hints.jsonl"}
    distilled |= {"reference_prompt": "hint", "kl_coef": 1.0}
    previews = []
    for settings in ({}, {"critic": "none", "advantage_estimator": "reinforce"}):
        assert run("--dry_run", **distilled | settings) == 0
        previews.append(capsys.readouterr().out)
    assert previews[0] == previews[1] and "rewards: none" in previews[0]


def test_dry_run_refuses_what_the_run_would(there, monkeypatch, capsys):
    monkeypatch.setattr(
        "trl_ppo_ext.tracking.completions.get_available_reporting_integrations", list
    )
    refused = [
        (
            {"max_prompt_length": 1},
            "Row 0 of `train_dataset`: The prompt has 2 tokens",
            "Set `overlong_prompts='truncate'`",
        ),
        ({"report_to": "wandb"}, "`report_to` names 'wandb'", "not installed"),
        (
            {"reward_funcs": "adapter:policy"},
            "`policy` has no adapter_config.json",
            "not a PEFT adapter",
        ),
        (
            {"output_dir": "policy"},
            "`output_dir` must not be the base model's own directory",
            "use another",
        ),
        (
            {
                "dataset_test_split": "train",
                "eval_strategy": "steps",
                "eval_steps": 2,
                "metric_for_best_model": "eval_rewrad",
            },
            "`metric_for_best_model` must be a metric of the evaluation, got 'eval_rewrad'",
            "did you mean 'eval_reward'?",
        ),
        (
            {
                "dataset_test_split": "train",
                "eval_strategy": "steps",
                "eval_steps": 2,
                "metric_for_best_model": "eval_reward",
                "reward_funcs": None,
                "reference_prompt": "prompt",
                "kl_coef": 0.1,
            },
            "`metric_for_best_model='eval_reward'` is constant in a run without rewards",
            "use e.g. 'eval_kl'",
        ),
    ]
    for changes, problem, remedy in refused:
        assert run("--dry_run", **changes) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert problem in error and remedy in error


def test_dry_run_allows_metrics_of_a_reward_object(there, capsys):
    evaluated = {"dataset_test_split": "train", "eval_strategy": "steps", "eval_steps": 2}
    for metric in ("eval_accuracy", "eval_rewards/judging/mean"):
        chosen = {"reward_funcs": "cli_rewards.judge", "metric_for_best_model": metric}
        assert run("--dry_run", **evaluated | chosen) == 0


def test_dry_run_continues_without_memory_estimate(there, capsys):
    assert run("--dry_run", optim="adafactor") == 0
    said = capsys.readouterr().out
    assert "not estimated: `optim` must be" in said and "The first prompt" in said


@pytest.mark.parametrize(
    "line, kl_coef",
    [(["--kl_coef", "0"], 0.0), (["--kl_coef", "0.04"], 0.04), (["--beta", "0"], 0.0), ([], 0.04)],
)
def test_a_default_on_the_command_line_is_not_ignored(there, line, kl_coef):
    """A file's name of TRL, and ours beside it, even with its default."""
    Path("run.yaml").write_text(yaml.safe_dump(RUN | {"beta": 0.04}))
    assert parse("trl-ppo train", ["run.yaml", *line], "")[1].kl_coef == kl_coef


def test_two_names_of_a_setting_in_one_file_are_an_error(there):
    Path("run.yaml").write_text(yaml.safe_dump(RUN | {"beta": 0.04, "kl_coef": 0.0}))
    with pytest.raises(ValueError, match=r"`beta` .* sets `kl_coef`.*remove one of the two"):
        parse("trl-ppo train", ["run.yaml"], "")


# changes of the config above, and what the error must say: the field, the value, the remedy
WRONG = [
    ({"cliprnge": 0.3}, "`cliprnge`", "in the config file", "did you mean `cliprange`?"),
    (
        {"total_episodes": 1000},
        "`total_episodes`",
        "1000",
        "sets `max_steps` to .*; remove one of the two",
    ),
    ({"learning_rate": "fast"}, "learning_rate", "'fast'", "invalid float value"),
    ({"kl_estimator": "k9"}, "`kl_estimator`", "'k9'", "must be one of 'k1'"),
    ({"temperature": 0}, "`temperature`", "got 0", "must be above 0"),
    ({"num_generations": 3}, "num_generations", "=3", r"use one of \[1, 2, 4, 8\]"),
    ({"generation_batch_size": 10}, "generation_batch_size", "10", r"use \d+ or \d+, or change"),
    ({"eval_strategy": False}, "`eval_strategy`", "False", "quote them"),
    ({"eval_strategy": "epoch"}, "`dataset_test_split`", "'test'", r"to one of \['train'\]"),
    ({"eval_rows": 0}, "`eval_rows`", "0", "at least 1"),
    (
        {
            "dataset_name": None,
            "environment_factory": "cli_rewards.Walk",
            "reward_funcs": None,
            "max_steps": -1,
        },
        "`dataset_name`",
        "with `dataset_streaming`",
        "`max_steps` must be set",
    ),
    (
        {"dataset_streaming": True, "max_steps": -1},
        "`dataset_streaming`",
        "`dataset_name`",
        "`max_steps` must be set",
    ),
    (
        {"dataset_name": None, "environment_factory": "cli_rewards.Walk", "eval_strategy": "epoch"},
        "`dataset_name`",
        "nothing can be evaluated",
        "give a dataset",
    ),
    (
        {"dataset_name": "./none"},
        "`dataset_name",
        r"'./none'` does not exist; the working directory is /",
        "Name a",
    ),
    ({"dataset_name": None}, "`dataset_name`", "no dataset", "an id, a file or a directory"),
    (
        {"dataset_train_split": "training"},
        "`dataset_train_split`",
        "'training'",
        r"to one of \['train'\]",
    ),
    (
        {"dataset_name": "questions.jsonl"},
        "`train_dataset` needs",
        r"\['question'\]",
        "a `map_function`",
    ),
    (
        {"eval_rows": 2, "dataset_test_split": "train"},
        "`eval_rows` needs",
        "'train'",
        "other than the training",
    ),
    ({"map_function": "to_prompt"}, "`map_function", "'to_prompt'", "name a module and a function"),
    (
        {"map_function": "cli_rewards.to_prompts"},
        "`map_function`",
        "'cli_rewards.to_prompts'",
        "name a function",
    ),
    (
        {"dataset_name": "chat.jsonl", "model_name_or_path": "plain"},
        "chat_template",
        "messages",
        "set|give",
    ),
    ({"max_completion_length": 64}, "max_completion_length", "=64", "lower it"),
    ({"model_name_or_path": None}, "`model_name_or_path`", "no model", "give an id or a path"),
    ({"model_name_or_path": "./polcy"}, "`model_name_or_path", "'./polcy'", "check its spelling"),
    ({"reward_funcs": None}, "`reward_funcs`", "empty", "pass a reward, or an environment"),
    (
        {"reward_funcs": "cli_rewards.length_"},
        "`reward_funcs`",
        "'cli_rewards.length_'",
        "name a function",
    ),
    (
        {"reward_funcs": ["accuracy", "format"]},
        "`reward_funcs`",
        "'accuracy'",
        r"such as my_rewards\.accuracy, or .*",
    ),
    (
        {"monitor_funcs": "cli_reward.length"},
        "`monitor_funcs`",
        "'cli_reward.length'",
        "set PYTHONPATH",
    ),
    (
        {"reward_funcs": "cli_rewards.of_texts"},
        "`of_texts` cannot be called",
        "`texts`",
        r"end its .*`\*\*kwargs`",
    ),
    (
        {"reward_funcs": "accuracy_reward"},
        "`accuracy_reward` cannot",
        "`solution`",
        r"\(none\).*add a missing column",
    ),
    (
        {"monitor_funcs": "accuracy_reward"},
        "`accuracy_reward` cannot",
        "`solution`",
        r"columns of `train_dataset`",
    ),
    (
        {"reward_weights": [1.0, 2.0]},
        "reward_weights",
        "2 entries for 1 rewards",
        "they must match",
    ),
    ({"critic": "none"}, "`num_generations`", "got 1", "use e.g. 8"),
    ({"critic_init": "splits"}, "`critic_init", "'splits'", "name a saved critic"),
    ({"critic_init": "nobody/critic"}, "`nobody/critic`", "on the Hub", "check the path and"),
    ({"use_peft": False}, "`use_peft=False`", "an adapter", "omit it"),
    (
        {"adapter_name_or_path": "splits"},
        "`peft_config='splits'`",
        "adapter_config.json",
        "name a saved adapter",
    ),
    ({"adapter_name_or_path": "splits", "lora_r": 4}, "`lora_r", "=4", "remove one of the two"),
    ({"lora_target_modules": ["q_prj"]}, "Target modules", "q_prj", "not found in the base model"),
    ({"use_bnb_nested_quant": True}, "`use_bnb_nested_quant", "4 bits", "set `load_in_4bit`"),
    (
        {"load_best_model_at_end": True},
        "`load_best_model_at_end",
        "True",
        "needs `metric_for_best_model`",
    ),
    (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        "`lr_scheduler_type",
        "reduce_lr_on_plateau",
        "needs `metric_for_best_model`",
    ),
    (
        {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"},
        "`lr_scheduler_type",
        "greedy",
        "needs `metric_for_best_model`",
    ),
    ({"neftune_noise_alpha": 5.0}, "`neftune_noise_alpha", "5.0", "Leave it at None"),
    ({"max_steps": 2.5}, "max_steps", "2.5", "must be int"),
    ({"reward_label": 1}, "`reward_label=", "1", "needs a reward model"),
    (
        {"lora_task_type": "SEQ_CLS"},
        "`lora_task_type='SEQ_CLS'`",
        "causal language model",
        "omit it",
    ),
    ({"ignore_bias_buffers": True}, "`ignore_bias_buffers`", "without adapters", "omit it"),
    (
        {"dtype": "bfloat16", "model_init_kwargs": {"dtype": "float32"}},
        "`dtype`",
        "'float32'",
        "omit one of the two",
    ),
    (
        {"tools": "cli_rewards.of_last_word"},
        "A tool must have type hints, and a docstring",
        "`of_last_word` .*has no docstring",
        "add what is missing",
    ),
    (
        {"environment_factory": "cli_rewards.of_last_word"},
        "`environment_factory` must be callable without arguments",
        "`of_last_word` .*missing a required argument",
        "bind them with `functools.partial`",
    ),
    (
        {"reward_funcs": "cli_rewards.not_a_reward"},
        "'cli_rewards.not_a_reward'",
        "of the type int",
        "name a function",
    ),
    (  # a folder without `__init__.py`
        {"reward_funcs": "configs.brevity"},
        "'configs.brevity'",
        "missing in configs;",
        "name a function",
    ),
]


@pytest.mark.parametrize(
    "changes, field, value, remedy", WRONG, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_wrong_config_is_refused_with_field_value_and_remedy(
    there, capsys, changes, field, value, remedy
):
    assert run("--dry_run", **changes) == 2
    error = " ".join(capsys.readouterr().err.split())
    for part in (re.escape(field), value, remedy):
        assert re.search(part, error), (part, error)
    assert "Traceback" not in error and not (there / "run").exists()


@pytest.mark.parametrize("name", ["none.jsonl", "none.csv", "./no/ne", "/no/ne"])
def test_missing_file_is_not_looked_up_on_the_hub(monkeypatch, name):
    monkeypatch.setattr(
        data, "load_dataset", lambda *args, **kwargs: pytest.fail("it was looked up")
    )
    with pytest.raises(
        ValueError,
        match=rf"`dataset_name='{name}'` does not exist; the working directory is .*Name a",
    ):
        data.load_splits(name)


@pytest.mark.parametrize(
    "cause", [OSError("no connection"), RuntimeError("Dataset scripts are no longer supported")]
)
def test_error_of_a_failed_download_names_its_cause(monkeypatch, cause):
    def fail(*args, **kwargs):
        raise cause

    monkeypatch.setattr(data, "load_dataset", fail)
    with pytest.raises(ValueError, match=rf"cannot be loaded \({cause}\)\. Name a dataset"):
        data.load_splits("nobody/nothing")


def test_unknown_key_like_a_secret_is_refused_without_its_value(there, capsys):
    assert run("--dry_run", hub_tokn="hf_verysecret") == 2
    error = capsys.readouterr().err
    assert "did you mean `hub_token`?" in error and "verysecret" not in error


@pytest.mark.parametrize("file", ["none.yaml", "policy", ""])  # the second is a directory
def test_missing_config_file_is_refused_by_name(there, capsys, file):
    assert cli.main(["train", "--config", *([file] if file else [])]) == 2
    expected = f"`--config` must be a YAML file, got '{file}'; the working directory is {there}."
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, cause", [("a: [", "cannot be read"), ("- a", "must contain a YAML mapping")]
)
def test_invalid_config_file_is_refused(there, capsys, text, cause):
    (there / "broken.yaml").write_text(text)
    assert cli.main(["train", "--config", "broken.yaml"]) == 2
    assert cause in capsys.readouterr().err


def test_repeated_key_of_a_config_is_refused(there, capsys):
    run("--dry_run")
    file = Path("configs/run.yaml")
    repeated = there / "configs" / "repeated.yaml"
    repeated.write_text(file.read_text() + "max_steps: 5\n")
    capsys.readouterr()
    assert cli.main(["train", "--config", str(repeated)]) == 2
    line = len(repeated.read_text().splitlines())
    assert (
        f"`max_steps` appears twice in the config file, in line {line}" in capsys.readouterr().err
    )
    repeated.write_text(file.read_text() + "generation_kwargs:\n  seed: 1\n  seed: 2\n")
    assert cli.main(["train", "--config", str(repeated)]) == 2
    assert "`seed` appears twice in the config file" in capsys.readouterr().err


def test_variables_that_a_config_sets_are_printed(there, monkeypatch, capsys):
    monkeypatch.setenv("OF_MINE", "before")
    assert run("--dry_run", env={"OF_MINE": "hunter2"}) == 0
    error = capsys.readouterr().err
    assert "sets these environment variables: OF_MINE\n" in error and "hunter2" not in error
    assert os.environ["OF_MINE"] == "hunter2"


def test_modules_beside_a_config_stand_for_no_missing_package(there):
    """They are imported by the named module, and by nobody else."""
    (there / "configs" / "no_such_library.py").write_text("raise SystemExit('imported')")
    (there / "configs" / "helper_of_mine.py").write_text("FOUR = 4")
    (there / "configs" / "mine.py").write_text(
        "from helper_of_mine import FOUR\n\ndef four(completions, **_):\n    return [FOUR]"
    )
    assert run("--dry_run", reward_funcs="mine.four") == 0
    assert importlib.util.find_spec("no_such_library") is None
    assert sys.modules["mine"].four([]) == [4]


def test_keys_of_other_scripts_are_reported_with_replacements(there, capsys):
    assert (
        run(
            "--dry_run",
            dataset_prompt_column="q",
            nonsense=1,
            system_prompt="Be good.",
            vllm_device="auto",
        )
        == 2
    )
    errors = capsys.readouterr().err.rstrip().split("\n- ")
    hints = ("`map_function`", "--help", "write it into the messages", "see `vllm_mode`")
    for error, hint in zip(errors, hints, strict=True):
        assert hint in error, error


@pytest.mark.parametrize("place", ["file", "line"])
def test_torch_dtype_sets_dtype(there, capsys, place):
    """Its name before transformers 5, which public config files still have."""
    in_file, in_line = (
        ({"torch_dtype": "float32"}, []) if place == "file" else ({}, ["--torch_dtype=float32"])
    )
    Path("configs/run.yaml").write_text(yaml.safe_dump(RUN | in_file))
    argv = ["--config", "configs/run.yaml", *in_line]
    _, _, model = parse("trl-ppo train", argv, "", script_class=train.TrainScriptArguments)
    assert model.dtype == "float32"
    assert run("--dry_run", torch_dtype="float32", dtype="float32") == 2
    assert "`torch_dtype` is `dtype` today, and both are set; remove one" in capsys.readouterr().err


def test_unknown_arguments_are_reported_together(there, capsys):
    assert run("--dry_run", "--nonsense", "1", cliprnge=0.3, temperature=0) == 2
    errors = capsys.readouterr().err.rstrip().split("\n- ")
    assert (
        len(errors) == 2
        and "`cliprange`" in errors[0]
        and "`nonsense` on the command line" in errors[1]
    )


def test_help_lists_own_fields_before_those_of_the_trainer(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "[--config] FILE.yaml" in text and len(text.splitlines()) < 350
    assert text.index("--model_name_or_path") < 400
    _, *groups = re.split(
        r"^(model|dataset and rewards|training)(?: \([\w ]+\))?:$", text, flags=re.MULTILINE
    )
    assert groups[::2] == ["model", "dataset and rewards", "training"]
    own, _, inherited = groups[5].partition("Also fields")
    options = [["--load_in_4bit"], ["--dry_run", "--map_function"]]
    options.append(
        [
            f"--{name} "
            for name in PPOConfig.__annotations__
            if PPOConfig.__dataclass_fields__[name].init
        ]
    )
    for group, expected in zip([*groups[1:5:2], own], options):
        assert not [option for option in expected if option not in group.replace("\n", " \n")]
    names = {entry.name for entry in fields(TrainingArguments)} - PPOConfig.__annotations__.keys()
    assert names <= set(re.findall(r"\w+", inherited))


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "All_Proxy"])
def test_config_file_sets_no_proxy(there, capsys, monkeypatch, name):
    """Keys of servers over http would pass through it, and prompts."""
    monkeypatch.delenv(name, raising=False)
    (there / "proxy.yaml").write_text(f"env:\n  {name}: http://elsewhere:3128\n")
    assert cli.main(["train", "--config", "proxy.yaml"]) == 2
    assert (
        f"`env` of a config file must not set `{name}`, through which keys"
        in capsys.readouterr().err
    )
    assert name not in os.environ


def test_config_file_may_name_hosts_without_a_proxy(there, capsys, monkeypatch):
    monkeypatch.setenv("no_proxy", "")
    (there / "proxy.yaml").write_text("env:\n  no_proxy: localhost\n")
    cli.main(["train", "--config", "proxy.yaml"])
    assert "must not set" not in capsys.readouterr().err
