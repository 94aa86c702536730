"""What a rollout samples: episodes of one turn or many, with their generators, tools and
environments."""

# ruff: noqa: F401
from .environments import Environments, StepResult
from .episode import Episode, to_sequences
from .generator import Generator, ensure_pad_token, stop_token_ids
from .play import Player, build_player
