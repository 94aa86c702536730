"""Models: loading, and the actor-critic on one shared base."""

from .actor_critic import ActorCritic, TokenOutputs
from .adapters import adapter_weights, check_fit, load_adapter_weights, parameter_names
from .loading import check_model_arguments, compute_dtype, default_peft_config, hub_kwargs, load_actor_critic
from .logprobs import token_logprobs
from .sharding import gathered, is_sharded, whole_weights

__all__ = [
    "ActorCritic",
    "TokenOutputs",
    "adapter_weights",
    "check_fit",
    "check_model_arguments",
    "compute_dtype",
    "default_peft_config",
    "gathered",
    "hub_kwargs",
    "is_sharded",
    "load_actor_critic",
    "load_adapter_weights",
    "parameter_names",
    "token_logprobs",
    "whole_weights",
]
