"""Update from a rollout: minibatches, the loss, and skipped optimizer steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .. import ppo_math
from ..batch_plan import BatchPlan
from ..config import PPOConfig
from ..modeling import TokenScores
from ..ppo_math import Reduction
from .metrics import Metrics
from .progress import RolloutInProgress
from .rollouts import Rollout, cut

# completions that show how far updates have moved the policy, if a rollout has so many
FEWEST_MEASURED = 8


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward, and the divisors of their optimizer step."""

    rollout: Rollout
    step: int  # optimizer step within the rollout
    # tokens or completions of the optimizer step, over all its micro-batches and ranks
    denominator: Tensor
    # those of the critic, if it learns from others than the policy
    value_denominator: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rollout)


def loss_denominators(
    response_mask: Tensor,
    rows: Tensor,
    aggregation: str,
    max_completion_length: int,
    all_sum: Reduction,
) -> Tensor:
    """Divisor of each optimizer step's loss, `[steps]`; `rows` is `[steps, minibatch]`."""
    lengths = response_mask.sum(1)
    if aggregation == "token":
        counts = lengths
    else:
        counts = (lengths > 0).long()
    if aggregation == "constant":  # https://huggingface.co/papers/2503.20783
        counts = counts * max_completion_length
    return all_sum(counts[rows.to(counts.device, non_blocking=True)].sum(1))


def schedule(plan: BatchPlan) -> Tensor:
    """Draw the rows of every minibatch of a rollout, `[steps, minibatch]`.

    The first epoch takes the minibatches in which [`score_tokens`] computed the old log-probs, so
    that the first ratios are exactly 1. Later epochs shuffle.
    """
    size = plan.completions_per_process
    epochs = [torch.arange(size)] + [torch.randperm(size) for _ in range(plan.num_ppo_epochs - 1)]
    return torch.stack(epochs).reshape(plan.optimizer_steps, plan.mini_batch_size)


