"""Write a 4-bit base as a plain checkpoint, e.g. for vLLM: `python recipes/dequantize.py MODEL
OUTPUT_DIR`."""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from huggingface_hub import snapshot_download
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import CONFIG_NAME

from trl_ppo_ext.checkpoints.atomic import STAGING, publish
from trl_ppo_ext.checkpoints.files import CheckpointError
from trl_ppo_ext.modeling.adapters import public_name
from trl_ppo_ext.modeling.loading import check_model_arguments, hub_kwargs, load_base, load_config
from trl_ppo_ext.tools.memory import on_meta

# tokenizer, generation config, code
FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the checkpoint, and print its path."""
    # named as the arguments of a run
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    dtypes = ("bfloat16", "float16", "float32")
    add("model", metavar="MODEL", help="id or path of the base")
    add("output_dir", metavar="OUTPUT_DIR", help="directory of the checkpoint, empty or missing")
    add("--dtype", choices=dtypes, default="bfloat16", help="dtype in which the run computes")
    add(
        "--bnb_4bit_quant_type",
        choices=("nf4", "fp4"),
        default="nf4",
        help="quantization type of the run",
    )
    add(
        "--use_bnb_nested_quant",
        action="store_true",
        help="double quantization, if the run uses it",
    )
    add(
        "--device",
        default="auto",
        help="device that quantizes, e.g. cuda:0; auto is a GPU if there is one",
    )
    add("--revision", default="main", help="branch, tag or commit of the base on the Hub")
    add("--trust_remote_code", action="store_true", help="run the model's own code")

    options = parser.parse_args(argv)
    final = Path(options.output_dir).absolute()
    if final.exists() and any(final.iterdir()):
        raise ValueError(
            f"`OUTPUT_DIR` must be empty or missing, got `{final}` with files; use another "
            "directory."
        )
    staged = final.parent / f"{STAGING}-{final.name}"
    shutil.rmtree(staged, ignore_errors=True)  # of a script that was killed
    try:
        write(options, staged)
        publish(staged, final)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    print(f"{final} ({sum(file.stat().st_size for file in final.iterdir()) / 1e9:.1f} GB)")


def plain_weights(
    base: PreTrainedModel, plain: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of a 4-bit base before any forward, for the same model without quantization, one
    at a time."""
    for name in sorted(plain.state_dict().keys() - plain.all_tied_weights_keys.keys()):
        x: Any = base.get_parameter_or_buffer(name)
        state = getattr(x, "quant_state", None)
        if state is not None:
            weight = dequantize_4bit(x.data, state).to(plain.dtype)  # as in the layer's forward
            if x.module.source_cls is Conv1D:
                x = weight.T
            else:
                x = weight
        yield name, x.detach().cpu()


def write(options: argparse.Namespace, directory: Path) -> None:
    """Quantize a base as a run does, write it dequantized, and compare the files with it."""
    # 1. Quantize. A base that is saved in 4 bits stays as it is.
    model = options.model
    dtype = options.dtype
    revision = options.revision
    trusted = options.trust_remote_code
    init_kwargs = {"dtype": dtype, "revision": revision}
    args: Any = SimpleNamespace(
        bf16=False, fp16=False, trust_remote_code=trusted, model_init_kwargs=init_kwargs
    )
    kind = options.bnb_4bit_quant_type
    is_double = options.use_bnb_nested_quant
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=is_double
    )
    check_model_arguments(model, args, config, None)
    load_config("MODEL", model, hub_kwargs(args))  # for its error
    if torch.cuda.is_available():
        fastest = "cuda"
    elif options.device.startswith("cuda"):
        raise ValueError(
            f"`--device {options.device}` needs a GPU, and none is available; use 'auto' or 'cpu'."
        )
    else:
        fastest = "cpu"
    base = load_base(
        model, args, config, torch.device(fastest if options.device == "auto" else options.device)
    )
    config = base.config.quantization_config
    if not config.load_in_4bit:
        raise ValueError(
            f"`MODEL` must be unquantized or saved in 4 bits, got `{model}` in 8 bits; use another "
            "base."
        )

    # 2. Write the weights, copy the other files, and record the origin.
    plain = on_meta(base.config, trust_remote_code=trusted)
    plain.save_pretrained(directory, state_dict=dict(plain_weights(base, plain)))
    is_local = os.path.isdir(model)
    source = Path(
        model if is_local else snapshot_download(model, revision=revision, allow_patterns=FILES)
    )
    for file in (file for pattern in FILES for file in source.glob(pattern)):
        if file.name != CONFIG_NAME and not file.name.endswith(".index.json"):
            shutil.copyfile(file, directory / file.name)
    record = {
        "base_model": public_name(model),
        "revision": None if is_local else source.name,
        "dtype": dtype,
    }
    record |= {
        "quant_type": config.bnb_4bit_quant_type,
        "double_quant": config.bnb_4bit_use_double_quant,
    }
    (directory / "dequantized.json").write_text(json.dumps(record, indent=1))

    # 3. Load the files as a server does, and compare.
    written = load_base(str(directory), args, None, torch.device("cpu"))
    for name, x in plain_weights(base, written):
        y = written.get_parameter_or_buffer(name)
        if x.dtype != y.dtype or not torch.equal(x, y):
            raise CheckpointError(
                f"`{name}` in the files must equal that of the 4-bit base, but differs; try again."
            )


if __name__ == "__main__":
    main()
