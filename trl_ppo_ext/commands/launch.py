"""Build a [`PPOTrainer`] from parsed arguments."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoConfig
from trl import ModelConfig, get_dataset, get_peft_config, get_quantization_config
from trl import rewards as trl_rewards

from ..arguments import as_list
from ..config import PPOConfig
from ..data.loading import get_split, load_splits, spread_indices
from ..modeling.loading import hub_kwargs
from ..redaction import sentence
from ..rewards import RewardAdapter, RewardFunc, check_reward_columns
from ..trainer import PPOTrainer
from .arguments import MixtureConfig, PPOModelConfig, PPOScriptArguments
from .arguments import parse as parse

ADAPTER = "adapter:"
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


def find_reward(name: str, argument: str = "reward_funcs") -> RewardFunc:
    """Resolve an entry of `reward_funcs`: an adapter, a function, or a classifier's path or id."""
    if name.startswith(ADAPTER):
        return RewardAdapter(name.removeprefix(ADAPTER))
    if name in TRL_REWARDS:
        return getattr(trl_rewards, name)
    if name == "get_soft_overlong_punishment":  # with the settings of TRL's own GRPO script
        return trl_rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    is_dotted = "." in name and all(part.isidentifier() for part in name.split("."))
    if os.path.isdir(name) or not is_dotted:
        return name
    return _import(name, argument, "name a function, or an object with `name` and `score`")


