"""What samples: a generator of turns, and the tools and environments that answer them."""

from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..modeling import ActorCritic
from .chat import ChatFormat as ChatFormat
from .engine import VLLMError as VLLMError
from .play import Environments as Environments
from .play import Episode as Episode
from .play import EpisodeSampler as EpisodeSampler
from .play import RolloutFunction as RolloutFunction
from .protocols import openenv as openenv
from .tools import StepResult as StepResult
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
