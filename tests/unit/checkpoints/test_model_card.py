"""The card of an adapter: metrics in the Hub's form, provenance of base and data, code that loads it."""

import math
import re

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig
from tiny import config, length_reward, llama, prompts, run_with_a_card, tokenizer

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.checkpoints.model_card import BASE_COPY, model_card

IDS = torch.tensor([[2, 5, 9, 11, 4, 17]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("private") / "of-somebody"
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def trained(base, folder, **settings):
    built = PPOTrainer(
        base, length_reward, config(folder, **{"learning_rate": 1e-2} | settings), prompts(), eval_dataset=prompts(4)
    )
    built.train()
    return built


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def code_of(card, base):
    return "".join(re.findall(r"```python\n(.*?)```", card, re.DOTALL)).replace(BASE_COPY, base)


@pytest.mark.parametrize(
    ("critic", "normalized"), [("head", False), ("head", True), ("adapter", False), ("none", False)]
)
def test_card_code_loads_policy_and_critic_exactly(base, tmp_path, monkeypatch, critic, normalized):
    """After setting only the path of the base."""
    settings = {"critic": critic, "normalize_values": normalized}
    settings |= {"advantage_estimator": "grpo", "num_generations": 4} if critic == "none" else {}
    built = trained(base, tmp_path / "run", **settings)
    built.save_model()
    card, found = (tmp_path / "run" / "README.md").read_text(), {}
    monkeypatch.chdir(tmp_path)  # the adapter is named by its folder
    exec(code_of(card, base), found)
    inner = built.actor_critic.eval()
    assert torch.equal(logits(found["model"]), logits(inner.policy))
    if critic == "none":
        assert "value_head" not in card and "values" not in found
        return
    inner.policy.set_adapter("critic" if critic == "adapter" else inner.policy_adapter)
    hidden = inner.trunk(input_ids=found["ids"]).last_hidden_state
    values = inner.value_head.units(built.run_state.returns).values(inner.value_head(hidden.float())[..., 0])
    assert values.abs().max() > 1e-3
    torch.testing.assert_close(found["values"], values)


@pytest.mark.parametrize("relative", [False, True])
def test_card_contains_no_path_of_the_machine(base, tmp_path, monkeypatch, relative):
    """A base that is not on the Hub is described by its architecture."""
    monkeypatch.chdir(tmp_path)
    built = trained(base, "run" if relative else tmp_path / "run", save_strategy="steps", save_steps=2)
    built.save_model()
    for file in (tmp_path / "run" / "README.md", tmp_path / "run" / "checkpoint-2" / "README.md"):
        card = file.read_text()
        assert str(tmp_path) not in card and base not in card and "of-somebody" not in card and "private" not in card
        assert (
            "a base model that is not on the Hub (LlamaForCausalLM, 2 layers, hidden size 32, vocabulary 32)" in card
        )
        assert f'base = "{BASE_COPY}"' in card and f'adapter = "{file.parent.name}"' in card
        assert "base_model" not in ModelCard.load(file).data.to_dict()


def test_card_metadata_hold_metrics_in_the_form_of_the_hub(base, tmp_path):
    """Of training and of evaluation, each as logged last."""
    built = trained(base, tmp_path / "run")
    built.evaluate()
    built.create_model_card(dataset="me/prompts", license="apache-2.0", model_name="mine")
    data = ModelCard.load(tmp_path / "run" / "README.md").data
    assert (data.datasets, data.license, data.library_name) == (["me/prompts"], "apache-2.0", "peft")
    assert data.model_name == "mine" and {"trl_ppo_ext", "ppo", "lora"} <= set(data.tags)
    logged = {}
    for entry in built.state.log_history:
        logged |= entry
    given = {(result.dataset_split, result.metric_type): result.metric_value for result in data.eval_results}
    for name in ("reward", "kl", "entropy", "rewards/length_reward/mean", "completions/mean_length"):
        assert given["train", name] == logged[name] and given["eval", name] == logged[f"eval_{name}"]
    assert {result.dataset_type for result in data.eval_results} == {"me/prompts"}
    assert {result.dataset_name for result in data.eval_results} == {"me/prompts (train)", "me/prompts (eval)"}
    assert {result.task_type for result in data.eval_results} == {"text-generation"}


def card(tmp_path, base_model="org/base", adapter="me/run", history=(), **metadata):
    lora = LoraConfig(r=4, target_modules="all-linear")
    run = run_with_a_card(config(tmp_path), base_model, adapter, ["r"], list(history), lora)
    return model_card(run, str(tmp_path), **metadata)


def test_card_lists_nan_metrics_in_the_table_only(tmp_path):
    written = card(tmp_path, history=[{"reward": math.nan, "kl": math.inf, "entropy": 2.5, "rewards/r/mean": -1.0}])
    values = {result.metric_type: result.metric_value for result in written.data.eval_results}
    assert values == {"entropy": 2.5, "rewards/r/mean": -1.0} and "| `reward` | nan |" in written.text
    assert "model-index" not in card(tmp_path).data.to_dict()
