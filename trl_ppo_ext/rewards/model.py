"""Frozen sequence classifiers as rewards: models (4-bit by default) and adapters on the policy's base."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import apply_chat_template, is_conversational

from ..data import encode_marked, prefill, protected, text_only
from ..modeling import ActorCritic
from ..modeling.adapters import SCORE_HEADS, check_same_base, find_file, read_adapter
from ..modeling.loading import check_loaded
from ..redaction import shortened
from .scoring import RewardError, ScoringBatch

_ROBERTA = re.compile("roberta|camembert|data2vec-text|ibert|longformer|luke|mpnet|xmod")


def checked_label(name: str, num_labels: int, label: int | str | None, config: Any = None) -> int:
    """Return the index of the classifier's output that is the reward, which its config may name."""
    numbers = getattr(config, "label2id", None) or {}
    number = numbers.get(label, label)
    if (number is None and num_labels > 1) or (number or 0) not in range(num_labels):
        raise RewardError(
            f"The reward model `{name}` has {num_labels} labels, but a reward is one number; set `reward_label` to "
            f"a name, or 0 to {num_labels - 1}, got {label}, use a model with one label, or a function of its labels."
        )
    return number or 0


def load_classifier(
    model_id: str,
    dtype: torch.dtype,
    quantize: str | None = "nf4",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a reward model."""
    quantization = None
    if quantize == "int8":
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    elif quantize in ("nf4", "fp4"):
        kind = {"bnb_4bit_quant_type": quantize, "bnb_4bit_use_double_quant": True}
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **kind)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        model_id,
        dtype=dtype,
        quantization_config=quantization,
        device_map={"": torch.device(device)},
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    check_loaded(model_id, report, "a sequence classifier, e.g. one trained with TRL's `RewardTrainer`")
    return model


def context_length(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that a reward model takes; RoBERTa and its kin count two positions more."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return min(positions - 2 * bool(_ROBERTA.search(config.model_type)), tokenizer.model_max_length)


def joined(prompts: list, completions: list, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], bool]:
    """Prompts with their completions as text, as in TRL's `RewardTrainer`, and whether special tokens are missing."""
    if is_conversational({"prompt": prompts[0]}):
        chats = [
            [*p[:-1], c[0] | {"content": start + c[0]["content"]}, *c[1:]] if c and (start := prefill(p)) else p + c
            for p, c in zip(prompts, completions)
        ]
        return [apply_chat_template({"messages": [*map(text_only, x)]}, tokenizer)["text"] for x in chats], False
    return [p + c + (tokenizer.eos_token or "") for p, c in zip(prompts, completions)], True


class SequenceScorer:
    """Scores prompt and completion as one text, at its last token."""

    _score: ClassVar[Callable[[Any, Tensor, Tensor], Tensor]]  # scores of padded token ids, with their mask

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerBase, batch_size: int, context_length: int = sys.maxsize
    ):
        self.name, self.tokenizer = name, tokenizer
        self.batch_size, self.context_length = batch_size, context_length
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token

    def encode(self, prompts: list, completions: list) -> list[list[int]]:
        """Tokenize prompts with their completions; a delimiter that messages spell is text."""
        if is_conversational({"prompt": prompts[0]}):
            prompts, completions = protected([prompts, completions], self.tokenizer)
        texts, special = joined(prompts, completions, self.tokenizer)
        return [encode_marked(text, self.tokenizer, special) for text in texts]

    def score(self, batch: ScoringBatch) -> list[float | RewardError]:
        """Score completions in batches of similar length; one that the model cannot read fails by itself."""
        rows, scores = dict[int, list[int]](), dict[int, float | RewardError]()
        for row, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions)):
            try:
                (rows[row],) = self.encode([prompt], [completion])
                if (length := len(rows[row])) > self.context_length:
                    remedy = "lower `max_completion_length`, or drop long prompts"
                    raise ValueError(f"with its prompt it has {length} tokens of {self.context_length}; {remedy}")
            except Exception as error:  # e.g. its chat template rejects a sampled call
                cause = f"{type(error).__name__}: {shortened(error)}"
                scores[row] = RewardError(f"The reward model `{self.name}` cannot score completion {row}: {cause}.")
        by_length = sorted(rows.keys() - scores.keys(), key=lambda row: (len(rows[row]), row))
        parts = []
        for start in range(0, len(by_length), self.batch_size):
            ids = [rows[row] for row in by_length[start : start + self.batch_size]]
            inputs = self.tokenizer.pad({"input_ids": ids}, padding=True, return_tensors="pt")
            parts.append(self._score(inputs["input_ids"], inputs["attention_mask"]).float())
        if parts:
            scores |= zip(by_length, torch.cat(parts).tolist())  # the only wait for the device
        return [scores[row] for row in range(len(batch))]


