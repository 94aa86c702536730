"""Contents of a checkpoint: plain PEFT adapters, the critic beside them as safetensors, state and settings."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, float64, tensor
from transformers import TrainingArguments

from ..config import PPOConfig
from ..distributed import uses_fsdp
from ..modeling import ActorCritic
from ..modeling.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CRITIC_FOLDER,
    VALUE_HEAD,
    kind_of_critic,
    load_adapter_weights,
    save_adapter,
    write_weights,
)

STATE = "ppo_state.json"
ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
CRITIC_FILES = {  # by `PPOConfig.critic`
    "none": [],
    "head": [VALUE_HEAD],
    "side": [VALUE_HEAD],
    "adapter": [VALUE_HEAD, *(os.path.join(CRITIC_FOLDER, file) for file in ADAPTER)],
}


class CheckpointError(ValueError):
    """Raised when a checkpoint is damaged, lacks a file, or does not fit the model or the run."""


def check_target(directory: str, base: str) -> None:
    """Raise a `ValueError` if an adapter would be saved into the base's own directory."""
    if os.path.isdir(base) and os.path.isdir(directory) and os.path.samefile(directory, base):
        needed = "must not be the base model's own directory, which could not be loaded with an adapter in it"
        raise ValueError(f"`output_dir` {needed}, got `{directory}`; use another one.")


# ---- adapters and critic ----


def _critic_kind(actor_critic: ActorCritic) -> str:
    if actor_critic.value_head is None:
        return "none"
    return kind_of_critic(actor_critic.value_head.state_dict(), actor_critic.critic_adapter is not None)


def _policy_part(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("policy."): x for key, x in weights.items() if key.startswith("policy.")}


def save_critic(
    actor_critic: ActorCritic, output_dir: str, weights: dict[str, Tensor], moments: Mapping[str, Iterable[float]]
) -> None:
    """Write the value head with the moments of its units, and the critic's adapter in its own folder, if there are."""
    # files of a run with another kind of critic would be read as part of this one
    for file in set(CRITIC_FILES["adapter"]) - set(CRITIC_FILES[_critic_kind(actor_critic)]):
        Path(output_dir, file).unlink(missing_ok=True)
    head = actor_critic.value_head
    if head is not None:
        os.makedirs(output_dir, exist_ok=True)
        parameters = {name: weights[f"value_head.{name}"] for name, _ in head.named_parameters()}
        units = {name: tensor([*x], dtype=float64) for name, x in moments.items()} if head.is_normalized else {}
        write_weights(dict(head.named_buffers()) | parameters | units, os.path.join(output_dir, VALUE_HEAD))
    if actor_critic.critic_adapter is not None:
        folder = os.path.join(output_dir, CRITIC_FOLDER)
        save_adapter(actor_critic.policy, actor_critic.critic_adapter, folder, _policy_part(weights))


def save_actor_critic(
    actor_critic: ActorCritic,
    output_dir: str,
    weights: dict[str, Tensor] | None = None,
    moments: Mapping[str, Iterable[float]] = MappingProxyType({}),
) -> None:
    """Write the policy's adapter, and the critic beside it; pass `weights` if they are sharded."""
    weights = actor_critic.trained_weights() if weights is None else weights
    save_adapter(actor_critic.policy, actor_critic.policy_adapter, output_dir, _policy_part(weights))
    save_critic(actor_critic, output_dir, weights, moments)


