"""Trains on completions that depend on the prompt alone, and saves what came of it; started once for each process."""

import json
import sys

import torch
from datasets import Dataset
from tiny import config, llama, prompts, tokenizer

from trl_ppo_ext import PPOTrainer


def completions_of(prompts):
    """The same completions on any number of processes, of very different lengths, some cut off."""
    generators = [torch.Generator().manual_seed(sum(ids)) for ids in prompts]
    lengths = [1 + sum(ids) % 8 for ids in prompts]
    drawn = [torch.randint(4, 32, (n,), generator=g).tolist() for n, g in zip(lengths, generators)]
    return [ids if len(ids) == 8 else [*ids[:-1], 1] for ids in drawn]


def reward(completion_ids, **kwargs):
    return [sum(ids) / 50 for ids in completion_ids]


def main(output_dir, settings):
    ptx = Dataset.from_dict({"text": ["w1 w2 w3 w4", "w5 w6", "w7 w8 w9"]}) if "ptx_coef" in settings else None
    trainer = PPOTrainer(
        llama(),
        reward,
        config(
            output_dir,
            **{
                "num_mini_batches": 1,
                "num_ppo_epochs": 2,
                "max_steps": 8,
                "entropy_coef": 0.01,
                "normalize_rewards": True,
                "reward_baseline": "reference",
            }
            | settings,
        ),
        prompts(),
        eval_dataset=prompts(5),
        processing_class=tokenizer(),
        ptx_dataset=ptx,
    )
    trainer.experience.generator.generate = completions_of
    trainer.train()
    evaluation = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        with open(f"{output_dir}/log.json", "w") as file:
            processes = {"num_processes": trainer.accelerator.num_processes}
            json.dump([processes, *trainer.state.log_history, evaluation], file)
    trainer.end()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
