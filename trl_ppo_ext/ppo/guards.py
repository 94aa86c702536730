"""Guards of a rollout: NaN and inf are excluded and reported, and completions must be sampled
from the policy."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers.utils import logging

from .. import ppo_math
from ..config import PPOConfig
from ..modeling import ActorCritic, TokenScores
from ..ppo_math import Reduction
from ..sequences import LENGTHS, ROLES, Sequences
from .metrics import Metrics

logger = logging.get_logger(__name__)

MAX_SKIPPED_STEPS = 5  # in a row
# nats per token by which a sampler may differ in the mean of a rollout
ROUNDING = 0.01
ROUNDING_16_BITS = 0.1
COMPARED = 8  # completions of each rank that are also scored with the adapter of the last rollout
_NAMES = {"logprobs": "log-probs", "ref_logprobs": "reference log-probs", "kls": "KLs"}


class NonFiniteError(RuntimeError):
    """Raised when no completion of a rollout is finite, or too many gradients in a row are not."""


def report_nonfinite(
    tokens: TokenScores, valid: Tensor, all_sum: Reduction, rank: int, step: int | None
) -> None:
    """Count the scores that are not finite over all ranks, and log the counts on the first one.

    In training, where `step` is not `None`, raise if no completion is finite.
    """
    names = [name for name, x in tokens._asdict().items() if x is not None]
    rows = [~getattr(tokens, name).isfinite().all(1) for name in names]
    # one reduction that every rank reaches, so that all continue or stop together
    counts = all_sum(torch.stack([(x & valid).sum() for x in (*rows, ~tokens.is_finite, valid)]))
    *by_name, excluded, completions = counts.tolist()
    parts = [
        f"the {_NAMES.get(name, name)} of {count}" for name, count in zip(names, by_name) if count
    ]
    details = f"non-finite: {', '.join(parts)} of {completions} completions"
    if excluded == completions and step is not None:
        raise NonFiniteError(
            f"The rollout of optimizer step {step} has no finite completion on any rank; "
            f"{details}. The weights are unchanged. If the run went well so far, resume from an "
            "earlier checkpoint with a lower learning rate; if it has just begun, load the base "
            "in bfloat16 or float32 (float16 overflows), or check its weights."
        )
    if rank == 0:
        logger.warning("%d of %d completions are excluded; %s.", excluded, completions, details)


def stand_ins(sequences: Sequences, excluded: Tensor, gather: Reduction) -> Sequences:
    """Sequences to train on; each excluded one is replaced by the first two tokens of a finite one.

    A mask of 0 is not enough: 0 · inf is NaN. No later token influences these two, so they are
    finite, too. Rows then have other lengths, so micro-batches may be cut as they were not scored,
    and first ratios are 1 up to rounding.
    """
    row = int((~excluded).long().argmax())
    ids = sequences.rows(torch.tensor([row])).packed.input_ids[:2]
    # a rank without a finite sequence takes another's
    offered = gather(torch.cat([ids, (~excluded[row])[None].long()])[None])
    first, second, _ = offered[offered[:, 2].argmax()]
    replaced = excluded.to(sequences.prompt_lengths.device)
    stand_ins = {"completion_ids": sequences.completion_ids.masked_fill(excluded[:, None], second)}
    for name in LENGTHS:
        lengths = getattr(sequences, name)
        if lengths is not None:
            stand_ins[name] = lengths.masked_fill(replaced, 1)
    if sequences.sampled is not None:
        first_only = torch.arange(sequences.sampled.shape[1]) == 0
        stand_ins["sampled"] = torch.where(replaced[:, None], first_only, sequences.sampled)
    for name in ("prompt_ids", *(f"{role}_prompt_ids" for role in ROLES)):
        others = getattr(sequences, name)
        if others is not None:
            stand_ins[name] = others.masked_fill(excluded[:, None], first)
    return replace(sequences, **stand_ins)


def count_skipped(skipped: int, is_finite: bool, step: int) -> int:
    """Optimizer steps in a row whose gradient is not finite; raise [`NonFiniteError`] if there
    are too many."""
    if is_finite:
        return 0
    skipped += 1
    logger.warning("Optimizer step %d is skipped: its gradient is not finite.", step)
    if skipped >= MAX_SKIPPED_STEPS:
        raise NonFiniteError(
            f"{skipped} optimizer steps in a row, up to step {step}, had a non-finite gradient and "
            "were skipped. Lower the learning rate, or check the rewards."
        )
    return skipped


class SamplerError(RuntimeError):
    """Raised when completions were not sampled from the policy."""


def rounding_tolerance(args: PPOConfig, dtype: torch.dtype) -> float:
    """Largest mean difference of log-probs, in nats per token, that rounding explains between the
    policy and a sampler with its weights."""
    in_32_bits = dtype == torch.float32 and not (args.bf16 or args.fp16)
    if in_32_bits:
        return ROUNDING
    return ROUNDING_16_BITS


def log_differences(
    tokens: TokenScores, sampler_logprobs: Tensor, mask: Tensor, metrics: Metrics
) -> Tensor:
    """Log how far the sampler's log-probs are from the policy's, and return the distances."""
    differences = (tokens.logprobs - sampler_logprobs).abs()
    metrics.mean("sampling/sampling_logp_difference/mean", differences, mask)
    metrics.maximum("sampling/sampling_logp_difference/max", differences, mask)
    return differences


def warn_of_differences(
    differences: Tensor, mask: Tensor, tolerance: float, all_sum: Reduction
) -> None:
    """Warn once if the policy does not sample from the distribution in which it is scored."""
    mean = ppo_math.masked_mean(differences, mask, all_sum).item()
    if not mean <= tolerance:  # also NaN
        logger.warning_once(
            "Sampling and scoring differ by more than rounding, so the policy learns from "
            "completions of another one: see `sampling/sampling_logp_difference/mean`. Try "
            "`generation_kwargs={'use_cache': False}`."
        )


class SamplerComparison:
    """Logs how far the sampler's log-probs are off, ends a run that is not sampled from, and
    weighs advantages."""

    def __init__(self, args: PPOConfig, dtype: torch.dtype, all_sum: Reduction):
        self.corrects = args.vllm_importance_sampling_correction
        self.limits = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max
        self.all_sum = all_sum
        self.temperature = args.temperature
        # adapters of the last rollouts, the latest first
        self.policies: list[dict[str, Tensor]] = []
        if args.vllm_options.overlap_rollouts:
            self.kept = 2
        else:
            self.kept = 1
        self.tolerance = args.vllm_options.max_logp_difference
        # who sets a limit has decided what is accepted
        self.checks_version = self.tolerance is None
        # Filters raise log-probs by −log(1 − removed mass). As each token rarer than x adds its
        # mass · −log(x) to the entropy, these have at most entropy / −log(x); all but the k
        # likeliest are rarer than 1 / (k + 1).
        rarest = [x for x in (args.top_k and 1 / (args.top_k + 1), args.min_p) if x]
        self.removed = 1 - args.top_p
        self.removed_per_nat = sum(-1 / math.log(min(x, 0.999)) for x in rarest)
        if self.tolerance is None and args.repetition_penalty == 1:  # its effect has no such bound
            self.tolerance = rounding_tolerance(args, dtype)

    def weights(
        self,
        tokens: TokenScores,
        sampler_logprobs: Tensor,
        mask: Tensor,
        metrics: Metrics,
        is_ahead: bool = False,
    ) -> Tensor | None:
        """Weights of the advantages, `[batch, response]`; `None` without a correction.

        Raises [`SamplerError`] on all ranks if the mean difference is beyond rounding, unless it
        was sampled ahead.
        """
        log_differences(tokens, sampler_logprobs, mask, metrics)
        if not is_ahead:
            self._check_rounding(tokens, sampler_logprobs, mask)
        if not self.corrects:
            return None
        weights = ppo_math.sampler_weights(tokens.logprobs, sampler_logprobs, mask, *self.limits)
        metrics.mean("sampling/importance_sampling_ratio/mean", weights, mask)
        metrics.minimum("sampling/importance_sampling_ratio/min", weights, mask)
        metrics.maximum("sampling/importance_sampling_ratio/max", weights, mask)
        share = ppo_math.effective_share(weights, mask, self.all_sum)
        # A rollout without a token that counts has no share.
        metrics.mean(
            "sampling/importance_sampling_ratio/effective_share",
            share,
            self.all_sum(mask.sum()) > 0,
        )
        return weights

    def _check_rounding(self, tokens: TokenScores, sampler_logprobs: Tensor, mask: Tensor) -> None:
        mean = self._unexplained(tokens.logprobs, tokens, sampler_logprobs, mask)
        if self.tolerance is not None and not mean <= self.tolerance:  # also NaN
            cause = (
                "It has another base than the policy (`vllm_kwargs['base_model']`), or samples "
                "with an older adapter, or its `--logprobs-mode` is not processed_logprobs."
            )
            reference = tokens.logprobs if tokens.ref_logprobs is None else tokens.ref_logprobs
            if self._unexplained(reference, tokens, sampler_logprobs, mask) <= self.tolerance:
                cause = "It sampled from the reference: the policy's adapter is not applied."
            raise SamplerError(
                f"Log-probs of the policy and of vLLM differ by {mean:.3g} nats per token in this "
                f"rollout, beyond what filters explain; rounding explains {self.tolerance:g}. "
                f"{cause} A larger `vllm_kwargs['max_logp_difference']` accepts the difference."
            )

    @torch.no_grad()
    def compare_with_last_adapter(
        self,
        actor_critic: ActorCritic,
        sequences: Sequences,
        tokens: TokenScores,
        sampled: Tensor,
        mask: Tensor,
        is_ahead: bool = False,
    ) -> None:
        """Raise [`SamplerError`] on all ranks if completions fit an older adapter better than the
        one that vLLM has.

        That is the policy's or, for a rollout that was sampled ahead, the last rollout's. If the
        policy hardly moved in between, both fit as well. A few completions tell, if the older fits
        better over many of their tokens.
        """
        now = {
            f"policy.{name}": x.detach().clone()
            for name, x in actor_critic.policy_parameters().items()
        }
        policies = self.policies
        self.policies = ([now] + self.policies)[: self.kept]
        if not policies or self.tolerance is None:
            return
        some = sequences.rows(torch.arange(min(COMPARED, len(sequences))))
        rows = (slice(len(some)), slice(some.completion_ids.shape[1]))
        few = tokens.map(lambda x: x[rows])
        sampled = sampled[rows]
        mask = mask[rows]
        settings: Any = (some, self.temperature), {"with_values": False}
        if is_ahead:
            few = few._replace(
                logprobs=functional_call(actor_critic, policies[0], *settings).logprobs
            )
            self._check_rounding(few, sampled, mask)
        for older in policies[is_ahead:][:1] if self.checks_version else ():
            earlier = functional_call(actor_critic, older, *settings).logprobs
            # by how much squared errors are smaller with the older adapter: negative in the mean,
            # if it is not in use
            errors = (
                torch.stack([few.logprobs - sampled, earlier - sampled])
                .masked_fill(~mask, 0)
                .square()
            )
            gains = errors[0] - errors[1]
            gain, squares = self.all_sum(torch.stack([gains.sum(), gains.square().sum()]))
            if (gain > 4 * squares.sqrt()).item():
                raise SamplerError(
                    "The completions of this rollout fit the adapter of the rollout before better "
                    "than the policy's: vLLM samples with an old adapter. Restart the server, and "
                    "resume the run."
                )

    def _unexplained(
        self, logprobs: Tensor, tokens: TokenScores, sampler_logprobs: Tensor, mask: Tensor
    ) -> float:
        """Mean difference of log-probs, without what filters explain."""
        above = sampler_logprobs - logprobs
        explained = -(1 - self.removed - self.removed_per_nat * tokens.entropies).clamp(min=0).log()
        return ppo_math.masked_mean(
            (above - above.clamp(min=0).minimum(explained)).abs(), mask, self.all_sum
        ).item()
