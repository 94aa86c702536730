"""Rewards that are LoRA adapters on the policy's own base: no second model in memory."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..modeling import ActorCritic
from ..modeling.adapter_files import (
    SCORE_HEADS,
    AdapterFileError,
    AdapterFiles,
    check_same_base,
    find_file,
    read_adapter,
)
from .base import RewardError
from .model import SequenceScorer, checked_label, last_states


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


_OTHER_BASE = (
    "Load the policy from that base, or set `RewardAdapter(..., check_base=False)` if the weights are the same."
)


def _check_tokenizer(adapter: RewardAdapter, tokenizer: PreTrainedTokenizerBase) -> None:
    if find_file(adapter.path, "tokenizer_config.json") is None:
        return  # it was saved without one
    theirs = AutoTokenizer.from_pretrained(
        adapter.path, trust_remote_code=False
    )  # never: its words alone are compared
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise RewardError(
            f"The reward adapter `{adapter.path}` was trained with another tokenizer ({len(theirs)} tokens) than the "
            f"policy's ({len(tokenizer)} tokens); on a shared base both must be the same. Use it as a model of its "
            "own: merge it into its base and pass that."
        )


def _read(adapter: RewardAdapter, base: str) -> AdapterFiles:
    try:
        files = read_adapter(adapter.path)
        if adapter.check_base:
            check_same_base(adapter.path, files.config, base, _OTHER_BASE)
    except AdapterFileError as error:
        raise RewardError(str(error)) from error
    return files


class AdapterReward(SequenceScorer):
    """Scores with a reward adapter on the policy's base."""

    def __init__(
        self,
        adapter: RewardAdapter,
        actor_critic: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        label: int | None = None,
    ):
        super().__init__(adapter.name or adapter.path.rstrip("/").split("/")[-1], tokenizer, batch_size)
        files = _read(adapter, actor_critic.config._name_or_path)
        _check_tokenizer(adapter, tokenizer)
        if "weight" not in files.head:
            raise RewardError(
                f"The reward adapter `{adapter.path}` has no score head ({' or '.join(SCORE_HEADS)}); train it with "
                '`task_type="SEQ_CLS"`, which saves the head with the adapter.'
            )
        self.head = files.head
        self.label = checked_label(self.name, len(self.head["weight"]), label)
        self.actor_critic = actor_critic
        try:
            self.adapter_name = actor_critic.add_frozen_adapter(self.name, files.config, files.weights)
        except ValueError as error:
            raise RewardError(f"The reward adapter `{adapter.path}` does not fit the policy's base: {error}") from None
        device = actor_critic.device
        self.head = {key: x.float().to(device) for key, x in self.head.items()}

    @torch.no_grad()
    def _score_ids(self, encoded: list[list[int]]) -> Tensor:
        input_ids, mask = self._padded(encoded, self.actor_critic.device)
        read = partial(last_states, input_ids=input_ids, mask=mask)
        states = self.actor_critic.read_trunk(read, self.adapter_name)
        head = {key: x.to(states.device) for key, x in self.head.items()}  # the run may have moved the model meanwhile
        with torch.autocast(states.device.type, enabled=False):
            return torch.nn.functional.linear(states.float(), head["weight"], head.get("bias"))[:, self.label]
