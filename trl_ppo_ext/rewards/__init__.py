"""Rewards: functions, sequence classifiers, adapters on the shared base, judges and remote rewards."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .adapter import RewardAdapter
from .base import Reward, RewardError, ScoringBatch, read_scores
from .build import RewardFunc, build_rewards, check_reward_arguments, check_reward_columns
from .function import FunctionReward
from .model import ClassifierReward, load_classifier
from .scoring import RewardShaping, RunningMoments, Scored, monitor, score_all

if TYPE_CHECKING:
    from .remote import Judge, RemoteReward

__all__ = [
    "ClassifierReward",
    "FunctionReward",
    "Judge",
    "RemoteReward",
    "Reward",
    "RewardAdapter",
    "RewardError",
    "RewardFunc",
    "RewardShaping",
    "RunningMoments",
    "Scored",
    "ScoringBatch",
    "build_rewards",
    "check_reward_arguments",
    "check_reward_columns",
    "load_classifier",
    "monitor",
    "read_scores",
    "score_all",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # these load an HTTP client, which a run without them does not need
        return getattr(import_module(".remote", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
