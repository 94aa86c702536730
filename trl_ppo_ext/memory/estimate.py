"""From a run's arguments to what memory it will need, by configs alone."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from ..arguments import as_list
from ..config import PPOConfig
from ..modeling.loading import compute_dtype, default_peft_config, hub_kwargs
from ..modeling.logprobs import CHUNK_LOGITS
from ..ppo.batch_plan import BatchPlan
from ..rewards import RewardAdapter
from .fit import GIB, Proposal, first_that_fits, needed, single_proposals
from .phases import OPTIMIZERS, Phase, RewardSizes, Workload, phases
from .sizes import adapter_sizes, dtype_width, model_sizes, on_meta

PROMPT_LENGTH = 512
# implementations of attention, and whether they take a mask where rows differ in length
_ATTENTION = {None: True, "sdpa": True, "flash_attention_2": False, "flash_attention_3": False}


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run will need."""

    workload: Workload  # the numbers that it was computed from
    phases: tuple[Phase, ...]  # what is alive at the peak of each phase, by part

    @property
    def peak(self) -> float:
        """Bytes of tensors at the peak."""
        return self.peak_phase.bytes

    @property
    def peak_phase(self) -> Phase:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def needed(self) -> float:
        """Bytes that the device must have: on a GPU, with what is assumed for its context and fragmentation."""
        return needed(self.workload)

    def fits(self, memory: float) -> bool:
        """Whether the run fits."""
        return self.needed <= memory * GIB

    def proposals(self, memory: float) -> tuple[list[Proposal], Proposal | None]:
        """Settings that make the run need less."""
        return single_proposals(self.workload, memory * GIB), first_that_fits(self.workload, memory * GIB)


def estimate_memory(
    model: str | PreTrainedConfig | PreTrainedModel,
    args: PPOConfig,
    *,
    reward_funcs: Any = None,
    monitor_funcs: Any = None,
    quantization_config: BitsAndBytesConfig | None = None,
    peft_config: PeftConfig | None = None,
    ptx: bool = False,
    prompt_length: int = PROMPT_LENGTH,
    same_length: bool = False,
    device: str = "cuda",
) -> MemoryEstimate:
    """What a run will need on one process, by phase and part. No weights are loaded: configs say it all.

    Arguments are those of [`PPOTrainer`], and configs may stand for models.

    Args:
        model (`str`, `PreTrainedConfig` or `PreTrainedModel`): The base, or its config. Its dtype is the run's.
        args ([`PPOConfig`]): The run's config.
        reward_funcs (`str`, `PreTrainedConfig`, `PreTrainedModel`, [`RewardAdapter`], `Callable`, or a list of these):
            The rewards. What is loaded from a string is quantised as `args.reward_quantization` says; a config stands
            for a classifier that you load yourself, in the config's dtype. Functions take nothing.
        monitor_funcs (the same, *optional*): Rewards that are only watched.
        quantization_config (`BitsAndBytesConfig`, *optional*): Quantisation of the base.
        peft_config (`PeftConfig`, *optional*): Config of the policy's adapter; LoRA of rank 16 by default.
        ptx (`bool`, *optional*, defaults to `False`): Whether there is a `ptx_dataset`.
        prompt_length (`int`, *optional*, defaults to 512): Tokens of the longest prompt.
        same_length (`bool`, *optional*, defaults to `False`):
            Whether all prompts and completions have the same length, so that attention needs no mask.
        device (`str`, *optional*, defaults to `"cuda"`): `"cuda"` or `"cpu"`.

    Returns:
        [`MemoryEstimate`]: Its `peak` is that of tensors, its `needed` what the device must have.

    Raises:
        `ValueError`: If something is asked for whose memory is not known.
    """
    _check(model, args, prompt_length, device)
    config = _config_of(model, args)
    quantization_config = quantization_config or _saved_quantization(config)
    base = on_meta(config, trust_remote_code=args.trust_remote_code)
    sizes, masked = model_sizes(base), _ATTENTION[_init_kwargs(args).get("attn_implementation")]
    adapter = adapter_sizes(base, peft_config or default_peft_config())
    width, plan = _base_width(config, args), BatchPlan.from_config(args, args.world_size)
    rewards = [_reward_sizes(x, args, config, width) for x in (*as_list(reward_funcs), *as_list(monitor_funcs))]
    exact = args.kl_estimator == "exact"
    load = Workload(
        base=sizes,
        adapter=adapter,
        width=width,
        chunk=CHUNK_LOGITS[device],
        prompt=prompt_length,
        response=args.max_completion_length,
        micro_batch=plan.micro_batch_size,
        completions=plan.completions_per_process,
        mini_batch=plan.mini_batch_size,
        generation_batch=min(
            args.per_device_generation_batch_size or plan.completions_per_process, plan.completions_per_process
        ),
        reward_batch=args.per_device_reward_batch_size,
        rewards=tuple(reward for reward in rewards if reward is not None),
        **_quantization(quantization_config),
        autocast=bool(args.bf16 or args.fp16),
        checkpointing=bool(_either(args, "checkpointing")),
        critic=args.critic,
        optimizer=_optimizer(args),
        averaged=args.ema_decay is not None,
        entropy=args.entropy_coef != 0 or args.entropy_target is not None,
        exact_kl=(exact and args.kl_placement != "loss", exact and args.kl_placement != "reward"),
        ptx=args.ptx_max_length if ptx else 0,
        top_p=args.top_p < 1,
        masked=masked and not same_length,
        processes=plan.num_processes,
        on_gpu=device == "cuda",
        # on a CPU there is only one memory
        offloaded=(args.offload_rewards and device == "cuda", args.offload_rollout and device == "cuda"),
    )
    return MemoryEstimate(load, tuple(phases(load)))


