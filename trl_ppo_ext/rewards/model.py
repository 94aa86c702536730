"""Frozen sequence classifiers as rewards: models (4-bit by default) and adapters on the policy's
base."""

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, ClassVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging
from trl import is_conversational

from ..data import row_template_kwargs
from ..modeling import ActorCritic
from ..modeling.adapters import SCORE_HEADS, check_same_base, find_file, read_adapter
from ..modeling.loading import check_loaded
from ..redaction import shortened
from ..text import encode_chat, encode_completed, encode_text
from .prefixes import PrefixScores, RewardLevel, prefix_ends
from .scoring import RewardError, ScoringBatch

logger = logging.get_logger(__name__)

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")

_ROBERTA = re.compile("roberta|camembert|data2vec-text|ibert|longformer|luke|mpnet|xmod")


def checked_label(name: str, num_labels: int, label: int | str | None, config: Any = None) -> int:
    """Return the index of the classifier's output that is the reward, which its config may name."""
    numbers = getattr(config, "label2id", None) or {}
    number = 0 if num_labels == 1 else numbers.get(label, label)
    if number is None or number not in range(num_labels):
        names = ", ".join(map(repr, sorted(numbers, key=numbers.__getitem__)))
        by_name = f"one of {names}, or " if names else ""
        raise RewardError(
            f"The reward model `{name}` has {num_labels} labels, but a reward is one number; set "
            f"`reward_label` to {by_name}a number from 0 to {num_labels - 1}, got {label}. With "
            "several reward models, give a list with a label for each reward, and None for those "
            "without labels."
        )
    return number


