"""Fingerprints of what a run is given besides its config: a resumed run must be given the same."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from datasets import IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..data import TOKEN_COLUMNS, spread_indices
from ..modeling import ActorCritic
from ..modeling.adapters import digest_of_weights
from ..rewards.model import AdapterReward

SAMPLED_ROWS = 64
# fields of an adapter's config that name places, or change nothing
_NOT_COMPARED = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision")


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda x: type(x).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rows(dataset: Any) -> str:
    columns = sorted(set(dataset.column_names or ()) - TOKEN_COLUMNS)
    if isinstance(dataset, IterableDataset):  # its rows are not read ahead
        return f"stream of {', '.join(columns)}"
    rows = [dataset[index] for index in spread_indices(len(dataset), SAMPLED_ROWS)]
    sample = _digest([[row[name] for name in columns] for row in rows])
    return f"{len(dataset)} rows of {', '.join(columns)} ({sample})"


def _frozen(reward: Any) -> Iterable[Tensor]:
    """Weights of a classifier, or the score head of an adapter."""
    model = getattr(reward, "model", None)
    if isinstance(model, nn.Module):
        return model.parameters()
    return reward.head.values() if isinstance(reward, AdapterReward) else ()


def fingerprints(
    actor_critic: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None,
    rewards: list,
    train_dataset: Any,
) -> dict[str, Any]:
    """Names and fingerprints of models, tokenizer, rewards and rows, as JSON. All ranks must call it."""
    policy, config = actor_critic.policy, actor_critic.config
    quantization: Any = getattr(config, "quantization_config", None)
    values = {
        "base weights": digest_of_weights(x for x in policy.parameters() if not x.requires_grad),
        "dtype": actor_critic.dtype,
        "attn_implementation": config._attn_implementation,
        "quantization_config": quantization.to_dict() if hasattr(quantization, "to_dict") else quantization,
        "tokenizer": _digest([tokenizer.get_vocab(), tokenizer.special_tokens_map]),
        "chat_template": _digest([tokenizer.chat_template, chat_template_kwargs or {}]),
        "rewards": {reward.name: digest_of_weights(_frozen(reward)) for reward in rewards},
    }
    adapters = {"peft_config": actor_critic.policy_adapter, "critic's peft_config": actor_critic.critic_adapter}
    for prefix, name in adapters.items():
        fields = policy.peft_config[name].to_dict() if name is not None else {}
        values |= {f"{prefix}.{key}": value for key, value in fields.items() if value and key not in _NOT_COMPARED}
    values["train_dataset"] = None if train_dataset is None else _rows(train_dataset)
    return json.loads(json.dumps(values, default=lambda x: sorted(x) if isinstance(x, set) else str(x)))
