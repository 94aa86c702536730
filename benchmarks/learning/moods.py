"""Moods: reviews whose first sentences praise or complain, and which are scored as a whole, as
reward models score a prompt with its answer. So a prompt tells much of its score."""

import random
from itertools import product

from reviews import THINGS, vader

PRAISE = (
    "beautiful, clean and perfect|excellent, and everybody was friendly|wonderful, and we loved "
    "it|the best one we had ever seen|great fun, and a nice surprise"
)
COMPLAINTS = (
    "ugly, dirty and broken|terrible, and everybody was rude|horrible, and we hated it|the worst "
    "one we had ever seen|a sad failure, and a nasty surprise"
)
NEITHER = (
    "large, blue and new|near the station, and open until six|in March, and we stayed until "
    "noon|the second one we had ever seen|on the table, and next to a window"
)
NEXT = "After that, it|On the next day, it|A week later, I|My friends said that it|Since then, I"


def rows(seed: int) -> list[dict]:
    """Beginnings of reviews in the order of a seed."""
    moods = "|".join([PRAISE, COMPLAINTS, NEITHER]).split("|")
    nexts = NEXT.split("|")
    pairs = product(enumerate(THINGS.split()), enumerate(moods))
    prompts = [
        f"The {thing} was {mood}. {nexts[(row + column) % len(nexts)]}"
        for (row, thing), (column, mood) in pairs
    ]
    random.Random(seed).shuffle(prompts)
    return [{"prompt": prompt} for prompt in prompts]


def of_whole_review(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """VADER's compound score of both, from -1 to 1."""
    return vader([prompt + completion for prompt, completion in zip(prompts, completions)])
