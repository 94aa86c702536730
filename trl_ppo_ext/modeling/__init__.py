"""One frozen base and its roles: loading, adapters, log-probs."""

from .actor_critic import ActorCritic as ActorCritic
from .adapters import adapter_weights as adapter_weights
from .adapters import check_fit as check_fit
from .adapters import load_adapter_weights as load_adapter_weights
from .adapters import parameter_names as parameter_names
from .critics import SIDE_LEARNING_RATE as SIDE_LEARNING_RATE
from .critics import SideCritic as SideCritic
from .critics import ValueHead as ValueHead
from .loading import check_model_arguments as check_model_arguments
from .loading import check_optimizers as check_optimizers
from .loading import default_peft_config as default_peft_config
from .loading import hub_kwargs as hub_kwargs
from .loading import load_actor_critic as load_actor_critic
from .logprobs import TokenScores as TokenScores
from .logprobs import token_logprobs as token_logprobs
