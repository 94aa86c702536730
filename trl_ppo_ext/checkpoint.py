"""Saving and loading: a plain PEFT adapter, and the value head beside it as safetensors."""

import json
import os
from copy import copy
from typing import Any

from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from .modeling import ActorCritic, check_fit

ADAPTER_WEIGHTS = "adapter_model.safetensors"
VALUE_HEAD = "value_head.safetensors"
STATE = "ppo_state.json"


class CheckpointError(ValueError):
    """Raised when a checkpoint lacks a file, or its tensors do not fit the model."""


def save_adapter(actor_critic: ActorCritic, output_dir: str, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write the policy's adapter as PEFT does, and the value head.

    Args:
        actor_critic ([`ActorCritic`]): What is saved.
        output_dir (`str`): An existing directory.
        state_dict (`dict[str, Tensor]`, *optional*): Gathered weights of the actor-critic, where they are sharded.
    """
    policy, name = actor_critic.policy, actor_critic.policy_adapter
    prefix = "policy."
    if state_dict is None:
        of_policy, of_head = None, actor_critic.value_head.state_dict()
    else:
        of_policy = {key.removeprefix(prefix): x for key, x in state_dict.items() if key.startswith(prefix)}
        of_head = {key.split(".")[-1]: x for key, x in state_dict.items() if key.startswith("value_head.")}
    weights = get_peft_model_state_dict(policy, state_dict=of_policy, adapter_name=name, save_embedding_layers=False)
    config = copy(policy.peft_config[name])
    config.inference_mode = True
    config.save_pretrained(output_dir)
    for tensors, file in ((weights, ADAPTER_WEIGHTS), (of_head, VALUE_HEAD)):
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, os.path.join(output_dir, file), metadata={"format": "pt"})


def _read(directory: str, file: str) -> dict[str, Tensor]:
    path = os.path.join(directory, file)
    if not os.path.isfile(path):
        raise CheckpointError(f"`{directory}` has no {file}; it is not a checkpoint that PPOTrainer wrote.")
    return load_file(path)


def _check_fit(file: str, given: dict[str, Tensor], needed: dict[str, Tensor]) -> None:
    try:
        check_fit(needed=needed, given=given)
    except ValueError as error:
        raise CheckpointError(
            f"{file} does not fit the model: {error} It belongs to another base model or another `peft_config`."
        ) from None


def load_adapter(actor_critic: ActorCritic, directory: str) -> None:
    """Read what [`save_adapter`] wrote.

    Args:
        actor_critic ([`ActorCritic`]): Where the weights go.
        directory (`str`): The checkpoint.

    Raises:
        [`CheckpointError`]: If a file is missing or does not fit.
    """
    policy, name = actor_critic.policy, actor_critic.policy_adapter
    weights, head = _read(directory, ADAPTER_WEIGHTS), _read(directory, VALUE_HEAD)
    _check_fit(
        ADAPTER_WEIGHTS,
        weights,
        get_peft_model_state_dict(policy, adapter_name=name, save_embedding_layers=False),
    )
    _check_fit(VALUE_HEAD, head, actor_critic.value_head.state_dict())
    set_peft_model_state_dict(policy, weights, adapter_name=name)
    actor_critic.value_head.load_state_dict(head)


def save_state(state: dict[str, Any], output_dir: str) -> None:
    """Write what the run remembers besides weights: running statistics of the rewards.

    Args:
        state (`dict`): Numbers.
        output_dir (`str`): An existing directory.
    """
    with open(os.path.join(output_dir, STATE), "w") as file:
        json.dump(state, file, indent=2)


def load_state(directory: str) -> dict[str, Any]:
    """Read what [`save_state`] wrote.

    Args:
        directory (`str`): The checkpoint.

    Returns:
        `dict`: The numbers.

    Raises:
        [`CheckpointError`]: If the file is missing or no JSON.
    """
    path = os.path.join(directory, STATE)
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"`{path}` cannot be read ({error}); it is not a checkpoint that PPOTrainer wrote."
        ) from None
