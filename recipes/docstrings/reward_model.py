"""Stage 2: a reward model, trained on pairs of real docstrings of which one follows PEP 257."""

import os
import random
from collections import defaultdict

import torch
from accelerate import PartialState
from datasets import Dataset
from pep257 import bare_verbs, follows_pep257
from sft import MAX_LENGTH, to_prompt
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import RewardConfig, RewardTrainer


def pairs(corpus: list[dict[str, str]], verbs: set[str], num_pairs: int) -> list[dict[str, str]]:
    """
    Pair real docstrings that follow PEP 257 with real docstrings that do not, each after its own signature.

    Both sides of a pair are about equally long. Lines without a period tend to be shorter, so otherwise the reward
    model would learn to prefer long ones, and PPO would exploit it.

    Args:
        corpus (`list[dict[str, str]]`):
            Rows with the keys `signature` and `docstring`.
        verbs (`set[str]`):
            Bare verbs as [`bare_verbs`] returns them.
        num_pairs (`int`):
            Number of pairs to draw.

    Returns:
        `list[dict[str, str]]`:
            Rows with the keys `chosen` and `rejected`, each a signature and its docstring.
    """
    rng = random.Random(0)
    by_length = defaultdict(lambda: ([], []))
    for row in corpus:
        follows = follows_pep257(row["docstring"], verbs)
        text = to_prompt(row["signature"]) + row["docstring"]
        by_length[len(row["docstring"]) // 8][follows].append(text)
    groups = [(bad, good) for bad, good in by_length.values() if bad and good]
    weights = [len(bad) + len(good) for bad, good in groups]
    drawn = rng.choices(groups, weights, k=num_pairs)
    return [{"chosen": rng.choice(good), "rejected": rng.choice(bad)} for bad, good in drawn]


def train_reward_model(
    corpus: list[dict[str, str]], sft_dir: str | os.PathLike, output_dir: str | os.PathLike
) -> None:
    """
    Train the reward model, starting from the weights of the supervised model, and save it with its tokenizer.

    Args:
        corpus (`list[dict[str, str]]`):
            Training rows with the keys `signature` and `docstring`.
        sft_dir (`str` or `os.PathLike`):
            Directory of the supervised model.
        output_dir (`str` or `os.PathLike`):
            Directory to save to.
    """
    args = RewardConfig(
        output_dir=str(output_dir),
        num_train_epochs=1,
        per_device_train_batch_size=max(16 // PartialState().num_processes, 1),  # 16 in all
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_length=MAX_LENGTH,
        center_rewards_coefficient=0.01,  # scores around zero, so that PPO's value head starts near its target
        bf16=False,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        gradient_checkpointing=False,
        save_strategy="steps",
        save_steps=200,  # an interrupted stage resumes from here
        save_total_limit=1,
        logging_steps=50,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = RewardTrainer(
        model=str(sft_dir),
        args=args,
        train_dataset=Dataset.from_list(pairs(corpus, bare_verbs(corpus), num_pairs=6000)),
        processing_class=AutoTokenizer.from_pretrained(sft_dir),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))
    trainer.save_model()


def score(reward_dir: str | os.PathLike, texts: list[str], batch_size: int = 64, **kwargs) -> list[float]:
    """
    Score texts, each a prompt and its completion, with a saved reward model.

    Args:
        reward_dir (`str` or `os.PathLike`):
            Directory of the reward model.
        texts (`list[str]`):
            Texts to score. The end-of-sequence token is added.
        batch_size (`int`, *optional*, defaults to `64`):
            Number of texts per forward pass.
        **kwargs:
            Passed to `from_pretrained`, e.g. `quantization_config`.

    Returns:
        `list[float]`:
            One score per text.
    """
    tokenizer = AutoTokenizer.from_pretrained(reward_dir, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(reward_dir, **kwargs).eval()
    scores = []
    for start in range(0, len(texts), batch_size):
        batch = [text + tokenizer.eos_token for text in texts[start : start + batch_size]]
        inputs = tokenizer(batch, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        scores += logits[:, 0].tolist()
    return scores