def last_states(trunk: nn.Module, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Return the hidden state of the last real token, for any padding side and token."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    outputs = trunk(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    last = (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(1)
    return outputs.last_hidden_state[torch.arange(len(last), device=mask.device), last]


class ClassifierReward(SequenceScorer):
    """Sequence classifier."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 16,
        label: int | str | None = None,
        trust_remote_code: bool = False,
    ):
        model_id = model.config._name_or_path
        name = model_id.rstrip("/").split("/")[-1] or type(model).__name__
        self.label = checked_label(name, model.config.num_labels, label, model.config)
        if tokenizer is None:
            if not model_id:
                cause = f"The reward model `{name}` has no id to load a tokenizer from"
                raise RewardError(f"{cause}; pass one in `reward_processing_classes`.")
            tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=trust_remote_code)
        super().__init__(name, tokenizer, batch_size, context_length(model.config, tokenizer))
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        self.model = model.requires_grad_(False).eval()
        for module in model.modules():
            # the 4-bit kernel of CPUs with AVX512-BF16 takes whole blocks of 32 rows and 64 columns
            if hasattr(module, "support_avx512bf16_for_cpu") and (module.out_features % 32 or module.in_features % 64):
                module.support_avx512bf16_for_cpu = False

    @torch.inference_mode()
    def _score(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        device = self.model.get_input_embeddings().weight.device
        input_ids, mask = input_ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Module):  # encoders pool by themselves
            return self.model(input_ids=input_ids, attention_mask=mask).logits[:, self.label]
        trunk = getattr(model, model.base_model_prefix)
        return head(last_states(trunk, input_ids, mask))[:, self.label]


@dataclass(frozen=True)
class RewardAdapter:
    """LoRA adapter on the policy's base that was trained as a sequence classifier, for `reward_funcs`.

    The adapter and its score head are loaded next to the policy's adapter.

    Args:
        path (`str`): Directory or Hub id of the adapter.
        name (`str`, *optional*): Name in metrics. Defaults to the last part of `path`.
        check_base (`bool`, *optional*, defaults to `True`):
            Whether the adapter must name the policy's base model as its own. Set it to `False` if the same weights
            have two names; shapes and tokenizers are compared in any case.
    """

    path: str
    name: str | None = None
    check_base: bool = True


class AdapterReward(SequenceScorer):
    """Scores with a reward adapter on the policy's base."""

    def __init__(
        self,
        adapter: RewardAdapter,
        actor_critic: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        label: int | str | None = None,
    ):
        path = adapter.path
        super().__init__(adapter.name or path.rstrip("/").split("/")[-1], tokenizer, batch_size)
        files = read_adapter(path)
        if adapter.check_base:
            remedy = "Load the policy from that base, or set `check_base=False` if the weights are the same."
            base = actor_critic.config._name_or_path
            check_same_base(path, files.config.base_model_name_or_path, base, remedy)
        if find_file(path, "tokenizer_config.json") is not None:
            theirs = AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # only its vocabulary is compared
            if theirs.get_vocab() != tokenizer.get_vocab():
                raise RewardError(
                    f"The reward adapter `{path}` was trained with another tokenizer ({len(theirs)} tokens) than the "
                    f"policy's ({len(tokenizer)} tokens); merge the adapter into its base and pass that model."
                )
        if "weight" not in files.head:
            cause = f"The reward adapter `{path}` has no score head ({' or '.join(SCORE_HEADS)})"
            raise RewardError(f'{cause}; train it with `task_type="SEQ_CLS"`, which saves the head.')
        self.label = checked_label(self.name, len(files.head["weight"]), label)
        self.actor_critic = actor_critic
        try:
            self.adapter_name = actor_critic.add_frozen_adapter(self.name, files.config, files.weights)
        except ValueError as error:
            raise RewardError(f"The reward adapter `{path}` does not fit the policy's base: {error}") from None
        self.head = {key: x.float().to(actor_critic.device) for key, x in files.head.items()}

    @torch.no_grad()
    def _score(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        device = self.actor_critic.device
        input_ids, mask = input_ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)
        read = partial(last_states, input_ids=input_ids, mask=mask)
        states = self.actor_critic.read_trunk(read, self.adapter_name)
        head = {key: x.to(states.device) for key, x in self.head.items()}  # the model may have moved since
        with torch.autocast(states.device.type, enabled=False):
            return torch.nn.functional.linear(states.float(), head["weight"], head.get("bias"))[:, self.label]
