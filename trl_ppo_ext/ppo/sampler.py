"""Comparison of the policy with another program that samples for it, such as vLLM."""

import torch
from torch import Tensor

from ..config import PPOConfig
from ..modeling import TokenScores
from . import math as ppo_math
from .math import Reduction
from .metrics import Metrics

ROUNDING, ROUNDING_16_BITS = 0.01, 0.1  # nats per token that it may explain in the mean of a rollout


class SamplerError(RuntimeError):
    """Raised when completions were not sampled from the policy."""


class SamplerComparison:
    """Logs how far the sampler's log-probs are off, ends a run that is not sampled from, and weighs advantages."""

    def __init__(self, args: PPOConfig, dtype: torch.dtype, all_sum: Reduction):
        names = ("correction", "mode", "clip_max", "clip_min")
        self.corrects, *self.limits = (getattr(args, f"vllm_importance_sampling_{name}") for name in names)
        self.all_sum = all_sum
        self.tolerance = args.vllm_options.max_logp_difference
        if self.tolerance is None and not args.filters:  # filtered log-probs differ by the mass that was kept
            in_32_bits = dtype == torch.float32 and not (args.bf16 or args.fp16)
            self.tolerance = ROUNDING if in_32_bits else ROUNDING_16_BITS

    def weights(self, tokens: TokenScores, sampler_logprobs: Tensor, mask: Tensor, metrics: Metrics) -> Tensor | None:
        """Weights of the advantages, `[batch, response]`; `None` without a correction.

        Raises [`SamplerError`] on all ranks if the mean difference is beyond rounding.
        """
        differences = (tokens.logprobs - sampler_logprobs).abs()
        metrics.mean("sampling/sampling_logp_difference/mean", differences, mask)
        metrics.maximum("sampling/sampling_logp_difference/max", differences, mask)
        mean = ppo_math.masked_mean(differences, mask, self.all_sum).item()
        if self.tolerance is not None and not mean <= self.tolerance:  # also NaN
            cause = (
                "It has another base than the policy (`vllm_kwargs['base_model']`), or samples with an older adapter, "
                "or its `--logprobs-mode` is not processed_logprobs."
            )
            reference = tokens.logprobs if tokens.ref_logprobs is None else tokens.ref_logprobs
            if ppo_math.masked_mean((reference - sampler_logprobs).abs(), mask, self.all_sum) <= self.tolerance:
                cause = "It sampled from the reference: the policy's adapter is not applied."
            raise SamplerError(
                f"Log-probs of the policy and of vLLM differ by {mean:.3g} nats per token in this rollout, and "
                f"rounding explains {self.tolerance:g}. {cause} A larger `vllm_kwargs['max_logp_difference']` accepts "
                "the difference."
            )
        if not self.corrects:
            return None
        weights = ppo_math.sampler_weights(tokens.logprobs, sampler_logprobs, mask, *self.limits)
        metrics.mean("sampling/importance_sampling_ratio/mean", weights, mask)
        metrics.minimum("sampling/importance_sampling_ratio/min", weights, mask)
        metrics.maximum("sampling/importance_sampling_ratio/max", weights, mask)
        return weights
