"""One server and one client process for all tests, since a client takes seconds to start."""

import pytest
from hub_client import READER, TOKEN, Client
from hub_server import Hub

SETUP = """
import json, logging, os
import torch
torch.set_num_threads(1)
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from tiny import config, length_reward, llama, prompts, tokenizer
from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.tracking import report

report.draw_all = lambda curves: {}  # the plots of a report take seconds

def make(folder, base="base", critic="head", **settings):
    lora = LoraConfig(target_modules="all-linear")
    args = config(folder, critic=critic, **{"learning_rate": 1e-2, "max_steps": 2} | settings)
    return PPOTrainer(base, length_reward, args, prompts(), peft_config=lora)

llama().save_pretrained("base")
tokenizer().save_pretrained("base")
"""


@pytest.fixture(scope="session")
def hub():
    with Hub() as server:
        server.tokens = {TOKEN: ("me", True), READER: ("me", False)}
        yield server


@pytest.fixture(scope="session")
def client(hub, tmp_path_factory):
    process = Client(hub.url, tmp_path_factory.mktemp("client"))
    process.run(SETUP)
    yield process
    process.close()


@pytest.fixture(scope="session")
def reader(hub, tmp_path_factory):
    """A process without a token, which has trained nothing."""
    process = Client(hub.url, tmp_path_factory.mktemp("reader"))
    yield process
    process.close()


@pytest.fixture(autouse=True)
def no_fault(hub):
    yield
    hub.hold = None
    hub.echo = False
    hub.expired.clear()
