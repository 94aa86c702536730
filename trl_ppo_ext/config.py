"""Configuration of a run, and checks of its fields."""

import ast
import inspect
import json
import math
import operator
import os
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import torch
import yaml
from huggingface_hub.dataclasses import type_validator
from transformers import GenerationConfig, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import is_liger_kernel_available, is_torch_bf16_gpu_available, logging

from .batch_plan import BatchPlan, factor_of
from .ppo_math import TRUST, SamplerCorrection
from .redaction import shown, without_secrets
from .trl_names import (
    NAMES,
    TABLES,
    TRLFields,
    applied,
    merged,
    moved,
    remedy_of,
)

logger = logging.get_logger(__name__)

LOCK = ".lock"  # in the output directory; a run that trains holds it
PRESETS = {path.stem: path for path in sorted(Path(__file__).parent.glob("presets/*.yaml"))}
NUM_MINI_BATCHES = 4  # by default
# values of `lr_scheduler_type`: schedules that follow `metric_for_best_model`, and count no steps
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
# fields from which nothing follows, read where they are used: scripts set some of them after the
# construction
SET_LATER = {
    "chat_template_kwargs",
    "eval_temperature",
    "log_completions",
    "max_reward_failures",
    "model_init_kwargs",
    "num_completions_to_print",
    "num_generations_eval",
    "resume_with_changed_settings",
    "stop_token_ids",
    "transformers_continuous_batching_config",
}
# fields of TrainingArguments from which the sizes of a rollout follow
ROLLOUT_SIZES = {"gradient_accumulation_steps", "per_device_train_batch_size"}
# method of an environment, as the prompt of critic or reference, and its earlier name
PRIVILEGED_STATE = "privileged_state"
EARLIER_NAME = "hidden_state"


def number(default: Any, **limits: float) -> Any:
    """Field of a number that is `at_least` or `above` one limit, and `at_most` or `below`
    another."""
    return field(default=default, metadata={"limits": limits})


class _InitSignature:
    """Signature of a class that has `__new__`, too: scripts pass on the settings that it names."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        signature = inspect.signature(cast(Any, owner).__init__)
        _, *parameters = signature.parameters.values()
        return signature.replace(parameters=parameters)


@dataclass(frozen=True)
class CriticOptions:
    """Settings of a critic that few runs change, as keys of `critic_kwargs`."""

    backprop: bool = True
    """Whether the value loss of `critic="head"` also trains the policy's adapter."""
    prompt: str | None = None
    """Column with the prompt of the critic (text or chat messages), in which it may read what the
    policy must not know, such as the answer. Needs `critic="adapter"`."""
    warmup_steps: int = number(0, at_least=0)
    """Optimizer steps in which only the critic learns."""
    lam: float = number(1.0, at_least=0, at_most=1)
    """λ of the critic's targets.

    With 1 they are Monte Carlo returns, and a score at the end of a completion reaches
    the values of its first tokens at once."""
    lam_length_alpha: float | None = number(None, above=0)
    """α of λ = 1 − 1/(α·length), which replaces `lam` for the policy."""
    bootstrap_truncated: bool = False
    """Whether the critic's value stands for what would have followed a completion that
    `max_completion_length` or `max_tool_calling_iterations` of a plain environment truncated, as
    after episodes that this truncates itself. Not if a reward scored the completion as a whole,
    which is what it earned: such values need rewards that are paid along the way.
    """


@dataclass(frozen=True)
class VLLMOptions:
    """Settings of vLLM that GRPO does not have, as keys of `vllm_kwargs`."""

    base_model: str | None = None
    """Base that vLLM serves, if not `model`. Its weights must be the same."""
    overlap_rollouts: bool = False
    """Whether a server samples the next rollout while this one is learned, from the policy before
    its updates."""
    concurrency: int = number(256, at_least=1)
    """Largest number of completions that each rank requests from a server at a time."""
    max_logp_difference: float | None = number(None, above=0)
    """End the run when log-probs of policy and sampler differ by more than this in the mean of a
    rollout: then vLLM samples from other weights. What `top_p`, `top_k` and `min_p` explain does
    not count. Default: 0.1 nats, 0.01 in float32, none with `repetition_penalty`.
    """


OPTIONS: dict[str, Any] = {"critic_kwargs": CriticOptions, "vllm_kwargs": VLLMOptions}


