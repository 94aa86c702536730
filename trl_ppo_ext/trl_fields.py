"""Fields of TRL's `GRPOConfig` and of its last `PPOConfig`, accepted by [`PPOConfig`] under TRL's names.

A field with the same meaning sets ours. Others are accepted at values that change nothing, and refused at the rest.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from typing import Any

from transformers.utils import logging

from .ppo.batch_plan import BatchPlan
from .redaction import shown

logger = logging.get_logger(__name__)
Settings = dict[str, Any]  # of PPOConfig


# ---- fields with the same meaning ----


def _choose(name: str, value: Any, options: dict[Any, Settings], why: str) -> Settings:
    if value not in options:
        choices = ", ".join(map(repr, options))
        raise ValueError(f"`{name}` must be one of {choices}, got {shown(name, value)}: {why}.")
    return options[value]


def _loss_type(config: Any, value: str) -> Settings:
    means = {"dapo": "token", "grpo": "sequence_mean", "luspo": "sequence_sum", "dr_grpo": "constant"}
    options = {name: {"loss_aggregation": mean} for name, mean in means.items()}
    return _choose("loss_type", value, options, "'bnpo' depends on the micro-batch, others are not PPO's clipped loss")


def _scale_rewards(config: Any, value: Any) -> Settings:
    scale, options = {True: "group", False: "none"}.get(value, value), dict[Any, Settings]()
    if config.critic == "none":
        options |= {"group": {"advantage_estimator": "grpo"}, "none": {"advantage_estimator": "dr_grpo"}}
    else:  # no groups are compared; what remains is whether advantages are scaled
        options |= {"group": {}, "batch": {"whiten_advantages": True}, "none": {"whiten_advantages": False}}
        if scale == "group" or (scale == "none" and config.normalize_values is not False):
            logger.warning(
                "`scale_rewards=%r` needs %s; a critic's advantages are in units of the returns.",
                value,
                "`critic='none'`" if scale == "group" else "`normalize_values=False` too",
            )
    return _choose("scale_rewards", scale, options, f"advantages are those of `critic={config.critic!r}`")


def _num_mini_batches(config: Any, steps: int) -> Settings:
    accumulation = config.gradient_accumulation_steps
    if steps < 1 or accumulation < 1 or steps % accumulation:
        raise ValueError(
            f"`steps_per_generation` must be a multiple of `gradient_accumulation_steps` ({accumulation}), got "
            f"{steps}: an optimizer step takes completions of one rollout."
        )
    return {"num_mini_batches": steps // accumulation}


def _dual_clip(config: Any, delta: float) -> Settings:
    clip = {} if config.cliprange else {"cliprange": 0.2}  # `delta` belongs to GRPO's own clip
    high = config.cliprange_high or config.cliprange or 0.2
    if delta < 1 + high:  # then GRPO clips positive advantages at `delta` too
        raise ValueError(f"`delta` must be at least 1 + the upper clip range ({high}), got {delta}; omit it.")
    return {"dual_clip": delta} | clip


def _entropy_target(config: Any, adaptive: bool) -> Settings:
    if adaptive:
        raise ValueError("`use_adaptive_entropy` must be False; set `entropy_target`, which adapts once per rollout.")
    config.entropy_target = None  # GRPO reads it only if the coefficient adapts
    return {}


def _use_vllm(config: Any, on: bool) -> Settings:
    return {"generation_backend": "vllm" if on else "transformers"}


# type, and the field of PPOConfig, or a function from config and value to fields of PPOConfig
_SAME: dict[str, tuple[type, str | Callable[[Any, Any], Settings]]] = {
    "beta": (float, "kl_coef"),
    "epsilon": (float, "cliprange"),
    "epsilon_high": (float, "cliprange_high"),
    "delta": (float, _dual_clip),
    "num_iterations": (int, "num_ppo_epochs"),
    "steps_per_generation": (int, _num_mini_batches),
    "loss_type": (str, _loss_type),
    "scale_rewards": (str, _scale_rewards),
    # GRPO weighs k3 by the ratio, which gives it the gradient of k1 in the reward
    "use_bias_correction_kl": (bool, lambda _, on: {} if on else {"kl_estimator": "k3", "kl_placement": "loss"}),
    "use_adaptive_entropy": (bool, _entropy_target),
    "use_vllm": (bool, _use_vllm),
    "vllm_importance_sampling_cap": (float, "vllm_importance_sampling_clip_max"),
    "cache_implementation": (str, lambda _, name: {"generation_kwargs": {"cache_implementation": name}}),
    "response_length": (int, "max_completion_length"),
    "local_rollout_forward_batch_size": (
        int,
        lambda _, size: {"per_device_generation_batch_size": size, "per_device_reward_batch_size": size},
    ),
    "stop_token_id": (int, lambda _, token: {"stop_token_ids": [token]}),
    "stop_token": (str, lambda _, token: _choose("stop_token", token, {"eos": {}}, "EOS ends a completion")),
}

# ---- fields without one ----

_BATCHING = "for continuous batching set `use_vllm=True`"
_DERIVED = "it is derived; set `generation_batch_size` and `num_mini_batches`"
# the only value besides None (a type if there is none), and why
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "use_transformers_continuous_batching": (False, _BATCHING),
    "use_transformers_paged": (False, _BATCHING),
    "transformers_continuous_batching_config": (dict, _BATCHING),
    "vllm_server_host": ("0.0.0.0", "set `vllm_server_base_url`, e.g. to http://127.0.0.1:8000"),
    "vllm_server_port": (8000, "set `vllm_server_base_url`, e.g. to http://127.0.0.1:8000"),
    "vllm_tensor_parallel_size": (1, "each process has an engine; start a server with `--tensor-parallel-size`"),
    "vllm_model_impl": ("vllm", "set `generation_kwargs={'model_impl': ...}`"),
    "vllm_structured_outputs_regex": (str, "the policy would not have sampled such completions"),
    "sync_ref_model": (False, "the reference is the frozen base; a trained adapter can be that of the next run"),
    "cast_lm_head_to_fp32": (False, "the head has the base's dtype; set `model_init_kwargs={'dtype': 'float32'}`"),
    "num_generations_eval": (1, "an evaluation samples one completion per row; repeat rows of `eval_dataset`"),
    "router_aux_loss_coef": (0.0, "the router is frozen with the base"),
    "top_entropy_quantile": (1.0, "the loss takes all tokens"),
    "off_policy_mask_threshold": (float, "sequences are not masked; set `dual_clip` or `target_kl`"),
    "multi_objective_aggregation": ("sum_then_normalize", "rewards are summed; set `reward_weights`"),
    "log_unique_prompts": (False, "every completion is logged with its prompt"),
    "log_completions_hub_repo": (str, "completions are not pushed; `log_completions=True` logs them to the trackers"),
    "num_sample_generations": (0, "set `log_completions` and `num_completions_to_print`"),
    "sft_model_path": (str, "pass it as `model`, or `model_name_or_path` in a file"),
    "reward_model_path": (str, "pass it in `reward_funcs`"),
    "model_adapter_name": (str, "pass a `PeftModel` as `model`; its active adapter initializes the policy"),
    "ref_adapter_name": (str, "the reference is a frozen copy of the adapter of `model`"),
    "batch_size": (int, _DERIVED),
    "mini_batch_size": (int, _DERIVED),
    "micro_batch_size": (int, _DERIVED),
    "local_batch_size": (int, _DERIVED),
    "local_mini_batch_size": (int, _DERIVED),
    "num_total_batches": (int, "set `max_steps`"),
}
# read by GRPO only beside a value that is refused above, or for speed and memory
_NO_EFFECT: dict[Any, str] = {
    bool: "disable_dropout ds3_gather_for_generation log_multimodal",
    int: "dataset_num_proc ref_model_sync_steps vllm_group_port",
    float: "entropy_coef_delta entropy_coef_max entropy_coef_min ref_model_mixup_alpha sapo_temperature_neg "
    "sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos",
    int | str: "pad_to_multiple_of",
}
NO_EFFECT = "Already the case, or without effect."
_OF_PPO = {"local_rollout_forward_batch_size", "stop_token", "stop_token_id", "total_episodes"}  # of TRL's PPOConfig
# True by default, which adds the flags --no_NAME
_ON = {"ds3_gather_for_generation", "log_multimodal", "use_bias_correction_kl"}
TYPES: dict[str, Any] = {
    **{name: kind for name, (kind, _) in _SAME.items()},
    **{name: value if isinstance(value, type) else type(value) for name, (value, _) in _NEUTRAL.items()},
    **{name: kind for kind, names in _NO_EFFECT.items() for name in names.split()},
    "total_episodes": int,
}


def _field(name: str, kind: Any) -> tuple[str, Any, Any]:
    same = _SAME.get(name, (kind, None))[1]
    page = "from_trl_ppo" if name in _OF_PPO else "from_grpo"
    help_text = f"`{same}` under TRL's name." if isinstance(same, str) else f"See docs/{page}.md."
    if name in _NEUTRAL:
        neutral, why = _NEUTRAL[name]
        help_text = f"{'None' if isinstance(neutral, type) else neutral} only: {why}."
    elif name not in _SAME and name not in _OF_PPO:
        help_text = NO_EFFECT
    metadata: dict[str, Any] = {"help": help_text}
    if kind is bool and name not in _ON:
        metadata |= {"nargs": "?", "const": True}  # --use_vllm is --use_vllm true
    hint = dict | str if kind is dict else kind
    return name, hint | None, field(default=True if name in _ON else None, metadata=metadata)


TRLFields: Any = make_dataclass("TRLFields", [_field(name, kind) for name, kind in TYPES.items()])


def _set(config: Any, name: str, settings: Settings) -> None:
    """Set fields of PPOConfig from a field of TRL, which gets its default."""
    fields, value = config.__dataclass_fields__, getattr(config, name)
    for ours, new in settings.items():
        old = getattr(config, ours)
        if old not in (fields[ours].default, new):
            raise ValueError(
                f"`{name}` is {shown(name, value)}, which sets `{ours}` to {shown(ours, new)}, but `{ours}` is "
                f"{shown(ours, old)}; remove one of the two."
            )
        setattr(config, ours, new)
    setattr(config, name, fields[name].default)


@contextmanager
def applied(config: Any) -> Iterator[None]:
    """Set the config's fields from TRL's; errors raised within the context name both."""
    sources, idle = dict[str, str](), []
    for name in TYPES:
        value = getattr(config, name)
        if value is None or value is config.__dataclass_fields__[name].default or name == "total_episodes":
            continue
        settings: Settings = {}
        if name in _SAME:
            same = _SAME[name][1]
            settings = {same: value} if isinstance(same, str) else same(config, value)
        elif name not in _NEUTRAL:
            idle.append(name)
        elif value != _NEUTRAL[name][0]:
            neutral, why = _NEUTRAL[name]
            needed = "omitted" if isinstance(neutral, type) else f"{neutral!r} or omitted"
            raise ValueError(f"`{name}` must be {needed}, got {shown(name, value)}: {why}.")
        _set(config, name, settings)
        sources |= dict.fromkeys(settings, name)
    if idle:
        logger.warning("Fields of TRL that are already the case, or without effect: %s.", ", ".join(idle))
    try:
        yield
        if config.total_episodes is not None:
            plan = BatchPlan.from_config(config, config.world_size)
            rollouts = -(-config.total_episodes // plan.completions)
            _set(config, "total_episodes", {"max_steps": rollouts * plan.optimizer_steps})
    except ValueError as error:
        used = [f"`{name}` sets `{ours}`." for ours, name in sources.items() if re.search(rf"`{ours}\b", str(error))]
        if used:
            raise ValueError(" ".join([str(error), *used])) from error
        raise
