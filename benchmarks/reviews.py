"""Positive reviews: openings to continue, and the rule that scores them."""

from itertools import product

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

THINGS = "hotel restaurant movie book camera phone service room food staff trip concert game laptop album course"
WAYS = (
    "The {} was|I bought the {} because|My experience with the {} was|When I first saw the {}, I|We thought the {}|"
    "After a week with the {}, I|People say that the {} is|To be honest, the {}|The {} that we chose|Their {} is"
).split("|")


def openings(things: str) -> list[str]:
    """Openings of reviews, ten for each thing."""
    return [way.format(thing) for thing, way in product(things.split(), WAYS)]


def vader(completions: list[str], **kwargs) -> list[float]:
    """VADER's compound score, from -1 to 1."""
    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in completions]
