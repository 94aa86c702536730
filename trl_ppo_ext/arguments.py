"""Checks of the arguments of [`PPOTrainer`], before anything is loaded."""

import os
from contextlib import suppress
from typing import Any

import torch
from datasets import IterableDataset
from peft import PeftConfig
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, GenerationConfig, PreTrainedTokenizerBase

from .config import PPOConfig
from .distributed import check_deepspeed, check_fsdp, uses_deepspeed, uses_fsdp
from .generation import ensure_pad_token, stop_token_ids
from .modeling import check_model_arguments, hub_kwargs
from .rewards import check_reward_arguments, check_reward_columns

# arguments of TRL's PPOTrainer (until 1.12), and what replaces them
REMOVED_ARGUMENTS = {
    "reward_model": "pass it in `reward_funcs`",
    "ref_model": "remove it: the reference is the base model with the adapter switched off",
    "value_model": "remove it: the critic is a value head on the policy's own trunk",
    "data_collator": "remove it: the trainer tokenizes and pads prompts",
    "config": "renamed to `args`",
    "tokenizer": "renamed to `processing_class`",
    "policy": "renamed to `model`",
}


def as_list(value: Any) -> list:
    """Turn one value, several or none into a list."""
    return list(value) if isinstance(value, list | tuple | set) else [value] if value is not None else []


def refuse_unknown_arguments(unknown: dict[str, Any]) -> None:
    """Raise for an argument that PPOTrainer does not have, with what replaces it."""
    for name in unknown:
        remedy = REMOVED_ARGUMENTS.get(name)
        hint = f" (TRL's old PPOTrainer had): {remedy}" if remedy else "; see `help(PPOTrainer)`"
        raise TypeError(f"PPOTrainer has no argument `{name}`{hint}.")


def _check_processes(num_gpus: int, world_size: int) -> None:
    if num_gpus > 1:
        raise ValueError(
            f"One process sees {num_gpus} GPUs, which would mean `DataParallel`; start one process per GPU with "
            "`accelerate launch`, or choose one GPU with CUDA_VISIBLE_DEVICES=0."
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > world_size:
        raise ValueError(
            f"{started} processes were started, but the world size is {world_size}: each would train by itself. Set "
            "`use_cpu=True` if there is no GPU; otherwise start one process per GPU (`accelerate launch`)."
        )


def check_trainer_arguments(
    model: Any,
    reward_funcs: list,
    monitor_funcs: list,
    args: PPOConfig,
    train_dataset: Any,
    reward_processing_classes: list,
    optimizer: torch.optim.Optimizer | None,
    quantization_config: BitsAndBytesConfig | None,
    peft_config: PeftConfig | None,
) -> None:
    """Check the arguments of [`PPOTrainer`] before anything is loaded."""
    if not isinstance(args, PPOConfig):
        raise TypeError(f"`args` must be a `trl_ppo_ext.PPOConfig`, got {type(args).__name__}.")
    _check_processes(args.n_gpu, args.world_size)
    if uses_fsdp(args):
        check_fsdp(args, optimizer, quantization_config)
    if uses_deepspeed(args):
        names = ("deepspeed_plugin", "critic_learning_rate", "value_warmup_steps", "fp16", "normalize_values")
        check_deepspeed(*(getattr(args, name) for name in names))
    workers = args.dataloader_num_workers
    if workers > 1 and isinstance(train_dataset, IterableDataset):  # every worker would read all of it
        raise ValueError(f"`dataloader_num_workers` must be 0 or 1 for a streaming dataset, got {workers}.")
    if optimizer is not None and args.critic_learning_rate is not None:
        raise ValueError("`critic_learning_rate` needs the trainer's own optimizer; remove it, or `optimizers`.")
    check_model_arguments(model, args, quantization_config, peft_config)
    check_reward_arguments(reward_funcs, reward_processing_classes or None, args)
    if monitor_funcs:
        check_reward_arguments(monitor_funcs, None, args, weighted=False)
    if isinstance(train_dataset, dict):
        raise TypeError("`train_dataset` is a dict; pass one of its datasets, such as `dataset['train']`.")
    columns = getattr(train_dataset, "column_names", None)
    if columns:  # those of a stream may be unknown
        check_reward_columns([*reward_funcs, *monitor_funcs], columns, "`train_dataset`")


def load_tokenizer(
    model: Any, model_id: str, processing_class: Any, args: PPOConfig
) -> tuple[PreTrainedTokenizerBase, int | None]:
    """Load and check the policy's tokenizer, and read the model's context length, without loading weights."""
    if processing_class is None and not model_id:
        raise ValueError("`model` has no name to load a tokenizer from; pass one as `processing_class`.")
    if not isinstance(processing_class, PreTrainedTokenizerBase | None):
        raise TypeError(f"`processing_class` must be a tokenizer, got {type(processing_class).__name__}.")
    kwargs = hub_kwargs(args)
    tokenizer = processing_class or AutoTokenizer.from_pretrained(model_id, **kwargs)
    if isinstance(model, str):
        config, generation_config = AutoConfig.from_pretrained(model, **kwargs), None
        with suppress(OSError):  # a model need not have one
            generation_config = GenerationConfig.from_pretrained(model, **kwargs)
    else:
        config, generation_config = model.config, model.generation_config
    ensure_pad_token(tokenizer, stop_token_ids(tokenizer, generation_config))
    return tokenizer, getattr(config.get_text_config(), "max_position_embeddings", None)
