"""Loading: from the `model` argument to an actor-critic on a frozen base."""

import os
from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from .actor_critic import ActorCritic
from .adapters import adapter_parameters, add_adapter, copy_adapter, load_adapter_weights
from .critic_init import CriticStart, load_value_head, read_critic

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


def _targets_output_projection(peft_config: PeftConfig) -> bool:
    named = [getattr(peft_config, "target_modules", None), getattr(peft_config, "modules_to_save", None)]
    return any("lm_head" in names for names in named if isinstance(names, list | set | tuple))


def check_model_arguments(
    model: Any, args: Any, quantization_config: BitsAndBytesConfig | None, peft_config: PeftConfig | None
) -> None:
    """Raise an error for combinations that do not work, before anything is loaded."""
    if not isinstance(model, str | PreTrainedModel | PeftModel):
        raise TypeError(
            f"`model` must be a model id or path, a `PreTrainedModel`, or a `PeftModel`, got {type(model).__name__}."
        )
    if not isinstance(model, str):
        settings = {"args.model_init_kwargs": args.model_init_kwargs, "quantization_config": quantization_config}
        for name in (name for name, value in settings.items() if value is not None):
            raise ValueError(
                f"`{name}` needs a `model` that is a string, got a loaded {type(model).__name__}; pass the model's "
                "id, or load it with these settings yourself."
            )
    if isinstance(model, str) and os.path.isfile(os.path.join(model, "adapter_config.json")):
        raise ValueError(
            f"`model={model!r}` is a saved adapter; load it on its base with `PeftModel.from_pretrained(base, "
            f"{model!r})` and pass that: the adapter then starts the policy."
        )
    if isinstance(model, PeftModel) and peft_config is not None:
        raise ValueError(
            "`peft_config` must be None when `model` is a `PeftModel`, whose adapter starts the policy. To start a "
            "new adapter pass the base model (`model.merge_and_unload()` keeps what the adapter learned)."
        )
    if not isinstance(model, str) and model.get_output_embeddings() is None:
        raise ValueError(
            f"`model` must be a causal language model with an output projection, got {type(model).__name__}; load it "
            "with `AutoModelForCausalLM`."
        )
    if not isinstance(peft_config, PeftConfig | None):
        raise TypeError(
            f"`peft_config` must be a `PeftConfig`, such as `LoraConfig(r=16)`, got {type(peft_config).__name__}."
        )
    _check_adapter(model, peft_config)


def _check_adapter(model: Any, peft_config: PeftConfig | None) -> None:
    if isinstance(model, PeftModel):
        peft_config = model.peft_config[model.active_adapter]
    elif getattr(peft_config, "init_lora_weights", True) not in (True, "gaussian"):
        raise ValueError(
            f"`init_lora_weights={getattr(peft_config, 'init_lora_weights', None)!r}` changes the base or starts "
            "away from it, so the reference would not be your model; use True or 'gaussian'."
        )
    if peft_config is not None and peft_config.is_prompt_learning:
        raise ValueError(
            f"`peft_config` must put the adapter into the layers, got {peft_config.peft_type}, which adds virtual "
            "tokens; use `LoraConfig`."
        )
    if getattr(peft_config, "bias", "none") != "none":
        raise ValueError(
            f"`bias` of the adapter must be 'none', got {getattr(peft_config, 'bias', None)!r}: biases of the base "
            "are shared by the reference and all other adapters."
        )
    if peft_config is not None and _targets_output_projection(peft_config):
        raise ValueError(
            "`peft_config` must not put an adapter on the output projection (`lm_head`): log-probs are computed from "
            "the frozen projection in chunks and would not see it. Remove `lm_head` from `target_modules` and "
            '`modules_to_save` (`target_modules="all-linear"` excludes it).'
        )


def hub_kwargs(args: Any) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` that locate a model's files."""
    names = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "trust_remote_code")
    kwargs = args.model_init_kwargs or {}
    return {"trust_remote_code": args.trust_remote_code} | {key: kwargs[key] for key in names if key in kwargs}


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


def _keep_gradients_on_cpu(model: nn.Module) -> None:
    """Keep 4-bit layers of a trained base on the kernel that has a backward.

    On CPUs with AVX512-BF16, bitsandbytes repacks `Linear4bit` weights at the first forward without gradients, and
    later training forwards lose their gradient in silence.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (typed as a tensor or a module)


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # functional dropout and layer dropout: the rate is an attribute, or read from the config
        config = getattr(module, "config", None)
        for owner in (module, config) if isinstance(config, PreTrainedConfig) else (module,):
            for name, value in vars(owner).items():
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)


def _trained_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        # float32 whatever the base's dtype: Adam's steps vanish in bfloat16
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)


def _check_trunk(base: PreTrainedModel) -> None:
    if not hasattr(base, base.base_model_prefix):
        raise ValueError(
            f"{type(base).__name__} must have the attribute `{base.base_model_prefix}` (its `base_model_prefix`), "
            "from which hidden states are read; use a model whose class has it."
        )


def _add_critic_adapter(policy: PeftModel, start: CriticStart | None, path: str) -> str:
    """Add the critic's adapter: of the policy's config, or of the one it starts from."""
    own = start.config if start is not None and start.config is not None else policy.peft_config[policy.active_adapter]
    name = add_adapter(policy, CRITIC_ADAPTER, own)
    if start is not None and start.weights is not None:
        try:
            load_adapter_weights(policy, name, start.weights)
        except ValueError as error:
            raise ValueError(f"The adapter of `critic_init={path!r}` does not fit the model: {error}") from None
    return name


def load_actor_critic(
    model: str | PreTrainedModel | PeftModel,
    args: Any,
    quantization_config: BitsAndBytesConfig | None = None,
    peft_config: PeftConfig | None = None,
    device: torch.device | str = "cpu",
) -> ActorCritic:
    """Build the actor-critic: a frozen base, the policy's adapter, and the critic that `args.critic` names."""
    if isinstance(model, str):
        model = _load_base(model, args, quantization_config, torch.device(device))
    _check_trunk(model.get_base_model() if isinstance(model, PeftModel) else model)
    reference = critic = None
    if isinstance(model, PeftModel):
        policy = model
        own = policy.peft_config[policy.active_adapter]
        reference = add_adapter(policy, REFERENCE_ADAPTER, own, keep_modules=True)
        copy_adapter(policy, policy.active_adapter, reference)
    else:
        policy = get_peft_model(model, peft_config or default_peft_config())
    start = None
    if args.critic_init is not None:
        start = read_critic(args.critic_init, args.critic, policy.config._name_or_path, args.reward_label)
    if args.critic == "adapter":
        critic = _add_critic_adapter(policy, start, args.critic_init)
    policy.requires_grad_(False)
    for name in (policy.active_adapter, critic):
        if name is not None:
            _trained_in_float32(adapter_parameters(policy, name).values())
    _keep_gradients_on_cpu(policy)
    _disable_dropout(policy)
    actor_critic = ActorCritic(policy, reference, args.critic != "none", critic, args.critic_backprop)
    if start is not None and actor_critic.value_head is not None:
        load_value_head(actor_critic.value_head, start.head, args.critic_init)
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
