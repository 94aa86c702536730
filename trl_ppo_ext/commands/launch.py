"""From arguments on a command line or in a YAML file to a [`PPOTrainer`]."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from accelerate import PartialState
from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from transformers import AutoConfig
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl import rewards as trl_rewards

from ..arguments import as_list
from ..config import PPOConfig
from ..data.preference_pairs import FILE_FORMATS
from ..modeling.loading import hub_kwargs
from ..redaction import sentence
from ..rewards import RewardAdapter, RewardFunc, check_reward_columns
from ..trainer import PPOTrainer
from .arguments import MixtureConfig, PPOModelConfig, PPOScriptArguments, parse

__all__ = [
    "MixtureConfig",
    "PPOModelConfig",
    "PPOScriptArguments",
    "build_trainer",
    "find_reward",
    "load_datasets",
    "parse",
    "trainer_arguments",
]
ADAPTER = "adapter:"
PATHS = ("/", "./", "../")  # how a path begins, and no id on the Hub
FILE_SUFFIXES = (*FILE_FORMATS, ".csv", ".txt")
NAME_A_DATASET = (
    "Name a dataset on the Hub (with `dataset_config`, if it has several), a .json, .jsonl or .parquet file, or a "
    "directory."
)
# by name, as TRL's own script for GRPO knows them, with the settings it gives them
TRL_REWARDS = {
    "accuracy_reward": lambda: trl_rewards.accuracy_reward,
    "reasoning_accuracy_reward": lambda: trl_rewards.reasoning_accuracy_reward,
    "think_format_reward": lambda: trl_rewards.think_format_reward,
    "get_soft_overlong_punishment": lambda: trl_rewards.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    ),
}


def find_reward(name: str, argument: str = "reward_funcs") -> RewardFunc:
    """What an entry of `reward_funcs` on a command line means."""
    if name.startswith(ADAPTER):
        return RewardAdapter(name.removeprefix(ADAPTER))
    if os.path.isdir(name):
        return name
    if name in TRL_REWARDS:
        return TRL_REWARDS[name]()
    *module, _ = parts = name.split(".")
    if not module or not all(part.isidentifier() for part in parts):
        return name  # an id on the Hub
    reward = _imported(name, argument)
    if not (callable(reward) or hasattr(reward, "score")):
        raise ValueError(
            f"`{argument}`: {_found(name, reward)}; name a function, or an object with `name` and `score`."
        )
    return reward


def _imported(name: str, argument: str) -> Any:
    """What a dotted path leads to; nothing if the module has no such name."""
    module_name, _, attribute = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look there by itself
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise ValueError(
            f"`{argument}`: {name!r} is read as a dotted path, but there is no module {error.name!r} beside the "
            "config file, in the working directory or on sys.path; start where it lies, or set PYTHONPATH."
        ) from None
    return getattr(module, attribute, None)


def _found(name: str, found: Any) -> str:
    module = sys.modules[name.rpartition(".")[0]]
    kind = "nothing" if found is None else f"a {type(found).__name__}"
    return f"{name!r} is {kind} in {getattr(module, '__file__', module.__name__)}"


def _find_map(name: str) -> Callable[[dict], dict]:
    if "." not in name:
        raise ValueError(
            f"`map_function={name!r}` is no dotted path; name a module and a function in it, such as "
            "my_rows.to_prompt."
        )
    function = _imported(name, "map_function")
    if not callable(function):
        raise ValueError(
            f"`map_function`: {_found(name, function)}; name a function from a row to what is added to it."
        )
    return function


def load_datasets(script_args: ScriptArguments, mixture: DatasetMixtureConfig | None = None) -> Mapping[str, Any]:
    """Load the dataset that the arguments name."""
    return _prepared(_load_all(script_args, mixture), script_args)


def _load_all(script_args: ScriptArguments, mixture: DatasetMixtureConfig | None) -> Mapping[str, Any]:
    if mixture is not None and mixture.datasets:
        for name in ("dataset_name", "dataset_config", "dataset_streaming"):
            if getattr(script_args, name):
                raise ValueError(f"Both `datasets` and `{name}` are given; leave one of them out.")
        return get_dataset(mixture)
    if mixture is not None and (mixture.streaming or mixture.test_split_size is not None):
        raise ValueError(
            "`streaming` and `test_split_size` are about `datasets`, of which there are none; with `dataset_name` it "
            "is `dataset_streaming` and `dataset_test_split`."
        )
    if script_args.dataset_name is None:
        raise ValueError("There is no dataset; give `dataset_name` (an id, a file or a directory), or `datasets`.")
    return _load(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)


def _prepared(loaded: Mapping[str, Any], script_args: ScriptArguments) -> Mapping[str, Any]:
    """Of the splits that are used, the rows that are used, as they are used."""
    name, rows = (getattr(script_args, field, None) for field in ("map_function", "eval_rows"))
    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    if name is None and rows is None:
        return loaded
    prepared = dict(loaded)
    if rows is not None and test in prepared and test != train:
        prepared[test] = _spread(prepared[test], rows)
    if name is not None:
        function = _find_map(name)
        # one process fills the cache that the others then read
        with PartialState().main_process_first():
            prepared |= {split: prepared[split].map(function) for split in {train, test} & prepared.keys()}
    return prepared


def _spread(dataset: Any, rows: int) -> Any:
    """Rows from all over a dataset, which may be sorted; of a stream, the first."""
    if not isinstance(dataset, Dataset):
        return dataset.take(rows)
    rows = min(rows, len(dataset))
    return dataset.select([index * len(dataset) // rows for index in range(rows)])


def _load(
    name: str, config: str | None = None, streaming: bool = False, argument: str = "dataset_name"
) -> Mapping[str, Any]:
    if _is_a_missing_file(name):
        raise ValueError(
            f"`{argument}={name!r}` does not exist; the working directory is {os.getcwd()}. {NAME_A_DATASET}"
        )
    path = Path(name)
    saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    if (saved or path.is_file()) and config is not None:
        raise ValueError(f"`dataset_config={config!r}` picks a part of a dataset on the Hub; leave it out for {name}.")
    if saved:
        if streaming:
            raise ValueError(f"{name} was written by `save_to_disk`, which is not streamed; leave it out.")
        loaded = load_from_disk(name)
        return loaded if isinstance(loaded, Mapping) else {"train": loaded}
    if path.is_file() and path.suffix not in FILE_FORMATS:
        raise ValueError(f"{name} is none of the files that can be read: {', '.join(FILE_FORMATS)}.")
    try:
        if path.is_file():
            return load_dataset(FILE_FORMATS[path.suffix], data_files=name, streaming=streaming)
        return load_dataset(name, name=config, streaming=streaming)
    except DatasetGenerationError as error:
        raise ValueError(f"{name} cannot be read: {error.__cause__ or error}") from error
    except (OSError, ValueError) as error:  # it is not there, cannot be reached, or has several configs
        raise ValueError(f"`{argument}={name!r}` cannot be loaded: {sentence(error)} {NAME_A_DATASET}") from error


def _is_a_missing_file(name: str) -> bool:
    """Whether it can only be a path, at which there is nothing: the Hub need not be asked."""
    looks_like_one = name.startswith(PATHS) or Path(name).suffix in FILE_SUFFIXES
    return looks_like_one and not os.path.exists(name)


def _split(dataset: Mapping[str, Any], split: str, argument: str) -> Any:
    if split not in dataset:
        raise ValueError(f"The dataset has no split {split!r}; set `{argument}` to one of {sorted(dataset)}.")
    return dataset[split]


def _given(model_args: ModelConfig) -> dict[str, Any]:
    """Fields that are not at their default."""
    default = type(model_args)()
    values = {entry.name: getattr(model_args, entry.name) for entry in fields(model_args)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _is_lora(name: str) -> bool:
    return name.startswith("lora_") or name in ("use_rslora", "use_dora")


def _check(script_args: ScriptArguments, model_args: ModelConfig) -> None:
    """Refuse what could not be honoured."""
    given = _given(model_args)
    if model_args.model_name_or_path is None:
        raise ValueError("There is no model; give `model_name_or_path`.")
    if script_args.ignore_bias_buffers:
        raise ValueError("`ignore_bias_buffers` is a remedy for models without adapters; leave it out.")
    if given.get("lora_dropout"):
        raise ValueError(
            f"`lora_dropout={model_args.lora_dropout}` is not supported: old and new log-probabilities must come from "
            "the same forward. Leave it out."
        )
    if "lora_task_type" in given:
        raise ValueError(f"`lora_task_type` must be 'CAUSAL_LM' for a policy, got {model_args.lora_task_type!r}.")
    for name in given.keys() & {"bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant"}:
        if not model_args.load_in_4bit:
            raise ValueError(f"`{name}` says how to quantise to 4 bits; set `load_in_4bit` too, or leave it out.")


def _check_model(model_args: ModelConfig, args: PPOConfig) -> None:
    """Refuse what is no model before datasets and rewards are loaded."""
    name = str(model_args.model_name_or_path)
    if os.path.isfile(os.path.join(name, "adapter_config.json")):
        return  # an adapter, about which the trainer knows more to say
    try:
        AutoConfig.from_pretrained(name, **hub_kwargs(args))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`model_name_or_path={name!r}` cannot be loaded: {sentence(error)} Give the id of a causal language "
            "model on the Hub, or the directory of a saved one."
        ) from error


def _check_prompts(dataset: Any, script_args: ScriptArguments) -> None:
    columns = getattr(dataset, "column_names", None)
    if columns and "prompt" not in columns:
        name = f"dataset_name={script_args.dataset_name!r}" if script_args.dataset_name else "datasets"
        raise ValueError(
            f"`{name}` has no column 'prompt' in the split {script_args.dataset_train_split!r}; it has "
            f"{sorted(columns)}. Set `map_function` to a function that makes one of a row, such as my_rows.to_prompt."
        )


def _check_columns(built: dict[str, Any]) -> None:
    """Refuse functions that the dataset's columns do not suit; those of a stream may not be known."""
    rewards = built["reward_funcs"] + built["monitor_funcs"]
    for name in ("train_dataset", "eval_dataset"):
        columns = getattr(built.get(name), "column_names", None)
        if columns:
            check_reward_columns(rewards, columns, f"`{name}`")


