"""Arguments of a run from a command line and a YAML file, read by TRL's parser."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
from yaml import YAMLError

from ..config import PPOConfig, check_types
from ..redaction import is_secret, shortened

_DERIVED = (
    "Leave it out: it follows from `per_device_train_batch_size`, `gradient_accumulation_steps`, `num_mini_batches` "
    "and the number of processes"
)
# fields of the PPOConfig that TRL had until 1.12, with their replacements
REMOVED_FIELDS = {
    "total_episodes": (
        "Set `num_train_epochs`, or `max_steps` to episodes / completions per rollout × `num_ppo_epochs` × "
        "`num_mini_batches`"
    ),
    "num_total_batches": "Leave it out: it follows from `max_steps`",
    "response_length": "Its name is `max_completion_length` now",
    "stop_token": "Leave it out: EOS always ends a completion",
    "stop_token_id": "Leave it out: it is `eos_token_id` of the model's generation config",
    "sft_model_path": "Set `model_name_or_path`",
    "reward_model_path": "Set `reward_funcs`",
    "model_adapter_name": "Leave it out: in Python, the active adapter of a `PeftModel` starts the policy",
    "ref_adapter_name": "Leave it out: the reference is the initial policy",
    "local_rollout_forward_batch_size": (
        "Set `per_device_generation_batch_size` for sampling, and `per_device_reward_batch_size` for scoring"
    ),
    "num_sample_generations": "Set `log_completions`, and `num_completions_to_print`",
    "batch_size": "Set `generation_batch_size`, the completions of a rollout over all processes",
    **dict.fromkeys(("local_batch_size", "micro_batch_size", "mini_batch_size", "local_mini_batch_size"), _DERIVED),
    "world_size": "Leave it out: it follows from the launch",
    "dataset_num_proc": "Leave it out: prompts are tokenized in one process",
    "ds3_gather_for_generation": "Leave it out: under ZeRO-3 each layer is gathered when it is used",
}


def _listed(args: object, *names: str) -> None:
    """Wrap single values from a YAML file in lists."""
    for name in names:
        if isinstance(getattr(args, name), str):
            setattr(args, name, [getattr(args, name)])


@dataclass
class PPOScriptArguments(ScriptArguments):
    """TRL's [`~trl.ScriptArguments`], with the rewards of a run."""

    _argument_group_name = "dataset and rewards"

    map_function: str | None = field(
        default=None,
        metadata={
            "help": "Dotted path of a function from a row to its new columns, for datasets without a column 'prompt'; "
            "importable from the config file's folder, the working directory or sys.path."
        },
    )
    eval_rows: int | None = field(
        default=None, metadata={"help": "Number of evaluated rows, spread evenly over the test split. Default: all."}
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
        default=None, metadata={"help": "Rewards that are scored and logged, but not optimized."}
    )
    ptx_dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset whose split 'train' is the policy's supervised data."}
    )

    def __post_init__(self):
        _listed(self, "reward_funcs", "monitor_funcs")
        check_types(self)
        if self.eval_rows is not None and self.eval_rows < 1:
            raise ValueError(f"`eval_rows` must be at least 1, got {self.eval_rows}; leave it out for all rows.")


