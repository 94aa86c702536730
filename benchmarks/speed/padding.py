"""Tokens that a trunk computes for each real one, and seconds of scoring and update.

    python benchmarks/speed/padding.py

SmolLM2's shape with random weights in bfloat16, 64 completions a rollout of lognormal lengths
(median 60, at most 256) after prompts of 16 to 40 tokens, micro-batches of 8 rows, one epoch of one
or four minibatches. Another checkout of this package is measured with PYTHONPATH=checkout. Nothing
else should run on the machine.
"""

import random
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any, cast
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
import torch
from common import LORA, model, shape_of, tokenizer
from datasets import Dataset
from peft import LoraConfig

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.modeling import actor_critic

ROLLOUT = 64
MICRO_BATCH = 8
LONGEST = 256
ROLLOUTS = 3
PHASES = "forward", "update"


def episodes(prompts: list[str], trainer: PPOTrainer) -> dict[str, list]:
    """Token ids of random lengths in place of samples, the same for every checkout."""
    draw = random.Random(trainer.state.global_step)
    longest = trainer.args.max_completion_length
    largest = min(49000, trainer.model.config.vocab_size)

    def ids(length: float) -> list[int]:
        return [draw.randrange(10, largest) for _ in range(int(length))]

    median = 60 / LONGEST * longest
    return {
        "prompt_ids": [ids(draw.uniform(16, 41)) for _ in prompts],
        "completion_ids": [
            ids(min(median * draw.lognormvariate(0, 0.8), longest) + 1)[:longest] for _ in prompts
        ],
    }


def measure(
    num_mini_batches: int,
    base: str | None = None,
    packs: bool = True,
    quantization: Any = None,
    **fields: Any,
) -> tuple[float, dict[str, float]]:
    """Computed over real tokens, and mean seconds of each phase after a first rollout."""
    shape = shape_of("smollm2")
    tokens = Counter[str]()
    computes = list[bool]()  # for each rollout: a new critic reads the first one once more
    settings = {
        "max_steps": ROLLOUTS * num_mini_batches,
        "num_mini_batches": num_mini_batches,
        "generation_batch_size": ROLLOUT,
        "per_device_train_batch_size": MICRO_BATCH,
        "max_completion_length": LONGEST,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": num_mini_batches,
        "logging_first_step": False,
    }
    args = PPOConfig(tempfile.mkdtemp(), **settings | fields)

    def played(prompts: list[str], trainer: PPOTrainer) -> dict[str, list]:
        output = episodes(prompts, trainer)
        computes.append(bool(computes))
        # scored and learned
        read = sum(map(len, output["prompt_ids"] + output["completion_ids"]))
        tokens["real"] += 2 * read * computes[-1]
        return output

    trainer = PPOTrainer(
        base or model(shape, torch.bfloat16),
        lambda completions, **kwargs: [float(len(x)) for x in completions],
        args,
        Dataset.from_dict({"prompt": ["w1"] * args.generation_batch_size}),
        processing_class=None if base else tokenizer(shape),
        quantization_config=quantization,
        peft_config=LoraConfig(**LORA),
        rollout_func=played,
    )

    def count(module: torch.nn.Module, inputs: tuple, kwargs: dict) -> None:
        is_counted = bool(computes) and computes[-1]
        tokens["computed"] += is_counted * (inputs[0] if inputs else kwargs["input_ids"]).numel()

    trainer.actor_critic.trunk.register_forward_pre_hook(count, with_kwargs=True)
    # a micro-batch is neither scored nor learned there
    cast(Any, trainer.updates).measure = lambda _: None
    with (
        nullcontext()
        if packs
        else patch.object(actor_critic, "why_not_packed", lambda model: "of a comparison")
    ):
        trainer.train()
    logs = [log for log in trainer.state.log_history if "time/forward" in log][1:]
    return tokens["computed"] / tokens["real"], {
        x: mean(log[f"time/{x}"] for log in logs) for x in PHASES
    }


if __name__ == "__main__":
    for number in (1, 4):
        ratio, seconds = measure(number)
        print(
            f"{number} minibatches: {ratio:.2f} tokens computed for each real one, "
            + ", ".join(f"{name} {x:.1f} s" for name, x in seconds.items()),
            flush=True,
        )
