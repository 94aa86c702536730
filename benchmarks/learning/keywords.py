"""Keywords: a story of 200 words that contains eight given ones, after the constraints "keywords:
existence" and "number of words" of IFEval (huggingface.co/papers/2311.07911)."""

import random
import re

WORDS = (
    "anchor apple barn basket bell blanket boat bread bridge bucket butter button candle carpet "
    "castle chain cheese clock cloud coin copper cotton drum eagle engine feather fence flute fog "
    "forest garden glove goat grain hammer harbor hat honey horse island jar kettle key ladder "
    "lamp leather lemon letter map mirror moon mountain needle oven paint pearl piano pillow pipe "
    "pocket potato ribbon ring river robe rope rose saddle salt sand shell ship silver snow soap "
    "spoon stone storm sugar table tent thunder tiger tower train violin wagon wheel window wolf"
).split()
ROWS = 1024
GIVEN = 8
LONG = 200  # words of a story that is not too short


def rows(seed: int) -> list[dict]:
    """Prompts of a run with their keywords."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(ROWS):
        words = draw.sample(WORDS, GIVEN)
        request = f"Write a story of {LONG} words or more, with these words: {', '.join(words)}."
        prompts.append({"prompt": [{"role": "user", "content": request}], "keywords": words})
    return prompts


def score(text: str, words: list[str]) -> float:
    """Share of the keywords that a story contains, less the more it is too short."""
    found = [word for word in words if re.search(rf"\b{word}\b", text, re.IGNORECASE)]
    return len(found) / len(words) * min(len(text.split()) / LONG, 1.0)


def followed(completions: list[list[dict]], keywords: list[list[str]], **kwargs) -> list[float]:
    """How far both constraints are followed, from 0 to 1."""
    return [score(turns[0]["content"], words) for turns, words in zip(completions, keywords)]
