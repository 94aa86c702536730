"""Build rewards from the arguments of a trainer; functions have TRL's signature."""

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias, cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..config import PPOConfig
from ..data import REWARD_ARGUMENTS, TOKEN_COLUMNS
from ..modeling import ActorCritic
from ..modeling.loading import ADAPTER_CONFIG, load_config
from .model import (
    AdapterReward,
    ClassifierReward,
    RewardAdapter,
    SequenceScorer,
    checked_label,
    classifier_of,
    load_classifier,
)
from .prefixes import RewardLevel
from .process import ProcessReward, ProcessScorer, is_process_model
from .scoring import FunctionReward, Reward, function_name

logger = logging.get_logger(__name__)

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of their names
MODELS = (str, RewardAdapter, ProcessReward, PreTrainedModel, PeftModel)
RewardFunc: TypeAlias = (
    str | PreTrainedModel | RewardAdapter | ProcessReward | Reward | Callable[..., Any]
)


def check_signature(
    function: Callable, columns: Iterable[str], dataset: str = "the dataset"
) -> None:
    """Check that a function can be called with these columns."""
    try:
        # a wrapper may pass what the function that it wraps needs
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    try:
        signature.bind(**dict.fromkeys(list(REWARD_ARGUMENTS) + list(columns)))
    except TypeError as error:
        cause = str(error).replace("'", "`")  # Python quotes the parameter
        available = ", ".join(f"`{name}`" for name in columns) or "none"
        raise ValueError(
            f"The reward function `{function_name(function)}` cannot be called: {cause}. It gets "
            f"{', '.join(REWARD_ARGUMENTS)} and the other columns of {dataset} ({available}), all "
            "by keyword; end its parameters with `**kwargs`, and add a missing column, or rename "
            "the parameter."
        ) from None


def _is_reward(entry: Any) -> bool:
    return (
        hasattr(entry, "name")
        and callable(getattr(entry, "score", None))
        and not isinstance(entry, nn.Module)
    )


def is_model(entry: Any) -> bool:
    """Check if a reward that a user passed is a model, or names one."""
    return isinstance(entry, MODELS)


def is_function(entry: Any) -> bool:
    """Check if a reward that a user passed is a function."""
    has_weights = isinstance(entry, nn.Module | RewardAdapter | ProcessReward)
    return callable(entry) and not has_weights and not _is_reward(entry)


def no_reward(completions: list, **kwargs: Any) -> list[list]:
    """Reward of a run that only distills its reference: nowhere, so that after a limit a value may
    stand for the rest."""
    return [[] for _ in completions]


def check_reward_arguments(
    reward_funcs: list,
    monitor_funcs: list,
    processing_classes: Any,
    args: PPOConfig,
    of_environments: bool = False,
) -> None:
    """Check rewards before weights are loaded; there may be none if environments, or a knowing
    reference, teach."""
    if not (reward_funcs or of_environments or args.reference_prompt):
        raise ValueError(
            "`reward_funcs` is empty; pass a reward, or an environment with `get_reward` or `step`."
        )
    rewards = reward_funcs + monitor_funcs
    for reward in rewards:
        if not (is_function(reward) or is_model(reward) or _is_reward(reward)):
            raise TypeError(
                "A reward must be a function, a classifier (id, path or model), a "
                "`RewardAdapter`, a `ProcessReward`, or an object with `name` and `score` such as "
                f"`Judge`, got {reward!r}."
            )
        if isinstance(reward, PreTrainedModel | PeftModel):
            _check_loaded(reward)
    for name, values in (
        ("reward_processing_classes", processing_classes),
        ("reward_weights", args.reward_weights),
    ):
        if values is not None and len(values) != len(reward_funcs):
            raise ValueError(
                f"`{name}` has {len(values)} entries for {len(reward_funcs)} rewards; they must "
                "match."
            )
    if isinstance(args.reward_level, list) and len(args.reward_level) != len(reward_funcs):
        raise ValueError(
            f"`reward_level` has {len(args.reward_level)} entries for {len(reward_funcs)} rewards; "
            "give one for each, and None for those without a model."
        )
    _check_labels(reward_funcs, monitor_funcs, args)


def _check_loaded(model: PreTrainedModel | PeftModel) -> None:
    """Raise if a loaded model would be read as a sequence classifier, and is none."""
    kind = type(classifier_of(model)).__name__
    if kind.endswith("ForTokenClassification"):
        raise ValueError(
            f"The loaded {kind} in the rewards classifies tokens, and it is not known where a step "
            "ends; pass its id or path, or `ProcessReward(path)`."
        )
    if kind.endswith(LANGUAGE_MODELS):
        raise ValueError(
            f"The loaded {kind} in the rewards is a language model, which has no scores; pass a "
            "sequence classifier, or let a server of the model rate completions, with `Judge`."
        )


