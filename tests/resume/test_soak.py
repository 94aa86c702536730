"""A long run does not grow: the memory of a rollout is freed."""

import ctypes
import gc
import os
import statistics
import sys

import pytest
import torch
from runs_of_tiny import trainer
from tiny import prompts
from transformers import TrainerCallback

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")


def resident():
    """Resident memory in bytes, after all that is free was given back."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def size_of(x):
    """Bytes of nested lists and dicts of numbers and texts; the names of metrics are shared, and counted anew."""
    inner = [*x.keys(), *x.values()] if isinstance(x, dict) else x if isinstance(x, list) else []
    return sys.getsizeof(x) + sum(map(size_of, inner))


def tensors():
    """Tensors that are alive, and their bytes."""
    gc.collect()
    alive = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return len(alive), sum(x.numel() * x.element_size() for x in alive)


class Watch(TrainerCallback):
    """Measures after every tenth rollout."""

    def __init__(self, **measures):
        self.measures = measures
        self.measured = {name: [] for name in measures}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 10 == 0:
            for name, measure in self.measures.items():
                self.measured[name].append(measure(state))


def soak(output_dir, rollouts, watch, **settings):
    """Train for this many rollouts with all that a run does now and then."""
    built = trainer(
        output_dir,
        callbacks=[watch],
        eval_dataset=prompts(4),
        num_mini_batches=1,
        num_ppo_epochs=1,
        max_steps=rollouts,
        log_completions=True,
        num_completions_to_print=2,
        save_total_limit=2,
        save_strategy="steps",
        eval_strategy="steps",
        normalize_rewards=True,
        kl_target=0.5,
        kl_horizon=1000,
        **settings,
    )
    built.train()
    assert built.state.global_step == rollouts and len(list(output_dir.glob("checkpoint-*"))) == 2
    return watch.measured


def median_growth(measured, first, window):
    """From the window after the `first` measurements to the last window: bytes."""
    return statistics.median(measured[-window:]) - statistics.median(measured[first : first + window])


@pytest.mark.slow
def test_memory_of_a_long_run_grows_less_than_two_percent(tmp_path):
    watch = Watch(resident=lambda state: resident(), log=lambda state: size_of(state.log_history))
    measured = soak(tmp_path, 300, watch, save_steps=50, eval_steps=50)
    growth = median_growth(measured["resident"], first=5, window=5)
    told = f"{growth / 2**20:.1f} MiB more, of which the log has {measured['log'][-1] / 2**20:.2f} MiB"
    assert growth < 0.02 * statistics.median(measured["resident"][5:10]), told


def test_rollouts_leave_no_tensor_behind(tmp_path):
    """Sharper than resident memory: one tensor kept from each rollout would show."""
    measured = soak(tmp_path, 60, Watch(tensors=lambda state: tensors()), save_steps=15, eval_steps=15)["tensors"]
    # the very first steps make the optimizer's state; sizes differ by the lengths of completions
    counts, sizes = zip(*measured[1:])
    assert max(counts) - min(counts) < 10, counts
    assert max(sizes) - min(sizes) < 2**16, sizes
