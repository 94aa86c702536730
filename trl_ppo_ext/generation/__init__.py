"""Generators: what samples completions."""

from .base import Generator, cut_at_stop
from .build import build_generator
from .continuous import ContinuousBatchingGenerator
from .transformers import TransformersGenerator, ensure_pad_token, stop_token_ids

__all__ = [
    "ContinuousBatchingGenerator",
    "Generator",
    "TransformersGenerator",
    "build_generator",
    "cut_at_stop",
    "ensure_pad_token",
    "stop_token_ids",
]
