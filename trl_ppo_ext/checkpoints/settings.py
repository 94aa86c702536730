"""The settings that a run's course depends on: kept in a checkpoint, and compared when it is resumed."""

import json
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

from ..fsdp import is_asked_for
from .files import CheckpointError

# of the Trainer's own fields, those that change what is learned
OF_THE_TRAINER = (
    "adam_beta1 adam_beta2 adam_epsilon bf16 data_seed fp16 gradient_accumulation_steps learning_rate "
    "lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps num_train_epochs optim optim_args "
    "per_device_train_batch_size seed warmup_ratio warmup_steps weight_decay"
).split()
# of the fields that PPOConfig adds, those that change nothing, or hold what does not belong into a file
NOT_COMPARED = set(
    "chat_template_kwargs critic_init generation_batch_size log_completions max_reward_failures max_skipped_steps "
    "model_init_kwargs num_completions_to_print per_device_reward_batch_size resume_with_changed_settings "
    "trust_remote_code".split()
)


def run_settings(args: Any) -> dict[str, Any]:
    """The settings that the course of a run depends on."""
    own = {field.name for field in fields(args)} - {field.name for field in fields(TrainingArguments)} - NOT_COMPARED
    given = args.to_dict()
    settings = {name: given[name] for name in sorted(own | set(OF_THE_TRAINER)) if name in given}
    deepspeed = args.deepspeed_plugin
    settings |= {
        "num_processes": args.world_size,
        "zero_stage": None if deepspeed is None else deepspeed.zero_stage,
        "fsdp_version": 2 if is_asked_for(args) else None,
    }
    return json.loads(json.dumps(settings, default=str))


def check_settings(directory: str, saved: dict[str, Any], args: Any) -> None:
    """Refuse to resume a run under settings with which it would have gone another way."""
    now = run_settings(args)
    processes = saved.get("num_processes", now["num_processes"])
    if processes != now["num_processes"]:  # each has its share of the rollout, and random states of its own
        raise CheckpointError(
            f"`{directory}` was saved by {processes} process{'es' * (processes > 1)}, and this run has "
            f"{now['num_processes']} (num_processes); resume with as many as it had."
        )
    was, is_now = (_backend(given["zero_stage"], given["fsdp_version"]) for given in (now | saved, now))
    if was != is_now:  # each has files of its own for the optimizer, and does not look for the other's
        raise CheckpointError(
            f"`{directory}` was saved {was}, and this run is {is_now} (zero_stage, fsdp_version): its optimizer "
            f"would begin anew. Resume {was}."
        )
    changed = {name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name)}
    if changed and not args.resume_with_changed_settings:
        listed = ", ".join(f"{name} (was {saved.get(name)!r}, is {now.get(name)!r})" for name in sorted(changed))
        raise CheckpointError(
            f"`{directory}` was saved under other settings, and the run would not be the one that was interrupted: "
            f"{listed}. Set them as they were, or `resume_with_changed_settings=True`."
        )


def _backend(zero_stage: int | None, fsdp_version: int | None) -> str:
    if fsdp_version is not None:
        return f"under FSDP{fsdp_version}"
    return "without DeepSpeed or FSDP" if zero_stage is None else f"under DeepSpeed's ZeRO-{zero_stage}"
