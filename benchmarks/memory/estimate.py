"""`estimate_memory` against the peaks of runs, by phase.

    OMP_NUM_THREADS=1 python benchmarks/memory/estimate.py [NAME ...]
    # the table of docs/speed_and_memory.md; runs nothing:
    python benchmarks/memory/estimate.py --table

Each case runs two PPO steps in its own process. On a CPU a dispatch mode follows every storage from
the operation that makes it until it is freed, whatever malloc does; resident memory since the
imports is printed beside it. On a GPU the peak is `torch.cuda.max_memory_allocated`. Prints a
table, and without names writes benchmarks/results/estimate.json. Takes some minutes.
"""

import importlib.metadata
import json
import platform
import resource
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    Qwen2Config,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
from common import LORA, SHAPES, Shape, model, prompts, resident, tokenizer

from trl_ppo_ext import PPOConfig, PPOTrainer, RewardAdapter, estimate_memory
from trl_ppo_ext.commands.estimate import changed
from trl_ppo_ext.ppo import rollouts
from trl_ppo_ext.tools.memory import on_meta

RESULTS = Path(__file__).resolve().parents[1] / "results" / "estimate.json"
MIB = 2**20
# the estimate has no "forward", since an update takes more
PHASES = ("generate", "forward", "score", "update")


@dataclass(frozen=True)
class Case:
    """A run: shape and dtype of the model, fields of the config, and the reward."""

    shape: Shape
    dtype: str = "bf16"
    fields: dict[str, Any] = field(default_factory=dict)
    # dtype or quantization of one of the same shape, or "adapter"; else a function
    classifier: str | None = None
    quantized: bool = False  # NF4 base
    family: str = "llama"  # others have half as many heads for keys and values, and tied embeddings
    lora: dict[str, Any] = field(default_factory=dict)
    # whether prompts have one length, so that attention needs no padding; else estimated
    same_length: bool = True


WIDE = Shape(32000, 512, 4, 8, 64, 64)
LONG = Shape(2048, 256, 4, 4, 192, 192)
CASES = {
    "fp32": Case(SHAPES["small"], "fp32"),
    "bf16": Case(SHAPES["small"]),
    "bf16, prompts of several lengths": Case(SHAPES["small"], same_length=False),
    "bf16, critic adapter": Case(SHAPES["small"], fields={"critic": "adapter"}),
    "bf16, checkpointing": Case(SHAPES["small"], fields={"gradient_checkpointing": True}),
    "fp32, checkpointing, critic adapter": Case(
        SHAPES["small"], "fp32", {"gradient_checkpointing": True, "critic": "adapter"}
    ),
    "fp32, long, SGD, LoRA of q and v": Case(
        LONG, "fp32", {"optim": "sgd"}, lora={"target_modules": ["q_proj", "v_proj"], "r": 8}
    ),
    "bf16, wide vocabulary, fp32 classifier": Case(
        WIDE, fields={"per_device_train_batch_size": 2, "num_mini_batches": 4}, classifier="fp32"
    ),
    "bf16, exact KL, entropy bonus": Case(
        WIDE, fields={"kl_estimator": "exact", "kl_placement": "both", "entropy_coef": 0.01}
    ),
    "bf16, large rollout, micro-batches of 1": Case(
        SHAPES["small"],
        fields={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 48},
    ),
    "bf16, Qwen3, prompts of several lengths": Case(
        SHAPES["small"], same_length=False, family="qwen3"
    ),
    "bf16, reward adapter, scored 48 at a time": Case(
        SHAPES["small"],
        fields={
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 24,
            "per_device_generation_batch_size": 8,
            "per_device_reward_batch_size": 48,
        },
        classifier="adapter",
    ),
    "NF4 base, NF4 classifier": Case(SHAPES["small"], classifier="nf4", quantized=True),
}


