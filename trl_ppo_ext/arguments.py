"""Checks of what is passed to [`PPOTrainer`], before anything is loaded."""

from typing import Any

from peft import PeftConfig
from transformers import BitsAndBytesConfig

from .config import PPOConfig
from .modeling import check_model_arguments
from .rewards import check_reward_arguments

# arguments of the PPOTrainer that TRL had until 1.12, and what they have become
REMOVED_ARGUMENTS = {
    "reward_model": "pass it in `reward_funcs`",
    "ref_model": "leave it out: the reference is the base model with the adapter switched off",
    "value_model": "leave it out: the critic is a value head on the policy's own trunk",
    "data_collator": "leave it out: prompts are tokenised and padded by the trainer",
    "config": "it is called `args` now",
    "tokenizer": "it is called `processing_class` now",
    "policy": "it is called `model` now",
}


def as_list(value: Any) -> list:
    """One or several as a list.

    Args:
        value (`Any`): A single entry, a list or tuple, or `None`.

    Returns:
        `list`: The list, empty for `None`.
    """
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def check_trainer_arguments(
    model: Any,
    reward_funcs: list,
    args: PPOConfig,
    train_dataset: Any,
    reward_processing_classes: list,
    quantization_config: BitsAndBytesConfig | None,
    peft_config: PeftConfig | None,
    unknown: dict[str, Any],
) -> None:
    """Check the arguments of [`PPOTrainer`].

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`): The base model.
        reward_funcs (`list`): The rewards.
        args ([`PPOConfig`]): The run's config.
        train_dataset (`Dataset` or `IterableDataset`): The prompts.
        reward_processing_classes (`list`, *optional*): Tokenizers of the rewards.
        quantization_config (`BitsAndBytesConfig`, *optional*): Quantisation of the base.
        peft_config (`PeftConfig`, *optional*): Config of the adapter.
        unknown (`dict`): Arguments that there are none of.

    Raises:
        `TypeError` or `ValueError`: Says what was given, what was needed, and what to do.
    """
    for name in unknown:
        remedy = REMOVED_ARGUMENTS.get(name)
        if remedy:
            raise TypeError(f"PPOTrainer has no argument `{name}` (TRL's old PPOTrainer had): {remedy}.")
        raise TypeError(f"PPOTrainer has no argument `{name}`.")
    if not isinstance(args, PPOConfig):
        raise TypeError(f"`args` must be a `trl_ppo_ext.PPOConfig`, got {type(args).__name__}.")
    if args.n_gpu > 1:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs, which would mean `DataParallel`; start one process for each with "
            "`accelerate launch`, or choose one with CUDA_VISIBLE_DEVICES=0."
        )
    check_model_arguments(model, args, quantization_config, peft_config)
    check_reward_arguments(reward_funcs, reward_processing_classes or None, args.reward_weights)
    if train_dataset is not None and isinstance(train_dataset, dict):
        raise TypeError("`train_dataset` is a dict; pass one of its datasets, such as `dataset['train']`.")
