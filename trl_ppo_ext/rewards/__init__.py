"""Rewards: functions and sequence classifiers."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .base import Reward, RewardError, ScoringBatch, checked_scores, combine
from .function import FunctionReward
from .model import ClassifierReward, load_classifier

RewardFunc: TypeAlias = str | PreTrainedModel | Callable[..., Any]


def check_reward_arguments(reward_funcs: Any, processing_classes: Any, weights: Sequence[float] | None) -> None:
    """Check rewards before anything is loaded.

    Args:
        reward_funcs (`list`): Strings, classifiers and functions.
        processing_classes (`list`, *optional*): Tokenizers, one for each reward.
        weights (`list[float]`, *optional*): Weights, one for each reward.

    Raises:
        `TypeError`: If one is neither a string nor a classifier nor a function.
        `ValueError`: If there is none, or the lengths differ.
    """
    if not reward_funcs:
        raise ValueError(
            "`reward_funcs` is empty; pass a function, a sequence classifier (id, path or model), or a list of them."
        )
    for reward in reward_funcs:
        if not isinstance(reward, str | PreTrainedModel) and not callable(reward):
            raise TypeError(
                f"A reward must be a function, or a sequence classifier (id, path or model), got {reward!r}."
            )
    for name, values in (("reward_processing_classes", processing_classes), ("args.reward_weights", weights)):
        if values is not None and len(values) != len(reward_funcs):
            raise ValueError(f"`{name}` has {len(values)} entries for {len(reward_funcs)} rewards; give one for each.")


def build_rewards(
    reward_funcs: Sequence[RewardFunc],
    processing_classes: Sequence[PreTrainedTokenizerBase | None] | None,
    args: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Reward]:
    """Turn what a user passed into rewards, loading models that are named.

    Args:
        reward_funcs (`list`): Strings, classifiers and functions.
        processing_classes (`list`, *optional*): Tokenizers of the classifiers.
        args ([`PPOConfig`]): The run's config.
        dtype (`torch.dtype`): The policy's compute dtype.
        device (`torch.device`): This process's device.

    Returns:
        `list[Reward]`: The rewards, under names that differ.
    """
    rewards: list[Reward] = []
    for entry, tokenizer in zip(reward_funcs, processing_classes or [None] * len(reward_funcs)):
        if isinstance(entry, str):
            entry = load_classifier(entry, dtype, args.reward_quantization, device, args.trust_remote_code)
        if isinstance(entry, PreTrainedModel):
            if not getattr(entry, "is_quantized", False):
                entry = entry.to(device)
            rewards.append(ClassifierReward(entry, tokenizer, args.per_device_reward_batch_size))
        else:
            rewards.append(FunctionReward(entry))
    for index, reward in enumerate(rewards):
        taken = {other.name for other in rewards if other is not reward}
        if reward.name in {other.name for other in rewards[:index]}:  # metrics are told apart by name
            numbers = (number for number in count(index) if f"{reward.name}_{number}" not in taken)
            reward.name = f"{reward.name}_{next(numbers)}"
    return rewards


__all__ = [
    "ClassifierReward",
    "FunctionReward",
    "Reward",
    "RewardError",
    "RewardFunc",
    "ScoringBatch",
    "build_rewards",
    "check_reward_arguments",
    "checked_scores",
    "combine",
    "load_classifier",
]
