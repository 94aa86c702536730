"""Loading: from the `model` argument to an actor-critic on a frozen base."""

import os
from copy import copy
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from .actor_critic import ActorCritic, ValueHead
from .adapter_files import read_critic
from .adapters import adapter_parameters, add_adapter, check_fit, copy_adapter, load_adapter_weights

REFERENCE_ADAPTER = "reference"
CRITIC_ADAPTER = "critic"


def compute_dtype(args: Any) -> torch.dtype:
    """Dtype in which a frozen base is stored and computes."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def default_peft_config() -> LoraConfig:
    """LoRA of rank 16 on every linear layer except the output projection."""
    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def check_model_arguments(
    model: Any, args: Any, quantization_config: BitsAndBytesConfig | None, peft_config: PeftConfig | None
) -> None:
    """Raise an error for combinations that do not work, before anything is loaded."""
    if not isinstance(model, str | PreTrainedModel | PeftModel):
        raise TypeError(
            f"`model` must be a model id or path, a `PreTrainedModel`, or a `PeftModel`, got {type(model).__name__}."
        )
    if isinstance(model, str):
        if os.path.isfile(os.path.join(model, "adapter_config.json")):
            raise ValueError(
                f"`model={model!r}` is a saved adapter; load it on its base with `PeftModel.from_pretrained(base, "
                f"{model!r})` and pass that: the adapter then starts the policy."
            )
    else:
        settings = {"model_init_kwargs": args.model_init_kwargs, "quantization_config": quantization_config}
        for name in (name for name, value in settings.items() if value is not None):
            raise ValueError(
                f"`{name}` needs a `model` that is a string, got a loaded {type(model).__name__}; pass the model's "
                "id, or load it with these settings yourself."
            )
        if model.get_output_embeddings() is None:
            raise ValueError(
                f"`model` must be a causal language model with an output projection, got {type(model).__name__}; load "
                "it with `AutoModelForCausalLM`."
            )
    if not isinstance(peft_config, PeftConfig | None):
        raise TypeError(
            f"`peft_config` must be a `PeftConfig`, such as `LoraConfig(r=16)`, got {type(peft_config).__name__}."
        )
    _check_adapter(model, peft_config)


def _check_adapter(model: Any, peft_config: PeftConfig | None) -> None:
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError(
                "`peft_config` must be None when `model` is a `PeftModel`, whose adapter starts the policy. To start "
                "a new adapter pass the base model (`model.merge_and_unload()` keeps what the adapter learned)."
            )
        peft_config = model.peft_config[model.active_adapter]
    elif (initial := getattr(peft_config, "init_lora_weights", True)) not in (True, "gaussian"):
        raise ValueError(
            f"`init_lora_weights={initial!r}` changes the base or starts away from it, so the reference would not be "
            "your model; use True or 'gaussian'."
        )
    if peft_config is None:
        return
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"`peft_config` must put the adapter into the layers, got {peft_config.peft_type}, which adds virtual "
            "tokens; use `LoraConfig`."
        )
    if (bias := getattr(peft_config, "bias", "none")) != "none":
        raise ValueError(
            f"`bias` of the adapter must be 'none', got {bias!r}: biases of the base are shared by the reference and "
            "all other adapters."
        )
    adapted = [getattr(peft_config, name, None) for name in ("target_modules", "modules_to_save")]
    if any("lm_head" in names for names in adapted if isinstance(names, list | set | tuple)):
        raise ValueError(
            "`peft_config` must not put an adapter on the output projection (`lm_head`): log-probs are computed from "
            "the frozen projection in chunks and would not see it. Remove `lm_head` from `target_modules` and "
            '`modules_to_save` (`target_modules="all-linear"` excludes it).'
        )


def hub_kwargs(args: Any) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` that locate a model's files."""
    names = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "trust_remote_code")
    settings = {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
    return {key: value for key, value in settings.items() if key in names}


def _load_base(
    model_id: str, args: Any, quantization_config: BitsAndBytesConfig | None, device: torch.device
) -> PreTrainedModel:
    kwargs: dict[str, Any] = {"dtype": compute_dtype(args), "trust_remote_code": args.trust_remote_code}
    if quantization_config is not None:
        quantization_config = copy(quantization_config)
        if quantization_config.bnb_4bit_compute_dtype == torch.float32:  # the default, slow where bf16 is fast
            quantization_config.bnb_4bit_compute_dtype = kwargs["dtype"]
        # quantized weights cannot be moved afterwards
        kwargs |= {"quantization_config": quantization_config, "device_map": {"": device}}
    return AutoModelForCausalLM.from_pretrained(model_id, **kwargs | (args.model_init_kwargs or {}))


def _prepare_modules(model: nn.Module) -> None:
    """Disable dropout, and keep 4-bit layers on the kernel that has a backward."""
    for module in model.modules():
        # on CPUs with AVX512-BF16, bitsandbytes repacks `Linear4bit` weights at the first forward without gradients,
        # and later training forwards lose their gradient in silence
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (typed as a tensor or a module)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # functional dropout and layer dropout: the rate is an attribute, or read from the config
        config = getattr(module, "config", None)
        for owner in (module, config) if isinstance(config, PreTrainedConfig) else (module,):
            for name in [name for name, x in vars(owner).items() if "drop" in name and isinstance(x, float)]:
                setattr(owner, name, 0.0)


def load_actor_critic(
    model: str | PreTrainedModel | PeftModel,
    args: Any,
    quantization_config: BitsAndBytesConfig | None = None,
    peft_config: PeftConfig | None = None,
    device: torch.device | str = "cpu",
) -> ActorCritic:
    """Build the actor-critic: a frozen base, the policy's adapter, and the critic that the config names."""
    if isinstance(model, str):
        model = _load_base(model, args, quantization_config, torch.device(device))
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if not hasattr(base, base.base_model_prefix):
        raise ValueError(
            f"{type(base).__name__} must have the attribute `{base.base_model_prefix}` (its `base_model_prefix`), "
            "from which hidden states are read; use a model whose class has it."
        )

    # 1. the policy's adapter, and a frozen copy as the reference if it was trained before
    reference = critic_adapter = head = files = None
    if isinstance(model, PeftModel):
        policy = model
        config = policy.peft_config[policy.active_adapter]
        reference = add_adapter(policy, REFERENCE_ADAPTER, config, keep_modules=True)
        copy_adapter(policy, policy.active_adapter, reference)
    else:
        policy = get_peft_model(model, peft_config or default_peft_config())

    # 2. the critic's adapter: of the policy's config, or of the one it starts from
    critic, start = args.critic, args.critic_init
    if start is not None:
        head, files = read_critic(start, critic, policy.config._name_or_path, args.reward_label)
    if critic == "adapter":
        config = policy.peft_config[policy.active_adapter] if files is None else files.config
        critic_adapter = add_adapter(policy, CRITIC_ADAPTER, config)

    policy.requires_grad_(False)
    trained = [name for name in (policy.active_adapter, critic_adapter) if name is not None]
    for parameter in (x for name in trained for x in adapter_parameters(policy, name).values()):
        # float32 whatever the base's dtype: Adam's steps vanish in bfloat16
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    _prepare_modules(policy)
    actor_critic = ActorCritic(
        policy, reference, critic != "none", critic_adapter, args.critic_backprop, args.normalize_values
    )

    if head is not None:
        try:
            if critic_adapter is not None and files is not None:
                load_adapter_weights(policy, critic_adapter, files.weights)
            value_head = cast(ValueHead, actor_critic.value_head)
            head = value_head.in_own_units(head)
            check_fit(value_head.state_dict(), head)
            value_head.load_state_dict(head)
        except ValueError as error:
            raise ValueError(f"The critic of `critic_init={start!r}` does not fit the model: {error}") from None
    return actor_critic


def check_optimizers(optimizer: torch.optim.Optimizer | None, scheduler: Any, actor_critic: ActorCritic) -> None:
    """Raise a `ValueError` if a given optimizer lacks a trained weight, or the scheduler is of another optimizer."""
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "The scheduler in `optimizers` must belong to the optimizer in it, or the learning rate would not follow "
            "it; use `lr_scheduler_type` and `lr_scheduler_kwargs` instead."
        )
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return
    present = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {name: x for name, x in actor_critic.named_parameters() if x.requires_grad}
    missing = [name for name, x in trained.items() if id(x) not in present]
    if missing:
        raise ValueError(
            f"`optimizers` must hold all weights that are trained, but {len(missing)} of {len(trained)} are missing, "
            f"such as `{missing[-1]}`: the trainer creates adapters and value head itself. Choose with `optim`, "
            "`optim_args`, `learning_rate` and `critic_learning_rate`, or override `create_optimizer` in a subclass."
        )
