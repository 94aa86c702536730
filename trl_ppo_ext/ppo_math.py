"""The mathematics of PPO, under the name that stays: [`trl_ppo_ext.ppo.math`]."""

from .ppo.math import *  # noqa: F403
