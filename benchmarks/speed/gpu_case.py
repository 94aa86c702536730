"""The process of a case of `benchmarks/speed/gpu.py`.

    python gpu_case.py DIRECTORY [--tiny] (--make SHAPE | CASE ...)

Prints a line for each case. Weights lie in the directory, are made where they are missing, and
serve all cases.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(BENCHMARKS / "peers"), str(BENCHMARKS / "memory")]
from common import EPOCHS, LORA, Clock, Shape, prompts, tokenizer
from gpu import CASES, GB, LIMIT, MARK, PHASES, Case, case_of

GPU = torch.cuda.is_available()


def versions() -> dict[str, str]:
    """Versions of the packages."""
    packages = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "accelerate", "trl", "bitsandbytes"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "none"
    return packages


def hardware() -> dict[str, Any]:
    """Hardware of the machine."""
    if not GPU:
        return {"device": "cpu", "cores": os.cpu_count()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_gb": properties.total_memory / GB,
        "cores": os.cpu_count(),
    }


@contextmanager
def noted_dtypes(model: torch.nn.Module) -> Iterator[set[torch.dtype]]:
    """Dtypes in which the projections of queries compute, while the context runs."""
    dtypes: set[torch.dtype] = set()

    def note(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        dtypes.add(output.dtype)

    layers = [x for name, x in model.named_modules() if name.endswith(".q_proj")]
    hooks = [x.register_forward_hook(note) for x in layers]
    try:
        yield dtypes
    finally:
        for hook in hooks:
            hook.remove()


def check_dtypes(dtypes: set[torch.dtype]) -> None:
    """Raise an error unless all layers computed in bfloat16, as the cases say."""
    if dtypes != {torch.bfloat16}:
        raise RuntimeError(f"Layers must compute in bfloat16, got {dtypes or 'none'}")


# ---- models ----


def drawn(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, drawn on the fastest device."""
    if "norm" in name or name.endswith("bias"):
        return torch.full(shape, float("norm" in name), dtype=dtype)
    return (torch.randn(shape, dtype=dtype, device="cuda" if GPU else "cpu") * 0.02).cpu()


