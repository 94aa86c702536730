"""Grade-school maths with an answer that can be checked: prompts and rewards."""

import re

INSTRUCTION = "Think step by step. End with the answer alone, as a number, after ####."
_ANSWER = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


def to_prompt(row: dict) -> dict[str, list[dict[str, str]]]:
    """A question as a chat message."""
    return {"prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}]}


def number(text: str) -> float | None:
    """The number after the last ####, if there is one."""
    found = _ANSWER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def correct(completions: list, answer: list[str], **kwargs) -> list[float]:
    """1 where the number is that of the solution in the dataset, else 0."""
    pairs = [(number(text), number(right)) for text, right in zip(_texts(completions), answer)]
    return [float(found is not None and found == right) for found, right in pairs]


def answered(completions: list, **kwargs) -> list[float]:
    """1 where there is a number in the form that was asked for: watched, never optimised."""
    return [float(number(text) is not None) for text in _texts(completions)]


def _texts(completions: list) -> list[str]:
    return [completion[-1]["content"] for completion in completions]
