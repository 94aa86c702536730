"""Rewards: functions, sequence classifiers, adapters on the shared base, judges and remote rewards."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, TypeAlias, cast

from peft import PeftModel
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.prompts import PROMPT_IDS
from ..modeling import ActorCritic
from .adapter import AdapterReward, RewardAdapter
from .base import Reward, RewardError, Scores, ScoringBatch, combine, read_scores
from .function import FunctionReward, check_signature
from .judge import Judge, JudgeError
from .model import ClassifierReward, checked_label, load_classifier
from .remote import RemoteReward, RemoteRewardError
from .scoring import Scored, monitor, score_all
from .shaping import RewardShaping, RunningMoments

RewardFunc: TypeAlias = str | PreTrainedModel | RewardAdapter | Reward | Callable[..., Any]


def check_reward_arguments(reward_funcs: Any, processing_classes: Any, args: Any, weighted: bool = True) -> None:
    """Check rewards before weights are loaded."""
    weights = args.reward_weights if weighted else None
    if not reward_funcs:
        raise ValueError(
            "`reward_funcs` is empty; pass a function, a sequence classifier (id, path or model), or a list of them."
        )
    for reward in reward_funcs:
        if not (isinstance(reward, str | RewardAdapter | PeftModel) or _is_function(reward) or _is_reward(reward)):
            raise TypeError(
                "A reward must be a function, a sequence classifier (id, path or model), a `RewardAdapter`, or an "
                f"object with `name` and `score` such as `Judge`, got {reward!r}."
            )
    for function in _functions(reward_funcs):
        check_signature(function)
    for name, values in (("reward_processing_classes", processing_classes), ("args.reward_weights", weights)):
        if values is not None and len(values) != len(reward_funcs):
            raise ValueError(f"`{name}` has {len(values)} entries for {len(reward_funcs)} rewards; give one for each.")
    for model_id in (reward for reward in reward_funcs if isinstance(reward, str)):
        config = AutoConfig.from_pretrained(model_id, trust_remote_code=args.trust_remote_code)
        checked_label(model_id, config.num_labels, args.reward_label)


def check_reward_columns(reward_funcs: Iterable[Any], columns: Iterable[str], dataset: str) -> None:
    """Check that functions can be called with a dataset's columns."""
    given = [name for name in columns if name not in ("prompt", PROMPT_IDS)]
    for function in _functions(reward_funcs):
        check_signature(function, given, dataset)


def _functions(reward_funcs: Iterable[Any]) -> list[Callable]:
    other = str | PreTrainedModel | PeftModel | RewardAdapter
    return [reward for reward in reward_funcs if not (isinstance(reward, other) or _is_reward(reward))]


def _is_function(entry: Any) -> bool:
    return callable(entry) and (isinstance(entry, PreTrainedModel) or not isinstance(entry, nn.Module))


def _is_reward(entry: Any) -> bool:
    return hasattr(entry, "name") and callable(getattr(entry, "score", None)) and not isinstance(entry, nn.Module)


def build_rewards(
    reward_funcs: Sequence[RewardFunc],
    processing_classes: Sequence[PreTrainedTokenizerBase | None] | None,
    args: Any,
    actor_critic: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Reward]:
    """Turn what a user passed into rewards, loading models and adapters that are named."""
    rewards: list[Reward] = []
    device, size, label = args.device, args.per_device_reward_batch_size, args.reward_label
    for entry, own_tokenizer in zip(reward_funcs, processing_classes or [None] * len(reward_funcs)):
        if isinstance(entry, str):
            entry = load_classifier(
                entry, actor_critic.dtype, args.reward_quantization, device, args.trust_remote_code, label
            )
        if isinstance(entry, PreTrainedModel | PeftModel):
            if not getattr(entry, "is_quantized", False):
                entry = entry.to("cpu" if args.offload_rewards else device)
            elif args.offload_rewards and getattr(entry, "is_loaded_in_8bit", False):
                raise ValueError(
                    "`offload_rewards=True` moves reward models, and one in int8 cannot be moved; use "
                    "`reward_quantization='nf4'`, or leave `offload_rewards` False."
                )
            rewards.append(
                ClassifierReward(
                    entry,
                    own_tokenizer,
                    size,
                    label,
                    args.trust_remote_code,
                    device=device if args.offload_rewards else None,
                )
            )
        elif isinstance(entry, RewardAdapter):
            rewards.append(AdapterReward(entry, actor_critic, tokenizer, size, label))
        elif _is_reward(entry):
            rewards.append(cast(Reward, entry))
        else:
            rewards.append(FunctionReward(cast(Callable, entry)))
    for index, reward in enumerate(rewards):
        taken = {other.name for other in rewards if other is not reward}
        if reward.name in {other.name for other in rewards[:index]}:  # metrics are told apart by name
            numbers = (number for number in count(index) if f"{reward.name}_{number}" not in taken)
            reward.name = f"{reward.name}_{next(numbers)}"
    return rewards


__all__ = [
    "AdapterReward",
    "ClassifierReward",
    "FunctionReward",
    "Judge",
    "JudgeError",
    "RemoteReward",
    "RemoteRewardError",
    "Reward",
    "RewardAdapter",
    "RewardError",
    "RewardFunc",
    "RewardShaping",
    "RunningMoments",
    "Scored",
    "Scores",
    "ScoringBatch",
    "build_rewards",
    "check_reward_arguments",
    "check_reward_columns",
    "combine",
    "load_classifier",
    "monitor",
    "read_scores",
    "score_all",
]