def _model_init_kwargs(args: PPOConfig, model_args: ModelConfig) -> dict[str, Any] | None:
    """What `args.model_init_kwargs` and the model arguments say together."""
    names = {"model_revision": "revision", "dtype": "dtype", "attn_implementation": "attn_implementation"}
    given = {names[name]: value for name, value in _given(model_args).items() if name in names}
    own = cast(dict, args.model_init_kwargs or {})  # parsed by now, if it came as a string
    for name in given.keys() & own.keys():
        if given[name] != own[name]:
            raise ValueError(
                f"`model_init_kwargs` says {name}={own[name]!r}, and the model arguments say {given[name]!r}; leave "
                "one of the two out."
            )
    return own | given or None


def trainer_arguments(
    script_args: PPOScriptArguments,
    args: PPOConfig,
    model_args: ModelConfig,
    dataset: Mapping[str, Any] | None = None,
    needs_eval: bool = True,
) -> dict[str, Any]:
    """What [`PPOTrainer`] is built with; nothing but the datasets is loaded."""
    _check(script_args, model_args)
    args.model_init_kwargs = _model_init_kwargs(args, model_args)
    _check_model(model_args, args)
    given = _given(model_args)
    wants_adapter = model_args.use_peft or any(_is_lora(name) for name in given)
    built: dict[str, Any] = {
        name: [find_reward(reward, name) for reward in as_list(getattr(script_args, name))]
        for name in ("reward_funcs", "monitor_funcs")
    }
    built |= {
        "peft_config": get_peft_config(replace(model_args, use_peft=True)) if wants_adapter else None,
        # its compute dtype: "auto" is none, and the run's own is filled in where the model is loaded
        "quantization_config": get_quantization_config(replace(model_args, dtype=_dtype_of_4bit(given))),
    }
    dataset = load_datasets(script_args) if dataset is None else dataset
    built["train_dataset"] = _split(dataset, script_args.dataset_train_split, "dataset_train_split")
    _check_prompts(built["train_dataset"], script_args)
    if args.eval_strategy != "no" and needs_eval:
        built["eval_dataset"] = _split(dataset, script_args.dataset_test_split, "dataset_test_split")
    _check_columns(built)
    if script_args.ptx_dataset_name is not None:
        supervised = _load(script_args.ptx_dataset_name, argument="ptx_dataset_name")
        built["ptx_dataset"] = _split(supervised, "train", "ptx_dataset_name")
    return built


def build_trainer(
    script_args: PPOScriptArguments,
    args: PPOConfig,
    model_args: ModelConfig,
    dataset: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> PPOTrainer:
    """Build the trainer that the arguments describe."""
    built = trainer_arguments(script_args, args, model_args, dataset, needs_eval="eval_dataset" not in overrides)
    return PPOTrainer(model_args.model_name_or_path, args=args, **built | overrides)


def _dtype_of_4bit(given: dict[str, Any]) -> str | None:
    return None if given.get("dtype") == "auto" else given.get("dtype")
