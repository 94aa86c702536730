"""Configuration of a run, and checks of its fields."""

import inspect
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from huggingface_hub.dataclasses import type_validator
from transformers import GenerationConfig, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import is_torch_bf16_gpu_available, logging

from .ppo.batch_plan import BatchPlan, factor_of
from .ppo.math import TRUST, AdaptiveKL, SamplerCorrection
from .presets import load_preset
from .redaction import shown, without_secrets
from .trl_fields import TYPES as TRL_TYPES
from .trl_fields import TRLFields, applied

logger = logging.get_logger(__name__)

# of the distribution that is sampled; at these values it is the policy's
FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
LOCK = ".lock"  # in the output directory; a run that trains holds it
LARGEST_SCORE = 1e9  # of a reward: sums of squares of larger ones, in statistics and losses, may overflow float32


@dataclass(repr=False)
class PPOConfig(TRLFields, TrainingArguments):
    r"""Configuration of the [`PPOTrainer`].

    Only the fields that PPO adds to [`~transformers.TrainingArguments`], or whose default it changes, are listed.
    Sampling fields are named as in TRL's `GRPOConfig`, PPO fields as in TRL's last `PPOConfig`. Their other fields are
    accepted too: each sets one of these, changes nothing, or raises an error with the reason. See docs/from_grpo.md.

    A rollout has `per_device_train_batch_size × gradient_accumulation_steps × num_mini_batches` completions per
    process and feeds `num_ppo_epochs × num_mini_batches` optimizer steps. `max_steps`, `save_steps` and
    `logging_steps` count optimizer steps.

    Args:
        learning_rate (`float`, *optional*, defaults to `5e-5`):
            Initial learning rate of AdamW. LoRA needs about ten times the rate of full fine-tuning.
        adam_epsilon (`float`, *optional*, defaults to `1e-5`):
            Epsilon of AdamW. PPO has used 1e-5 from the start; 1e-8 clips about four times as many tokens.
        bf16 (`bool`, *optional*): Compute in bfloat16; trained weights are float32. Default on GPUs except V100, T4.
        logging_steps (`float`, *optional*, defaults to `10`): Optimizer steps between two logs.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            Filter NaN and inf from the logged loss, which waits for the GPU at every micro-batch. If off, they count
            as 0.
        logging_first_step (`bool`, *optional*):
            Log after the first optimizer step, and so the first rollout. Default, except with `logging_strategy="no"`.
        remove_unused_columns (`bool`, *optional*, defaults to `False`): Must stay `False`: rewards need the columns.
        model_init_kwargs (`dict`, *optional*):
            Keyword arguments of `from_pretrained` when `model` is a string. A `dtype` overrides `bf16`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether models and tokenizers may run code.
        shuffle_dataset (`bool`, *optional*, defaults to `True`): Whether to shuffle the prompts (not of a stream).
        chat_template_kwargs (`dict`, *optional*): Keyword arguments of the chat template, for conversational prompts.
        max_prompt_length (`int`, *optional*): Maximum length of a prompt. Default: what the model's context leaves.
        overlong_prompts (`str`, *optional*, defaults to `"error"`):
            A prompt that is longer is an `"error"`, or `"truncate"` keeps its end, or `"drop"` skips it.
        pad_token (`str`, *optional*): Padding token. Defaults to the tokenizer's, else to EOS. Padding is masked.
        num_generations (`int`, *optional*, defaults to `1`): Completions sampled per prompt.
        generation_batch_size (`int`, *optional*):
            Completions of a rollout, over all processes. Determines `num_mini_batches`, as in GRPO, or
            `gradient_accumulation_steps` if `num_mini_batches` is set.
        per_device_generation_batch_size (`int`, *optional*): Completions sampled at a time per process. Default: all.
        max_completion_length (`int`, *optional*, defaults to `256`): Maximum length of a completion, in tokens.
        stop_token_ids (`list[int]`, *optional*): Tokens that end a completion, besides EOS of tokenizer and model.
        stop_strings (`list[str]`, *optional*): Texts that end a completion, at the token that completes one.
        temperature (`float`, *optional*, defaults to `1.0`): Temperature of sampling and of log-probs.
        top_p (`float`, *optional*, defaults to `1.0`): Sample from the likeliest tokens with this total probability.
        top_k (`int`, *optional*, defaults to `0`): Sample from this many most likely tokens; 0 or `None` means all.
        min_p (`float`, *optional*): Lowest probability to sample, relative to the most likely token's.
        repetition_penalty (`float`, *optional*, defaults to `1.0`): Penalty on tokens that have already occurred.
        generation_backend (`str`, *optional*, defaults to `"transformers"`):
            `"transformers"` samples with `generate`, `"continuous_batching"` with its continuous batching, `"vllm"`
            with vLLM. See docs/generation.md.
        generation_kwargs (`dict`, *optional*):
            Further fields of [`~transformers.GenerationConfig`], of continuous batching's config, or of vLLM's `LLM`.
        vllm_mode (`str`, *optional*, defaults to `"colocate"`):
            `"colocate"` runs vLLM in each process of the run, `"server"` uses a server that you start.
        vllm_base_model (`str`, *optional*): Base that vLLM serves, if not `model`. Its weights must be the same.
        vllm_server_base_url (`str`, *optional*):
            Address of the server, by default http://127.0.0.1:8000. It must see `output_dir` under the same path. Its
            key is read from the environment variable `VLLM_API_KEY`.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Seconds to wait for a server that cannot be reached, e.g. while it starts or is restarted.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.3`):
            Share of the GPU's memory for a colocated vLLM, with its copy of the base.
        vllm_max_model_length (`int`, *optional*):
            Longest prompt with completion for which a colocated vLLM reserves memory. Default: the model's context.
        vllm_enable_sleep_mode (`bool`, *optional*, defaults to `False`):
            Whether a colocated vLLM frees its keys and values on the GPU between rollouts.
        vllm_sleep_level (`int`, *optional*, defaults to `0`): 1 moves its base to CPU memory meanwhile, too.
        vllm_importance_sampling_correction (`bool`, *optional*, defaults to `False`):
            Whether advantages are weighted by the ratio of policy and sampler, which compute with different kernels.
        vllm_importance_sampling_mode (`str`, *optional*, defaults to `"sequence_truncate"`):
            The ratio of each `"token_..."`, of the `"sequence_..."`, or its `"geometric_..."` mean; `"..._truncate"`
            clamps it to the two limits, `"..._mask"` sets it to 0 outside.
        vllm_importance_sampling_clip_max (`float`, *optional*, defaults to `3.0`): Largest ratio.
        vllm_importance_sampling_clip_min (`float`, *optional*): Smallest ratio.
        vllm_max_logp_difference (`float`, *optional*):
            End the run when log-probs of policy and sampler differ by more than this in the mean of a rollout: then
            vLLM samples from other weights. Default: 0.1 nats, 0.01 in float32, none with `top_p` and other filters.
        max_tool_calling_iterations (`int`, *optional*):
            Maximum number of turns of an episode that tools or an environment answer. Unlimited by default.
        environment_timeout (`float`, *optional*):
            Seconds after which an environment, or a turn's tools, fail. `reward_on_error` decides on the episode.
        reward_weights (`list[float]`, *optional*): Weight of each reward. All are 1 by default.
        reward_quantization (`str`, *optional*, defaults to `"nf4"`):
            Quantization of reward models loaded by name: `"nf4"`, `"fp4"`, `"int8"` or `"none"`.
        per_device_reward_batch_size (`int`, *optional*, defaults to `16`): Completions per forward of a reward model.
        reward_label (`int`, *optional*): Label that is the reward, for reward models with several; counted from 0.
        reward_on_error (`str`, *optional*, defaults to `"raise"`):
            When a reward fails, `"raise"` ends the run, `"skip"` excludes the completion, a number is its score.
        max_reward_failures (`float`, *optional*, defaults to `0.5`):
            Maximum share of a rollout's completions for which a reward may fail before the run ends.
        reward_timeout (`float`, *optional*):
            Seconds after which a reward function fails for the rollout. Functions then run in a thread.
        reward_baseline (`str`, *optional*):
            `"reference"` subtracts the mean score of the first rollout, which the reference sampled.
        normalize_rewards (`bool`, *optional*, defaults to `False`):
            Whether to normalize scores by their running mean and standard deviation.
        reward_clip_range (`float`, *optional*): Clip the weighted sum of the rewards to ± this.
        missing_eos_penalty (`float`, *optional*): Penalty subtracted from the score of a truncated completion.
        mask_truncated_completions (`bool`, *optional*, defaults to `False`):
            Whether the policy skips truncated completions; a critic learns from them.
        bootstrap_truncated (`bool`, *optional*, defaults to `False`):
            Whether the critic's value stands for what would have followed a completion that `max_completion_length` or
            `max_tool_calling_iterations` truncated, as it does after episodes that their environment truncates.
        num_ppo_epochs (`int`, *optional*, defaults to `4`): Passes over a rollout.
        num_mini_batches (`int`, *optional*): Optimizer steps per pass. 1 by default, see `generation_batch_size`.
        kl_coef (`float`, *optional*, defaults to `0.05`):
            Coefficient of the KL penalty. 0 skips the reference's forward, and the KL is not logged.
        kl_estimator (`str`, *optional*, defaults to `"k1"`):
            Per-token KL: estimated from the sampled token (`"k1"`, `"k2"`, `"k3"`), or `"exact"` over all tokens.
        kl_placement (`str`, *optional*, defaults to `"reward"`):
            Apply the KL penalty to the `"reward"` (for k1), the `"loss"`, or `"both"` (for the exact KL).
        kl_target (`float`, *optional*): Adapt `kl_coef` to keep the mean KL per completion at this many nats.
        kl_horizon (`int`, *optional*, defaults to `10000`): Completions over which `kl_coef` adapts; larger is slower.
        target_kl (`float`, *optional*):
            Stop a rollout's updates when the policy has moved this far since sampling, in nats per token.
        advantage_estimator (`str`, *optional*):
            With a critic `"gae"` (then the default), or `"auto"`, which weighs its values against the mean return by
            how well they predicted earlier rollouts. Without one: `"grpo"` (then the default), `"dr_grpo"`, `"rloo"`,
            `"reinforce"` or `"rebn"` (whitened rewards-to-go per token).
        advantage_level (`str`, *optional*, defaults to `"token"`):
            With tools or an environment, `"turn"` gives all tokens of a turn one advantage: rewards are summed over a
            turn, values are those at its first token, and `gamma` and `lam` count turns.
        critic (`str`, *optional*, defaults to `"side"`):
            `"side"` network on states of several layers and the position (nothing flows back into the policy), value
            `"head"` on the policy's last state, value head on an `"adapter"` of its own, or `"none"`.
        critic_backprop (`bool`, *optional*, defaults to `True`):
            Whether the value loss of `critic="head"` also trains the policy's adapter.
        critic_learning_rate (`float`, *optional*):
            Learning rate of the critic. Defaults to 1e-3 for `critic="side"`, which starts from scratch, else to
            `learning_rate`.
        normalize_values (`bool`, *optional*):
            Whether values are predicted in units of a running mean and deviation of the returns (PopArt). A new critic
            then begins at the mean return, and advantages, `vf_coef` and `cliprange_value` do not depend on the
            rewards' scale. Defaults to `True` with a critic, except with DeepSpeed.
        critic_init (`str`, *optional*): Pretrained critic, checkpoint or, for `critic="adapter"`, reward adapter.
        critic_prompt (`str`, *optional*):
            Column with the prompt of the critic (text or chat messages), in which it may read what the policy must not
            know, such as the answer. Needs `critic="adapter"`.
        value_warmup_steps (`int`, *optional*, defaults to `0`): Optimizer steps in which only the critic learns.
        cliprange (`float`, *optional*):
            Clip range of the ratio, e.g. 0.2. By default a token's probability changes at most by a factor of 2 per
            rollout, up or down: `cliprange=0.5`, `cliprange_high=1.0` and `dual_clip=2.0`, unless they are set.
        cliprange_high (`float`, *optional*): Clip range above 1. Defaults to `cliprange`.
        dual_clip (`float`, *optional*): Upper bound, above 1, of the ratio when the advantage is negative.
        importance_sampling_level (`str`, *optional*, defaults to `"token"`):
            Ratio per `"token"`, `"turn"` of an episode or `"sequence"`, the latter two normalized by length.
        loss_aggregation (`str`, *optional*):
            Mean over `"token"`s (default), over completions of their `"sequence_mean"` (default of GRPO) or
            `"sequence_sum"` (of RLOO, REINFORCE), or `"constant"`: that / `max_completion_length` (of Dr. GRPO).
        cliprange_value (`float`, *optional*):
            Clip range of the values, in units of the returns with `normalize_values`, else of rewards. Default: none.
        value_range (`list[float]`, *optional*): Lowest and highest return, e.g. `[0, 1]`, to which values are clamped.
        value_loss_weights (`str`, *optional*, defaults to `"uniform"`):
            `"prompt_std"` weighs the value loss of a completion by 1/std of the returns of its prompt's completions,
            with mean 1. Needs `num_generations` of at least 2.
        vf_coef (`float`, *optional*, defaults to `0.5`): Coefficient of the value loss.
        entropy_coef (`float`, *optional*, defaults to `0.0`): Coefficient of the entropy bonus.
        entropy_target (`float`, *optional*): Adapt `entropy_coef` to keep the entropy above this many nats per token.
        gamma (`float`, *optional*, defaults to `1.0`): Discount factor.
        lam (`float`, *optional*, defaults to `0.95`): λ of generalized advantage estimation.
        lam_critic (`float`, *optional*): λ of the critic's targets. Defaults to `lam`.
        lam_length_alpha (`float`, *optional*): α of λ = 1 − 1/(α·length), which replaces `lam` for the policy.
        whiten_rewards (`bool`, *optional*, defaults to `False`):
            Whether to scale the per-token rewards of a rollout to unit variance; their mean is kept.
        whiten_advantages (`bool`, *optional*):
            Whether to whiten a rollout's advantages. Default for `"rebn"`, and critics without `normalize_values`.
        offload_rollout (`bool`, *optional*, defaults to `False`):
            Whether to keep a rollout's tensors in CPU memory, except for the current micro-batch.
        offload_rewards (`bool`, *optional*, defaults to `False`): Whether to keep idle reward models in CPU memory.
        max_skipped_steps (`int`, *optional*, defaults to `5`):
            End the run after this many consecutive steps with a NaN or inf gradient (not with fp16's scaler).
        resume_from_checkpoint (`str` or `bool`, *optional*):
            Checkpoint from which `train()` resumes, `True` for the latest valid one in `output_dir`, or `False` to
            begin anew and move those of an earlier run aside.
        resume_with_changed_settings (`bool`, *optional*, defaults to `False`):
            Whether a checkpoint may be resumed under settings that differ from those it was saved under.
        log_completions (`bool`, *optional*, defaults to `False`): Whether to print completions with the metrics.
        num_completions_to_print (`int`, *optional*, defaults to `8`): Completions to print. `None` prints all.
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012 (the base class declares it without an annotation)
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "chat_template_kwargs",
        "generation_kwargs",
    ]

    learning_rate: float = 5e-5
    adam_epsilon: float = 1e-5
    bf16: bool | None = None
    logging_steps: float = 10
    logging_nan_inf_filter: bool = False
    logging_first_step: bool | None = None
    remove_unused_columns: bool | None = False

    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False

    shuffle_dataset: bool = True
    chat_template_kwargs: dict[str, Any] | str | None = None
    max_prompt_length: int | None = None
    overlong_prompts: Literal["error", "truncate", "drop"] = "error"
    pad_token: str | None = None
    num_generations: int = 1
    generation_batch_size: int | None = None
    per_device_generation_batch_size: int | None = None
    max_completion_length: int = 256
    stop_token_ids: list[int] | None = None
    stop_strings: list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_backend: Literal["transformers", "continuous_batching", "vllm"] = "transformers"
    generation_kwargs: dict[str, Any] | str | None = None
    vllm_mode: Literal["colocate", "server"] = "colocate"
    vllm_base_model: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_timeout: float = 240.0
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_enable_sleep_mode: bool = False
    vllm_sleep_level: Literal[0, 1] = 0
    vllm_importance_sampling_correction: bool = False
    vllm_importance_sampling_mode: SamplerCorrection = "sequence_truncate"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    vllm_max_logp_difference: float | None = None

    max_tool_calling_iterations: int | None = None
    environment_timeout: float | None = None

    reward_weights: list[float] | None = None
    reward_quantization: Literal["nf4", "fp4", "int8", "none"] | None = "nf4"
    per_device_reward_batch_size: int = 16
    reward_label: int | None = None
    reward_on_error: str = "raise"
    max_reward_failures: float = 0.5
    reward_timeout: float | None = None
    reward_baseline: Literal["reference"] | None = None
    normalize_rewards: bool = False
    reward_clip_range: float | None = None
    missing_eos_penalty: float | None = None
    mask_truncated_completions: bool = False
    bootstrap_truncated: bool = False

    num_ppo_epochs: int = 4
    num_mini_batches: int | None = None
    kl_coef: float = 0.05
    kl_estimator: Literal["k1", "k2", "k3", "exact"] = "k1"
    kl_placement: Literal["reward", "loss", "both"] = "reward"
    kl_target: float | None = None
    kl_horizon: int = 10000
    target_kl: float | None = None
    advantage_estimator: Literal["gae", "auto", "grpo", "dr_grpo", "rloo", "reinforce", "rebn"] | None = None
    advantage_level: Literal["token", "turn"] = "token"
    critic: Literal["head", "side", "adapter", "none"] = "side"
    critic_backprop: bool = True
    critic_learning_rate: float | None = None
    normalize_values: bool | None = None
    critic_init: str | None = None
    critic_prompt: str | None = None
    value_warmup_steps: int = 0
    cliprange: float | None = None
    cliprange_high: float | None = None
    dual_clip: float | None = None
    importance_sampling_level: Literal["token", "turn", "sequence"] = "token"
    loss_aggregation: Literal["token", "sequence_mean", "sequence_sum", "constant"] | None = None
    cliprange_value: float | None = None
    value_range: list[float] | None = None
    value_loss_weights: Literal["uniform", "prompt_std"] = "uniform"
    vf_coef: float = 0.5
    entropy_coef: float = 0.0
    entropy_target: float | None = None
    gamma: float = 1.0
    lam: float = 0.95
    lam_critic: float | None = None
    lam_length_alpha: float | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool | None = None

    offload_rollout: bool = False
    offload_rewards: bool = False

    max_skipped_steps: int = 5
    resume_with_changed_settings: bool = False

    log_completions: bool = False
    num_completions_to_print: int | None = 8

    def __post_init__(self):
        check_types(self)
        with applied(self):
            self._finish()

    def _finish(self) -> None:
        # for the report, before defaults are filled in
        defaults = {field.name: field.default for field in fields(self)}
        self.changed_fields = [name for name, x in defaults.items() if x not in (MISSING, getattr(self, name, None))]
        # 1. Defaults that depend on other fields
        with_critic = self.critic != "none"
        if self.bf16 is None:
            emulated = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
            self.bf16 = not (self.fp16 or self.use_cpu or emulated) and is_torch_bf16_gpu_available()
        self.advantage_estimator = self.advantage_estimator or ("gae" if with_critic else "grpo")
        self.loss_aggregation = self.loss_aggregation or _AGGREGATION.get(self.advantage_estimator, "sequence_sum")
        if self.normalize_values is None:
            self.normalize_values = with_critic and not self.uses_deepspeed
        if self.whiten_advantages is None:  # it would turn the small advantages of a good critic back into noise
            self.whiten_advantages = self.advantage_estimator == "rebn" or (with_critic and not self.normalize_values)
        self._set_clip()
        self.top_k = self.top_k or 0
        self.max_grad_norm = self.max_grad_norm or 0.0  # the Trainer compares it with 0
        if self.use_liger_kernel:
            logger.warning("`use_liger_kernel=True` changes nothing: log-probs are fused already.")
            self.use_liger_kernel = False
        if self.logging_first_step is None:
            self.logging_first_step = self.logging_strategy != "no"
        if self.ddp_find_unused_parameters is None:
            # every trainable parameter takes part in every forward, so the search would only cost time
            self.ddp_find_unused_parameters = False
        # 2. Rules, before the base class creates directories
        self.check_values()
        # 3. Parsing of JSON, devices, world size
        super().__post_init__()
        # 4. Rules that need them
        data = self.accelerator_config
        if data.split_batches or not data.even_batches:
            raise ValueError(
                "`accelerator_config` must leave `split_batches` False and `even_batches` True, because ranks share a "
                f"rollout evenly, got split_batches={data.split_batches} and even_batches={data.even_batches}."
            )
        data.dispatch_batches = False  # each rank reads a stream itself; text cannot be sent
        self._check_generation_kwargs()
        size, sizes = self.generation_batch_size, (self.per_device_train_batch_size, self.world_size)
        if size is None:
            self.num_mini_batches = self.num_mini_batches or 1
        elif self.num_mini_batches is None:
            accumulation = self.gradient_accumulation_steps
            self.num_mini_batches = factor_of(size, "gradient_accumulation_steps", accumulation, *sizes)
        else:
            steps = factor_of(size, "num_mini_batches", self.num_mini_batches, *sizes)
            # DeepSpeed's config has been filled in by now and would keep the default of 1
            if self.gradient_accumulation_steps not in ({1, steps} if self.deepspeed is None else {steps}):
                raise ValueError(
                    f"`gradient_accumulation_steps` must be {steps} for a `generation_batch_size` of {size} and "
                    f"`num_mini_batches={self.num_mini_batches}`, got {self.gradient_accumulation_steps}; remove one."
                )
            self.gradient_accumulation_steps = steps
        completions = BatchPlan.from_config(self, self.world_size).completions
        if self.kl_target is not None and self.kl_horizon <= AdaptiveKL.MAX_ERROR * completions:
            raise ValueError(
                f"`kl_horizon` must be above {AdaptiveKL.MAX_ERROR * completions:g} for rollouts of {completions} "
                f"completions, or `kl_coef` could turn negative, got {self.kl_horizon}; use a much larger one."
            )

    def _set_clip(self) -> None:
        if self.cliprange is None:
            self.cliprange = 1 - 1 / TRUST
            self.cliprange_high = TRUST - 1 if self.cliprange_high is None else self.cliprange_high
            # likelier tokens have no gradient beyond, whatever their advantage: they would hold others back
            self.dual_clip = TRUST if self.dual_clip is None else self.dual_clip

    @property
    def uses_deepspeed(self) -> bool:
        """Whether the config or the launcher enables DeepSpeed."""
        return self.deepspeed is not None or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"

    def check_values(self) -> None:
        """Raise a `ValueError` if a value is out of range, unsupported, or contradicts another."""
        for needed, (fits, names) in _RANGES.items():
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not fits(value):
                    raise ValueError(f"`{name}` must be {needed}, got {value}.")
        self._check_mappings()
        for name, why in _UNSUPPORTED.items():
            value, default = getattr(self, name, None), TrainingArguments.__dataclass_fields__[name].default
            if value not in (default, None, False):
                raise ValueError(f"`{name}={value!r}` is not supported: {why}. Leave it at {default!r}.")
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be False: rewards need the columns of the dataset.")
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            raise ValueError("`load_best_model_at_end=True` needs `metric_for_best_model`, e.g. 'eval_reward'.")
        self._check_reward_on_error()
        self._check_coefficients()
        self._check_critic()
        self._check_sampling()

    def _check_mappings(self) -> None:
        """Raise for text that is not a JSON object, in fields that hold a mapping."""
        for name in self._VALID_DICT_FIELDS:
            text, may_be_file = getattr(self, name, None), name in ("accelerator_config", "deepspeed", "fsdp_config")
            if not isinstance(text, str) or (may_be_file and os.path.isfile(text)):
                continue
            try:
                valid = isinstance(json.loads(text), dict)
            except (ValueError, RecursionError):
                valid = False
            if not valid:
                file = ", or the path of a file" if may_be_file else ""
                raise ValueError(f"`{name}` must be a mapping, its JSON ('{{\"a\": 1}}'){file}, got other text.")

    def _check_reward_on_error(self) -> None:
        if self.reward_on_error in ("raise", "skip"):
            return
        try:
            score = float(self.reward_on_error)
        except (ValueError, OverflowError):
            score = math.nan
        if not abs(score) <= LARGEST_SCORE:
            needed, got = f"'raise', 'skip' or a finite number within ±{LARGEST_SCORE:g}", self.reward_on_error
            raise ValueError(f"`reward_on_error` must be {needed}, got {shown('reward_on_error', got)}.")
        self.reward_on_error = str(score)  # text, as on a command line

    def _check_coefficients(self) -> None:
        """Check the coefficients of KL and entropy."""
        if self.entropy_target is not None and self.entropy_coef < 0:
            raise ValueError(f"`entropy_coef` must be at least 0 with `entropy_target`, got {self.entropy_coef}.")
        if self.kl_placement == "both" and self.kl_estimator != "exact":
            raise ValueError(f"`kl_placement='both'` needs `kl_estimator='exact'`, got {self.kl_estimator!r}.")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("`kl_target` scales `kl_coef`, which must not start at 0; try `kl_coef=0.05`.")
        if self.kl_target is None and self.kl_horizon != 10000:
            raise ValueError(f"`kl_horizon={self.kl_horizon}` needs a `kl_target`; set one, or remove it.")
        kl = self.kl_estimator, self.kl_placement
        if self.kl_coef and kl in _WEAK_KL:
            logger.warning("`kl_estimator=%r` with `kl_placement=%r` hardly limits the policy: %s.", *kl, _WEAK_KL[kl])

    def _check_critic(self) -> None:
        estimator = self.advantage_estimator
        if (estimator in ("gae", "auto")) == (self.critic == "none"):
            raise ValueError(
                f"`advantage_estimator={estimator!r}` does not work with `critic={self.critic!r}`; use 'gae' or "
                "'auto' with a critic, and 'grpo', 'dr_grpo', 'rloo', 'reinforce' or 'rebn' without."
            )
        if estimator in ("grpo", "dr_grpo", "rloo") and self.num_generations < 2:
            raise ValueError(
                f"`num_generations` must be at least 2 for `advantage_estimator={estimator!r}`, which compares the "
                f"completions of a prompt, got {self.num_generations}; use e.g. 8, or 'reinforce'."
            )
        if self.advantage_level == "turn" and self.critic == "none" and estimator != "rebn":
            raise ValueError(
                f"`advantage_level='turn'` needs a critic or `advantage_estimator='rebn'`, got {estimator!r}, which "
                "gives all tokens of an episode one advantage; use 'token'."
            )
        if self.normalize_values and self.critic == "none":
            raise ValueError("`normalize_values=True` needs a critic, and `critic='none'`; remove it.")
        for name in _CRITIC_ONLY if self.critic == "none" else ():
            value, default = getattr(self, name), PPOConfig.__dataclass_fields__[name].default
            if value != default and (name, estimator) != ("gamma", "rebn"):
                raise ValueError(f"`{name}={value!r}` needs a critic, and `critic='none'`; leave it at {default!r}.")
        if self.value_range is not None and (len(self.value_range) != 2 or self.value_range[0] >= self.value_range[1]):
            raise ValueError(
                f"`value_range` must be the lowest and the highest return, got {self.value_range}; use e.g. [0, 1]."
            )
        if self.value_loss_weights == "prompt_std" and self.num_generations < 2:
            raise ValueError(
                "`num_generations` must be at least 2 for `value_loss_weights='prompt_std'`, which compares the "
                f"completions of a prompt, got {self.num_generations}; use e.g. 8, or 'uniform'."
            )
        if self.critic_prompt is not None and self.critic != "adapter":
            raise ValueError(
                f"`critic_prompt={self.critic_prompt!r}` needs `critic='adapter'`, got {self.critic!r}: any other "
                "critic reads states of the policy, which must not see that column."
            )
        if self.critic == "adapter" and not self.critic_backprop:
            raise ValueError("`critic_backprop` must be True for `critic='adapter'`, which would stay untrained.")

    def _check_sampling(self) -> None:
        if self.stop_strings and self.generation_backend != "transformers":
            raise ValueError("`stop_strings` needs `generation_backend='transformers'`; or use `stop_token_ids`.")
        if self.repetition_penalty != 1 and self.generation_backend == "continuous_batching":
            raise ValueError(
                "`repetition_penalty` must be 1.0 with continuous batching, which applies it to the newest token "
                f"only, got {self.repetition_penalty}; use `generation_backend='transformers'`."
            )
        if self.generation_backend != "vllm":
            unread = [name for name in self.changed_fields if name.startswith("vllm_")]
            if unread:
                logger.warning("Without `use_vllm=True` these fields have no effect: %s.", ", ".join(unread))
            return
        if self.vllm_mode == "server" and (self.generation_kwargs or self.vllm_enable_sleep_mode):
            raise ValueError(
                "`generation_kwargs` and `vllm_enable_sleep_mode` are those of a colocated vLLM; remove them, and "
                "configure the server where you start it."
            )
        if not (self.vllm_server_base_url or "http://").startswith(("http://", "https://")):
            url = shown("vllm_server_base_url", self.vllm_server_base_url)
            raise ValueError(f"`vllm_server_base_url` must start with http:// or https://, got {url}.")
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"`vllm_importance_sampling_clip_min` must be below `vllm_importance_sampling_clip_max` ({high}), got "
                f"{low}."
            )
        changed = {name: getattr(self, name) for name in FILTERS if getattr(self, name) not in (None, FILTERS[name])}
        if changed and self.vllm_importance_sampling_correction:
            given = ", ".join(f"`{name}={value}`" for name, value in changed.items())
            raise ValueError(
                f"{given} changes the distribution that vLLM samples from, but not that of the policy, so the ratio "
                "of the two would be biased; remove it, or set `vllm_importance_sampling_correction=False`."
            )

    def _check_generation_kwargs(self) -> None:
        names, backend = set(self.generation_kwargs or {}), self.generation_backend
        if backend == "vllm":
            problems = {", which follows from the run; remove it": names & _OF_THE_ENGINE}
        elif backend == "continuous_batching":
            allowed = ", ".join(sorted(_CONTINUOUS_BATCHING))
            problems = {f"; continuous batching takes only {allowed}": names - _CONTINUOUS_BATCHING}
        else:
            problems = {
                ", an unknown field of `GenerationConfig`": names - vars(GenerationConfig()).keys(),
                ", on which log-probs and shapes depend; set the field of `PPOConfig` if it has one, else remove it "
                "(`num_generations` repeats prompts)": names & _OF_THE_POLICY,
            }
        for problem, refused in problems.items():
            for name in refused:
                raise ValueError(f"`generation_kwargs` holds `{name}`{problem}.")

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # `dataclass` would add one that shows tokens
            cls.__repr__ = PPOConfig.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        lines = "".join(f"{name}={value},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __str__ = __repr__

    @property
    def prompt_seed(self) -> int:
        """Seed of the order of prompts."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def uses_reference(self) -> bool:
        """Whether log-probs under the reference are needed."""
        return self.kl_coef != 0

    @property
    def trains_entropy(self) -> bool:
        """Whether the entropy enters the loss."""
        return self.entropy_coef != 0 or self.entropy_target is not None

    def to_dict(self) -> dict[str, Any]:
        """Settings that are safe to log.

        Returns:
            `dict`: The fields, with placeholders for tokens, also for those in `model_init_kwargs`. Fields of TRL are
                omitted: they have set others, or changed nothing.
        """
        return without_secrets({name: x for name, x in super().to_dict().items() if name not in TRL_TYPES})

    @classmethod
    def preset(cls, name: str, output_dir: str | None = None, **overrides: Any) -> "PPOConfig":
        """Published settings of a paper, except for those that are not config fields; see docs/presets.md.

        Args:
            name (`str`): `"instructgpt"`, `"n_plus"`, `"vapo"`, `"orz"` or `"dapo"`.
            output_dir (`str`, *optional*): Directory of the run.
            overrides (`dict`): Fields to change.

        Returns:
            [`PPOConfig`]: The config.

        Raises:
            `ValueError`: If the preset is unknown.
        """
        return cls(output_dir, **(load_preset(name) | overrides))


