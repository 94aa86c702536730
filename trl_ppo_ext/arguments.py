"""Checks of the arguments of [`PPOTrainer`], and its prompts, before weights are loaded."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from datasets import IterableDataset
from peft import PeftConfig
from transformers import (
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import has_file, logging
from trl import is_conversational

from .config import EARLIER_NAME, PRIVILEGED_STATE, PPOConfig
from .data import tokenize_prompts, with_prompts
from .distributed import check_deepspeed, check_fsdp, uses_fsdp
from .episodes import Environments, ensure_pad_token, stop_token_ids
from .episodes.environments import privileged_state
from .modeling.loading import check_model_arguments, hub_kwargs, load_config
from .rewards import check_reward_arguments, check_reward_columns
from .text import end_of_turn
from .trl_names import TABLES

logger = logging.get_logger(__name__)

OF_TURNS = "max_tool_calling_iterations", "environment_timeout"  # which nothing else reads


def as_list(value: Any) -> list:
    """Turn one value, several or none into a list."""
    if isinstance(value, list | tuple | set):
        return list(value)
    return [value] if value is not None else []


def check_unknown_arguments(unknown: dict[str, Any]) -> None:
    """Raise for an argument that PPOTrainer does not have, with what replaces it."""
    for name in unknown:
        remedy = TABLES["arguments"].get(name)
        if remedy:
            hint = f" (TRL's old PPOTrainer had): {remedy}"
        else:
            hint = "; see `help(PPOTrainer)`"
        raise TypeError(f"PPOTrainer has no argument `{name}`{hint}.")


def check_methods(trainer_class: type) -> None:
    """Raise if a subclass overrides what only GRPOTrainer calls: it would train without it."""
    for name, remedy in TABLES["methods"].items():
        owner = next((x for x in trainer_class.__mro__ if name in vars(x)), None)
        if owner is not None and not owner.__module__.startswith("transformers."):
            raise TypeError(
                f"{owner.__name__} defines `{name}`, which GRPOTrainer calls and PPOTrainer does "
                f"not; use {remedy}, or rename a method of your own."
            )


def without_rewards(args: PPOConfig, environments: Environments) -> PPOConfig:
    """Settings of a run that names no reward; tools may pay all the same."""
    settled = args.without_rewards()
    if environments.kinds and settled is not args and args.process_index == 0:
        logger.warning(
            "No reward is named, so there is no critic. If the tools pay, by `StepResult`, set "
            "`critic='side'`."
        )
    return settled


def settle_trainer_arguments(
    model: Any,
    reward_funcs: list,
    monitor_funcs: list,
    args: PPOConfig,
    train_dataset: Any,
    reward_processing_classes: list,
    optimizer: torch.optim.Optimizer | None,
    quantization_config: BitsAndBytesConfig | None,
    peft_config: PeftConfig | str | None,
    eval_dataset: Any,
    environments: Environments,
    curriculum: Callable | None = None,
    critic_factory: Callable | None = None,
) -> None:
    """Check the arguments of [`PPOTrainer`] before anything is loaded, and set what they imply."""
    if not isinstance(args, PPOConfig):
        raise TypeError(f"`args` must be a `trl_ppo_ext.PPOConfig`, got {type(args).__name__}.")
    _check_processes(args, optimizer, quantization_config)
    _read_rows_in_this_process(args)
    check_model_arguments(model, args, quantization_config, peft_config)
    _check_critic_arguments(args, optimizer, critic_factory)
    check_reward_arguments(
        reward_funcs,
        monitor_funcs,
        reward_processing_classes or None,
        args,
        environments.give_rewards,
    )
    _check_sampling(args, environments)
    _check_prompts_of_roles(args, environments)
    _check_datasets(args, train_dataset, eval_dataset, curriculum)
    if environments.rollout_func is None:  # it may return columns
        if environments.has_instances:
            others = ["environments"]
        else:
            others = []
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            check_reward_columns(reward_funcs + monitor_funcs, dataset, name, others)


def _check_processes(
    args: PPOConfig,
    optimizer: torch.optim.Optimizer | None,
    quantization_config: BitsAndBytesConfig | None,
) -> None:
    """Raise if the processes that were started cannot train together."""
    if args.n_gpu > 1:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs, which would mean `DataParallel`; start one "
            "process per GPU with `accelerate launch`, or set CUDA_VISIBLE_DEVICES=0."
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > args.world_size:
        raise ValueError(
            f"{started} processes were started, but the world size is {args.world_size}; set "
            "`use_cpu=True` without GPUs, or start one per GPU (`accelerate launch`)."
        )
    if uses_fsdp(args):
        check_fsdp(args, optimizer, quantization_config)
    if args.uses_deepspeed:
        check_deepspeed(args)
    if args.fp16 and (uses_fsdp(args) or args.uses_deepspeed):
        raise ValueError("`fp16=True` is not supported with FSDP and DeepSpeed; use `bf16`.")


def _read_rows_in_this_process(args: PPOConfig) -> None:
    """Turn data workers off: they would pass on row numbers, and if they persist, a resumed run
    would draw other random numbers."""
    args.dataloader_num_workers = 0
    args.dataloader_persistent_workers = False
    args.dataloader_prefetch_factor = None
    args.dataloader_multiprocessing_context = None


def _check_critic_arguments(
    args: PPOConfig, optimizer: torch.optim.Optimizer | None, critic_factory: Callable | None
) -> None:
    """Raise for settings of the critic that arguments of the trainer replace."""
    if optimizer is not None and args.critic_learning_rate is not None:
        raise ValueError(
            "`critic_learning_rate` needs the trainer's own optimizer; remove it, or `optimizers`."
        )
    if critic_factory is not None and (args.critic != "side" or args.critic_init is not None):
        raise ValueError(
            "`critic_factory` builds the critic, so `critic` and `critic_init` must have their "
            f"defaults, got {args.critic!r} and {args.critic_init!r}; remove them, and settings "
            "that need no critic."
        )


def _check_sampling(args: PPOConfig, environments: Environments) -> None:
    """Raise if the sampler cannot serve this model, or these episodes."""
    if args.generation_backend == "vllm":
        is_zero3 = args.uses_deepspeed and args.deepspeed_plugin.zero_stage == 3
        if uses_fsdp(args) or is_zero3:
            raise ValueError(
                "`generation_backend='vllm'` is not supported with FSDP or ZeRO-3, which shard "
                "the adapter that vLLM loads; use DDP, or ZeRO-1 or 2."
            )
        if environments.rollout_func is not None:
            raise ValueError(
                "`rollout_func` samples by itself; remove it, or `generation_backend='vllm'`."
            )
    if args.vllm_options.overlap_rollouts and environments:
        raise ValueError(
            "`vllm_kwargs['overlap_rollouts']` does not work with tools or environments, whose "
            "answers the trainer waits for; remove it."
        )
    of_turns = [name for name in OF_TURNS if getattr(args, name) is not None]
    if of_turns and not environments:
        logger.warning(
            "Without tools or an environment these fields have no effect: %s.", ", ".join(of_turns)
        )


def _check_prompts_of_roles(args: PPOConfig, environments: Environments) -> None:
    """Raise if critic or reference would read what no environment or row has; warn of a state that
    neither reads."""
    kinds = environments.kinds.values()
    with_state = {x.type.__name__ for x in kinds if privileged_state(x.first.instance)}
    named = {args.critic_options.prompt, args.reference_prompt}
    if not with_state and named & {PRIVILEGED_STATE, EARLIER_NAME}:
        raise ValueError(
            f"A prompt {PRIVILEGED_STATE!r} needs an environment with that method; pass one as "
            "`environment_factory`, or rename a column of that name."
        )
    columns = set(args.other_prompts.values()) - {PRIVILEGED_STATE}
    if columns and (environments.has_instances or environments.rollout_func):
        raise ValueError(
            f"The column {columns.pop()!r} cannot be `reference_prompt` or "
            "`critic_kwargs['prompt']`: it lacks what an environment adds to the prompt; use "
            "'privileged_state' of an environment."
        )
    if PRIVILEGED_STATE in args.other_prompts.values():
        return
    for name in with_state:
        logger.warning(
            f"`privileged_state` of {name} needs `critic='adapter'` without "
            "`critic_kwargs['prompt']`, or `reference_prompt='privileged_state'`; it is not read."
        )


def _check_datasets(
    args: PPOConfig, train_dataset: Any, eval_dataset: Any, curriculum: Callable | None
) -> None:
    """Raise for a dict of datasets, for none to evaluate, and for rows whose scores come too late
    for a curriculum."""
    if isinstance(train_dataset, dict):
        raise TypeError(
            "`train_dataset` is a dict; pass one of its datasets, such as `dataset['train']`."
        )
    if args.evaluates and eval_dataset is None:
        raise ValueError(
            f"`eval_strategy` is {args.eval_strategy.value!r} and `eval_on_start` "
            f"{args.eval_on_start}, but there is nothing to evaluate; pass an `eval_dataset`, or "
            "omit both."
        )
    if curriculum is not None and (
        isinstance(train_dataset, IterableDataset) or args.vllm_options.overlap_rollouts
    ):
        raise ValueError(
            "`curriculum` does not work with a stream, or with `overlap_rollouts`, which samples "
            "before the scores are known; pass a `Dataset`, or remove the other."
        )


def check_callbacks(callbacks: list) -> None:
    """Raise for callbacks of TRL that train or average a whole model."""
    names = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
    for name in names & {"BEMACallback", "SyncRefModelCallback"}:
        raise ValueError(
            f"`{name}` copies whole models; remove it (`recipes/averaged_policy.py` of the "
            "repository averages adapters)."
        )


def tokenizer_name(model_id: str, peft_config: Any) -> str:
    """Where the policy's tokenizer is: with the adapter that it starts from, if that was saved
    with one."""
    is_saved = isinstance(peft_config, str) and has_file(peft_config, "tokenizer_config.json")
    if is_saved:
        return peft_config
    return model_id


def context_of(config: Any) -> tuple[int | None, str]:
    """Context in which a token's log-prob does not depend on other rows of a forward, and the
    reason for its length.

    "dynamic" takes other frequencies for all rows of a forward if one is longer than
    `max_position_embeddings`, and "longrope" if one is longer than the original ones.
    """
    length = getattr(config, "max_position_embeddings", None)
    reason = ""
    settings = getattr(config, "rope_parameters", None) or {}
    # one for all layers, or one per type of layer
    for rope in [settings, *settings.values()]:
        if isinstance(rope, dict):
            kind = rope.get("rope_type")
        else:
            kind = None
        if kind == "longrope" and (original := rope.get("original_max_position_embeddings")):
            length = min(length or original, original)
        if kind in ("dynamic", "longrope"):
            reason = (
                f" (beyond it, the rope scaling {kind!r} changes the log-probs of all rows of a "
                "forward)"
            )
    return length, reason


def load_tokenizer(
    model: Any, model_id: str, processing_class: Any, args: PPOConfig
) -> tuple[PreTrainedTokenizerBase, int | None, str, int]:
    """Load and check the policy's tokenizer, and read context and vocabulary, without loading
    weights."""
    if processing_class is None and not model_id:
        raise ValueError(
            "`model` has no name to load a tokenizer from; pass one as `processing_class`."
        )
    if not isinstance(processing_class, PreTrainedTokenizerBase | None):
        raise TypeError(
            f"`processing_class` must be a tokenizer, got {type(processing_class).__name__}."
        )
    kwargs = hub_kwargs(args)
    if isinstance(model, str):
        config = load_config("model", model, kwargs)
        generation_config = None
        with suppress(OSError):  # a model need not have one
            generation_config = GenerationConfig.from_pretrained(model, **kwargs)
    else:
        config = model.config
        generation_config = model.generation_config
    if model_id != model:  # that of an adapter is not in the base's repository
        kwargs = {name: x for name, x in kwargs.items() if name not in ("revision", "subfolder")}
    tokenizer = processing_class or AutoTokenizer.from_pretrained(model_id, **kwargs)
    text_config = config.get_text_config()
    stops = args.stop_token_ids
    vocab_size = text_config.vocab_size
    if any(not 0 <= token < vocab_size for token in stops or []):
        raise ValueError(
            f"`stop_token_ids` must be ids of the model's {vocab_size} tokens, got {stops}."
        )
    if (tokenizer.pad_token_id or 0) >= vocab_size:  # added to the tokenizer only
        tokenizer.pad_token = None
    all_stops = stop_token_ids(tokenizer, generation_config, vocab_size, stops)
    ensure_pad_token(tokenizer, all_stops, args.pad_token)
    pad = tokenizer.pad_token_id
    if pad >= vocab_size:
        raise ValueError(
            f"{tokenizer.pad_token!r} has the id {pad}, but the model has {vocab_size} tokens; "
            f"set `pad_token` to one of them, e.g. {tokenizer.eos_token!r}."
        )
    return tokenizer, *context_of(text_config), vocab_size


def warn_of_turns_that_go_on(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any] | None,
    stops: frozenset[int],
) -> None:
    """Warn if the policy does not stop where the chat template ends its answer."""
    if dataset is None or not is_conversational(next(iter(dataset), {})):
        return
    end = end_of_turn(tokenizer, template_kwargs)
    if end is not None and tokenizer.convert_tokens_to_ids(end) not in stops:
        number = tokenizer.convert_tokens_to_ids(end)
        logger.warning(
            f"The chat template ends an answer with {end!r}, at which sampling does not stop: what "
            f"the policy writes after it is trained on, and rewards read it. Add {number} to "
            "`stop_token_ids`, and to `eos_token_id` of the generation config with which the "
            "policy is served."
        )


class Prompts(NamedTuple):
    """Tokenized datasets of a run, and how they were tokenized."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int | None
    template_kwargs: dict[str, Any] | None  # of the chat template
    tokenize: Callable[..., Any]
    train: Any
    evaluation: Any


