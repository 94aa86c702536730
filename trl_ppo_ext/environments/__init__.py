"""Environments: turns of an episode, tools, and rewards per turn."""

from .chat import ChatFormat as ChatFormat
from .episodes import Environments as Environments
from .episodes import Episode as Episode
from .episodes import EpisodeSampler as EpisodeSampler
from .episodes import RolloutFunction as RolloutFunction
from .protocol import openenv as openenv
from .tools import StepResult as StepResult
