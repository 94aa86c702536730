"""Arguments of a run, from a command line and a YAML file, in TRL's forms."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NoReturn

from transformers import TrainingArguments
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
from yaml import YAMLError

from ..config import PPOConfig, check_types
from ..redaction import is_secret, shortened

# titles of the groups of help, by the first of PPOConfig's own fields in each
_GROUPS = {
    "model_init_kwargs": "loading",
    "shuffle_dataset": "prompts and sampling",
    "reward_weights": "rewards: weights, failures, shaping",
    "num_ppo_epochs": "PPO",
    "ptx_coef": "beside PPO: supervised loss, one-pass scoring, averaged weights",
    "offload_rollout": "memory",
    "max_skipped_steps": "guards of a run",
    "log_completions": "completions on the terminal",
}
_TRAINER = "fields of transformers.TrainingArguments"
_COMMAND = "of this command"
# how argparse refuses text that is no number
_INVALID = re.compile(r"argument --(\w+)\S*: invalid (int|float) value: (.*)", re.DOTALL)
_KINDS = {"int": "a whole number", "float": "a number"}
_FOLLOWS = (
    "leave it out: it follows from `per_device_train_batch_size`, `gradient_accumulation_steps`, `num_mini_batches` "
    "and the processes"
)
# fields of the PPOConfig that TRL had until 1.12, and what they have become
REMOVED_FIELDS = {
    "total_episodes": (
        "set `num_train_epochs`, or `max_steps` to episodes / completions of a rollout × `num_ppo_epochs` × "
        "`num_mini_batches`"
    ),
    "num_total_batches": "leave it out: it follows from `max_steps`",
    "response_length": "it is called `max_completion_length` now",
    "stop_token": "leave it out: EOS always ends a completion",
    "stop_token_id": "leave it out: it is `eos_token_id` of the model's generation config",
    "sft_model_path": "it is `model_name_or_path`",
    "reward_model_path": "name it in `reward_funcs`",
    "model_adapter_name": "leave it out: in Python, the active adapter of a `PeftModel` starts the policy",
    "ref_adapter_name": "leave it out: the reference is the policy as it starts",
    "local_rollout_forward_batch_size": (
        "set `per_device_generation_batch_size` for sampling, and `per_device_reward_batch_size` for scoring"
    ),
    "num_sample_generations": "set `log_completions`, and `num_completions_to_print`",
    "batch_size": "set `generation_batch_size`, the completions of a rollout over all processes",
    **dict.fromkeys(("local_batch_size", "micro_batch_size", "mini_batch_size", "local_mini_batch_size"), _FOLLOWS),
    "world_size": "leave it out: it follows from the launch",
    "dataset_num_proc": "leave it out: prompts are tokenised in one process",
    "ds3_gather_for_generation": "leave it out: under ZeRO-3 each layer is gathered when it is used",
}


@dataclass
class PPOScriptArguments(ScriptArguments):
    """Dataset and rewards of a run, besides what TRL's [`~trl.ScriptArguments`] has."""

    _argument_group_name = "dataset and rewards"

    map_function: str | None = field(
        default=None,
        metadata={
            "help": "Dotted path of a function from a row to what is added to it, for datasets without a column "
            "'prompt'; importable from the config file's folder, the working directory or sys.path."
        },
    )
    eval_rows: int | None = field(
        default=None, metadata={"help": "Rows of the test split that are used, spread evenly. Default: all."}
    )
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
        if self.eval_rows is not None and self.eval_rows < 1:
            raise ValueError(f"`eval_rows` must be at least 1, got {self.eval_rows}; leave it out for all rows.")


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
        check_types(self, skip=("datasets",))
        super().__post_init__()


@cache
def _title(name: str) -> str:
    """Group of help that a field of a run's config stands in."""
    of_trainer = {entry.name for entry in fields(TrainingArguments)}
    title = _COMMAND
    for entry in fields(PPOConfig):
        if entry.name not in of_trainer:
            title = _GROUPS.get(entry.name, title)
            if entry.name == name:
                return title
    return _TRAINER if name in of_trainer else _COMMAND


class GroupedParser(TrlParser):
    """[`~trl.TrlParser`] whose help shows a run's config in groups, unless its class names one for all of it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong as all other errors of a config do."""
        found = _INVALID.match(message)
        if found:
            name, kind, value = found.groups()
            raise ValueError(f"`{name}` must be {_KINDS[kind]}, got {value}.")
        raise ValueError(f"{message}; --help says what each argument takes.")

    def _parse_dataclass_field(self, parser: argparse._ActionsContainer, field: Field) -> None:
        if parser is self:
            parser = self._group(_title(field.name))
        TrlParser._parse_dataclass_field(parser, field)

    def _group(self, title: str) -> argparse._ArgumentGroup:
        if not hasattr(self, "_help_groups"):  # all at once: help shows them in the order in which they are made
            titles = (_COMMAND, *_GROUPS.values(), _TRAINER)
            self._help_groups = {name: self.add_argument_group(name) for name in titles}
        return self._help_groups[title]


def parse(
    command: str,
    argv: Sequence[str],
    description: str,
    config_class: type[PPOConfig] = PPOConfig,
    script_class: type[PPOScriptArguments] = PPOScriptArguments,
) -> tuple[PPOScriptArguments, PPOConfig, PPOModelConfig, MixtureConfig]:
    """Read arguments from the command line, and from the YAML file that `--config` names."""
    types = (script_class, config_class, PPOModelConfig, MixtureConfig)
    parser = GroupedParser(
        types,
        prog=f"trl-ppo {command}",
        usage=f"trl-ppo {command} [--config FILE.yaml] [--ARGUMENT VALUE ...]",
        description=f"{description} Arguments stand in a YAML file that --config names, or on the command line, which "
        "wins.",
        allow_abbrev=False,  # a misspelt name must not pass as the beginning of another
    )
    argv = [part for text in argv for part in (text.split("=", 1) if text.startswith("--config=") else [text])]
    _look_beside_the_config(argv)
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
    _refuse_unknown(list(zip(of_file[::2], of_file[1::2])), "in the config file", known)
    values = [*of_line[1:], ""]
    options = [(text, value) for text, value in zip(of_line, values) if text.startswith("-")]
    _refuse_unknown(options or [(text, "") for text in of_line], "on the command line", known)
    return tuple(parsed)


def _look_beside_the_config(argv: list[str]) -> None:
    """Functions that a config names may lie in its folder."""
    if "--config" not in argv[:-1]:
        return
    file = Path(argv[argv.index("--config") + 1])
    if not file.exists() or file.is_dir():
        what = "is a directory" if file.is_dir() else "does not exist"
        raise ValueError(f"--config {file} {what}; name a YAML file. The working directory is {Path.cwd()}.")
    folder = file.absolute().parent
    if str(folder) not in sys.path and any(folder.glob("*.py")):
        sys.path.append(str(folder))


def _refuse_unknown(given: list[tuple[str, str]], where: str, known: list[str]) -> None:
    for text, value in given:
        name, _, behind = text.lstrip("-").partition("=")
        name, value = name.replace("-", "_"), behind or value
        near = get_close_matches(name, known, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else "--help lists those there are."
        if name in REMOVED_FIELDS:
            became = REMOVED_FIELDS[name]
            remedy = f"TRL's old PPOConfig had it. {became[0].upper()}{became[1:]}."
        shows = value and not value.startswith("-") and not any(map(is_secret, (name, *near)))
        told = f" It was set to {shortened(value, 80)!r}." if shows else ""
        raise ValueError(f"There is no argument `{name}`, which stands {where}; {remedy}{told}")
