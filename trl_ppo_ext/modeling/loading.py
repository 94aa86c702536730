"""Loading: from the `model` argument to an actor-critic on a frozen base."""

import os
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import HFValidationError
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, TaskType, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ..config import PPOConfig
from ..redaction import shortened
from .actor_critic import ActorCritic
from .adapters import (
    ADAPTER_CONFIG,
    adapter_parameters,
    adapter_weights,
    add_adapter,
    check_keeps_base,
    check_same_base,
    load_adapter_weights,
    read_adapter_config,
    read_critic,
)
from .base_files import check_base_is_in_its_files
from .critics import Critic, CriticFactory, built_by, new_critic

logger = logging.get_logger(__name__)

# linear layers that PEFT does not adapt, of which only the weight is read, or that return several
# tensors
NOT_ADAPTED = dict.fromkeys(
    ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), r".*\.(out_proj|dt_proj)"
)
NOT_ADAPTED |= {"jamba": r".*\.dt_proj", "phimoe": r".*\.router", "llama4_text": r".*\.router"}


def compute_dtype(args: PPOConfig) -> torch.dtype:
    """Dtype in which a frozen base is stored and computes."""
    if args.bf16:
        return torch.bfloat16
    if args.fp16:
        return torch.float16
    return torch.float32


def default_peft_config() -> LoraConfig:
    """LoRA of rank 16 on every linear layer except the output projection."""
    return LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def add_policy_adapter(model: Any, config: PeftConfig) -> PeftModel:
    """Add a new adapter to a base; `"all-linear"` excludes layers that text does not run
    through, or not as such."""
    if getattr(config, "target_modules", None) == "all-linear" and not config.exclude_modules:
        config = copy(config)
        decoder = model.get_decoder()
        read = set(decoder.modules()) | {model.get_output_embeddings()}
        config.exclude_modules = NOT_ADAPTED.get(model.config.model_type)
        if (
            isinstance(decoder, PreTrainedModel)
            and {x for x in model.modules() if isinstance(x, nn.Linear)} - read
        ):
            name = next(name for name, x in model.named_modules() if x is decoder)
            config.exclude_modules = rf"(?!{re.escape(name)}\.).*"  # e.g. a vision tower
    return get_peft_model(model, config)


def check_model_arguments(
    model: Any,
    args: PPOConfig,
    quantization_config: BitsAndBytesConfig | None,
    peft_config: PeftConfig | str | None,
) -> None:
    """Raise an error for combinations that do not work, before anything is loaded."""
    if isinstance(model, ActorCritic):
        raise TypeError(
            "`model` is that of another trainer; save it, and pass what its `unload()` returns "
            "with this path as `peft_config`, or what its `merge_and_unload()` returns."
        )
    if not isinstance(model, str | PreTrainedModel | PeftModel):
        raise TypeError(
            f"`model` must be a model or the id or path of one, got {type(model).__name__}."
        )
    if isinstance(model, str):
        if os.path.isfile(os.path.join(model, ADAPTER_CONFIG)):
            raise ValueError(
                f"`model={model!r}` is a saved adapter; pass its base, and this path as "
                "`peft_config` (`adapter_name_or_path`)."
            )
    else:
        if quantization_config is not None:
            raise ValueError(
                "`quantization_config` has no effect on a loaded model; pass the model's id."
            )
        if args.model_init_kwargs is not None:
            logger.warning(
                "`model_init_kwargs` has no effect on a loaded %s.", type(model).__name__
            )
        if model.get_output_embeddings() is None or model.config.is_encoder_decoder:
            raise ValueError(
                "`model` must be a causal language model with its output projection, and no "
                f"encoder, got {type(model).__name__}; load it with `AutoModelForCausalLM`."
            )
    if not isinstance(peft_config, PeftConfig | str | None):
        raise TypeError(
            f"`peft_config` must be a `PeftConfig`, path or id, got {type(peft_config).__name__}."
        )
    config = _starting_config(model, peft_config, hub_kwargs(args))
    if config is None:
        return
    if config.is_prompt_learning:
        raise ValueError(
            f"`peft_config` must adapt the layers, got {config.peft_type}; use `LoraConfig`."
        )
    if config.peft_type == PeftType.ADALORA or getattr(config, "layer_replication", None):
        raise ValueError(
            "`peft_config` must not be AdaLoRA, nor have `layer_replication`; use another "
            "`LoraConfig`."
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            "`alora_invocation_tokens` must be None: other prompts would train nothing; remove it."
        )
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise ValueError(
            f"`bias` of the adapter must be 'none', got {bias!r}: biases of the base are shared."
        )


