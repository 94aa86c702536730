"""Rewards: functions, classifiers, adapters on the base, and, imported only when needed, those over HTTP."""

from .build import RewardFunc as RewardFunc
from .build import build_rewards as build_rewards
from .build import check_contexts as check_contexts
from .build import check_reward_arguments as check_reward_arguments
from .build import check_reward_columns as check_reward_columns
from .model import ClassifierReward as ClassifierReward
from .model import RewardAdapter as RewardAdapter
from .model import load_classifier as load_classifier
from .scoring import FunctionReward as FunctionReward
from .scoring import Reward as Reward
from .scoring import RewardError as RewardError
from .scoring import Scored as Scored
from .scoring import ScoringBatch as ScoringBatch
from .scoring import capture_random_state as capture_random_state
from .scoring import fixed_seed as fixed_seed
from .scoring import monitor as monitor
from .scoring import read_scores as read_scores
from .scoring import score_all as score_all
