"""Generators: what samples completions."""

from .base import Generator, cut_at_stop
from .transformers import TransformersGenerator, ensure_pad_token, stop_token_ids

__all__ = ["Generator", "TransformersGenerator", "cut_at_stop", "ensure_pad_token", "stop_token_ids"]
