"""Sizes of models and adapters, read off configs.

Models are made on the `meta` device, where tensors have no memory.
"""

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# what a decoder layer consists of whose activations the formulas of `phases` describe
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"q_norm", "k_norm"}


@dataclass(frozen=True)
class ModelSizes:
    """What of a model takes memory."""

    hidden: int  # width of the hidden states
    intermediate: int  # width within the MLP
    layers: int  # decoder layers
    heads: int  # attention heads
    kv_heads: int  # heads of keys and values
    head_dim: int  # width of a head
    vocabulary: int  # rows of the output projection
    linears: tuple[tuple[int, int], ...] = field(repr=False)
    others: int = 0  # parameters that it leaves alone: embeddings, output projection or score head, norms, biases
    head_norms: bool = False  # whether queries and keys are normalised

    @property
    def parameters(self) -> int:
        """All parameters; tied ones count once."""
        return sum(map(math.prod, self.linears)) + self.others

    @property
    def largest_linear(self) -> int:
        """Numbers in the largest weight that a quantised load quantises."""
        return max(map(math.prod, self.linears), default=0)

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys of a token, or of all values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class AdapterSizes:
    """What of an adapter takes memory."""

    parameters: int  # its parameters
    ranks: dict[str, int]  # rank by kind of linear layer that it adapts, such as "q_proj"
    tensors: tuple[int, ...] = field(default=(), repr=False)  # numbers in each of its tensors


def on_meta(config: PreTrainedConfig, classifier: bool = False, trust_remote_code: bool = False) -> PreTrainedModel:
    """A model without memory."""
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    config = copy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # sizes are those before quantisation
    try:
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        kind = "sequence classifier" if classifier else "causal language model"
        raise ValueError(f"{type(config).__name__} is not the config of a {kind}.") from None


def _layers(model: PreTrainedModel) -> list[Any]:
    trunk = getattr(model, model.base_model_prefix, model)
    found = getattr(trunk, "layers", None)
    expected = f"decoder layers like Llama's or Qwen2's ({', '.join(sorted(LAYER))})"
    if not isinstance(found, nn.ModuleList) or not len(found):
        raise ValueError(f"{type(model).__name__} cannot be estimated: it has no list of {expected}.")
    layers: list[Any] = list(found)
    for layer in layers:
        children = {name for name, _ in layer.named_children()}
        if children != LAYER:
            raise ValueError(
                f"{type(model).__name__} cannot be estimated: its layers hold {', '.join(sorted(children))}, and only "
                f"{expected} are known. Run a few steps and read torch.cuda.max_memory_allocated() instead."
            )
        for part, names in ((layer.self_attn, {*ATTENTION}), (layer.mlp, {*MLP})):
            linears = {name for name, x in part.named_children() if any(True for _ in x.parameters())}
            if linears - HEAD_NORMS != names:
                raise ValueError(
                    f"{type(model).__name__} cannot be estimated: its {type(part).__name__} holds "
                    f"{', '.join(sorted(linears))}, and only {', '.join(sorted(names))} are known."
                )
    return layers


def model_sizes(model: PreTrainedModel) -> ModelSizes:
    """Read the sizes of a model."""
    layers = _layers(model)
    config = model.config.get_text_config()
    # the last module and what is tied to it are never quantised; all else that is linear lies in the layers
    linears = tuple(
        (x.out_features, x.in_features) for layer in layers for x in layer.modules() if isinstance(x, nn.Linear)
    )
    attention = layers[0].self_attn
    head_dim = attention.head_dim
    return ModelSizes(
        hidden=config.hidden_size,
        intermediate=layers[0].mlp.gate_proj.out_features,
        layers=len(layers),
        heads=attention.q_proj.out_features // head_dim,
        kv_heads=attention.k_proj.out_features // head_dim,
        head_dim=head_dim,
        vocabulary=config.vocab_size,
        linears=linears,
        others=sum(x.numel() for x in model.parameters()) - sum(map(math.prod, linears)),
        head_norms=hasattr(attention, "q_norm"),
    )


def adapter_sizes(model: PreTrainedModel, peft_config: PeftConfig) -> AdapterSizes:
    """Read the sizes of an adapter, by adding it to a model."""
    if not isinstance(peft_config, LoraConfig):
        raise ValueError(
            f"The adapter is {peft_config.peft_type}, and only LoRA can be estimated; pass a `LoraConfig`."
        )
    for name in ("use_dora", "modules_to_save", "target_parameters"):
        if getattr(peft_config, name, None):
            raise ValueError(
                f"`{name}={getattr(peft_config, name)!r}` keeps activations that are not known here; leave it out to "
                "get an estimate."
            )
    peft_config = copy(peft_config)
    peft_config.inference_mode = False  # as it is saved; then nothing would count as the adapter's
    with torch.device("meta"):
        policy = get_peft_model(model, peft_config)
    ranks: dict[str, int] = {}
    for name, module in policy.named_modules():
        if isinstance(module, LoraLayer):
            kind = name.rpartition(".")[2]
            ranks[kind] = max(ranks.get(kind, 0), *module.r.values())
    if ranks.keys() - {*ATTENTION, *MLP}:
        raise ValueError(
            f"The adapter sits on {', '.join(sorted(ranks))}; only adapters on {', '.join((*ATTENTION, *MLP))} can be "
            "estimated."
        )
    tensors = tuple(x.numel() for x in policy.parameters() if x.requires_grad)
    return AdapterSizes(sum(tensors), ranks, tensors)


def weight_bytes(sizes: ModelSizes, width: int, quantization: str | None = None, double: bool = False) -> int:
    """Memory of a model's weights.

    4-bit weights have a float32 constant for each block of 64, or with double quantisation one byte, and a float32 for
    each 256 of those; besides that two small tables. 8-bit weights have a float32 for each row.
    """
    if quantization is None:
        return sizes.parameters * width
    if quantization == "int8":
        quantized = sum(rows * (columns + 4) for rows, columns in sizes.linears)
    else:
        quantized = sum(_four_bit(math.prod(shape), double) for shape in sizes.linears)
    return sizes.others * width + quantized


def _four_bit(numbers: int, double: bool) -> int:
    blocks, table = math.ceil(numbers / 64), 16 * 4
    if not double:
        return math.ceil(numbers / 2) + 4 * blocks + table
    return math.ceil(numbers / 2) + blocks + 4 * math.ceil(blocks / 256) + 256 * 4 + 4 + table


def dtype_width(dtype: Any) -> int:
    """Bytes of a number."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"There is no dtype {dtype!r}; use 'bfloat16', 'float16' or 'float32'.")
    return found.itemsize
