"""What a run will need, before it starts."""

from .estimate import PROMPT_LENGTH, MemoryEstimate, estimate_memory
from .fit import GIB, GPUS, Proposal, gpu_memory

__all__ = ["GIB", "GPUS", "PROMPT_LENGTH", "MemoryEstimate", "Proposal", "estimate_memory", "gpu_memory"]
