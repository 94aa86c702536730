"""Questions about passages that the policy must search for: an environment with two tools."""

import math
import re
from collections import Counter, defaultdict
from functools import cache

from datasets import load_dataset

from trl_ppo_ext import StepResult

CORPUS = "rajpurkar/squad"  # or the directory of a dataset with a column `context`
# passages per search, and characters of each
PASSAGES = 2
LONGEST = 1000
SEARCHES = 4
INSTRUCTION = (
    "Search for passages until you know the answer. Then give it, in as few words as possible."
)
_ARTICLES = {"a", "an", "the"}


def to_prompt(row: dict) -> dict[str, list[dict[str, str]]]:
    """Turn a question into a chat message, without its passage."""
    return {"prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}]}


def words(text: str) -> list[str]:
    """Return words in lower case, without punctuation and articles, unless there are no others."""
    every = re.findall(r"\w+", text.lower())
    return [word for word in every if word not in _ARTICLES] or every


class BM25:
    """Inverted index of passages with BM25 weights."""

    def __init__(self, passages: list[str], k1: float = 1.2, b: float = 0.75):
        self.passages = passages
        self.postings = defaultdict(list)
        counts = [Counter(words(passage)) for passage in passages]
        mean = sum(count.total() for count in counts) / len(counts)
        for number, count in enumerate(counts):
            length = k1 * (1 - b + b * count.total() / mean)
            for word, times in count.items():
                self.postings[word].append((number, times * (k1 + 1) / (times + length)))

    def top(self, query: str, k: int) -> list[str]:
        """Return the best passages."""
        scores: Counter = Counter()
        # in their order: the order of a set differs between processes
        for word in dict.fromkeys(words(query)):
            postings = self.postings.get(word, [])
            rarity = math.log(
                1 + (len(self.passages) - len(postings) + 0.5) / (len(postings) + 0.5)
            )
            for number, weight in postings:
                scores[number] += rarity * weight
        return [self.passages[number] for number, _ in scores.most_common(k)]


@cache
def index() -> BM25:
    """Index the corpus, once per process."""
    splits = load_dataset(CORPUS)
    return BM25(
        list(dict.fromkeys(passage for split in splits.values() for passage in split["context"]))
    )


class Search:
    """An episode: a question, searches, and one answer."""

    def __init__(self):
        self.index = index()

    def reset(self, answers: dict, **row) -> None:
        self.answers = [words(text) for text in answers["text"]]
        self.found = False
        self.searches = 0

    def search(self, query: str) -> str:
        """
        Search for passages.

        Args:
            query: A few words that the passage has.
        """
        self.searches += 1
        if self.searches > SEARCHES:
            return StepResult("There are no more searches.", done=True)
        # the policy may have written a number
        passages = [passage[:LONGEST] for passage in self.index.top(str(query), PASSAGES)]
        text = "\n\n".join(passages) or "No passage has any of these words."
        has_answer = any(
            f" {' '.join(answer)} " in f" {' '.join(words(text))} " for answer in self.answers
        )
        reward = 0.2 * (has_answer and not self.found)  # paid once
        self.found |= has_answer
        return StepResult(text, reward=reward)

    def answer(self, text: str) -> str:
        """
        Answer the question, which ends the search.

        Args:
            text: The answer, in as few words as possible.
        """
        given = words(str(text))
        return StepResult("", reward=float(bool(given) and given in self.answers), done=True)

    def get_reward(self) -> float:
        """Nothing at the end: the tools give rewards."""
        return 0.0
