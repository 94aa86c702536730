"""PPO for TRL: one frozen base model plays policy, reference, critic and, if wanted, reward."""

from .config import PPOConfig
from .modeling import ActorCritic
from .trainer import PPOTrainer

__all__ = ["ActorCritic", "PPOConfig", "PPOTrainer"]
