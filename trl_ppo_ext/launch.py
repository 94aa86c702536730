"""From arguments on a command line or in a YAML file to a [`PPOTrainer`]."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from datasets import load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl import rewards as trl_rewards
from yaml import YAMLError

from .arguments import as_list
from .config import PPOConfig
from .field_types import check_types
from .preference_pairs import FILE_FORMATS
from .rewards import RewardAdapter, RewardFunc
from .trainer import PPOTrainer

ADAPTER = "adapter:"
# by name, as TRL's own script for GRPO knows them, with the settings it gives them
TRL_REWARDS = {
    "accuracy_reward": lambda: trl_rewards.accuracy_reward,
    "reasoning_accuracy_reward": lambda: trl_rewards.reasoning_accuracy_reward,
    "think_format_reward": lambda: trl_rewards.think_format_reward,
    "get_soft_overlong_punishment": lambda: trl_rewards.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    ),
}


@dataclass
class PPOScriptArguments(ScriptArguments):
    """Dataset and rewards of a run, besides what TRL's [`~trl.ScriptArguments`] has.

    Args:
        reward_funcs (`list[str]`):
            Rewards, each one of: id or path of a sequence classifier; `adapter:PATH`, a [`RewardAdapter`]; dotted path
            of a function or reward, importable from the working directory or `sys.path`; a name in `trl.rewards`.
        monitor_funcs (`list[str]`, *optional*): Rewards that are only watched, in the same forms.
        ptx_dataset_name (`str`, *optional*): Dataset whose split `"train"` the policy goes on learning from.
    """

    _argument_group_name = "dataset and rewards"

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Rewards, each one of: id or path of a sequence classifier; adapter:PATH of a reward adapter; "
            "dotted path of a function, such as my_rewards.brevity; accuracy_reward, reasoning_accuracy_reward, "
            "think_format_reward or get_soft_overlong_punishment of trl.rewards."
        },
    )
    monitor_funcs: list[str] | None = field(
        default=None, metadata={"help": "Rewards that are scored and logged, never optimised."}
    )
    ptx_dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset whose split 'train' the policy goes on learning from."}
    )

    def __post_init__(self):
        for name in ("reward_funcs", "monitor_funcs"):
            if isinstance(getattr(self, name), str):  # one, from a YAML file
                setattr(self, name, [getattr(self, name)])
        check_types(self)


@dataclass
class PPOModelConfig(ModelConfig):
    """TRL's [`~trl.ModelConfig`] with the defaults of [`PPOTrainer`]: its dtype, and its adapter."""

    _argument_group_name = "model"

    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of the base model. Defaults to that of the run: see bf16 and fp16.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Must stay 0: log-probabilities must repeat."})
    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "LoRA target modules."}
    )

    def __post_init__(self):
        for name in ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        check_types(self)
        super().__post_init__()


@dataclass
class MixtureConfig(DatasetMixtureConfig):
    """TRL's [`~trl.DatasetMixtureConfig`]: several datasets in one, from a YAML file."""

    _argument_group_name = "dataset mixture (in a config file)"

    def __post_init__(self):
        entries = self.datasets if isinstance(self.datasets, list) else [None]
        if not all(isinstance(entry, dict) or is_dataclass(entry) for entry in entries):
            raise ValueError("`datasets` must be a list of mappings, each with a `path`; see TRL's dataset mixtures.")
        check_types(self, leave_out=("datasets",))
        super().__post_init__()


def parse(
    command: str, argv: Sequence[str], description: str, config_class: type[PPOConfig] = PPOConfig
) -> tuple[PPOScriptArguments, PPOConfig, PPOModelConfig, MixtureConfig]:
    """Read arguments from the command line, and from the YAML file that `--config` names.

    Args:
        command (`str`): Sub-command, for help and errors.
        argv (`list[str]`): What stands after it.
        description (`str`): What it does, for help.
        config_class (`type`, *optional*, defaults to [`PPOConfig`]): Class of the run's config.

    Returns:
        `tuple`: Script arguments, config, model arguments and mixture of datasets.

    Raises:
        `ValueError`: If an argument is unknown or a value cannot be used.
    """
    types = (PPOScriptArguments, config_class, PPOModelConfig, MixtureConfig)
    parser = TrlParser(
        types,
        prog=f"trl-ppo {command}",
        usage=f"trl-ppo {command} [--config FILE.yaml] [--ARGUMENT VALUE ...]",
        description=f"{description} Arguments stand in a YAML file that --config names, or on the command line, which "
        "wins.",
        allow_abbrev=False,  # a misspelt name must not pass as the beginning of another
    )
    try:
        *parsed, of_file, of_line = parser.parse_args_and_config(
            argv, return_remaining_strings=True, separate_remaining_strings=True
        )
    except IndexError:
        raise ValueError("--config needs the path of a YAML file after it.") from None
    except YAMLError as error:
        raise ValueError(f"The file that --config names is no YAML: {error}") from None
    except (TypeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"The arguments cannot be read: {error}") from error
    known = [entry.name for type_ in types for entry in fields(type_)]
    _refuse_unknown(of_file[::2], "in the config file", known)
    _refuse_unknown([text for text in of_line if text.startswith("-")] or of_line, "on the command line", known)
    return tuple(parsed)


