"""Contents of a checkpoint: plain PEFT adapters, the critic beside them as safetensors, state,
settings and inputs."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from inspect import getattr_static
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from datasets import IterableDataset
from safetensors.torch import load_file
from torch import Tensor, float64, nn, tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..config import METRIC_SCHEDULES, PPOConfig
from ..data import TOKEN_COLUMNS, spread_indices
from ..distributed import uses_fsdp
from ..episodes.record import ANSWERS
from ..episodes.vllm_generator import SERVED
from ..modeling import ActorCritic
from ..modeling.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CRITIC_FOLDER,
    KINDS,
    STATE,
    VALUE_HEAD,
    digest_of_weights,
    kind_of_critic,
    load_adapter_weights,
    save_adapter,
    write_weights,
)
from ..modeling.critics import CriticState
from ..rewards.model import AdapterReward
from ..rewards.process import ProcessScorer
from ..rewards.scoring import function_name

ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
# of any kind of critic
CRITIC_FILES = (VALUE_HEAD, *(os.path.join(CRITIC_FOLDER, file) for file in ADAPTER))


class CheckpointError(ValueError):
    """Raised when a checkpoint is damaged, lacks a file, or does not fit the model or the run."""


def check_target(directory: str, base: str) -> None:
    """Raise a `ValueError` if an adapter would be saved into the base's own directory."""
    if os.path.isdir(base) and os.path.isdir(directory) and os.path.samefile(directory, base):
        raise ValueError(
            "`output_dir` must not be the base model's own directory, which could not be loaded "
            f"with an adapter in it, got `{directory}`; use another one."
        )


def check_links(output_dir: str) -> None:
    """Raise a `ValueError` for a link in place of a folder whose files a run deletes."""
    for name in (SERVED, ANSWERS):
        path = os.path.join(output_dir, name)
        if os.path.islink(path):
            raise ValueError(
                f"`output_dir` must not have a link `{name}`, got `{path}` to "
                f"`{os.path.realpath(path)}`; remove the link, or use another directory."
            )


# ---- adapters and critic ----


def _policy_part(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key.removeprefix("policy."): x for key, x in weights.items() if key.startswith("policy.")
    }


def save_critic(
    actor_critic: ActorCritic,
    output_dir: str,
    weights: dict[str, Tensor],
    state: CriticState,
) -> None:
    """Write the value head with the moments of returns and rewards, and the critic's adapter in a
    folder of its own; those that there are."""
    for file in CRITIC_FILES:  # those of another kind of critic would be read as part of this one
        Path(output_dir, file).unlink(missing_ok=True)
    head = actor_critic.value_head
    if head is not None:
        os.makedirs(output_dir, exist_ok=True)
        tensors = {
            name: weights.get(f"value_head.{name}", x) for name, x in head.state_dict().items()
        }
        units = {
            name: tensor(moments, dtype=float64)
            for name, moments in state.to_json().items()
            if head.is_normalized or name == "rewards"
        }
        write_weights(tensors | units, os.path.join(output_dir, VALUE_HEAD), head.kind)
    if actor_critic.critic_adapter is not None:
        folder = os.path.join(output_dir, CRITIC_FOLDER)
        save_adapter(
            actor_critic.policy, actor_critic.critic_adapter, folder, _policy_part(weights)
        )


def save_actor_critic(
    actor_critic: ActorCritic,
    output_dir: str,
    weights: dict[str, Tensor] | None = None,
    state: CriticState = CriticState(),
) -> None:
    """Write the policy's adapter, and the critic beside it; pass `weights` if they are sharded."""
    weights = actor_critic.trained_weights() if weights is None else weights
    save_adapter(
        actor_critic.policy, actor_critic.policy_adapter, output_dir, _policy_part(weights)
    )
    save_critic(actor_critic, output_dir, weights, state)


