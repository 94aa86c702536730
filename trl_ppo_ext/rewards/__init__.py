"""Rewards: functions, classifiers, adapters on the base, and, imported only when needed, those
over HTTP."""

# ruff: noqa: F401
from .build import (
    RewardFunc,
    build_rewards,
    check_reward_arguments,
    check_reward_columns,
    is_function,
    is_model,
    load_rewards,
    no_reward,
    reward_labels,
    with_distinct_names,
)
from .model import ClassifierReward, RewardAdapter, load_classifier
from .process import ProcessReward
from .scoring import (
    FunctionReward,
    Reward,
    RewardError,
    Scored,
    ScoringBatch,
    monitor,
    read_scores,
    score_all,
)
