"""One frozen base and its roles: loading, adapters, log-probs."""

from .actor_critic import ActorCritic
from .adapters import adapter_weights, check_fit, load_adapter_weights, parameter_names
from .critics import SideCritic, ValueHead
from .loading import (
    check_model_arguments,
    check_optimizers,
    compute_dtype,
    default_peft_config,
    hub_kwargs,
    load_actor_critic,
)
from .logprobs import TokenScores, token_logprobs

__all__ = [
    "ActorCritic",
    "SideCritic",
    "TokenScores",
    "ValueHead",
    "adapter_weights",
    "check_fit",
    "check_model_arguments",
    "check_optimizers",
    "compute_dtype",
    "default_peft_config",
    "hub_kwargs",
    "load_actor_critic",
    "load_adapter_weights",
    "parameter_names",
    "token_logprobs",
]