def _starting_config(model: Any, peft_config: Any, located: dict[str, Any]) -> Any:
    """Config of the adapter that starts the policy; raise an error if `model` must not get it."""
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError(
                "`peft_config` must be None when `model` has an adapter; or pass the base model."
            )
        if len(model.active_adapters) > 1:
            raise ValueError(
                f"`model` must have one active adapter, the policy, got {model.active_adapters}; "
                "call `model.set_adapter(name)`, or merge the others into the base and save it."
            )
        return model.active_peft_config
    if not isinstance(model, str) and any(
        isinstance(module, BaseTunerLayer) for module in model.modules()
    ):
        raise ValueError(
            "`model` holds an adapter, but is not a `PeftModel`; pass the base and the adapter's "
            "path as `peft_config`; after another trainer, save and `unload()` its model."
        )
    if isinstance(peft_config, str):
        config = read_adapter_config(peft_config)
        if config is None:
            raise ValueError(
                f"`peft_config={peft_config!r}` has no adapter_config.json; name a saved adapter."
            )
        if trained_on := config.base_model_name_or_path:
            remedy = "If the weights are the same, pass a `PeftModel` with the adapter as `model`."
            check_same_base(peft_config, trained_on, getattr(model, "name_or_path", model), remedy)
        check_keeps_base(peft_config, config)
        if isinstance(model, str) and config.revision not in (None, located.get("revision")):
            raise ValueError(
                f"`{peft_config}` was trained on revision {config.revision!r} of its base; set "
                f"`model_init_kwargs={{'revision': {config.revision!r}}}`."
            )
        return config
    initial = getattr(peft_config, "init_lora_weights", True)
    if initial not in (True, "gaussian"):
        raise ValueError(
            f"`init_lora_weights={initial!r}` changes the base, the reference; use True or "
            "'gaussian'."
        )
    # its other initial weights are all random
    is_c3a = getattr(peft_config, "peft_type", None) == "C3A"
    for name in ("init_weights", "init_ia3_weights"):
        initial = getattr(peft_config, name, True)
        if initial is False or (is_c3a and initial is not True):
            raise ValueError(
                f"`{name}={initial!r}` begins with another policy than the base; use True."
            )
    return peft_config


