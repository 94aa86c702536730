"""Reverse-text, after the smallest example of prime-rl: write three words backwards, letter by
letter.

The base does not know the task, so it is first shown examples, of words that the prompts of the
runs do not have.
"""

import random
import re
from functools import cache
from pathlib import Path

from smollm2 import base_model

SHOWN = 320
ROWS = 4096
WORDS = 3
WARM = Path(f"runs/SmolLM2-135M-reverse-{SHOWN}")


@cache
def vocabulary() -> list[str]:
    """English words that are a token each, the same for all."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(base_model()).get_vocab()
    words = sorted(token[1:] for token in tokens if re.fullmatch("Ġ[a-z]{4,7}", token))
    random.Random(0).shuffle(words)
    return words


def drawn(number: int, seed: int, words: list[str], most: int | None = None) -> list[dict]:
    """Prompts with their answers: of three words each, or of one up to so many."""
    draw = random.Random(seed)
    texts = []
    for _ in range(number):
        if most is None:
            count = WORDS
        else:
            count = draw.randint(1, most)
        texts.append("".join(draw.sample(words, count)))
    return [
        {"prompt": f"Backwards: {' '.join(text)} ->", "answer": " ".join(text[::-1])}
        for text in texts
    ]


def rows(seed: int) -> list[dict]:
    """Prompts of a run, of the first half of the words."""
    return drawn(ROWS, seed, vocabulary()[: len(vocabulary()) // 2])


def unequal_rows(seed: int) -> list[dict]:
    """Prompts of a run with one to four words, which do not earn alike."""
    return drawn(ROWS, seed, vocabulary()[: len(vocabulary()) // 2], most=4)


def in_place(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Share of the answer's letters that are in their place, less the letters that are too many."""
    scores = []
    for text, right in zip(completions, map(str.split, answer)):
        letters = text.split()
        found = sum(letter == other for letter, other in zip(letters, right))
        scores.append((found - max(len(letters) - len(right), 0)) / len(right))
    return scores


def warm_base() -> str:
    """Path of the model after it was shown examples, which is done once."""
    if not WARM.exists():
        import torch
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        shown = drawn(SHOWN, 1, vocabulary()[len(vocabulary()) // 2 :])
        data = Dataset.from_list(
            [{"prompt": row["prompt"], "completion": " " + row["answer"]} for row in shown]
        )
        args = SFTConfig(
            "runs/reverse",
            learning_rate=2e-4,
            num_train_epochs=1,
            per_device_train_batch_size=16,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(base_model(), args=args, train_dataset=data)
        trainer.train()
        part = WARM.with_suffix(".part")  # an interruption leaves no folder that looks complete
        trainer.save_model(part)
        part.rename(WARM)
    return str(WARM)
