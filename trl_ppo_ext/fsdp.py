"""PyTorch's FSDP2: the base spread over the processes, layer by layer, as Accelerate is told to."""

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import BitsAndBytesConfig

from .config import PPOConfig
from .modeling import ActorCritic, as_sharded, whole_weights

# what is called besides `forward`: within these the parameters outside of the layers are whole
FORWARDS = ("generate", "reference_logprobs", "read_trunk")
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")  # whose state has the shapes of the parameters
QUANTISED = "A quantised base cannot be sharded by FSDP; use DDP, which holds a 4-bit base on every process."


def is_asked_for(args: PPOConfig) -> bool:
    """Whether the config or the launcher asks for FSDP."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def plugin_of(args: PPOConfig) -> FullyShardedDataParallelPlugin:
    """What is asked of FSDP."""
    of_config = args.fsdp_plugin_args or {}
    version = int(of_config.get("fsdp_version", 0 if args.fsdp else os.environ.get("FSDP_VERSION", 1)))
    if version != 2:
        raise ValueError(
            "The base model would be sharded by FSDP1 or FSDP for XLA, which PPOTrainer does not support: "
            "log-probabilities use its output projection from outside. Set `fsdp_version: 2` in Accelerate's file "
            "(`fsdp_config={'version': 2}` in the config), use DeepSpeed's ZeRO-3, or DDP with a 4-bit base."
        )
    return FullyShardedDataParallelPlugin(**of_config)


def check_fsdp(
    args: PPOConfig, optimizer: torch.optim.Optimizer | None, quantization_config: BitsAndBytesConfig | None
) -> None:
    """Refuse what FSDP2 could not honour, or has not been seen to."""
    plugin = plugin_of(args)
    named = plugin.transformer_cls_names_to_wrap or plugin.ignored_modules
    refused = {
        "FSDP must shard each layer by itself, or every forward would gather the whole base; set "
        "`fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP`.": plugin.auto_wrap_policy != transformer_auto_wrap_policy,
        "FSDP shards the layers that the model names as its own; leave `fsdp_transformer_layer_cls_to_wrap` and "
        "`fsdp_ignored_modules` out.": bool(named),
        "`fsdp_reshard_after_forward: false` would keep the base whole on every process; set it true, or use DDP.": (
            not plugin.reshard_after_forward
        ),
        "`fsdp_cpu_ram_efficient_loading` would leave the adapters without weights on all processes but the first; "
        "set it false.": plugin.cpu_ram_efficient_loading,
        "`fsdp_offload_params` is not supported; set it false, and lower `per_device_train_batch_size` if memory is "
        "short.": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "`fsdp_activation_checkpointing` would recompute layers without the adapter they ran with; set it false, and "
        "`gradient_checkpointing=True` in the config.": plugin.activation_checkpointing,
        "A `parallelism_config` is not supported with FSDP; leave it out.": args.parallelism_config is not None,
        "`fp16=True` is not supported with FSDP; use `bf16`.": args.fp16,
        "`optimizers` holds an optimizer of parameters that FSDP replaces; leave it out, and choose with `optim`.": (
            optimizer is not None
        ),
        f"`optim={str(getattr(args.optim, 'value', args.optim))!r}` is not known to work on sharded parameters; use "
        f"one of {', '.join(map(repr, OPTIMIZERS))}, or ZeRO-3.": args.optim not in OPTIMIZERS,
        QUANTISED: quantization_config is not None or "quantization_config" in (args.model_init_kwargs or {}),
    }
    for message, given in refused.items():
        if given:
            raise ValueError(message)


def shard(actor_critic: ActorCritic, accelerator: Accelerator) -> None:
    """Spread the parameters of the actor-critic over the processes, in place.

    Each layer is gathered whenever it runs, and the rest (embeddings, output projection, value head) for as long as
    the actor-critic does. Parameters keep their dtypes: autocast does what it does under DDP, and gradients are
    averaged in float32.
    """
    base = actor_critic.policy.get_base_model()
    if any(not parameter.is_floating_point() for parameter in base.parameters()):
        raise ValueError(QUANTISED)
    names = set(base._no_split_modules or ())
    layers = [module for module in base.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(base).__name__} does not name its layers (`_no_split_modules`), which FSDP would shard; use "
            "DeepSpeed's ZeRO-3, or DDP."
        )
    accelerator.prepare_model(actor_critic, device_placement=False, evaluation_mode=True)  # autocast
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in [*reversed(layers), actor_critic]:  # what lies within another comes first
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for method in FORWARDS:
        register_fsdp_forward_method(actor_critic, method)


def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of an optimizer as one process alone would have it. All processes must call it."""
    state = optimizer.state_dict()
    whole = {}
    for number, of_parameter in state["state"].items():
        tensors = whole_weights({key: x for key, x in of_parameter.items() if isinstance(x, torch.Tensor)})
        whole[number] = of_parameter | {key: x.cpu() for key, x in tensors.items()}
    return state | {"state": whole}


def spread_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give each process its part of a state that was loaded whole. All processes must call it."""
    for parameter, of_parameter in optimizer.state.items():
        for key, x in of_parameter.items():
            if x.shape == parameter.shape:  # a count of steps has no dimension
                of_parameter[key] = as_sharded(x, parameter)
