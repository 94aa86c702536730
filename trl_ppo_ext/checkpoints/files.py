"""Saving and loading: a plain PEFT adapter, and the critic beside it as safetensors."""

import json
import os
from contextlib import suppress
from copy import copy
from typing import Any

from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..modeling import ActorCritic, adapter_weights, check_fit, load_adapter_weights, parameter_names, set_weights
from ..modeling.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CRITIC_FOLDER, VALUE_HEAD

STATE = "ppo_state.json"
AVERAGED = "ema"


class CheckpointError(ValueError):
    """Raised when a checkpoint lacks a file, or its tensors do not fit the model."""


def _write(tensors: dict[str, Tensor], path: str) -> None:
    contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})


def _read(directory: str, file: str) -> dict[str, Tensor]:
    path = os.path.join(directory, file)
    if not os.path.isfile(path):
        raise CheckpointError(f"`{directory}` has no {file}; it is not a checkpoint that PPOTrainer wrote.")
    return load_file(path)


def save_adapter(policy: PeftModel, name: str, output_dir: str, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write one adapter as PEFT does."""
    os.makedirs(output_dir, exist_ok=True)
    config = copy(policy.peft_config[name])
    config.inference_mode = True
    config.save_pretrained(output_dir)
    _write(adapter_weights(policy, name, state_dict), os.path.join(output_dir, ADAPTER_WEIGHTS))


def save_critic(actor_critic: ActorCritic, output_dir: str, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write the value head and, in a folder of its own, the critic's adapter, whatever of these there is."""
    _remove_other_critic(actor_critic, output_dir)
    if actor_critic.value_head is None:
        return
    os.makedirs(output_dir, exist_ok=True)
    head = actor_critic.value_head.state_dict()
    if state_dict is not None:
        head = {key: state_dict[f"value_head.{key}"] for key in head}
    _write(head, os.path.join(output_dir, VALUE_HEAD))
    if actor_critic.critic_adapter is not None:
        folder = os.path.join(output_dir, CRITIC_FOLDER)
        save_adapter(actor_critic.policy, actor_critic.critic_adapter, folder, _of_policy(state_dict))


def _remove_other_critic(actor_critic: ActorCritic, output_dir: str) -> None:
    """Remove what a run with a critic of another kind left there: it would pass for a part of this one."""
    kind = _kind(actor_critic)
    stale = [VALUE_HEAD] if kind == "none" else []
    if kind != "adapter":
        stale += [os.path.join(CRITIC_FOLDER, file) for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    for file in stale:
        with suppress(FileNotFoundError):
            os.remove(os.path.join(output_dir, file))


def _kind(actor_critic: ActorCritic) -> str:
    """What `PPOConfig.critic` calls it."""
    if actor_critic.value_head is None:
        return "none"
    return "head" if actor_critic.critic_adapter is None else "adapter"


def _of_policy(state_dict: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    if state_dict is None:
        return None
    return {key.removeprefix("policy."): x for key, x in state_dict.items() if key.startswith("policy.")}


def save_actor_critic(actor_critic: ActorCritic, output_dir: str, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write the policy's adapter, and the critic beside it."""
    save_adapter(actor_critic.policy, actor_critic.policy_adapter, output_dir, _of_policy(state_dict))
    save_critic(actor_critic, output_dir, state_dict)


def load_adapter(policy: PeftModel, name: str, directory: str) -> None:
    """Read what [`save_adapter`] wrote."""
    weights = _read(directory, ADAPTER_WEIGHTS)
    try:
        load_adapter_weights(policy, name, weights)
    except ValueError as error:
        raise _unfit(ADAPTER_WEIGHTS, error) from None


def read_averages(policy: PeftModel, name: str, directory: str) -> dict[str, Tensor]:
    """Read averaged weights of an adapter, without setting them."""
    names, weights = parameter_names(policy, name), _read(directory, ADAPTER_WEIGHTS)
    if names.keys() != weights.keys():
        other = sorted(names.keys() ^ weights.keys())[0]
        raise _unfit(ADAPTER_WEIGHTS, ValueError(f"`{other}` is in one of the two alone."))
    return {names[key]: x for key, x in weights.items()}


def _unfit(file: str, error: ValueError) -> CheckpointError:
    return CheckpointError(
        f"{file} does not fit the model: {error} It belongs to another base model or another `peft_config`."
    )


def _check_kind(actor_critic: ActorCritic, directory: str) -> None:
    """A critic in a checkpoint must be of the run's kind; one that lacks files is told by the file."""
    needed, given = _kind(actor_critic), "none"
    if os.path.isfile(os.path.join(directory, VALUE_HEAD)):
        given = "adapter" if os.path.isfile(os.path.join(directory, CRITIC_FOLDER, ADAPTER_CONFIG)) else "head"
    if given not in ("none", needed):
        raise CheckpointError(
            f"`{directory}` holds a critic of the kind {given!r}, and `critic` is {needed!r}; set `critic={given!r}` "
            "to go on with it."
        )


def load_actor_critic_weights(actor_critic: ActorCritic, directory: str) -> None:
    """Read what [`save_actor_critic`] wrote."""
    _check_kind(actor_critic, directory)
    head = None
    if actor_critic.value_head is not None:
        head = _read(directory, VALUE_HEAD)
        try:
            check_fit(needed=dict(actor_critic.value_head.named_parameters()), given=head)
        except ValueError as error:
            raise _unfit(VALUE_HEAD, error) from None
    load_adapter(actor_critic.policy, actor_critic.policy_adapter, directory)
    if actor_critic.critic_adapter is not None:
        load_adapter(actor_critic.policy, actor_critic.critic_adapter, os.path.join(directory, CRITIC_FOLDER))
    if actor_critic.value_head is not None and head is not None:
        set_weights(dict(actor_critic.value_head.named_parameters()), head)


def save_state(state: dict[str, Any], output_dir: str) -> None:
    """Write what the run remembers besides weights: running statistics of the rewards, coefficients."""
    with open(os.path.join(output_dir, STATE), "w") as file:
        json.dump(state, file, indent=2)


def load_state(directory: str) -> dict[str, Any]:
    """Read what [`save_state`] wrote."""
    path = os.path.join(directory, STATE)
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"`{path}` cannot be read ({error}); it is not a checkpoint that PPOTrainer wrote."
        ) from None
