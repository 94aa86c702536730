"""What a user of [`PPOTrainer`] sets."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from .batch_plan import BatchPlan, accumulation_for

KL_ESTIMATORS = ("k1", "k2", "k3")
REWARD_QUANTIZATIONS = ("nf4", "fp4", "int8", None, "none")


@dataclass
class PPOConfig(TrainingArguments):
    r"""Configuration of the [`PPOTrainer`].

    These are the fields that PPO adds to [`~transformers.TrainingArguments`], or whose default it changes. Sampling
    fields are named as in TRL's `GRPOConfig`, PPO fields as in TRL's last `PPOConfig`.

    A rollout is `per_device_train_batch_size × gradient_accumulation_steps × num_mini_batches` completions on each
    process and feeds `num_ppo_epochs × num_mini_batches` optimizer steps; `max_steps`, `save_steps`, `logging_steps`
    count optimizer steps.

    Args:
        learning_rate (`float`, *optional*, defaults to `5e-5`):
            Initial learning rate of [`AdamW`]. LoRA takes about ten times what full fine-tuning takes.
        adam_epsilon (`float`, *optional*, defaults to `1e-5`):
            Epsilon of AdamW. PPO has used 1e-5 from the start; 1e-8 clips about four times as many tokens.
        bf16 (`bool`, *optional*):
            Train in bfloat16: a base loaded from a string is kept in bfloat16, adapters, heads and losses in float32.
            Defaults to `True` on a GPU that has bfloat16 (unless `fp16` is set), to `False` elsewhere.
        logging_steps (`float`, *optional*, defaults to `10`):
            Optimizer steps between two logs.
        remove_unused_columns (`bool`, *optional*, defaults to `False`):
            Reward functions need the dataset's columns, so none is removed; `True` is refused.

        model_init_kwargs (`dict`, *optional*):
            Keyword arguments of [`~transformers.AutoModelForCausalLM.from_pretrained`], when `model` is a string.
            A `dtype` given here wins over `bf16`.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether models and tokenizers given as strings may run code of their own.

        shuffle_dataset (`bool`, *optional*, defaults to `True`):
            Whether to shuffle the prompts.
        chat_template_kwargs (`dict`, *optional*):
            Keyword arguments of the chat template, for prompts that are messages.
        num_generations (`int`, *optional*, defaults to `1`):
            Completions sampled for each prompt.
        generation_batch_size (`int`, *optional*):
            Completions of a rollout, over all processes. If set, `gradient_accumulation_steps` follows from it.
        per_device_generation_batch_size (`int`, *optional*):
            Completions sampled at a time on a process. Defaults to the whole rollout.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Longest completion, in tokens.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature; log-probabilities are those at this temperature.
        top_p (`float`, *optional*, defaults to `1.0`):
            Sample from the most likely tokens that together have this probability.
        top_k (`int`, *optional*, defaults to `0`):
            Sample from this many most likely tokens; 0 is all.
        min_p (`float`, *optional*):
            Sample from tokens with at least this share of the most likely token's probability.
        repetition_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty on tokens that occurred before.
        generation_kwargs (`dict`, *optional*):
            Further fields of [`~transformers.GenerationConfig`].

        reward_weights (`list[float]`, *optional*):
            Weight of each reward; all are 1 by default.
        reward_quantization (`str`, *optional*, defaults to `"nf4"`):
            How reward models given as strings are loaded: `"nf4"`, `"fp4"`, `"int8"`, or `"none"`.
        per_device_reward_batch_size (`int`, *optional*, defaults to `16`):
            Completions a reward model scores at a time.
        reward_label (`int`, *optional*):
            Which label is the reward, for reward models with several; counted from 0.
        reward_on_error (`str`, *optional*, defaults to `"raise"`):
            What happens where a reward fails: `"raise"` ends the run, `"skip"` leaves the completion out of the update
            and of the statistics, a number stands in for the score.
        max_reward_failures (`float`, *optional*, defaults to `0.5`):
            Share of a rollout's completions that a reward may fail for; with more the run ends.
        reward_baseline (`str`, *optional*):
            `"reference"` subtracts the mean score of the first rollout, which the reference sampled.
        normalize_rewards (`bool`, *optional*, defaults to `False`):
            Shift and scale scores by their running mean and deviation over the run.
        reward_clip_range (`float`, *optional*):
            Clip the weighted sum of the rewards to ± this.
        missing_eos_penalty (`float`, *optional*):
            Subtracted from the score of a completion that was cut off before its EOS.
        mask_truncated_completions (`bool`, *optional*, defaults to `False`):
            Leave completions that were cut off out of the update.

        num_ppo_epochs (`int`, *optional*, defaults to `4`):
            Passes over a rollout.
        num_mini_batches (`int`, *optional*, defaults to `1`):
            Optimizer steps in a pass.
        kl_coef (`float`, *optional*, defaults to `0.05`):
            Coefficient of the KL penalty in the reward.
        kl_estimator (`str`, *optional*, defaults to `"k1"`):
            Estimator of the KL: `"k1"`, `"k2"` or `"k3"`.
        cliprange (`float`, *optional*, defaults to `0.2`):
            Clip range of the ratio.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Clip range of the values; `None` leaves them unclipped.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Coefficient of the value loss.
        entropy_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the entropy bonus.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount factor.
        lam (`float`, *optional*, defaults to `0.95`):
            λ of generalised advantage estimation.
        whiten_rewards (`bool`, *optional*, defaults to `False`):
            Scale the token rewards of a rollout to unit variance (their mean stays).
        whiten_advantages (`bool`, *optional*, defaults to `True`):
            Shift and scale the advantages of a rollout to zero mean and unit variance.

        log_completions (`bool`, *optional*, defaults to `False`):
            Print a table of completions whenever metrics are logged.
        num_completions_to_print (`int`, *optional*, defaults to `8`):
            Rows of that table.
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012 (the base class declares it without an annotation)
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "chat_template_kwargs",
        "generation_kwargs",
    ]

    learning_rate: float = field(default=5e-5, metadata={"help": "Initial learning rate of AdamW."})
    adam_epsilon: float = field(default=1e-5, metadata={"help": "Epsilon of AdamW."})
    bf16: bool | None = field(
        default=None, metadata={"help": "Train in bfloat16. Defaults to True on a GPU that has it, else False."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Optimizer steps between two logs."})
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Must stay False: reward functions need the dataset's columns."}
    )

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of from_pretrained, when `model` is a string."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether models and tokenizers given as strings may run their own code."}
    )

    shuffle_dataset: bool = field(default=True, metadata={"help": "Whether to shuffle the prompts."})
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of the chat template."}
    )
    num_generations: int = field(default=1, metadata={"help": "Completions sampled for each prompt."})
    generation_batch_size: int | None = field(
        default=None,
        metadata={"help": "Completions of a rollout, over all processes. Sets gradient_accumulation_steps."},
    )
    per_device_generation_batch_size: int | None = field(
        default=None, metadata={"help": "Completions sampled at a time on a process. Default: the whole rollout."}
    )
    max_completion_length: int = field(default=256, metadata={"help": "Longest completion, in tokens."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus of the sampling distribution."})
    top_k: int = field(default=0, metadata={"help": "Sample from this many most likely tokens; 0 is all."})
    min_p: float | None = field(default=None, metadata={"help": "Least share of the likeliest token's probability."})
    repetition_penalty: float = field(default=1.0, metadata={"help": "Penalty on tokens that occurred before."})
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further fields of GenerationConfig."}
    )

    reward_weights: list[float] | None = field(default=None, metadata={"help": "Weight of each reward."})
    reward_quantization: str | None = field(
        default="nf4", metadata={"help": "How reward models given as strings are loaded: nf4, fp4, int8 or none."}
    )
    per_device_reward_batch_size: int = field(
        default=16, metadata={"help": "Completions a reward model scores at a time."}
    )
    reward_label: int | None = field(
        default=None, metadata={"help": "Which label is the reward, for reward models with several."}
    )
    reward_on_error: str = field(
        default="raise", metadata={"help": "Where a reward fails: raise, skip the completion, or a number."}
    )
    max_reward_failures: float = field(
        default=0.5, metadata={"help": "Share of a rollout that a reward may fail for before the run ends."}
    )
    reward_baseline: str | None = field(
        default=None, metadata={"help": "'reference' subtracts the mean score of the first rollout."}
    )
    normalize_rewards: bool = field(
        default=False, metadata={"help": "Shift and scale scores by their running mean and deviation."}
    )
    reward_clip_range: float | None = field(default=None, metadata={"help": "Clip the score to plus or minus this."})
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score of a completion without EOS."}
    )
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Leave completions that were cut off out of the update."}
    )

    num_ppo_epochs: int = field(default=4, metadata={"help": "Passes over a rollout."})
    num_mini_batches: int = field(default=1, metadata={"help": "Optimizer steps in a pass over a rollout."})
    kl_coef: float = field(default=0.05, metadata={"help": "Coefficient of the KL penalty in the reward."})
    kl_estimator: str = field(default="k1", metadata={"help": "Estimator of the KL: k1, k2 or k3."})
    cliprange: float = field(default=0.2, metadata={"help": "Clip range of the ratio."})
    cliprange_value: float | None = field(default=0.2, metadata={"help": "Clip range of the values."})
    vf_coef: float = field(default=0.1, metadata={"help": "Coefficient of the value loss."})
    entropy_coef: float = field(default=0.0, metadata={"help": "Coefficient of the entropy bonus."})
    gamma: float = field(default=1.0, metadata={"help": "Discount factor."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalised advantage estimation."})
    whiten_rewards: bool = field(default=False, metadata={"help": "Scale token rewards to unit variance."})
    whiten_advantages: bool = field(
        default=True, metadata={"help": "Shift and scale advantages to zero mean and unit variance."}
    )

    log_completions: bool = field(default=False, metadata={"help": "Print a table of completions at every log."})
    num_completions_to_print: int = field(default=8, metadata={"help": "Rows of that table."})

    def __post_init__(self):
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        self._check_values()
        super().__post_init__()
        for name in set(self.generation_kwargs or {}) - vars(GenerationConfig()).keys():
            raise ValueError(
                f"`generation_kwargs` holds `{name}`, but `transformers.GenerationConfig` has no such field."
            )
        for name in _SET_AS_FIELDS & set(self.generation_kwargs or {}):
            raise ValueError(
                f"`generation_kwargs` holds `{name}`, but log-probabilities and shapes depend on it: set the field "
                "of this config instead (one completion is sampled for each row; `num_generations` repeats rows)."
            )
        if self.ddp_find_unused_parameters is None:
            # every trainable parameter takes part in every forward, so the search would be time lost
            self.ddp_find_unused_parameters = False
        if self.generation_batch_size is not None:
            self._derive_accumulation()
        BatchPlan.from_config(self, self.world_size)

    def _check_values(self) -> None:
        _check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _check_choice("reward_baseline", self.reward_baseline, ("reference", None))
        self.reward_on_error = _read_on_error(self.reward_on_error)
        _check_choice("reward_quantization", self.reward_quantization, REWARD_QUANTIZATIONS)
        for name, (fits, needed) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise ValueError(f"`{name}` must {needed}, got {value}.")
        for name, (off, why) in _NOT_HONOURED.items():
            if getattr(self, name, off) not in (off, None, False):
                raise ValueError(f"`{name}={getattr(self, name)!r}` is not supported: {why}. Leave it at {off!r}.")
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            raise ValueError(
                "`load_best_model_at_end=True` needs `metric_for_best_model`, such as 'eval_reward': there is no "
                "evaluation loss in PPO."
            )
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns=True` would take the columns that rewards need; leave it False.")

    def _derive_accumulation(self) -> None:
        size, passes = self.per_device_train_batch_size, self.world_size
        steps = accumulation_for(int(self.generation_batch_size or 0), self.num_mini_batches, size, passes)
        if self.gradient_accumulation_steps not in (1, steps) or (
            # DeepSpeed's own config has been filled in by now and would keep the old number
            self.deepspeed is not None and self.gradient_accumulation_steps != steps
        ):
            raise ValueError(
                f"`generation_batch_size={self.generation_batch_size}` asks for gradient_accumulation_steps={steps}, "
                f"got {self.gradient_accumulation_steps}; set {steps}, or leave one of the two out."
            )
        self.gradient_accumulation_steps = steps


def _of(names: str, fits: Callable[[Any], bool], needed: str) -> dict[str, tuple[Callable[[Any], bool], str]]:
    return dict.fromkeys(names.split(), (fits, needed))


_RANGES = {
    **_of(
        "num_generations generation_batch_size per_device_generation_batch_size max_completion_length "
        "per_device_reward_batch_size num_ppo_epochs num_mini_batches num_completions_to_print "
        "gradient_accumulation_steps per_device_train_batch_size",
        lambda value: value >= 1 and value == int(value),
        "be a whole number, at least 1",
    ),
    **_of(
        "temperature repetition_penalty reward_clip_range cliprange cliprange_value",
        lambda value: 0 < value < math.inf,
        "be above 0",
    ),
    **_of("top_k missing_eos_penalty kl_coef vf_coef", lambda value: 0 <= value < math.inf, "not be negative"),
    **_of("entropy_coef", math.isfinite, "be finite"),
    **_of("top_p", lambda value: 0 < value <= 1, "lie above 0 and at most at 1"),
    **_of("gamma lam min_p max_reward_failures", lambda value: 0 <= value <= 1, "lie between 0 and 1"),
}
_SET_AS_FIELDS = set(
    "temperature top_p top_k min_p repetition_penalty do_sample max_new_tokens max_length num_return_sequences "
    "num_beams eos_token_id pad_token_id bos_token_id return_dict_in_generate stop_strings".split()
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
