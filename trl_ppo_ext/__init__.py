"""PPO for TRL: one frozen base model plays policy, reference, critic and, if wanted, reward."""

import logging
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# noise of other packages that no user can act on: an optional kernel for CPUs, and a renamed
# attribute that PEFT reads
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
del logging, warnings

if TYPE_CHECKING:
    from .config import PPOConfig as PPOConfig
    from .episodes import StepResult as StepResult
    from .modeling import ActorCritic as ActorCritic
    from .modeling import Critic as Critic
    from .rewards import ProcessReward as ProcessReward
    from .rewards import RewardAdapter as RewardAdapter
    from .rewards import RewardError as RewardError
    from .rewards.http import Judge as Judge
    from .tools.memory import estimate_memory as estimate_memory
    from .trainer import PPOTrainer as PPOTrainer

# public name -> module; imported when first used, so that `trl-ppo --help` does not wait for torch
_MODULES = {
    "ActorCritic": "modeling",
    "Critic": "modeling",
    "Judge": "rewards.http",
    "PPOConfig": "config",
    "PPOTrainer": "trainer",
    "ProcessReward": "rewards",
    "RewardAdapter": "rewards",
    "RewardError": "rewards",
    "StepResult": "episodes",
    "estimate_memory": "tools.memory",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
