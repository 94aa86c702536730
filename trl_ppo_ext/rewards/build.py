"""Build rewards from the arguments of a trainer; functions have TRL's signature."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

from datasets import Dataset
from peft import PeftModel
from pyarrow import compute
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..config import PPOConfig
from ..data import PROMPT_IDS, REWARD_ARGUMENTS, TOKEN_COLUMNS
from ..modeling import ActorCritic
from ..modeling.loading import load_config
from .model import AdapterReward, ClassifierReward, RewardAdapter, SequenceScorer, checked_label, load_classifier
from .scoring import FunctionReward, Reward, RewardError, function_name

logger = logging.get_logger(__name__)

RewardFunc: TypeAlias = str | PreTrainedModel | RewardAdapter | Reward | Callable[..., Any]


def check_signature(function: Callable, columns: Iterable[str] | None = None, dataset: str = "the dataset") -> None:
    """Check that a function can be called with these columns, or with some columns if there are none."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    available = "" if columns is None else f" ({', '.join(f'`{name}`' for name in columns) or 'none'})"
    if columns is None:
        collects = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = signature.parameters.values()
        columns = [x.name for x in parameters if x.default is x.empty and x.kind not in collects]
    try:
        signature.bind(**dict.fromkeys([*REWARD_ARGUMENTS, *columns]))
    except TypeError as error:
        cause = str(error).replace("'", "`")  # Python quotes the parameter
        raise ValueError(
            f"The reward function `{function_name(function)}` cannot be called: {cause}. It gets "
            f"{', '.join(REWARD_ARGUMENTS)} and the other columns of {dataset}{available}, all by keyword; end its "
            "parameters with `**kwargs`, and add a missing column, or rename the parameter."
        ) from None


def _is_reward(entry: Any) -> bool:
    return hasattr(entry, "name") and callable(getattr(entry, "score", None)) and not isinstance(entry, nn.Module)


def _is_function(entry: Any) -> bool:
    return callable(entry) and not isinstance(entry, nn.Module | RewardAdapter) and not _is_reward(entry)


def no_reward(completions: list, **kwargs: Any) -> list[float]:
    """Reward of a run that only distills its reference."""
    return [0.0] * len(completions)


def check_reward_arguments(
    reward_funcs: list, monitor_funcs: list, processing_classes: Any, args: PPOConfig, of_environments: bool = False
) -> None:
    """Check rewards before weights are loaded; there may be none if environments, or a knowing reference, teach."""
    if not (reward_funcs or of_environments or args.reference_prompt):
        raise ValueError("`reward_funcs` is empty; pass a reward, or an environment with `get_reward` or `step`.")
    rewards, label = [*reward_funcs, *monitor_funcs], args.reward_label
    models = (str, RewardAdapter, PreTrainedModel, PeftModel)
    if label is not None and args.critic_init is None and not any(isinstance(reward, models) for reward in rewards):
        raise ValueError(f"`reward_label={label}` needs a reward model in `reward_funcs`; omit it.")
    for reward in rewards:
        if _is_function(reward):
            check_signature(reward)
        elif not (isinstance(reward, models) or _is_reward(reward)):
            raise TypeError(
                "A reward must be a function, a sequence classifier (id, path or model), a `RewardAdapter`, or an "
                f"object with `name` and `score` such as `Judge`, got {reward!r}."
            )
    for name, values in (("reward_processing_classes", processing_classes), ("reward_weights", args.reward_weights)):
        if values is not None and len(values) != len(reward_funcs):
            raise ValueError(f"`{name}` has {len(values)} entries for {len(reward_funcs)} rewards; they must match.")
    for model_id in (reward for reward in rewards if isinstance(reward, str)):
        config = load_config("reward_funcs", model_id, {"trust_remote_code": args.trust_remote_code})
        checked_label(model_id, config.num_labels, label, config)


def check_reward_columns(reward_funcs: Sequence[Any], dataset: Any, name: str, others: Sequence[str] = ()) -> None:
    """Check that functions can be called with the columns of a dataset, or of each one in a mapping, and others."""
    if isinstance(dataset, dict):
        for key, entry in dataset.items():
            check_reward_columns(reward_funcs, entry, f"{name}[{key!r}]", others)
        return
    columns = getattr(dataset, "column_names", None)  # those of a stream may be unknown
    passed = [column for column in columns or () if column not in {"prompt", *TOKEN_COLUMNS}]
    for function in filter(_is_function, reward_funcs if columns else ()):
        check_signature(function, [*passed, *others], f"`{name}`")


def check_contexts(rewards: Sequence[Reward], dataset: Any, max_completion_length: int) -> None:
    """Check that the longest prompt fits into the context of every reward model; a stream is not read."""
    scorers = [reward for reward in rewards if isinstance(reward, SequenceScorer)]
    if not scorers or not isinstance(dataset, Dataset):
        return
    lengths = compute.list_value_length(dataset.with_format("arrow")[PROMPT_IDS][:])
    prompt = dataset[int(lengths.to_numpy().argmax())]["prompt"]
    empty: Any = "" if isinstance(prompt, str) else [{"role": "assistant", "content": ""}]
    for scorer in scorers:
        length, context = len(scorer.encode([prompt], [empty])[0]), scorer.context_length
        problem = f"The longest prompt has {length} tokens; the reward model `{scorer.name}` takes {context}"
        remedy = "Set `max_prompt_length` with `overlong_prompts='drop'`, or lower `max_completion_length`."
        if length >= context:
            raise RewardError(f"{problem}. {remedy}")
        if length + max_completion_length > context:
            logger.warning("%s, so a completion of %d would not fit. %s", problem, max_completion_length, remedy)


def build_rewards(
    reward_funcs: Sequence[RewardFunc],
    processing_classes: Sequence[PreTrainedTokenizerBase | None] | None,
    actor_critic: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
) -> list[Reward]:
    """Turn the rewards that a user passed into [`Reward`]s, and load models and adapters."""
    batch_size, label, trusted = args.per_device_reward_batch_size, args.reward_label, args.trust_remote_code
    offloads, device = args.offload_rewards, args.device
    rewards: list[Reward] = []
    for entry, own_tokenizer in zip(reward_funcs, processing_classes or [None] * len(reward_funcs)):
        if isinstance(entry, str):
            entry = load_classifier(entry, actor_critic.dtype, args.reward_quantization, device, trusted)
        if isinstance(entry, PreTrainedModel | PeftModel):
            if not (offloads or getattr(entry, "is_quantized", False)):
                entry = entry.to(device)
            place = device if offloads else None
            rewards.append(ClassifierReward(entry, own_tokenizer, batch_size, label, trusted, place))
        elif isinstance(entry, RewardAdapter):
            rewards.append(AdapterReward(entry, actor_critic, tokenizer, batch_size, label))
        elif _is_reward(entry):
            rewards.append(cast(Reward, entry))
        else:
            rewards.append(FunctionReward(cast(Callable, entry), args.reward_timeout))
    for index, reward in enumerate(rewards):
        while reward.name in [other.name for other in rewards[:index]]:  # metrics need distinct names
            reward.name = f"{reward.name}_{index}"
    return rewards