def _check_kind(directory: str, kind: str) -> None:
    """Raise [`CheckpointError`] if a directory holds a critic of another kind."""
    head_file = os.path.join(directory, VALUE_HEAD)
    if not os.path.isfile(head_file):
        if kind != "none":
            raise CheckpointError(
                f"`critic` must be 'none' to resume from `{directory}` (it has no {VALUE_HEAD}), "
                f"got {kind!r}; set `critic='none'`."
            )
        return
    try:
        saved = kind_of_critic(head_file)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if saved == kind:
        return
    if saved not in KINDS:
        raise CheckpointError(
            f"`critic_factory` must build the critic {saved!r} to resume from `{directory}`, got "
            f"{kind!r}; pass that of the run."
        )
    if kind not in (*KINDS, "none"):
        raise CheckpointError(
            f"The critic of `{directory}` is {saved!r}, and `critic_factory` builds {kind!r}; "
            f"remove it, and set `critic={saved!r}`."
        )
    raise CheckpointError(
        f"`critic` must be {saved!r} to resume from `{directory}`, got {kind!r}; set "
        f"`critic={saved!r}`."
    )


def load_actor_critic_weights(actor_critic: ActorCritic, directory: str) -> None:
    """Load the weights written by [`save_actor_critic`]."""
    head = actor_critic.value_head
    _check_kind(directory, "none" if head is None else head.kind)
    loads: dict[str, Callable] = {} if head is None else {VALUE_HEAD: head.load_saved}
    for name, folder in (
        (actor_critic.policy_adapter, ""),
        (actor_critic.critic_adapter, CRITIC_FOLDER),
    ):
        if name is not None:
            loads[os.path.join(folder, ADAPTER_WEIGHTS)] = partial(
                load_adapter_weights, actor_critic.policy, name
            )
    for file, load in loads.items():
        try:
            load(load_file(os.path.join(directory, file)))
        except ValueError as error:
            raise CheckpointError(
                f"{file} does not fit the model: {error} It belongs to another base model, "
                "`peft_config`, critic, or version of this package."
            ) from None


# ---- state, settings and inputs ----

# settings with which a run may go on and be the same run; if its minibatches stay, also how they
# are cut
CUT = {"per_device_train_batch_size", "gradient_accumulation_steps"}
# what the best checkpoint is
BEST = {"greater_is_better", "metric_for_best_model"}
TUNABLE = BEST | set(
    "adam_beta1 adam_beta2 adam_epsilon critic_learning_rate learning_rate lr_scheduler_kwargs "
    "lr_scheduler_type max_grad_norm max_steps num_train_epochs warmup_steps weight_decay".split()
)
# fields of TrainingArguments that change the result, or what is made of it
TRAINER_SETTINGS = CUT | TUNABLE | {"bf16", "data_seed", "fp16", "optim", "optim_args", "seed"}
# fields of PPOConfig that change nothing, or must not be written to a file
NOT_COMPARED = set(
    "chat_template_kwargs critic_init environment_timeout eval_temperature generation_batch_size "
    "log_completions max_reward_failures model_init_kwargs num_completions_to_print "
    "num_generations_eval per_device_reward_batch_size resume_with_changed_settings "
    "trust_remote_code vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_server_base_url "
    "vllm_server_timeout".split()
)
# rollout shares and random states are per rank, and the optimizer's files differ per backend
NEVER_CHANGED = {"num_processes", "zero_stage", "fsdp_version"}
# fields of an adapter's config that name places, or change nothing
ADAPTER_NOT_COMPARED = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
)
SAMPLED_ROWS = 64
CURRICULUM_ROWS = 4096  # are sampled for a curriculum, whose scores belong to row numbers
CURRICULUM = "rows of the curriculum"
REWARD_TOKENIZERS = "reward_processing_classes"


def load_state(directory: str) -> dict[str, Any]:
    """Read the run's state besides weights: running reward statistics, coefficients, settings."""
    return json.loads(Path(directory, STATE).read_text())


def run_settings(args: PPOConfig) -> dict[str, Any]:
    """Settings that determine the course of a run, as JSON."""
    own = (
        {field.name for field in fields(args)}
        - {field.name for field in fields(TrainingArguments)}
        - NOT_COMPARED
    )
    values = args.to_dict()
    deepspeed = args.deepspeed_plugin
    values["critic_kwargs"] = asdict(args.critic_options)
    values["vllm_kwargs"] = {"base_model": args.vllm_options.base_model}
    settings = {name: values[name] for name in sorted(own | TRAINER_SETTINGS) if name in values}
    if args.metric_for_best_model is not None:  # with and without the prefix it is the same
        settings["metric_for_best_model"] = args.metric_for_best_model.removeprefix("eval_")
    settings["num_processes"] = args.world_size
    settings["overlap_rollouts"] = args.vllm_options.overlap_rollouts or None
    settings["zero_stage"] = None if deepspeed is None else deepspeed.zero_stage
    settings["fsdp_version"] = 2 if uses_fsdp(args) else None
    return json.loads(json.dumps(settings, default=str))


