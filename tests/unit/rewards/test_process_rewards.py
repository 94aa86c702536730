"""Process-reward models: a score per step, paid at the policy's token that ends it."""

import pytest
import torch
from datasets import Dataset
from runs_of_tiny import rollouts_of
from tiny import byte_tokenizer, config, llama
from transformers import LlamaConfig, LlamaForTokenClassification
from transformers.utils import logging

from trl_ppo_ext import PPOTrainer, estimate_memory
from trl_ppo_ext.rewards import ProcessReward, RewardError, ScoringBatch
from trl_ppo_ext.rewards.process import ProcessScorer, steps_of, token_at

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def classifier(labels=2, **kwargs):
    torch.manual_seed(3)
    settings = (
        SIZES
        | {"num_labels": labels, "initializer_range": 0.3, "max_position_embeddings": 256}
        | kwargs
    )
    return LlamaForTokenClassification(
        LlamaConfig(vocab_size=259, pad_token_id=0, **settings)
    ).eval()


def scorer(model, built, label=None, **settings):
    return ProcessScorer(
        ProcessReward("prm", **settings), model, built, built, batch_size=2, label=label
    )


def batch(prompts, texts, built):
    ids = [[*built(text)["input_ids"], built.eos_token_id] for text in texts]
    completions = texts
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    return ScoringBatch(prompts, completions, ids)


def by_hand(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1]


TEXTS = ["a=1\nb=2\nc", "one step", "x\n\n\nyy\n"]
STEPS = [["a=1", "b=2", "c"], ["one step"], ["x", "yy"]]
# the policy's tokens, one per character: separators, or EOS for the last step
ENDS = [[3, 7, 9], [8], [1, 7]]


@pytest.mark.parametrize("separator", ["\n", "\n\n", "<s>"])
@pytest.mark.parametrize("conversational", [False, True])
def test_step_is_scored_after_its_separator_and_paid_at_its_end(conversational, separator):
    """The probability of the second label, at the last token of the separator, given the steps
    before it."""
    built = byte_tokenizer()
    model = classifier()
    if conversational:
        prompt = [{"role": "user", "content": "q"}]
    else:
        prompt = "q "
    scored = scorer(model, built, step_separator=separator, split_by="\n").score(
        batch([prompt] * 3, TEXTS, built)
    )
    for pairs, steps, ends in zip(scored, STEPS, ENDS):
        assert [place for place, _ in pairs] == ends
        text = "q "
        if conversational:
            text = built.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        for (_, reward), step in zip(pairs, steps):
            text += step + separator
            logits = by_hand(model, built(text)["input_ids"])
            assert reward == pytest.approx(logits.softmax(-1)[1].item(), abs=1e-5)


def test_score_is_the_only_logit_or_the_probability_of_a_label():
    built = byte_tokenizer()
    ids = built("qa\n")["input_ids"]
    one = classifier(1)
    four = classifier(4)
    samples = batch(["q"], ["a"], built)
    assert scorer(one, built).score(samples)[0][0][1] == pytest.approx(
        by_hand(one, ids)[0].item(), abs=1e-5
    )
    expected = by_hand(four, ids).softmax(-1)[3].item()
    assert scorer(four, built, label=3).score(samples)[0][0][1] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RewardError, match="has 4 labels"):
        scorer(four, built)


def test_bos_is_read_once():
    """`PRMTrainer` adds it for tokenizers that do not."""
    built = byte_tokenizer()
    built.bos_token = "<|im_start|>"
    prm = scorer(classifier(), built)
    expected = [1, *built("q a\n")["input_ids"]]
    assert prm.encode("q ", ["a"])[0] == prm.encode("<|im_start|>q ", ["a"])[0] == expected


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
def test_answer_that_the_prompt_begins_is_continued(template):
    """And parts of a message are read where the template writes text only."""
    built = byte_tokenizer(template)
    parts = [{"type": "text", "text": "2+2?"}]
    prompt = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Let me "}]
    ids, _ = scorer(classifier(), built).encode(prompt, ["add."])
    text = built.decode(ids)
    assert "2+2?" in text and text.endswith("Let me add.\n")


def test_completion_that_cannot_be_read_fails_by_itself():
    built = byte_tokenizer()
    short = scorer(classifier(max_position_embeddings=16), built)
    first, second = short.score(batch(["q"] * 2, ["a" * 30, "b"], built))
    assert isinstance(
        first, RewardError
    ) and "it has 32 tokens of 16; lower `max_completion_length`" in str(first)
    assert len(second) == 1
    turns = [[{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]]
    (error,) = scorer(classifier(), built).score(
        ScoringBatch([[{"role": "user", "content": "q"}]], turns, [[5]])
    )
    assert "steps are those of one turn, but the completion has 2 messages" in str(error)


def test_ends_of_steps_are_those_of_the_text():
    assert steps_of("a\n\nbb\nc", "\n\n") == [("a", 3), ("bb\nc", 7)]
    assert steps_of("", "\n") == [("", 0)]
    assert steps_of("\n", "\n") == [("\n", 1)]
    built = byte_tokenizer()
    ids = built("aé\nb")["input_ids"]  # é is two tokens
    assert [token_at(ids, end, built) for end in (1, 3, 4)] == [0, 3, 4]


def test_empty_separator_is_refused():
    with pytest.raises(ValueError, match="`step_separator` must not be empty"):
        ProcessReward("prm", step_separator="")


@pytest.mark.parametrize("given", ["path", "settings"])
def test_token_classifier_is_trained_on_by_name(given, tmp_path, caplog, monkeypatch):
    """Its steps are places of rewards, so that λ counts steps."""
    built = byte_tokenizer()
    classifier(hidden_size=64).save_pretrained(tmp_path / "prm")
    built.save_pretrained(tmp_path / "prm")
    path = str(tmp_path / "prm")
    if given == "path":
        rewards = path
    else:
        rewards = ProcessReward(path, step_separator="a", name="steps")
    chats = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"hi {n}"}] for n in range(8)]}
    )
    args = config(
        tmp_path / "run",
        max_steps=2,
        max_completion_length=12,
        reward_quantization="none",
        kl_coef=0.0,
    )
    policy = llama(vocab_size=259, max_position_embeddings=128)
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    trainer = PPOTrainer(policy, rewards, args, chats, processing_class=built)
    assert "a reward model can be hacked" in caplog.text  # without a KL
    assert trainer.reward_func_names == ["prm" if given == "path" else "steps"]
    rollouts = rollouts_of(trainer)
    trainer.train()
    for _, samples in rollouts:
        expected = trainer.components.rewards[0].score(samples.batch)
        for row, pairs in enumerate(expected):
            assert samples.scored.places[row].nonzero()[:, 0].tolist() == [
                place for place, _ in pairs
            ]
            assert samples.scored.rewards[row, 0].item() == pytest.approx(
                sum(x for _, x in pairs), abs=1e-5
            )


def test_process_model_takes_memory_in_the_estimate(tmp_path):
    """As much by its settings as by its name."""
    classifier(hidden_size=64).save_pretrained(tmp_path / "prm")
    path = str(tmp_path / "prm")
    args = config(tmp_path / "run", max_completion_length=12)
    sizes = []
    for rewards in (None, path, ProcessReward(path)):
        estimate = estimate_memory(
            llama(max_position_embeddings=128).config, args, reward_funcs=rewards, device="cpu"
        )
        sizes.append(sum(model.bytes for model in estimate.rewards))
    assert sizes[0] == 0 < sizes[1] == sizes[2]
