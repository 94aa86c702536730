"""Stage 3: PPO against the reward model, on one shared base."""

import os
import shutil
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from harvest import first_words
from peft import LoraConfig
from pep257 import verdict
from sft import to_prompt
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from trl_ppo_ext import PPOConfig, PPOTrainer

SHOWN = {
    "reward": "reward {:5.2f}",
    "monitor/ruff/mean": "ruff {:4.0%}",
    "kl_per_completion": "KL {:5.2f} nats",
    "entropy": "entropy {:.2f}",
    "completions/mean_length": "length {:4.1f} tokens",
    "tokens_per_second": "{:.0f} tokens/s",
}


def align(
    corpus: list[dict[str, str]],
    held_out: list[dict[str, str]],
    sft_dir: str | os.PathLike,
    reward_dir: str | os.PathLike,
    output_dir: str | os.PathLike,
    **settings,
) -> list[dict[str, float]]:
    """
    Train an adapter on the supervised model with PPO, evaluate it on held-out signatures, and save it.

    An interrupted run resumes from its last checkpoint; a complete run is repeated.

    Args:
        corpus (`list[dict[str, str]]`):
            Training rows with the key `signature`.
        held_out (`list[dict[str, str]]`):
            Rows to evaluate on.
        sft_dir (`str` or `os.PathLike`):
            Directory of the supervised model: policy, reference and critic.
        reward_dir (`str` or `os.PathLike`):
            Directory of the reward model, which is loaded in 4-bit.
        output_dir (`str` or `os.PathLike`):
            Directory to save the adapter to.
        **settings:
            Fields of [`PPOConfig`] that override this recipe's.

    Returns:
        `list[dict[str, float]]`:
            Logged metrics, one dictionary per log.
    """
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 8,
        "save_steps": 40,
        "save_total_limit": 1,
        "learning_rate": 1.5e-3,
        "max_steps": 240,
        "generation_batch_size": 128,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 128,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "max_completion_length": 48,
        "missing_eos_penalty": 2.0,
        "kl_coef": 0.05,
        "lam": 0.95,
        "critic_kwargs": {"lam": 0.95},
        "target_kl": None,
        "adam_epsilon": 1e-5,
        "gradient_checkpointing": False,
        "cliprange_value": 0.2,  # without it, docstrings become shorter and less diverse
    }
    known = {word for word, count in first_words(corpus).items() if count >= 2}

    def ruff(completions, **kwargs):
        return [float(passed) for passed in verdict(completions, known)]

    complete = Path(output_dir) / "complete"
    if PartialState().is_main_process and complete.exists():
        shutil.rmtree(output_dir)
    PartialState().wait_for_everyone()
    trainer = PPOTrainer(
        model=str(sft_dir),
        reward_funcs=str(reward_dir),
        args=PPOConfig(str(output_dir), **(defaults | settings)),
        train_dataset=prompts(corpus),
        eval_dataset=prompts(held_out),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        monitor_funcs=ruff,  # monitored, never optimized
        callbacks=[OneLine()],
    )
    trainer.remove_callback(PrinterCallback)  # it prints all metrics
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None)
    trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        complete.touch()
    return trainer.state.log_history


class OneLine(TrainerCallback):
    """Print the main metrics, one line per log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "reward" in logs:
            metrics = [text.format(logs[name]) for name, text in SHOWN.items() if name in logs]
            print(f"step {state.global_step:3}/{state.max_steps}  " + "  ".join(metrics), flush=True)


def prompts(rows: list[dict[str, str]]) -> Dataset:
    """Return the signatures of rows as prompts."""
    return Dataset.from_list([{"prompt": to_prompt(row["signature"])} for row in rows])