class SettingsChange(NamedTuple):
    """Settings of a checkpoint that differ from those of the run that resumes it."""

    listed: dict[str, str]  # by name, with the values
    refused: set[str]  # names of those with which it is another run

    def __str__(self) -> str:
        return ", ".join(self.listed.values())

    @property
    def of_best(self) -> bool:
        """Whether another checkpoint may be the best one."""
        return not BEST.isdisjoint(self.listed)

    @classmethod
    def between(cls, saved: dict[str, Any], current: dict[str, Any]) -> "SettingsChange":
        """Compare settings."""
        # fields of a later version; an earlier one did not save what the best checkpoint is, nor
        # the tokenizers of rewards
        defaults = {name: getattr(PPOConfig, name, None) for name in current}
        later = (BEST | {REWARD_TOKENIZERS}) & current.keys()
        saved = defaults | {name: current[name] for name in later} | saved
        if isinstance(saved.get("rewards"), dict):
            saved["rewards"] = list(map(list, saved["rewards"].items()))  # of an earlier version
        differing = [name for name in sorted(saved) if saved[name] != current.get(name)]
        listed = {
            name: f"{name} (was {saved[name]!r}, is {current.get(name)!r})" for name in differing
        }
        minibatch = math.prod(current[name] for name in CUT)
        before = math.prod(saved[name] for name in CUT)
        if minibatch == before:
            tunable = TUNABLE | CUT
        else:
            tunable = TUNABLE
        if current["zero_stage"] is not None:  # DeepSpeed loads rates and schedule with its state
            tunable = BEST
        return cls(listed, set(listed) - tunable)


def digest_of_run(args: PPOConfig, inputs: dict[str, Any]) -> str:
    """Digest of all that a rollout depends on besides weights: not of rates, nor of the run's
    length."""
    settings = run_settings(args) | inputs
    return _digest({name: x for name, x in settings.items() if name not in TUNABLE | CUT})


def check_settings(
    directory: str, saved: dict[str, Any], current: dict[str, Any], may_change: bool
) -> SettingsChange:
    """Compare settings; raise [`CheckpointError`] if the resumed run would not be the
    interrupted one."""
    change = SettingsChange.between(saved, current)
    changed, refused = change
    impossible = changed.keys() & NEVER_CHANGED
    schedules = saved.get("lr_scheduler_type"), current.get("lr_scheduler_type")
    followed_metric, follows_metric = (schedule in METRIC_SCHEDULES for schedule in schedules)
    if followed_metric != follows_metric:  # one counts evaluations, the other one steps
        impossible.add("lr_scheduler_type")
    if impossible or (refused and not may_change):
        listed = ", ".join(changed[name] for name in sorted(impossible or refused))
        if impossible:
            raise CheckpointError(
                f"`{directory}` was saved under other settings: {listed}. Restore them."
            )
        raise CheckpointError(
            f"`{directory}` was saved under other settings: {listed}. Restore them, or set "
            "`resume_with_changed_settings=True`."
        )
    if "normalize_values" in changed and "critic" not in changed:
        raise CheckpointError(
            f"The critic of `{directory}` predicts in units of another `normalize_values` (was "
            f"{saved['normalize_values']}, is {current['normalize_values']}); restore it, or begin "
            "anew in another `output_dir`."
        )
    return change


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda x: type(x).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code_of(x: Any, depth: int = 8) -> Any:
    """What a function computes, as JSON: its code, and the plain values and functions that it holds.

    Values of other kinds count by their type.
    """
    if isinstance(x, str | int | float | bool | None):
        return x
    if depth == 0:  # what holds itself would have no end
        return type(x).__name__
    inner = partial(_code_of, depth=depth - 1)
    if isinstance(x, Mapping):
        entries = [json.dumps([inner(key), inner(value)]) for key, value in x.items()]
        return ["mapping", sorted(entries)]
    if isinstance(x, set | frozenset):
        return ["set", sorted(json.dumps(inner(value)) for value in x)]
    if isinstance(x, list | tuple):
        return [inner(value) for value in x]
    if isinstance(x, CodeType):
        return [x.co_code.hex(), inner(x.co_names), inner(x.co_consts)]
    if isinstance(x, partial):
        return [inner(x.func), inner(x.args), inner(x.keywords)]
    if isinstance(x, MethodType):
        return inner(x.__func__)
    if isinstance(x, FunctionType):
        return [
            inner(x.__code__),
            inner(x.__defaults__),
            inner(x.__kwdefaults__),
            _held_by(x, inner),
        ]
    own = getattr_static(type(x), "__call__", None)
    return [type(x).__name__, inner(own) if isinstance(own, FunctionType) else None]