def _refuse_unknown(given: list[str], where: str, known: list[str]) -> None:
    for text in given:
        name = text.lstrip("-").split("=")[0].replace("-", "_")
        near = get_close_matches(name, known, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else "--help lists those there are."
        raise ValueError(f"There is no argument `{name}`, which stands {where}; {remedy}")


def find_reward(name: str) -> RewardFunc:
    """What an entry of `reward_funcs` on a command line means.

    Args:
        name (`str`): One of the forms that [`PPOScriptArguments`] lists; what exists as a directory is a model.

    Returns:
        `RewardFunc`: What [`PPOTrainer`] takes.

    Raises:
        `ValueError`: If a dotted path leads nowhere.
    """
    if name.startswith(ADAPTER):
        return RewardAdapter(name.removeprefix(ADAPTER))
    if os.path.isdir(name):
        return name
    if name in TRL_REWARDS:
        return TRL_REWARDS[name]()
    *module, _ = parts = name.split(".")
    if not module or not all(part.isidentifier() for part in parts):
        return name  # an id on the Hub
    return _imported(name)


def _imported(name: str) -> Any:
    module_name, _, attribute = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look there by itself
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise ValueError(
            f"The reward {name!r} is read as a dotted path, but there is no module {error.name!r} in the working "
            "directory or on sys.path; start where it lies, or set PYTHONPATH."
        ) from None
    reward = getattr(module, attribute, None)
    if not (callable(reward) or hasattr(reward, "score")):
        found = "nothing" if reward is None else f"a {type(reward).__name__}"
        raise ValueError(
            f"The reward {name!r} is {found} in {getattr(module, '__file__', module_name)}; name a function, or an "
            "object with `name` and `score`."
        )
    return reward


def load_datasets(script_args: ScriptArguments, mixture: DatasetMixtureConfig | None = None) -> Mapping[str, Any]:
    """Load the dataset that the arguments name.

    Args:
        script_args ([`PPOScriptArguments`]):
            `dataset_name` is an id on the Hub, a .json, .jsonl or .parquet file, or a directory, also one that
            `save_to_disk` wrote.
        mixture (`DatasetMixtureConfig`, *optional*): Several datasets in place of one.

    Returns:
        `dict`: Datasets by split.

    Raises:
        `ValueError`: If there is none, or two.
    """
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


def _load(name: str, config: str | None = None, streaming: bool = False) -> Mapping[str, Any]:
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


def build_trainer(
    script_args: PPOScriptArguments,
    args: PPOConfig,
    model_args: ModelConfig,
    dataset: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> PPOTrainer:
    """Build the trainer that the arguments describe.

    Args:
        script_args ([`PPOScriptArguments`]): Dataset and rewards.
        args ([`PPOConfig`]): The run's config; its `model_init_kwargs` take in what the model arguments say.
        model_args ([`~trl.ModelConfig`]):
            The model. Where neither `use_peft` nor a LoRA argument is given, the adapter is the trainer's default.
        dataset (`dict[str, Dataset]`, *optional*): Datasets by split, in place of those that `script_args` names.
        overrides (`dict`): Further arguments of [`PPOTrainer`], which win.

    Returns:
        [`PPOTrainer`]: The trainer, with an evaluation set if `args.eval_strategy` asks for one.

    Raises:
        `ValueError`: If an argument cannot be honoured.
    """
    _check(script_args, model_args)
    args.model_init_kwargs = _model_init_kwargs(args, model_args)
    given = _given(model_args)
    wants_adapter = model_args.use_peft or any(_is_lora(name) for name in given)
    built: dict[str, Any] = {
        "reward_funcs": [find_reward(name) for name in as_list(script_args.reward_funcs)],
        "monitor_funcs": [find_reward(name) for name in as_list(script_args.monitor_funcs)],
        "peft_config": get_peft_config(replace(model_args, use_peft=True)) if wants_adapter else None,
        # its compute dtype: "auto" is none, and the run's own is filled in where the model is loaded
        "quantization_config": get_quantization_config(replace(model_args, dtype=_dtype_of_4bit(given))),
    }
    dataset = load_datasets(script_args) if dataset is None else dataset
    built["train_dataset"] = _split(dataset, script_args.dataset_train_split, "dataset_train_split")
    if args.eval_strategy != "no" and "eval_dataset" not in overrides:
        built["eval_dataset"] = _split(dataset, script_args.dataset_test_split, "dataset_test_split")
    if script_args.ptx_dataset_name is not None:
        built["ptx_dataset"] = _split(_load(script_args.ptx_dataset_name), "train", "ptx_dataset_name")
    return PPOTrainer(model_args.model_name_or_path, args=args, **built | overrides)


def _dtype_of_4bit(given: dict[str, Any]) -> str | None:
    return None if given.get("dtype") == "auto" else given.get("dtype")
