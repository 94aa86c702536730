"""Reward each token with its change of a score of the text so far: `reward_funcs=by_token(score,
tokenizer)`.

The rewards of a completion sum to its score, less that of the empty text, so with a discount of 1
the task is the same. What is new is the place of each change, and a λ below 1, the default for
rewards over tokens, keeps credit close to it. It fits scores that are cheap and make sense for a
part of a text: rules, lexicons, counts. The score is a synchronous function of the completions of
one turn, which leaves a completion out by returning None for it, and does not call `log_extra`.
"""

from collections.abc import Callable
from itertools import pairwise


def by_token(score: Callable[..., list[float]], tokenizer) -> Callable[..., list[list[float]]]:
    """Reward per token from a reward function of whole completions."""

    def changes(completions: list, completion_ids: list[list[int]], **kwargs) -> list[list[float]]:
        rewards = []
        for place, (completion, ids) in enumerate(zip(completions, completion_ids)):
            prefixes = [ids[:end] for end in range(len(ids) + 1)]
            texts: list = tokenizer.batch_decode(prefixes, skip_special_tokens=True)
            if isinstance(completion, str):
                if completion.endswith(texts[-1]):  # the tokenizer may drop its leading space
                    lead = completion.removesuffix(texts[-1])
                    texts[1:] = [lead + text for text in texts[1:]]
            else:
                if len(completion) != 1:
                    raise ValueError(
                        f"by_token() is for completions of one turn, got {len(completion)} "
                        "messages."
                    )
                texts = [[{"role": "assistant", "content": text}] for text in texts]
            arguments = {
                name: [x[place]] * len(texts)
                if isinstance(x, list) and len(x) == len(completions)
                else x
                for name, x in kwargs.items()
            }
            scores = score(completions=texts, completion_ids=prefixes, **arguments)
            if None in scores:
                rewards.append(None)
            else:
                rewards.append([after - before for before, after in pairwise(scores)])
        return rewards

    changes.__name__ = getattr(score, "__name__", type(score).__name__)  # in logs
    return changes
