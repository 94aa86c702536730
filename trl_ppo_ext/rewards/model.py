"""Rewards that are sequence classifiers: frozen, and 4-bit unless told otherwise."""

from collections.abc import Iterator

import torch
from peft import PeftModel
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import apply_chat_template, is_conversational

from .base import RewardError, ScoringBatch


def quantization(kind: str | None, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Quantisation of a frozen reward model."""
    if kind in (None, "none"):
        return None
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def checked_label(name: str, num_labels: int, label: int | None) -> int:
    """Which output of a classifier's head is the reward."""
    if label is None:
        if num_labels == 1:
            return 0
        raise RewardError(
            f"The reward model `{name}` has {num_labels} labels, but a reward is one number. Pick one with "
            f"`reward_label` (0 to {num_labels - 1}), use a model with one label, or pass a function that makes a "
            "score of its labels."
        )
    if not 0 <= label < num_labels:
        raise RewardError(
            f"`reward_label={label}` picks a label that the reward model `{name}` does not have; it has {num_labels}, "
            "counted from 0."
        )
    return label


def load_classifier(
    model_id: str,
    dtype: torch.dtype,
    quantize: str | None = "nf4",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    label: int | None = None,
) -> PreTrainedModel:
    """Load a reward model."""
    config = AutoConfig.from_pretrained(model_id, trust_remote_code=trust_remote_code)
    checked_label(model_id, config.num_labels, label)
    return AutoModelForSequenceClassification.from_pretrained(
        model_id,
        config=config,
        dtype=dtype,
        quantization_config=quantization(quantize, dtype),
        device_map={"": torch.device(device)},
        trust_remote_code=trust_remote_code,
    )


class SequenceScorer:
    """Scores the text of a prompt with its completion, at its last token.

    The text is tokenised anew, as TRL's `RewardTrainer` does it: text gets the tokenizer's special tokens and its EOS
    at the end, chat messages the chat template.
    """

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerBase, batch_size: int, context_length: int | None = None
    ):
        self.name = name
        self.context_length = context_length
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise RewardError(
                    f"The tokenizer of the reward model `{name}` has neither a pad nor an EOS token; set "
                    "`tokenizer.pad_token` and pass it in `reward_processing_classes`."
                )
            tokenizer.pad_token = tokenizer.eos_token

    def _encode(self, batch: ScoringBatch) -> list[list[int]]:
        if is_conversational({"prompt": batch.prompts[0]}):
            messages = [prompt + completion for prompt, completion in zip(batch.prompts, batch.completions)]
            texts = [apply_chat_template({"messages": m}, self.tokenizer)["text"] for m in messages]
            return self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token or ""
        return self.tokenizer([p + c + end for p, c in zip(batch.prompts, batch.completions)])["input_ids"]

    def _check_lengths(self, encoded: list[list[int]]) -> None:
        longest = max(range(len(encoded)), key=lambda row: len(encoded[row]))
        if self.context_length is not None and len(encoded[longest]) > self.context_length:
            raise RewardError(
                f"Completion {longest} with its prompt has {len(encoded[longest])} tokens; the reward model "
                f"`{self.name}` takes {self.context_length}. Lower `max_completion_length`, or drop long prompts."
            )

    def _batches(self, encoded: list[list[int]]) -> Iterator[list[int]]:
        by_length = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))  # little padding in each batch
        for start in range(0, len(by_length), self.batch_size):
            yield by_length[start : start + self.batch_size]

    def _padded(self, encoded: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
        inputs = self.tokenizer.pad({"input_ids": encoded}, padding=True, return_tensors="pt").to(device)
        return inputs["input_ids"], inputs["attention_mask"]

    def _score_ids(self, encoded: list[list[int]]) -> Tensor:
        raise NotImplementedError

    def score(self, batch: ScoringBatch) -> list[float]:
        """Score completions in batches of similar length."""
        encoded = self._encode(batch)
        self._check_lengths(encoded)
        scores = torch.empty(len(encoded))
        # a bar where scoring takes more than a few seconds
        for rows in tqdm(list(self._batches(encoded)), desc=f"Scoring with {self.name}", leave=False, delay=3):
            scores[rows] = self._score_ids([encoded[row] for row in rows]).float().cpu()
        return scores.tolist()


def last_states(trunk: nn.Module, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Hidden state of the last real token, on whichever side the padding is, whatever token the padding is."""
    hidden = trunk(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    last = (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(1)
    return hidden[torch.arange(len(last), device=mask.device), last]


class ClassifierReward(SequenceScorer):
    """A sequence classifier that reads the prompt with the completion."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 16,
        label: int | None = None,
        trust_remote_code: bool = False,
        device: torch.device | None = None,
    ):
        model_id = model.config._name_or_path
        name = model_id.rstrip("/").split("/")[-1] or type(model).__name__
        self.label = checked_label(name, model.config.num_labels, label)
        if tokenizer is None and not model_id:
            raise RewardError(
                f"The reward model `{name}` has no id to load a tokenizer from; pass one in "
                "`reward_processing_classes`."
            )
        context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=trust_remote_code)
        super().__init__(name, tokenizer, batch_size, context_length)
        self.model = model.requires_grad_(False).eval()
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        self.device = device
        if device is not None:
            self.model.to("cpu")

    def score(self, batch: ScoringBatch) -> list[float]:
        """Score completions in batches of similar length."""
        if self.device is None:
            return super().score(batch)
        try:
            self.model.to(self.device)
            return super().score(batch)
        finally:
            self.model.to("cpu")

    @torch.inference_mode()
    def _score_ids(self, encoded: list[list[int]]) -> Tensor:
        input_ids, mask = self._padded(encoded, self.model.get_input_embeddings().weight.device)
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Module):  # an encoder pools by itself
            return self.model(input_ids=input_ids, attention_mask=mask).logits[:, self.label]
        trunk = getattr(model, model.base_model_prefix)
        return head(last_states(trunk, input_ids, mask))[:, self.label]
