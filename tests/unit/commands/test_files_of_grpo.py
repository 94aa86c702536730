"""Config files with the keys of public GRPO runs: every key has its value, or is listed with
what to do."""

import json

import pytest
import yaml

from trl_ppo_ext.commands.launch import load_datasets, model_arguments, parse

COMMON = {
    "model_name_or_path": "me/model",
    "torch_dtype": "bfloat16",
    "dataset_name": "me/rows",
    "learning_rate": 2.0e-5,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 1,
    "warmup_ratio": 0.1,
    "use_cpu": True,
    "bf16": False,
}
# of one GPU and several, with and without vLLM; what is unknown, and a part of what is said of it
FILES = {
    "reasoning": (
        COMMON
        | {
            "num_generations": 7,
            "per_device_train_batch_size": 4,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "use_vllm": True,
            "vllm_gpu_memory_utilization": 0.5,
            "reward_funcs": ["accuracy_reward", "think_format_reward"],
            "reward_weights": [1.0, 0.5],
            "save_strategy": "epoch",
        },
        {
            "vllm_device": "see `vllm_mode`",
            "overwrite_output_dir": "`resume_from_checkpoint`",
            "system_prompt": "`map_function`",
            "wandb_project": "WANDB_PROJECT",
            "num_processes": "accelerate launch",
        },
    ),
    "countdown": (
        COMMON
        | {
            "attn_implementation": "sdpa",
            "beta": 0.001,
            "max_prompt_length": 256,
            "max_steps": 450,
            "num_generations": 8,
            "per_device_train_batch_size": 1,
            "lora_r": 16,
            "load_in_4bit": True,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        },
        {
            "dataset_id_or_path": "`dataset_name`",
            "tokenizer_name_or_path": "remove it",
            "vllm_dtype": "'dtype'",
        },
    ),
    "parts": (
        COMMON
        | {
            "dataset_config": {"data_files": "rows.json"},
            "loss_type": "dr_grpo",
            "epsilon_high": 0.28,
            "mask_truncated_completions": True,
            "num_generations": 6,
            "per_device_train_batch_size": 2,
            "log_completions": True,
            "use_transformers_continuous_batching": True,
        },
        {
            "evaluation_strategy": "`eval_strategy`",
            "code_language": "--help",
            "lerning_rate": "`learning_rate`",
            "dataset_prompt_column": "`map_function`",
        },
    ),
}
SETS = {
    "torch_dtype": ("dtype", "bfloat16"),
    "beta": ("kl_coef", 0.001),
    "loss_type": ("loss_aggregation", "constant"),
    "epsilon_high": ("cliprange_high", 0.28),
    "warmup_ratio": ("warmup_steps", 0.1),
    "use_vllm": ("generation_backend", "vllm"),
    "use_transformers_continuous_batching": ("use_transformers_continuous_batching", None),
}


def read(path, settings):
    path.write_text(yaml.safe_dump(settings))
    return parse("trl-ppo train", ["--config", str(path)], "")


@pytest.mark.parametrize("name", FILES)
def test_file_of_grpo_has_the_value_of_every_key(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    settings = FILES[name][0]
    parsed = read(tmp_path / "run.yaml", settings | {"output_dir": "out"})
    for key, value in settings.items():
        field, expected = SETS.get(key, (key, value))
        [place] = [x for x in parsed if hasattr(x, field)]
        assert getattr(place, field) == expected, key
    _, args, model = parsed
    assert model.dtype == "bfloat16" and args.plan(1).completions % args.num_generations == 0


@pytest.mark.parametrize("name", FILES)
def test_unknown_keys_of_a_file_are_listed_in_one_error(tmp_path, name):
    settings, unknown = FILES[name]
    with pytest.raises(ValueError) as caught:
        read(tmp_path / "run.yaml", settings | dict.fromkeys(unknown, "x"))
    lines = str(caught.value).split("\n- ")
    assert len(lines) == len(unknown)
    for line in lines:
        key = line.split("`")[1]
        assert unknown.pop(key) in line, line


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "float32"}, {"model_init_kwargs": {"torch_dtype": "float32"}}],
    ids=str,
)
def test_two_dtypes_that_differ_raise(tmp_path, settings):
    with pytest.raises(ValueError, match=r"`(torch_)?dtype` is .*(remove|omit) one of the two"):
        script, args, model = read(
            tmp_path / "run.yaml", COMMON | {"output_dir": str(tmp_path)} | settings
        )
        model_arguments(script, args, model)


def test_dataset_config_may_be_arguments_of_load_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps({"prompt": "w1 w2"}) + "\n")
    settings = {
        "dataset_name": "json",
        "dataset_config": {"data_files": {"train": str(tmp_path / "rows.json")}},
    }
    script, _, _ = read(tmp_path / "run.yaml", COMMON | {"output_dir": "out"} | settings)
    assert load_datasets(script)["train"]["prompt"] == ["w1 w2"]
