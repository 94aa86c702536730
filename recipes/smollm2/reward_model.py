"""A reward model from the same base, taught VADER's opinion of what the base writes.

The first layers of the base and a new head are trained, on a score at every token: that of the
review up to there. A review of 24 tokens then counts as 24. A linear head on frozen states agreed
with VADER only to 0.3.
"""

from pathlib import Path

import torch
from datasets import Dataset
from reviews import THINGS, THINGS_HELD_OUT, openings, vader
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

from trl_ppo_ext.rewards import ClassifierReward, ScoringBatch, load_classifier

LAYERS = 6
LENGTH = 24
RATE = 3e-4
# reviews
TRAINED = 896
MEASURED = 128
BATCH = 128


class ScoreAtEveryToken(Trainer):
    """Regression of each token's score, where there is one."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        errors = (
            model.score(model.model(inputs["input_ids"]).last_hidden_state)[..., 0]
            - inputs["labels"]
        )
        return errors[~errors.isnan()].square().mean()


def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
    """Pad on the right, where causal attention needs no mask."""
    return {
        name: pad_sequence(
            [torch.tensor(each[name]) for each in examples], batch_first=True, padding_value=padding
        )
        for name, padding in (("input_ids", 0), ("labels", torch.nan))
    }


@torch.inference_mode()
def sample(
    model: torch.nn.Module, tokenizer, prompts: list[str], temperature: float = 1.0
) -> list[str]:
    """Continue each prompt by `LENGTH` tokens."""
    texts = []
    for start in range(0, len(prompts), BATCH):
        inputs = tokenizer(
            prompts[start : start + BATCH], return_tensors="pt", padding=True, padding_side="left"
        )
        outputs = model.generate(
            **inputs, max_new_tokens=LENGTH, do_sample=True, top_k=0, temperature=temperature
        )
        texts += tokenizer.batch_decode(
            outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return texts


def example(tokenizer, prompt: str, review: str) -> dict[str, list]:
    """Tokens of a review and EOS, where it is scored, with VADER's score of the review up to
    each of them."""
    head = tokenizer(prompt)["input_ids"]
    tail = tokenizer(review, add_special_tokens=False)["input_ids"]
    scores = vader([tokenizer.decode(tail[:end]) for end in range(1, len(tail) + 1)])
    labels = [float("nan")] * len(head) + scores + scores[-1:]
    return {"input_ids": [*head, *tail, tokenizer.eos_token_id], "labels": labels}


def train_reward_model(base: str, output_dir: Path, dtype: torch.dtype = torch.float32) -> float:
    """Write the reward model; return how its scores, in 4 bits, correlate with VADER's on things
    not trained. The base writes reviews, and scores are computed, in `dtype`."""
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    prompts = (openings(THINGS) * TRAINED)[:TRAINED]
    pairs = zip(prompts, sample(policy, tokenizer, prompts))
    examples = [example(tokenizer, prompt, review) for prompt, review in pairs if review.strip()]
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, num_hidden_layers=LAYERS, dtype=torch.float32
    )
    torch.nn.init.zeros_(model.score.weight)
    # words that no review has used stay beside their synonyms
    model.get_input_embeddings().requires_grad_(False)
    args = TrainingArguments(
        str(output_dir / "checkpoints"),
        learning_rate=RATE,
        num_train_epochs=2,
        per_device_train_batch_size=32,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    ScoreAtEveryToken(model, args, collate, train_dataset=Dataset.from_list(examples)).train()
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    prompts = (openings(THINGS_HELD_OUT) * MEASURED)[:MEASURED]
    reviews = sample(policy, tokenizer, prompts)
    reward = ClassifierReward(load_classifier(str(output_dir), dtype), tokenizer)
    scores = reward.score(ScoringBatch(prompts, reviews, completion_ids=[]))
    return torch.corrcoef(torch.tensor([scores, vader(reviews)]))[0, 1].item()
