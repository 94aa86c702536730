"""Rewards that are LoRA adapters on the policy's own base: no second model in memory."""

import json
import os
from dataclasses import dataclass

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft import PeftConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..modeling import ActorCritic
from .base import RewardError
from .model import SequenceScorer, checked_label, last_states

WEIGHTS = "adapter_model.safetensors"
HEADS = ("score", "classifier")


@dataclass(frozen=True)
class RewardAdapter:
    """A reward model that was trained as a LoRA adapter of a sequence classifier, on the policy's base.

    An entry of `reward_funcs`. The adapter and its score head are loaded next to the policy's adapter.

    Args:
        path (`str`): Directory or Hub id of the adapter.
        name (`str`, *optional*): Name in metrics; the last part of the path by default.
        check_base (`bool`, *optional*, defaults to `True`):
            Whether the adapter must name the policy's base model as its own. Switch it off where the same weights have
            two names; shapes and tokenizers are compared all the same.
    """

    path: str
    name: str | None = None
    check_base: bool = True


def _file(path: str, name: str) -> str | None:
    """A file of an adapter, from a directory or the Hub."""
    if os.path.isdir(path):
        local = os.path.join(path, name)
        return local if os.path.isfile(local) else None
    try:
        return hf_hub_download(path, name)
    except EntryNotFoundError:
        return None


def _check_base(adapter: RewardAdapter, config: PeftConfig, base: str) -> None:
    trained_on = config.base_model_name_or_path or ""
    same = trained_on == base or (os.path.isdir(base) and os.path.realpath(trained_on) == os.path.realpath(base))
    if adapter.check_base and not (base and same):
        raise RewardError(
            f"The reward adapter `{adapter.path}` was trained on {trained_on or 'a base without a name'!r}, the "
            f"policy's base is {base or 'without a name'!r}; an adapter means nothing on another base. Load the "
            "policy from that base, or set `RewardAdapter(..., check_base=False)` if the weights are the same."
        )


def _check_tokenizer(adapter: RewardAdapter, tokenizer: PreTrainedTokenizerBase) -> None:
    if _file(adapter.path, "tokenizer_config.json") is None:
        return  # it was saved without one
    theirs = AutoTokenizer.from_pretrained(adapter.path)
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise RewardError(
            f"The reward adapter `{adapter.path}` was trained with another tokenizer ({len(theirs)} tokens) than the "
            f"policy's ({len(tokenizer)} tokens); on a shared base both must be the same. Use it as a model of its "
            "own: merge it into its base and pass that."
        )


def _read_weights(adapter: RewardAdapter) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of the adapter, and of the head that lies with them."""
    file = _file(adapter.path, WEIGHTS)
    if file is None:
        raise RewardError(f"`{adapter.path}` has no {WEIGHTS}; only safetensors are read. Save the adapter anew.")
    weights = load_file(file)
    of_head = {
        key: x for key, x in weights.items() if any(f".{head}." in key for head in HEADS) and "lora_" not in key
    }
    if not any(key.endswith("weight") for key in of_head):
        raise RewardError(
            f"The reward adapter `{adapter.path}` has no score head ({' or '.join(HEADS)}); train it with "
            '`task_type="SEQ_CLS"`, which saves the head with the adapter.'
        )
    head = {key.split(".")[-1]: x for key, x in of_head.items()}
    return {key: x for key, x in weights.items() if key not in of_head}, head


class AdapterReward(SequenceScorer):
    """Scores with a reward adapter on the policy's base.

    Args:
        adapter ([`RewardAdapter`]): What to load.
        actor_critic ([`ActorCritic`]): Whose base it shares.
        tokenizer (`PreTrainedTokenizerBase`): The policy's tokenizer.
        batch_size (`int`): Completions scored at a time.
        label (`int`, *optional*): Which of several labels is the reward.

    Raises:
        [`RewardError`]: If it belongs to another base or tokenizer, or has no head.
    """

    def __init__(
        self,
        adapter: RewardAdapter,
        actor_critic: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        label: int | None = None,
    ):
        super().__init__(adapter.name or adapter.path.rstrip("/").split("/")[-1], tokenizer, batch_size)
        file = _file(adapter.path, "adapter_config.json")
        if file is None:
            raise RewardError(f"`{adapter.path}` has no adapter_config.json; it is no PEFT adapter.")
        with open(file) as stream:
            config = PeftConfig.from_peft_type(**json.load(stream))
        _check_base(adapter, config, actor_critic.config._name_or_path)
        _check_tokenizer(adapter, tokenizer)
        weights, self.head = _read_weights(adapter)
        self.label = checked_label(self.name, len(self.head["weight"]), label)
        self.actor_critic = actor_critic
        try:
            self.adapter_name = actor_critic.add_frozen_adapter(self.name, config, weights)
        except ValueError as error:
            raise RewardError(f"The reward adapter `{adapter.path}` does not fit the policy's base: {error}") from None
        device = actor_critic.value_head.weight.device
        self.head = {key: x.float().to(device) for key, x in self.head.items()}

    @torch.no_grad()
    def _score_ids(self, encoded: list[list[int]]) -> Tensor:
        device = self.actor_critic.value_head.weight.device
        input_ids, mask = self._padded(encoded, device)
        head = {key: x.to(device) for key, x in self.head.items()}  # the run may have moved the model meanwhile
        with self.actor_critic.adapter(self.adapter_name):
            states = last_states(self.actor_critic.trunk, input_ids, mask)
        return torch.nn.functional.linear(states.float(), head["weight"], head.get("bias"))[:, self.label]
