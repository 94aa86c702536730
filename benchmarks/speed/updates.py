"""One optimizer step of a run, by kernels and waits of the host; a part of gpu.py."""

from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

GPU = torch.cuda.is_available()
LONGEST_KERNELS = 14
# calls of CUDA in which the host waits for the device
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class ProfiledStep(TrainerCallback):
    """Times an optimizer step, and profiles the one after it."""

    def __init__(self, step: int):
        self.step = step
        self.began = 0.0
        self.seconds = 0.0
        self.record: Any = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            synchronize()
            self.began = perf_counter()
        elif state.global_step == self.step + 1:
            activities = [ProfilerActivity.CPU]
            if GPU:
                activities.append(ProfilerActivity.CUDA)
            self.record = profile(activities=activities)
            self.record.start()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step + 1:
            synchronize()
            self.seconds = perf_counter() - self.began
        elif state.global_step == self.step + 2:
            synchronize()
            self.record.stop()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def summary(step: ProfiledStep) -> dict[str, Any]:
    """Seconds of a step, its kernels, operations and waits, and the longest kernels."""
    kernels = []
    operations: Counter[str] = Counter()
    waits = 0
    for x in step.record.key_averages():
        if x.device_type != DeviceType.CPU:
            kernels.append((x.key[:70], x.count, x.self_device_time_total / 1e6))
        elif x.key.startswith("aten::"):
            operations[x.key] += x.count
        elif x.key in WAITS:
            waits += x.count
    kernels.sort(key=lambda kernel: -kernel[2])
    measured = {
        "step s": step.seconds,
        "kernels": sum(count for _, count, _ in kernels),
        "busy s": sum(busy for *_, busy in kernels),
        "operations": operations.total(),
        "waits": waits,
    }
    return {
        "measured": {name: x for name, x in measured.items() if GPU or name not in CUDA_ONLY},
        "longest": [
            [name, count, round(busy, 4)] for name, count, busy in kernels[:LONGEST_KERNELS]
        ],
        "most frequent": operations.most_common(LONGEST_KERNELS),
    }


CUDA_ONLY = ("kernels", "busy s", "waits")


def updates(case: Any, directory: Path, trainer_of: Any, epochs: int) -> dict[str, Any]:
    """Profile a step of the second rollout that samples nothing."""
    step = ProfiledStep(epochs + 1)
    trainer_of(case, directory, [step]).train()
    return summary(step)
