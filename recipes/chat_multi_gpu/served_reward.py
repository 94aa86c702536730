"""A reward model behind `trl-ppo serve-reward`. REWARD_SERVER is its address, by default on this machine."""

import os

from trl_ppo_ext import RemoteReward

reward = RemoteReward(os.environ.get("REWARD_SERVER", "http://127.0.0.1:8001"), name="reward_model")