@dataclass(repr=False)
class PPOConfig(TRLFields, TrainingArguments):
    r"""Configuration of the [`PPOTrainer`].

    Only the fields that PPO adds to [`~transformers.TrainingArguments`], or whose default it
    changes, are listed. Sampling fields are named as in TRL's `GRPOConfig`, PPO fields as in TRL's
    last `PPOConfig`. Every other field of `GRPOConfig`, and those of the old `PPOConfig` that users
    set, sets one of these, changes nothing, or raises an error with the reason. See
    docs/from_grpo.md.

    A rollout has `per_device_train_batch_size × gradient_accumulation_steps × num_mini_batches`
    completions per process and feeds `num_ppo_epochs × num_mini_batches` optimizer steps.
    `max_steps`, `save_steps` and `logging_steps` count optimizer steps.
    """

    _argument_group_name = "training (fields of PPOConfig)"
    _VALID_DICT_FIELDS = TrainingArguments._VALID_DICT_FIELDS + (
        "model_init_kwargs chat_template_kwargs generation_kwargs critic_kwargs vllm_kwargs".split()
    )

    learning_rate: float = number(5e-5, at_least=0)
    """Initial learning rate of AdamW. LoRA needs about ten times the rate of full fine-tuning."""
    bf16: bool | None = None
    """Compute in bfloat16; trained weights are float32. Default on GPUs except V100, T4."""
    logging_steps: float = number(10, at_least=0)
    """Optimizer steps between two logs."""
    logging_first_step: bool | None = None
    """Log after the first optimizer step, and so the first rollout. Default with `logging_steps` of
    1 or more."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward, for a fraction of the memory."""
    remove_unused_columns: bool | None = False
    """Always `False`: rewards need the columns."""

    model_init_kwargs: dict[str, Any] | str | None = None
    """Keyword arguments of `from_pretrained`, if `model` is a string. A `dtype` overrides `bf16`.
    """
    cast_lm_head_to_fp32: bool = False
    """Compute logits in float32 also while sampling with transformers, and from numbers that
    autocast does not round. Log-probs always have float32 logits."""
    trust_remote_code: bool = False
    """Whether models and tokenizers may run code."""

    shuffle_dataset: bool = True
    """Whether to shuffle the prompts (not of a stream)."""
    chat_template_kwargs: dict[str, Any] | str | None = None
    """Keyword arguments of the chat template, for conversational prompts."""
    max_prompt_length: int | None = number(None, at_least=1)
    """Maximum length of a prompt. Default: what the model's context leaves."""
    overlong_prompts: Literal["error", "truncate"] = "error"
    """A prompt that is longer is an `"error"`, or `"truncate"` keeps its end."""
    pad_token: str | None = None
    """Padding token. Defaults to the tokenizer's, else to EOS. Padding is masked."""
    num_generations: int = number(1, at_least=1)
    """Completions sampled per prompt."""
    num_generations_eval: int | None = number(None, at_least=1)
    """Completions sampled per row of an evaluation. Default: 1."""
    generation_batch_size: int | None = number(None, at_least=1)
    """Completions of a rollout, over all processes. Determines `num_mini_batches`, as in GRPO, or
    `gradient_accumulation_steps` if `num_mini_batches` is set."""
    per_device_generation_batch_size: int | None = number(None, at_least=1)
    """Completions sampled at a time per process, for vLLM as it decides. Default: all."""
    dequantize_for_generation: bool = False
    """Sample from a copy of the 4-bit base in 16 bits, with which training computes as well. It
    takes two bytes per parameter during a rollout, and pays on GPUs with fast memory."""
    max_completion_length: int = number(256, at_least=1)
    """Maximum length of a completion, in tokens."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion, besides EOS of tokenizer and model."""
    stop_strings: list[str] | None = None
    """Texts that end a completion, at the token that completes one."""
    temperature: float = number(1.0, above=0)
    """Temperature of sampling and of log-probs."""
    per_device_eval_batch_size: int | None = number(None, at_least=1)
    """Most completions of an evaluation's batch per process. Default: those of a rollout."""
    eval_temperature: float | None = number(None, at_least=0)
    """Temperature of sampling in evaluations, 0 if greedy. Default: `temperature`, which KL and
    entropy keep."""
    top_p: float = number(1.0, above=0, at_most=1)
    """Sample from the likeliest tokens with this total probability."""
    top_k: int | None = number(0, at_least=0)
    """Sample from this many most likely tokens; 0 or `None` means all."""
    min_p: float | None = number(None, at_least=0, at_most=1)
    """Lowest probability to sample, relative to the most likely token's."""
    repetition_penalty: float = number(1.0, above=0)
    """Penalty on tokens that have already occurred."""
    generation_backend: Literal["transformers", "vllm"] = "transformers"
    """`"transformers"` samples in this process, `"vllm"` with vLLM. See docs/generation.md."""
    generation_kwargs: dict[str, Any] | str | None = None
    """Further fields of [`~transformers.GenerationConfig`], or of vLLM's `LLM`; the keys of fields
    above set those."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """`"colocate"` runs vLLM in each process of the run, `"server"` uses a server that you start.
    """
    vllm_server_base_url: str | None = None
    """Address of the server, by default http://127.0.0.1:8000.

    It must see `output_dir` under the same path. Its key is read from the environment variable
    `VLLM_API_KEY`."""
    vllm_server_timeout: float = number(240.0, above=0)
    """Seconds to wait for a server that cannot be reached, e.g. while it starts, or does not
    answer. Completions may take a second per token longer."""
    vllm_gpu_memory_utilization: float = number(0.3, above=0, at_most=1)
    """Share of the GPU's memory for a colocated vLLM, with its copy of the base."""
    vllm_max_model_length: int | None = number(None, at_least=1)
    """Longest prompt with completion; a server's `--max-model-len`. Default: the context, or what
    fits in memory."""
    vllm_enable_sleep_mode: bool = False
    """Whether a colocated vLLM frees its keys and values on the GPU between rollouts."""
    vllm_importance_sampling_correction: bool | None = None
    """Whether advantages are weighted by the ratio of policy and sampler. Default with
    `overlap_rollouts`."""
    vllm_importance_sampling_mode: SamplerCorrection = "token_truncate"
    """The ratio of each `"token_..."` or the `"sequence_..."`, which is near 0 for most long
    completions; above the limit, `"..._truncate"` sets it to the limit, `"..._mask"` to 0."""
    vllm_importance_sampling_clip_max: float | None = number(3.0, above=0)
    """Largest ratio."""
    vllm_kwargs: dict[str, Any] | str | None = None
    """Further settings: `base_model`, `overlap_rollouts`, `concurrency`, `max_logp_difference`. See
    docs/fields.md."""

    max_tool_calling_iterations: int | None = number(None, at_least=0)
    """Maximum number of turns of an episode that tools or an environment answer. Unlimited by
    default."""
    environment_timeout: float | None = number(None, above=0)
    """Seconds after which an environment, or a turn's tools, fail. `reward_on_error` decides on the
    episode."""

    reward_weights: list[float] | None = None
    """Weight of each reward. All are 1 by default."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """GRPO's baseline for several rewards: of their sum, or of each within its group, then of the
    sum (GDPO)."""
    reward_quantization: Literal["nf4", "fp4", "int8", "none"] | None = "nf4"
    """Quantization of reward models loaded by name: `"nf4"`, `"fp4"`, `"int8"` or `"none"`."""
    per_device_reward_batch_size: int = number(16, at_least=1)
    """Completions per forward of a reward model."""
    reward_label: int | str | list[int | str | None] | None = None
    """Label that is the reward, for reward models with several: its name, or its number counted
    from 0. A list has one for each reward, and then for each monitored one, with `None` for those
    without labels."""
    reward_level: list[str | None] | str | None = None
    """Where a reward model pays its score: all of it at the `"end"`, or its changes from `"token"`
    to token or from `"turn"` to turn, if its scores of prefixes foresee the last one. A list has
    one for each reward. Default: `"token"` for a causal model with `gamma=1`, and a critic without
    `critic_init` or `advantage_estimator="rebn"`, else `"end"`."""
    reward_on_error: Literal["raise", "skip"] = "raise"
    """When a reward fails, `"raise"` ends the run, `"skip"` excludes the completion."""
    max_reward_failures: float = number(0.5, at_least=0, at_most=1)
    """Maximum share of a rollout's completions for which a reward may fail before the run ends."""
    normalize_rewards: bool = False
    """Whether to normalize scores by their running mean and standard deviation.

    Rewards before the last token are only scaled, and the mean is that of the rest. Each of several
    environments has its own."""
    missing_eos_penalty: float | None = number(None, at_least=0)
    """Penalty subtracted from the score of a truncated completion."""
    mask_truncated_completions: bool = False
    """Whether the policy skips truncated completions; a critic learns from them."""

    num_ppo_epochs: int = number(1, at_least=1)
    """Passes over a rollout."""
    num_mini_batches: int | None = number(None, at_least=1)
    """Optimizer steps per pass.

    By default 4, or the next number for which `num_generations` divides the rollout; see
    `generation_batch_size`."""
    kl_coef: float = number(0.0, at_least=0)
    """Coefficient of the KL penalty. 0, which suits rewards that cannot be hacked, skips the
    reference's forward, and the KL is not logged. With a reward model, 0.05 is usual."""
    kl_estimator: Literal["k1", "k2", "k3", "exact"] | None = None
    """Per-token KL: estimated from the sampled token (`"k1"`, `"k2"`, `"k3"`), or `"exact"` over
    all tokens. Default: `"k1"` in the reward, else `"exact"`."""
    kl_placement: Literal["reward", "loss", "both"] | None = None
    """Apply the KL penalty to the `"reward"` (for k1), the `"loss"`, or `"both"` (for the exact
    KL). Default: `"reward"`; with `reference_prompt` the `"loss"`, except for k1."""
    kl_target: float | None = number(None, above=0)
    """Adapt `kl_coef` to keep the mean KL per completion at this many nats."""
    kl_horizon: int = number(10000, at_least=1)
    """Completions over which `kl_coef` adapts; larger is slower."""
    reference_prompt: str | None = None
    """Column with the prompt of the reference (text or chat messages), which may show it what the
    policy must not know, such as the answer: the KL then distills. `"privileged_state"` is that of
    an environment."""
    target_kl: float | None = number(0.3, above=0)
    """Stop a rollout's updates when the policy has moved this far since sampling, in nats per
    token. The clip bounds gradients, not what Adam's momentum adds. `None` never stops."""
    advantage_estimator: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce", "rebn"] | None = (
        None
    )
    """With a critic `"gae"`.

    Without one `"grpo"` (then the default), `"dr_grpo"`, `"rloo"`, `"reinforce"` or `"rebn"`
    (whitened rewards-to-go per token)."""
    drop_equal_groups: bool = False
    """With a baseline over groups, exclude prompts whose completions all have the same score from
    the loss."""
    advantage_level: Literal["token", "turn", "both"] = "token"
    """With tools or an environment, `"turn"` gives all tokens of a turn one advantage: rewards are
    summed over a turn, values are those at its first token, and `gamma` and `lam` count turns.
    `"both"` counts turns too, but each token has its own value and the rewards after it.
    """
    critic: Literal["head", "side", "adapter", "none"] = "side"
    """`"side"` network on states of several layers, the prompt and the position (nothing flows back
    into the policy), value `"head"` on the policy's last state, value head on an `"adapter"` of its
    own, or `"none"`."""
    critic_learning_rate: float | None = number(None, above=0)
    """Learning rate of the critic. Defaults to 1e-3 for `critic="side"`, else to `learning_rate`.
    """
    normalize_values: bool | None = None
    """Whether values are predicted in units of the returns, so that nothing depends on the rewards'
    scale, and enter the baseline as far as they fit the returns. Defaults to `True` with a critic.
    """
    critic_kwargs: dict[str, Any] | str | None = None
    """Rarer settings of a critic: `backprop`, `prompt`, `warmup_steps`, `lam`, `lam_length_alpha`,
    `bootstrap_truncated`. See docs/fields.md."""
    critic_init: str | None = None
    """Pretrained critic, checkpoint or, for `critic="adapter"`, reward adapter."""
    cliprange: float | None = number(None, above=0)
    """Clip range of the ratio, e.g. 0.2.

    By default (`cliprange=0.5`, `cliprange_high=1.0`, `dual_clip=2.0`) a token
    twice as likely as before has no gradient, nor one half as likely with a negative advantage."""
    cliprange_high: float | None = number(None, above=0)
    """Clip range above 1. Defaults to `cliprange`."""
    dual_clip: float | None = number(None, above=1)
    """Upper bound, above 1, of the ratio when the advantage is negative."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio per `"token"` or `"sequence"`, the latter normalized by length."""
    loss_aggregation: Literal["token", "sequence_mean", "sequence_sum", "constant"] | None = None
    """Mean over `"token"`s (default), over completions of their `"sequence_mean"` (default of GRPO)
    or `"sequence_sum"` (of RLOO, REINFORCE), or `"constant"`: that / `max_completion_length` (of
    Dr. GRPO).
    """
    top_entropy_quantile: float = number(1.0, above=0, at_most=1)
    """Share of a rollout's tokens that have an advantage, those of highest entropy; other losses
    take all tokens."""
    cliprange_value: float | None = number(None, above=0)
    """Clip range of the values, in units of the returns with `normalize_values`, else of rewards.
    Default: none."""
    vf_coef: float = number(0.5, at_least=0)
    """Coefficient of the value loss."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, aggregated as the loss is; TRL's is always a mean over
    tokens. It is in units of a rollout's advantages, their root mean square, so that the bonus
    weighs as beside whitened ones.
    """
    gamma: float = number(1.0, at_least=0, at_most=1)
    """Discount factor."""
    lam: float | None = number(None, at_least=0, at_most=1)
    """λ of generalized advantage estimation.

    By default 1 if the scores of the run so far vary most at the last places of completions, else
    0.8 over a place: a token, a step or a turn at whose end a score may enter.
    """
    whiten_rewards: bool = False
    """Whether to scale the per-token rewards of a rollout to unit variance around their mean, which
    is kept, as in TRL's PPO.

    Tokens without a reward then get a part of the mean: positive scores pay for short completions,
    negative ones for long ones, unless the deviation is 1. With `normalize_values` it is not needed.
    """
    whiten_advantages: bool | None = None
    """Whether to whiten a rollout's advantages. Default for `"rebn"`, and critics without
    `normalize_values`."""

    resume_from_checkpoint: str | None = None
    """Checkpoint from which `train()` resumes, `True` for the latest valid one in `output_dir`, or
    `False` to begin anew and move those of an earlier run aside."""
    resume_with_changed_settings: bool = False
    """Whether a checkpoint may be resumed under settings that differ from those it was saved under.
    """

    log_completions: bool = False
    """Whether to print completions with the metrics, and write them as parquet to `completions/` in
    `output_dir`."""
    num_completions_to_print: int | None = number(8, at_least=0)
    """Completions to print. `None` prints all."""

    __signature__ = _InitSignature()

    def __new__(cls, *args: Any, **settings: Any) -> "PPOConfig":
        """Raise an error for all unknown fields, with those that may be meant, and remember which
        are given."""
        known = [*cls.__dataclass_fields__, *inspect.signature(cls.__init__).parameters]
        remedies = {name: remedy_of(name, known, 0.75) for name in settings if name not in known}
        if remedies:
            unknown = [
                f"`{name}` ({remedy})" if remedy else f"`{name}`"
                for name, remedy in remedies.items()
            ]
            raise TypeError(
                f"{cls.__name__} has no field {', '.join(unknown)}; docs/fields.md lists all."
            )
        config = super().__new__(cls)
        inherited = {entry.name for entry in fields(TrainingArguments)}
        config.given = {name for name, x in settings.items() if x is not None} - inherited
        if all(entry.name in settings for entry in fields(cls) if entry.init):
            config.given = set()  # by a parser, which passes defaults too
        return config

    def __post_init__(self):
        self._read_mappings()
        check_types(self)
        micro_batches = self.steps_per_generation
        size = self.generation_batch_size
        with applied(self):
            self._finish()
        # the fields of PPO, from which others have followed, when TRL's have set them
        inherited = {entry.name for entry in fields(TrainingArguments)}
        # not those of a subclass, from which nothing follows here
        own = {entry.name for entry in fields(PPOConfig)} - inherited - SET_LATER
        self.settled = {name: getattr(self, name) for name in sorted(own | ROLLOUT_SIZES)}
        if micro_batches is not None and size is not None:
            unit = self.per_device_train_batch_size * self.world_size
            expected = micro_batches * unit
            if size != expected:
                raise ValueError(
                    f"`steps_per_generation={micro_batches}` makes a rollout of {expected} "
                    f"completions, and `generation_batch_size` is {size}; remove one of the two."
                )

    def _read_mappings(self) -> None:
        """Read the JSON of mappings from text; raise for other text."""
        for name in [
            *self._VALID_DICT_FIELDS,
            *(name for name, (kind, *_) in NAMES.items() if kind is dict),
        ]:
            text = getattr(self, name, None)
            may_be_file = name in ("accelerator_config", "deepspeed", "fsdp_config")
            if isinstance(text, dict) and not all(isinstance(key, str) for key in text):
                raise ValueError(
                    f"`{name}` must have keys that are text, got {shown(name, text)}; quote them."
                )
            if not isinstance(text, str) or (may_be_file and os.path.isfile(text)):
                continue
            mapping = None
            with suppress(ValueError, RecursionError):
                mapping = json.loads(text)
            if not isinstance(mapping, dict):
                if may_be_file:
                    file = ", or the path of a file"
                else:
                    file = ""
                raise ValueError(
                    f"`{name}` must be a mapping, its JSON ('{{\"a\": 1}}'){file}, got other text."
                )
            if name not in TrainingArguments._VALID_DICT_FIELDS:
                setattr(self, name, mapping)
        if isinstance(self.generation_kwargs, dict):
            self.generation_kwargs = moved(self, self.generation_kwargs)

    def _finish(self) -> None:
        # for the report, before defaults are filled in
        defaults = {entry.name: entry.default for entry in fields(self)}
        self.changed_fields = [
            name for name, x in defaults.items() if x not in (MISSING, getattr(self, name, None))
        ]
        # 1. Defaults that depend on other fields
        self._choose_precision()
        self._choose_advantages()
        self._choose_kl()
        self._choose_for_trainer()
        # 2. Rules, before the base class creates directories
        self.resolve_values()
        # 3. Parsing of JSON, devices, world size
        super().__post_init__()
        # 4. Rules that need them
        self._settle_devices()
        self._settle_data()
        self._settle_sizes()
        self._settle_schedule()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change a field of PPO after the construction: what follows from it would not
        change."""
        settled = vars(self).get("settled", {})
        if name in settled and value != settled[name]:
            raise ValueError(
                f"`{name}` of the config cannot change after it was built, since what follows from "
                "it would not; pass new values to `PPOConfig(...)` or `dataclasses.replace`."
            )
        super().__setattr__(name, value)

    def _choose_precision(self) -> None:
        """Bfloat16 where it is fast, or what the launcher says."""
        if self.bf16 is None:
            emulated = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(
                including_emulation=False
            )
            launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
            self.fp16 = self.fp16 or launched == "fp16"
            is_fast = not (self.use_cpu or emulated) and is_torch_bf16_gpu_available()
            self.bf16 = not self.fp16 and (is_fast or launched == "bf16")

    def _choose_advantages(self) -> None:
        """Estimator, units and clip, which follow from whether there is a critic."""
        with_critic = self.critic != "none"
        self.advantage_estimator = self.advantage_estimator or ("gae" if with_critic else "grpo")
        self.loss_aggregation = self.loss_aggregation or _AGGREGATION.get(
            self.advantage_estimator, "sequence_sum"
        )
        if self.normalize_values is None:
            self.normalize_values = with_critic
        # it would turn the small advantages of a good critic back into noise
        if self.whiten_advantages is None:
            self.whiten_advantages = self.advantage_estimator == "rebn" or (
                with_critic and not self.normalize_values
            )
        if self.cliprange is None:
            self.cliprange = 1 - 1 / TRUST
            self.cliprange_high = TRUST - 1 if self.cliprange_high is None else self.cliprange_high
            # likelier tokens have no gradient beyond, whatever their advantage: they would hold
            # others back
            self.dual_clip = TRUST if self.dual_clip is None else self.dual_clip

    def _choose_kl(self) -> None:
        """Place and estimator of the KL, and whether anything reads the reference."""
        if self.kl_placement is None:  # k1 has no gradient in the loss
            distills = self.reference_prompt is not None and self.kl_estimator != "k1"
            if distills:
                self.kl_placement = "loss"
            else:
                self.kl_placement = "reward"
        if self.kl_estimator is None:
            if self.kl_placement == "reward":
                self.kl_estimator = "k1"
            else:
                self.kl_estimator = "exact"
        self.uses_reference = self.kl_coef != 0
        in_rewards = self.uses_reference and self.kl_placement != "loss"
        self.reward_kl = self.kl_estimator if in_rewards else None

    def _choose_for_trainer(self) -> None:
        """Fields that the Trainer reads otherwise, or that change nothing here."""
        self.top_k = self.top_k or 0
        # of a command line
        if isinstance(self.reward_label, str) and self.reward_label.isdecimal():
            self.reward_label = int(self.reward_label)
        self.max_grad_norm = self.max_grad_norm or 0.0  # the Trainer compares it with 0
        if self.max_completion_length is None:
            default = type(self).__dataclass_fields__["max_completion_length"].default
            self.max_completion_length = cast(int, default)
        if self.remove_unused_columns:
            logger.warning(
                "`remove_unused_columns=True` changes nothing: rewards need the columns."
            )
            self.remove_unused_columns = False
        if self.logging_first_step is None:
            self.logging_first_step = self.logging_strategy == "steps" and self.logging_steps >= 1
        # all are the case, in the trainer's own way
        self.include_num_input_tokens_seen = "no"
        self.logging_nan_inf_filter = False  # a loss that is not finite counts as 0
        if self.ddp_find_unused_parameters is None:
            # every trainable parameter takes part in every forward, so the search would only cost
            # time
            self.ddp_find_unused_parameters = False
        # its name since transformers 5.23, which warns
        if getattr(self, "activation_checkpointing", True) is None:
            self.activation_checkpointing = self.gradient_checkpointing

    def _settle_devices(self) -> None:
        """Check what needs a GPU, and the launcher's precision."""
        if self.use_liger_kernel and self.device.type in ("cpu", "mps"):
            logger.warning(
                "`use_liger_kernel=True` changes nothing here: its kernels need a GPU with Triton."
            )
            self.use_liger_kernel = False
        if self.use_liger_kernel and not is_liger_kernel_available():
            raise ValueError(
                "`use_liger_kernel=True` needs liger-kernel; install it (`pip install "
                "liger-kernel`)."
            )
        launched = getattr(self, "mixed_precision", "no")
        if launched != "no" and not (self.fp16 or self.bf16):
            raise ValueError(
                f"`bf16` or `fp16` must be True to launch with `--mixed_precision {launched}`; set "
                "it."
            )

    def _settle_data(self) -> None:
        """Let ranks share a rollout evenly, and each read a stream itself."""
        data = self.accelerator_config
        accumulation = data.gradient_accumulation_kwargs
        if accumulation is not None:
            if accumulation.get("num_steps", 1) != 1:
                raise ValueError(
                    "`num_steps` of `accelerator_config` would change the rollout after it was "
                    "planned; set `gradient_accumulation_steps`."
                )
            # The Trainer writes into this mapping, which may be the user's own.
            data.gradient_accumulation_kwargs = dict(accumulation)
        if data.split_batches or not data.even_batches or self.dataloader_drop_last:
            ignored = "`split_batches`, `even_batches` and `dataloader_drop_last`"
            logger.warning(
                "%s change nothing: ranks share a rollout evenly, and no row is dropped.", ignored
            )
        self.dataloader_drop_last = False
        # each rank reads a stream itself: text cannot be sent
        data.split_batches = False
        data.even_batches = True
        data.dispatch_batches = False

    def _settle_sizes(self) -> None:
        """Number of minibatches, accumulation and the evaluation's batch, from the rollout."""
        size = self.generation_batch_size
        micro_batch_size = self.per_device_train_batch_size
        if size is None:
            self.num_mini_batches = self.num_mini_batches or self._default_mini_batches()
        elif self.num_mini_batches is None:
            accumulation = self.gradient_accumulation_steps
            self.num_mini_batches = factor_of(
                size, "gradient_accumulation_steps", accumulation, micro_batch_size, self.world_size
            )
        else:
            steps = factor_of(
                size, "num_mini_batches", self.num_mini_batches, micro_batch_size, self.world_size
            )
            # DeepSpeed's config has been filled in by now and would keep the default of 1
            if self.gradient_accumulation_steps not in (
                {1, steps} if self.deepspeed is None else {steps}
            ):
                raise ValueError(
                    f"`gradient_accumulation_steps` must be {steps} for a `generation_batch_size` "
                    f"of {size} and `num_mini_batches={self.num_mini_batches}`, got "
                    f"{self.gradient_accumulation_steps}; remove one."
                )
            self.gradient_accumulation_steps = steps
        per_process = self.plan(self.world_size).completions_per_process
        self.per_device_eval_batch_size = self.per_device_eval_batch_size or per_process

    def _settle_schedule(self) -> None:
        """Set the direction in which a schedule's metric improves; torch minimizes by default."""
        if self.lr_scheduler_type in METRIC_SCHEDULES:
            mode = "max" if self.greater_is_better else "min"
            kwargs = cast(dict | None, self.lr_scheduler_kwargs)
            self.lr_scheduler_kwargs = {"mode": mode} | (kwargs or {})

    def _default_mini_batches(self) -> int:
        """Optimizer steps per pass by default: 4, or the next number whose rollout has whole
        groups."""
        completions = (
            self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
        )
        unit = self.num_generations // math.gcd(self.num_generations, completions)
        number = -(-NUM_MINI_BATCHES // unit) * unit
        if number != NUM_MINI_BATCHES:
            message = (
                "`num_mini_batches` is %d, not %d: `num_generations=%d` must divide the rollout."
            )
            logger.warning(message, number, NUM_MINI_BATCHES, self.num_generations)
        return number

    @property
    def uses_deepspeed(self) -> bool:
        """Whether the config or the launcher enables DeepSpeed."""
        return self.deepspeed is not None or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Arguments of [`ppo_loss`], with the sum of `"constant"`, whose denominator is its own."""
        low = self.cliprange
        high = self.cliprange_high
        in_loss = self.uses_reference and self.kl_placement != "reward"
        return {
            "cliprange": (low, low if high is None else high),
            "aggregation": "sequence_sum"
            if self.loss_aggregation == "constant"
            else self.loss_aggregation,
            "ratio_level": self.importance_sampling_level,
            "kl_estimator": self.kl_estimator if in_loss else None,
            "dual_clip": self.dual_clip,
            "vf_coef": self.vf_coef,
            "entropy_coef": self.entropy_coef,
            "cliprange_value": self.cliprange_value,
        }

    def _check_groups(self) -> None:
        """Raise a `ValueError` if the settings of baselines over a prompt's completions
        contradict each other."""
        estimator = self.advantage_estimator
        compares = estimator in ("grpo", "dr_grpo", "rloo")
        if compares and self.num_generations < 2:
            raise ValueError(
                f"`num_generations` must be at least 2 for `advantage_estimator={estimator!r}`, "
                f"which compares completions of a prompt, got {self.num_generations}; use e.g. 8."
            )
        normalizes_each = self.multi_objective_aggregation == "normalize_then_sum"
        if self.drop_equal_groups:
            if not compares:
                raise ValueError(
                    "`drop_equal_groups=True` needs `critic='none'` and an `advantage_estimator` "
                    f"over groups, e.g. 'grpo', got {estimator!r}; others learn from all."
                )
            if self.reward_kl or self.reference_prompt or normalizes_each:
                raise ValueError(
                    "`drop_equal_groups=True` compares sums of scores, but a KL in the reward, "
                    "`reference_prompt` and `multi_objective_aggregation` add differences; remove "
                    "one of them."
                )
        if normalizes_each and self.critic != "none":
            logger.warning(
                "`multi_objective_aggregation='normalize_then_sum'` compares rewards within "
                "groups, which needs `critic='none'`; with a critic they are summed as they are, "
                "by `reward_weights`."
            )
            return
        shaped = self.reward_kl or self.normalize_rewards or self.missing_eos_penalty
        needs = "`multi_objective_aggregation='normalize_then_sum'` needs"
        if normalizes_each and estimator != "grpo":
            raise ValueError(f"{needs} `advantage_estimator='grpo'`, got {estimator!r}.")
        if normalizes_each and shaped:
            raise ValueError(
                f"{needs} rewards as they are: omit `normalize_rewards`, `missing_eos_penalty` and "
                "a KL except that of `kl_placement='loss'`."
            )

    def _check_reward_level(self) -> None:
        """Check that changes of a score may be paid."""
        levels = self.reward_level
        if not isinstance(levels, list):
            levels = [levels]
        for level in levels:
            if level not in (None, "end", "token", "turn"):
                raise ValueError(
                    "`reward_level` must be 'end', 'token' or 'turn', or a list of these and None, "
                    f"got {level!r}."
                )
        early = next((level for level in levels if level in ("token", "turn")), None)
        if early is not None and self.why_paid_at_end:
            raise ValueError(
                f"`reward_level={early!r}` does not fit {self.why_paid_at_end}; set 'end'."
            )

    @property
    def evaluates(self) -> bool:
        """Whether a run evaluates, be it only before its first step."""
        return self.eval_strategy != "no" or self.eval_on_start

    @property
    def why_paid_at_end(self) -> str | None:
        """Why reward models must pay their score at the end, whatever their prefixes tell."""
        if self.gamma != 1:
            return (
                f"`gamma={self.gamma}`: with a discount, changes of a score are worth something "
                "else than the score"
            )
        if self.critic == "none" and self.advantage_estimator != "rebn":
            return (
                f"`advantage_estimator={self.advantage_estimator!r}`, which compares sums of "
                "scores, wherever they are paid"
            )
        return None

    def resolve_values(self) -> None:
        """Build the options, and set what depends on other fields.

        Raises a `ValueError` if a value is out of range, unsupported, or contradicts another.
        """
        check_limits(self)
        self._build_options()
        self._check_trainer_fields()
        self._check_kl()
        self._check_reward_level()
        self._check_estimator()
        self._check_groups()
        self._check_level()
        self._check_critic()
        self._settle_sampling()
        if self.generation_backend == "vllm":
            self._check_vllm()

    def _build_options(self) -> None:
        """Read the mappings of settings that few runs change."""
        mappings: list[Any] = []
        for name, kind in OPTIONS.items():
            settings = getattr(self, name) or {}
            keys = [entry.name for entry in fields(kind)]
            for key in settings.keys() - set(keys):
                raise ValueError(
                    f"`{name}` holds the unknown key {shown(name, key)}; it takes "
                    f"{', '.join(keys)}."
                )
            mappings.append(kind(**settings))
            check_types(mappings[-1], form=f"{name}[{{!r}}]")
            check_limits(mappings[-1], form=f"{name}[{{!r}}]")
        self.critic_options, self.vllm_options = mappings

    def _check_trainer_fields(self) -> None:
        """Check fields of the Trainer."""
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(
                "`max_steps` must be at least 1, or -1 to use `num_train_epochs`, got "
                f"{self.max_steps}."
            )
        for name, why in TABLES["unsupported"].items():
            value = getattr(self, name, None)
            default = TrainingArguments.__dataclass_fields__[name].default
            if value not in (default, None, False):
                raise ValueError(
                    f"`{name}={value!r}` is not supported: {why}. Leave it at {default!r}."
                )
        read_a_metric: list[tuple[str, object]] = [("load_best_model_at_end", True)]
        read_a_metric += [("lr_scheduler_type", schedule) for schedule in METRIC_SCHEDULES]
        for name, value in read_a_metric:
            if getattr(self, name) == value and self.metric_for_best_model is None:
                raise ValueError(
                    f"`{name}={value}` needs `metric_for_best_model`, e.g. 'eval_reward'."
                )
        if self.save_strategy == "best" and self.eval_strategy == "no":  # but in callbacks
            logger.warning("`save_strategy='best'` saves nothing without evaluations.")

    def _check_kl(self) -> None:
        """Check the KL's estimator, place and coefficient."""
        if self.kl_placement == "both" and self.kl_estimator != "exact":
            raise ValueError(
                f"`kl_placement='both'` needs `kl_estimator='exact'`, got {self.kl_estimator!r}."
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(
                "`kl_target` scales `kl_coef`, which must not start at 0; try `kl_coef=0.05`."
            )
        if self.kl_target is None and self.kl_horizon != 10000:
            raise ValueError(
                f"`kl_horizon={self.kl_horizon}` needs a `kl_target`; set one, or remove it."
            )
        if self.reference_prompt is not None and self.kl_coef == 0:
            raise ValueError(
                f"`reference_prompt={self.reference_prompt!r}` needs a `kl_coef` above 0, or "
                "nothing reads it; set 1 to distill, less beside a reward, or remove it."
            )
        kl = self.kl_estimator, self.kl_placement
        if self.kl_coef and kl in _WEAK_KL:
            logger.warning(
                "`kl_estimator=%r` with `kl_placement=%r` hardly limits the policy: %s.",
                *kl,
                _WEAK_KL[kl],
            )

    def _check_estimator(self) -> None:
        """Check that the estimator is one with a critic, or one without."""
        estimator = self.advantage_estimator
        no_critic = self.critic == "none"
        if (estimator == "gae") == no_critic:
            if no_critic:
                usable = "'grpo', 'dr_grpo', 'rloo', 'reinforce' or 'rebn'"
            else:
                usable = "'gae'"
            raise ValueError(
                f"`advantage_estimator={estimator!r}` does not work with `critic={self.critic!r}`; "
                f"use {usable}."
            )

    def _check_level(self) -> None:
        """Check that the estimator works at the level of the advantages."""
        estimator = self.advantage_estimator
        no_critic = self.critic == "none"
        level = self.advantage_level
        if level != "token" and no_critic and (level, estimator) != ("turn", "rebn"):
            if level == "both":
                needed = "a critic"
            else:
                needed = "a critic or `advantage_estimator='rebn'`"
            raise ValueError(
                f"`advantage_level={level!r}` needs {needed}, got {estimator!r}; use 'token'."
            )

    def _check_critic(self) -> None:
        """Check the settings of a critic, which need one."""
        no_critic = self.critic == "none"
        options = self.critic_options
        for name in _CRITIC_ONLY if no_critic else ():
            value = getattr(self, name)
            default = PPOConfig.__dataclass_fields__[name].default
            if (
                value not in (default, {})
                and value is not False
                and (name, self.advantage_estimator) != ("gamma", "rebn")
            ):
                raise ValueError(
                    f"`{name}={value!r}` needs a critic, and `critic='none'`; leave it at "
                    f"{default!r}."
                )
        prompt = options.prompt
        if prompt is not None and self.critic != "adapter":  # others read states of the policy
            raise ValueError(
                f"`critic_kwargs={{'prompt': {prompt!r}}}` needs `critic='adapter'`, got "
                f"{self.critic!r}."
            )
        if 0 < self.max_steps <= options.warmup_steps:
            logger.warning(
                "`critic_kwargs['warmup_steps']=%d` leaves no step for the policy, as "
                "`max_steps=%d`; lower the first or raise the second.",
                options.warmup_steps,
                self.max_steps,
            )
        if self.critic == "adapter" and not options.backprop:
            raise ValueError(
                "`critic_kwargs['backprop']` must be True for `critic='adapter'`, which would not "
                "train."
            )

    def _settle_sampling(self) -> None:
        """Check what samples and its settings, and set whether its log-probs are corrected."""
        names = set(self.generation_kwargs or {})
        try:
            json.dumps(self.generation_kwargs, default=str)
        except TypeError as error:  # checkpoints and trackers keep it
            raise ValueError(
                f"`generation_kwargs` must have keys that are text at every depth ({error}); write "
                "`sequence_bias` as a list, such as [[[5], -10.0]]."
            ) from None
        uses_vllm = self.generation_backend == "vllm"
        has_server = uses_vllm and self.vllm_mode == "server"
        overlaps = self.vllm_options.overlap_rollouts
        if overlaps and not has_server:
            raise ValueError(
                "`vllm_kwargs['overlap_rollouts']` needs `use_vllm=True, vllm_mode='server'`; set "
                "both."
            )
        concurrency = self.vllm_options.concurrency
        if concurrency != VLLMOptions.concurrency and not has_server:
            raise ValueError(
                f"`vllm_kwargs['concurrency']` must be omitted without a vLLM server, got "
                f"{concurrency}; set `use_vllm=True, vllm_mode='server'`."
            )
        if self.vllm_importance_sampling_correction is None:
            self.vllm_importance_sampling_correction = overlaps
        idle = sorted(
            {"vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"}
            & set(self.changed_fields)
        )
        if uses_vllm and idle and not self.vllm_importance_sampling_correction:
            logger.warning(
                "Without `vllm_importance_sampling_correction` these have no effect: %s.",
                ", ".join(idle),
            )
        for name in names & set(TABLES["generation_kwargs"][self.generation_backend]):
            raise ValueError(
                f"`generation_kwargs` holds `{name}`, which follows from the run or the clock, or "
                "samples otherwise; remove it, or set a field."
            )
        if not uses_vllm:
            for name in names - vars(GenerationConfig()).keys():
                raise ValueError(
                    f"`generation_kwargs` holds `{name}`, an unknown field of `GenerationConfig`."
                )
            chosen = [name for name in self.changed_fields if name.startswith("vllm_")]
            # False is what it settles on, e.g. in a config that was saved
            if unread := [name for name in chosen if getattr(self, name) is not False]:
                logger.warning(
                    "Without `use_vllm=True` these fields have no effect: %s.", ", ".join(unread)
                )

    def _check_vllm(self) -> None:
        """Check the settings of vLLM."""
        if self.stop_strings:
            raise ValueError(
                "`stop_strings` needs `generation_backend='transformers'`; or use `stop_token_ids`."
            )
        if self.dequantize_for_generation:
            raise ValueError(
                "`dequantize_for_generation` needs `generation_backend='transformers'`; vLLM holds "
                "a copy of the base of its own."
            )
        if self.vllm_mode == "server" and (self.generation_kwargs or self.vllm_enable_sleep_mode):
            raise ValueError(
                "`generation_kwargs` and `vllm_enable_sleep_mode` are those of a colocated vLLM; "
                "remove them, and configure the server where you start it."
            )
        is_address = self.vllm_server_base_url is None
        with suppress(ValueError):  # e.g. a port above 65535
            url = urlsplit(self.vllm_server_base_url or "")
            is_address = is_address or bool(
                url.scheme in ("http", "https") and url.hostname and url.port != 0
            )
        if not is_address:
            raise ValueError(
                "`vllm_server_base_url` must start with http:// or https://, and have a host and "
                f"a port up to 65535, got {shown('', self.vllm_server_base_url)}."
            )
        changed = [
            f"`{name}={x}`"
            for name, off in _FILTERS.items()
            if (x := getattr(self, name)) not in (None, off)
        ]
        if changed and self.vllm_importance_sampling_correction:
            raise ValueError(
                f"{', '.join(changed)} changes the distribution that vLLM samples from, not the "
                "policy's, so their ratio would be biased; remove it, or set "
                "`vllm_importance_sampling_correction=False`."
            )

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # `dataclass` would add one that shows tokens
            cls.__repr__ = PPOConfig.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        lines = "".join(f"{name}={value},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __str__ = __repr__

    def plan(self, num_processes: int) -> BatchPlan:
        """Sizes of a rollout and its parts over this many processes."""
        return BatchPlan(
            micro_batch_size=self.per_device_train_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            num_mini_batches=cast(int, self.num_mini_batches),
            num_ppo_epochs=self.num_ppo_epochs,
            num_generations=self.num_generations,
            num_processes=num_processes,
        )

    def without_rewards(self) -> "PPOConfig":
        """Settings of a run without any reward: with the KL in the loss, a critic has nothing to
        predict."""
        of_critics = {"critic", "advantage_level"} | set(_CRITIC_ONLY)
        sets_critic = of_critics & set(self.changed_fields)
        if self.reward_kl is not None or self.missing_eos_penalty is not None or sets_critic:
            return self
        args = copy(self)
        args.settled = {}
        args.critic = "none"
        args.advantage_estimator = "reinforce"
        args.normalize_values = False
        args.settled = {name: getattr(args, name) for name in self.settled}
        return args

    @property
    def other_prompts(self) -> dict[str, str]:
        """Column that a role reads in place of the policy's prompt, or `PRIVILEGED_STATE`."""
        prompts = {}
        if self.critic == "adapter":
            prompts["critic"] = self.critic_options.prompt or PRIVILEGED_STATE
        if self.reference_prompt is not None:
            prompts["reference"] = self.reference_prompt
        names = {EARLIER_NAME: PRIVILEGED_STATE}
        return {role: names.get(column, column) for role, column in prompts.items()}

    @property
    def prompt_seed(self) -> int:
        """Seed of the order of prompts."""
        return self.seed if self.data_seed is None else self.data_seed

    def to_dict(self) -> dict[str, Any]:
        """Settings that are safe to log: placeholders for tokens, and no fields of TRL, which
        have set others."""
        settings = super().to_dict()
        settings["pad_token"] = self.pad_token  # which the Trainer takes for a key
        return without_secrets({name: x for name, x in settings.items() if name not in NAMES})

    @classmethod
    def preset(cls, name: str, output_dir: str | None = None, **overrides: Any) -> "PPOConfig":
        """Published settings of a paper, except for those that are not config fields; see
        docs/variants.md.

        Args:
            name (`str`): `"instructgpt"`, `"n_plus"`, `"vapo"`, `"orz"` or `"dapo"`.
            output_dir (`str`, *optional*): Directory of the run.
            overrides (`dict`): Fields to change, also by names of TRL; mappings are merged.

        Returns:
            [`PPOConfig`]: The config.
        """
        if name not in PRESETS:
            raise ValueError(
                f"Unknown preset {name!r}; choose one of {', '.join(map(repr, PRESETS))}."
            )
        of_paper = yaml.safe_load(PRESETS[name].read_text(encoding="utf-8"))
        return cls(output_dir, **merged(of_paper, overrides))


# of the Trainer's fields; ours have theirs beside them
LIMITS: dict[str, Mapping[str, float]] = {**TABLES["limits"]}
# the text below a field is its help; all other metadata would be arguments of argparse
for _form, _config in {
    "{}": PPOConfig,
    **{f"{name}[{{!r}}]": kind for name, kind in OPTIONS.items()},
}.items():
    for _entry, _text in pairwise(
        cast(ast.ClassDef, ast.parse(inspect.getsource(_config)).body[0]).body
    ):
        if isinstance(_entry, ast.AnnAssign) and isinstance(_text, ast.Expr):
            _field = _config.__dataclass_fields__[_name := ast.unparse(_entry.target)]
            LIMITS[_form.format(_name)] = _field.metadata.get("limits", {})
            _field.metadata = MappingProxyType(
                {"help": " ".join(ast.literal_eval(_text.value).split())}
            )

# default of `loss_aggregation` in the paper of each estimator; RLOO and REINFORCE take
# `"sequence_sum"`
_AGGREGATION: dict[str, Any] = dict.fromkeys(["gae", "rebn"], "token")
_AGGREGATION |= {"grpo": "sequence_mean", "dr_grpo": "constant"}
_WEAK_KL = {
    ("k1", "loss"): "its gradient is zero in expectation; use 'reward'",
    (
        "exact",
        "reward",
    ): "the KL at a token does not depend on that token, so only earlier ones count; use 'both'",
}
# `vf_coef` is missing: its default does not show whether it was set. Scaling per-token rewards
# around their mean would reward length.
_CRITIC_ONLY = (
    "gamma lam critic_learning_rate critic_init critic_kwargs normalize_values whiten_rewards "
    "cliprange_value"
).split()
# at these values the sampled distribution is the policy's
_FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# values that are valid despite their annotations
_TYPES: dict[str, Any] = {
    "max_grad_norm": float | None,
    "max_completion_length": int | None,
    "scale_rewards": str | bool | None,
    "resume_from_checkpoint": str | bool | None,
    "accelerator_config": AcceleratorConfig | dict | str | None,
    "fsdp": str | bool | list[str] | None,
    "debug": str | list[str] | None,
}
_COMPARISONS = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def check_limits(config: Any, form: str = "{}") -> None:
    """Raise a `ValueError` if a number is beyond the limits of its field."""
    for entry in fields(config):
        name = form.format(entry.name)
        value = getattr(config, entry.name, None)
        limits = LIMITS.get(name, {})
        if value is None or all(_COMPARISONS[side](value, limit) for side, limit in limits.items()):
            continue
        needed = " and ".join(f"{side.replace('_', ' ')} {limit}" for side, limit in limits.items())
        raise ValueError(f"`{name}` must be {needed}, got {value}.")


def check_types(config: Any, form: str = "{}") -> None:
    """Raise a `ValueError` if a value has another type than its field, e.g. from a YAML file."""
    hints = get_type_hints(type(config))
    for entry in fields(config):
        name = form.format(entry.name)
        value = getattr(config, entry.name, None)
        if not entry.init or value is entry.default:
            continue
        hint = _TYPES.get(entry.name, hints[entry.name])
        if get_origin(hint) in (Union, UnionType):
            types = get_args(hint)
        else:
            types = (hint,)
        enums = [x for x in types if isinstance(x, type) and issubclass(x, Enum)]
        choices = entry.metadata.get("choices") or [
            member.value for enum in enums for member in enum
        ]
        if choices:
            types = (Literal[tuple(choices)],)
        try:
            type_validator(name, value, Union[tuple(map(_accepted, types))])  # noqa: UP007
        except TypeError:  # its text would show secrets
            needed = " or ".join(map(_needed, types))
            # in YAML 1.1 `eval_strategy: no` is a boolean
            if isinstance(value, bool):
                quotes = " In YAML, no, off, yes and on are booleans: quote them."
            else:
                quotes = ""
            raise ValueError(
                f"`{name}` must be {needed}, got {shown(name, value)}.{quotes}"
            ) from None
        for x in value if isinstance(value, list | tuple) else [value]:
            if isinstance(x, float) and not math.isfinite(x):
                raise ValueError(f"`{name}` must be finite, got {value}.")
            if isinstance(x, str) and ("\0" in x or x != x.encode(errors="replace").decode()):
                raise ValueError(
                    f"`{name}` contains a NUL or an unpaired surrogate, invalid in a path; remove "
                    "it."
                )


def _accepted(hint: Any) -> Any:
    """Widen an annotation: integers for floats, paths for text, tuples for lists."""
    if get_origin(hint) is list:
        entry: Any = _accepted(get_args(hint)[0])
        return list[entry] | tuple[entry, ...]
    return {float: float | int, str: str | os.PathLike}.get(hint, hint)


def _needed(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    return inspect.formatannotation(hint).removesuffix("Type")  # of NoneType
