"""Trains, once for each entry of a list, and saves what came of it; started once for each process."""

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


def failing_once(completion_ids, trainer_state, **kwargs):
    """Has no score for any completion of the third rollout."""
    return [float("nan") if trainer_state.global_step == 4 else sum(ids) / 50 for ids in completion_ids]


def train(output_dir, settings, sample=False, model=None, classifier=None, resume_from=None):
    """One run; its completions are those of `completions_of` unless it is to sample.

    `model` is a path for the model's own loading, which shards it as it loads; `classifier` that of a second reward,
    which every process loads whole.
    """
    ptx = Dataset.from_dict({"text": ["w1 w2 w3 w4", "w5 w6", "w7 w8 w9"]}) if "ptx_coef" in settings else None
    defaults = {
        "num_mini_batches": 1,
        "num_ppo_epochs": 2,
        "max_steps": 8,
        "entropy_coef": 0.01,
        "normalize_rewards": True,
        "reward_baseline": "reference",
    }
    trainer = PPOTrainer(
        model or llama(),
        [failing_once if "reward_on_error" in settings else reward, *([classifier] if classifier else [])],
        config(output_dir, **defaults | settings),
        prompts(),
        eval_dataset=prompts(5),
        processing_class=tokenizer(),
        ptx_dataset=ptx,
    )
    if not sample:
        trainer.experience.generator.generate = completions_of
    trainer.train(resume_from_checkpoint=resume_from)
    evaluation = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        plugin = trainer.accelerator.state.deepspeed_plugin
        about = {"num_processes": trainer.accelerator.num_processes, "zero_stage": plugin and plugin.zero_stage}
        with open(f"{output_dir}/log.json", "w") as file:
            json.dump([about, *trainer.state.log_history, evaluation], file)
    return trainer


if __name__ == "__main__":
    for run in json.loads(sys.argv[1]):
        last = train(**run)
    last.end()
