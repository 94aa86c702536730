"""State of all random numbers of this process, as one value."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor


class RandomState(NamedTuple):
    """Random numbers of Python, NumPy and PyTorch, on the CPU and on the device."""

    device: torch.device
    python: Any
    numpy: Any
    cpu: Tensor
    on_device: Tensor | None  # None on a CPU

    @classmethod
    def capture(cls, device: torch.device) -> "RandomState":
        """State of this moment."""
        on_device = None
        if device.type != "cpu":
            on_device = torch.get_device_module(device).get_rng_state()
        return cls(
            device=device,
            python=random.getstate(),
            numpy=np.random.get_state(),
            cpu=torch.get_rng_state(),
            on_device=on_device,
        )

    def restore(self) -> None:
        """Continue from this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.on_device)


@contextmanager
def fixed_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all random numbers within a context; afterwards they continue as if none had been
    drawn."""
    before = RandomState.capture(device)
    try:
        set_seed(seed)
        yield
    finally:
        before.restore()
