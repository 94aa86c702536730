"""Process-reward models: token classifiers that score each step of a completion."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import is_conversational

from ..data import encode
from ..redaction import shortened
from ..text import encode_marked, encode_text, protected
from .model import (
    checked_label,
    context_length,
    frozen,
    is_decoder,
    load_tokenizer,
    pad_token_for,
    padded,
)
from .scoring import RewardError, ScoringBatch


@dataclass(frozen=True)
class ProcessReward:
    r"""Token classifier that scores the steps of a completion, for `reward_funcs`.

    It reads the prompt and the steps as TRL's `PRMTrainer` trained it, with a separator after each
    step, and is read at the last token of that separator. The reward of a step is the probability
    that it is right, or the output of a model with a single one. It is paid at the token of the
    policy that ends the step.

    Source: https://huggingface.co/papers/2305.20050

    Args:
        model (`str`): Id or path.
        step_separator (`str`, *optional*, defaults to `"\n"`):
            Text after each step, as in training.
        split_by (`str`, *optional*):
            Text between the steps of a completion. Defaults to `step_separator`.
        name (`str`, *optional*): Name in metrics. Defaults to the last part of `model`.
    """

    model: str
    step_separator: str = "\n"
    split_by: str | None = None
    name: str | None = None

    def __post_init__(self):
        for field in ("step_separator", "split_by"):
            if getattr(self, field) == "":
                raise ValueError(f"`{field}` must not be empty; use the text between two steps.")


def is_process_model(config: Any) -> bool:
    """Whether a model of this config classifies tokens."""
    architectures = getattr(config, "architectures", None) or []
    return any(name.endswith("ForTokenClassification") for name in architectures)


def steps_of(text: str, separator: str) -> list[tuple[str, int]]:
    """Steps of a completion, and where each ends in its text, with the separator; blank ones are
    skipped."""
    steps = []
    end = 0
    for part in text.split(separator):
        end = min(end + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((part, end))
    return steps or [(text, len(text))]


def token_at(ids: list[int], end: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Place of the first token with which the text of a completion reaches a length."""
    low = 0
    high = len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(ids[: middle + 1], skip_special_tokens=True)) >= end:
            high = middle
        else:
            low = middle + 1
    return low


class ProcessScorer:
    """Scores each step of a completion with a token classifier."""

    def __init__(
        self,
        settings: ProcessReward,
        model: PreTrainedModel,
        policy_tokenizer: PreTrainedTokenizerBase,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 16,
        label: int | str | None = None,
        trust_remote_code: bool = False,
    ):
        self.name = settings.name or settings.model.rstrip("/").split("/")[-1]
        self.separator = settings.step_separator
        self.split_by = settings.split_by or settings.step_separator
        if label is None and model.config.num_labels == 2:
            label = 1  # wrong, right
        self.label = checked_label(self.name, model.config.num_labels, label, model.config)
        self.policy_tokenizer = policy_tokenizer
        self.tokenizer = tokenizer or load_tokenizer(self.name, settings.model, trust_remote_code)
        self.context_length = context_length(model.config, self.tokenizer)
        self.batch_size = batch_size
        self.model = frozen(model)

    def encode(self, prompt: Any, steps: list[str]) -> tuple[list[int], list[int]]:
        """Token ids of a prompt and its steps, and the place of the last token of each step."""
        if is_conversational({"prompt": prompt}):
            ids = list(encode(prompt, self.tokenizer, {}))
        else:
            ids = encode_text(prompt, self.tokenizer).ids
            bos = self.tokenizer.bos_token_id
            # `PRMTrainer` adds it, also if the tokenizer does not
            if bos is not None and ids[:1] != [bos]:
                ids = [bos] + ids
        separator = encode_marked(self.separator, self.tokenizer)
        ends = []
        for step in steps:
            ids += [*encode_marked(protected(step, self.tokenizer), self.tokenizer), *separator]
            ends.append(len(ids) - 1)
        return ids, ends

    def score(self, batch: ScoringBatch) -> list[list[tuple[int, float]] | RewardError]:
        """Pairs of each completion, of a token and the reward of the step that it ends."""
        results: dict[int, list[tuple[int, float]] | RewardError] = {}
        rows = {}
        for row in range(len(batch)):
            try:
                rows[row] = self._steps(batch, row)
            except Exception as error:  # e.g. its chat template rejects the prompt
                cause = f"{type(error).__name__}: {shortened(error)}"
                results[row] = RewardError(
                    f"The reward model `{self.name}` cannot score completion {row}: {cause}."
                )
        by_length = sorted(rows, key=lambda row: len(rows[row][0]))
        for start in range(0, len(by_length), self.batch_size):
            numbers = by_length[start : start + self.batch_size]
            scores = self._score([rows[number][0] for number in numbers])
            for number, of_tokens in zip(numbers, scores.tolist()):
                _, ends, places = rows[number]
                results[number] = [(place, of_tokens[end]) for place, end in zip(places, ends)]
        return [results[row] for row in range(len(batch))]

    def _steps(self, batch: ScoringBatch, row: int) -> tuple[list[int], list[int], list[int]]:
        """Token ids that the model reads, where it speaks in them, and the policy's tokens that
        end the steps."""
        completion = batch.completions[row]
        ids = batch.completion_ids[row]
        if not isinstance(completion, str) and len(completion) != 1:
            raise ValueError(
                f"steps are those of one turn, but the completion has {len(completion)} messages"
            )
        text = self.policy_tokenizer.decode(ids, skip_special_tokens=True)
        steps = steps_of(text, self.split_by)
        read, ends = self.encode(batch.prompts[row], [step for step, _ in steps])
        if len(read) > self.context_length:
            raise ValueError(
                f"with its prompt it has {len(read)} tokens of {self.context_length}; lower "
                "`max_completion_length`, or drop long prompts"
            )
        places = [token_at(ids, end, self.policy_tokenizer) for _, end in steps]
        places[-1] = len(ids) - 1  # EOS belongs to the last step
        return read, ends, places

    @torch.inference_mode()
    def _score(self, rows: list[list[int]]) -> Tensor:
        """Reward at each token, `[rows, length]`."""
        device = self.model.get_input_embeddings().weight.device
        input_ids, mask = padded(rows, pad_token_for(rows, self.tokenizer), "right", device)
        if is_decoder(self.model):
            without_cache = {"use_cache": False}
        else:
            without_cache = {}
        logits = self.model(
            input_ids=input_ids, attention_mask=mask, **without_cache
        ).logits.float()
        if logits.shape[-1] == 1:
            return logits[..., 0]
        return logits.softmax(-1)[..., self.label]