def ppo_loss(
    scores: TokenScores,
    rollout: Rollout,
    denominator: Tensor | float | None = None,
    value_denominator: Tensor | float | None = None,
    *,
    cliprange: tuple[float, float],
    aggregation: ppo_math.Aggregation = "token",
    dual_clip: float | None = None,
    ratio_level: Literal["token", "sequence"] = "token",
    vf_coef: float = 0.0,
    cliprange_value: float | None = None,
    kl_estimator: ppo_math.KLEstimator | None = None,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss of a micro-batch: policy, values, KL (with `kl_estimator`) and entropy (if it was
    computed).

    Returns the scalar loss and its metrics per token, `[batch, response]`.
    """
    policy_logprobs = scores.logprobs
    old_logprobs = rollout.old_logprobs
    advantages = rollout.advantages
    aggregate = partial(ppo_math.aggregate_loss, mode=aggregation)
    # 1. Clipped surrogate of the policy, with the ratio per token or sequence.
    if ratio_level == "sequence":
        policy_logprobs = ppo_math.sequence_logprobs(
            policy_logprobs, old_logprobs, rollout.response_mask
        )
    clip_low, clip_high = cliprange
    policy = ppo_math.clipped_policy_loss(
        policy_logprobs, old_logprobs, advantages, clip_low, clip_high, dual_clip
    )
    loss = policy
    metrics = {"loss/policy": policy}

    # 2. Squared error of the values, with a mean of its own if the critic learns from more tokens.
    critic_loss: Tensor | float = 0.0
    if scores.values is not None and rollout.old_values is not None and rollout.targets is not None:
        value = ppo_math.clipped_value_loss(
            scores.values, rollout.old_values, rollout.targets, cliprange_value
        )
        is_clipped = value.detach() > 0.5 * (scores.values.detach() - rollout.targets) ** 2
        if rollout.value_weights is not None:
            value = rollout.value_weights * value
            is_clipped = rollout.value_weights * is_clipped
        metrics |= {"loss/value": value, "value/clip_ratio": is_clipped}
        if rollout.policy_mask is None:
            loss = loss + vf_coef * value
        else:
            critic_loss = aggregate(
                vf_coef * value, rollout.response_mask, denominator=value_denominator
            )

    # 3. KL from the reference, if it is in the loss, and the entropy bonus.
    if kl_estimator is not None and rollout.kl_coef:
        exact = kl_estimator == "exact"
        ref_logprobs = cast(Tensor, rollout.ref_logprobs)
        if exact:
            kl = scores.kls
        else:
            kl = ppo_math.kl_estimate(scores.logprobs, ref_logprobs, kl_estimator)
        loss = loss + rollout.kl_coef * kl
        metrics["loss/kl"] = kl
    if scores.entropies is not None:
        # The unit is 1 beside whitened advantages.
        loss = loss - entropy_coef * rollout.entropy_unit * scores.entropies

    with torch.no_grad():
        bound = ppo_math.LOG_RATIO_BOUND
        ratio = (policy_logprobs - old_logprobs).clamp(-bound, bound).exp()
        too_low = (ratio < 1 - cliprange[0]) & (advantages < 0)
        too_high = (ratio > 1 + cliprange[1]) & (advantages > 0)
        metrics |= {
            "ratio/mean": ratio,
            "ratio/max": ratio,
            "clip_ratio/low_mean": too_low,
            "clip_ratio/high_mean": too_high,
            "clip_ratio/region_mean": too_low | too_high,
            # This is the distance from the policy that sampled.
            "approx_kl": ppo_math.kl_estimate(old_logprobs, scores.logprobs, "k3"),
        }
        if dual_clip is not None:
            metrics["clip_ratio/dual_mean"] = (ratio > dual_clip) & (advantages < 0)
    return aggregate(loss, rollout.policy_tokens, denominator=denominator) + critic_loss, metrics


@dataclass(eq=False)
class Updates:
    """Optimizer steps of a rollout: its micro-batches, their losses, and skipped steps."""

    args: PPOConfig
    plan: BatchPlan
    metrics: Metrics
    all_sum: Reduction

    def __post_init__(self):
        self.device = self.args.device
        self.loss_settings = self.args.loss_settings
        self.reset()

    def reset(self) -> None:
        """Drop the rollout."""
        self.rollout: Rollout | None = None
        self.rows = torch.zeros(0)
        self.micro_batches: Iterator[MicroBatch] = iter(())
        # KL before the optimizer step, and its tokens
        self.kl_sum = torch.zeros(2, device=self.device)
        self.stopped_early = False
        self.step = 0
        # per optimizer step: no token counts, none of the policy's
        self.is_empty = self.spares_policy = [False]

    def start(self, rollout: Rollout, global_step: int, rows: Tensor | None = None) -> None:
        """Begin the updates of a rollout, or continue with the rows of a checkpoint."""
        self.reset()
        rows = schedule(self.plan) if rows is None else rows
        divide = partial(
            loss_denominators,
            rows=rows,
            aggregation=cast(str, self.args.loss_aggregation),
            max_completion_length=self.args.max_completion_length,
            all_sum=self.all_sum,
        )
        denominators = all_counts = divide(rollout.policy_tokens)
        value_denominators: Any = [None] * len(rows)
        if rollout.policy_mask is not None:
            value_denominators = divide(rollout.response_mask)
            if not self.args.uses_deepspeed:  # whose step would move the policy too
                all_counts = denominators + value_denominators
        self.is_empty, self.spares_policy = (torch.stack([all_counts, denominators]) == 0).tolist()
        self.rollout = rollout
        self.rows = rows
        self.micro_batches = (
            MicroBatch(
                rollout.rows(index).to(self.device),
                step,
                denominators[step],
                value_denominators[step],
            )
            for step in range(global_step % self.plan.optimizer_steps, len(rows))
            for index in cut(
                rows[step], rollout.sequences.longest_lengths, self.plan.gradient_accumulation_steps
            )
        )

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Loss of a micro-batch, as its share of the optimizer step's loss over all ranks."""
        rollout = micro_batch.rollout
        mask = micro_batch.rollout.policy_tokens
        self.step = micro_batch.step
        exact_kl = self.loss_settings["kl_estimator"] == "exact"
        scores = model(
            rollout.sequences, self.args.temperature, self.args.entropy_coef != 0, exact_kl
        )
        loss, metrics = ppo_loss(
            scores,
            rollout,
            micro_batch.denominator,
            micro_batch.value_denominator,
            **self.loss_settings,
        )
        # This distance is before the step, and 0 before the first one: it decides on the step, and
        # is not logged.
        approx_kl = metrics.pop("approx_kl").masked_fill(~mask, 0)
        self.kl_sum = self.kl_sum + torch.stack([approx_kl.sum(), mask.sum().to(approx_kl.dtype)])
        for name, values in metrics.items():
            if name.endswith("/max"):
                add = self.metrics.maximum
            else:
                add = self.metrics.mean
            add(name, values, rollout.response_mask if "value" in name else mask)
        for name, add in {
            "low_min": self.metrics.minimum,
            "high_max": self.metrics.maximum,
        }.items():
            # of each completion, as in GRPO
            clipped = metrics[f"clip_ratio/{name[:-4]}_mean"] & mask
            add(f"clip_ratio/{name}", clipped.sum(1) / mask.sum(1), mask.any(1))
        return loss

    @torch.no_grad()
    def measure(self, actor_critic: nn.Module) -> None:
        """Log how far the rollout's updates have moved the policy; ranks run the same number of
        forwards."""
        rollout = cast(Rollout, self.rollout)
        learned = rollout.policy_tokens.any(1).cpu().nonzero()[:, 0]
        # A rank without a token runs the forwards, too: weights may be sharded.
        if not len(learned):
            learned = torch.arange(1)
        # Rows at equal distances are of all lengths and of all minibatches, and repeated if there
        # are too few: a micro-batch has the longest or the shortest ones, and may have been learned
        # from before the others.
        size = self.plan.completions_per_process
        count = min(size, max(FEWEST_MEASURED, size // 8))
        places = (2 * torch.arange(count) + 1) * len(learned) // (2 * count)
        for index in learned[places].split(self.plan.micro_batch_size):
            self._measure_rows(actor_critic, rollout.rows(index).to(self.device))

    def _measure_rows(self, actor_critic: nn.Module, part: Rollout) -> None:
        scores = actor_critic(part.sequences, self.args.temperature, with_values=False)
        _, metrics = ppo_loss(
            scores,
            part,
            cliprange=self.loss_settings["cliprange"],
            ratio_level=self.loss_settings["ratio_level"],
        )
        self.metrics.mean("approx_kl", metrics["approx_kl"], part.policy_tokens)
        self.metrics.maximum("ratio/max", metrics["ratio/max"], part.policy_tokens)

    def trains_policy(self, global_step: int) -> bool:
        """Check if the optimizer step whose losses are computed moves the policy, or only the
        critic."""
        return (
            global_step >= self.args.critic_options.warmup_steps
            and not self.spares_policy[self.step]
        )

    def may_step(self) -> bool:
        """Decide on all ranks whether to take the optimizer step whose losses are computed.

        Steps are skipped from the one that exceeds `target_kl` to the rollout's end, and if no rank
        has a token to
        learn from: momentum and weight decay would still move the weights.
        """
        target_kl = self.args.target_kl
        # the first one begins at 0
        if target_kl is not None and self.step and not self.stopped_early:
            approx_kl, tokens = self.all_sum(self.kl_sum).tolist()
            self.stopped_early = approx_kl > target_kl * tokens
        self.kl_sum = torch.zeros_like(self.kl_sum)
        empty = not self.stopped_early and self.is_empty[self.step]
        self.metrics.mean("stopped_early", self.stopped_early)
        # totals are summed over ranks
        without_policy = not self.stopped_early and self.spares_policy[self.step]
        self.metrics.total("empty_steps", without_policy and self.args.process_index == 0)
        return not (self.stopped_early or empty)

    def in_progress(self, global_step: int) -> RolloutInProgress | None:
        """Rollout with optimizer steps left, as a value; `None` between two rollouts."""
        if self.rollout is None or global_step % self.plan.optimizer_steps == 0:
            return None
        return RolloutInProgress(self.rollout, self.rows, self.stopped_early)

    def resume(self, unfinished: RolloutInProgress, global_step: int) -> None:
        """Continue a rollout; raise a `ValueError` if it is of other sizes."""
        plan = self.plan
        sizes = (plan.optimizer_steps, plan.mini_batch_size)
        if unfinished.rows.shape != sizes:
            raise ValueError(
                f"The checkpoint is within a rollout of {tuple(unfinished.rows.shape)} optimizer "
                f"steps × completions, not of {sizes}; resume with the saved sizes."
            )
        self.start(unfinished.rollout, global_step, unfinished.rows)
        self.stopped_early = unfinished.stopped_early


def set_apart(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    learning_rate: float | None,
) -> None:
    """Move parameters to groups of their own, with this learning rate if there is one, before the
    optimizer's first step."""
    chosen = {id(x) for x in parameters.values()}
    for group in list(optimizer.param_groups):
        moved = [x for x in group["params"] if id(x) in chosen]
        group["params"] = [x for x in group["params"] if id(x) not in chosen]
        if moved:
            own = group["lr"] if learning_rate is None else learning_rate
            optimizer.add_param_group(group | {"params": moved, "lr": own})
