"""Generators: transformers' `generate`, and its continuous batching."""

from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..modeling import ActorCritic
from .continuous import ContinuousBatchingGenerator
from .transformers import Generator, TransformersGenerator, cut_at_stop, ensure_pad_token, stop_token_ids

__all__ = [
    "ContinuousBatchingGenerator",
    "Generator",
    "TransformersGenerator",
    "build_generator",
    "cut_at_stop",
    "ensure_pad_token",
    "stop_token_ids",
]


def build_generator(
    actor_critic: ActorCritic, tokenizer: PreTrainedTokenizerBase, args: Any, accelerator: Accelerator
) -> Generator:
    """The generator of `generation_backend`."""
    if args.generation_backend == "continuous_batching":
        return ContinuousBatchingGenerator(actor_critic, tokenizer, args, accelerator)
    return TransformersGenerator(actor_critic, tokenizer, args, accelerator)
