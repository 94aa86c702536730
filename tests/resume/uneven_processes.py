"""Train on rollouts of which the second of two processes can use nothing.

Of eight rows in a rollout the last four are the second process's. Their rewards fail in the first
rollout, and their forwards are not finite in the second.
"""

import json
import math

import torch
from datasets import Dataset
from runs_of_tiny import write_completions
from tiny import SPECIAL, config, llama, tokenizer

from trl_ppo_ext import PPOTrainer, RewardError

ROWS = 16
BAD_TOKEN = 31


def completions_of(prompts):
    """Lengths differ; those of rows 12 to 15 hold BAD_TOKEN."""
    rows = [ids[0] - len(SPECIAL) for ids in prompts]
    return [[*([BAD_TOKEN] if row >= 12 else []), *range(5, 7 + row % 5), 1] for row in rows]


def reward(completion_ids, row, log_metric, **kwargs):
    for r in sorted(row, reverse=row[0] % 8 == 0):
        if r % 8 < 7:  # each on one process only, and in any order
            log_metric(f"row/{r % 8}", r)
    return [
        RewardError("no") if 4 <= r < 8 else float(sum(ids)) / 20
        for ids, r in zip(completion_ids, row)
    ]


def main(output_dir, batch_size):
    args = config(
        output_dir,
        per_device_train_batch_size=batch_size,
        num_mini_batches=1,
        num_ppo_epochs=2,
        shuffle_dataset=False,
        normalize_rewards=True,
        entropy_coef=0.01,
        kl_target=0.5,
        lam_critic=0.95,  # with Monte Carlo targets the gradient of a bias cancels to rounding
        kl_horizon=100,
        reward_on_error="skip",
        max_reward_failures=1.0,
    )
    rows = Dataset.from_dict(
        {"prompt": [f"w{row}" for row in range(ROWS)], "row": list(range(ROWS))}
    )
    trainer = PPOTrainer(llama(), reward, args, rows, processing_class=tokenizer())
    write_completions(trainer, completions_of)
    with torch.no_grad():
        trainer.actor_critic.policy.get_base_model().get_input_embeddings().weight[BAD_TOKEN] = (
            math.nan
        )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        with open(f"{output_dir}/log.json", "w") as file:
            json.dump(
                [{"num_processes": trainer.accelerator.num_processes}, *trainer.state.log_history],
                file,
            )
    return trainer
