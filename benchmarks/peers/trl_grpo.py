"""Steps of TRL's GRPOTrainer, as many iterations: python benchmarks/peers/trl_grpo.py SHAPE
DTYPE STEPS."""

import sys
import tempfile

import torch
from common import EPOCHS, LORA, Clock, model, prompts, report, resident, shape_of, tokenizer
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

BASELINE = resident()


def main(name: str, dtype: str, steps: int) -> None:
    shape = shape_of(name)
    if dtype == "bf16":
        weights = torch.bfloat16
    else:
        weights = torch.float32
    clock = Clock(EPOCHS)
    trainer = GRPOTrainer(
        model=model(shape, weights),
        reward_funcs=model(shape, weights, classifier=True, seed=1),
        args=GRPOConfig(
            tempfile.mkdtemp(),
            use_cpu=not torch.cuda.is_available(),
            bf16=dtype == "bf16",
            per_device_train_batch_size=shape.batch,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_iterations=EPOCHS,
            num_generations=shape.batch // 2,
            max_steps=steps * EPOCHS,
            max_completion_length=shape.response,
            generation_kwargs={"min_new_tokens": shape.response},
            beta=0.05,  # a reference, as PPO has one
            logging_steps=EPOCHS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts(shape, 4 * shape.batch)}),
        processing_class=tokenizer(shape),
        reward_processing_classes=tokenizer(shape),
        callbacks=[clock],
        peft_config=LoraConfig(**LORA),
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "completions/mean_length" in log][1:]
    report(
        clock.seconds,
        BASELINE,
        completion_lengths=sorted({log["completions/mean_length"] for log in logs}),
    )


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]))
