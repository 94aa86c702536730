"""A long run does not grow: the memory of a rollout is freed."""

import gc

import torch
from runs_of_tiny import trainer
from tiny import prompts
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """Counts the tensors that are alive, and their bytes, after every eighth rollout."""

    def __init__(self):
        self.measured = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 8 == 0:
            gc.collect()
            alive = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            self.measured.append((len(alive), sum(x.numel() * x.element_size() for x in alive)))


def test_rollouts_leave_no_tensor_behind(tmp_path):
    """Of a run that logs, prints, evaluates and saves: one tensor kept from each rollout would
    show."""
    watch = Watch()
    settings = {"num_mini_batches": 1, "num_ppo_epochs": 1, "max_steps": 40, "save_total_limit": 2}
    settings |= {
        "save_strategy": "steps",
        "save_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 8,
    }
    settings |= {
        "log_completions": True,
        "num_completions_to_print": 2,
        "normalize_rewards": True,
        "kl_target": 0.5,
    }
    trainer(tmp_path, callbacks=[watch], eval_dataset=prompts(4), **settings).train()
    # the very first steps make the optimizer's state; sizes differ by the lengths of completions
    counts, sizes = zip(*watch.measured[1:])
    assert len(counts) == 4 and max(counts) - min(counts) < 10, counts
    assert max(sizes) - min(sizes) < 2**16, sizes
