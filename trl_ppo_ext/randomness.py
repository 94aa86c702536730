"""Random states of a process: return to an earlier one, and draw from another stream for a while."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from accelerate.utils import set_seed


def capture_random_state(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the random state of this moment."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    backend = None if device.type == "cpu" else torch.get_device_module(device)
    on_device = None if backend is None else backend.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if backend is not None:
            backend.set_rng_state(on_device)

    return restore


@contextmanager
def fixed_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all random numbers within a context; afterwards they continue as if none had been drawn."""
    restore = capture_random_state(device)
    try:
        set_seed(seed)
        yield
    finally:
        restore()
