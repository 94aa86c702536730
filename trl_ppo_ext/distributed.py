"""Everything that DeepSpeed, FSDP2 and several ranks need done differently."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin, gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.utils.versions import require_version

from .config import PPOConfig
from .redaction import shortened

T = TypeVar("T")
DEEPSPEED = "deepspeed>=0.19.8"  # skips steps with a non-finite gradient in every dtype
# called besides `forward`
FSDP_FORWARDS = (
    "generate",
    "sample",
    "reference_logprobs",
    "read_critic",
    "read_trunk",
    "prepare_forwards",
)
# their state has the shapes of the parameters
FSDP_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
# settings of FSDP that are supported: attribute of Accelerate's plugin, value, and how to get it
FSDP_SETTINGS: dict[str, tuple[str, Any, str]] = {
    "auto_wrap_policy": (
        "auto_wrap_policy",
        transformer_auto_wrap_policy,
        "TRANSFORMER_BASED_WRAP: layer by layer",
    ),
    "transformer_layer_cls_to_wrap": (
        "transformer_cls_names_to_wrap",
        None,
        "omitted: the model names its layers",
    ),
    "ignored_modules": ("ignored_modules", None, "omitted: every layer is sharded"),
    "reshard_after_forward": (
        "reshard_after_forward",
        True,
        "true, or every rank would keep the whole base",
    ),
    "cpu_ram_efficient_loading": (
        "cpu_ram_efficient_loading",
        False,
        "false, or ranks lack weights of adapters",
    ),
    "offload_params": ("cpu_offload", OffloadPolicy(), "false"),
    # it would recompute layers without the adapter they ran with
    "activation_checkpointing": (
        "activation_checkpointing",
        False,
        "false; set `gradient_checkpointing=True`",
    ),
}
QUANTIZED = (
    "A quantized base cannot be sharded by FSDP; use DDP, which holds a 4-bit base on every rank."
)


class OtherRankError(OSError):
    """Raised when a step succeeded on this rank and failed on another."""


def on_every_rank(action: Callable[[], T], *failures: type[Exception], runs: bool = True) -> T:
    """Run an action on every rank, or on those with `runs`; if it fails on one, it fails on all.

    A rank that raised alone would leave the others waiting. The action must not reduce over ranks
    itself.
    """
    result = error = None
    try:
        if runs:
            result = action()
        else:
            result = None
    except failures as caught:
        error = caught
    messages = gather_object(
        [None if error is None else f"{type(error).__name__}: {shortened(error)}"]
    )
    if error is not None:
        error.is_on_every_rank = True  # type: ignore[attr-defined]
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise OtherRankError(f"on rank {rank}: {message}")
    return result  # type: ignore[return-value]


def forget_evaluation(trainer: Any) -> None:
    """Undo the preparation of a model that was evaluated first: Accelerate would skip DDP, and
    ranks train alone."""
    if trainer.model_wrapped is not trainer.model:
        return
    trainer.model._is_accelerate_prepared = False
    trainer.accelerator._models = [
        model for model in trainer.accelerator._models if model is not trainer.model
    ]
    trainer.model.__dict__.pop("forward", None)  # autocast around it


@contextmanager
def gathered(parameters: Iterable[Any], changed: bool = False) -> Iterator[None]:
    """Gather parameters that ZeRO-3 has sharded; with `changed`, rank 0's writes reach all.

    All ranks must enter.

    For parameters used from outside of their module. Under FSDP such code runs inside a registered
    forward method, where parameters are unsharded.
    """
    # within the forward of a module that uses it, a parameter is gathered already, and released by
    # that forward
    sharded = [
        x
        for x in parameters
        if hasattr(x, "ds_id") and (changed or x.ds_status.name != "AVAILABLE")
    ]
    if sharded:
        from deepspeed.runtime.zero import GatheredParameters
    with (
        GatheredParameters(sharded, modifier_rank=0 if changed else None)
        if sharded
        else nullcontext()
    ):
        yield


def is_sharded(model: nn.Module) -> bool:
    """Check if FSDP or ZeRO-3 shards the weights of a model."""
    by_fsdp = any(isinstance(x, FSDPModule) for x in model.modules())
    return by_fsdp or any(hasattr(x, "ds_id") for x in model.parameters())


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather all weights, once for all forwards within.

    All ranks must enter; one inside another changes nothing.
    """
    with gathered(model.parameters()), ExitStack() as stack:
        for module in model.modules():
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, name)
                kept = OrderedDict(
                    (k, x)
                    for k, x in hooks.items()
                    if not str(x.__module__).startswith("deepspeed.")
                )
                if len(kept) < len(hooks):  # DeepSpeed's shard a module again after its forward
                    stack.callback(setattr, module, name, hooks)
                    setattr(module, name, kept)
            if isinstance(module, FSDPModule) and any(
                isinstance(x, DTensor) for x in module.parameters()
            ):
                stack.callback(module.reshard)
                stack.callback(module.set_reshard_after_forward, True, recurse=False)
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
        yield


