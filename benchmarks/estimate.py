"""What `estimate_memory` says against what runs take, by phase.

    OMP_NUM_THREADS=1 python benchmarks/estimate.py [NAME ...]

Each configuration runs two PPO steps in a process of its own. On a CPU a dispatch mode follows every storage from the
operation that makes it until it is freed: exact, whatever malloc does; resident memory above that after the imports is
told beside it. On a GPU it is `torch.cuda.max_memory_allocated`. Prints a table, and writes benchmarks/results/
estimate.json. Some minutes.
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

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from common import LORA, SHAPES, Shape, model, prompts, resident, tokenizer

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.estimate import estimate_memory

RESULTS = Path(__file__).parent / "results" / "estimate.json"
MIB = 2**20
PHASES = ("generate", "forward", "score", "update")


@dataclass(frozen=True)
class Case:
    """A run: a Llama of some shape, its dtype, what its config says, and what rewards it."""

    shape: Shape
    dtype: str = "bf16"
    fields: dict[str, Any] = field(default_factory=dict)
    classifier: str | None = None  # dtype or quantisation of a classifier of the same shape; else a function
    quantized: bool = False  # NF4 base
    lora: dict[str, Any] = field(default_factory=dict)
    same_length: bool = True  # whether prompts have one length, so that no attention mask is needed


WIDE = Shape(32000, 512, 4, 8, 64, 64)
LONG = Shape(2048, 256, 4, 4, 192, 192)
CASES = {
    "fp32": Case(SHAPES["small"], "fp32"),
    "bf16": Case(SHAPES["small"]),
    "bf16, prompts of several lengths": Case(SHAPES["small"], same_length=False),
    "bf16, accumulation, classifier, EMA": Case(
        SHAPES["small"],
        fields={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "ema_decay": 0.9},
        classifier="bf16",
    ),
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
    "NF4 base, NF4 classifier": Case(SHAPES["small"], classifier="nf4", quantized=True),
}


class Tracker(TorchDispatchMode):
    """Bytes of all tensors that are alive, and their peak by phase; each storage counts once.

    Operations are seen from the dispatcher: what a kernel allocates for itself while it runs is not.
    """

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
        """From now on peaks are this phase's."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.alive)


class CUDATracker:
    """The same from the allocator of a GPU."""

    def __init__(self):
        self.phase, self.peaks = "load", {}

    def __enter__(self):
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *error):
        self.enter("end")

    def enter(self, phase: str) -> None:
        """From now on peaks are this phase's."""
        torch.cuda.synchronize()
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        self.phase = phase


