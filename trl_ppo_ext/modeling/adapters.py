"""Adapters and critics: on a base, and as files in a directory or on the Hub, a head next to its
adapter."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, uint8

from ..distributed import gathered, set_weights

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
VALUE_HEAD = "value_head.safetensors"
KIND = "critic"  # in its header
KINDS = ("head", "adapter", "side")  # of this package
CRITIC_FOLDER = "critic"
STATE = "ppo_state.json"  # the run's state besides weights, with its settings
# next to a pretrained critic: its training and its explained variance
CRITIC_NUMBERS = "critic.json"
SAMPLED_WEIGHTS = 16  # per tensor, in a digest
SCORE_HEADS = ("score", "classifier")
# beginnings of the values of `init_lora_weights` with which LoRA takes weights out of its base
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_OTHER_BASE = "Start from a critic of this base, or omit `critic_init`."


# ---- on a base ----


def check_fit(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise a `ValueError` that names the first tensor whose name or shape differs."""
    for key, tensor in expected.items():
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))  # over all ranks under ZeRO-3
        actual = tuple(weights[key].shape) if key in weights else "missing"
        if actual != shape:
            raise ValueError(f"`{key}` is {actual}, the model has {shape}.")
    for key in weights.keys() - expected.keys():
        raise ValueError(f"the model has no `{key}`.")