class Tracker(TorchDispatchMode):
    """Bytes of all live tensors, and their peak by phase; each storage counts once, a kernel's
    own memory does not."""

    def __init__(self):
        super().__init__()
        self.alive = 0
        self.phase = "load"
        self.peaks: dict[str, int] = {}
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Follow a tensor's storage."""
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta" or id(storage) in self.seen:
            return
        self.seen.add(id(storage))  # the object lives as long as the storage does
        self.alive += storage.nbytes()
        weakref.finalize(storage, self._freed, id(storage), storage.nbytes())
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.alive)

    def _freed(self, key: int, size: int) -> None:
        self.seen.remove(key)
        self.alive -= size

    def enter(self, phase: str) -> None:
        """Count peaks for a phase from now on."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.alive)


class CUDATracker:
    """The same from the allocator of a GPU."""

    def __init__(self):
        self.phase = "load"
        self.peaks = {}

    def __enter__(self):
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *error):
        self.enter("end")

    def enter(self, phase: str) -> None:
        """Count peaks for a phase from now on."""
        torch.cuda.synchronize()
        self.peaks[self.phase] = max(
            self.peaks.get(self.phase, 0), torch.cuda.max_memory_allocated()
        )
        torch.cuda.reset_peak_memory_stats()
        self.phase = phase


def in_phase(tracker: Any, phase: str, function: Callable) -> Callable:
    """Wrap a function so that its peak counts for a phase; the update follows."""

    def run(*args, **kwargs):
        tracker.enter(phase)
        try:
            return function(*args, **kwargs)
        finally:
            tracker.enter("update")

    return run


def short(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]


def texts(case: Case, rows: int) -> list[str]:
    """Prompts; unless `same_length`, every second one is half as long."""
    full = prompts(case.shape, rows)
    if case.same_length:
        return full
    half = case.shape.prompt // 2
    return [p if n % 2 else " ".join(p.split()[:half]) for n, p in enumerate(full)]


def arguments(case: Case, directory: str) -> dict[str, Any]:
    """Arguments of both the trainer and the estimate."""
    shape = case.shape
    settings = {
        "use_cpu": not torch.cuda.is_available(),
        "critic": "head",
        "bf16": case.dtype == "bf16",
        "per_device_train_batch_size": shape.batch,
        "num_ppo_epochs": 2,
        "num_mini_batches": 1,
        "kl_coef": 0.05,
        "gradient_checkpointing": False,
        "max_completion_length": shape.response,
        "generation_kwargs": {"min_new_tokens": shape.response},
        "reward_quantization": "nf4" if case.classifier == "nf4" else "none",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | case.fields
    args = PPOConfig(directory, **settings)
    args.max_steps = 2 * args.num_ppo_epochs * args.num_mini_batches
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    return {
        "args": args,
        "peft_config": LoraConfig(**LORA | case.lora),
        "quantization_config": quantization if case.quantized else None,
    }


def of_family(llama: Any, family: str) -> Any:
    """The config of another kind of model, of about the same size."""
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "max_position_embeddings "
    )
    names += "bos_token_id eos_token_id pad_token_id"
    same = {name: getattr(llama, name) for name in names.split()}
    heads = llama.num_attention_heads // 2
    return AutoConfig.for_model(
        family, **same, num_key_value_heads=heads, tie_word_embeddings=True, head_dim=64
    )


def saved_models(case: Case, directory: Path) -> tuple[str, str]:
    """Directories of the policy and of the classifier."""
    weights = {"bf16": torch.bfloat16, "fp32": torch.float32}
    dtypes = {
        "base": weights[case.dtype],
        "classifier": weights.get(case.classifier or "", weights[case.dtype]),
    }
    for name, dtype in dtypes.items():
        made = model(case.shape, dtype, classifier=name == "classifier", seed=len(name))
        if case.family != "llama" and name == "base":
            made = AutoModelForCausalLM.from_config(of_family(made.config, case.family)).to(dtype)
        made.save_pretrained(directory / name)
        tokenizer(case.shape).save_pretrained(directory / name)
    if case.classifier == "adapter":
        scorer = AutoModelForSequenceClassification.from_pretrained(
            directory / "base", num_labels=1
        )
        get_peft_model(scorer, LoraConfig(**LORA | {"task_type": "SEQ_CLS"})).save_pretrained(
            directory / "adapter"
        )
    return str(directory / "base"), str(directory / "classifier")


def rewards(case: Case, classifier: str) -> Any:
    """Reward of the run; a classifier that is not quantized is loaded here, in its own dtype."""
    if case.classifier == "adapter":
        return RewardAdapter(str(Path(classifier).parent / "adapter"), check_base=False)
    if case.classifier in (None, "nf4"):
        return short if case.classifier is None else classifier
    if case.classifier == "bf16":
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    return AutoModelForSequenceClassification.from_pretrained(classifier, dtype=dtype)


def measure(case: Case, directory: str) -> dict[str, Any]:
    """Run two PPO steps; return the peak of each phase and resident memory, in MiB."""
    base, classifier = saved_models(case, Path(directory))
    baseline = resident()
    gpu = torch.cuda.is_available()
    if gpu:
        tracker = CUDATracker()
    else:
        tracker = Tracker()
    rows = Dataset.from_dict({"prompt": texts(case, 4 * case.shape.batch)})
    with tracker:
        kwargs = arguments(case, directory)
        trainer = PPOTrainer(
            base,
            rewards(case, classifier),
            train_dataset=rows,
            processing_class=tokenizer(case.shape),
            **kwargs,
        )
        models = [trainer.model, *(getattr(x, "model", None) for x in trainer.components.rewards)]
        for loaded in [] if gpu else [x for x in models if isinstance(x, torch.nn.Module)]:
            # tensors read from a file come from no operation
            for tensor in [*loaded.parameters(), *loaded.buffers()]:
                tracker.add(tensor)
        for reward in trainer.components.rewards:
            reward.score = in_phase(tracker, "score", reward.score)
        generator = trainer.components.player.generator
        generator.generate = in_phase(tracker, "generate", generator.generate)
        with patch.object(
            rollouts, "score_tokens", in_phase(tracker, "forward", rollouts.score_tokens)
        ):
            trainer.train()
    return {
        "phases": {phase: tracker.peaks.get(phase, 0) / MIB for phase in ("load", *PHASES)},
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - baseline,
    }


def estimated(case: Case, directory: str) -> Any:
    """Estimate a case from its configs."""
    base = Path(directory) / "base"
    classifier = Path(directory) / "classifier"
    reward: Any = rewards(case, str(classifier)) if case.classifier in ("nf4", "adapter") else None
    if case.classifier in ("bf16", "fp32"):
        dtype = {"fp32": torch.float32}.get(case.classifier, torch.bfloat16)
        reward = on_meta(AutoConfig.from_pretrained(classifier), classifier=True).to(dtype)
    return estimate_memory(
        AutoConfig.from_pretrained(base),
        reward_funcs=reward,
        prompt_length=case.shape.prompt,
        device="cuda" if torch.cuda.is_available() else "cpu",
        **arguments(case, directory),
    )


def one(name: str) -> None:
    """Measure one case, and print it as the last line."""
    with tempfile.TemporaryDirectory() as directory:
        measured = measure(CASES[name], directory)
        estimate = estimated(CASES[name], directory)
    numbers = {
        "peak": estimate.peak / MIB,
        "phases": (estimate.phases.sum() / MIB).to_dict(),
        "parts": {
            phase: (parts.dropna() / MIB).to_dict() for phase, parts in estimate.phases.items()
        },
    }
    print("\n" + json.dumps({"name": name, "measured": measured, "estimated": numbers}), flush=True)


def hardware() -> dict[str, Any]:
    """Hardware and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    else:
        gpu = None
    packages = ("torch", "transformers", "peft", "trl", "bitsandbytes")
    versions = {name: importlib.metadata.version(name) for name in packages} | {
        "python": platform.python_version()
    }
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(names),
        "gpu": gpu,
        "versions": versions,
    }