def _check_labels(reward_funcs: list, monitor_funcs: list, args: PPOConfig) -> None:
    """Check `reward_label` by the configs of the models, before weights are loaded; each label
    must be used."""
    of_rewards, of_monitors = reward_labels(args.reward_label, reward_funcs, monitor_funcs)
    is_list = isinstance(args.reward_label, list)
    uses_label = args.reward_label in (None, 0) or args.critic_init is not None
    for reward, label in zip(reward_funcs + monitor_funcs, of_rewards + of_monitors):
        num_labels = 1
        if isinstance(reward, str | ProcessReward):
            if isinstance(reward, str):
                model_id = reward
            else:
                model_id = reward.model
            config = reward_config(model_id, args)
            num_labels = config.num_labels
            if label is None and num_labels != 1 and is_language_model(config):
                raise ValueError(
                    f"The reward `{model_id}` is a language model, which has no scores; name a "
                    "sequence classifier, e.g. one trained with TRL's `RewardTrainer`, or let a "
                    "server of the model rate completions, with `Judge`."
                )
            has_default = label is None and is_process_model(config) and num_labels == 2
            if not has_default:
                checked_label(model_id, num_labels, label, config)
        elif isinstance(reward, PreTrainedModel | PeftModel):
            num_labels = reward.config.num_labels
        if (
            is_list
            and label not in (None, 0)
            and num_labels == 1
            and not isinstance(reward, RewardAdapter)
        ):
            raise ValueError(
                f"`reward_label` has {label!r} for a reward with one output; give None for it."
            )
        uses_label = uses_label or is_list or num_labels > 1 or isinstance(reward, RewardAdapter)
    if not uses_label:
        raise ValueError(
            f"`reward_label={args.reward_label}` needs a reward model with several outputs in "
            "`reward_funcs`; omit it."
        )


def is_language_model(config: Any) -> bool:
    """Whether a model of this config predicts tokens."""
    architectures = getattr(config, "architectures", None) or []
    return any(name.endswith("ForCausalLM") for name in architectures)


def reward_config(model_id: str, args: PPOConfig) -> Any:
    """Load the config of a reward model."""
    try:
        return load_config("reward_funcs", model_id, {"trust_remote_code": args.trust_remote_code})
    except ValueError as error:
        if os.path.isfile(os.path.join(model_id, ADAPTER_CONFIG)):
            raise ValueError(
                f"The reward model `{model_id}` is a saved adapter; pass "
                f"`RewardAdapter({model_id!r})`, in a config file adapter:{model_id}, if its base "
                "is the policy's. Otherwise merge it into its base."
            ) from None
        if not model_id.isidentifier():
            raise
        # config files of open-r1 name functions of their own script
        raise ValueError(
            f"{error} If `{model_id}` is a function, pass it, or in a config file its dotted path, "
            f"such as my_rewards.{model_id}, or the name of one of trl.rewards, such as "
            "accuracy_reward."
        ) from None


def reward_labels(
    label: Any, reward_funcs: Sequence[Any], monitor_funcs: Sequence[Any]
) -> tuple[list, list]:
    """Labels of the rewards, and of the monitored ones, from a list, or from one for all models
    with several."""
    count = len(reward_funcs)
    total = count + len(monitor_funcs)
    if not isinstance(label, list):
        return [label] * count, [label] * len(monitor_funcs)
    if len(label) not in (count, total):
        raise ValueError(
            f"`reward_label` has {len(label)} entries for {count} rewards and {total - count} "
            "monitored ones; give one for each, and None for those without labels."
        )
    labels = list(label) + [None] * (total - len(label))
    return labels[:count], labels[count:]


def check_reward_columns(
    reward_funcs: Sequence[Any], dataset: Any, name: str, others: Sequence[str] = ()
) -> None:
    """Check that functions can be called with the columns of a dataset, or of each one in a
    mapping, and others."""
    if isinstance(dataset, dict):
        for key, entry in dataset.items():
            check_reward_columns(reward_funcs, entry, f"{name}[{key!r}]", others)
        return
    columns = getattr(dataset, "column_names", None)  # those of a stream may be unknown
    passed = [column for column in columns or () if column not in {"prompt"} | TOKEN_COLUMNS]
    for function in filter(is_function, reward_funcs if columns else ()):
        check_signature(function, passed + list(others), f"`{name}`")


