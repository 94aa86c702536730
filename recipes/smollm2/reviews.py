"""Positive reviews: openings to continue, the rule that labels them, and another one that
judges."""

from functools import cache
from itertools import product

from textblob import TextBlob
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

THINGS = (
    "hotel restaurant movie book camera phone service room food staff trip concert game laptop "
    "album course"
)
THINGS_HELD_OUT = "museum jacket flight bakery"
WAYS = (
    "The {} was|I bought the {} because|My experience with the {} was|When I first saw the "
    "{}, I|We thought the {}|After a week with the {}, I|People say that the {} is|To be "
    "honest, the {}|The {} that we chose|Their {} is"
).split("|")


analyzer = cache(SentimentIntensityAnalyzer)  # reads its lexicon once


def openings(things: str) -> list[str]:
    """Openings of reviews, ten for each thing."""
    return [way.format(thing) for thing, way in product(things.split(), WAYS)]


def vader(completions: list[str], **kwargs) -> list[float]:
    """VADER's compound score, from -1 to 1."""
    return [analyzer().polarity_scores(text)["compound"] for text in completions]


def textblob(completions: list[str], **kwargs) -> list[float]:
    """TextBlob's polarity, from -1 to 1: another lexicon, by other authors."""
    return [TextBlob(text).sentiment.polarity for text in completions]


def distinct(completions: list[str]) -> float:
    """Share of different words among all words of the completions."""
    words = [word.strip(".,!?\"'").lower() for text in completions for word in text.split()]
    return len(set(words)) / max(len(words), 1)