def main(names: list[str]) -> None:
    results = []
    print(f"{'MiB':42} {'estimated':>9} {'measured':>9} {'ratio':>6} {'resident':>9}   by phase")
    for name in names or CASES:
        command = [sys.executable, __file__, "--one", name]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            sys.exit(f"{name} failed:\n{process.stderr[-3000:]}")
        result = json.loads(process.stdout.splitlines()[-1])
        results.append(result)
        measured = result["measured"]["phases"]
        estimate = result["estimated"]["phases"]
        peak = max(measured[phase] for phase in PHASES)
        ratios = "  ".join(
            f"{phase} {estimate[phase]:.1f}/{measured[phase]:.1f}" for phase in estimate
        )
        ratio = result["estimated"]["peak"] / peak
        resident = result["measured"]["resident"]
        print(
            f"{name:42} {result['estimated']['peak']:9.1f} {peak:9.1f} {ratio:6.3f} "
            f"{resident:9.1f}   {ratios}"
        )
        sys.stdout.flush()
    if not names:
        summary = {"hardware": hardware(), "unit": "MiB", "results": results}
        RESULTS.write_text(json.dumps(summary, indent=1) + "\n")


# hidden size, intermediate size, layers, heads, key-value heads, vocabulary, tied embeddings
MODELS = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
}


def config_of(name: str, **more: Any) -> Qwen2Config:
    """The config of a known model, from its sizes."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = MODELS[name]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **more,
    )


def table() -> str:
    """The table of docs/speed_and_memory.md."""
    lines = [
        "| base | bf16 | NF4 | bf16, checkpointing | NF4, checkpointing |",
        "|---|---:|---:|---:|---:|",
    ]
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "max_completion_length": 512,
    }
    settings |= {
        "per_device_generation_batch_size": 32,
        "use_cpu": True,
        "bf16": True,
        "report_to": "none",
    }
    settings |= {"num_mini_batches": 1, "kl_coef": 0.05, "gradient_checkpointing": False}
    with tempfile.TemporaryDirectory() as directory:
        config_of("Qwen2.5-0.5B", num_labels=1).save_pretrained(directory)
        for name in MODELS:
            plain = estimate_memory(
                config_of(name), PPOConfig(directory, **settings), reward_funcs=directory
            )
            runs = [plain, changed(plain, {"gradient_checkpointing": True})]
            runs = [x for run in runs for x in (run, changed(run, {"load_in_4bit": True}))]
            lines.append(f"| {name} | {' | '.join(f'{run.needed / 2**30:.1f}' for run in runs)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2])
    elif sys.argv[1:] == ["--table"]:
        print(table())
    else:
        main(sys.argv[1:])
