"""From the rewards' sum to the score that is optimised, with what it remembers over a run."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class RunningMoments:
    """Mean and variance of everything seen so far, the same on any number of processes.

    Batches are merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979).
    """

    def __init__(self):
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    def update(self, x: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor]) -> None:
        """Take in a batch."""
        # float64 where the device has it: the sums must not depend on how they were cut
        x, weight = x.double(), mask.double()
        total, count = all_sum(torch.stack([(x * weight).sum(), weight.sum()])).tolist()
        if not count:
            return
        mean = total / count
        squares = all_sum((weight * (x - mean) ** 2).sum()).item()
        shift, merged = mean - self.mean, self.count + count
        self.squares += squares + shift**2 * self.count * count / merged
        self.mean += shift * count / merged
        self.count = merged

    @property
    def deviation(self) -> float:
        """Standard deviation with Bessel's correction; 1 for fewer than two values, or where they are all equal."""
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return math.sqrt(variance) if variance > 0 else 1.0


class RewardShaping:
    """Baseline, normalisation, clipping, and the penalty for a missing EOS, in this order."""

    def __init__(self, args: Any):
        self.args = args
        self.baseline: float | None = None
        self.moments = RunningMoments()

    def __call__(self, totals: Tensor, stopped: Tensor, usable: Tensor, all_sum: Callable[[Tensor], Tensor]) -> Tensor:
        """Shape the scores of a rollout, and remember them."""
        args, scores = self.args, totals
        if args.reward_baseline == "reference":
            if self.baseline is None:
                # the first rollout is sampled from the policy as it started, which is the reference
                first = RunningMoments()
                first.update(totals, usable, all_sum)
                self.baseline = first.mean
            scores = scores - self.baseline
        if args.normalize_rewards:
            self.moments.update(scores, usable, all_sum)
            scores = (scores - self.moments.mean) / (self.moments.deviation + 1e-8)
        if args.reward_clip_range is not None:
            scores = scores.clamp(-args.reward_clip_range, args.reward_clip_range)
        if args.missing_eos_penalty is not None:
            scores = scores - args.missing_eos_penalty * (~stopped)
        return scores

    def state_dict(self) -> dict[str, float | None]:
        """What a checkpoint keeps."""
        moments = {"count": self.moments.count, "mean": self.moments.mean, "squares": self.moments.squares}
        return {"baseline": self.baseline, **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what [`RewardShaping.state_dict`] gave."""
        self.baseline = state["baseline"]
        self.moments.count, self.moments.mean, self.moments.squares = (
            float(state[name]) for name in ("count", "mean", "squares")
        )
