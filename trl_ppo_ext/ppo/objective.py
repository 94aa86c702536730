"""The loss of a micro-batch: policy, values, KL, entropy, supervised rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..modeling import TokenOutputs
from ..sequences import MicroBatch, Rollout, Sequences
from . import math as ppo_math
from .metrics import Metrics
from .nonfinite import finite_rows
from .samples import Coefficients


def loss_denominators(
    response_mask: Tensor,
    rows: Tensor,
    aggregation: str,
    max_completion_length: int,
    all_sum: Callable[[Tensor], Tensor],
) -> Tensor:
    """What the loss of each optimizer step is divided by, counted over all its micro-batches and processes.

    Source: constant length: https://huggingface.co/papers/2503.20783
    """
    lengths = response_mask.sum(1)
    counts = lengths if aggregation == "token" else (lengths > 0).long()
    if aggregation == "constant":
        counts = counts * max_completion_length
    return all_sum(counts[rows.to(counts.device)].sum((1, 2)))


class LossTerms(NamedTuple):
    """What stays the same over all updates of a rollout."""

    coefficients: Coefficients  # coefficients of KL and entropy
    denominators: Tensor  # [steps] What the loss of each optimizer step is divided by
    ptx_denominators: Tensor | None = None  # [steps] The same for the supervised loss, in tokens


class LossOutputs(NamedTuple):
    """A micro-batch's share."""

    loss: Tensor  # its share of the optimizer step's loss, to be summed over micro-batches and processes
    moved: Tensor  # [2] KL from the policy that sampled, summed over its tokens, and their number
    finite: dict[str, Tensor]  # of shape [batch], by name: whether all that a row gave is finite


class Objective:
    """PPO's loss."""

    def __init__(self, args: Any, metrics: Metrics):
        self.args = args
        self.metrics = metrics
        self.with_entropy = args.entropy_coef != 0 or args.entropy_target is not None
        self.kl_in_loss = args.kl_placement != "reward"
        self.exact_kl = self.kl_in_loss and args.kl_estimator == "exact"
        # "constant" is a sum over tokens with a denominator of its own
        self.aggregation: ppo_math.Aggregation = (
            "sequence_sum" if args.loss_aggregation == "constant" else args.loss_aggregation
        )
        self.clip_low = args.cliprange
        self.clip_high = args.cliprange if args.cliprange_high is None else args.cliprange_high

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, terms: LossTerms) -> LossOutputs:
        """Loss of a micro-batch."""
        args, rollout, mask = self.args, micro_batch.rollout, micro_batch.rollout.response_mask
        outputs = model(rollout.sequences, args.temperature, self.with_entropy, self.exact_kl)
        per_token = self._policy_loss(outputs.logprobs, rollout)
        if outputs.values is not None and rollout.old_values is not None and rollout.returns is not None:
            value_loss = self._value_loss(outputs.values, rollout.old_values, rollout.returns, mask)
            per_token = per_token + args.vf_coef * value_loss
        if self.kl_in_loss:
            per_token = per_token + terms.coefficients.kl * self._kl(outputs, rollout)
        if self.with_entropy:
            per_token = per_token - terms.coefficients.entropy * outputs.entropies
        denominator = terms.denominators[micro_batch.step]
        loss = ppo_math.aggregate_loss(per_token, mask, self.aggregation, denominator)
        finite = self._finite(outputs, per_token)
        if micro_batch.ptx is not None and terms.ptx_denominators is not None:
            nll = self._supervised_loss(model, micro_batch.ptx)
            loss = loss + args.ptx_coef * nll.sum() / terms.ptx_denominators[micro_batch.step].clamp(min=1)
        return LossOutputs(loss, self._moved(outputs.logprobs, rollout), finite)

    @staticmethod
    def _finite(outputs: TokenOutputs, per_token: Tensor) -> dict[str, Tensor]:
        """Which rows are finite in what the forward gave, and in the loss; on the device, nothing waits for it."""
        numbers = {"log-probability": outputs.logprobs, "value": outputs.values, "loss": per_token}
        return {name: finite_rows([x]) for name, x in numbers.items() if x is not None}

    def _policy_loss(self, logprobs: Tensor, rollout: Rollout) -> Tensor:
        args, mask = self.args, rollout.response_mask
        if args.importance_sampling_level == "sequence":
            logprobs = ppo_math.sequence_logprobs(logprobs, rollout.old_logprobs, mask)
        loss = ppo_math.clipped_policy_loss(
            logprobs, rollout.old_logprobs, rollout.advantages, self.clip_low, self.clip_high, args.dual_clip
        )
        with torch.no_grad():
            bound = ppo_math.LOG_RATIO_BOUND
            ratio = (logprobs - rollout.old_logprobs).clamp(-bound, bound).exp()
            too_low = (ratio < 1 - self.clip_low) & (rollout.advantages < 0)
            too_high = (ratio > 1 + self.clip_high) & (rollout.advantages > 0)
            self.metrics.mean("loss/policy", loss, mask)
            self.metrics.mean("ratio/mean", ratio, mask)
            self.metrics.maximum("ratio/max", ratio, mask)
            self.metrics.mean("clip_ratio/low_mean", too_low, mask)
            self.metrics.mean("clip_ratio/high_mean", too_high, mask)
            self.metrics.mean("clip_ratio/region_mean", too_low | too_high, mask)
            if args.dual_clip is not None:
                too_far = (ratio > args.dual_clip) & (rollout.advantages < 0)
                self.metrics.mean("clip_ratio/dual_mean", too_far, mask)
        return loss

    def _value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        loss = ppo_math.clipped_value_loss(values, old_values, returns, self.args.cliprange_value)
        self.metrics.mean("loss/value", loss, mask)
        unclipped = 0.5 * (values.detach() - returns) ** 2
        self.metrics.mean("value/clip_ratio", loss.detach() > unclipped, mask)
        return loss

    def _kl(self, outputs: TokenOutputs, rollout: Rollout) -> Tensor:
        if outputs.kls is not None:
            kl = outputs.kls
        else:
            kl = ppo_math.kl_estimate(outputs.logprobs, rollout.ref_logprobs, self.args.kl_estimator)
        self.metrics.mean("loss/kl", kl, rollout.response_mask)
        return kl

    def _supervised_loss(self, model: nn.Module, ptx: Sequences) -> Tensor:
        """Negative log-likelihood of the supervised rows, at each token."""
        logprobs = model(ptx, with_values=False).logprobs  # at temperature 1, whatever completions are sampled at
        self.metrics.mean("loss/ptx", -logprobs, ptx.completion_mask)
        return -logprobs  # 0 at padding

    @torch.no_grad()
    def _moved(self, logprobs: Tensor, rollout: Rollout) -> Tensor:
        mask = rollout.response_mask
        kl = ppo_math.kl_estimate(rollout.old_logprobs, logprobs, "k3").masked_fill(~mask, 0)
        self.metrics.mean("approx_kl", kl, mask)
        return torch.stack([kl.sum(), mask.sum().to(kl.dtype)])
