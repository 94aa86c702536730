"""GSM8K: prompts and verifiable rewards."""

import re

INSTRUCTION = "Think step by step. End with only the answer, as a number, after ####."
# also in Markdown or with a dollar, but not the beginning of 12 - 5 = 7, 1/2, 3:00 or 1e3
_ANSWER = re.compile(r"####[\s*`$]*(-?)\$?((?>[\d,]*\.?\d+))(?!\s*[-+*/:=^×÷]\s*\d|[eE]\d)")


def to_prompt(row: dict) -> dict[str, list[dict[str, str]]]:
    """Turn a question into a chat message."""
    return {"prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}]}


def number(text: str) -> float | None:
    """Return the number after the last ####, or None."""
    matches = _ANSWER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if matches:
        sign, digits = matches[-1]
        return float(sign + digits.replace(",", ""))
    return None


def correct(completions: list, answer: list[str], **kwargs) -> list[float]:
    """Return 1 if the number is that of the dataset's solution, else 0."""
    pairs = [
        (number(text), number(solution)) for text, solution in zip(_texts(completions), answer)
    ]
    return [float(result is not None and result == expected) for result, expected in pairs]


def answered(completions: list, **kwargs) -> list[float]:
    """Return 1 if the answer has the requested format, else 0; monitored, never optimized."""
    return [float(number(text) is not None) for text in _texts(completions)]


def _texts(completions: list) -> list[str]:
    return [completion[-1]["content"] for completion in completions]
