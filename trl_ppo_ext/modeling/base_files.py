"""Whether a base in memory is that of its files, which a published adapter names."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

# by their names in safetensors files
PLAIN_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# casts that a base may have been through between its file and its present dtype
ROUNDINGS: tuple[tuple[torch.dtype, ...], ...] = (
    (),
    (torch.bfloat16,),
    (torch.float16,),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
)


def check_base_is_in_its_files(model: Any) -> None:
    """Raise a `ValueError` if weights of a base differ from the files that its config names.

    Three rows of each tensor are compared. Tensors that are quantized, or have other names or
    layouts in the files, are not, nor is a base whose files are not on this machine.
    """
    name = model.config._name_or_path or ""
    differing = sorted(
        _differing(model, _files_of_weights(name, getattr(model.config, "_commit_hash", None)))
    )
    if differing:
        raise ValueError(
            f"`model` must have the weights of its files in `{name}`, which its adapter will name "
            f"as the base, got {len(differing)} others, e.g. `{differing[0]}`. If you merged an "
            "adapter or resized the embedding, save the model with its tokenizer by "
            "`save_pretrained`, and load it from there. An adapter that changes the base, e.g. PiSSA "
            "or one that was saved with an embedding, is not supported."
        )


def _files_of_weights(name: str, revision: str | None) -> dict[str, str]:
    """Paths of the safetensors files on this machine, by name of a tensor."""

    def find(file: str) -> str | None:
        if os.path.isdir(name):
            path = os.path.join(name, file)
            if os.path.isfile(path):
                return path
            return None
        try:
            cached = try_to_load_from_cache(name, file, revision=revision)
        except HFValidationError:  # neither a directory nor an id, e.g. empty
            return None
        if isinstance(cached, str):
            return cached
        return None

    path = find(SAFE_WEIGHTS_NAME)
    if path is not None:
        with safe_open(path, "pt") as stored:
            return dict.fromkeys(stored.keys(), path)
    path = find(SAFE_WEIGHTS_INDEX_NAME)
    if path is None:
        return {}
    shards = json.loads(Path(path).read_text())["weight_map"]
    found = {shard: find(shard) for shard in set(shards.values())}
    return {key: place for key, shard in shards.items() if (place := found[shard]) is not None}


def _differing(model: Any, files: dict[str, str]) -> Iterator[str]:
    """Names of plain weights of the base that differ from the files."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, "pt")) for path in set(files.values())}
        for name, parameter in base.named_parameters():
            # the name that it has without an adapter; files of the decoder alone do not have its
            # prefix
            name = name.replace(".base_layer", "").replace(".original_module", "")
            key = name if name in files else name.removeprefix(f"{base.base_model_prefix}.")
            if key in files and _is_plain(parameter):
                stored = opened[files[key]].get_slice(key)
                if stored.get_dtype() in PLAIN_DTYPES and not _is_same(parameter.detach(), stored):
                    yield name


def _is_plain(parameter: Tensor) -> bool:
    """Whether it is a whole tensor of numbers: neither quantized, nor elsewhere (as with
    ZeRO-3)."""
    is_whole = parameter.dim() > 0 and parameter.numel() > 0 and not parameter.is_meta
    is_plain = type(parameter.data) is Tensor
    return is_whole and is_plain and parameter.dtype in PLAIN_DTYPES.values()


def _is_same(weight: Tensor, stored: Any) -> bool:
    """Whether a weight has the shape and three rows of a file, or a rounding of them."""
    shape = list(weight.shape)
    if shape != stored.get_shape():
        # while it loads experts, transformers swaps axes of some, under their own names
        return weight.dim() > 2 and sorted(shape) == sorted(stored.get_shape())
    if weight.dim() > 2 and shape[-1] == shape[-2]:  # it may have swapped them
        return True
    rows = [0, len(weight) // 2, len(weight) - 1]
    kept = torch.cat([stored[row : row + 1] for row in rows])
    here = weight[rows].to("cpu")
    return any(torch.equal(_cast(kept, [*path, here.dtype]), here) for path in ROUNDINGS)


def _cast(x: Tensor, dtypes: list[torch.dtype]) -> Tensor:
    """Cast from one dtype to the next."""
    for dtype in dtypes:
        x = x.to(dtype)
    return x
