"""Random numbers that leave those of the training alone."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed


def _generators(device: torch.device) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How the state of each global generator is read and set; a model may be spread over all devices of its kind."""
    found: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    module = torch.get_device_module(device)
    for reads, sets in (("get_rng_state_all", "set_rng_state_all"), ("get_rng_state", "set_rng_state")):
        if hasattr(module, reads):  # the CPU's has neither, that of a single device only the second
            return [*found, (getattr(module, reads), getattr(module, sets))]
    return found


@contextmanager
def seeded_apart(seed: int, process_index: int, device: torch.device) -> Iterator[None]:
    """Within this context all random numbers begin from a seed; afterwards they go on as if nothing was drawn."""
    generators = _generators(device)
    states = [read() for read, _ in generators]
    try:
        set_seed(seed + process_index)
        yield
    finally:
        for state, (_, put) in zip(states, generators):
            put(state)
