"""Prompts from the beginnings of film reviews."""

import re

WORDS = 6


def to_prompt(row: dict) -> dict[str, str]:
    """Keep the first words of a review, without HTML line breaks."""
    words = re.sub(r"<br\s*/?>", " ", row["text"]).split()
    return {"prompt": " ".join(words[:WORDS]) or "This film"}