def read_prompts(
    model: Any,
    model_id: str,
    processing_class: Any,
    args: PPOConfig,
    environments: Environments,
    train: Any,
    evaluation: Any,
) -> Prompts:
    """Load the tokenizer, and tokenize and check every prompt of the datasets."""
    tokenizer, context_length, reason, vocab_size = load_tokenizer(
        model, model_id, processing_class, args
    )
    if args.generation_backend == "vllm":
        longest = args.vllm_max_model_length
    else:
        longest = None
    if longest is not None and longest < (context_length or math.inf):
        context_length = longest
        reason = ""
    if context_length is not None and (environments or args.critic_options.bootstrap_truncated):
        context_length -= 1  # the value of the state after the last token takes one more
    template_kwargs: Any = args.chat_template_kwargs  # parsed by the config if it was a string
    if args.max_steps > 0:
        rows = args.plan(args.world_size).prompts
    else:
        rows = 0
    train, template_kwargs = environments.prepare(
        train, tokenizer, template_kwargs, rows, args.environment_timeout
    )

    def tokenize(dataset: Any, name: str) -> Any:
        if isinstance(dataset, dict):
            return {key: tokenize(x, name=f"{name}[{key!r}]") for key, x in dataset.items()}
        if dataset is None:
            return None
        if environments.has_instances:
            dataset = with_prompts(dataset, tokenizer, rows)
        tokenized = tokenize_prompts(
            dataset, tokenizer, name, args, context_length, template_kwargs, vocab_size, reason
        )
        return environments.checked(tokenized)

    return Prompts(
        tokenizer,
        context_length,
        template_kwargs,
        tokenize,
        train=tokenize(train, name="train_dataset"),
        evaluation=tokenize(evaluation, name="eval_dataset"),
    )
