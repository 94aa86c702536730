"""Initial critics: a pretrained critic, another run's critic, or a reward adapter on the same base."""

import json
from typing import NamedTuple

from peft import PeftConfig
from torch import Tensor, nn

from .adapter_files import (
    CRITIC_FOLDER,
    CRITIC_NUMBERS,
    VALUE_HEAD,
    check_same_base,
    find_file,
    public_name,
    read_adapter,
    read_adapter_config,
    read_weights,
)
from .adapters import check_fit

_OTHER_BASE = "Start from a critic of this base, or leave `critic_init` out."


class CriticStart(NamedTuple):
    """Weights that a critic starts from."""

    head: dict[str, Tensor]  # weight [1, hidden] and bias [1] of the value head
    config: PeftConfig | None = None  # config of its adapter, if it has one
    weights: dict[str, Tensor] | None = None  # weights of its adapter


def read_critic(path: str, critic: str, base: str, label: int | None = None) -> CriticStart:
    """Read what `critic_init` names.

    A directory (or Hub repository) with a value head is a critic of ours: of a checkpoint, or of `pretrain-critic`.
    One with an adapter and a score head is a reward adapter; its adapter and head are copied.
    """
    head_file = find_file(path, VALUE_HEAD)
    if head_file is None:
        return _from_reward_adapter(path, critic, base, label)
    head = read_weights(head_file)
    has_adapter = read_adapter_config(path, CRITIC_FOLDER) is not None
    if has_adapter != (critic == "adapter"):
        kind = "adapter" if has_adapter else "head"
        raise ValueError(
            f"`critic_init={path!r}` holds a critic of the kind {kind!r}, and `critic` is {critic!r}; set "
            f"`critic={kind!r}`, or pretrain one of the other kind."
        )
    if has_adapter:
        files = read_adapter(path, CRITIC_FOLDER)
        check_same_base(path, files.config, base, _OTHER_BASE)
        return CriticStart(head, files.config, files.weights)
    of_policy = read_adapter_config(path)
    if of_policy is not None:  # the policy next to the head names the base
        check_same_base(path, of_policy, base, _OTHER_BASE)
    elif (about := find_file(path, CRITIC_NUMBERS)) is not None:
        with open(about) as stream:
            trained_on = json.load(stream).get("base_model", "")
        if trained_on != public_name(base):
            raise ValueError(
                f"The critic `{path}` was trained on {trained_on!r}, the policy's base is {public_name(base)!r}; a "
                f"head means nothing on another base. {_OTHER_BASE}"
            )
    return CriticStart(head)


def _from_reward_adapter(path: str, critic: str, base: str, label: int | None) -> CriticStart:
    files = read_adapter(path) if read_adapter_config(path) is not None else None
    if files is None or "weight" not in files.head:
        raise ValueError(
            f"`critic_init={path!r}` has neither a {VALUE_HEAD} nor an adapter with a score head; name a directory "
            "that `trl-ppo pretrain-critic` or PPOTrainer wrote, or a reward adapter."
        )
    if critic != "adapter":
        raise ValueError(
            f"`critic_init={path!r}` is a reward adapter: its score head means something on its own adapter alone. "
            "Set `critic='adapter'`."
        )
    check_same_base(path, files.config, base, _OTHER_BASE)
    rows = len(files.head["weight"])
    if (rows > 1 and label is None) or not 0 <= (label or 0) < rows:
        raise ValueError(
            f"The score head of `critic_init={path!r}` has {rows} labels, and `reward_label` is {label}; pick one of "
            f"0 to {rows - 1}."
        )
    row = slice(label or 0, (label or 0) + 1)
    weight = files.head["weight"][row].float()
    bias = files.head["bias"][row].float() if "bias" in files.head else weight.new_zeros(1)
    return CriticStart({"weight": weight, "bias": bias}, files.config, files.weights)


def load_value_head(value_head: nn.Linear, head: dict[str, Tensor], path: str) -> None:
    """Set the weights of the value head."""
    try:
        check_fit(value_head.state_dict(), head)
    except ValueError as error:
        raise ValueError(f"The value head of `{path}` does not fit the model: {error}") from None
    value_head.load_state_dict(head)
