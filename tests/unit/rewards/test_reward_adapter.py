"""Reward adapters on the policy's base."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from runs_of_tiny import rollouts_of, trainer
from safetensors.torch import load_file, save_file
from tiny import CHAT_TEMPLATE, WORDS, config, llama, prompts, tokenizer
from transformers import LlamaForSequenceClassification

from trl_ppo_ext import PPOTrainer, RewardAdapter
from trl_ppo_ext.rewards import ClassifierReward, ScoringBatch
from trl_ppo_ext.text import encode_completed


@pytest.fixture
def adapter(base, tmp_path):
    """A reward adapter as people train them: PEFT on a sequence classifier of the same base."""
    torch.manual_seed(5)
    model = LlamaForSequenceClassification.from_pretrained(base, num_labels=1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(tmp_path / "polite")
    tokenizer().save_pretrained(tmp_path / "polite")
    return str(tmp_path / "polite")


def alone(base, adapter):
    model = LlamaForSequenceClassification.from_pretrained(base, num_labels=1)
    return ClassifierReward(
        PeftModel.from_pretrained(model, adapter).merge_and_unload(), tokenizer()
    )


def run(base, adapter, output_dir, **kwargs):
    return PPOTrainer(base, RewardAdapter(adapter), config(output_dir, **kwargs), prompts())


def test_scores_equal_the_adapter_loaded_alone_through_training(base, adapter, tmp_path):
    built = run(base, adapter, tmp_path / "run", max_steps=8)
    assert built.reward_func_names == ["polite"]
    rollouts = rollouts_of(built)
    expected = alone(base, adapter)
    before = {n: p.clone() for n, p in built.actor_critic.named_parameters() if "frozen_" in n}
    built.train()
    for _, samples in rollouts:
        scores = samples.scored.totals.tolist()
        assert (
            scores == pytest.approx(expected.score(samples.batch), abs=1e-5)
            and max(scores) - min(scores) > 0.01
        )
    after = dict(built.actor_critic.named_parameters())
    assert before and all(torch.equal(after[name], weight) for name, weight in before.items())
    assert not any(after[name].requires_grad for name in before)


def test_adapter_pays_by_token_what_it_pays_alone(base, adapter, tmp_path):
    built = run(base, adapter, tmp_path / "run", reward_level="token", max_steps=4)
    rollouts = rollouts_of(built)
    built.train()
    expected = alone(base, adapter)
    expected.pay_at("token", tokenizer())
    batch = rollouts[0][1].batch
    (reward,) = built.components.rewards
    for mine, other in zip(reward.score(batch), expected.score(batch), strict=True):
        assert mine.prompt == pytest.approx(other.prompt, abs=1e-5)
        assert [x for _, x in mine.pairs] == pytest.approx([x for _, x in other.pairs], abs=1e-5)


def test_policy_trains_after_reward_passes_and_saves_only_itself(base, adapter, tmp_path):
    built = run(base, adapter, tmp_path / "run")
    built.train()
    moved = [
        p for n, p in built.actor_critic.named_parameters() if "lora_B" in n and p.requires_grad
    ]
    assert moved and all(p.any() for p in moved)
    built.save_model()
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert not any("frozen" in key or "score" in key for key in saved)


def test_memory_grows_only_by_the_adapter(tmp_path):
    """A model of a size at which the adapter's share means something."""
    big = llama(vocab_size=2000, hidden_size=256)
    big.config._name_or_path = "big"
    classifier = llama(vocab_size=2000, hidden_size=256, classifier=True)
    model = get_peft_model(
        copy.deepcopy(classifier), LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS")
    )
    model.save_pretrained(tmp_path / "reward")

    def size(reward_funcs, folder):
        built = trainer(tmp_path / folder, copy.deepcopy(big), reward_funcs=reward_funcs)
        return sum(p.numel() * p.element_size() for p in built.actor_critic.parameters())

    without = size(lambda **kwargs: [], "without")
    assert (
        without
        < size(RewardAdapter(str(tmp_path / "reward"), check_base=False), "with")
        < 1.05 * without
    )


def edit_config(path, **fields):
    file = f"{path}/adapter_config.json"
    with open(file) as stream:
        settings = json.load(stream)
    with open(file, "w") as stream:
        json.dump(settings | fields, stream)


def other_base(path):
    edit_config(path, base_model_name_or_path="somebody/else")


def other_tokenizer(path):
    tokenizer(WORDS[:-1]).save_pretrained(path)


def no_head(path):
    weights = load_file(f"{path}/adapter_model.safetensors")
    save_file(
        {k: x for k, x in weights.items() if "score" not in k}, f"{path}/adapter_model.safetensors"
    )


