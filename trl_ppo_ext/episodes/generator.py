"""What samples: the protocol of its backends, and the tokens that end a completion."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from ..config import PPOConfig
from .engine import Ahead
from .turns import Conversation, GroupedSampler, TurnSampler

logger = logging.get_logger(__name__)

# fields of `PPOConfig` and of a `GenerationConfig`
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Generator(Protocol):
    """Protocol of backends that sample a completion for each prompt, as token ids."""

    stop_token_ids: frozenset[int]
    args: PPOConfig
    evaluates: bool = False  # then at `eval_temperature`
    # of the completions of the last call, per token; None if the backend has none
    sampled_logprobs: list[list[float]] | None = None
    ahead: Ahead | None = None  # the next rollout, if it was begun

    @property
    def temperature(self) -> float:
        """Temperature of a rollout or an evaluation; 0 is greedy."""
        if self.evaluates:
            cooled = self.args.eval_temperature
        else:
            cooled = None
        return self.args.temperature if cooled is None else cooled

    def awake(self) -> AbstractContextManager[None]:
        """Context of a rollout or a batch of an evaluation, in which the policy does not change."""
        return nullcontext()

    def release(self) -> None:
        """Free what the next rollout would have used again."""

    def generate(self, prompts: list[list[int]], rooms: list[int] | None = None) -> list[list[int]]:
        """Sample a completion for each prompt, of at most as many tokens as its entry in `rooms`,
        or `max_completion_length`."""

    def has_stopped(self, completion: list[int]) -> bool:
        """Check if a completion ended by itself, and was not truncated."""
        return completion[-1] in self.stop_token_ids

    def turn_sampler(self) -> TurnSampler:
        """Turns of the episodes of a rollout."""
        return GroupedSampler(self)

    def conversation(self) -> Conversation:
        """Function that samples turns of the episodes of a rollout."""
        return lambda prompts, rooms, rows: self.generate(prompts, rooms)


def cut_at_stop(completion: list[int], stop_token_ids: frozenset[int]) -> list[int]:
    """Cut a completion after its first stop token."""
    end = next(
        (place for place, token in enumerate(completion, 1) if token in stop_token_ids), None
    )
    return completion[:end]


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    vocab_size: int,
    others: list[int] | None = None,
) -> list[int]:
    """Tokens that end a completion: the tokenizer's EOS, those of the model's generation config,
    and others, except for ids that the model does not have and so never samples."""
    model_stops = getattr(generation_config, "eos_token_id", None)
    ids = {
        tokenizer.eos_token_id,
        *(model_stops if isinstance(model_stops, list) else [model_stops]),
        *(others or []),
    }
    return sorted(token for token in ids - {None} if 0 <= token < vocab_size)


def ensure_pad_token(
    tokenizer: PreTrainedTokenizerBase, stops: list[int], pad_token: str | None = None
) -> None:
    """Set the tokenizer's pad token to the given one or, if it has none, to EOS."""
    if not stops:
        raise ValueError(
            "No EOS token ends a completion; set `tokenizer.eos_token`, or `stop_token_ids`."
        )
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(f"`pad_token` must be a token of the tokenizer, got {pad_token!r}.")
        tokenizer.pad_token = pad_token
    elif tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(stops[0])
        logger.warning(
            "The tokenizer has no pad token, so %r pads; padding is masked.", tokenizer.pad_token
        )
