"""SmolLM2-135M-Instruct learns to follow instructions that rules can check.

python benchmarks/constraints/train.py --seed 0      # 43 minutes on one core, with other programs beside it
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing comes from the Hub
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.append(str(RECIPES))
sys.path.append(str(RECIPES / "smollm2"))

from by_token import by_token
from constraints import progress, requests
from datasets import Dataset
from peft import LoraConfig
from smollm2 import base_model
from transformers import AutoTokenizer

from trl_ppo_ext import PPOConfig, PPOTrainer

ROLLOUTS, ROLLOUT, LENGTH = 25, 64, 64


def main() -> None:
    """Train an adapter of 5 MB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--output_dir", default="runs/constraints")
    options = parser.parse_args()
    args = PPOConfig(
        options.output_dir,
        seed=options.seed,
        learning_rate=options.learning_rate,
        max_steps=ROLLOUTS * 4,
        generation_batch_size=ROLLOUT,
        per_device_train_batch_size=ROLLOUT // 4,
        max_completion_length=LENGTH,
        temperature=0.7,
        kl_coef=0.02,
        bf16=True,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        logging_steps=4,
        save_strategy="no",
    )
    trainer = PPOTrainer(
        model=base_model(),
        reward_funcs=by_token(progress, AutoTokenizer.from_pretrained(base_model())),
        args=args,
        train_dataset=Dataset.from_list(requests(ROLLOUTS * ROLLOUT, options.seed)),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
