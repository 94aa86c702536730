"""Rewards: functions, sequence classifiers, adapters on the shared base, judges and remote rewards.

`http` is imported only when it is needed, because it loads an HTTP client.
"""

from .build import (
    REWARD_FIELDS,
    RewardFunc,
    build_rewards,
    check_contexts,
    check_reward_arguments,
    check_reward_columns,
)
from .model import ClassifierReward, RewardAdapter, load_classifier
from .scoring import (
    FunctionReward,
    Reward,
    RewardError,
    RewardShaping,
    RunningMoments,
    Scored,
    ScoringBatch,
    monitor,
    read_scores,
    score_all,
)

__all__ = [
    "REWARD_FIELDS",
    "ClassifierReward",
    "FunctionReward",
    "Reward",
    "RewardAdapter",
    "RewardError",
    "RewardFunc",
    "RewardShaping",
    "RunningMoments",
    "Scored",
    "ScoringBatch",
    "build_rewards",
    "check_contexts",
    "check_reward_arguments",
    "check_reward_columns",
    "load_classifier",
    "monitor",
    "read_scores",
    "score_all",
]
