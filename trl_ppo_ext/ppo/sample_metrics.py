"""Metrics of sampled completions: rewards, KL, lengths, and what shows that a reward is hacked."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..rewards import Reward, Scored
from . import math as ppo_math
from .metrics import Metrics


class SampleMetrics:
    """Adds the metrics of a batch of completions."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        monitors: Sequence[Reward],
        all_sum: Callable[[Tensor], Tensor],
        gather: Callable[[Tensor], Tensor],
    ):
        self.rewards = rewards
        self.monitors = monitors
        self.all_sum = all_sum
        self.gather = gather

    def log_rewards(self, scored: Scored, counted: Tensor, metrics: Metrics) -> None:
        """Each reward where it applies, and their sum."""
        for reward, scores, failed in zip(self.rewards, scored.rewards.unbind(1), scored.failed.unbind(1)):
            applies = counted & ~scores.isnan() & ~failed
            metrics.mean(f"rewards/{reward.name}/mean", scores, applies)
            metrics.mean(f"rewards/{reward.name}/std", self._deviation(scores.nan_to_num(), applies))
            metrics.total(f"rewards/{reward.name}/failed", failed & counted)
        counted = counted & scored.usable
        metrics.mean("reward", scored.totals, counted)
        metrics.mean("reward_std", self._deviation(scored.totals, counted))

    def log_tokens(self, kl: Tensor, entropies: Tensor, mask: Tensor, counted: Tensor, metrics: Metrics) -> None:
        """KL and entropy."""
        metrics.mean("kl", kl, mask)
        metrics.mean("kl_per_completion", (kl * mask).sum(1), counted)
        metrics.mean("entropy", entropies, mask)

    def log_completions(self, lengths: Tensor, stopped: Tensor, counted: Tensor, metrics: Metrics) -> None:
        """Lengths, and how completions ended."""
        metrics.mean("completions/mean_length", lengths, counted)
        metrics.maximum("completions/max_length", lengths, counted)
        metrics.minimum("completions/min_length", lengths, counted)
        metrics.mean("completions/clipped_ratio", ~stopped, counted)
        metrics.mean("completions/mean_terminated_length", lengths, stopped & counted)

    def log_hacking(
        self,
        completions: Sequence,
        scored: Scored,
        monitored: Tensor,
        lengths: Tensor,
        counted: Tensor,
        metrics: Metrics,
    ) -> None:
        """What shows that a reward is climbed and its purpose is not."""
        correlation = ppo_math.masked_correlation(scored.totals, lengths, counted, self.all_sum)
        metrics.mean("reward/length_correlation", correlation)
        metrics.mean("completions/repeated_ratio", self._repeated(completions, counted))
        applies = ~scored.rewards.isnan()
        if len(self.rewards) > 1:
            mean = scored.rewards.nanmean(1, keepdim=True)
            squares = ((scored.rewards - mean) ** 2).nansum(1) / (applies.sum(1) - 1).clamp(min=1)
            metrics.mean("rewards/disagreement", squares.sqrt(), counted & (applies.sum(1) > 1))
        for reward, scores in zip(self.monitors, monitored.unbind(1)):
            applies = counted & ~scores.isnan()
            metrics.mean(f"monitor/{reward.name}/mean", scores, applies)
            metrics.mean(f"monitor/{reward.name}/gap", scored.totals - scores, applies)

    def _repeated(self, completions: Sequence, counted: Tensor) -> Tensor:
        """Share of completions, over all processes, that occurred before; digests travel, not texts."""
        digests = [hashlib.sha256(str(text).encode()).digest()[:8] for text in completions]
        numbers = [int.from_bytes(digest, "big", signed=True) for digest in digests]
        everyone = self.gather(torch.tensor(numbers, device=counted.device))
        kept = everyone[self.gather(counted)]
        return 1 - torch.tensor(len(kept.unique()) / max(len(kept), 1), device=counted.device)

    def _deviation(self, x: Tensor, mask: Tensor) -> Tensor:
        return ppo_math.masked_var(x, mask, self.all_sum).sqrt()
