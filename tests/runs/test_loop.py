"""recipes/loop.py learns what `PPOTrainer` learns: the parts are parts."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from tiny import WORDS, config, llama, tokenizer
from transformers import TrainerCallback

from trl_ppo_ext import PPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import loop

PROMPTS = [" ".join(WORDS[(row + k) % len(WORDS)] for k in range(1 + row % 4)) for row in range(16)]
STEPS = 8  # of a rollout: four epochs of two minibatches


class SeedRollouts(TrainerCallback):
    """Begin each rollout with the noise of the loop's."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % STEPS == 0:
            torch.manual_seed(state.global_step // STEPS)


def recorded(scores):
    def reward(texts):
        scores.append([sum(word in WORDS[:8] for word in text.split()) / 4 for text in texts])
        return scores[-1]

    return reward


def test_loop_gets_the_rewards_of_the_trainer(tmp_path, capsys):
    by_loop, by_trainer, settings = [], [], {"learning_rate": 1e-3, "kl_coef": 0.05, "lam": 0.95}
    model = llama()
    torch.manual_seed(0)  # the adapter is drawn
    loop.ppo(model, tokenizer(), PROMPTS, recorded(by_loop), length=8, **settings)

    reward = recorded(by_trainer)
    sizes = {"per_device_train_batch_size": 8, "num_mini_batches": 2, "num_ppo_epochs": 4, "max_steps": 10 * STEPS}
    default = {"critic": "side", "normalize_values": None, "cliprange": None, "vf_coef": 0.5, "target_kl": None}
    args = config(
        tmp_path, **settings, **sizes, **default, lr_scheduler_type="constant", shuffle_dataset=False, seed=0
    )
    PPOTrainer(
        llama(),
        lambda completions, **kwargs: reward(completions),
        args,
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer(),
        callbacks=[SeedRollouts()],
    ).train()
    assert by_loop == by_trainer and len(by_loop) == 10
    first, last = (sum(scores) for scores in (by_loop[0], by_loop[-1]))
    assert last > 1.2 * first


def test_loop_is_short():
    with open(loop.__file__) as file:
        assert len(file.readlines()) <= 100
