"""Adapters on one base: adding, copying, reading and writing them."""

from collections.abc import Mapping
from copy import copy

from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from torch import Tensor, nn

from ..distributed import set_weights


def check_fit(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise a `ValueError` that names the first tensor whose name or shape differs."""
    for key, tensor in expected.items():
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))  # over all ranks under ZeRO-3
        actual = tuple(weights[key].shape) if key in weights else "missing"
        if actual != shape:
            raise ValueError(f"`{key}` is {actual}, the model has {shape}.")
    for key in weights.keys() - expected.keys():
        raise ValueError(f"the model has no `{key}`.")


def adapter_weights(policy: PeftModel, name: str, state_dict: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Weights of an adapter under the names PEFT saves; `state_dict` holds gathered weights of a sharded model."""
    weights = dict(policy.named_parameters()) if state_dict is None else state_dict
    return get_peft_model_state_dict(policy, state_dict=weights, adapter_name=name, save_embedding_layers=False)


def load_adapter_weights(policy: PeftModel, name: str, weights: dict[str, Tensor]) -> None:
    """Set the weights of an adapter; raise a `ValueError` if they do not fit."""
    parameters = adapter_weights(policy, name)
    check_fit(expected=parameters, weights=weights)
    set_weights(parameters, weights)


def adapter_parameters(policy: PeftModel, name: str) -> dict[str, nn.Parameter]:
    """Parameters of an adapter by their names in the model."""
    parameters = {id(x): (key, x) for key, x in policy.named_parameters()}
    return dict(parameters[id(x)] for x in adapter_weights(policy, name).values())


def add_adapter(policy: PeftModel, name: str, config: PeftConfig, keep_modules: bool = False) -> str:
    """Add a frozen, inactive adapter and return its name; `keep_modules` copies `modules_to_save` as well."""
    while name in policy.peft_config:
        name += "_"
    config = copy(config)
    config.task_type, config.inference_mode = "CAUSAL_LM", False
    if not keep_modules:
        config.modules_to_save = None  # such as the score head of a reward adapter
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
