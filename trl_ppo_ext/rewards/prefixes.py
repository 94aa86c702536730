"""Scores of the prefixes of a completion, which a causal reward model gives in the forward that
scores its end, and rewards that pay their changes."""

from bisect import bisect_right
from typing import Literal, NamedTuple

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..ppo_math import FEWEST, MOST_PLACES, Reduction, place_numbers, sums_by_number

# where the score of a reward model is paid
RewardLevel = Literal["end", "token", "turn"]

# Share of the last scores' variance that earlier ones must explain for their changes to be paid:
# of noise it is 0.016 in a rollout of 64, and less after several
WORTH_PAYING = 0.05


class PrefixScores(NamedTuple):
    """Scores of a completion up to some of its tokens."""

    prompt: float  # before its first token
    # (position, score up to there), in order; the last one, at the last token, is the score
    pairs: list[tuple[int, float]]


# ---- the places of a reward model's tokens at which tokens of the policy end ----


def prefix_ends(
    row: list[int],
    completion_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    policy_tokenizer: PreTrainedTokenizerBase,
    same_tokens: bool = True,
) -> list[int] | None:
    """Places in what a reward model reads: where the prompt ends, and each token of the policy.

    They are the policy's own tokens if it has the same ones, and otherwise those that end with the
    same character. `None` if the completion cannot be found, e.g. because a chat template changes
    it.
    """
    length = len(completion_ids)
    for start in range(len(row) - length, 0, -1) if same_tokens else ():
        begins = row[start] == completion_ids[0]
        if begins and row[start : start + length] == completion_ids:
            return list(range(start - 1, start + length))
    return _ends_by_text(row, completion_ids, tokenizer, policy_tokenizer)


def _ends_by_text(
    row: list[int],
    completion_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    policy_tokenizer: PreTrainedTokenizerBase,
) -> list[int] | None:
    """The same by characters."""
    if not (tokenizer.is_fast and policy_tokenizer.is_fast):
        return None
    try:
        text, ends = growing_text(row, tokenizer)
        completion, policy_ends = growing_text(completion_ids, policy_tokenizer)
    except Exception:  # sampled bytes that are no text, of a tokenizer that falls back to bytes
        return None
    trimmed = completion.strip()  # as chat templates do
    before = len(completion) - len(completion.lstrip())
    start = text.rfind(trimmed)
    if not trimmed or start < 0:
        return None
    inside = [min(max(end - before, 0), len(trimmed)) for end in [0, *policy_ends]]
    places = [bisect_right(ends, start + end) - 1 for end in inside]
    if places[0] < 0:  # nothing stands before the completion
        return None
    return places