# the help of `trl-ppo train` is the docstring's
for _name, _help in re.findall(r"^ {8}(\w+) \(.*?\):(.*\n(?: {12}.*\n)*)", PPOConfig.__doc__ or "", re.MULTILINE):
    PPOConfig.__dataclass_fields__[_name].metadata = MappingProxyType({"help": " ".join(_help.split())})

# default of `loss_aggregation` in the paper of each estimator; RLOO and REINFORCE take `"sequence_sum"`
_AGGREGATION: dict[str, Any] = dict.fromkeys(["gae", "auto", "rebn"], "token")
_AGGREGATION |= {"grpo": "sequence_mean", "dr_grpo": "constant"}
# numbers must also be finite
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "at least 1": (
        lambda x: x >= 1,
        "num_generations generation_batch_size per_device_generation_batch_size max_completion_length num_ppo_epochs "
        "max_prompt_length per_device_reward_batch_size num_mini_batches total_episodes kl_horizon max_skipped_steps "
        "gradient_accumulation_steps per_device_train_batch_size per_device_eval_batch_size vllm_max_model_length",
    ),
    "above 0": (
        lambda x: x > 0,
        "temperature repetition_penalty reward_clip_range cliprange cliprange_value cliprange_high kl_target "
        "target_kl critic_learning_rate lam_length_alpha reward_timeout environment_timeout vllm_server_timeout "
        "vllm_importance_sampling_clip_max vllm_max_logp_difference",
    ),
    "at least 0": (
        lambda x: x >= 0,
        "learning_rate weight_decay adam_epsilon max_grad_norm num_train_epochs warmup_steps value_warmup_steps "
        "logging_steps save_steps eval_steps eval_delay dataloader_num_workers ddp_timeout top_k missing_eos_penalty "
        "kl_coef vf_coef entropy_target num_completions_to_print max_tool_calling_iterations",
    ),
    "between 0 and 1": (lambda x: 0 <= x <= 1, "gamma lam lam_critic min_p max_reward_failures"),
    "at least 0 and below 1": (lambda x: 0 <= x < 1, "adam_beta1 adam_beta2"),
    "above 0 and at most 1": (lambda x: 0 < x <= 1, "top_p vllm_gpu_memory_utilization"),
    "above 1": (lambda x: x > 1, "dual_clip"),
    "at least 1, or -1 to use `num_train_epochs`": (lambda x: x == -1 or x >= 1, "max_steps"),
    "from 0 to 2**32 - 1": (lambda x: 0 <= x < 2**32, "seed"),
    "from 0 to 2**63 - 1": (lambda x: 0 <= x < 2**63, "data_seed"),
}
_WEAK_KL = {
    ("k1", "loss"): "its gradient is zero in expectation; use 'reward'",
    ("exact", "reward"): "the KL at a token does not depend on that token, so only earlier ones count; use 'both'",
}
_SAME_FORWARD = "old and new log-probs must come from the same forward"
_UNSUPPORTED = {
    "label_smoothing_factor": "PPO has no labels",
    "train_sampling_strategy": "`shuffle_dataset` determines the order of the prompts",
    "neftune_noise_alpha": _SAME_FORWARD,
    "torch_compile": _SAME_FORWARD,
    "auto_find_batch_size": "it would change the size of the rollout during a run; set `per_device_train_batch_size` "
    "and, to keep the rollout, `generation_batch_size` and `num_mini_batches` instead",
    "bf16_full_eval": "it would cast the adapters in place; `bf16=True` computes in bfloat16",
    "fp16_full_eval": "it would cast the adapters in place; `fp16=True` computes in float16",
    "restore_callback_states_from_checkpoint": "the states of callbacks are always restored",
    "ignore_data_skip": "a resumed run would restart its epoch with other prompts",
    "save_only_model": "resuming needs the optimizer; `save_model()` writes only the weights",
    "include_num_input_tokens_seen": "`num_tokens` is always logged",
    "enable_jit_checkpoint": "SIGTERM, SIGINT and SIGHUP always save a checkpoint, on all processes at one step",
}
# `lam` and `vf_coef` are missing: their defaults do not show whether they were set. Scaling per-token rewards around
# their mean would reward length.
_CRITIC_ONLY = (
    "gamma lam_critic lam_length_alpha bootstrap_truncated critic_backprop critic_learning_rate critic_init "
    "critic_prompt value_warmup_steps whiten_rewards cliprange_value value_range value_loss_weights"
).split()
# determine the sampled distribution and the shapes: fields of the config, or fixed
_OF_THE_POLICY = set(
    "temperature top_p top_k min_p repetition_penalty do_sample max_new_tokens max_length num_return_sequences "
    "num_beams eos_token_id pad_token_id bos_token_id return_dict_in_generate stop_strings penalty_alpha "
    "num_beam_groups diversity_penalty dola_layers low_memory".split()
)
# the other fields of its config are set by the generator, follow from this config, or would have no effect
_CONTINUOUS_BATCHING = set(
    "page_size num_blocks max_batch_tokens max_memory_percent safety_margin cpu_offload_space use_cuda_graph "
    "use_async_batching default_compile_level auto_switch_to_flash".split()
)
# arguments of vLLM's `LLM` that are fields of the config, or on which the log-probs of the sampler depend
_OF_THE_ENGINE = set(
    "model enable_lora max_loras max_lora_rank skip_tokenizer_init generation_config logprobs_mode seed "
    "gpu_memory_utilization max_model_len trust_remote_code enable_sleep_mode tensor_parallel_size".split()
)
# values that are valid despite their annotations
_TYPES: dict[str, Any] = {
    "max_grad_norm": float | None,
    "reward_on_error": str | float,
    "scale_rewards": str | bool | None,
    "resume_from_checkpoint": str | bool | None,
    "accelerator_config": AcceleratorConfig | dict | str | None,
    "fsdp": str | bool | list[str] | None,
    "debug": str | list[str] | None,
}


