"""Rewards that are LoRA adapters on the policy's base, without a second model in memory."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..modeling import ActorCritic
from ..modeling.adapter_files import SCORE_HEADS, AdapterFileError, check_same_base, find_file, read_adapter
from .base import RewardError
from .model import SequenceScorer, checked_label, last_states


@dataclass(frozen=True)
class RewardAdapter:
    """LoRA adapter on the policy's base that was trained as a sequence classifier, for `reward_funcs`.

    The adapter and its score head are loaded next to the policy's adapter.

    Args:
        path (`str`):
            Directory or Hub id of the adapter.
        name (`str`, *optional*):
            Name in metrics. Defaults to the last part of `path`.
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
        label: int | None = None,
    ):
        path = adapter.path
        super().__init__(adapter.name or path.rstrip("/").split("/")[-1], tokenizer, batch_size)
        try:
            files = read_adapter(path)
            if adapter.check_base:
                remedy = "Load the policy from that base, or set `check_base=False` if the weights are the same."
                check_same_base(path, files.config, actor_critic.config._name_or_path, remedy)
        except AdapterFileError as error:
            raise RewardError(str(error)) from error

        if find_file(path, "tokenizer_config.json") is not None:
            theirs = AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # only its vocabulary is compared
            if theirs.get_vocab() != tokenizer.get_vocab():
                raise RewardError(
                    f"The reward adapter `{path}` was trained with another tokenizer ({len(theirs)} tokens) than the "
                    f"policy's ({len(tokenizer)} tokens); on a shared base both must be the same. Merge the adapter "
                    "into its base and pass that model."
                )
        if "weight" not in files.head:
            raise RewardError(
                f"The reward adapter `{path}` has no score head ({' or '.join(SCORE_HEADS)}); train it with "
                '`task_type="SEQ_CLS"`, which saves the head with the adapter.'
            )
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
        read = partial(last_states, input_ids=input_ids.to(device), mask=mask.to(device))
        states = self.actor_critic.read_trunk(read, self.adapter_name)
        head = {key: x.to(states.device) for key, x in self.head.items()}  # the model may have moved since
        with torch.autocast(states.device.type, enabled=False):
            return torch.nn.functional.linear(states.float(), head["weight"], head.get("bias"))[:, self.label]
