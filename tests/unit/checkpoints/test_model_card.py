"""The card of an adapter: metrics, provenance of base and data, code that loads it."""

import os
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from peft import IA3Config, LoraConfig, PeftConfig
from tiny import config, length_reward, llama, prompts, tokenizer

from trl_ppo_ext import Critic, PPOTrainer
from trl_ppo_ext.checkpoints.hub import BASE_COPY, model_card

IDS = torch.tensor([[2, 5, 9, 11, 4, 17]])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a base in a private folder, trained and saved, and that base."""
    folder = tmp_path_factory.mktemp("run")
    base = folder / "private" / "of-somebody"
    llama().save_pretrained(base)
    tokenizer().save_pretrained(base)
    args = config(folder / "run", learning_rate=1e-2, save_strategy="steps", save_steps=2)
    built = PPOTrainer(str(base), length_reward, args, prompts(), eval_dataset=prompts(4))
    built.train()
    built.save_model()
    return built, folder, str(base)


class Mine(Critic):
    """A critic of one's own: one value for all tokens."""

    kind = "mine"

    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return self.value.expand(len(inputs))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_card_loads_the_policy_exactly_and_names_no_path(run, monkeypatch):
    """After setting only the path of the base."""
    built, folder, base = run
    monkeypatch.chdir(folder)  # the adapter is named by its folder
    for file in (folder / "run" / "README.md", folder / "run" / "checkpoint-2" / "README.md"):
        card = file.read_text()
        assert str(folder) not in card and "of-somebody" not in card and "private" not in card
        assert "a base model that is not on the Hub" in card
        assert f'base = "{BASE_COPY}"' in card and f'adapter = "{file.parent.name}"' in card
        assert "base_model" not in ModelCard.load(file).data.to_dict()
    code = re.findall(r"```python\n(.*?)```", (folder / "run" / "README.md").read_text(), re.DOTALL)
    found = {}
    exec("".join(code).replace(BASE_COPY, base), found)
    assert torch.equal(logits(found["model"]), logits(built.actor_critic.policy))


def test_adapter_and_card_name_the_revision_of_the_base(run, tmp_path):
    """A reload would otherwise take the base of the main branch."""
    _, _, base = run
    args = config(tmp_path, model_init_kwargs={"revision": "v1.0"})  # a folder has no revisions
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    built = PPOTrainer(base, length_reward, args, prompts(), peft_config=lora)
    built.save_model()
    assert PeftConfig.from_pretrained(tmp_path).revision == "v1.0"
    assert lora.revision is None  # it may serve another base
    assert 'from_pretrained(base, revision="v1.0")' in (tmp_path / "README.md").read_text()
    args = config(tmp_path / "main")
    built = PPOTrainer(base, length_reward, args, prompts())
    assert "revision" not in str(model_card(built, tmp_path))


def test_card_names_kind_of_adapter_critic_and_place_of_the_base(run, tmp_path):
    _, _, base = run
    os.symlink(base, tmp_path / "sub")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{base}/{name}", tmp_path)
    args = config(tmp_path / "run", model_init_kwargs={"subfolder": "sub"})
    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    built = PPOTrainer(
        str(tmp_path),
        length_reward,
        args,
        prompts(),
        processing_class=tokenizer(),
        peft_config=ia3,
        critic_factory=lambda policy: Mine(),
    )
    card = model_card(built, str(tmp_path / "run"))
    assert "ia3" in card.data.tags and "lora" not in card.data.tags
    assert "as critic (kind `mine`)." in card.text
    assert 'from_pretrained(base, subfolder="sub")' in card.text


def test_card_of_the_best_checkpoint_has_its_metrics(tmp_path):
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "metric_for_best_model": "eval_reward",
        "load_best_model_at_end": True,
    }
    args = config(tmp_path, max_steps=3, **settings)
    built = PPOTrainer(
        llama(), length_reward, args, prompts(), prompts(4), processing_class=tokenizer()
    )
    scores = {1: 2.0, 2: 3.0, 3: 1.0}
    loop = built.evaluation_loop

    def second_is_best(*args, **kwargs):
        output = loop(*args, **kwargs)
        output.metrics["eval_reward"] = scores[built.state.global_step]
        return output

    built.evaluation_loop = second_is_best
    built.train()
    built.save_model()
    card = (tmp_path / "README.md").read_text()
    assert "Metrics of the best checkpoint (step 2 of 3, by `eval_reward`)" in card
    assert "| `eval_reward` | 3 |" in card
    # an evaluation after training is of these weights, too
    scores[3] = 2.5
    built.evaluate()
    built.save_model()
    assert "| `eval_reward` | 2.5 |" in (tmp_path / "README.md").read_text()
    # a checkpoint's card is of its own step
    card = (tmp_path / "checkpoint-3" / "README.md").read_text()
    assert "at the end of training (step 3)" in card and "| `eval_reward` | 1 |" in card


def test_card_has_metadata_and_the_last_metrics(run):
    """Of training and of evaluation, each as logged last."""
    built, folder, _ = run
    built.evaluate()
    metadata = {
        "dataset": "me/prompts",
        "license": "apache-2.0",
        "model_name": "mine",
        "tags": "math",
    }
    # an evaluation without any score
    failed = {"eval_reward": float("nan"), "step": built.state.global_step}
    built.state.log_history.append(failed)
    card = model_card(built, str(folder / "run"), **metadata)
    built.state.log_history.remove(failed)
    assert (card.data.datasets, card.data.license, card.data.library_name) == (
        ["me/prompts"],
        "apache-2.0",
        "peft",
    )
    # its environment writes the prompts
    unnamed = model_card(built, str(folder / "run"), datasets=[None])
    assert unnamed.data.datasets is None
    assert "# mine" in card.text and {"trl_ppo_ext", "ppo", "lora", "math"} <= set(card.data.tags)
    logged = {name: value for entry in built.state.log_history for name, value in entry.items()}
    for name in (
        "reward",
        "kl",
        "entropy",
        "rewards/length_reward/mean",
        "completions/mean_length",
    ):
        for mode in ("", "eval_"):
            assert f"| `{mode}{name}` | {logged[mode + name]:.4g} |" in card.text


def test_card_of_a_distillation_says_what_was_learned_from(run, tmp_path):
    _, _, base = run
    settings = {"reference_prompt": "shown", "kl_coef": 1.0, "trust_remote_code": True}
    rows = prompts().add_column("shown", prompts()["prompt"][::-1])
    built = PPOTrainer(base, None, config(tmp_path, **settings), rows)
    built.state.global_step, built.state.max_steps = 2, 4
    built.state.log_history = [{"step": 2, "kl": 0.5}]
    text = " ".join(str(model_card(built, tmp_path)).split())
    assert "as reference (adapter off, with a prompt of its own)" in text
    assert "Rewards: none, but the KL to the reference." in text
    assert "Metrics at step 2 of 4:" in text
    assert "from_pretrained(base, trust_remote_code=True)" in text