@dataclass
class PPOModelConfig(ModelConfig):
    """TRL's [`~trl.ModelConfig`] with the defaults and limits of [`PPOTrainer`]."""

    _argument_group_name = "model"

    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of the base model. Defaults to that of the run, see bf16 and fp16.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Must be 0: log-probabilities must be repeatable."})
    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "LoRA target modules."}
    )

    def __post_init__(self):
        _listed(self, "lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
        check_types(self)
        super().__post_init__()
        if self.lora_dropout:
            raise ValueError(
                f"`lora_dropout={self.lora_dropout}` is not supported: old and new log-probabilities must come from "
                "the same forward. Leave it out."
            )
        if self.lora_task_type != "CAUSAL_LM":
            raise ValueError(f"`lora_task_type` must be 'CAUSAL_LM' for a policy, got {self.lora_task_type!r}.")
        only_4bit = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": None, "use_bnb_nested_quant": False}
        for name, default in only_4bit.items():
            if getattr(self, name) != default and not self.load_in_4bit:
                raise ValueError(f"`{name}` only applies to 4 bits; set `load_in_4bit` too, or leave it out.")


@dataclass
class MixtureConfig(DatasetMixtureConfig):
    """TRL's [`~trl.DatasetMixtureConfig`], with its types checked."""

    _argument_group_name = "dataset mixture (in a config file)"

    def __post_init__(self):
        entries = self.datasets if isinstance(self.datasets, list) else [None]
        if not all(isinstance(entry, dict) or is_dataclass(entry) for entry in entries):
            raise ValueError("`datasets` must be a list of mappings, each with a `path`; see TRL's dataset mixtures.")
        check_types(self, skip=("datasets",))
        super().__post_init__()


def parse(
    command: str,
    argv: Sequence[str],
    description: str,
    config_class: type[PPOConfig] = PPOConfig,
    script_class: type[PPOScriptArguments] = PPOScriptArguments,
) -> tuple[PPOScriptArguments, PPOConfig, PPOModelConfig, MixtureConfig]:
    """Read arguments from the command line, and from the YAML file named by `--config`."""
    types = (script_class, config_class, PPOModelConfig, MixtureConfig)
    parser = TrlParser(
        types,
        prog=f"trl-ppo {command}",
        usage=f"trl-ppo {command} [--config FILE.yaml] [--ARGUMENT VALUE ...]",
        description=f"{description} Arguments come from the YAML file named by --config and from the command line, "
        "which wins.",
        allow_abbrev=False,  # a misspelt name must not pass as the beginning of another
        exit_on_error=False,
    )
    argv = [part for text in argv for part in (text.split("=", 1) if text.startswith("--config=") else [text])]
    if "--config" in argv:
        _check_config_file(argv[argv.index("--config") + 1 :])
    try:
        *parsed, unknown_in_file, unknown_in_line = parser.parse_args_and_config(
            argv, return_remaining_strings=True, separate_remaining_strings=True
        )
    except argparse.ArgumentError as error:
        name = str(error.argument_name).split("/")[0].lstrip("-")
        problem = shortened(error.message).replace("invalid float value:", "must be a number, got")
        raise ValueError(f"`{name}` {problem.replace('invalid int value:', 'must be an integer, got')}") from None
    except YAMLError as error:
        raise ValueError(f"The file of --config must be YAML, got an error: {error}") from None
    except (TypeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"The arguments cannot be read: {error}") from error
    known = [entry.name for type_ in types for entry in fields(type_)]
    for strings, place in ((unknown_in_file, "in the config file"), (unknown_in_line, "on the command line")):
        if strings:
            _refuse_unknown(strings, place, known)
    return tuple(parsed)


def _check_config_file(arguments: list[str]) -> None:
    """Check that the config file exists, and make the functions beside it importable."""
    if not arguments:
        raise ValueError("--config needs the path of a YAML file after it.")
    file = Path(arguments[0])
    if not file.exists() or file.is_dir():
        problem = "is a directory" if file.is_dir() else "does not exist"
        raise ValueError(f"--config {file} {problem}; name a YAML file. The working directory is {Path.cwd()}.")
    folder = file.absolute().parent
    if str(folder) not in sys.path and any(folder.glob("*.py")):
        sys.path.append(str(folder))


def _refuse_unknown(strings: list[str], place: str, known: list[str]) -> NoReturn:
    """Raise for the first of the strings left over, with the field that it may stand for."""
    name, _, value = strings[0].lstrip("-").partition("=")
    name = name.replace("-", "_")
    if not value and strings[0].startswith("-") and len(strings) > 1 and not strings[1].startswith("-"):
        value = strings[1]
    matches = get_close_matches(name, known, n=1)
    secret = any(map(is_secret, (name, *matches)))
    setting = f", set to {shortened(value, 80)!r}" if value and not secret else ""
    remedy = f"did you mean `{matches[0]}`?" if matches else "--help lists the arguments."
    if name in REMOVED_FIELDS:
        remedy = f"TRL's old PPOConfig had it. {REMOVED_FIELDS[name]}."
    raise ValueError(f"Unknown argument `{name}` {place}{setting}; {remedy}")
