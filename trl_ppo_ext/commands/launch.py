"""From a command line and a YAML file, read by TRL's parser, to a [`PPOTrainer`]."""

import argparse
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from typing import Any, cast

import trl
import trl.rewards
import yaml
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from ..config import PPOConfig, check_types
from ..data import get_split, load_splits, spread_rows
from ..modeling.loading import hub_kwargs, load_config
from ..redaction import shortened, shown
from ..rewards import RewardAdapter, RewardFunc
from ..trainer import PPOTrainer
from ..trl_names import NAMES, TABLES, merged, remedy_of

logger = logging.get_logger(__name__)

ADAPTER = "adapter:"
TRL_REWARDS = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
)
INHERITED = [
    entry.name for entry in fields(TrainingArguments) if entry.name not in PPOConfig.__annotations__
]


def _check(options: Any, *lists: str) -> None:
    """Wrap single values from a YAML file in lists, and check the types of all values."""
    for name in lists:
        if isinstance(getattr(options, name), str):
            setattr(options, name, [getattr(options, name)])
    check_types(options)


@dataclass
class PPOScriptArguments(trl.ScriptArguments):
    """TRL's [`~trl.ScriptArguments`], with the rewards of a run."""

    _argument_group_name = "dataset and rewards"

    dataset_config: dict[str, Any] | str | None = HfArg(
        default=None,
        help=(
            "Name of a part of the dataset, or in a file a mapping of arguments of `load_dataset`."
        ),
    )
    map_function: str | None = HfArg(
        default=None, help="Dotted path of a function from a row to its new columns."
    )
    eval_rows: int | None = HfArg(
        default=None,
        help="Evaluated rows, spread over the test split; the first of a stream. Default: all.",
    )
    reward_funcs: list[str] | None = HfArg(
        default=None,
        help=(
            "Rewards, each one of: id or path of a sequence classifier; adapter:PATH of a reward "
            "adapter; dotted path of a function, such as my_rewards.brevity; of trl.rewards "
            f"{', '.join(TRL_REWARDS)}."
        ),
    )
    monitor_funcs: list[str] | None = HfArg(
        default=None, help="Rewards that are logged, but not optimized."
    )
    tools: list[str] | None = HfArg(
        default=None, help="Dotted paths of functions that the policy may call."
    )
    environment_factory: str | None = HfArg(
        default=None, help="Dotted path of the class of an environment, such as my_game.Wordle."
    )
    # of the config file, with functions beside it
    directory: str | None = field(default=None, init=False)

    def __post_init__(self):
        _check(self, "reward_funcs", "monitor_funcs", "tools")
        if self.eval_rows is not None and self.eval_rows < 1:
            raise ValueError(
                f"`eval_rows` must be at least 1, got {self.eval_rows}; omit it for all rows."
            )


