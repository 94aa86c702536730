"""PPO steps of TRL 1.12.0's PPOTrainer: python benchmarks/peers/trl_ppo.py SHAPE DTYPE STEPS."""

import sys
import tempfile

import torch
from common import EPOCHS, LORA, Clock, model, prompts, report, resident, shape_of, tokenizer
from datasets import Dataset
from peft import LoraConfig
from trl.experimental.ppo import PPOConfig, PPOTrainer

BASELINE = resident()


def main(name: str, dtype: str, steps: int) -> None:
    shape = shape_of(name)
    words = tokenizer(shape_of(name))
    words.padding_side = "left"
    clock = Clock(1)
    rows = {"input_ids": [words(text)["input_ids"] for text in prompts(shape, 4 * shape.batch)]}
    trainer = PPOTrainer(
        # as its users load them: it has the weights in float32, and its `bf16` changes nothing
        model=model(shape, torch.float32),
        ref_model=None,
        reward_model=model(shape, torch.float32, classifier=True, seed=1),
        value_model=model(shape, torch.float32, classifier=True, seed=2),
        args=PPOConfig(
            tempfile.mkdtemp(),
            use_cpu=not torch.cuda.is_available(),
            bf16=dtype == "bf16",
            per_device_train_batch_size=shape.batch,
            gradient_accumulation_steps=1,
            num_ppo_epochs=EPOCHS,
            num_mini_batches=1,
            total_episodes=steps * shape.batch,
            response_length=shape.response,
            temperature=1.0,
            num_sample_generations=0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        processing_class=words,
        train_dataset=Dataset.from_dict(rows),
        eval_dataset=Dataset.from_dict(rows),
        callbacks=[clock],
        peft_config=LoraConfig(**LORA),
    )
    trainer.train()
    report(clock.seconds, BASELINE)


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]))
