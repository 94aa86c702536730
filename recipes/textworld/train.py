"""PPO on games of TextWorld, from a model that has seen some walkthroughs; then games that were
never played.

python recipes/textworld/train.py
"""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing comes from the Hub

from datasets import Dataset
from peft import LoraConfig
from start import start_model
from text_games import SIZES, TextWorld, rows

from trl_ppo_ext import PPOConfig, PPOTrainer


def won(environments: list[TextWorld], **kwargs) -> list[float]:
    """Whether each episode was won."""
    return [float(environment.won) for environment in environments]


def main() -> None:
    """Train an adapter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--output_dir", default="runs/textworld/ppo")
    options = parser.parse_args()
    args = PPOConfig(
        options.output_dir,
        seed=options.seed,
        learning_rate=5e-4,
        max_steps=4 * options.rollouts,
        generation_batch_size=32,
        per_device_train_batch_size=8,
        max_completion_length=640,  # of a whole episode, the observations included
        # eight times as fast as bfloat16 on CPUs without its instructions
        model_init_kwargs={"dtype": "float32"},
        per_device_eval_batch_size=32,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        logging_steps=4,
        log_completions=True,
        num_completions_to_print=2,
    )
    sizes = {"small": SIZES[:1], "larger": SIZES[1:2]}
    held_out = {
        name: Dataset.from_list(rows(range(2000, 2032), size)) for name, size in sizes.items()
    }
    trainer = PPOTrainer(
        start_model(),
        args=args,
        train_dataset=Dataset.from_list(rows(range(96), SIZES[:1])),
        eval_dataset=held_out,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        environment_factory=TextWorld,
        monitor_funcs=won,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    print(
        *(
            f"{name}: {before[name]:.2f}, then {after[name]:.2f}"
            for name in after
            if name.endswith("won/mean")
        ),
        sep="\n",
    )


if __name__ == "__main__":
    main()