def _init_kwargs(args: PPOConfig) -> dict[str, Any]:
    return cast(dict, args.model_init_kwargs or {})


def _check(model: Any, args: PPOConfig, prompt_length: int, device: str) -> None:
    if not isinstance(model, str | PreTrainedConfig | PreTrainedModel) or isinstance(model, PeftModel):
        raise ValueError(
            f"`model` must be a model id or path, its config, or a `PreTrainedModel`, got {type(model).__name__}."
        )
    if prompt_length < 1:
        raise ValueError(f"`prompt_length` must be at least 1, got {prompt_length}.")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"`device` must be 'cuda' or 'cpu', got {device!r}.")
    if args.deepspeed or args.fsdp:
        raise ValueError(
            "Sharding by DeepSpeed or FSDP is not estimated: what is known is a process that holds the whole base. "
            "Leave `deepspeed` and `fsdp` out to get what a process needs without it."
        )
    attention = _init_kwargs(args).get("attn_implementation")
    if attention not in _ATTENTION:
        known = ", ".join(repr(name) for name in _ATTENTION if name)
        raise ValueError(f"`attn_implementation={attention!r}` is not estimated; {known} are.")
    kwargs = cast(dict, _either(args, "checkpointing_kwargs") or {})
    if "every_n_layers" in kwargs:
        raise ValueError("`every_n_layers` of activation checkpointing is not estimated; leave it out.")


def _either(args: PPOConfig, name: str) -> Any:
    """A field that transformers has renamed."""
    return getattr(args, f"activation_{name}", None) or getattr(args, f"gradient_{name}", None)


def _optimizer(args: PPOConfig) -> str:
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIMIZERS:
        raise ValueError(f"`optim={name!r}` is not estimated; these are: {', '.join(OPTIMIZERS)}.")
    return name


def _config_of(model: Any, args: PPOConfig) -> PreTrainedConfig:
    if isinstance(model, PreTrainedModel):
        return model.config
    return model if isinstance(model, PreTrainedConfig) else AutoConfig.from_pretrained(model, **hub_kwargs(args))


def _base_width(config: PreTrainedConfig, args: PPOConfig) -> int:
    width = dtype_width(compute_dtype(args))
    dtype = _init_kwargs(args).get("dtype")
    if dtype == "auto":
        dtype = config.dtype or torch.float32
    if dtype is not None and dtype_width(dtype) != width:
        raise ValueError(
            f"A base in {dtype} beside a run in {compute_dtype(args)} is not estimated; leave `dtype` out, or set "
            "`bf16` to match."
        )
    return width


def _saved_quantization(config: PreTrainedConfig) -> BitsAndBytesConfig | None:
    """That of a model which is saved quantised."""
    saved = getattr(config, "quantization_config", None)
    if saved is None or isinstance(saved, BitsAndBytesConfig):
        return saved
    method = saved.get("quant_method") if isinstance(saved, dict) else type(saved).__name__
    if method != "bitsandbytes":
        raise ValueError(f"The model is saved quantised by {method!r}; only bitsandbytes is estimated.")
    return BitsAndBytesConfig.from_dict(saved)


def _quantization(given: BitsAndBytesConfig | None) -> dict[str, Any]:
    if given is None:
        return {}
    if given.load_in_8bit:
        return {"quantization": "int8"}
    return {"quantization": given.bnb_4bit_quant_type, "double_quantization": given.bnb_4bit_use_double_quant}


def _reward_sizes(reward: Any, args: PPOConfig, base: PreTrainedConfig, width: int) -> RewardSizes | None:
    """What a reward takes; nothing if it is a function, a judge, or remote."""
    if isinstance(reward, RewardAdapter):
        own = PeftConfig.from_pretrained(reward.path)
        own.modules_to_save = None  # the score head, which is counted apart
        return RewardSizes(adapter=adapter_sizes(on_meta(base, trust_remote_code=args.trust_remote_code), own))
    quantization = None
    if isinstance(reward, str):
        reward = AutoConfig.from_pretrained(reward, trust_remote_code=args.trust_remote_code)
        quantization = None if args.reward_quantization == "none" else args.reward_quantization
    elif isinstance(reward, PreTrainedModel):
        reward = reward.config
        width = dtype_width(reward.dtype or torch.float32)
    elif isinstance(reward, PreTrainedConfig):
        width = dtype_width(reward.dtype or torch.float32)
    else:
        return None
    sizes = model_sizes(on_meta(reward, classifier=True, trust_remote_code=args.trust_remote_code))
    return RewardSizes(sizes, width, quantization)