def adapter_weights(
    policy: PeftModel, name: str, state_dict: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Weights of an adapter under the names PEFT saves; `state_dict` holds gathered weights of a
    sharded model."""
    weights = dict(policy.named_parameters()) if state_dict is None else state_dict
    return get_peft_model_state_dict(
        policy, state_dict=weights, adapter_name=name, save_embedding_layers=False
    )


def load_adapter_weights(policy: PeftModel, name: str, weights: dict[str, Tensor]) -> None:
    """Set the weights of an adapter; raise a `ValueError` if they do not fit."""
    parameters = adapter_weights(policy, name)
    check_fit(expected=parameters, weights=weights)
    set_weights(parameters, weights)


def adapter_parameters(policy: PeftModel, name: str) -> dict[str, nn.Parameter]:
    """Parameters of an adapter by their names in the model."""
    parameters = {id(x): (key, x) for key, x in policy.named_parameters()}
    return dict(parameters[id(x)] for x in adapter_weights(policy, name).values())


def add_adapter(
    policy: PeftModel, name: str, config: PeftConfig, keep_modules: bool = False
) -> str:
    """Add a frozen, inactive adapter and return its name; `keep_modules` copies
    `modules_to_save` as well."""
    while name in policy.peft_config:
        name += "_"
    config = copy(config)
    config.task_type = "CAUSAL_LM"
    config.inference_mode = False
    if not keep_modules:
        config.modules_to_save = None  # such as the score head of a reward adapter
    has_tokens = any(isinstance(x, TrainableTokensLayer) for x in policy.modules())
    if has_tokens != bool(getattr(config, "trainable_token_indices", None)):
        # PEFT looks for them in each adapter
        raise ValueError(
            "`trainable_token_indices` must be set for all adapters on a base or for none: those "
            "of policy, critic and rewards; merge an adapter that has them into the base."
        )
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others, such as PiSSA, would change the base
    active = policy.active_adapter
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    policy.add_adapter(name, config)
    # PEFT activates or freezes adapters when one is added
    policy.set_adapter(active)
    policy.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    return name


# ---- as files ----


def public_name(base: str) -> str:
    """Name of a base model for a shared file: only the last part of a path."""
    if os.path.isdir(base):
        return os.path.basename(os.path.normpath(base))
    return base


class AdapterFiles(NamedTuple):
    """An adapter as it was saved."""

    config: PeftConfig
    weights: dict[str, Tensor]  # without heads
    # weight and bias of the score head that was saved with it; empty without one
    head: dict[str, Tensor]


def find_file(path: str, name: str, folder: str = "") -> str | None:
    """A file of an adapter, from a directory or the Hub."""
    if os.path.isdir(path):
        local = os.path.join(path, folder, name)
        if os.path.isfile(local):
            return local
        return None
    try:
        return hf_hub_download(path, name, subfolder=folder or None)
    except RemoteEntryNotFoundError:
        return None
    except (OSError, HFValidationError) as error:
        raise ValueError(
            f"`{path}` must be a directory, or a repository on the Hub that can be reached "
            f"({error}); check the path and the connection."
        ) from None


def _damaged(file: str, error: Exception) -> ValueError:
    return ValueError(
        f"`{file}` cannot be read ({type(error).__name__}: {error}); copy or save it anew."
    )


def read_state(path: str) -> dict[str, Any]:
    """State of the run that saved an adapter; empty for an adapter of another trainer."""
    file = find_file(path, STATE)
    if file is None:
        return {}
    try:
        return json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error


def read_weights(file: str) -> dict[str, Tensor]:
    """Read a file of safetensors."""
    try:
        return load_file(file)
    except (SafetensorError, ValueError) as error:
        raise _damaged(file, error) from error


def read_adapter_config(path: str, folder: str = "") -> PeftConfig | None:
    """Read the config of an adapter."""
    config_file = find_file(path, ADAPTER_CONFIG, folder)
    if config_file is None:
        return None
    try:
        return PeftConfig.from_peft_type(**json.loads(Path(config_file).read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(config_file, error) from error


def read_adapter(path: str, folder: str = "") -> AdapterFiles:
    """Read an adapter; only safetensors are read."""
    if folder:
        place = os.path.join(path, folder)
    else:
        place = path
    config = read_adapter_config(path, folder)
    if config is None:
        raise ValueError(f"`{place}` has no {ADAPTER_CONFIG}; it is not a PEFT adapter.")
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"The adapter `{place}` has `bias={config.bias!r}`: it would put its biases into the "
            "base of all roles. Train it with `bias='none'`, or merge it into its base."
        )
    check_keeps_base(place, config)
    weights_file = find_file(path, ADAPTER_WEIGHTS, folder)
    if weights_file is None:
        raise ValueError(
            f"`{place}` has no {ADAPTER_WEIGHTS}; only safetensors are read. Save it anew."
        )
    weights = read_weights(weights_file)
    head = {}
    for key in list(weights):
        if any(f".{name}." in key for name in SCORE_HEADS) and "lora_" not in key:
            head[key.split(".")[-1]] = weights.pop(key)
    return AdapterFiles(config, weights, head)


def check_keeps_base(place: str, config: PeftConfig) -> None:
    """Raise an error for a saved adapter that belongs to a base which it has changed."""
    initial = getattr(config, "init_lora_weights", True)
    if str(initial).lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"The adapter `{place}` has `init_lora_weights={initial!r}`: it works on a base that it "
            "changed when it began, which all roles share. Convert it with "
            "`path_initial_model_for_weight_conversion` of PEFT, or merge it into its base."
        )


def check_same_base(path: str, trained_on: str | None, base: str, remedy: str) -> None:
    """Raise an error for an adapter or a critic that was trained on another base."""
    same = trained_on == base or (
        os.path.isdir(base) and os.path.realpath(trained_on or "") == os.path.realpath(base)
    )
    if not (base and same):
        raise ValueError(
            f"`{path}` was trained on {trained_on or 'a base without a name'!r}, the policy's base "
            f"is {base or 'without a name'!r}; it works only on its own base. {remedy}"
        )


def kind_of_critic(head_file: str) -> str:
    """Kind of a saved critic: a value of `PPOConfig.critic`, or that of a critic of one's own."""
    try:
        with safe_open(head_file, "pt") as file:
            kind = (file.metadata() or {}).get(KIND)
    except (SafetensorError, ValueError) as error:
        raise _damaged(head_file, error) from error
    if kind is None:
        raise ValueError(
            f"`{head_file}` does not say which kind of critic it is; save it again with this "
            "version, or train a new one."
        )
    return kind


def check_gamma(path: str, gamma: float) -> None:
    """Raise an error for a critic of returns with another discount factor, if its folder records
    it."""
    for name in (CRITIC_NUMBERS, STATE):
        file = find_file(path, name)
        if file is None:
            continue
        try:
            record = json.loads(Path(file).read_text())
            trained_with = record.get("settings", record).get("gamma")
        except (OSError, ValueError, AttributeError) as error:
            raise _damaged(file, error) from error
        if trained_with not in (None, gamma):
            raise ValueError(
                f"`critic_init={path!r}` predicts returns of `gamma={trained_with}`, and `gamma` "
                f"is {gamma}; set `gamma={trained_with}`, or pretrain another."
            )
        return


def read_critic(
    path: str,
    critic: str,
    base: str,
    label: int | str | list | None = None,
    gamma: float | None = None,
) -> tuple[dict[str, Tensor], AdapterFiles | None]:
    """Read the value head that `critic_init` names, and the critic's adapter if it has one."""
    head_file = find_file(path, VALUE_HEAD)
    if head_file is not None:
        # 1. a critic of a checkpoint, or of `recipes/pretrain_critic.py` of the repository
        head = read_weights(head_file)
        kind = kind_of_critic(head_file)
        if kind not in KINDS:
            raise ValueError(
                f"`critic_init={path!r}` holds a critic of one's own, {kind!r}, which only a "
                "checkpoint restores; pretrain one that `critic` names."
            )
        if kind != critic:
            raise ValueError(
                f"`critic_init={path!r}` holds a critic of the kind {kind!r}, and `critic` is "
                f"{critic!r}; set `critic={kind!r}`, or pretrain another."
            )
        if gamma is not None:
            check_gamma(path, gamma)
        if kind == "adapter":
            files = read_adapter(path, CRITIC_FOLDER)
        else:
            files = None
        # without an adapter of its own, the policy next to the head names the base, or the record
        # of its training
        config = read_adapter_config(path) if files is None else files.config
        if config is not None:
            check_same_base(path, config.base_model_name_or_path, base, _OTHER_BASE)
        elif (numbers_file := find_file(path, CRITIC_NUMBERS)) is not None:
            trained_on = json.loads(Path(numbers_file).read_text()).get("base_model")
            check_same_base(path, trained_on, public_name(base), _OTHER_BASE)
        return head, files

    # 2. a reward adapter, of whose score head one row becomes the value head
    reward = None if read_adapter_config(path) is None else read_adapter(path)
    if reward is None or "weight" not in reward.head:
        raise ValueError(
            f"`critic_init={path!r}` has neither a {VALUE_HEAD} nor an adapter with a score head; "
            "name a saved critic or a reward adapter."
        )
    if critic != "adapter":
        raise ValueError(
            f"`critic_init={path!r}` is a reward adapter, which needs `critic='adapter'`."
        )
    check_same_base(path, reward.config.base_model_name_or_path, base, _OTHER_BASE)
    rows = len(reward.head["weight"])
    if rows == 1:
        row = 0
    elif isinstance(label, int) and label in range(rows):
        row = label
    else:
        raise ValueError(
            f"`reward_label` must be a number from 0 to {rows - 1}, which then is of all rewards "
            f"too, got {label!r}: the score head of `critic_init={path!r}` has {rows} labels."
        )
    head = {key: x[row : row + 1].float() for key, x in reward.head.items()}
    return {"bias": torch.zeros(1)} | head, reward


def write_weights(tensors: dict[str, Tensor], path: str, kind: str | None = None) -> None:
    """Write tensors as safetensors, of a critic with its kind in the file's header."""
    contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    # one entry: safetensors writes several in any order, and equal files would differ
    header = {"format": "pt"} if kind is None else {KIND: kind}
    save_file(contiguous, path, metadata=header)


def check_has_adapter(policy: PeftModel, name: str) -> None:
    """Raise if an adapter was merged or unloaded."""
    if not adapter_weights(policy, name):
        raise ValueError(
            "The policy has no adapter any more; train and call `save_model()` before "
            "`merge_and_unload()` or `unload()`, or save what they return."
        )


def save_adapter(policy: PeftModel, name: str, output_dir: str, weights: dict[str, Tensor]) -> None:
    """Write an adapter as PEFT does, with these weights by parameter name."""
    check_has_adapter(policy, name)
    tensors = adapter_weights(policy, name, weights)
    os.makedirs(output_dir, exist_ok=True)
    config = copy(policy.peft_config[name])
    config.inference_mode = True
    config.save_pretrained(output_dir)
    write_weights(tensors, os.path.join(output_dir, ADAPTER_WEIGHTS))


def digest_of_weights(tensors: Iterable[Tensor]) -> str:
    """Digest of a few numbers of each tensor. All ranks must call it."""
    digest = hashlib.sha256()
    for x in tensors:
        with gathered([x]):
            sample = x.detach().flatten()[:: max(x.numel() // SAMPLED_WEIGHTS, 1)]
            digest.update(sample.cpu().contiguous().view(uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
