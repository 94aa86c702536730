"""Run the code of docs/publish_and_use.md against the local server."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hub_client import TOKEN

PAGE = Path(__file__).parents[2] / "docs" / "publish_and_use.md"
SMALL = """
import datasets, trl_ppo_ext
os.environ["HF_TOKEN"] = {token!r}
made, load_dataset = trl_ppo_ext.PPOConfig.__init__, datasets.load_dataset
small = {{"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 2, "max_completion_length": 8,
          "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}}
page = {{"torch": torch}}
trl_ppo_ext.PPOConfig.__init__ = lambda self, *args, **kwargs: made(self, *args, **kwargs | small)
datasets.load_dataset = lambda name, split: prompts()
"""
AS_BEFORE = "trl_ppo_ext.PPOConfig.__init__, datasets.load_dataset = made, load_dataset"
EQUAL = """
ids, trained = torch.tensor([[2, 5, 9, 11, 4, 17]]), trainer.actor_critic.policy.eval()
with torch.no_grad():
    result = torch.equal(model(input_ids=ids).logits, trained(input_ids=ids).logits)
"""


@pytest.fixture
def small(hub, client):
    client.run(f"llama().push_to_hub('me/published', token={TOKEN!r})")
    client.run(f"tokenizer().push_to_hub('me/published', token={TOKEN!r})")
    hub.repositories["Qwen/Qwen2.5-0.5B"] = replace(hub.repositories["me/published"])
    client.run(SMALL.format(token=TOKEN))
    yield
    client.run(AS_BEFORE)


def run_on_page(client, code):
    """In the namespace of the page."""
    return client.run(f"exec({code!r}, page)\nresult = page.get('result')")


def test_publish_page_pushes_loads_and_resumes(hub, client, small):
    pushed, loaded, resumed, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    run_on_page(client, pushed)
    files = hub.repositories["me/tldr-ppo"].files
    card = files["README.md"].decode()
    assert "base_model: Qwen/Qwen2.5-0.5B" in card and "license: apache-2.0" in card
    assert "last-checkpoint/manifest.json" in files
    run_on_page(client, loaded)
    assert run_on_page(client, EQUAL)
    run_on_page(client, resumed)
    assert run_on_page(client, "result = trainer.state.global_step") == 2
