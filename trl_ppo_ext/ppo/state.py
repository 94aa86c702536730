"""What one rollout leaves to the next. Collecting returns a new state and changes no weight in place."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .math import Moments
from .places import Information


class RunState(NamedTuple):
    """KL coefficient and running statistics; the critic reads `rewards` and predicts `returns` in their units."""

    kl_coef: float
    scores: Moments = Moments()  # of completions, if they are normalized
    outcomes: Moments = Moments()  # the part of these that is at last tokens
    returns: Moments = Moments()  # Monte Carlo returns of recent rollouts
    rewards: Moments = Moments()  # rewards per token of recent rollouts
    information: Information = Information()  # of scores, by which the default λ is chosen
    played: Tensor = torch.zeros(2, 0)  # [2, rows] episodes of each row, and the sum of their scores, for a curriculum

    @property
    def critic(self) -> dict[str, Moments]:
        """Moments in whose units the critic reads and predicts, for its file."""
        return {"returns": self.returns, "rewards": self.rewards}

    def with_critic(self, moments: Mapping[str, Any]) -> "RunState":
        """State with the units of a saved critic."""
        named: dict[str, Any] = {name: Moments(*map(float, x)) for name, x in moments.items()}
        return self._replace(**named)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers of a checkpoint, which has tensors elsewhere."""
        fields = {name: x for name, x in self._asdict().items() if name != "played"}
        return {name: [*x] if isinstance(x, tuple) else x for name, x in fields.items()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "RunState":
        """Restore the state that [`to_json`] returned."""
        kinds = {name: Information if name == "information" else Moments for name in saved}
        fields: dict[str, Any] = {name: kinds[name](*x) if isinstance(x, list) else x for name, x in saved.items()}
        return cls(**fields)
