"""A reward model behind `trl-ppo serve-reward`; the variable REWARD_SERVER says where, if not on this machine."""

import os

from trl_ppo_ext import RemoteReward

reward = RemoteReward(os.environ.get("REWARD_SERVER", "http://127.0.0.1:8001"), name="reward_model")
