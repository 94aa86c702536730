"""Stable name of [`trl_ppo_ext.ppo.math`]."""

from .ppo.math import *  # noqa: F403
