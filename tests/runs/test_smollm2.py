"""The demo's stages on a tiny model: its reward model learns what it is taught, and PPO runs on
it in 4 bits."""

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from huggingface_hub import ModelCard
from tiny import llama, tokenizer
from transformers import AutoModelForSequenceClassification

from trl_ppo_ext import PPOTrainer

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2"


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    monkeypatch.chdir(tmp_path)
    llama(hidden_size=64).save_pretrained("base")
    tokenizer().save_pretrained("base")
    import reward_model

    monkeypatch.setattr(reward_model, "vader", liked)
    monkeypatch.setattr(reward_model, "LAYERS", 1)
    return "base"


def liked(completions, **kwargs):
    """Whether the last word has an even number below ten."""
    return [
        float(text.split()[-1][1:] in ("0", "2", "4", "6", "8")) if text.split() else 0.0
        for text in completions
    ]


def test_reward_model_learns_from_the_score_at_every_token(base, monkeypatch):
    import reward_model

    monkeypatch.setattr(reward_model, "TRAINED", 2048)
    monkeypatch.setattr(reward_model, "RATE", 1e-2)  # its weights are random
    correlation = reward_model.train_reward_model(base, Path("reward"))
    assert correlation > 0.5
    model = AutoModelForSequenceClassification.from_pretrained("reward")
    assert model.config.num_labels == 1 and model.config.num_hidden_layers == 1


def test_score_of_a_token_is_that_of_the_text_so_far(base):
    from reward_model import collate, example

    row = example(tokenizer(), "w1 w3", "w2 w5 w4")
    # the last is at EOS
    assert torch.tensor(row["labels"]).nan_to_num(-1).tolist() == [-1, -1, 1, 0, 1, 1]
    padded = collate([row, example(tokenizer(), "w1", "w6")])
    assert padded["input_ids"].shape == padded["labels"].shape == (2, 6)
    assert (~padded["labels"].isnan()).sum(1).tolist() == [4, 2]


def test_all_stages_run_in_turn(base, monkeypatch, capsys):
    import demo
    import reward_model

    monkeypatch.setattr(reward_model, "TRAINED", 16)
    monkeypatch.setattr(reward_model, "MEASURED", 8)
    monkeypatch.setattr(demo, "base_model", lambda: base)
    sizes = {
        "max_steps": 2,
        "generation_batch_size": 8,
        "per_device_train_batch_size": 4,
        "max_completion_length": 4,
    }
    monkeypatch.setattr(demo, "SETTINGS", demo.SETTINGS | sizes)
    trainers = []

    def build(**kwargs):
        trainers.append(PPOTrainer(**kwargs))
        return trainers[-1]

    monkeypatch.setattr(demo, "PPOTrainer", build)
    demo.main()
    assert any(
        isinstance(module, Linear4bit)
        for module in trainers[0].components.rewards[0].model.modules()
    )
    printed = capsys.readouterr().out
    assert printed.count("\n  before ") == printed.count("\n  after ") == 10
    card = ModelCard.load("runs/reviews/ppo/README.md")
    assert card.data.license == "apache-2.0" and card.data.base_model.endswith("135M-Instruct")
    parts = ["# SmolLM2", "## What it does", "## License and data", "## Usage", "## Training"]
    assert sorted(map(card.text.index, parts)) == list(map(card.text.index, parts))
    assert card.text.count("\n> ") == 4 and Path("runs/reviews/ppo/reward.png").stat().st_size
    assert "distinct words" in printed and Path("runs/reviews/ppo/report.html").exists()


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "avx2": True}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_demo_computes_in_bfloat16_where_the_cpu_can(monkeypatch, capabilities, dtype):
    monkeypatch.syspath_prepend(str(RECIPE))
    from smollm2 import faster_dtype

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert faster_dtype() == dtype