def check_types(config: Any, skip: tuple[str, ...] = ()) -> None:
    """Raise a `ValueError` if a value has another type than its field, e.g. from a YAML file."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        name, value = field.name, getattr(config, field.name, None)
        if name in skip or not field.init or value is field.default:
            continue
        hint = _TYPES.get(name, hints[name])
        types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        enums = [entry for entry in types if isinstance(entry, type) and issubclass(entry, Enum)]
        choices = field.metadata.get("choices") or [member.value for enum in enums for member in enum]
        if choices:
            types = (Literal[tuple(choices)],)
        try:
            type_validator(name, value, Union[tuple(map(_accepted, types))])  # noqa: UP007
        except TypeError:  # its text would show secrets
            needed = " or ".join(map(_needed, types))
            # in YAML 1.1 `eval_strategy: no` is a boolean
            quotes = " In YAML, no, off, yes and on are booleans: quote them." if isinstance(value, bool) else ""
            raise ValueError(f"`{name}` must be {needed}, got {shown(name, value)}.{quotes}") from None
        for entry in value if isinstance(value, list | tuple) else [value]:
            if isinstance(entry, float) and not math.isfinite(entry):
                raise ValueError(f"`{name}` must be finite, got {value}.")
            if isinstance(entry, str) and ("\0" in entry or entry != entry.encode(errors="replace").decode()):
                raise ValueError(f"`{name}` contains a NUL or an unpaired surrogate, invalid in a path; remove it.")


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
