"""Fields of the config, and defaults that depend on the machine."""

import copy
import logging
import warnings
from dataclasses import fields, replace

import pytest
import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import GRPOConfig

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.trl_names import NAMES


@pytest.mark.parametrize("emulated", [False, True])
def test_bf16_is_the_default_only_in_hardware(monkeypatch, emulated):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or not emulated,
    )
    # cached, and perhaps asked before
    monkeypatch.setattr("trl_ppo_ext.config.is_torch_bf16_gpu_available", lambda: True)
    # it would use the GPU
    monkeypatch.setattr(
        TrainingArguments,
        "__post_init__",
        lambda self: setattr(self, "accelerator_config", AcceleratorConfig()),
    )
    monkeypatch.setattr(PPOConfig, "world_size", 1)
    assert PPOConfig("run").bf16 is not emulated


@pytest.mark.parametrize(
    "launched, settings", [("bf16", {}), ("fp16", {}), ("no", {}), ("no", {"bf16": True})]
)
def test_precision_is_that_of_the_launcher(monkeypatch, tmp_path, launched, settings):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    args = PPOConfig(str(tmp_path), use_cpu=True, **settings)
    assert args.mixed_precision == ("bf16" if args.bf16 else "fp16" if args.fp16 else "no")
    assert args.mixed_precision == launched or settings
    with pytest.raises(ValueError, match="must be True to launch with `--mixed_precision bf16`"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        PPOConfig(str(tmp_path), use_cpu=True, bf16=False)


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"metric_for_best_model": "eval_reward"}, "max"),
        ({"metric_for_best_model": "eval_kl", "greater_is_better": False}, "min"),
        ({"metric_for_best_model": "eval_reward", "lr_scheduler_kwargs": {"mode": "min"}}, "min"),
        ({"metric_for_best_model": "eval_reward", "lr_scheduler_kwargs": '{"patience": 3}'}, "max"),
    ],
    ids=str,
)
def test_schedule_of_a_metric_follows_greater_is_better(tmp_path, schedule, settings, mode):
    args = PPOConfig(
        str(tmp_path),
        use_cpu=True,
        eval_strategy="epoch",
        lr_scheduler_type=schedule,
        **settings,
    )
    patience = {"patience": 3} if "patience" in str(settings) else {}
    assert args.lr_scheduler_kwargs == {"mode": mode} | patience
    assert replace(args) == args


def test_schedule_that_counts_steps_has_no_mode(tmp_path):
    settings = {"metric_for_best_model": "eval_reward", "eval_strategy": "epoch"}
    args = PPOConfig(str(tmp_path), use_cpu=True, lr_scheduler_type="cosine", **settings)
    assert "mode" not in (args.lr_scheduler_kwargs or {})


def test_fields_that_are_the_case_are_accepted(tmp_path):
    args = PPOConfig(
        str(tmp_path), use_cpu=True, reward_label="1", include_num_input_tokens_seen="all"
    )
    assert args.reward_label == 1  # of a command line
    assert args.include_num_input_tokens_seen == "no"


def test_liger_needs_its_package_on_gpus_and_is_off_on_cpus(tmp_path, monkeypatch, caplog):
    assert not PPOConfig(str(tmp_path), use_cpu=True, use_liger_kernel=True).use_liger_kernel
    monkeypatch.setattr(PPOConfig, "device", torch.device("cuda"))
    with pytest.raises(ValueError, match="`use_liger_kernel=True` needs liger-kernel; install it"):
        PPOConfig(str(tmp_path), use_cpu=True, use_liger_kernel=True)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"torch_compile_mode": "default"}, "`torch_compile_mode='default'` is not supported"),
        ({"torch_compile_backend": "eager"}, "`torch_compile_backend='eager'` is not supported"),
        ({"adam_epsilon": 0}, "`adam_epsilon` must be above 0, got 0"),
        (
            {"generation_kwargs": {"max_time": 1.0}},
            "holds `max_time`, which follows from the run or the clock",
        ),
        (
            {"use_vllm": True, "generation_kwargs": {"stop": ["."]}},
            "holds `stop`, .* or samples otherwise",
        ),
    ],
)
def test_fields_that_break_a_run_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(str(tmp_path), use_cpu=True, **settings)


def test_config_adds_at_most_47_fields_to_the_trainer_and_trl():
    own, theirs, trainers = (
        {field.name for field in fields(x)} for x in (PPOConfig, GRPOConfig, TrainingArguments)
    )
    assert len(own - theirs - trainers - NAMES.keys()) <= 47


