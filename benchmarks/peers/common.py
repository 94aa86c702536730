"""Shapes, models, data and clock of all programs of `benchmarks/speed/step.py`."""

import json
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

EPOCHS = 4
LORA = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}


@dataclass(frozen=True)
class Shape:
    """A Llama and a batch of prompts and completions, each of exactly this length."""

    vocabulary: int
    hidden: int
    layers: int
    batch: int
    prompt: int
    response: int
    intermediate: int | None = None  # four times the hidden size
    key_value_heads: int | None = None  # as many as heads


SHAPES = {
    "tiny": Shape(64, 32, 2, 4, 6, 8),  # for tests
    "small": Shape(8192, 256, 6, 16, 48, 48),
    "medium": Shape(32000, 512, 8, 8, 128, 128),
    "long": Shape(32000, 512, 8, 8, 64, 512),
    "smollm2": Shape(49152, 576, 30, 16, 32, 48, 1536, 3),  # of SmolLM2-135M
}


def shape_of(name: str) -> Shape:
    """Shape by name, or from `"vocabulary,hidden,layers,batch,prompt,response"`."""
    if name in SHAPES:
        return SHAPES[name]
    return Shape(*map(int, name.split(",")))


def model(shape: Shape, dtype: torch.dtype, classifier: bool = False, seed: int = 0):
    """Policy or classifier of a shape, with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate or 4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(shape.hidden // 64, 2),
        num_key_value_heads=shape.key_value_heads or max(shape.hidden // 64, 2),
        max_position_embeddings=2048,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        **({"num_labels": 1} if classifier else {}),
    )
    return (LlamaForSequenceClassification if classifier else LlamaForCausalLM)(config).to(dtype)


def tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """Tokenizer with one token per word."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = [f"w{i}" for i in range(shape.vocabulary - len(special))]
    inner = Tokenizer(
        models.WordLevel({x: i for i, x in enumerate([*special, *words])}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )


def prompts(shape: Shape, rows: int) -> list[str]:
    """Prompts of exactly the shape's length."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, shape.vocabulary - 4, (rows, shape.prompt), generator=generator)
    return [" ".join(f"w{i}" for i in row) for row in drawn.tolist()]


def resident() -> float:
    """Resident memory of this process, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Clock(TrainerCallback):
    """Records the seconds of each PPO step of `optimizer_steps` optimizer steps each."""

    def __init__(self, optimizer_steps: int):
        self.optimizer_steps = optimizer_steps
        self.seconds: list[float] = []
        self.last = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.optimizer_steps == 0:
            now = time.perf_counter()
            self.seconds.append(now - self.last)
            self.last = now


def report(seconds: list[float], baseline: float, warmup: int = 1, **more) -> None:
    """Print the measurements as the last line: seconds of each step, and MiB above those after
    the imports."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - baseline
    result = {
        "seconds": seconds[warmup:],
        "median": statistics.median(seconds[warmup:]),
        "peak_mib": peak,
    } | more
    print("\n" + json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # exclude the shutdown
