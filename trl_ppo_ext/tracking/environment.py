"""`trl-ppo env`: versions and hardware, for a bug report or beside a run's results."""

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    "trl_ppo_ext torch transformers trl peft accelerate datasets bitsandbytes deepspeed safetensors huggingface_hub "
    "tokenizers"
).split()


def environment() -> dict[str, Any]:
    """Versions and hardware; nothing that says whose machine it is: no names, paths, or environment variables."""
    import torch

    on_cuda = torch.cuda.is_available()
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {"model": _cpu_model(), "cores": _cores(), "threads": torch.get_num_threads()},
        "memory_gib": _memory(),
        "cuda": torch.version.cuda,
        "bf16": bool(on_cuda and torch.cuda.is_bf16_supported()),
        "gpus": [_gpu(torch.cuda.get_device_properties(number)) for number in range(torch.cuda.device_count())],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):  # not every system says it
        return None


def _gpu(properties: Any) -> dict[str, Any]:
    capability = f"{properties.major}.{properties.minor}"
    return {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1), "capability": capability}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def main(args: argparse.Namespace) -> None:
    """Print the environment as a list in Markdown."""
    found = environment()
    cpu, gpus = found["cpu"], found["gpus"]
    lines = {name: number or "not installed" for name, number in found["packages"].items()}
    lines |= {
        "Python": found["python"],
        "system": found["system"],
        "CPU": f"{cpu['model']}, {cpu['cores']} cores usable, torch uses {cpu['threads']} threads",
        "memory": "unknown" if found["memory_gib"] is None else f"{found['memory_gib']} GiB",
        "CUDA of torch": found["cuda"] or "none",
        "GPUs": ", ".join(f"{x['name']} ({x['memory_gib']} GiB, compute {x['capability']})" for x in gpus) or "none",
        "bfloat16 on the GPU": "yes" if found["bf16"] else "no",
    }
    for name, value in lines.items():
        print(f"- {name}: {value}")
