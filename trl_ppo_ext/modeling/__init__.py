"""One frozen base and its roles: loading, adapters, log-probs."""

from .actor_critic import ActorCritic as ActorCritic
from .critics import Critic as Critic
from .critics import SideCritic as SideCritic
from .critics import ValueHead as ValueHead
from .logprobs import TokenScores as TokenScores
