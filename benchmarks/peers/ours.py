"""PPO steps of this package: python benchmarks/peers/ours.py SHAPE DTYPE STEPS [FIELD=VALUE
...]."""

import json
import sys
import tempfile

import torch
from common import EPOCHS, LORA, Clock, model, prompts, report, resident, shape_of, tokenizer
from datasets import Dataset
from peft import LoraConfig

from trl_ppo_ext import PPOConfig, PPOTrainer

BASELINE = resident()


def main(name: str, dtype: str, steps: int, fields: dict) -> None:
    shape = shape_of(name)
    if dtype == "bf16":
        weights = torch.bfloat16
    else:
        weights = torch.float32
    clock = Clock(EPOCHS)
    settings = {
        "use_cpu": not torch.cuda.is_available(),
        "bf16": dtype == "bf16",
        "per_device_train_batch_size": shape.batch,
        "critic": "head",
        "num_ppo_epochs": EPOCHS,
        "num_mini_batches": 1,
        "kl_coef": 0.05,
        "gradient_checkpointing": False,
        "max_steps": steps * EPOCHS,
        "max_completion_length": shape.response,
        "generation_kwargs": {"min_new_tokens": shape.response},
        "logging_steps": EPOCHS,
        "logging_first_step": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = PPOTrainer(
        model(shape, weights),
        model(shape, weights, classifier=True, seed=1).eval().requires_grad_(False),
        PPOConfig(tempfile.mkdtemp(), **settings | fields),
        Dataset.from_dict({"prompt": prompts(shape, 4 * shape.batch)}),
        processing_class=tokenizer(shape),
        reward_processing_classes=tokenizer(shape),
        callbacks=[clock],
        peft_config=LoraConfig(**LORA),
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "time/generate" in log][1:]
    phases = {
        p: sum(log[f"time/{p}"] for log in logs) / len(logs)
        for p in ("generate", "score", "forward", "update")
    }
    lengths = {log["completions/mean_length"] for log in logs}
    report(clock.seconds, BASELINE, phases=phases, completion_lengths=sorted(lengths))


if __name__ == "__main__":
    main(
        *sys.argv[1:3],
        int(sys.argv[3]),
        {k: json.loads(v) for k, v in (a.split("=", 1) for a in sys.argv[4:])},
    )
