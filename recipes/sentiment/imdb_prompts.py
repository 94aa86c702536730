"""From a film review to the beginning of one."""

import re

WORDS = 6


def to_prompt(row: dict) -> dict[str, str]:
    """The first words of a review, without the line breaks that are written as HTML."""
    words = re.sub(r"<br\s*/?>", " ", row["text"]).split()
    return {"prompt": " ".join(words[:WORDS]) or "This film"}