def test_default_checkpointing_is_silent_and_can_be_turned_off(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert PPOConfig(str(tmp_path), use_cpu=True).gradient_checkpointing is True
        assert (
            PPOConfig(
                str(tmp_path), use_cpu=True, gradient_checkpointing=False
            ).gradient_checkpointing
            is False
        )
        new_name = {"activation_checkpointing": False}
        if "activation_checkpointing" in PPOConfig.__dataclass_fields__:
            assert (
                PPOConfig(str(tmp_path), use_cpu=True, **new_name).gradient_checkpointing is False
            )


def test_unknown_fields_raise_together_with_what_may_be_meant():
    message = (
        r"no field `learnin_rate` \(did you mean `learning_rate`\?\), `max_tokens`; docs/fields.md"
    )
    with pytest.raises(TypeError, match=message):
        PPOConfig("run", use_cpu=True, learnin_rate=1e-5, max_tokens=8)

    class Own(PPOConfig):
        def __init__(self, own, **settings):
            super().__init__("run", use_cpu=True, **settings)
            self.own = own

    assert copy.deepcopy(Own(own=3, seed=1)).seed == 1


@pytest.mark.parametrize(
    "name, remedy",
    [
        (
            "overwrite_output_dir",
            r"`overwrite_output_dir` \(remove it, or set `resume_from_checkpoint` to false",
        ),
        ("evaluation_strategy", r"`evaluation_strategy` \(it is `eval_strategy`\)"),
        ("vllm_device", r"`vllm_device` \(remove it, see `vllm_mode`\)"),
        (
            "torch_dtype",
            r"`torch_dtype` \(it is `dtype` in a config file, and in `model_init_kwargs`\)",
        ),
        ("code_language", "`code_language`; docs"),
    ],
)
def test_field_of_older_versions_raises_with_what_to_do(name, remedy):
    with pytest.raises(TypeError, match=f"no field {remedy}"):
        PPOConfig("run", use_cpu=True, **{name: True})


@pytest.mark.parametrize(
    "sizes, number",
    [
        ((1, 1, 1), 4),
        ((1, 1, 6), 6),
        ((4, 2, 7), 7),
        ((4, 4, 8), 4),
        ((2, 1, 16), 8),
        ((1, 3, 9), 6),
        ((1, 1, 3), 6),  # not fewer than 4
    ],
)
def test_default_of_mini_batches_gives_whole_groups(tmp_path, caplog, monkeypatch, sizes, number):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    args = PPOConfig(str(tmp_path), use_cpu=True, **dict(zip(names, sizes)))
    plan = args.plan(1)
    assert (args.num_mini_batches, plan.prompts * sizes[2]) == (number, plan.completions)
    assert ("`num_mini_batches` is" in caplog.text) == (number != 4)
    # nothing that is set is changed
    with pytest.raises(ValueError, match="does not divide the rollout"):
        PPOConfig(
            str(tmp_path),
            use_cpu=True,
            num_mini_batches=4,
            per_device_train_batch_size=1,
            num_generations=7,
        )


def test_keys_of_generation_kwargs_that_are_fields_set_them():
    kwargs = {
        "do_sample": True,
        "top_k": 5,
        "stop_strings": ["a"],
        "max_new_tokens": 8,
        "typical_p": 0.9,
    }
    args = PPOConfig("run", use_cpu=True, generation_kwargs=kwargs, max_completion_length=8)
    assert (args.top_k, args.stop_strings, args.max_completion_length) == (5, ["a"], 8)
    assert args.generation_kwargs == {"typical_p": 0.9} and replace(args) == args


def test_config_of_a_saved_one_is_equal_and_without_a_line(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    saved = PPOConfig(str(tmp_path), use_cpu=True)
    again = PPOConfig(**saved.to_dict() | {"hub_token": None})  # which is hidden
    assert again == saved and "no effect" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"remove_unused_columns": True},
            "`remove_unused_columns=True` changes nothing: rewards need the columns",
        ),
        (
            {"accelerator_config": {"split_batches": True, "even_batches": False}},
            "change nothing: ranks share a rollout",
        ),
        ({"dataloader_drop_last": True}, "and `dataloader_drop_last` change nothing"),
        ({"vllm_mode": "server"}, "Without `use_vllm=True` these fields have no"),
        (
            {"save_strategy": "best", "metric_for_best_model": "eval_reward"},
            "`save_strategy='best'` saves nothing without evaluations",
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
            "Without `vllm_importance_sampling_correction` these have no effect: "
            "vllm_importance_sampling_mode",
        ),
    ],
    ids=str,
)
def test_setting_of_the_trainer_that_changes_nothing_is_said(
    settings, message, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("trl_ppo_ext"), "propagate", True)
    args = PPOConfig("run", use_cpu=True, max_completion_length=None, **settings)
    assert (
        message in caplog.text
        and not args.remove_unused_columns
        and args.accelerator_config.even_batches
    )
    assert args.max_completion_length == 256


@pytest.mark.parametrize(
    ("settings", "logs"),
    [({}, True), ({"logging_steps": 0.1}, False), ({"logging_strategy": "epoch"}, False)],
    ids=str,
)
def test_first_step_is_logged_by_default_if_logs_count_steps(settings, logs):
    assert PPOConfig("run", use_cpu=True, **settings).logging_first_step is logs


def test_settings_that_are_logged_hold_the_pad_token():
    for token in (None, "<eos>"):
        settings = PPOConfig("run", use_cpu=True, pad_token=token, hub_token="x").to_dict()
        assert (settings["pad_token"], settings["hub_token"]) == (token, "<HUB_TOKEN>")
