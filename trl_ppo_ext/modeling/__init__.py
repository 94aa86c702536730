"""Models: loading, and the actor-critic on one shared base."""

from .actor_critic import ActorCritic, TokenOutputs, check_fit
from .loading import check_model_arguments, compute_dtype, default_peft_config, hub_kwargs, load_actor_critic
from .logprobs import token_logprobs

__all__ = [
    "ActorCritic",
    "TokenOutputs",
    "check_fit",
    "check_model_arguments",
    "compute_dtype",
    "default_peft_config",
    "hub_kwargs",
    "load_actor_critic",
    "token_logprobs",
]
