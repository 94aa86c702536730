"""Rules that the fields of [`PPOConfig`] obey: ranges, choices, and what excludes what."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers import GenerationConfig
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import logging

from .field_types import check_json, check_types, shown
from .ppo.coefficients import AdaptiveKL

logger = logging.get_logger(__name__)

KL_ESTIMATORS = ("k1", "k2", "k3", "exact")
REWARD_QUANTIZATIONS = ("nf4", "fp4", "int8", None, "none")
# without a critic: how each estimator aggregates its loss in the paper that it comes from
AGGREGATION = {"grpo": "sequence_mean", "dr_grpo": "constant", "rloo": "sequence_sum", "reinforce": "sequence_sum"}
AGGREGATIONS = ("token", "sequence_mean", "sequence_sum", "constant")


def choose_defaults(config: Any) -> None:
    """Fill in the fields whose default depends on whether there is a critic."""
    # first: a default follows from other fields
    check_types(config, tuple(_OTHER_TYPES), {name: said.removeprefix("be ") for name, (_, said) in _RANGES.items()})
    for name, (types, needed) in _OTHER_TYPES.items():
        value = getattr(config, name, None)
        entries = value if isinstance(value, list) else []
        if not isinstance(value, types) or not all(isinstance(entry, str) for entry in entries):
            raise ValueError(f"`{name}` must be {needed}, got {shown(name, value)}.")
    with_critic = config.critic != "none"
    if config.advantage_estimator is None:
        config.advantage_estimator = "gae" if with_critic else "grpo"
    if config.loss_aggregation is None:
        config.loss_aggregation = AGGREGATION.get(config.advantage_estimator, "token")
    if config.whiten_advantages is None:
        config.whiten_advantages = with_critic


def check_values(config: Any) -> None:
    """Refuse values that are out of range, unknown, or contradict each other."""
    for name, choices in _CHOICES.items():
        _check_choice(name, getattr(config, name), choices)
    config.reward_on_error = _read_on_error(config.reward_on_error)
    for name, (fits, needed) in _RANGES.items():
        value = getattr(config, name)
        if value is not None and not fits(value):
            raise ValueError(f"`{name}` must {needed}, got {value}.")
    _check_finite(config)
    check_json(config, _KEYWORD_ARGUMENTS)
    check_json(config, ("accelerator_config", "deepspeed", "fsdp_config"), or_file=True)
    for name, (off, why) in _NOT_HONOURED.items():
        if getattr(config, name, off) not in (off, None, False):
            raise ValueError(f"`{name}={getattr(config, name)!r}` is not supported: {why}. Leave it at {off!r}.")
    if config.load_best_model_at_end and config.metric_for_best_model is None:
        raise ValueError(
            "`load_best_model_at_end=True` needs `metric_for_best_model`, such as 'eval_reward': there is no "
            "evaluation loss in PPO."
        )
    if config.remove_unused_columns:
        raise ValueError("`remove_unused_columns=True` would take the columns that rewards need; leave it False.")
    if config.entropy_target is not None and config.entropy_coef < 0:
        raise ValueError(
            f"`entropy_target` steers an `entropy_coef` of at least 0, got {config.entropy_coef}; leave one "
            "of them out."
        )
    _check_kl(config)
    _check_critic(config)


def _check_finite(config: Any) -> None:
    for field in fields(config):
        value = getattr(config, field.name, None)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"`{field.name}` must be finite, got {value}.")


def _check_kl(config: Any) -> None:
    if config.kl_placement == "both" and config.kl_estimator != "exact":
        raise ValueError(
            f"`kl_placement='both'` would charge the KL twice with kl_estimator={config.kl_estimator!r}; it is meant "
            "for 'exact', whose two halves are the reward of later tokens and the loss of this one."
        )
    if config.kl_target is not None and config.kl_coef == 0:
        raise ValueError("`kl_target` steers `kl_coef` by factors, and `kl_coef=0` stays 0; set it to 0.05, say.")
    if config.kl_target is None and config.kl_horizon != 10000:
        raise ValueError(
            f"`kl_horizon={config.kl_horizon}` steers nothing without a `kl_target`; set one, or leave it out."
        )
    # two placements do not do what their users expect of a KL penalty
    if config.kl_coef and (config.kl_estimator, config.kl_placement) in (("k1", "loss"), ("exact", "reward")):
        logger.warning(
            "kl_estimator=%r with kl_placement=%r hardly holds the policy back: %s. See docs/choices.md.",
            config.kl_estimator,
            config.kl_placement,
            "its gradient is zero in expectation"
            if config.kl_estimator == "k1"
            else "the KL at a token does not depend on that token, so only earlier ones are charged; use 'both'",
        )


def check_horizon(config: Any, completions: int) -> None:
    """Refuse a `kl_horizon` that is so short that the steered coefficient could turn negative."""
    shortest = AdaptiveKL.MAX_ERROR * completions
    if config.kl_target is not None and config.kl_horizon <= shortest:
        raise ValueError(
            f"`kl_horizon={config.kl_horizon}` is too short for rollouts of {completions} completions: `kl_coef` "
            f"could turn negative. Set it above {shortest:g}, better to many times the completions of a rollout."
        )


def _check_critic(config: Any) -> None:
    estimator = config.advantage_estimator
    if (estimator == "gae") == (config.critic == "none"):
        remedy = (
            "`critic='none'` takes 'grpo', 'dr_grpo', 'rloo' or 'reinforce'"
            if estimator == "gae"
            else "set `critic='none'`, or leave `advantage_estimator` out"
        )
        raise ValueError(f"`advantage_estimator={estimator!r}` does not go with `critic={config.critic!r}`; {remedy}.")
    if estimator in ("grpo", "dr_grpo", "rloo") and config.num_generations < 2:
        raise ValueError(
            f"`advantage_estimator={estimator!r}` compares the completions of a prompt, and `num_generations` is "
            f"{config.num_generations}; set it to 2 or more (8, say), or `advantage_estimator='reinforce'`."
        )
    if config.critic == "none":
        for name, default in _OF_THE_CRITIC.items():
            if getattr(config, name) != default:
                raise ValueError(
                    f"`{name}={getattr(config, name)!r}` is about a critic or its advantages, and `critic='none'`; "
                    f"leave it at {default!r}."
                )
    if config.critic == "adapter" and not config.critic_backprop:
        raise ValueError(
            "`critic_backprop=False` would leave the critic's own adapter untrained; it is meant for `critic='head'`, "
            "whose trunk is the policy's."
        )


def check_generation(config: Any) -> None:
    """Refuse what the backend that samples could not honour, and fields of it that [`PPOConfig`] has itself."""
    given = set(config.generation_kwargs or {})
    if config.generation_backend == "continuous_batching":
        _check_continuous_batching(config, given)
        return
    for name in given - vars(GenerationConfig()).keys():
        raise ValueError(f"`generation_kwargs` holds `{name}`, but `transformers.GenerationConfig` has no such field.")
    for name in _WITHOUT_EFFECT & given:
        raise ValueError(
            f"`generation_kwargs` holds `{name}`, which is for ways of decoding that do not sample from the policy's "
            "own distribution, and that transformers no longer has in `generate`; leave it out."
        )
    for name in _SET_AS_FIELDS & given:
        raise ValueError(
            f"`generation_kwargs` holds `{name}`, but log-probabilities and shapes depend on it: set the field of "
            "this config instead (one completion is sampled for each row; `num_generations` repeats rows)."
        )


def _check_continuous_batching(config: Any, given: set[str]) -> None:
    if config.repetition_penalty != 1:
        raise ValueError(
            f"`repetition_penalty={config.repetition_penalty}` looks at all tokens before, and continuous batching "
            "shows it the newest alone; leave it at 1.0, or use `generation_backend='transformers'`."
        )
    for name in sorted(given - _OF_CONTINUOUS_BATCHING):
        raise ValueError(
            f"`generation_kwargs` holds `{name}`; with `generation_backend='continuous_batching'` it takes "
            f"{', '.join(sorted(_OF_CONTINUOUS_BATCHING))} of `transformers.ContinuousBatchingConfig`, and nothing of "
            "`GenerationConfig`. Leave it out, or use `generation_backend='transformers'`."
        )


def _of(names: str, fits: Callable[[Any], bool], needed: str) -> dict[str, tuple[Callable[[Any], bool], str]]:
    return dict.fromkeys(names.split(), (fits, needed))


_RANGES = {
    **_of(
        "num_generations generation_batch_size per_device_generation_batch_size max_completion_length "
        "per_device_reward_batch_size num_ppo_epochs num_mini_batches num_completions_to_print "
        "gradient_accumulation_steps per_device_train_batch_size per_device_eval_batch_size kl_horizon "
        "max_skipped_steps",
        lambda value: value >= 1 and value == int(value),
        "be a whole number, at least 1",
    ),
    **_of(
        "temperature repetition_penalty reward_clip_range cliprange cliprange_value cliprange_high kl_target "
        "target_kl critic_learning_rate lam_length_alpha",
        lambda value: 0 < value < math.inf,
        "be above 0",
    ),
    **_of(
        "learning_rate weight_decay adam_epsilon max_grad_norm num_train_epochs warmup_steps logging_steps save_steps "
        "eval_steps eval_delay dataloader_num_workers ddp_timeout",
        lambda value: 0 <= value < math.inf,
        "be finite and not negative",
    ),
    **_of("adam_beta1 adam_beta2", lambda value: 0 <= value < 1, "be at least 0 and below 1"),
    **_of("seed", lambda value: 0 <= value < 2**32, "be a whole number from 0 to 4294967295"),
    **_of("data_seed", lambda value: 0 <= value < 2**63, "be a whole number from 0 to 9223372036854775807"),
    **_of("max_steps", lambda value: value == -1 or value >= 1, "be at least 1, or -1 for `num_train_epochs`"),
    **_of("value_warmup_steps", lambda value: value >= 0 and value == int(value), "be a whole number, at least 0"),
    **_of("ptx_max_length", lambda value: value >= 2 and value == int(value), "be a whole number, at least 2"),
    **_of("dual_clip", lambda value: 1 < value < math.inf, "be above 1"),
    **_of("ema_decay", lambda value: 0 <= value < 1, "be at least 0 and below 1"),
    **_of(
        "top_k missing_eos_penalty kl_coef vf_coef ptx_coef entropy_target",
        lambda value: 0 <= value < math.inf,
        "not be negative",
    ),
    **_of("entropy_coef", math.isfinite, "be finite"),
    **_of("top_p", lambda value: 0 < value <= 1, "lie above 0 and at most at 1"),
    **_of("gamma lam lam_critic min_p max_reward_failures", lambda value: 0 <= value <= 1, "lie between 0 and 1"),
}
# what their annotations do not say
_OTHER_TYPES: dict[str, tuple[Any, str]] = {
    "reward_on_error": (object, "anything: it is read below"),
    "accelerator_config": (AcceleratorConfig | dict | str | None, "a mapping, or the path of a JSON file"),
    "fsdp": (str | bool | list | None, "true or false"),
    "debug": (str | list | None, "text"),
}
_KEYWORD_ARGUMENTS = (
    "model_init_kwargs",
    "chat_template_kwargs",
    "generation_kwargs",
    "lr_scheduler_kwargs",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
)
_CHOICES = {
    "kl_estimator": KL_ESTIMATORS,
    "kl_placement": ("reward", "loss", "both"),
    "critic": ("head", "adapter", "none"),
    "generation_backend": ("transformers", "continuous_batching"),
    "advantage_estimator": ("gae", "grpo", "dr_grpo", "rloo", "reinforce"),
    "importance_sampling_level": ("token", "sequence"),
    "loss_aggregation": AGGREGATIONS,
    "reward_baseline": ("reference", None),
    "reward_quantization": REWARD_QUANTIZATIONS,
}
# what means nothing without a critic, and its default (scaling token rewards around their mean would pay for length);
# `lam` and `vf_coef` have defaults that do not show whether they were set
_OF_THE_CRITIC = {
    "gamma": 1.0,
    "lam_critic": None,
    "lam_length_alpha": None,
    "critic_backprop": True,
    "critic_learning_rate": None,
    "critic_init": None,
    "value_warmup_steps": 0,
    "whiten_rewards": False,
    "cliprange_value": None,
}
_SET_AS_FIELDS = set(
    "temperature top_p top_k min_p repetition_penalty do_sample max_new_tokens max_length num_return_sequences "
    "num_beams eos_token_id pad_token_id bos_token_id return_dict_in_generate stop_strings".split()
)
_WITHOUT_EFFECT = set("penalty_alpha num_beam_groups diversity_penalty dola_layers low_memory".split())
# the others are set by the generator, follow from this config, or would be passed over without an error
_OF_CONTINUOUS_BATCHING = set(
    "page_size num_blocks max_batch_tokens max_memory_percent safety_margin cpu_offload_space use_cuda_graph "
    "use_async_batching default_compile_level auto_switch_to_flash".split()
)
# what the Trainer would do to a model of its own, or to its data, and this trainer does not
_NOT_HONOURED = {
    "label_smoothing_factor": (0.0, "PPO has no labels"),
    "train_sampling_strategy": ("random", "rollouts of prompts are drawn by `shuffle_dataset`"),
    "neftune_noise_alpha": (None, "old and new log-probabilities must come from the same forward"),
    "torch_compile": (False, "old and new log-probabilities must come from the same forward"),
    "use_liger_kernel": (False, "log-probabilities are fused here already"),
    "auto_find_batch_size": (
        False,
        "it would change the size of the rollout in the middle of a run; set `per_device_train_batch_size` and, to "
        "keep the rollout, `generation_batch_size` instead",
    ),
    "ignore_data_skip": (
        False,
        "a run that is resumed would begin its epoch anew, with other prompts",
    ),
    "save_only_model": (
        False,
        "a checkpoint is what a run goes on from, after a signal too, and needs its optimizer; `save_model()` writes "
        "weights alone",
    ),
    "include_num_input_tokens_seen": ("no", "`num_tokens` is logged anyway"),
}


def _read_on_error(value: Any) -> str:
    """`"raise"`, `"skip"`, or a finite number; kept as text, as it comes from a command line."""
    if value in ("raise", "skip"):
        return value
    try:
        finite = math.isfinite(float(value))
    except (TypeError, ValueError):
        finite = False
    if not finite:
        raise ValueError(f"`reward_on_error` must be 'raise', 'skip' or a finite number, got {value!r}.")
    return str(float(value))


def _check_choice(name: str, value: Any, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(repr(choice) for choice in choices)}, got {value!r}.")
