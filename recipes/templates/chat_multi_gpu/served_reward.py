"""A reward model behind `vllm serve`. REWARD_SERVER is its address, by default on this machine."""

import os

from remote_reward import RemoteReward

reward = RemoteReward(
    os.environ.get("REWARD_SERVER", "http://127.0.0.1:8001/classify"),
    os.environ.get("REWARD_MODEL", "Skywork/Skywork-Reward-V2-Llama-3.1-8B"),
    name="reward_model",
)