def set_reward_levels(
    rewards: Sequence[Reward], args: PPOConfig, policy_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Let reward models pay where `reward_level` says."""
    models = [reward for reward in rewards if isinstance(reward, SequenceScorer)]
    causal = [reward for reward in models if reward.is_causal]
    levels: list[str | None]
    if isinstance(args.reward_level, list):
        levels = list(args.reward_level)
    else:
        levels = [args.reward_level if reward in models else None for reward in rewards]
    # rewards of environments, which come last, have no level
    levels += [None] * (len(rewards) - len(levels))
    # a critic that begins with a score predicts scores at the end
    default = "end" if args.why_paid_at_end or args.critic_init else "token"
    for reward, level in zip(rewards, levels):
        if level is None and reward in causal:
            level = default
        if level in (None, "end"):
            if isinstance(reward, SequenceScorer):  # an earlier run may have set another
                reward.pay_at("end", policy_tokenizer)
            continue
        if reward not in causal:
            raise ValueError(
                f"`reward_level={level!r}` needs a causal reward model, which scores every prefix "
                f"of a completion, got the reward `{reward.name}`; set 'end' for it."
            )
        cast(SequenceScorer, reward).pay_at(cast(RewardLevel, level), policy_tokenizer)
    if args.reward_level in ("token", "turn") and not models:
        raise ValueError(
            f"`reward_level={args.reward_level!r}` needs a causal reward model in `reward_funcs`; "
            "omit it."
        )


def load_rewards(
    reward_funcs: Sequence[RewardFunc],
    monitor_funcs: Sequence[RewardFunc],
    of_environments: Sequence[Reward],
    processing_classes: Sequence[PreTrainedTokenizerBase | None],
    actor_critic: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
) -> tuple[list[Reward], list[Reward]]:
    """Load the rewards of a run, those of its environments last, and its monitored ones."""
    of_rewards, of_monitors = reward_labels(args.reward_label, reward_funcs, monitor_funcs)
    rewards = build_rewards(
        [*reward_funcs, *of_environments],
        processing_classes,
        actor_critic,
        tokenizer,
        args,
        of_rewards,
    )
    set_reward_levels(rewards, args, tokenizer)
    monitors = build_rewards(monitor_funcs, (), actor_critic, tokenizer, args, of_monitors)
    has_model = any(isinstance(reward, SequenceScorer | ProcessScorer) for reward in rewards)
    if has_model and not args.uses_reference and args.process_index == 0:
        logger.warning(
            "`kl_coef` is 0, and a reward model can be hacked: 0.05 keeps the policy near its base."
        )
    return rewards, monitors


def build_rewards(
    reward_funcs: Sequence[RewardFunc],
    processing_classes: Sequence[PreTrainedTokenizerBase | None],
    actor_critic: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    labels: Sequence[int | str | None],
) -> list[Reward]:
    """Turn the rewards that a user passed into [`Reward`]s with distinct names, and load models
    and adapters."""
    rewards = [
        _build_reward(entry, own_tokenizer, label, actor_critic, tokenizer, args)
        # rewards of environments, which come last, have neither
        for entry, own_tokenizer, label in zip_longest(reward_funcs, processing_classes, labels)
    ]
    return with_distinct_names(rewards)


def with_distinct_names(rewards: Sequence[Reward]) -> list[Reward]:
    """The rewards, under names that metrics can tell apart."""
    named: list[Reward] = []
    for index, reward in enumerate(rewards):
        names = {other.name for other in named}
        if any(reward is other for other in named):
            reward = copy.copy(reward)
        while reward.name in names:
            reward.name = f"{reward.name}_{index}"
        named.append(reward)
    return named


def _build_reward(
    entry: RewardFunc,
    own_tokenizer: PreTrainedTokenizerBase | None,
    label: int | str | None,
    actor_critic: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
) -> Reward:
    """Turn one reward into a [`Reward`], and load its model or adapter."""
    batch_size = args.per_device_reward_batch_size
    trusted = args.trust_remote_code

    def load(model_id: str, of_tokens: bool = False) -> PreTrainedModel:
        quantize = args.reward_quantization
        return load_classifier(
            model_id, actor_critic.dtype, quantize, args.device, trusted, of_tokens
        )

    if isinstance(entry, str):
        if is_process_model(reward_config(entry, args)):
            entry = ProcessReward(entry)
        else:
            entry = load(entry)
    if isinstance(entry, PreTrainedModel | PeftModel):
        if not getattr(entry, "is_quantized", False):
            entry = entry.to(args.device)
        return ClassifierReward(entry, own_tokenizer, batch_size, label, trusted)
    if isinstance(entry, ProcessReward):
        model = load(entry.model, of_tokens=True)
        return ProcessScorer(entry, model, tokenizer, own_tokenizer, batch_size, label, trusted)
    if isinstance(entry, RewardAdapter):
        return AdapterReward(entry, actor_critic, tokenizer, batch_size, label, own_tokenizer)
    if _is_reward(entry):
        return cast(Reward, entry)
    return FunctionReward(cast(Callable, entry))