def _held_by(function: FunctionType, code_of: Callable[[Any], Any]) -> list:
    """What a function closes over; a cell may be filled later."""
    held = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            held.append(code_of(cell.cell_contents))
    return held


def digest_of_function(function: Callable) -> str:
    """Name and digest of a function, by which a resumed run tells it from another one."""
    return f"{function_name(function)} ({_digest(_code_of(function))})"


def _rows(dataset: Any, count: int) -> str:
    columns = sorted(set(dataset.column_names or ()) - TOKEN_COLUMNS)
    if isinstance(dataset, IterableDataset):  # its rows are not read ahead
        return f"stream of {', '.join(columns)}"
    rows = [dataset[index] for index in spread_indices(len(dataset), count)]
    sample = _digest([[row[name] for name in columns] for row in rows])
    return f"{len(dataset)} rows of {', '.join(columns)} ({sample})"


def _frozen(reward: Any) -> Iterable[Tensor]:
    """Weights of a classifier, or the score head of an adapter."""
    model = getattr(reward, "model", None)
    if isinstance(model, nn.Module):
        return model.parameters()
    if isinstance(reward, AdapterReward):
        return reward.head.values()
    return ()


def _tokenizer_digest(reward: Any) -> str | None:
    """Digest of the tokenizer of a reward model, its template, and where it separates steps."""
    tokenizer = getattr(reward, "tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return None
    words = [tokenizer.get_vocab(), tokenizer.special_tokens_map, tokenizer.chat_template]
    steps = [reward.separator, reward.split_by] if isinstance(reward, ProcessScorer) else []
    return _digest(words + steps)


def fingerprints(
    actor_critic: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None,
    rewards: list,
    train_dataset: Any,
    curriculum: Callable | None = None,
) -> dict[str, Any]:
    """Fingerprints of what a run is given besides its config, by name, as JSON.

    All ranks must call it.
    """
    policy = actor_critic.policy
    config = actor_critic.config
    has_scores_of_rows = curriculum is not None and train_dataset is not None
    values: dict[str, Any] = {
        "base weights": digest_of_weights(x for x in policy.parameters() if not x.requires_grad),
        "dtype": actor_critic.dtype,
        "attn_implementation": config._attn_implementation,
        "quantization_config": getattr(config, "quantization_config", None),
        "tokenizer": _digest([tokenizer.get_vocab(), tokenizer.special_tokens_map]),
        "chat_template": _digest([tokenizer.chat_template, chat_template_kwargs or {}]),
        # in their order, which their weights, levels and labels follow
        "rewards": [[reward.name, digest_of_weights(_frozen(reward))] for reward in rewards],
        REWARD_TOKENIZERS: list(map(_tokenizer_digest, rewards)),
        "train_dataset": None if train_dataset is None else _rows(train_dataset, SAMPLED_ROWS),
        "curriculum": None if curriculum is None else digest_of_function(curriculum),
        CURRICULUM: _rows(train_dataset, CURRICULUM_ROWS) if has_scores_of_rows else None,
    }
    adapters = {
        "peft_config": actor_critic.policy_adapter,
        "critic's peft_config": actor_critic.critic_adapter,
    }
    for prefix, name in adapters.items():
        adapter = policy.peft_config[name].to_dict() if name is not None else {}
        values |= {
            f"{prefix}.{key}": x
            for key, x in adapter.items()
            if x and key not in ADAPTER_NOT_COMPARED
        }
    return json.loads(
        json.dumps(values, default=lambda x: sorted(x) if isinstance(x, set) else str(x))
    )
