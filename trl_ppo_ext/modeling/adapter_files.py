"""Adapters as files: in a directory or on the Hub, with the head saved next to them."""

import json
import os
from typing import NamedTuple

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from peft import PeftConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
VALUE_HEAD = "value_head.safetensors"
CRITIC_FOLDER = "critic"
CRITIC_NUMBERS = "critic.json"  # next to a pretrained critic: its training and its explained variance
SCORE_HEADS = ("score", "classifier")


def public_name(base: str) -> str:
    """Name of a base model for a shared file: only the last part of a path."""
    return os.path.basename(os.path.normpath(base)) if os.path.isdir(base) else base


class AdapterFileError(ValueError):
    """Raised when a file of an adapter is missing, or the adapter belongs to another base."""


class AdapterFiles(NamedTuple):
    """An adapter as it was saved."""

    config: PeftConfig  # its config
    weights: dict[str, Tensor]  # its weights, without heads
    head: dict[str, Tensor]  # weight and bias of the score head that was saved with it; empty without one


def find_file(path: str, name: str, folder: str = "") -> str | None:
    """A file of an adapter, from a directory or the Hub."""
    if os.path.isdir(path):
        local = os.path.join(path, folder, name)
        return local if os.path.isfile(local) else None
    try:
        return hf_hub_download(path, name, subfolder=folder or None)
    except LocalEntryNotFoundError as error:
        raise AdapterFileError(
            f"`{name}` of `{path}` is not in the cache, and the Hub cannot be reached ({error}); check the connection."
        ) from None
    except EntryNotFoundError:
        return None
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise AdapterFileError(
            f"`{path}` is no directory here, and no repository on the Hub that can be read ({error}); check the path."
        ) from None


def _damaged(file: str, error: Exception) -> AdapterFileError:
    return AdapterFileError(f"`{file}` cannot be read ({type(error).__name__}: {error}); copy or save it anew.")


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
        with open(config_file) as stream:
            return PeftConfig.from_peft_type(**json.load(stream))
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(config_file, error) from error


def read_adapter(path: str, folder: str = "") -> AdapterFiles:
    """Read an adapter; only safetensors are read."""
    place = os.path.join(path, folder) if folder else path
    config = read_adapter_config(path, folder)
    if config is None:
        raise AdapterFileError(f"`{place}` has no {ADAPTER_CONFIG}; it is no PEFT adapter.")
    if getattr(config, "bias", "none") != "none":
        raise AdapterFileError(
            f"The adapter `{place}` has `bias={config.bias!r}`: it would put its biases into the base, which policy "
            "and reference share. Train it with `bias='none'`; a reward can be merged into its base and be a model of "
            "its own."
        )
    weights_file = find_file(path, ADAPTER_WEIGHTS, folder)
    if weights_file is None:
        raise AdapterFileError(
            f"`{place}` has no {ADAPTER_WEIGHTS}; only safetensors are read. Save the adapter anew."
        )
    weights = read_weights(weights_file)
    of_head = {
        key: x for key, x in weights.items() if any(f".{head}." in key for head in SCORE_HEADS) and "lora_" not in key
    }
    head = {key.split(".")[-1]: x for key, x in of_head.items()}
    return AdapterFiles(config, {key: x for key, x in weights.items() if key not in of_head}, head)


def check_same_base(path: str, config: PeftConfig, base: str, remedy: str) -> None:
    """Raise an error for an adapter that was trained on another base."""
    trained_on = config.base_model_name_or_path or ""
    same = trained_on == base or (os.path.isdir(base) and os.path.realpath(trained_on) == os.path.realpath(base))
    if not (base and same):
        raise AdapterFileError(
            f"The adapter `{path}` was trained on {trained_on or 'a base without a name'!r}, the policy's base is "
            f"{base or 'without a name'!r}; an adapter means nothing on another base. {remedy}"
        )
