"""A reward model from the same base, taught VADER's opinion of what the base writes.

The first layers of the base and a new head are trained, on a score at every token: that of the review up to there. A
review of 24 tokens then counts as 24. A linear head on frozen states agreed with VADER only to 0.3.
"""

from pathlib import Path

import torch
from datasets import Dataset
from reviews import THINGS, openings, vader
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

LAYERS, REVIEWS, HELD_OUT, LENGTH, BATCH, RATE = 6, 1024, 128, 24, 128, 3e-4


class ScoreAtEveryToken(Trainer):
    """Regression of each token's score, where there is one."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        errors = model.score(model.model(inputs["input_ids"]).last_hidden_state)[..., 0] - inputs["labels"]
        return errors[~errors.isnan()].square().mean()


def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
    """Pad on the right, where causal attention needs no mask."""
    return {
        name: pad_sequence([torch.tensor(each[name]) for each in examples], batch_first=True, padding_value=padding)
        for name, padding in (("input_ids", 0), ("labels", torch.nan))
    }


@torch.inference_mode()
def sample(model: torch.nn.Module, tokenizer, prompts: list[str], temperature: float = 1.0) -> list[str]:
    """Continue each prompt by `LENGTH` tokens."""
    texts = []
    for start in range(0, len(prompts), BATCH):
        inputs = tokenizer(prompts[start : start + BATCH], return_tensors="pt", padding=True, padding_side="left")
        outputs = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=True, top_k=0, temperature=temperature)
        texts += tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def example(tokenizer, prompt: str, completion: str) -> dict[str, list]:
    """Tokens of a review, with VADER's score of the completion up to each of its tokens."""
    head, tail = tokenizer(prompt)["input_ids"], tokenizer(completion)["input_ids"]
    scores = vader([tokenizer.decode(tail[: end + 1]) for end in range(len(tail))])
    return {"input_ids": head + tail, "labels": [float("nan")] * len(head) + scores}


def train_reward_model(base: str, output_dir: Path) -> float:
    """Write the reward model; return the correlation of its scores with VADER's on held-out reviews."""
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompts = (openings(THINGS) * REVIEWS)[:REVIEWS]
    reviews = sample(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tokenizer, prompts)
    examples = [example(tokenizer, prompt, review) for prompt, review in zip(prompts, reviews) if review.strip()]
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, num_hidden_layers=LAYERS, dtype=torch.float32
    )
    torch.nn.init.zeros_(model.score.weight)
    model.get_input_embeddings().requires_grad_(False)  # words that no review has used stay beside their synonyms
    trainer = ScoreAtEveryToken(
        model,
        TrainingArguments(
            str(output_dir / "checkpoints"),
            learning_rate=RATE,
            num_train_epochs=2,
            per_device_train_batch_size=32,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
        collate,
        train_dataset=Dataset.from_list(examples[HELD_OUT:]),
    )
    trainer.train()
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    with torch.inference_mode():
        found = [model(torch.tensor([each["input_ids"]])).logits.item() for each in examples[:HELD_OUT]]
    expected = [each["labels"][-1] for each in examples[:HELD_OUT]]
    return torch.corrcoef(torch.tensor([found, expected]))[0, 1].item()
