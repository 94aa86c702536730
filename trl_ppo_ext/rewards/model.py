"""Rewards that are sequence classifiers: frozen, and 4-bit unless told otherwise."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
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
    """Quantisation of a frozen reward model.

    Args:
        kind (`str`, *optional*): `"nf4"`, `"fp4"`, `"int8"`, or `"none"`.
        dtype (`torch.dtype`): Dtype in which 4-bit layers compute; their default, float32, is slow on a GPU.

    Returns:
        `BitsAndBytesConfig` or `None`: What `from_pretrained` takes.
    """
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


def load_classifier(
    model_id: str,
    dtype: torch.dtype,
    quantize: str | None = "nf4",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a reward model.

    Args:
        model_id (`str`): Id or path of a sequence classifier with one label.
        dtype (`torch.dtype`): Compute dtype, the policy's.
        quantize (`str`, *optional*, defaults to `"nf4"`): `"nf4"`, `"fp4"`, `"int8"` or `"none"`.
        device (`torch.device`, *optional*, defaults to `"cpu"`): This process's device.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether the model may run code of its own.

    Returns:
        `PreTrainedModel`: The classifier.

    Raises:
        [`RewardError`]: If it has not exactly one label.
    """
    config = AutoConfig.from_pretrained(model_id, trust_remote_code=trust_remote_code)
    if config.num_labels != 1:
        raise RewardError(
            f"The reward model `{model_id}` has {config.num_labels} labels; a reward is one number. Use a model with "
            "one label, or pass a function that makes a score of its labels."
        )
    return AutoModelForSequenceClassification.from_pretrained(
        model_id,
        config=config,
        dtype=dtype,
        quantization_config=quantization(quantize, dtype),
        device_map={"": torch.device(device)},
        trust_remote_code=trust_remote_code,
    )


class ClassifierReward:
    """A sequence classifier that reads the prompt with the completion.

    The text is tokenised anew with the classifier's own tokenizer, as TRL's `RewardTrainer` does it: text gets the
    tokenizer's special tokens and its EOS at the end, chat messages the chat template. The score is read at the last
    real token, on whichever side the padding is, and also where padding and EOS are the same token.

    Args:
        model (`PreTrainedModel`): Classifier with one label; it is frozen here.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer; loaded from the model's id by default.
        batch_size (`int`, *optional*, defaults to 16): Completions scored at a time.

    Raises:
        [`RewardError`]: If the tokenizer can neither pad nor end a text.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, batch_size: int = 16):
        model_id = model.config._name_or_path
        self.name = model_id.rstrip("/").split("/")[-1] or type(model).__name__
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model_id) if tokenizer is None else tokenizer
        self.batch_size = batch_size
        if model.config.num_labels != 1:
            raise RewardError(
                f"The reward model `{self.name}` has {model.config.num_labels} labels; it must have one."
            )
        if self.tokenizer.pad_token_id is None:
            if self.tokenizer.eos_token_id is None:
                raise RewardError(
                    f"The tokenizer of the reward model `{self.name}` has neither a pad nor an EOS token; set "
                    "`tokenizer.pad_token` and pass it in `reward_processing_classes`."
                )
            self.tokenizer.pad_token = self.tokenizer.eos_token
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def _encode(self, batch: ScoringBatch) -> list[list[int]]:
        if is_conversational({"prompt": batch.prompts[0]}):
            messages = [prompt + completion for prompt, completion in zip(batch.prompts, batch.completions)]
            texts = [apply_chat_template({"messages": m}, self.tokenizer)["text"] for m in messages]
            return self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token or ""
        return self.tokenizer([p + c + end for p, c in zip(batch.prompts, batch.completions)])["input_ids"]

    def _batches(self, encoded: list[list[int]]) -> Iterator[list[int]]:
        by_length = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))  # little padding in each batch
        for start in range(0, len(by_length), self.batch_size):
            yield by_length[start : start + self.batch_size]

    @torch.inference_mode()
    def _score_ids(self, encoded: list[list[int]]) -> Tensor:
        device = self.model.get_input_embeddings().weight.device
        inputs = self.tokenizer.pad({"input_ids": encoded}, padding=True, return_tensors="pt").to(device)
        mask = inputs["attention_mask"]
        head = getattr(self.model, "score", None)
        if not isinstance(head, nn.Module):  # an encoder pools by itself
            return self.model(input_ids=inputs["input_ids"], attention_mask=mask).logits[:, 0]
        trunk = getattr(self.model, self.model.base_model_prefix)
        hidden = trunk(
            input_ids=inputs["input_ids"],
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        last = (torch.arange(mask.shape[1], device=device) * mask).argmax(1)
        return head(hidden[torch.arange(len(encoded), device=device), last])[:, 0]

    def score(self, batch: ScoringBatch) -> list[float]:
        """Score completions in batches of similar length.

        Args:
            batch ([`ScoringBatch`]): Prompts and completions.

        Returns:
            `list[float]`: The classifier's logit for each completion.
        """
        encoded = self._encode(batch)
        scores = torch.empty(len(encoded))
        for rows in self._batches(encoded):
            scores[rows] = self._score_ids([encoded[row] for row in rows]).float().cpu()
        return scores.tolist()