def shard_of(name: str) -> str:
    """File of a weight: its layer's, or its own."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return f"{layer[1] if layer else name}.safetensors"


def save_folder(folder: Path, made: Any, files: Path) -> None:
    """Write the files of a model for `from_pretrained`, with links to its weights."""
    made.config.architectures = [type(made).__name__]
    made.config.save_pretrained(folder)
    tokenizer(Shape(made.config.vocab_size, 0, 0, 0, 0, 0)).save_pretrained(folder)
    index = {name: shard_of(name) for name, _ in made.named_parameters()}  # tied weights occur once
    for file in set(index.values()):
        (folder / file).symlink_to(files / file)
    content = {"metadata": {"total_size": 2 * made.num_parameters()}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def save_adapter(folder: Path, scorer: Any) -> None:
    """Reward adapter with random weights."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file

    with torch.device("meta"):
        adapted = get_peft_model(scorer, LoraConfig(**LORA | {"task_type": "SEQ_CLS"}))
    weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    adapted.peft_config["default"].save_pretrained(folder)
    numbers = {name: drawn(name, x.shape, torch.float32) for name, x in weights.items()}
    save_file(numbers, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def save_models(shape: str, directory: Path) -> None:
    """Write a base, a classifier on the same trunk, and a reward adapter on it, with random
    weights."""
    if (directory / "adapter" / "adapter_model.safetensors").exists():
        return
    from estimate import config_of
    from safetensors.torch import save_file

    from trl_ppo_ext.tools.memory import on_meta

    config = config_of(shape, bos_token_id=2, eos_token_id=1, pad_token_id=0)
    base = on_meta(config)
    config.num_labels = 1
    scorer = on_meta(config, classifier=True)
    files: dict[str, dict[str, torch.Size]] = {}
    for name, x in (*base.named_parameters(), *scorer.named_parameters()):
        files.setdefault(shard_of(name), {})[name] = x.shape
    (directory / "files").mkdir(parents=True, exist_ok=True)
    for file, shapes in files.items():
        numbers = {name: drawn(name, x, torch.bfloat16) for name, x in shapes.items()}
        save_file(numbers, directory / "files" / file, metadata={"format": "pt"})
    save_folder(directory / "base", base, directory / "files")
    save_folder(directory / "classifier", scorer, directory / "files")
    save_adapter(directory / "adapter", scorer)
    if GPU:
        torch.cuda.empty_cache()


def rows(case: Case, directory: Path) -> tuple[Any, list[str]]:
    """Tokenizer, and prompts for four steps."""
    vocabulary = json.loads((directory / "base" / "config.json").read_text())["vocab_size"]
    shape = Shape(vocabulary, 0, 0, 0, case.prompt, 0)
    return tokenizer(shape), prompts(shape, 4 * case.batch * case.accumulation)


# ---- this package ----


def arguments(case: Case, directory: Path) -> dict[str, Any]:
    """Arguments of both the trainer and the estimate."""
    from peft import LoraConfig

    from trl_ppo_ext import PPOConfig

    args = PPOConfig(
        str(directory / "run"),
        use_cpu=not GPU,
        bf16=True,
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=case.accumulation,
        per_device_reward_batch_size=case.reward_batch,
        num_ppo_epochs=EPOCHS,
        num_mini_batches=1,
        kl_coef=0.05,
        max_steps=(case.warmup + case.steps) * EPOCHS,
        max_completion_length=case.response,
        generation_kwargs={"min_new_tokens": case.response},
        gradient_checkpointing=case.checkpointing,
        dequantize_for_generation=case.dequantizes,
        use_liger_kernel=case.liger,
        reward_quantization="nf4" if case.reward == "nf4" else "none",
        logging_steps=EPOCHS,
        logging_first_step=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return {
        "args": args,
        "peft_config": LoraConfig(**LORA),
        "quantization_config": quantization_of(case),
    }


def quantization_of(case: Case) -> Any:
    """Quantization of the base."""
    from transformers import BitsAndBytesConfig

    if case.base != "nf4":
        return None
    # float32 if nothing is said, which this package replaces
    computed = {"bnb_4bit_compute_dtype": torch.bfloat16}
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, **computed
    )


def reward_of(case: Case, directory: Path, loaded: bool) -> Any:
    """Reward of the run; for a classifier in bf16 the estimate reads one without weights."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from trl_ppo_ext import RewardAdapter
    from trl_ppo_ext.tools.memory import on_meta

    path = directory / "classifier"
    if case.reward == "adapter":
        return RewardAdapter(str(directory / "adapter"), check_base=False)
    if case.reward == "nf4":
        return str(path)
    if loaded:
        return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.bfloat16)
    return on_meta(AutoConfig.from_pretrained(path), classifier=True).to(torch.bfloat16)


def estimated(
    case: Case, directory: Path, device: str = "cuda" if GPU else "cpu"
) -> dict[str, Any]:
    """Estimate of a case."""
    from trl_ppo_ext import estimate_memory

    estimate = estimate_memory(
        str(directory / "base"),
        reward_funcs=reward_of(case, directory, loaded=False),
        prompt_length=case.prompt,
        device=device,
        **arguments(case, directory),
    )
    by_phase = (estimate.phases.sum() / GB).to_dict()
    return {"peak_gb": estimate.peak / GB, "needed_gb": estimate.needed / GB, "by_phase": by_phase}


def tracker_of_device() -> Any:
    """Tracks peaks of a GPU's allocator by phase, allocated and reserved."""
    from estimate import CUDATracker, Tracker

    class Peaks(CUDATracker):
        reserved = 0

        def enter(self, phase: str) -> None:
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
            super().enter(phase)

    if GPU:
        return Peaks()
    return Tracker()


def watch(trainer: Any, tracker: Any) -> None:
    """Report the beginning and the end of a phase to the tracker."""
    from estimate import in_phase

    from trl_ppo_ext.ppo import rollouts

    rewards = trainer.components.rewards
    generator = trainer.components.player.generator
    models = [trainer.model, *(getattr(x, "model", None) for x in rewards)]
    for model in [] if GPU else [x for x in models if isinstance(x, torch.nn.Module)]:
        # tensors read from a file come from no operation
        for tensor in [*model.parameters(), *model.buffers()]:
            tracker.add(tensor)
    for reward in rewards:
        reward.score = in_phase(tracker, "score", reward.score)
    generator.generate = in_phase(tracker, "generate", generator.generate)
    rollouts.score_tokens = in_phase(tracker, "forward", rollouts.score_tokens)


class Teller(Clock):
    """Prints the measurements so far at every step, because the time limit may end the run."""

    def __init__(self, optimizer_steps: int, tell: Callable[[list[float], list[dict]], None]):
        super().__init__(optimizer_steps)
        self.tell = tell

    def on_log(self, args, state, control, **kwargs):
        logs = [log for log in state.log_history if "time/generate" in log]
        if logs:
            self.tell(self.seconds, logs)


def measured(seconds: list[float], logs: list[dict], case: Case, tracker: Any) -> dict[str, Any]:
    """Measurements of the steps after the warm-up, or of the warm-up if there are no others."""
    tracker.enter("update")  # a step ends in this phase
    logs = logs[case.warmup :] or logs
    peaks = {phase: tracker.peaks[phase] / GB for phase in ("load", *PHASES)}
    return {
        **timed(seconds, case),
        "phases_s": {
            phase: statistics.median(log[f"time/{phase}"] for log in logs) for phase in PHASES
        },
        "tokens_per_second": statistics.median(log["tokens_per_second"] for log in logs),
        "completion_length": statistics.median(log["completions/mean_length"] for log in logs),
        "peak_gb": {
            "allocated": max(peaks.values()),
            "reserved": tracker.reserved / GB if GPU else None,
            "by_phase": peaks,
        },
    }


def trainer_of(case: Case, directory: Path, callbacks: list[Any]) -> Any:
    """Trainer of this package."""
    from datasets import Dataset

    from trl_ppo_ext import PPOTrainer

    words, texts = rows(case, directory)
    return PPOTrainer(
        str(directory / "base"),
        reward_of(case, directory, loaded=True),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=words,
        reward_processing_classes=words if case.reward == "bf16" else None,
        callbacks=callbacks,
        **arguments(case, directory),
    )


def ours(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Steps of this package."""
    save_models(case.shape, directory)
    estimate = estimated(case, directory)
    tracker = tracker_of_device()
    result = {}

    def so_far(seconds: list[float], logs: list[dict]) -> None:
        result.update(measured(seconds, logs, case, tracker))
        result["estimate"] = estimate | {
            "ratio": estimate["peak_gb"] / result["peak_gb"]["allocated"]
        }
        tell(result)

    with tracker:
        trainer = trainer_of(case, directory, [Teller(EPOCHS, so_far)])
        watch(trainer, tracker)
        with noted_dtypes(trainer.model) as dtypes:
            trainer.train()
    check_dtypes(dtypes)
    return result


def timed(seconds: list[float], case: Case) -> dict[str, Any]:
    """Seconds of the steps after the warm-up; may be empty."""
    seconds = seconds[case.warmup :]
    return {"seconds": seconds, "median_s": statistics.median(seconds) if seconds else None}


# ---- the other benchmarks ----


def with_peak(numbers: dict[str, float]) -> dict[str, Any]:
    """Measurements, on a GPU with the peak of the allocator."""
    return {
        "measured": numbers | ({"peak GB": torch.cuda.max_memory_allocated() / GB} if GPU else {})
    }


def padding(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Scoring and update of completions of lognormal lengths, in four minibatches."""
    from padding import measure

    save_models(case.shape, directory)
    settings = {
        "generation_batch_size": 8 * case.batch,
        "per_device_train_batch_size": case.batch,
        "max_completion_length": case.response,
        "gradient_checkpointing": case.checkpointing,
        "model_init_kwargs": {"attn_implementation": case.attention},
    }
    ratio, seconds = measure(
        4, str(directory / "base"), case.packs, quantization_of(case), **settings
    )
    return with_peak(
        {"computed per real token": ratio} | {f"{phase} s": x for phase, x in seconds.items()}
    )


def updates(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """An optimizer step by kernels and waits."""
    from updates import updates

    save_models(case.shape, directory)
    return updates(case, directory, trainer_of, EPOCHS)


def sampling(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Tokens per second of a backend; vLLM serves the base unquantized."""
    from backends import measure

    save_models(case.shape, directory)
    base = str(directory / "base")
    vocabulary = json.loads((directory / "base" / "config.json").read_text())["vocab_size"]
    settings: dict[str, Any] = {"bf16": True, "max_completion_length": case.response}
    if case.sampler == "vllm":
        settings["vllm_base_model"] = base
    return with_peak(
        measure(case.sampler, base, vocabulary, (case.lengths,), quantization_of(case), **settings)
    )


def overlap(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Completions per second of runs with a server."""
    save_models(case.shape, directory)
    results = directory / "overlap.json"
    cores = sorted(os.sched_getaffinity(0))
    options = {
        "base": directory / "base",
        "results": results,
        "seeds": 1,
        "rollouts": case.steps + 1,
    }
    options |= {"completions": 2 * case.batch, "tokens": case.response}
    if GPU:
        options |= {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"), "dtype": "bfloat16"}
    else:
        options["cores"] = f"{cores[0]},{cores[-1]}"
    program = [sys.executable, str(Path(__file__).with_name("overlap.py"))]
    process = subprocess.Popen([*program, *(f"--{name}={x}" for name, x in options.items())])
    result = {}
    try:
        code = process.wait(float(os.environ[LIMIT]) - 20)
    finally:
        process.terminate()  # it ends its server
        process.wait()
        if results.exists():
            runs = json.loads(results.read_text())
            rates = {
                name: run["completions/s"] for name in ("with", "without") for run in runs[name]
            }
            result["measured"] = {f"completions/s {name}": x for name, x in rates.items()}
            tell(result)
    if code:
        raise RuntimeError(f"overlap.py ended with {code}")
    return result


# ---- TRL's last PPO, and its GRPO ----


def trl(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Steps of TRL's PPOTrainer on the same weights, all four models in bfloat16, the policy
    with the same LoRA."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    def classifier() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            directory / "classifier", dtype=torch.bfloat16
        )

    (words, texts), clock = rows(case, directory), Clock(1)
    words.padding_side = "left"
    data = Dataset.from_dict({"input_ids": [words(text)["input_ids"] for text in texts]})
    trainer = PPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.bfloat16),
        ref_model=None,
        reward_model=classifier(),
        value_model=classifier(),
        args=PPOConfig(
            str(directory / "run"),
            use_cpu=not GPU,
            bf16=True,
            per_device_train_batch_size=case.batch,
            gradient_accumulation_steps=case.accumulation,
            num_ppo_epochs=EPOCHS,
            num_mini_batches=1,
            total_episodes=(case.warmup + case.steps) * case.batch * case.accumulation,
            response_length=case.response,
            temperature=1.0,
            num_sample_generations=0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=case.checkpointing,
        ),
        processing_class=words,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[clock],
        peft_config=LoraConfig(**LORA),
    )
    with noted_dtypes(trainer.model) as dtypes:
        trainer.train()
    check_dtypes(dtypes)
    return of_peer(clock, case)


def grpo(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Steps of TRL's GRPOTrainer, with as many iterations as epochs, on the same weights."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification
    from trl import GRPOConfig, GRPOTrainer

    save_models(case.shape, directory)
    (words, texts), clock = rows(case, directory), Clock(EPOCHS)
    if case.base == "nf4":
        quantized = {"quantization_config": quantization_of(case)}
    else:
        quantized = {}
    scorer = AutoModelForSequenceClassification.from_pretrained(
        directory / "classifier",
        dtype=torch.bfloat16,
        quantization_config=quantization_of(case) if case.reward == "nf4" else None,
    )
    trainer = GRPOTrainer(
        model=str(directory / "base"),
        reward_funcs=scorer,
        args=GRPOConfig(
            str(directory / "run"),
            use_cpu=not GPU,
            bf16=True,
            model_init_kwargs={"dtype": torch.bfloat16, **quantized},
            per_device_train_batch_size=case.batch,
            gradient_accumulation_steps=case.accumulation,
            steps_per_generation=case.accumulation,
            num_iterations=EPOCHS,
            num_generations=max(case.batch * case.accumulation // 2, 2),
            beta=0.05,  # a reference, as PPO has one
            max_steps=(case.warmup + case.steps) * EPOCHS,
            max_completion_length=case.response,
            generation_kwargs={"min_new_tokens": case.response},
            gradient_checkpointing=case.checkpointing,
            logging_steps=EPOCHS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=words,
        reward_processing_classes=words,
        callbacks=[clock],
        peft_config=LoraConfig(**LORA),
    )
    with noted_dtypes(trainer.model) as dtypes:
        trainer.train()
    check_dtypes(dtypes)
    return of_peer(clock, case)


def of_peer(clock: Clock, case: Case) -> dict[str, Any]:
    """Seconds of the steps, and peaks of the allocator."""
    if GPU:
        peaks = (torch.cuda.max_memory_allocated() / GB, torch.cuda.max_memory_reserved() / GB)
    else:
        peaks = (None, None)
    return timed(clock.seconds, case) | {
        "peak_gb": dict(zip(("allocated", "reserved"), peaks, strict=True))
    }


def say(name: str, status: str, result: dict[str, Any]) -> None:
    """Print a result for the parent process; the last one counts."""
    entry = {"hardware": hardware(), "versions": versions(), "status": status, **result}
    print(f"\n{MARK}{json.dumps([name, entry])}", flush=True)


def tokens(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Tokens of graphs, of single steps and of `generate`."""
    import steps

    return steps.tokens(case, directory, tell)


def times(case: Case, directory: Path, tell: Callable[[dict], None]) -> dict[str, Any]:
    """Milliseconds per token of graphs, of single steps and of `generate`."""
    import steps

    return steps.times(case, directory, tell)


PROGRAMS = {
    "tokens": tokens,
    "times": times,
    "ours": ours,
    "trl": trl,
    "grpo": grpo,
    "updates": updates,
    "padding": padding,
    "sampling": sampling,
    "overlap": overlap,
}


def run(name: str, directory: Path, tiny: bool) -> bool:
    """Run a case and print its result, or the reason of its failure; return `True` if it is
    done."""
    case = case_of(name, tiny)
    told: dict[str, Any] = {}

    def tell(result: dict[str, Any]) -> None:
        told.update(result)
        say(name, "cut short", told)

    try:
        say(name, "done", PROGRAMS[case.program](case, directory / case.shape, tell))
        return True
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:500]}"
        say(name, "failed", told | {"reason": reason, "errors": traceback.format_exc()[-1500:]})
        return False


def make_tiny() -> None:
    """Replace every shape by a tiny one."""
    from estimate import MODELS

    MODELS.update({name: (64, 128, 2, 2, 1, 512, tied) for name, (*_, tied) in MODELS.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--make", metavar="SHAPE")
    args = parser.parse_intermixed_args()
    if args.tiny and (args.make or CASES[args.cases[0]].program != "trl"):  # TRL reads these files
        make_tiny()
    if args.make:
        save_models(args.make, args.directory / args.make)
    for name in args.cases:
        # after an error a GPU may be of no use to this process
        if not run(name, args.directory, args.tiny):
            break


if __name__ == "__main__":
    main()