def _import(name: str, argument: str, remedy: str) -> Any:
    """Import a function by its dotted path."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ValueError(
            f"`{argument}={name!r}` must be a dotted path; name a module and a function in it, such as "
            "my_rows.to_prompt."
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # console scripts do not search it
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and fails to import another one
        raise ValueError(
            f"`{argument}`: {name!r} is a dotted path, but no module {error.name!r} is beside the config file, in the "
            "working directory or on sys.path; start in its folder, or set PYTHONPATH."
        ) from None
    value = getattr(module, attribute, None)
    if not (callable(value) or hasattr(value, "score")):
        kind = "missing" if value is None else f"of the type {type(value).__name__}"
        file = getattr(module, "__file__", module_name)
        raise ValueError(f"`{argument}`: {name!r} is {kind} in {file}; {remedy}.")
    return value


def load_datasets(script_args: PPOScriptArguments, mixture: MixtureConfig | None = None) -> dict[str, Any]:
    """Load the splits of a run, mapped by `map_function`, and `eval_rows` of the test split."""
    splits = dict(_load_named(script_args, mixture or MixtureConfig()))
    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    rows = script_args.eval_rows
    if rows is not None and test in splits and test != train:
        dataset = splits[test]
        is_map_style = isinstance(dataset, Dataset)
        splits[test] = dataset.select(spread_indices(len(dataset), rows)) if is_map_style else dataset.take(rows)
    if script_args.map_function is not None:
        function = _import(script_args.map_function, "map_function", "name a function from a row to its new columns")
        # the main process fills the cache that the others read
        with PartialState().main_process_first():
            splits |= {split: splits[split].map(function) for split in {train, test} & splits.keys()}
    return splits


def _load_named(script_args: PPOScriptArguments, mixture: MixtureConfig) -> Mapping[str, Any]:
    """Load the splits of `datasets` or of `dataset_name`, whichever is set."""
    if mixture.datasets:
        for name in ("dataset_name", "dataset_config", "dataset_streaming"):
            if getattr(script_args, name):
                raise ValueError(f"Both `datasets` and `{name}` are set; leave one of them out.")
        return get_dataset(mixture)
    if mixture.streaming or mixture.test_split_size is not None:
        raise ValueError(
            "`streaming` and `test_split_size` only apply to `datasets`, which is not set; with `dataset_name` use "
            "`dataset_streaming` and `dataset_test_split`."
        )
    if script_args.dataset_name is None:
        raise ValueError("`dataset_name` is not set, so there is no dataset; give an id, a file or a directory.")
    return load_splits(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)


def _model_init_kwargs(args: PPOConfig, model_args: PPOModelConfig) -> dict[str, Any] | None:
    """Merge `model_init_kwargs` with the model arguments."""
    kwargs = dict(cast(dict, args.model_init_kwargs or {}))  # parsed by now, if it came as a string
    revision = None if model_args.model_revision == "main" else model_args.model_revision
    settings = {"revision": revision, "dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    for name, value in settings.items():
        if value is not None and kwargs.setdefault(name, value) != value:
            raise ValueError(
                f"`model_init_kwargs` sets {name}={kwargs[name]!r}, and the model arguments set {value!r}; leave one "
                "of the two out."
            )
    return kwargs or None


def _check_model(name: str | None, args: PPOConfig) -> None:
    """Check that the model has a config, before datasets and rewards are loaded."""
    if name is None:
        raise ValueError("`model_name_or_path` is not set, so there is no model; give an id or a path.")
    if os.path.isfile(os.path.join(name, "adapter_config.json")):
        return  # the trainer's error about adapters says more
    try:
        AutoConfig.from_pretrained(name, **hub_kwargs(args))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`model_name_or_path={name!r}` cannot be loaded: {sentence(error)} Give the id of a causal language "
            "model on the Hub, or the directory of a saved one."
        ) from error


def trainer_arguments(
    script_args: PPOScriptArguments,
    args: PPOConfig,
    model_args: PPOModelConfig,
    splits: Mapping[str, Any],
) -> dict[str, Any]:
    """Keyword arguments of [`PPOTrainer`]; only datasets are loaded."""
    args.model_init_kwargs = _model_init_kwargs(args, model_args)
    _check_model(model_args.model_name_or_path, args)
    if script_args.ignore_bias_buffers:
        raise ValueError("`ignore_bias_buffers` only helps models without adapters; leave it out.")
    # the compute dtype of a quantized base is the run's, unless a dtype is named
    dtype = None if model_args.dtype == "auto" else model_args.dtype
    model_config = cast(ModelConfig, model_args)
    kwargs: dict[str, Any] = {
        "model": model_args.model_name_or_path,
        "args": args,
        "reward_funcs": [find_reward(name) for name in as_list(script_args.reward_funcs)],
        "monitor_funcs": [find_reward(name, "monitor_funcs") for name in as_list(script_args.monitor_funcs)],
        "peft_config": get_peft_config(replace(model_config, use_peft=True)),
        "quantization_config": get_quantization_config(replace(model_config, dtype=dtype)),
        "train_dataset": get_split(splits, script_args.dataset_train_split, "dataset_train_split"),
    }
    columns = getattr(kwargs["train_dataset"], "column_names", None)  # unknown for some streams
    if columns and "prompt" not in columns:
        name = f"dataset_name={script_args.dataset_name!r}" if script_args.dataset_name else "datasets"
        raise ValueError(
            f"`{name}` has no column 'prompt' in the split {script_args.dataset_train_split!r}; it has "
            f"{sorted(columns)}. Set `map_function` to a function that returns one, such as my_rows.to_prompt."
        )
    if args.eval_strategy != "no":
        kwargs["eval_dataset"] = get_split(splits, script_args.dataset_test_split, "dataset_test_split")
    for name in ("train_dataset", "eval_dataset"):
        columns = getattr(kwargs.get(name), "column_names", None)
        if columns:
            check_reward_columns(kwargs["reward_funcs"] + kwargs["monitor_funcs"], columns, f"`{name}`")
    if script_args.ptx_dataset_name is not None:
        supervised = load_splits(script_args.ptx_dataset_name, argument="ptx_dataset_name")
        kwargs["ptx_dataset"] = get_split(supervised, "train", "ptx_dataset_name")
    return kwargs


def build_trainer(
    script_args: PPOScriptArguments,
    args: PPOConfig,
    model_args: PPOModelConfig,
    splits: Mapping[str, Any],
    **overrides: Any,
) -> PPOTrainer:
    """Build the trainer described by the arguments."""
    return PPOTrainer(**trainer_arguments(script_args, args, model_args, splits) | overrides)
