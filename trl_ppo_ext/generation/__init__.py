"""Generators: transformers' `generate`, and its continuous batching."""

from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..modeling import ActorCritic
from .continuous import ContinuousBatchingGenerator as ContinuousBatchingGenerator
from .transformers import Generator as Generator
from .transformers import TransformersGenerator as TransformersGenerator
from .transformers import ensure_pad_token as ensure_pad_token
from .transformers import stop_token_ids as stop_token_ids


def build_generator(
    actor_critic: ActorCritic, tokenizer: PreTrainedTokenizerBase, args: Any, accelerator: Accelerator
) -> Generator:
    """The generator of `generation_backend`."""
    if args.generation_backend == "continuous_batching":
        return ContinuousBatchingGenerator(actor_critic, tokenizer, args, accelerator)
    return TransformersGenerator(actor_critic, tokenizer, args, accelerator)
