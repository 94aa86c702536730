"""Generators: transformers' `generate`, and vLLM."""

from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..modeling import ActorCritic
from .engine import VLLMError as VLLMError
from .transformers import Generator as Generator
from .transformers import TransformersGenerator as TransformersGenerator
from .transformers import ensure_pad_token as ensure_pad_token
from .transformers import stop_token_ids as stop_token_ids
from .vllm import VLLMGenerator as VLLMGenerator


def build_generator(
    actor_critic: ActorCritic, tokenizer: PreTrainedTokenizerBase, args: Any, accelerator: Accelerator
) -> Generator:
    """The generator of `generation_backend`."""
    kinds: dict[str, type[Any]] = {"transformers": TransformersGenerator, "vllm": VLLMGenerator}
    return kinds[args.generation_backend](actor_critic, tokenizer, args, accelerator)
