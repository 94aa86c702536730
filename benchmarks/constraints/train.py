"""SmolLM2-135M-Instruct learns to follow instructions that rules can check.

python benchmarks/constraints/train.py --seed 0      # 43 minutes on one core, with other programs
beside it
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing comes from the Hub
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.append(str(RECIPES))
sys.path.append(str(RECIPES / "smollm2"))

import torch
from by_token import by_token
from constraints import progress, requests
from datasets import Dataset
from peft import LoraConfig
from smollm2 import base_model
from transformers import AutoTokenizer, TrainerCallback

from trl_ppo_ext import PPOConfig, PPOTrainer

STEPS = 4  # optimizer steps per rollout


class Until(TrainerCallback):
    """Ends a run after the rollout in which its time is up."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def on_step_end(self, args, state, control, **kwargs):
        if time.monotonic() > self.end and state.global_step % STEPS == 0:
            control.should_training_stop = True


def main() -> None:
    """Train an adapter of 5 MB."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--rollouts", type=int, default=25)
    parser.add_argument("--completions", type=int, default=64, help="per rollout, a multiple of 4")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion, at most")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no rollout begins after them"
    )
    parser.add_argument("--output_dir", default="runs/constraints")
    options = parser.parse_args()
    args = PPOConfig(
        options.output_dir,
        seed=options.seed,
        learning_rate=options.learning_rate,
        max_steps=options.rollouts * STEPS,
        generation_batch_size=options.completions,
        per_device_train_batch_size=options.completions // STEPS,
        max_completion_length=options.tokens,
        temperature=options.temperature,
        kl_coef=0.02,
        bf16=True,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        logging_steps=STEPS,
        save_strategy="no",
    )
    trainer = PPOTrainer(
        model=base_model(),
        reward_funcs=by_token(progress, AutoTokenizer.from_pretrained(base_model())),
        args=args,
        train_dataset=Dataset.from_list(
            requests(options.rollouts * options.completions, options.seed)
        ),
        peft_config=LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Until(options.seconds)],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
