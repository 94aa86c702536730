"""Which generator a run samples with."""

from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..modeling import ActorCritic
from .base import Generator
from .continuous import ContinuousBatchingGenerator
from .transformers import TransformersGenerator


def build_generator(
    actor_critic: ActorCritic, tokenizer: PreTrainedTokenizerBase, args: Any, accelerator: Accelerator
) -> Generator:
    """The generator of `args.generation_backend`."""
    if args.generation_backend == "continuous_batching":
        return ContinuousBatchingGenerator(actor_critic, tokenizer, args, accelerator)
    return TransformersGenerator(actor_critic, tokenizer, args, accelerator)