def model_kwargs(args: PPOConfig) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` that the config holds."""
    kwargs = {"trust_remote_code": args.trust_remote_code} | cast(
        dict, args.model_init_kwargs or {}
    )
    # as before transformers 5
    return {"dtype" if name == "torch_dtype" else name: x for name, x in kwargs.items()}


def hub_kwargs(args: PPOConfig) -> dict[str, Any]:
    """Those of [`model_kwargs`] that locate a model's files."""
    names = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "trust_remote_code")
    return {key: value for key, value in model_kwargs(args).items() if key in names}


def load_config(argument: str, name: str, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """Load a model's config, or raise a `ValueError` that names the argument."""
    try:
        return AutoConfig.from_pretrained(name, **kwargs)
    except (OSError, HFValidationError) as error:
        cause = shortened(str(error).splitlines()[0], 160)
        raise ValueError(
            f"`{argument}` must be a directory or a model on the Hub, got {name!r} ({cause}); "
            "check its spelling and the connection, or log in (`hf auth login`)."
        ) from None


def auto_class(config: PreTrainedConfig) -> Any:
    """Class that loads a model with its output projection: some have images, too, and no class
    for text alone."""
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if has_own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def name_of_loader(model: PreTrainedModel) -> str:
    """Name of the class of transformers with which a model of this class, and not a part of it,
    is loaded."""
    kinds = {"AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING}
    kinds["AutoModelForImageTextToText"] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_part = model.config.model_type.endswith("_text")  # of a model whose folder it may be
    for name, classes in kinds.items():
        if classes.get(type(model.config), None) is type(model) and not is_part:
            return name
    own_name = type(model).__name__
    if model.is_remote_code() or not hasattr(transformers, own_name):
        return "AutoModelForCausalLM"
    return own_name


def load_base(
    model_id: str,
    args: PPOConfig,
    quantization_config: BitsAndBytesConfig | None,
    device: torch.device,
) -> PreTrainedModel:
    """Load a base for a run, quantized on its device."""
    kwargs = {"dtype": compute_dtype(args)} | model_kwargs(args)
    if quantization_config is not None:
        quantization_config = copy(quantization_config)
        # the default of bitsandbytes, slow where bf16 is fast; other quantizers have none
        if getattr(quantization_config, "bnb_4bit_compute_dtype", None) == torch.float32:
            if kwargs["dtype"] == "auto":
                dtype = compute_dtype(args)
            else:
                dtype = kwargs["dtype"]
            quantization_config.bnb_4bit_compute_dtype = getattr(
                torch, str(dtype).removeprefix("torch.")
            )
        # quantized weights cannot be moved afterwards
        kwargs = {"quantization_config": quantization_config, "device_map": {"": device}} | kwargs
    auto = auto_class(AutoConfig.from_pretrained(model_id, **hub_kwargs(args)))
    model, report = auto.from_pretrained(model_id, **kwargs, output_loading_info=True)
    check_loaded(model_id, report, "a causal language model with its output projection")
    return model


def check_loaded(model_id: str, report: Mapping[str, Any], needed: str) -> None:
    """Raise a `ValueError` for weights that the files lack: `from_pretrained` draws them at
    random."""
    missing = sorted(map(str, list(report["missing_keys"]) + list(report["mismatched_keys"])))
    if missing:
        raise ValueError(
            f"`{model_id}` must be {needed}, but its files lack {len(missing)} weights, which "
            f"would be random: {', '.join(missing[:4])}; use another checkpoint."
        )


def _prepare_modules(model: nn.Module) -> None:
    """Disable dropout of layers that are recomputed, the loss of frozen routers, which fails while
    sampling, and the kernel of 4-bit layers that has no backward."""
    for module in model.modules():
        # on CPUs with AVX512-BF16, bitsandbytes repacks `Linear4bit` weights at the first forward
        # without gradients, and later training forwards lose their gradient without an error
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (typed as a tensor or a module)
        # functional dropout and layer dropout: the rate is an attribute, or read from the config
        config = getattr(module, "config", None)
        for owner in (module, config) if isinstance(config, PreTrainedConfig) else (module,):
            for name, x in list(vars(owner).items()):
                if isinstance(x, float) and "drop" in name:
                    setattr(owner, name, 0.0)
                elif name == "output_router_logits":
                    setattr(owner, name, False)


def _settle_task_type(config: PeftConfig) -> None:
    """Set the task by which a reload chooses its class."""
    if config.task_type not in (None, TaskType.CAUSAL_LM):
        logger.warning("`task_type=%s` of the adapter is set to CAUSAL_LM.", config.task_type)
    config.task_type = TaskType.CAUSAL_LM


def _adapt(model: Any, peft_config: PeftConfig | str | None) -> tuple[PeftModel, bool]:
    """Add the policy's adapter, unless it is there, and return if it was trained before."""
    is_trained = isinstance(model, PeftModel) or isinstance(peft_config, str)
    if isinstance(model, PeftModel):
        policy = model
    elif isinstance(peft_config, str):
        policy = PeftModel.from_pretrained(model, peft_config, is_trainable=True)
        check_base_is_in_its_files(policy)  # it may have brought embeddings
    else:
        config = copy(peft_config or default_peft_config())  # the user's may serve other runs
        _settle_task_type(config)
        for name, rate in vars(config).items():
            if "dropout" in name and rate:
                logger.warning(
                    "`%s=%s` of `peft_config` is set to 0: log-probs must be repeatable.",
                    name,
                    rate,
                )
        policy = add_policy_adapter(model, config)
    _settle_task_type(policy.active_peft_config)
    # its own save and push must not publish the adapters of other roles, which are added later
    if not isinstance(policy.save_pretrained, partial):  # otherwise by an earlier trainer
        policy.save_pretrained = partial(
            policy.save_pretrained, selected_adapters=list(policy.peft_config)
        )
    try:
        adapter_parameters(policy, policy.active_adapter)
    except (KeyError, ValueError) as error:
        kind = policy.active_peft_config.peft_type
        if getattr(policy.active_peft_config, "ensure_weight_tying", False):
            raise ValueError(
                "`ensure_weight_tying=True` of `peft_config` adapts the output projection with "
                "the embedding; remove it."
            ) from error
        raise ValueError(
            f"{kind} saves other tensors than its trained weights; use `LoraConfig`."
        ) from error
    text_config = policy.config.get_text_config()
    if text_config.tie_word_embeddings and isinstance(
        policy.get_input_embeddings(), BaseTunerLayer
    ):
        logger.warning(
            "The adapter is on the embedding, whose weight is the output projection, too: publish "
            "the adapter, since `merge_and_unload` changes both, and the merged model has other "
            "logits; or use a base without tied weights."
        )
    if isinstance(policy.get_output_embeddings(), BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise ValueError(
            "The adapter must not be on the output projection; remove `lm_head` from "
            "`target_modules` and `modules_to_save`, or `trainable_token_indices` of tied ones."
        )
    dtype = policy.get_output_embeddings().weight.dtype
    if dtype.itemsize == 1:  # log-probs multiply by the weight itself
        raise ValueError(
            f"The output projection must not be quantized, got numbers of {dtype}; add 'lm_head' "
            "to `llm_int8_skip_modules` of the quantization config."
        )
    return policy, is_trained


def load_actor_critic(
    model: str | PreTrainedModel | PeftModel,
    args: PPOConfig,
    quantization_config: BitsAndBytesConfig | None = None,
    peft_config: PeftConfig | str | None = None,
    device: torch.device | str = "cpu",
    critic_factory: CriticFactory | None = None,
) -> ActorCritic:
    """Build the actor-critic: a frozen base, the policy's adapter, and the critic that the
    config names or `critic_factory` builds."""
    is_named = isinstance(model, str)
    if isinstance(model, str):
        model = load_base(model, args, quantization_config, torch.device(device))
    else:
        check_base_is_in_its_files(model)

    # 1. the policy's adapter, and a frozen copy as the reference if it was trained before
    reference = critic_adapter = saved_head = files = None
    policy, is_trained = _adapt(model, peft_config)
    config = policy.peft_config[policy.active_adapter]
    if is_named:  # a reload of the adapter would take the base of another revision
        config.revision = model_kwargs(args).get("revision")
    if is_trained:
        reference = add_adapter(policy, "reference", config, keep_modules=True)
        load_adapter_weights(policy, reference, adapter_weights(policy, policy.active_adapter))

    # 2. the critic's adapter: of the policy's config, or of the one it starts from
    critic = args.critic
    start = args.critic_init
    if start is not None:
        saved_head, files = read_critic(
            start, critic, policy.config._name_or_path, args.reward_label, args.gamma
        )
    if critic == "adapter":
        critic_adapter = add_adapter(policy, "critic", config if files is None else files.config)

    _check_saved_modules(config, policy, args)
    _train_adapters(policy, [policy.active_adapter, critic_adapter])
    _prepare_modules(policy)

    # 3. the critic's head
    is_normalized = bool(args.normalize_values)
    head = None
    if critic_factory is not None:
        head = built_by(critic_factory, policy, is_normalized)
    elif critic != "none":
        head = new_critic(critic, policy, is_normalized, args.max_completion_length)
    if head is not None and saved_head is not None:
        try:
            if critic_adapter is not None and files is not None:
                load_adapter_weights(policy, critic_adapter, files.weights)
            head.load_saved(saved_head)
        except ValueError as error:
            raise ValueError(
                f"The critic of `critic_init={start!r}` does not fit the model: {error}"
            ) from None
        _check_units_of_critic(head, args)
    return ActorCritic(
        policy,
        value_head=head,
        reference_adapter=reference,
        critic_adapter=critic_adapter,
        critic_backprop=args.critic_options.backprop,
        cast_lm_head_to_fp32=args.cast_lm_head_to_fp32,
    )


def _check_saved_modules(config: PeftConfig, policy: PeftModel, args: PPOConfig) -> None:
    """Raise if whole modules, trained in float32, would meet layers in another type."""
    has_autocast = args.bf16 or args.fp16
    if getattr(config, "modules_to_save", None) and policy.dtype.itemsize == 2 and not has_autocast:
        raise ValueError(
            "`modules_to_save` of the adapter are trained in float32, and return it to layers in "
            f"{str(policy.dtype).removeprefix('torch.')}; set `bf16=True`, or load the base in "
            "float32."
        )


def _train_adapters(policy: PeftModel, names: Sequence[str | None]) -> None:
    """Train these adapters only, in float32 whatever the base's dtype: Adam's steps vanish in
    bfloat16."""
    policy.requires_grad_(False)
    for name in filter(None, names):
        for parameter in adapter_parameters(policy, name).values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)


def _check_units_of_critic(head: Critic, args: PPOConfig) -> None:
    """Raise if a saved critic predicts in other units than the config names."""
    is_chosen = "normalize_values" in args.changed_fields
    if is_chosen and head.is_normalized != bool(args.normalize_values):
        raise ValueError(
            f"`normalize_values` must be {head.is_normalized} for `critic_init="
            f"{args.critic_init!r}`, which predicts in these units, got "
            f"{bool(args.normalize_values)}; change or omit it."
        )


