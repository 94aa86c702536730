"""What one rollout leaves to the next.

Collecting returns a new state and changes no weight in place.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..modeling.critics import CriticState
from ..ppo_math import Moments
from ..rewards.prefixes import Foresight
from .places import Information


class RunState(NamedTuple):
    """KL coefficient and running statistics."""

    kl_coef: float
    # Both are by environment, under "" if there are not several, and filled if scores are
    # normalized.
    scores: Mapping[str, Moments] = {}  # of completions
    outcomes: Mapping[str, Moments] = {}  # of what enters at last tokens
    critic: CriticState = CriticState()
    # the second largest and the largest deviation of returns within a rollout
    spreads: tuple[float, float] = (0.0, 0.0)
    # of scores, by environment, by which the default λ is chosen
    information: Mapping[str, Information] = {}
    # of reward models that score prefixes, by name
    foresight: Mapping[str, Foresight] = {}
    # [2, rows] episodes of each row, and the sum of their scores, for a curriculum
    played: Tensor = torch.zeros(2, 0)

    def without_scores(self) -> "RunState":
        """State without statistics of scores: those of other settings have another scale."""
        critic = self.critic._replace(returns=Moments(), rewards=Moments())
        return RunState(self.kl_coef, critic=critic, played=self.played)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers of a checkpoint, which has tensors elsewhere."""
        numbers = {name: _plain(x) for name, x in self._asdict().items() if name != "played"}
        foresight = {name: sums.to_json() for name, sums in self.foresight.items()}
        return numbers | {"critic": self.critic.to_json(), "foresight": foresight}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "RunState":
        """Restore the state that [`to_json`] returned."""
        fields: dict[str, Any] = dict(saved)
        for name in ("scores", "outcomes"):
            fields[name] = {key: Moments(*numbers) for key, numbers in saved[name].items()}
        fields["foresight"] = {
            key: Foresight(*numbers) for key, numbers in saved["foresight"].items()
        }
        fields["information"] = {
            key: Information(*sums) for key, sums in saved["information"].items()
        }
        fields["spreads"] = tuple(saved["spreads"])
        fields["critic"] = CriticState.from_json(saved["critic"])
        return cls(**fields)


def _plain(x: Any) -> Any:
    """Statistics as lists of numbers."""
    if isinstance(x, Mapping):
        return {name: list(numbers) for name, numbers in x.items()}
    if isinstance(x, tuple):
        return list(x)
    return x