def other_shapes(path):
    weights = load_file(f"{path}/adapter_model.safetensors")
    key = next(key for key in weights if "lora_A" in key)
    weights[key] = weights[key][:, :-1].contiguous()
    save_file(weights, f"{path}/adapter_model.safetensors")


@pytest.mark.parametrize(
    "damage, message",
    [
        (other_base, "was trained on 'somebody/else', the policy's base is"),
        (other_tokenizer, r"another tokenizer \(31 tokens\) than the policy's \(32 tokens\)"),
        (no_head, "has no score head"),
        (
            other_shapes,
            r"does not fit the policy's base: `.*lora_A.weight` is \(4, 63\), the model has \(4, 64\)",
        ),
    ],
)
def test_adapter_that_does_not_fit_raises_its_name(base, adapter, tmp_path, damage, message):
    damage(adapter)
    with pytest.raises(ValueError, match=message):
        run(base, adapter, tmp_path / "run")


def test_adapter_reads_chats_as_its_own_tokenizer_writes_them(base, adapter, tmp_path):
    """Which was saved with it, or is given; the policy's may have another template."""
    saved = tokenizer(chat_template=CHAT_TEMPLATE)
    saved.save_pretrained(adapter)
    given = tokenizer(chat_template=CHAT_TEMPLATE.replace("bos", "eos"))
    chat = [{"role": "user", "content": "w1 w2"}], [{"role": "assistant", "content": "w3"}]
    for own, expected in ((None, saved), (given, given)):
        built = PPOTrainer(
            base,
            RewardAdapter(adapter),
            config(tmp_path / "run"),
            prompts(),
            processing_class=tokenizer(chat_template=CHAT_TEMPLATE.replace("bos", "unk")),
            reward_processing_classes=own,
        )
        (reward,) = built.components.rewards
        assert reward.encode(*([x] for x in chat)) == [encode_completed(*chat, expected)]


@pytest.mark.parametrize("tokens", ["policy", "reward"])
def test_token_indices_of_one_adapter_only_are_refused(base, adapter, tmp_path, tokens):
    lora = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    indices = {"embed_tokens": [5, 6]}
    if tokens == "policy":
        lora["trainable_token_indices"] = indices
    else:
        edit_config(adapter, trainable_token_indices=indices)
    with pytest.raises(ValueError, match="`trainable_token_indices` must be set for all"):
        PPOTrainer(
            base,
            RewardAdapter(adapter),
            config(tmp_path / "run"),
            prompts(),
            peft_config=LoraConfig(**lora),
        )


@pytest.mark.parametrize("initial", ["pissa", "olora"])
def test_adapter_on_a_base_that_it_changed_is_refused(base, tmp_path, initial):
    """Its scores would be those of other weights."""
    model = LlamaForSequenceClassification.from_pretrained(base, num_labels=1)
    lora = {"r": 4, "target_modules": "all-linear", "task_type": "SEQ_CLS"}
    get_peft_model(model, LoraConfig(**lora, init_lora_weights=initial)).save_pretrained(
        tmp_path / "polite"
    )
    with pytest.raises(ValueError, match=f"`init_lora_weights='{initial}'`.*or merge it"):
        run(base, str(tmp_path / "polite"), tmp_path / "run")


@pytest.mark.parametrize("pad", ["<eos>", "<pad>"])
def test_adapter_is_read_where_its_trainer_read_it(base, tmp_path, pad):
    """Before the pad token of the tokenizer that was saved with it: with pad = EOS that is the
    token before EOS."""
    torch.manual_seed(5)
    model = LlamaForSequenceClassification.from_pretrained(base, num_labels=1)
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    ).eval()
    own = tokenizer()
    own.pad_token = pad
    model.config.pad_token_id = own.pad_token_id
    model.save_pretrained(tmp_path / "polite")
    own.save_pretrained(tmp_path / "polite")
    built = run(base, str(tmp_path / "polite"), tmp_path / "run", reward_level="end")
    (reward,) = built.components.rewards
    pairs = [("w1 w2 ", "w3"), ("w4 ", "w5 w6 w7 w8"), ("w9 ", "w0")]
    ids = reward.encode(*map(list, zip(*pairs)))
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([row])).logits[0, 0].item() for row in ids]
    scores = reward.score(ScoringBatch(*map(list, zip(*pairs)), [[1]] * 3))
    assert scores == pytest.approx(expected, abs=1e-5)


def test_adapter_that_is_passed_as_a_model_names_the_class_for_it(base, adapter, tmp_path):
    with pytest.raises(ValueError, match=r"saved adapter; pass `RewardAdapter\(.*adapter:.*merge"):
        PPOTrainer(base, adapter, config(tmp_path / "run"), prompts())