def add_critic_to_optimizer(
    optimizer: torch.optim.Optimizer | None, scheduler: Any, actor_critic: ActorCritic
) -> None:
    """Add the critic to a given optimizer; raise an error if it lacks another weight, or is not
    the scheduler's."""
    if not any(x.requires_grad for x in actor_critic.policy_parameters().values()):
        raise ValueError(
            "`reward_funcs` shares its layers with `model`, and freezes its adapter; load another "
            "model."
        )
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "The scheduler in `optimizers` must be of the optimizer in it; or set "
            "`lr_scheduler_type`."
        )
    present = {id(x) for group in getattr(optimizer, "param_groups", ()) for x in group["params"]}
    missing = {
        name: x
        for name, x in actor_critic.named_parameters()
        if x.requires_grad and id(x) not in present
    }
    critic = {id(x) for x in actor_critic.critic_parameters().values()}
    if optimizer is None or not missing:
        return
    if not critic.issuperset(map(id, missing.values())):
        raise ValueError(
            f"`optimizers` lacks `{list(missing)[-1]}` and {len(missing) - 1} others; set `optim` "
            "and `learning_rate` instead."
        )
    if scheduler is not None:
        raise ValueError(
            "The critic joins the optimizer in `optimizers`, which a scheduler that is already "
            "built would not know; pass `(optimizer, None)`, and set `lr_scheduler_type`."
        )
    rate = getattr(actor_critic.value_head, "learning_rate", None) or optimizer.defaults["lr"]
    # no script could have the critic
    optimizer.add_param_group({"params": list(missing.values()), "lr": rate})
