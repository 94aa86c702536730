"""Models: loading, and the actor-critic on one shared base."""

from ..distributed import as_sharded, is_sharded, set_weights, whole_weights
from .actor_critic import ActorCritic
from .adapters import adapter_weights, check_fit, load_adapter_weights, parameter_names
from .loading import check_model_arguments, compute_dtype, default_peft_config, hub_kwargs, load_actor_critic
from .logprobs import TokenOutputs, token_logprobs

__all__ = [
    "ActorCritic",
    "TokenOutputs",
    "adapter_weights",
    "as_sharded",
    "check_fit",
    "check_model_arguments",
    "compute_dtype",
    "default_peft_config",
    "hub_kwargs",
    "is_sharded",
    "load_actor_critic",
    "load_adapter_weights",
    "parameter_names",
    "set_weights",
    "token_logprobs",
    "whole_weights",
]
