"""Several adapters on one base: adding, copying, and switching them without losing what is trained.

PEFT freezes every adapter but the active one whenever one is added, activated or switched off; here the flags come
back.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy

from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from torch import Tensor, nn

from ..distributed import set_weights, whole_shape


def check_fit(needed: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Check that tensors read from a file are those that a model has."""
    for key, tensor in needed.items():
        whole = whole_shape(tensor)
        if key not in given or given[key].shape != whole:
            shape = tuple(given[key].shape) if key in given else "missing"
            raise ValueError(f"`{key}` is {shape}, the model has {whole}.")
    for key in given.keys() - needed.keys():
        raise ValueError(f"the model has no `{key}`.")


def adapter_weights(policy: PeftModel, name: str, state_dict: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Weights of an adapter, as PEFT saves them."""
    return get_peft_model_state_dict(policy, state_dict=state_dict, adapter_name=name, save_embedding_layers=False)


def load_adapter_weights(policy: PeftModel, name: str, weights: dict[str, Tensor]) -> None:
    """Set the weights of an adapter."""
    parameters = adapter_weights(policy, name, dict(policy.named_parameters()))
    check_fit(needed=parameters, given=weights)
    set_weights(parameters, weights)


def parameter_names(policy: PeftModel, name: str) -> dict[str, str]:
    """What the weights of an adapter are called in the model."""
    names = {id(parameter): key for key, parameter in policy.named_parameters()}
    saved = adapter_weights(policy, name, dict(policy.named_parameters()))
    return {key: names[id(parameter)] for key, parameter in saved.items()}


def adapter_parameters(policy: PeftModel, name: str) -> dict[str, nn.Parameter]:
    """Parameters of an adapter."""
    saved = set(parameter_names(policy, name).values())
    return {key: parameter for key, parameter in policy.named_parameters() if key in saved}


@contextmanager
def keeping_trained(policy: PeftModel) -> Iterator[None]:
    """Whatever is done to adapters within this context, afterwards the same one is active and the same ones train."""
    active = policy.active_adapter
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    try:
        yield
    finally:
        if policy.active_adapter != active:
            policy.set_adapter(active)
        policy.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


def free_name(policy: PeftModel, name: str) -> str:
    """A name that no adapter of the model has."""
    while name in policy.peft_config:
        name += "_"
    return name


def add_adapter(policy: PeftModel, name: str, config: PeftConfig, keep_modules: bool = False) -> str:
    """Add an adapter that is not active, and not trained."""
    name = free_name(policy, name)
    config = copy(config)
    config.task_type, config.inference_mode = "CAUSAL_LM", False
    if not keep_modules:
        config.modules_to_save = None
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others, such as PiSSA, would change the base
    with keeping_trained(policy):
        policy.add_adapter(name, config)
    return name


def _in_adapter(key: str, name: str, other: str) -> str:
    parts = key.split(".")
    last = len(parts) - 1 - parts[::-1].index(name)  # a module may be called the same
    return ".".join([*parts[:last], other, *parts[last + 1 :]])


def copy_adapter(policy: PeftModel, source: str, target: str) -> None:
    """Copy the weights of one adapter into another of the same config."""
    weights = dict(policy.named_parameters())
    for key in adapter_parameters(policy, source):
        weights[_in_adapter(key, source, target)].data.copy_(weights[key].data)
