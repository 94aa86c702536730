"""Progress of a run between two optimizer steps, as one value.

A checkpoint saves it, and after an error the last complete step's is restored.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..episodes.engine import Ahead
from ..rewards.scoring import RandomState
from .rollouts import Rollout
from .state import RunState


class RolloutInProgress(NamedTuple):
    """A rollout with optimizer steps left."""

    rollout: Rollout
    rows: Tensor  # of each minibatch, [steps, minibatch]
    stopped_early: bool  # `target_kl` has ended its updates

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return self.rollout.state_dict() | {
            "rows": self.rows,
            "stopped_early": torch.tensor(self.stopped_early),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], device: torch.device
    ) -> "RolloutInProgress":
        """Build the value from its [`tensors`]."""
        of_rollout = dict(tensors)
        rows = of_rollout.pop("rows")
        stopped_early = of_rollout.pop("stopped_early")
        return cls(Rollout.from_state_dict(of_rollout, device), rows, bool(stopped_early))


class Progress(NamedTuple):
    """What an optimizer step leaves to the next, on one rank.

    Weights, optimizer, schedule and `TrainerState` are kept by the Trainer.
    """

    run: RunState
    rollout: RolloutInProgress | None = None  # None between two rollouts
    metrics: Mapping[str, Tensor] = {}  # sums since the last log
    loss: Tensor = torch.zeros(())  # sum since the last log
    last_logged: int = 0  # optimizer step
    skipped: int = 0  # optimizer steps in a row
    tokens_seen: int = 0
    ahead: Ahead | None = None  # the next rollout, if a server samples it already
    random: RandomState | None = None  # None from a checkpoint: the Trainer has a file for it

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name on the CPU, for the checkpoint of this rank. All ranks must call it."""
        of_run = {"played": self.run.played}
        if self.run.critic.first_fit is not None:
            of_run["first_fit"] = self.run.critic.first_fit
        numbers = {
            "loss": self.loss.item(),
            "last_logged": self.last_logged,
            "skipped": self.skipped,
            "tokens_seen": self.tokens_seen,
        }
        parts = {
            "rollout": {} if self.rollout is None else self.rollout.tensors(),
            "ahead": {} if self.ahead is None else self.ahead.state_dict(),
            "metrics": self.metrics,
            "numbers": {x: torch.tensor(n, dtype=torch.float64) for x, n in numbers.items()},
            "run": of_run,
        }
        return {
            f"{part}.{name}": x.detach().cpu().contiguous()
            for part, tensors in parts.items()
            for name, x in tensors.items()
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], run: RunState, device: torch.device
    ) -> "Progress":
        """Build the value from its [`tensors`]; `run` comes from the JSON file that all ranks
        share."""
        parts: dict[str, dict[str, Tensor]] = {}
        for key, x in tensors.items():
            part, _, name = key.partition(".")
            parts.setdefault(part, {})[name] = x
        numbers = {name: x.item() for name, x in parts["numbers"].items()}
        critic = run.critic._replace(first_fit=parts["run"].get("first_fit"))
        rollout = None
        if "rollout" in parts:
            rollout = RolloutInProgress.from_tensors(parts["rollout"], device)
        return cls(
            run=run._replace(played=parts["run"]["played"], critic=critic),
            rollout=rollout,
            metrics=parts.get("metrics", {}),
            loss=torch.tensor(numbers["loss"], device=device),
            last_logged=int(numbers["last_logged"]),
            skipped=int(numbers["skipped"]),
            tokens_seen=int(numbers["tokens_seen"]),
            ahead=Ahead.from_state_dict(parts["ahead"]) if "ahead" in parts else None,
        )