def growing_text(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """Text of token ids, without special tokens, and its length after each of them."""
    stream = DecodeStream(skip_special_tokens=True)
    text = ""
    ends = []
    for token in token_ids:
        text += stream.step(tokenizer.backend_tokenizer, token) or ""
        ends.append(len(text))
    return text, ends


# ---- rewards ----


class Foresight(NamedTuple):
    """How far scores of prefixes foresee the last one: sums over the prefixes of a run, each score
    less the mean of its place. They stay on the device."""

    products: float | Tensor = 0.0  # of a prefix's score and the last one
    squares: float | Tensor = 0.0  # of a prefix's score
    last_squares: float | Tensor = 0.0  # of the last one

    @property
    def share(self) -> Tensor:
        """Share of the last scores' variance that a line over earlier ones explains: 0 for noise,
        one half for a fair forecast, which knows little at first and all at the end."""
        products, squares, last_squares = map(torch.as_tensor, self)
        return torch.where(products > 0, products**2 / (squares * last_squares), 0)

    def add(
        self, earlier: Tensor, last: Tensor, mask: Tensor, all_sum: Reduction = torch.clone
    ) -> "Foresight":
        """Add a rollout of earlier scores, `[batch, 1 + response]` with their mask, and of last
        ones, `[batch, 1]`."""
        products = (earlier * last * mask).sum()
        squares = (earlier**2 * mask).sum()
        last_squares = (last**2 * mask).sum()
        own = all_sum(torch.stack([products, squares, last_squares])).unbind()
        return Foresight(*(before + x for before, x in zip(self, own)))

    def to_json(self) -> list[float]:
        """Numbers of a checkpoint."""
        return [float(x) for x in self]


UNKNOWN = Foresight()


class Changes(NamedTuple):
    """Rewards that pay a score before the end; with what no token earned they sum to it."""

    tokens: Tensor  # [batch, response]
    places: Tensor  # [batch, response], 1 where the score may be paid; 0 if only at the end
    unpaid: Tensor  # [batch], what no token earned: of the prompt, and of all completions
    foresight: Foresight


def usual_scores(
    scores: Tensor, numbers: Tensor, mask: Tensor, all_sum: Reduction = torch.clone
) -> Tensor:
    """Mean score at each number, `[MOST_PLACES]`; where fewer than eight completions go on, that of
    the last number which eight had, or all if they are fewer.

    Otherwise the longest completion would be compared with itself.
    """
    totals, counts = sums_by_number(scores, numbers, mask, all_sum)
    means = totals / counts.clamp(min=1)
    enough = counts >= counts[-1].clamp(max=FEWEST)  # each completion has one last score
    number = torch.arange(MOST_PLACES, device=scores.device)
    return means[(number * enough).cummax(0).values]


def pay_changes(
    prefixes: Tensor, foresight: Foresight = UNKNOWN, all_sum: Reduction = torch.clone
) -> Changes:
    """Pay each token the change of the score, if scores of prefixes foresee the last one.

    Scores are taken less the usual one of their place in this rollout. The changes then sum to the
    score less that of the prompt and a number that all completions share. So with γ = 1 the task is that
    of a score at the end. If earlier scores are noise, all is paid at the end.

    Source: Ng, Harada and Russell, "Policy invariance under reward transformations" (1999)

    Args:
        prefixes (`torch.Tensor` of shape `[batch, 1 + response]`):
            Score of the prompt, then of each prefix that has one; NaN elsewhere. The last one of a
            row is the score. Rows without any earn nothing.
        foresight (`Foresight`, *optional*): Sums of earlier rollouts.
        all_sum (`Reduction`, *optional*): Sum over ranks.
    """
    # 1. Scores less what is usual at their place: what all completions gain is no merit of a token.
    has_score = prefixes.isfinite()
    position = torch.arange(prefixes.shape[1], device=prefixes.device)
    last = (position * has_score).amax(1, keepdim=True)
    is_last = has_score & (position == last)
    is_earlier = has_score & (position < last)
    # last scores have one mean, wherever they are
    numbers = place_numbers(has_score).clamp(max=MOST_PLACES - 2)
    numbers = numbers.masked_fill(is_last, MOST_PLACES - 1)
    scores = prefixes.nan_to_num()
    usual = usual_scores(scores, numbers, has_score, all_sum)[numbers]
    deviations = (scores - usual).masked_fill(~has_score, 0)
    final = deviations.gather(1, last)
    foresight = foresight.add(deviations, final, is_earlier, all_sum)

    # 2. All at the end, or changes: a score stays until the next place, and nothing is left after
    # the last one.
    score = scores.gather(1, last)
    latest = (position * has_score).cummax(1).values
    potentials = deviations.gather(1, latest).masked_fill(position >= last, 0)
    pays_changes = foresight.share >= WORTH_PAYING
    potentials = torch.where(pays_changes, potentials, 0)
    at_end = torch.where(pays_changes, final, score)
    tokens = potentials.diff(dim=1).scatter_add(1, (last - 1).clamp(min=0), at_end)
    tokens = tokens.to(prefixes.dtype) * has_score.any(1, keepdim=True)
    places = has_score[:, 1:] & pays_changes
    return Changes(tokens, places, score[:, 0] - tokens.sum(1), foresight)