def unsharded_weights(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather detached weights, as copies if they are sharded. All ranks must call it."""
    with gathered(parameters.values()):
        weights = {
            key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in parameters.items()
        }
        return {
            key: x.detach().clone() if hasattr(x, "ds_id") else x.detach()
            for key, x in weights.items()
        }


@torch.no_grad()
def set_weights(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Overwrite parameters in place with unsharded weights.

    All ranks must call it, with the same weights.
    """
    with gathered(parameters.values(), changed=True):
        for name, parameter in parameters.items():
            parameter.copy_(_shard_like(parameter, weights[name].to(parameter.device)))


def _shard_like(parameter: Tensor, weight: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return weight
    return distribute_tensor(weight, parameter.device_mesh, parameter.placements)


def check_deepspeed(args: PPOConfig) -> None:
    """Raise for what DeepSpeed breaks: it takes the optimizer step within the backward, unless
    the gradient is NaN."""
    require_version(DEEPSPEED, "Older versions may apply NaN or inf gradients.")
    plugin = args.deepspeed_plugin
    config = plugin.hf_ds_config.config
    if args.critic_learning_rate is not None and "optimizer" in config:
        raise ValueError(
            "`critic_learning_rate` needs the trainer's optimizer; remove DeepSpeed's `optimizer`."
        )
    if plugin.zero_stage == 0 or config.get("bf16", {}).get("check_grad_overflow") is False:
        raise ValueError(
            "DeepSpeed would apply NaN or inf gradients; set ZeRO's `stage` to 1, 2 or 3 and "
            "remove `check_grad_overflow`, or use DDP."
        )
    if "scheduler" in config:
        raise ValueError(
            "DeepSpeed's `scheduler` does not advance at skipped steps; set `lr_scheduler_type` "
            "instead."
        )
    if args.critic_options.warmup_steps:
        raise ValueError(
            "`critic_kwargs['warmup_steps']` is not supported with DeepSpeed; use `critic_init`, "
            "or DDP."
        )


def skip_deepspeed_step(loss: Tensor, outputs: Tensor) -> Tensor:
    """Return the loss with a NaN gradient, for which DeepSpeed skips the step that its backward
    takes."""
    outputs.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
    return loss.detach() + 0 * outputs.sum()


@contextmanager
def loading_unsharded() -> Iterator[None]:
    """Load frozen models unsharded, onto a device, also under ZeRO-3, which never trains them."""
    # set by the run's config or by the launcher; `from_pretrained` shards if it is there
    reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
    transformers_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        transformers_deepspeed._hf_deepspeed_config_weak_ref = reference


def uses_fsdp(args: PPOConfig) -> bool:
    """Check if the config or the launcher enables FSDP; on CPUs Accelerate itself does not see
    it."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def _fsdp_plugin(settings: dict[str, Any] | None) -> FullyShardedDataParallelPlugin:
    """Plugin of the config's settings, or of the launcher's."""
    # its plugin needs a GPU
    if int((settings or {}).get("fsdp_version", os.environ.get("FSDP_VERSION", 1))) != 2:
        raise ValueError(
            "FSDP1 and FSDP for XLA are unsupported. Set `fsdp_version: 2` in Accelerate's file "
            "(`fsdp_config={'version': 2}` in the config), use DeepSpeed's ZeRO-3, or DDP with "
            "a 4-bit base."
        )
    return FullyShardedDataParallelPlugin(**(settings or {}))


def check_fsdp(
    args: PPOConfig, optimizer: torch.optim.Optimizer | None, quantization_config: Any
) -> None:
    """Raise a `ValueError` for settings that do not work with FSDP2."""
    plugin = _fsdp_plugin(args.fsdp_plugin_args)
    for name, (attribute, supported, needed) in FSDP_SETTINGS.items():
        if getattr(plugin, attribute) != supported:
            raise ValueError(f"`fsdp_{name}` must be {needed}.")
    if args.parallelism_config is not None:
        raise ValueError("`parallelism_config` is unsupported with FSDP; remove it.")
    if optimizer is not None:
        raise ValueError(
            "`optimizers` must be empty with FSDP, which replaces the parameters; set `optim`."
        )
    if args.optim not in FSDP_OPTIMIZERS:
        raise ValueError(
            f"`optim` must be one of {FSDP_OPTIMIZERS} with FSDP; others are untested on shards."
        )
    if quantization_config is not None or "quantization_config" in (args.model_init_kwargs or {}):
        raise ValueError(QUANTIZED)


def enable_fsdp_on_cpu(trainer: Any) -> None:
    """Tell the Trainer about FSDP on CPUs, where Accelerate silently ignores it."""
    args = trainer.args
    state = trainer.accelerator.state
    if trainer.is_fsdp_enabled or not uses_fsdp(args):
        return
    if state.distributed_type != DistributedType.MULTI_CPU:
        raise ValueError(
            "FSDP needs several processes to shard over, got one; start them with `accelerate "
            "launch --num_processes N`, or disable FSDP."
        )
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = _fsdp_plugin(args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True


def shard(model: nn.Module, base: Any, accelerator: Accelerator) -> None:
    """Shard a model over the ranks, in place: each layer of its base by itself, then the rest.

    Parameters keep their dtypes: autocast does what it does under DDP, and gradients are averaged
    in float32.
    """
    if any(not parameter.is_floating_point() for parameter in base.parameters()):
        raise ValueError(QUANTIZED)
    layers = [
        module
        for module in base.modules()
        if type(module).__name__ in (base._no_split_modules or ())
    ]
    if not layers:
        raise ValueError(
            f"{type(base).__name__} must name its layers (`_no_split_modules`) to be sharded by "
            "FSDP; use DeepSpeed's ZeRO-3, or DDP."
        )
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # autocast
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in layers[::-1] + [model]:  # nested modules first
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for method in FSDP_FORWARDS:
        register_fsdp_forward_method(model, method)


def prepare_sharded(
    trainer: Any, prepare: Callable, checkpoint: str | None
) -> tuple[nn.Module, Any]:
    """Run the Trainer's preparation under FSDP or DeepSpeed, and load a checkpoint into the
    sharded model."""
    groups = []
    # of an evaluation or an earlier training: Accelerate has forgotten it
    if trainer.deepspeed is not None:
        trainer.deepspeed.destroy()
        trainer.model_wrapped = trainer.model
        # they keep its backward hooks, and a new engine would call those
        for module in trainer.model.modules():
            for name in ("pre_bwd_fn", "post_bwd_fn"):
                vars(module).pop(name, None)
    if trainer.is_fsdp_enabled:
        optimizer = trainer.create_optimizer()
        groups = [list(group["params"]) for group in optimizer.param_groups]
    model, dataloader = prepare(None)
    for parameters, group in zip(groups, trainer.optimizer.param_groups):
        # Accelerate finds parameters by address, and all empty shards of a rank share one
        group["params"] = parameters
    if checkpoint is None:
        return model, dataloader
    trainer._load_from_checkpoint(checkpoint)
    if trainer.is_fsdp_enabled:
        trainer.is_fsdp_enabled = False  # the optimizer's state was saved unsharded
        try:
            trainer._load_optimizer_and_scheduler(checkpoint)
        finally:
            trainer.is_fsdp_enabled = True
        shard_optimizer_state(optimizer)
    else:
        # not strict: the checkpoint omits the frozen base
        model.load_checkpoint(checkpoint, load_module_strict=False)
        trainer._load_optimizer_and_scheduler(checkpoint)
    return model, dataloader


def unsharded_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`state_dict` of an optimizer with unsharded tensors. All ranks must call it."""
    state = optimizer.state_dict()
    unsharded = {}
    for number, entries in state["state"].items():
        tensors = unsharded_weights({key: x for key, x in entries.items() if isinstance(x, Tensor)})
        unsharded[number] = entries | {key: x.cpu() for key, x in tensors.items()}
    return state | {"state": unsharded}


def shard_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard an optimizer state that was loaded unsharded. All ranks must call it."""
    for parameter, entries in optimizer.state.items():
        for key, x in entries.items():
            if x.shape == parameter.shape:  # a step count has no dimension
                entries[key] = _shard_like(parameter, x)
