"""
Two independent checks of a summary line against PEP 257: a small one learned from the corpus, which labels the pairs
of the reward model, and ruff, for the evaluation.
"""

import json
import re
import subprocess
import sys
from collections import Counter

from harvest import first_words

# One-line docstrings, surrounding whitespace, final period, imperative mood, no signature, capital letter, not "This",
# final punctuation, not empty.
RUFF_RULES = "D200,D210,D400,D401,D402,D403,D404,D415,D419"
DETERMINERS = {"the", "a", "an", "all", "this", "each", "every", "any", "one", "its", "new", "two"}
MIN_COUNT = 3


def third_person(verb: str) -> str:
    """Inflect a verb: `get` to `gets`, `try` to `tries`, `process` to `processes`."""
    if re.search(r"[^aeiou]y$", verb):
        return verb[:-1] + "ies"
    return verb + ("es" if re.search(r"(s|x|z|ch|sh|o)$", verb) else "s")


def bare_verbs(corpus: list[dict[str, str]]) -> set[str]:
    """
    Find the bare verbs of a corpus from their use.

    A word that opens docstrings counts as a verb if its third person opens docstrings too. It also counts if it opens
    function names, and its third person occurs somewhere. Nouns may pass either test ("Names of ...", `name_of(...)`),
    but "of" or no determiner follows them, whereas "the" or "a" follows a verb.

    Args:
        corpus (`list[dict[str, str]]`):
            Rows returned by [`harvest`].

    Returns:
        `set[str]`:
            The verbs, lower-cased.
    """
    openers = first_words(corpus)
    names = Counter(re.match(r"def _*([a-z]*)", row["signature"])[1] for row in corpus)
    words = Counter(word for row in corpus for word in row["docstring"].lower().split())
    followed_by_of, determined = Counter(), Counter()
    for row in corpus:
        first, second = row["docstring"].lower().split()[:2]
        followed_by_of[first] += second == "of"
        determined[first] += second in DETERMINERS
    verbs = set()
    for word, count in openers.items():
        inflected = third_person(word)
        opens_inflected = openers[inflected] >= 2 and followed_by_of[word] < 0.3 * count
        opens_names = names[word] >= MIN_COUNT and words[inflected] >= 1 and determined[word] >= 0.1 * count
        if word.isalpha() and count >= MIN_COUNT and (opens_inflected or opens_names):
            verbs.add(word)
    # "Returns the ..." passes the second test if "returnses" occurs anywhere.
    return verbs - {third_person(verb) for verb in verbs} - DETERMINERS


def follows_pep257(docstring: str, verbs: set[str]) -> bool:
    """
    Check that a summary line is one sentence in the imperative mood, with a capital letter and a period.

    Args:
        docstring (`str`):
            The summary line.
        verbs (`set[str]`):
            Bare verbs returned by [`bare_verbs`].

    Returns:
        `bool`:
            True if the line follows the convention.
    """
    words = docstring.split()
    if not words:
        return False
    capital = docstring[0].isupper()
    period = docstring.endswith(".") and not docstring.endswith("..")
    one_sentence = re.search(r"[.!?;]\s+[A-Z]", docstring) is None
    return capital and period and one_sentence and words[0].lower() in verbs


def verdict(completions: list[str], known_first_words: set[str]) -> list[bool]:
    """
    Check summary lines with ruff's pydocstyle rules.

    Ruff accepts unknown words, so a garbled first word would count as imperative. The first word must therefore open
    real docstrings, too. A line that is empty or longer than one line fails.

    Args:
        completions (`list[str]`):
            Summary lines, without quotes.
        known_first_words (`set[str]`):
            Lower-cased words that open real docstrings.

    Returns:
        `list[bool]`:
            True for each line that passes.
    """
    # Two source lines per completion, so that the row of a diagnostic names the completion.
    source = "".join(f'def f_{i}():\n    """{escape(text)}"""\n' for i, text in enumerate(completions))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", RUFF_RULES]
    command += ["--output-format", "json", "--stdin-filename", "completions.py", "-"]
    result = subprocess.run(command, input=source, capture_output=True, text=True)
    if result.returncode not in (0, 1):  # 1: some lines fail
        raise RuntimeError(f"ruff failed: {result.stderr}")
    failed = set()
    for diagnostic in json.loads(result.stdout):
        if diagnostic["code"] not in RUFF_RULES.split(","):
            raise RuntimeError(f"ruff could not read the completions: {diagnostic['message']}")
        failed.add((diagnostic["location"]["row"] - 1) // 2)
    return [
        i not in failed and text.isprintable() and text.split(" ")[0].lower() in known_first_words
        for i, text in enumerate(completions)
    ]


def escape(text: str) -> str:
    """Escape special characters, so that a text stays one line between triple quotes."""
    return text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
