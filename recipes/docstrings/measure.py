"""Sample docstrings for held-out signatures, and measure them with ruff and the reward model."""

import os

import torch
from pep257 import verdict
from reward_model import score
from sft import to_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

MAX_NEW_TOKENS = 48


def sample(model_dir: str | os.PathLike, signatures: list[str], batch_size: int = 128) -> list[str | None]:
    """
    Sample one docstring per signature from the model's own distribution, at temperature 1.

    Args:
        model_dir (`str` or `os.PathLike`):
            Directory of a causal language model and its tokenizer.
        signatures (`list[str]`):
            Signatures.
        batch_size (`int`, *optional*, defaults to `128`):
            Number of signatures per call of `generate`.

    Returns:
        `list[str | None]`:
            One completion per signature, `None` if it has no EOS.
    """
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    completions = []
    for start in range(0, len(signatures), batch_size):
        prompts = [to_prompt(signature) for signature in signatures[start : start + batch_size]]
        inputs = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
        # the defaults of `generate` keep only the 50 likeliest tokens
        outputs = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS
        )
        for ids in outputs[:, inputs["input_ids"].shape[1] :]:
            ended = tokenizer.eos_token_id in ids
            completions.append(tokenizer.decode(ids, skip_special_tokens=True) if ended else None)
    return completions


def measure(
    completions: list[str | None],
    signatures: list[str],
    reward_dir: str | os.PathLike,
    known_first_words: set[str],
) -> dict[str, float]:
    """
    Measure completions. Those without EOS fail the verdict and have neither score nor length.

    Args:
        completions (`list[str | None]`):
            Completions returned by [`sample`].
        signatures (`list[str]`):
            Their signatures.
        reward_dir (`str` or `os.PathLike`):
            Directory of the reward model.
        known_first_words (`set[str]`):
            Lower-cased words that open real docstrings.

    Returns:
        `dict[str, float]`:
            The measures by name.
    """
    ended = [(signature, text) for signature, text in zip(signatures, completions, strict=True) if text is not None]
    passed = verdict([text for _, text in ended], known_first_words)
    scores = score(reward_dir, [to_prompt(signature) + text for signature, text in ended])
    return {
        "PEP 257 pass rate (ruff)": sum(passed) / len(completions),
        "reward model score": sum(scores) / max(len(scores), 1),
        "mean length (characters)": sum(len(text) for _, text in ended) / max(len(ended), 1),
        "distinct completions": len(set(completions)) / len(completions),
        "ended with <eos>": len(ended) / len(completions),
    }