def in_phase(tracker: Any, phase: str, function: Callable) -> Callable:
    """The function, with its peak counted for the phase; what comes after it is the update's."""

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
    """Prompts; of several lengths, every second one is half as long."""
    whole = prompts(case.shape, rows)
    return whole if case.same_length else [p if n % 2 else p[: len(p) // 2] for n, p in enumerate(whole)]


def arguments(case: Case, directory: str) -> dict[str, Any]:
    """What trainer and estimate are both given; models are directories."""
    shape = case.shape
    settings = {
        "use_cpu": not torch.cuda.is_available(),
        "bf16": case.dtype == "bf16",
        "per_device_train_batch_size": shape.batch,
        "num_ppo_epochs": 2,
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


def saved_models(case: Case, directory: Path) -> tuple[str, str]:
    """Directories of the policy and of the classifier."""
    weights = {"bf16": torch.bfloat16, "fp32": torch.float32}
    dtypes = {"base": weights[case.dtype], "classifier": weights.get(case.classifier or "", weights[case.dtype])}
    for name, dtype in dtypes.items():
        model(case.shape, dtype, classifier=name == "classifier", seed=len(name)).save_pretrained(directory / name)
        tokenizer(case.shape).save_pretrained(directory / name)
    return str(directory / "base"), str(directory / "classifier")


def rewards(case: Case, classifier: str) -> Any:
    """What rewards the run; a classifier that is not quantised is loaded here, in its own dtype."""
    from transformers import AutoModelForSequenceClassification

    if case.classifier in (None, "nf4"):
        return short if case.classifier is None else classifier
    dtype = torch.bfloat16 if case.classifier == "bf16" else torch.float32
    return AutoModelForSequenceClassification.from_pretrained(classifier, dtype=dtype)


def measure(case: Case, directory: str) -> dict[str, Any]:
    """Run two PPO steps. The peaks of each phase, in MiB, and resident memory above the one before."""
    base, classifier = saved_models(case, Path(directory))
    baseline = resident()
    gpu = torch.cuda.is_available()
    tracker = CUDATracker() if gpu else Tracker()
    rows = Dataset.from_dict({"prompt": texts(case, 4 * case.shape.batch)})
    with tracker:
        given = arguments(case, directory)
        trainer = PPOTrainer(base, rewards(case, classifier), train_dataset=rows, **given)
        for tensor in [] if gpu else [*trainer.model.parameters(), *trainer.model.buffers()]:
            tracker.add(tensor)
        for reward in trainer.experience.rewards:
            reward.score = in_phase(tracker, "score", reward.score)
        generator, experience = trainer.experience.generator, trainer.experience
        generator.generate = in_phase(tracker, "generate", generator.generate)
        experience.score_tokens = in_phase(tracker, "forward", experience.score_tokens)
        trainer.train()
    return {
        "phases": {phase: tracker.peaks.get(phase, 0) / MIB for phase in ("load", *PHASES)},
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - baseline,
    }


def estimated(case: Case, directory: str) -> Any:
    """What is said before the run, from configs alone."""
    from transformers import AutoConfig

    base, classifier = Path(directory) / "base", Path(directory) / "classifier"
    reward = None
    if case.classifier is not None:
        reward = AutoConfig.from_pretrained(classifier)
        reward.dtype = {"fp32": torch.float32}.get(case.classifier, torch.bfloat16)
    return estimate_memory(
        AutoConfig.from_pretrained(base),
        reward_funcs=reward,
        prompt_length=case.shape.prompt,
        same_length=case.same_length,
        device="cuda" if torch.cuda.is_available() else "cpu",
        **arguments(case, directory),
    )


def one(name: str) -> None:
    """Measure one case, and print it as the last line."""
    with tempfile.TemporaryDirectory() as directory:
        measured = measure(CASES[name], directory)
        said = estimated(CASES[name], directory)
    phases = {phase.name: phase.bytes / MIB for phase in said.phases}
    parts = {phase.name: {key: x / MIB for key, x in phase.parts.items()} for phase in said.phases}
    told = {"name": name, "measured": measured, "estimated": {"peak": said.peak / MIB, "phases": phases}, "parts": parts}
    print("\n" + json.dumps(told), flush=True)


def hardware() -> dict[str, Any]:
    """What it ran on."""
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    packages = ("torch", "transformers", "peft", "trl", "bitsandbytes")
    versions = {name: importlib.metadata.version(name) for name in packages} | {"python": platform.python_version()}
    return {"cpu": names[0] if names else platform.machine(), "cores": len(names), "gpu": gpu, "versions": versions}


def main(names: list[str]) -> None:
    results = []
    print(f"{'MiB':42} {'estimated':>9} {'measured':>9} {'ratio':>6} {'resident':>9}   by phase")
    for name in names or CASES:
        command = [sys.executable, __file__, "--one", name]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            sys.exit(f"{name} failed:\n{process.stderr[-3000:]}")
        told = json.loads(process.stdout.splitlines()[-1])
        results.append(told)
        seen, said = told["measured"]["phases"], told["estimated"]["phases"]
        peak = max(seen[phase] for phase in PHASES)
        ratios = "  ".join(f"{phase} {said.get(phase, 0):.1f}/{seen[phase]:.1f}" for phase in PHASES)
        ratio = told["estimated"]["peak"] / peak
        resident = told["measured"]["resident"]
        print(f"{name:42} {told['estimated']['peak']:9.1f} {peak:9.1f} {ratio:6.3f} {resident:9.1f}   {ratios}")
        sys.stdout.flush()
    if not names:
        RESULTS.write_text(json.dumps({"hardware": hardware(), "unit": "MiB", "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2])
    else:
        main(sys.argv[1:])
