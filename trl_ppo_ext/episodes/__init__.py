"""What a rollout samples: episodes of one turn or many, with their generators, tools and environments."""

from .environments import Environments as Environments
from .environments import openenv as openenv
from .episode import Episode as Episode
from .episode import to_sequences as to_sequences
from .play import Player as Player
from .play import build_player as build_player
from .tools import StepResult as StepResult
from .transformers import Generator as Generator
from .transformers import ensure_pad_token as ensure_pad_token
from .transformers import stop_token_ids as stop_token_ids