@dataclass
class PPOModelConfig(trl.ModelConfig):
    """TRL's [`~trl.ModelConfig`] with the defaults and limits of [`PPOTrainer`]."""

    _argument_group_name = "model"

    dtype: str | None = HfArg(
        default=None,
        help="Dtype of the base model. Defaults to that of the run, see bf16 and fp16.",
        metadata={"choices": ["auto", "bfloat16", "float16", "float32"]},
    )
    use_peft: bool = HfArg(
        default=True, help="Must be true: the policy is an adapter on a frozen base."
    )
    adapter_name_or_path: str | None = HfArg(
        default=None,
        help=(
            "Saved adapter on the model that starts the policy, e.g. of SFT. Default: a new "
            "adapter."
        ),
    )
    lora_dropout: float = HfArg(default=0.0, help="Is set to 0: log-probs must be repeatable.")
    lora_target_modules: list[str] | None = HfArg(
        default_factory=lambda: ["all-linear"], help="LoRA target modules."
    )

    def __post_init__(self):
        _check(self, "lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
        defaults = {
            x.name: x.default_factory() if callable(x.default_factory) else x.default
            for x in fields(self)
        }
        for name in (name for name, default in defaults.items() if getattr(self, name) != default):
            given = f"`{name}={getattr(self, name)!r}`"
            if name in ("use_peft", "lora_task_type"):
                raise ValueError(
                    f"{given} is invalid: the policy is an adapter on a causal language model; "
                    "omit it."
                )
            if self.adapter_name_or_path is not None and name.startswith(
                ("lora_", "use_rslora", "use_dora")
            ):
                raise ValueError(
                    f"{given} configures a new adapter, but `adapter_name_or_path` loads one; "
                    "remove one of the two."
                )
            if name.startswith(("bnb_4bit", "use_bnb")) and not self.load_in_4bit:
                raise ValueError(
                    f"{given} only applies to 4 bits; set `load_in_4bit` too, or omit it."
                )
        super().__post_init__()
        # TRL unpacks a single entry, which PEFT would match with the whole path of a module
        target = self.lora_target_modules
        if isinstance(target, str) and re.fullmatch(r"[\w.]+", target):
            self.lora_target_modules = [target]


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help of the fields that are not inherited, in a sentence each."""

    def add_argument(self, action: argparse.Action) -> None:
        is_shown_elsewhere = action.dest in set(INHERITED) | set(NAMES)
        first_option = next(iter(action.option_strings), "")
        if not is_shown_elsewhere and not first_option.startswith("--no_"):
            short = copy(action)
            if action.choices:
                choices = " One of %(choices)s."
            else:
                choices = ""
            short.option_strings = action.option_strings[:1]
            short.nargs = 0  # which prints no values
            short.help = re.split(r"(?<=\.) (?=[A-Z`])", action.help or "")[0] + choices
            short.default = argparse.SUPPRESS if action.default is None else action.default
            super().add_argument(short)


def parse(
    program: str,
    argv: Sequence[str],
    description: str,
    config_class: type[PPOConfig] = PPOConfig,
    script_class: type[PPOScriptArguments] = PPOScriptArguments,
) -> tuple[PPOScriptArguments, PPOConfig, PPOModelConfig]:
    """Read arguments from the command line, and from a YAML file: the first argument, or that of
    `--config`."""
    types = (PPOModelConfig, script_class, config_class)
    argv = _renamed_options(argv)
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", nargs="?", const="", action="append", default=[])
    if argv and not argv[0].startswith("-"):
        argv = ["--config"] + argv
    named, argv = files.parse_known_args(argv)
    if len(named.config) > 1:
        raise ValueError(
            f"There can be one config file, got {' and '.join(map(repr, named.config))}; write all "
            "into one, or pass arguments of the command line."
        )
    file = next(iter(named.config), None)
    parser = trl.TrlParser(
        types,
        prog=program,
        usage=f"{program} [[--config] FILE.yaml] [--ARGUMENT VALUE ...]",
        description=f"{description} The command line wins over the YAML file.",
        epilog=f"Also fields of TRL's configs, and of TrainingArguments: {', '.join(INHERITED)}.",
        formatter_class=partial(_Help, max_help_position=32),
        allow_abbrev=False,  # a misspelt name must not pass as the beginning of another
        exit_on_error=False,
    )
    try:
        written = {} if file is None else _read_config(file)
        in_file = parser.set_defaults_with_config(**written)
        namespace, in_line = parser.parse_known_args(argv)
        unset = argparse.Namespace(**dict.fromkeys(vars(namespace)))
        typed, _ = parser.parse_known_args(argv, unset)
        names = [text for text in in_line if text.startswith("--")] or in_line[:1]
        problems = []
        for place, unknown in (
            ("in the config file", in_file[::2]),
            ("on the command line", names),
        ):
            for name in (text.partition("=")[0].lstrip("-").replace("-", "_") for text in unknown):
                remedy = remedy_of(name, [entry.name for type_ in types for entry in fields(type_)])
                problems.append(
                    f"Unknown argument `{name}` {place}; {remedy or '--help lists the arguments.'}"
                )
        if problems:
            raise ValueError("\n- ".join(problems))
        # without defaults: what is given beside a name of TRL must not differ from it
        line = {name: value for name, value in vars(typed).items() if value is not None}
        settings = merged(written, line)
        given = settings.keys() | _required_names(types)
        values = {name: value for name, value in vars(namespace).items() if name in given}
        values |= {name: x for name, x in settings.items() if isinstance(x, dict)}
        model, script, args = cast(tuple, parser.parse_dict(values, allow_extra_keys=True))
    except (
        argparse.ArgumentError,
        yaml.YAMLError,
        TypeError,
        UnicodeError,
        RecursionError,
    ) as error:
        raise ValueError(f"The arguments cannot be read: {shortened(error)}") from error
    script.directory = file and os.path.dirname(os.path.abspath(file))
    return script, args, model


def _required_names(types: Sequence[Any]) -> set[str]:
    """Fields without a default."""
    return {
        entry.name
        for type_ in types
        for entry in fields(type_)
        if entry.default is MISSING and entry.default_factory is MISSING
    }


def _renamed_options(argv: Sequence[str]) -> list[str]:
    """Arguments of the command line under today's names."""
    renamed = []
    for text in argv:
        name, equals, value = text.partition("=")
        if name.startswith("--"):
            new = TABLES["renamed"].get(name.removeprefix("--").replace("-", "_"))
        else:
            new = None
        renamed.append(f"--{new}{equals}{value}" if new else text)
    return renamed


def _renamed_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Keys under today's names."""
    for old, new in TABLES["renamed"].items():
        if old in config and new in config:
            raise ValueError(f"`{old}` is `{new}` today, and both are set; remove one of the two.")
        if old in config:
            logger.warning("`%s` is `%s` today, and sets it.", old, new)
            config[new] = config.pop(old)
    return config


def _read_config(path: str) -> dict[str, Any]:
    """Read a config file, check its keys, and set the environment variables that it holds."""
    if not os.path.isfile(path):
        raise ValueError(
            f"`--config` must be a YAML file, got {path!r}; the working directory is "
            f"{os.getcwd()}. A model is named by `--model_name_or_path`."
        )
    with open(path, encoding="utf-8") as file:
        text = file.read()
    config = yaml.safe_load(text)
    nodes = [yaml.compose(text, yaml.SafeLoader)]
    if not isinstance(config, dict):
        raise ValueError(f"`--config` must contain a YAML mapping, got {path!r}.")
    for node in nodes:  # at any depth; of a repeated key, YAML keeps the last
        names = set[str]()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in names:
                raise ValueError(
                    f"`{key.value}` appears twice in the config file, in line "
                    f"{key.start_mark.line + 1}."
                )
            names.add(key.value)
            nodes += value.value if isinstance(value, yaml.SequenceNode) else [value]
    variables = config.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ValueError(
            f"`env` must be a mapping of environment variables, got {shown('env', variables)}."
        )
    for name in variables:
        if re.fullmatch(r"(?i)(http|https|all)_proxy", str(name)):
            raise ValueError(
                f"`env` of a config file must not set `{name}`, through which keys could pass; "
                "export it in the shell, if the proxy may read keys and prompts."
            )
    if variables and os.environ.get("RANK", "0") == "0":
        listed = shortened(", ".join(map(str, variables)))
        print(f"The config file sets these environment variables: {listed}", file=sys.stderr)
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return _renamed_keys(config)


def find_reward(
    name: str,
    argument: str = "reward_funcs",
    directory: str | None = None,
    max_completion_length: int = 256,
) -> RewardFunc:
    """Resolve an entry of `reward_funcs`: an adapter, a function, or a classifier's path or id."""
    if name.startswith(ADAPTER):
        return RewardAdapter(name.removeprefix(ADAPTER))
    if name == "get_soft_overlong_punishment":  # of the last fifth, as in DAPO
        return trl.rewards.get_soft_overlong_punishment(
            max_completion_length, max_completion_length // 5
        )
    if name in TRL_REWARDS:
        return getattr(trl.rewards, name)
    is_dotted = "." in name and all(part.isidentifier() for part in name.split("."))
    if is_dotted and not os.path.isdir(name):
        return _import(name, argument, directory)
    return name


def _import(name: str, argument: str, directory: str | None) -> Any:
    """Import a function by its dotted path, also from the working directory or from that of the
    config file."""
    module_name, _, attribute = name.rpartition(".")
    # Only during this import: an `apex.py` there must not stand for a package that transformers
    # looks for later.
    places = [place for place in (directory, os.getcwd()) if place and place not in sys.path]
    sys.path += places
    try:
        module = import_module(module_name or name)
    except ModuleNotFoundError as error:
        if not f"{module_name or name}.".startswith(f"{error.name}."):
            raise  # the module exists, and fails to import another one
        raise ValueError(
            f"`{argument}` must be a dotted path, got {name!r}, but no module {error.name!r} is on "
            "sys.path; name a module and a function in it, or set PYTHONPATH."
        ) from None
    finally:
        sys.path[:] = [place for place in sys.path if place not in places]
    value = getattr(module, attribute, None)
    if not (callable(value) or hasattr(value, "score")):
        kind = "missing" if value is None else f"of the type {type(value).__name__}"
        raise ValueError(
            f"`{argument}`: {name!r} is {kind} in {module.__file__ or module_name}; name a "
            "function or, for rewards, an object with `name` and `score`."
        )
    return value


def load_datasets(script: PPOScriptArguments) -> dict[str, Any]:
    """Load the splits of `dataset_name`, mapped by `map_function`, with `eval_rows` test rows."""
    train = script.dataset_train_split
    test = script.dataset_test_split
    if script.dataset_name is None:
        if script.environment_factory and script.map_function is None and script.eval_rows is None:
            return {}  # it may write the prompts
        raise ValueError(
            "`dataset_name` is not set, so there is no dataset; give an id, a file or a directory."
        )
    if script.eval_rows is not None and test == train:
        raise ValueError(
            f"`eval_rows` needs a `dataset_test_split` other than the training split {test!r}."
        )
    splits = dict(load_splits(script.dataset_name, script.dataset_config, script.dataset_streaming))
    if script.eval_rows is not None and test in splits:
        splits[test] = spread_rows(splits[test], script.eval_rows)
    if script.map_function is not None:
        function: Any = _import(script.map_function, "map_function", script.directory)
        # that of a wrapped function may be another
        module = sys.modules[script.map_function.rpartition(".")[0] or script.map_function]

        # `datasets` identifies an imported function by its name: with the source, edited ones miss
        # its cache
        def mapped(row: dict, source: str = inspect.getsource(module)) -> dict:
            return function(row)

        # the main process fills the cache that the others read
        with PartialState().main_process_first():
            splits |= {split: splits[split].map(mapped) for split in {train, test} & splits.keys()}
    return splits


def model_arguments(
    script: PPOScriptArguments, args: PPOConfig, model: PPOModelConfig
) -> dict[str, Any]:
    """Keyword arguments of [`PPOTrainer`] and [`estimate_memory`]: models, adapter and rewards."""
    name = model.model_name_or_path
    config = cast(trl.ModelConfig, model)
    if name is None:
        raise ValueError(
            "`model_name_or_path` is not set, so there is no model; give an id or a path."
        )
    if script.ignore_bias_buffers:
        raise ValueError("`ignore_bias_buffers` only helps models without adapters; omit it.")
    options = _renamed_keys(dict(cast(dict, args.model_init_kwargs) or {}))
    if model.model_revision == "main":
        revision = None
    else:
        revision = model.model_revision
    settings = {
        "revision": revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    for key, value in settings.items():
        if value is not None and options.setdefault(key, value) != value:
            raise ValueError(
                f"`{key}` is {value!r}, and {options[key]!r} in `model_init_kwargs`; omit one of "
                "the two."
            )
    args.model_init_kwargs = options or None
    load_config("model_name_or_path", name, hub_kwargs(args))  # for its error
    # the compute dtype of a quantized base is the run's, unless a dtype is named
    quantized = replace(config, dtype=None if model.dtype == "auto" else model.dtype)
    find = partial(
        find_reward, directory=script.directory, max_completion_length=args.max_completion_length
    )
    return {
        "model": name,
        "args": args,
        "reward_funcs": [find(name, "reward_funcs") for name in script.reward_funcs or []],
        "monitor_funcs": [find(name, "monitor_funcs") for name in script.monitor_funcs or []],
        "peft_config": model.adapter_name_or_path or trl.get_peft_config(config),
        "quantization_config": trl.get_quantization_config(quantized),
    }


def trainer_arguments(
    script: PPOScriptArguments, args: PPOConfig, model: PPOModelConfig, splits: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of [`PPOTrainer`]; only datasets are loaded."""
    kwargs = model_arguments(script, args, model)
    factory = script.environment_factory
    directory = script.directory
    kwargs["tools"] = [_import(name, "tools", directory) for name in script.tools or []]
    kwargs["environment_factory"] = factory and _import(factory, "environment_factory", directory)
    if args.max_steps <= 0 and (script.dataset_streaming or not splits):
        raise ValueError(
            "`max_steps` must be set without `dataset_name` or with `dataset_streaming`; give a "
            "number."
        )
    if splits:
        kwargs["train_dataset"] = get_split(
            splits, script.dataset_train_split, "dataset_train_split"
        )
    elif args.evaluates:
        raise ValueError(
            "Without `dataset_name` nothing can be evaluated; give a dataset, or omit "
            "`eval_strategy` and `eval_on_start`."
        )
    test = script.dataset_test_split
    if args.evaluates:
        kwargs["eval_dataset"] = get_split(splits, test, "dataset_test_split")
    elif script.eval_rows is not None or test != PPOScriptArguments.dataset_test_split:
        logger.warning(
            "The split %r is not evaluated, because `eval_strategy` is 'no'; set it to 'steps', or "
            "set `eval_on_start`.",
            test,
        )
    return kwargs


def build_trainer(*settings: Any, **overrides: Any) -> PPOTrainer:
    """Build the trainer described by the arguments of [`trainer_arguments`]."""
    return PPOTrainer(**trainer_arguments(*settings) | overrides)
