"""What a user of [`PPOTrainer`] sets."""

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from .config_checks import check_generation, check_horizon, check_values, choose_defaults
from .ppo.batch_plan import BatchPlan, accumulation_for
from .presets import load_preset
from .redaction import without_secrets


@dataclass(repr=False)
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
            Whether to shuffle the prompts. A streaming dataset is read in its order; shuffle the stream itself.
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
        generation_backend (`str`, *optional*, defaults to `"transformers"`):
            What samples: `generate` of `"transformers"`, or its `"continuous_batching"`; see docs/generation.md.
        generation_kwargs (`dict`, *optional*):
            Further fields of [`~transformers.GenerationConfig`] or, for continuous batching, of its config.

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
            Coefficient of the KL penalty.
        kl_estimator (`str`, *optional*, defaults to `"k1"`):
            The KL of a token: from the one that was sampled (`"k1"`, `"k2"`, `"k3"`), or `"exact"`, over all tokens.
        kl_placement (`str`, *optional*, defaults to `"reward"`):
            Where the KL penalty enters: `"reward"`, `"loss"`, or `"both"` (for the exact KL). Only k1 in the reward,
            or the exact KL in both, leads to the KL-regularised optimum; see docs/choices.md.
        kl_target (`float`, *optional*):
            Steer `kl_coef` so that a completion's mean KL is this many nats.
        kl_horizon (`int`, *optional*, defaults to `10000`):
            Completions over which that steering acts; a longer one is slower.
        target_kl (`float`, *optional*):
            End a rollout's updates once the policy has moved this far from the one that sampled, in nats a token.
        advantage_estimator (`str`, *optional*):
            `"gae"` with a critic. Without one: `"grpo"` (the default then), `"dr_grpo"`, `"rloo"` or `"reinforce"`.
        critic (`str`, *optional*, defaults to `"head"`):
            `"head"`: a value head on the policy's trunk. `"adapter"`: a value head on an adapter of its own.
            `"none"`: no critic.
        critic_backprop (`bool`, *optional*, defaults to `True`):
            Whether the value loss of `critic="head"` trains the policy's adapter too.
        critic_learning_rate (`float`, *optional*):
            Learning rate of the critic. Defaults to `learning_rate`.
        critic_init (`str`, *optional*):
            What the critic starts from: a directory or Hub id that `trl-ppo pretrain-critic` or PPOTrainer wrote or,
            for `critic="adapter"`, a reward adapter on the same base.
        value_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps in which only the critic learns.
        cliprange (`float`, *optional*, defaults to `0.2`):
            Clip range of the ratio.
        cliprange_high (`float`, *optional*):
            Clip range above 1. Defaults to `cliprange`.
        dual_clip (`float`, *optional*):
            Bound, above 1, of the ratio where the advantage is negative.
        importance_sampling_level (`str`, *optional*, defaults to `"token"`):
            Whether the ratio is that of each `"token"` or of the whole `"sequence"` (GSPO).
        loss_aggregation (`str`, *optional*):
            `"token"`: mean over tokens (the default). `"sequence_mean"`: mean over completions of each one's mean (the
            default of GRPO). `"sequence_sum"`: mean over completions of each one's sum (of RLOO and REINFORCE).
            `"constant"`: that, divided by `max_completion_length` (the default of Dr. GRPO).
        cliprange_value (`float`, *optional*):
            Clip range of the values, in units of the reward. By default they are not clipped.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Coefficient of the value loss.
        entropy_coef (`float`, *optional*, defaults to `0.0`):
            Coefficient of the entropy bonus.
        entropy_target (`float`, *optional*):
            Steer `entropy_coef`, from where it is set, so that the entropy stays above this many nats a token.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount factor.
        lam (`float`, *optional*, defaults to `0.95`):
            λ of generalised advantage estimation.
        lam_critic (`float`, *optional*):
            λ of the critic's targets. Defaults to `lam`.
        lam_length_alpha (`float`, *optional*):
            α of a λ that grows with the completion, 1 − 1/(α·length), for the policy in place of `lam`.
        whiten_rewards (`bool`, *optional*, defaults to `False`):
            Scale the token rewards of a rollout to unit variance (their mean stays).
        whiten_advantages (`bool`, *optional*):
            Shift and scale the advantages of a rollout to zero mean and unit variance. Defaults to `True` with a
            critic, to `False` without.
        ptx_coef (`float`, *optional*, defaults to `1.0`):
            Coefficient of the supervised loss on the trainer's `ptx_dataset`.
        ptx_max_length (`int`, *optional*, defaults to `512`):
            Longest supervised row, in tokens; what is longer, or than the model's context, is cut off.
        ema_decay (`float`, *optional*):
            Keep an exponential moving average of the policy's adapter with this decay, and save it in `ema/`.

        offload_rollout (`bool`, *optional*, defaults to `False`):
            Keep a rollout's tensors in main memory, but for the micro-batch under way.
        offload_rewards (`bool`, *optional*, defaults to `False`):
            Keep reward models in main memory, but while they score.

        max_skipped_steps (`int`, *optional*, defaults to `5`):
            The run ends at this many optimizer steps in a row that were skipped because a gradient was not finite.
            With fp16 the gradient scaler skips steps by itself, and they are not counted.
        resume_with_changed_settings (`bool`, *optional*, defaults to `False`):
            Whether a checkpoint may be resumed under settings other than those it was saved under.

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
    generation_backend: str = field(default="transformers", metadata={"help": "transformers or continuous_batching."})
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further fields of GenerationConfig, or of ContinuousBatchingConfig."}
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
    max_reward_failures: float = field(default=0.5, metadata={"help": "Share of a rollout that may stay unscored."})
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
    kl_coef: float = field(default=0.05, metadata={"help": "Coefficient of the KL penalty."})
    kl_estimator: str = field(default="k1", metadata={"help": "The KL of a token: k1, k2, k3 or exact."})
    kl_placement: str = field(default="reward", metadata={"help": "Where the KL enters: reward, loss or both."})
    kl_target: float | None = field(
        default=None, metadata={"help": "Steer kl_coef towards this KL of a completion, in nats."}
    )
    kl_horizon: int = field(default=10000, metadata={"help": "Completions over which kl_coef is steered."})
    target_kl: float | None = field(
        default=None, metadata={"help": "End a rollout's updates at this KL from the policy that sampled."}
    )
    advantage_estimator: str | None = field(
        default=None, metadata={"help": "gae with a critic; grpo, dr_grpo, rloo or reinforce without."}
    )
    critic: str = field(default="head", metadata={"help": "head, adapter or none."})
    critic_backprop: bool = field(
        default=True, metadata={"help": "Whether the value loss of a head trains the policy's adapter."}
    )
    critic_learning_rate: float | None = field(default=None, metadata={"help": "Learning rate of the critic."})
    critic_init: str | None = field(
        default=None, metadata={"help": "Pretrained critic, checkpoint or reward adapter that the critic starts from."}
    )
    value_warmup_steps: int = field(default=0, metadata={"help": "Optimizer steps in which only the critic learns."})
    cliprange: float = field(default=0.2, metadata={"help": "Clip range of the ratio."})
    cliprange_high: float | None = field(default=None, metadata={"help": "Clip range of the ratio above 1."})
    dual_clip: float | None = field(
        default=None, metadata={"help": "Bound of the ratio where the advantage is negative."}
    )
    importance_sampling_level: str = field(
        default="token", metadata={"help": "Whether the ratio is a token's or the whole sequence's."}
    )
    loss_aggregation: str | None = field(
        default=None, metadata={"help": "token, sequence_mean, sequence_sum or constant."}
    )
    cliprange_value: float | None = field(default=None, metadata={"help": "Clip range of the values."})
    vf_coef: float = field(default=0.1, metadata={"help": "Coefficient of the value loss."})
    entropy_coef: float = field(default=0.0, metadata={"help": "Coefficient of the entropy bonus."})
    entropy_target: float | None = field(
        default=None, metadata={"help": "Steer entropy_coef so that the entropy stays above this."}
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount factor."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalised advantage estimation."})
    lam_critic: float | None = field(default=None, metadata={"help": "Lambda of the critic's targets."})
    lam_length_alpha: float | None = field(
        default=None, metadata={"help": "Alpha of a lambda that grows with the completion's length."}
    )
    whiten_rewards: bool = field(default=False, metadata={"help": "Scale token rewards to unit variance."})
    whiten_advantages: bool | None = field(
        default=None, metadata={"help": "Shift and scale advantages to zero mean and unit variance."}
    )

    ptx_coef: float = field(default=1.0, metadata={"help": "Coefficient of the supervised loss."})
    ptx_max_length: int = field(default=512, metadata={"help": "Longest supervised row, in tokens."})
    ema_decay: float | None = field(default=None, metadata={"help": "Decay of the policy's moving average."})

    offload_rollout: bool = field(default=False, metadata={"help": "Keep a rollout's tensors in main memory."})
    offload_rewards: bool = field(default=False, metadata={"help": "Keep reward models in main memory."})

    max_skipped_steps: int = field(
        default=5, metadata={"help": "Steps in a row with a gradient that is not finite before the run ends."}
    )
    resume_with_changed_settings: bool = field(
        default=False, metadata={"help": "Whether a checkpoint may be resumed under other settings."}
    )

    log_completions: bool = field(default=False, metadata={"help": "Print a table of completions at every log."})
    num_completions_to_print: int = field(default=8, metadata={"help": "Rows of that table."})

    def __post_init__(self):
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        choose_defaults(self)
        check_values(self)
        super().__post_init__()
        check_generation(self)
        if self.ddp_find_unused_parameters is None:
            # every trainable parameter takes part in every forward, so the search would be time lost
            self.ddp_find_unused_parameters = False
        if self.generation_batch_size is not None:
            self._derive_accumulation()
        plan = BatchPlan.from_config(self, self.world_size)
        check_horizon(self, plan.completions)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # or `dataclass` gives a subclass one that shows tokens
            cls.__repr__ = PPOConfig.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        lines = "".join(f"{name}={value},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """The settings as they may be logged.

        Returns:
            `dict`: The fields, with placeholders for tokens, also for those in `model_init_kwargs`.
        """
        return without_secrets(super().to_dict())

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

    @classmethod
    def preset(cls, name: str, output_dir: str | None = None, **overrides: Any) -> "PPOConfig":
        """The published settings of a paper, as far as a config can say them; see docs/presets.md.

        Args:
            name (`str`): `"instructgpt"`, `"n_plus"`, `"vapo"`, `"orz"` or `"dapo"`.
            output_dir (`str`, *optional*): Directory of the run.
            overrides (`dict`): Fields that are set otherwise.

        Returns:
            [`PPOConfig`]: The config.

        Raises:
            `ValueError`: If there is no such preset.
        """
        return cls(output_dir, **(load_preset(name) | overrides))
