"""Episodes: a prompt, and what the policy and its environment wrote after it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase
from trl import is_conversational

from ..data import OTHER_PROMPT_IDS, PROMPT_IDS, TOKEN_COLUMNS
from ..sequences import Sequences
from ..text import without_none
from .record import NOWHERE, Place


@dataclass(eq=False)
class Episode:
    """A prompt and what followed it: turns of the policy, and answers in between.

    A completion is one turn.

    A turn ends at a stop token, in what samples (`Generator.generate`), or where its room ends
    (`EnvironmentPlayer._play_episode`); `Player._note_ending` records which. Whether another turn
    follows is decided in `EnvironmentPlayer._continues`. Later, `sampled` has the number of the
    turn at each token.
    """

    # before its first turn
    prompt: Any  # text or chat messages, with the first observation
    prompt_ids: list[int]
    # token ids by role that reads another prompt
    other_prompts: dict[str, list[int]] = field(default_factory=dict)
    # others of the row, and of a rollout function, for rewards
    columns: dict[str, Any] = field(default_factory=dict)
    kind: Any = None  # of its tools and environment
    responder: Any = None  # answers the policy with tools or an environment; None if nobody does
    template_kwargs: dict[str, Any] | None = None  # of later turns; None if the prompt is text

    # its turns
    completion_ids: list[int] = field(default_factory=list)
    # at each token of the policy, number of its turn; else 0
    sampled: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # first token of each turn of the policy
    # under a sampler that is not the policy, 0 if not sampled
    logprobs: list[float] = field(default_factory=list)
    messages: list[dict] = field(default_factory=list)  # turns and answers; none of a completion
    unread: list[dict] = field(default_factory=list)  # last answer, which the policy does not read
    completion: Any = None  # as rewards get it: text, or messages if the prompt is messages
    # of the environment, at the last token of a turn
    rewards: list[tuple[int, float]] = field(default_factory=list)
    failed_calls: list[bool] = field(default_factory=list)  # per tool call

    # its end
    # by the policy or its environment, by a limit of tokens, or by one of a plain environment
    ending: Literal["stopped", "cut", "limited"] = "stopped"
    bootstraps: bool = False  # if the critic's value stands for what would have followed
    is_overlong: bool = False  # if its last answer did not fit
    following: list[int] = field(default_factory=list)  # what the policy would have read next
    error: BaseException | None = None  # of the environment; it ends the episode
    place: Place = NOWHERE  # in the record of answers

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Episode":
        """Begin an episode with a row of the dataset."""
        columns = {name: x for name, x in row.items() if name not in {"prompt"} | TOKEN_COLUMNS}
        others = {role: row[name] for role, name in OTHER_PROMPT_IDS.items() if name in row}
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            prompt = without_none(prompt)
        return cls(prompt, row[PROMPT_IDS], others, columns)

    @property
    def ids(self) -> list[int]:
        """Everything so far."""
        return self.prompt_ids + self.completion_ids

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return len(self.starts)

    @property
    def environment(self) -> Any:
        """The user's object."""
        return getattr(self.responder, "instance", None)

    def add(self, ids: list[int], sampled: bool, logprobs: Sequence[float] | None = None) -> None:
        """Append a turn, or what the environment wrote."""
        if sampled:
            self.starts.append(len(self.completion_ids))
        if logprobs is not None:
            self.logprobs += [0.0] * (len(self.completion_ids) - len(self.logprobs))
            self.logprobs += logprobs[: len(ids)]
        self.completion_ids += ids
        self.sampled += [self.turns if sampled else 0] * len(ids)


def to_sequences(
    episodes: Sequence[Episode], pad_token_id: int, device: torch.device | str
) -> Sequences:
    """Pad the token ids of episodes."""
    prompts = [x.prompt_ids for x in episodes]
    completions = [x.completion_ids for x in episodes]
    roles = sorted({role for x in episodes for role in x.other_prompts})
    sampled = None
    others = {role: [x.other_prompts.get(role, x.prompt_ids) for x in episodes] for role in roles}
    if any(x.starts != [0] for x in episodes):  # otherwise all tokens are of one turn
        sampled = [x.sampled for x in episodes]
    return Sequences.from_token_ids(prompts, completions, pad_token_id, device, others, sampled)


def decode(episodes: Sequence[Episode], tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the completions as reward functions get them: as text, or as messages if the prompts
    are messages."""
    texts = partial(tokenizer.batch_decode, skip_special_tokens=True)
    completions = texts([x.completion_ids for x in episodes])
    if is_conversational({"prompt": episodes[0].prompt}):
        for episode, text in zip(episodes, completions):
            # those of a rollout function are one text, as in TRL
            one_message = [{"role": "assistant", "content": text}]
            episode.completion = one_message if episode.responder is None else episode.messages
        return
    # by itself, a completion loses the space before its first word, if that is a part of the token
    # (▁word)
    prompts = texts([x.prompt_ids for x in episodes])
    joined = texts([x.ids for x in episodes])
    for episode, prompt, text, alone in zip(episodes, prompts, joined, completions):
        if text.startswith(prompt):
            episode.completion = text[len(prompt) :]
        else:
            episode.completion = alone