def load_classifier(
    model_id: str,
    dtype: torch.dtype,
    quantize: str | None = "nf4",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    of_tokens: bool = False,
) -> PreTrainedModel:
    """Load a reward model, which classifies sequences or tokens."""
    quantization = None
    if quantize == "int8":
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    elif quantize in ("nf4", "fp4"):
        kind = {"bnb_4bit_quant_type": quantize, "bnb_4bit_use_double_quant": True}
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **kind)
    classifiers: Any = (
        AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    )
    model, report = classifiers.from_pretrained(
        model_id,
        dtype=dtype,
        quantization_config=quantization,
        device_map={"": torch.device(device)},
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    needed = "a sequence classifier, e.g. one trained with TRL's `RewardTrainer`"
    if of_tokens:
        needed = "a token classifier, e.g. one trained with TRL's `PRMTrainer`"
    check_loaded(model_id, report, needed)
    return model


def frozen(model: PreTrainedModel | PeftModel) -> PreTrainedModel | PeftModel:
    """Prepare a reward model for scoring only."""
    model.requires_grad_(False).eval()
    for module in model.modules():
        # the 4-bit kernel of CPUs with AVX512-BF16 takes whole blocks of 32 rows and 64 columns
        if hasattr(module, "support_avx512bf16_for_cpu") and (
            module.out_features % 32 or module.in_features % 64
        ):
            module.support_avx512bf16_for_cpu = False
    return model


def classifier_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The classifier, without an adapter around it."""
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


def is_decoder(model: PreTrainedModel | PeftModel) -> bool:
    """Whether a classifier is one of transformers' decoders, which have a score head and a
    cache."""
    return isinstance(getattr(classifier_of(model), "score", None), nn.Module)


def reads_forward(model: PreTrainedModel | PeftModel) -> bool:
    """Whether each state of a classifier is known to depend on earlier tokens only."""
    classifier = classifier_of(model)
    config = classifier.config.get_text_config()
    is_bidirectional = getattr(config, "use_bidirectional_attention", False) or not getattr(
        config, "is_causal", True
    )
    return not (
        classifier.config.is_encoder_decoder or is_bidirectional or classifier.is_remote_code()
    )


def load_tokenizer(name: str, model_id: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a reward model."""
    if not model_id:
        raise RewardError(
            f"The reward model `{name}` has no id to load a tokenizer from; pass one in "
            "`reward_processing_classes`."
        )
    return AutoTokenizer.from_pretrained(model_id, trust_remote_code=trust_remote_code)


def context_length(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that a reward model takes; RoBERTa and its kin count two positions more."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return min(positions - 2 * bool(_ROBERTA.search(config.model_type)), tokenizer.model_max_length)


def pooled_place(ids: list[int], pad_token_id: int | None) -> int:
    """Place of the token at which transformers' decoders read a score: the last one that is not the
    pad token.

    With pad = EOS that is the token before EOS, and the head was trained there.
    """
    if pad_token_id is None:
        return len(ids) - 1
    return max((place for place, token in enumerate(ids) if token != pad_token_id), default=0)


def pad_token_for(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> int:
    """A pad token that is the last token of no row: decoders read their score at the last token
    that is not padding, and would skip it."""
    ends = {ids[-1] for ids in rows if ids}
    candidates = [tokenizer.pad_token_id, *range(len(ends) + 1)]
    return next(token for token in candidates if token is not None and token not in ends)


def padded(
    rows: list[list[int]], pad_token_id: int, side: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, `[rows, length]`."""
    ids = [torch.tensor(row) for row in rows]
    masks = [torch.ones(len(row), dtype=torch.long) for row in rows]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id, padding_side=side)
    mask = pad_sequence(masks, batch_first=True, padding_side=side)
    return input_ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)


def template_kwargs_of(batch: ScoringBatch, row: int) -> dict[str, Any]:
    """Tools and chat template arguments of a row, which `RewardTrainer` renders, too; a template
    among them is the policy's."""
    columns = {name: x[row] for name, x in batch.columns.items() if name in TEMPLATE_COLUMNS}
    kwargs = row_template_kwargs(columns, None)
    kwargs.pop("chat_template", None)
    return kwargs


class SequenceScorer:
    """Scores prompt and completion as one text."""

    # scores of rows of token ids, `[rows]`
    _score: ClassVar[Callable[[Any, list[list[int]]], Tensor]]
    # scores of their prefixes, `[rows, length]`, padded on the right
    _score_prefixes: ClassVar[Callable[[Any, list[list[int]]], Tensor]]
    is_causal = False  # whether it scores prefixes, too
    level: RewardLevel = "end"
    # at other levels
    policy_tokenizer: PreTrainedTokenizerBase
    same_tokens: bool  # whether both tokenizers have one vocabulary

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        context_length: int = sys.maxsize,
    ):
        self.name = name
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.context_length = context_length

    def pay_at(self, level: RewardLevel, policy_tokenizer: PreTrainedTokenizerBase) -> None:
        """Pay the score at the end, or its changes at tokens of the policy or ends of turns."""
        self.level = level
        if level == "end":
            return
        self.policy_tokenizer = policy_tokenizer
        self.same_tokens = self.tokenizer.get_vocab() == policy_tokenizer.get_vocab()

    def encode(
        self, prompts: list, completions: list, template_kwargs: Sequence[dict | None] = ()
    ) -> list[list[int]]:
        """Tokenize prompts with their completions; chats with arguments of their template."""
        rows = zip_longest(prompts, completions, template_kwargs)
        return [
            encode_completed(prompt, completion, self.tokenizer, kwargs)
            for prompt, completion, kwargs in rows
        ]

    def score(self, batch: ScoringBatch) -> list[float | PrefixScores | RewardError]:
        """Score completions in batches of similar length; one that the model cannot read fails
        by itself."""
        rows = list[list[int]]()
        scores = dict[int, float | PrefixScores | RewardError]()
        for row, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions)):
            try:
                (ids,) = self.encode([prompt], [completion], [template_kwargs_of(batch, row)])
                if len(ids) > self.context_length:
                    raise ValueError(
                        f"with its prompt it has {len(ids)} tokens of {self.context_length}; lower "
                        "`max_completion_length`, or drop long prompts"
                    )
                rows.append(ids)
            except Exception as error:  # e.g. its chat template rejects a sampled call
                cause = f"{type(error).__name__}: {shortened(error)}"
                scores[row] = RewardError(
                    f"The reward model `{self.name}` cannot score completion {row}: {cause}."
                )
                # a forward of sharded weights waits for those of all ranks
                rows.append([self.tokenizer.pad_token_id or 0])
        by_length = sorted(range(len(rows)), key=lambda row: (len(rows[row]), row))
        parts = [
            by_length[start : start + self.batch_size]
            for start in range(0, len(by_length), self.batch_size)
        ]
        if parts and self.level == "end":
            at_ends = [self._score([rows[row] for row in part]).float() for part in parts]
            by_row = zip(by_length, torch.cat(at_ends).tolist())  # the only wait for the device
            scores = dict(by_row) | scores
        elif parts:
            tables = [self._score_prefixes([rows[row] for row in part]) for part in parts]
            numbers = iter(torch.cat([table.flatten() for table in tables]).tolist())
            for part, table in zip(parts, tables):
                for row in part:
                    by_place = list(islice(numbers, table.shape[1]))
                    if row not in scores:
                        scores[row] = self._prefix_scores(batch, row, rows[row], by_place)
        return [scores[row] for row in range(len(batch))]

    def _prefix_scores(
        self, batch: ScoringBatch, row: int, ids: list[int], by_place: list[float]
    ) -> PrefixScores:
        """Scores of a completion where they are paid, from those at all places of its text."""
        final = self._final_place(ids)
        completion_ids = batch.completion_ids[row]
        last = len(completion_ids) - 1
        ends = prefix_ends(
            ids, completion_ids, self.tokenizer, self.policy_tokenizer, self.same_tokens
        )
        if ends is None:
            logger.warning_once(
                f"The reward model `{self.name}` reads completions in other words than the policy "
                "has written, e.g. because its chat template changes them; these are paid at their "
                "end, as all are with `reward_level='end'`."
            )
            # without the same prompt's score, the policy could choose what is subtracted
            end = self._end_of_prompt(batch.prompts[row], ids)
            prompt_score = math.nan if end is None else by_place[min(end, final)]
            return PrefixScores(prompt_score, [(last, by_place[final])])
        positions: Iterable[int] = range(last)
        if self.level == "turn":
            positions = [start - 1 for start in batch.episodes[row].starts[1:]]
        pairs = [(position, by_place[min(ends[1 + position], final)]) for position in positions]
        pairs = [pair for pair in pairs if math.isfinite(pair[1])]
        pairs.append((last, by_place[final]))
        return PrefixScores(by_place[min(ends[0], final)], pairs)

    def _end_of_prompt(self, prompt: Any, ids: list[int]) -> int | None:
        """Place of the last token of a prompt in a text that begins with it; `None` without one."""
        try:
            if is_conversational({"prompt": prompt}):
                begun = {"add_generation_prompt": True}
                own = encode_chat(prompt, self.tokenizer, begun)
            else:
                encoded = encode_text(prompt, self.tokenizer)
                own = encoded.start + encoded.ids
        except Exception:  # its template refuses a prompt without an answer
            return None
        shared = next((n for n, (x, y) in enumerate(zip(own, ids)) if x != y), len(own))
        return min(shared, len(ids)) - 1 if shared else None

    def _final_place(self, ids: list[int]) -> int:
        """Place of the token at which the score of a text is read."""
        return len(ids) - 1


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
        tokenizer = tokenizer or load_tokenizer(name, model_id, trust_remote_code)
        super().__init__(name, tokenizer, batch_size, context_length(model.config, tokenizer))
        self.model = frozen(model)
        # decoders pool by their pad token, from the right; other models are padded as their
        # tokenizer does
        self.is_decoder = is_decoder(model)
        self.is_causal = self.is_decoder and reads_forward(model)
        trained_with = model.config.get_text_config().pad_token_id
        self.has_pad = trained_with is not None and trained_with >= 0  # some files have -1 for none

    def _final_place(self, ids: list[int]) -> int:
        trained_with = self.model.config.get_text_config().pad_token_id
        return pooled_place(ids, trained_with if self.has_pad else None)

    @torch.inference_mode()
    def _score_prefixes(self, rows: list[list[int]]) -> Tensor:
        outputs: list[Tensor] = []
        handle = classifier_of(self.model).score.register_forward_hook(
            lambda module, inputs, output: outputs.append(output)
        )
        try:
            self._score(rows)
        finally:
            handle.remove()
        longest = max(map(len, rows))
        of_tokens = outputs[0]
        if of_tokens.ndim != 3 or of_tokens.shape[1] < longest:
            raise RewardError(
                f"The reward model `{self.name}` does not score every token of a text; set "
                "`reward_level='end'`."
            )
        return of_tokens[:, -longest:, self.label].float()

    @torch.inference_mode()
    def _score(self, rows: list[list[int]]) -> Tensor:
        device = self.model.get_input_embeddings().weight.device
        config = self.model.config.get_text_config()
        trained_with = config.pad_token_id
        if self.has_pad:
            pad_token_id = trained_with
        else:
            pad_token_id = pad_token_for(rows, self.tokenizer)
        if self.is_decoder:
            side = "right"
        else:
            side = self.tokenizer.padding_side
        input_ids, mask = padded(rows, pad_token_id, side, device)
        if self.is_decoder:
            without_cache = {"use_cache": False}
        else:
            without_cache = {}
        config.pad_token_id = pad_token_id  # without one, a decoder refuses to pool several rows
        try:
            return self.model(input_ids=input_ids, attention_mask=mask, **without_cache).logits[
                :, self.label
            ]
        finally:
            config.pad_token_id = trained_with


@dataclass(frozen=True)
class RewardAdapter:
    """LoRA adapter on the policy's base that was trained as a sequence classifier, for
    `reward_funcs`.

    The adapter and its score head are loaded next to the policy's adapter.

    Args:
        path (`str`): Directory or Hub id of the adapter.
        name (`str`, *optional*): Name in metrics. Defaults to the last part of `path`.
        check_base (`bool`, *optional*, defaults to `True`):
            Whether the adapter must name the policy's base model as its own. Set it to `False` if
            the same weights have two names; shapes and tokenizers are compared in any case.
    """

    path: str
    name: str | None = None
    check_base: bool = True


class AdapterReward(SequenceScorer):
    """Scores with a reward adapter on the policy's base."""

    is_causal = True

    def __init__(
        self,
        adapter: RewardAdapter,
        actor_critic: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        label: int | str | None = None,
        own_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        path = adapter.path
        name = adapter.name or path.rstrip("/").split("/")[-1]
        super().__init__(name, own_tokenizer or tokenizer, batch_size)
        files = read_adapter(path)
        self.pad_token_id = actor_critic.config.get_text_config().pad_token_id
        if adapter.check_base:
            remedy = (
                "Load the policy from that base, or set `check_base=False` if the weights are the "
                "same."
            )
            base = actor_critic.config._name_or_path
            check_same_base(path, files.config.base_model_name_or_path, base, remedy)
        if find_file(path, "tokenizer_config.json") is not None:
            theirs = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            if theirs.get_vocab() != tokenizer.get_vocab():
                raise RewardError(
                    f"The reward adapter `{path}` was trained with another tokenizer "
                    f"({len(theirs)} tokens) than the policy's ({len(tokenizer)} tokens); merge "
                    "the adapter into its base and pass that model."
                )
            if own_tokenizer is None and theirs.chat_template is not None:
                self.tokenizer = theirs  # the policy's template may be another one
            # trainers give the classifier the pad token of its tokenizer
            if theirs.pad_token_id is not None:
                self.pad_token_id = theirs.pad_token_id
        if "weight" not in files.head:
            raise RewardError(
                f"The reward adapter `{path}` has no score head ({' or '.join(SCORE_HEADS)}); "
                'train it with `task_type="SEQ_CLS"`, which saves the head.'
            )
        self.label = checked_label(self.name, len(files.head["weight"]), label)
        self.actor_critic = actor_critic
        try:
            self.adapter_name = actor_critic.add_frozen_adapter(
                self.name, files.config, files.weights
            )
        except ValueError as error:
            raise RewardError(
                f"The reward adapter `{path}` does not fit the policy's base: {error}"
            ) from None
        self.head = {key: x.float().to(actor_critic.device) for key, x in files.head.items()}

    def _final_place(self, ids: list[int]) -> int:
        return pooled_place(ids, self.pad_token_id)

    def _score(self, rows: list[list[int]]) -> Tensor:
        places = torch.tensor([self._final_place(ids) for ids in rows])
        places = places.to(self.actor_critic.device, non_blocking=True)
        return self._score_states(
            rows, lambda states: states[torch.arange(len(rows), device=states.device), places]
        )

    def _score_prefixes(self, rows: list[list[int]]) -> Tensor:
        return self._score_states(rows, lambda states: states)

    @torch.no_grad()
    def _score_states(self, rows: list[list[int]], pick: Callable[[Tensor], Tensor]) -> Tensor:
        """Scores of some of the last states of rows."""
        device = self.actor_critic.device
        input_ids, mask = padded(rows, pad_token_for(rows, self.tokenizer), "right", device)

        def read(trunk: nn.Module) -> Tensor:
            outputs = trunk(input_ids=input_ids, attention_mask=mask, use_cache=False)
            return pick(outputs.last_hidden_state)

        states = self.actor_critic.read_trunk(read, self.adapter_name)
        # the model may have moved since
        head = {key: x.to(states.device) for key, x in self.head.items()}
        with torch.autocast(states.device.type, enabled=False):
            # row by row: in float32, all states of long texts would take much memory
            scores = [
                nn.functional.linear(row.float(), head["weight"], head.get("bias"))
                for row in states.split(1)
            ]
        return torch.cat(scores)[..., self.label]
