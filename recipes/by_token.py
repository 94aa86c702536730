"""Pay a score of text as it comes: `reward_funcs=by_token(score, tokenizer)`.

Each token gets what it changes of the score of the text so far. The sum is the score of the whole text, less that of
the empty one, so the task stays the same; what a critic learns from is the place of each change. It fits scores that
are cheap and make sense for a part of a text: rules, lexicons, counts. For completions of one turn.
"""

from collections.abc import Callable
from itertools import pairwise


def by_token(score: Callable[..., list[float]], tokenizer) -> Callable[..., list[list[float]]]:
    """Reward per token from a reward function of whole completions."""

    def changes(completions: list, completion_ids: list[list[int]], **kwargs) -> list[list[float]]:
        columns = {name: x for name, x in kwargs.items() if isinstance(x, list) and len(x) == len(completions)}
        rewards = []
        for place, ids in enumerate(completion_ids):
            parts = [ids[:end] for end in range(len(ids) + 1)]
            texts: list = tokenizer.batch_decode(parts, skip_special_tokens=True)
            if not isinstance(completions[place], str):  # a conversation
                texts = [[{"role": "assistant", "content": text}] for text in texts]
            scores = score(completions=texts, **{name: [x[place]] * len(texts) for name, x in columns.items()})
            rewards.append([after - before for before, after in pairwise(scores)])
        return rewards

    changes.__name__ = getattr(score, "__name__", "score")  # the name in logs
    return changes