def load_actor_critic_weights(actor_critic: ActorCritic, directory: str) -> None:
    """Load the weights written by [`save_actor_critic`]."""
    kind, saved_kind = _critic_kind(actor_critic), "none"
    if os.path.isfile(head_file := os.path.join(directory, VALUE_HEAD)):
        has_adapter = os.path.isfile(os.path.join(directory, CRITIC_FOLDER, ADAPTER_CONFIG))
        saved_kind = kind_of_critic(load_file(head_file), has_adapter)
    if saved_kind != kind:
        missing = f" (it has no {VALUE_HEAD})" if saved_kind == "none" else ""
        needed = f"must be {saved_kind!r} to resume from `{directory}`{missing}"
        raise CheckpointError(f"`critic` {needed}, got {kind!r}; set `critic={saved_kind!r}`.")
    loads: dict[str, Callable] = {}
    if actor_critic.value_head is not None:
        loads[VALUE_HEAD] = actor_critic.value_head.load_saved
    folders = {actor_critic.policy_adapter: "", actor_critic.critic_adapter: CRITIC_FOLDER}
    for name, folder in folders.items():
        if name is not None:
            loads[os.path.join(folder, ADAPTER_WEIGHTS)] = partial(load_adapter_weights, actor_critic.policy, name)
    for file, load in loads.items():
        try:
            load(load_file(os.path.join(directory, file)))
        except ValueError as error:
            remedy = "It belongs to another base model or another `peft_config`."
            raise CheckpointError(f"{file} does not fit the model: {error} {remedy}") from None


# ---- state and settings ----

# fields of TrainingArguments that change the result
TRAINER_SETTINGS = (
    "adam_beta1 adam_beta2 adam_epsilon bf16 data_seed fp16 gradient_accumulation_steps learning_rate "
    "lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps num_train_epochs optim optim_args "
    "per_device_train_batch_size seed warmup_ratio warmup_steps weight_decay"
).split()
# fields of PPOConfig that change nothing, or must not be written to a file
NOT_COMPARED = set(
    "chat_template_kwargs critic_init generation_batch_size log_completions max_reward_failures model_init_kwargs "
    "num_completions_to_print offload_rewards per_device_reward_batch_size resume_with_changed_settings "
    "reward_timeout trust_remote_code vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_server_base_url "
    "vllm_server_timeout".split()
)


def load_state(directory: str) -> dict[str, Any]:
    """Read the run's state besides weights: running reward statistics, coefficients, settings."""
    return json.loads(Path(directory, STATE).read_text())


def run_settings(args: PPOConfig) -> dict[str, Any]:
    """Settings that determine the course of a run, as JSON."""
    own = {field.name for field in fields(args)} - {field.name for field in fields(TrainingArguments)} - NOT_COMPARED
    values, deepspeed = args.to_dict(), args.deepspeed_plugin
    values["critic_kwargs"] = asdict(args.critic_options)
    values["vllm_kwargs"] = {"base_model": args.vllm_options.base_model}
    settings = {name: values[name] for name in sorted(own | set(TRAINER_SETTINGS)) if name in values}
    settings["num_processes"] = args.world_size
    settings["zero_stage"] = None if deepspeed is None else deepspeed.zero_stage
    settings["fsdp_version"] = 2 if uses_fsdp(args) else None
    return json.loads(json.dumps(settings, default=str))


def check_settings(directory: str, saved: dict, args: PPOConfig, inputs: dict[str, Any] | None = None) -> None:
    """Raise [`CheckpointError`] if a run resumed under these settings would differ from the interrupted one."""
    current = run_settings(args) | (inputs or {})
    was, now = _processes(current | saved), _processes(current)
    if was != now:  # rollout shares and random states are per rank, and the optimizer's files differ per backend
        message = f"`{directory}` was saved by {was}, and this run has {now} (num_processes, zero_stage, fsdp_version)"
        raise CheckpointError(f"{message}; resume with {was}.")
    changed = sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name))
    if changed and not args.resume_with_changed_settings:
        listed = ", ".join(f"{name} (was {saved.get(name)!r}, is {current.get(name)!r})" for name in changed)
        remedy = "Restore them, or set `resume_with_changed_settings=True`."
        raise CheckpointError(f"`{directory}` was saved under other settings: {listed}. {remedy}")


def _processes(settings: dict[str, Any]) -> str:
    number, stage, fsdp = (settings[name] for name in ("num_processes", "zero_stage", "fsdp_version"))
    backend = "without DeepSpeed or FSDP" if stage is None else f"under DeepSpeed's ZeRO-{stage}"
    return f"{number} process{'es' * (number > 1)} {backend if fsdp is None else f'under FSDP{fsdp}'}"
