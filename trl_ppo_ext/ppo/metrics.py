"""Metrics that add up exactly over micro-batches, rollouts and ranks; deviations over ranks
only."""

import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ppo_math
from ..config import PPOConfig
from ..episodes import Episode
from ..modeling import TokenScores
from ..ppo_math import Reduction
from ..rewards import Scored
from .advantages import CriticAdvantages, in_groups_that_differ
from .places import explained_without_clock

# first parts of the names that the trainer logs
RESERVED = frozenset(
    "approx_kl clip_ratio completions empty_steps entropy episodes epoch frac_reward_zero_std "
    "grad_norm kl kl_coef kl_per_completion lam learning_rate loss monitor nonfinite_completions "
    "num_tokens objective outlying_completions ratio reward reward_std rewards sampling "
    "skipped_steps step step_time stopped_early time tokens_per_second tools total_flos "
    "unscored_completions value".split()
)


class Metrics:
    """Running sums on the device, synchronized only in [`compute`]; all ranks must add the same
    names.

    A mean is kept as numerator and denominator, so that tokens are averaged, and not batches or
    ranks.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = device
        self._entries: dict[str, Tensor] = {}  # by kind and name, "sum:reward"

    def _float(self, values: Tensor | float) -> Tensor:
        if isinstance(values, Tensor):
            return values.detach().float()
        # a copy would wait for the device
        return torch.full((), values, dtype=torch.float32, device=self.device)

    def _add(self, key: str, entry: Tensor) -> None:
        if key.startswith("max:"):
            merge = torch.maximum
        else:
            merge = torch.add
        self._entries[key] = merge(self._entries[key], entry) if key in self._entries else entry

    def mean(self, name: str, values: Tensor | float, mask: Tensor | None = None) -> None:
        """Add values at a mask to a running mean, which [`compute`] returns."""
        values = self._float(values)
        mask = torch.ones_like(values) if mask is None else mask.to(values.dtype)
        # a NaN at a masked position must not leak into the sum
        self._add(
            f"sum:{name}", torch.stack([torch.where(mask.bool(), values, 0).sum(), mask.sum()])
        )

    def total(self, name: str, values: Tensor | float) -> None:
        """Sum values."""
        self._add(f"total:{name}", self._float(values).sum())

    def maximum(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Keep the largest value over a mask."""
        values = values.detach().float()
        if mask is not None:
            values = values.masked_fill(~mask.bool(), -torch.inf)
        self._add(f"max:{name}", values.max() if values.numel() else values.new_tensor(-torch.inf))

    def minimum(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Keep the smallest value over a mask."""
        self.maximum(f"-{name}", -values, mask)

    def state_dict(self) -> dict[str, Tensor]:
        """Running sums of this rank since the last [`compute`]."""
        return dict(self._entries)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state returned by [`state_dict`]."""
        self._entries = {key: x.to(self.device) for key, x in state.items()}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def compute(self, all_sum: Reduction, all_max: Reduction) -> dict[str, float]:
        """Reduce over ranks, return every metric that has a value, and reset."""
        computed: dict[str, float] = {}
        for kind, reduce in {"sum:": all_sum, "total:": all_sum, "max:": all_max}.items():
            entries = {
                key.removeprefix(kind): x
                for key, x in self._entries.items()
                if key.startswith(kind)
            }
            if entries:
                reduced = reduce(torch.stack(list(entries.values()))).tolist()
            else:
                reduced = []
            for name, value in zip(entries, reduced):
                if kind == "total:":
                    computed[name] = value
                elif kind == "sum:" and value[1]:  # a mean over some values
                    computed[name] = value[0] / value[1]
                elif kind == "max:" and value != -float("inf"):
                    computed |= {name[1:]: -value} if name.startswith("-") else {name: value}
                elif name.endswith("_terminated_length"):
                    computed[name.removeprefix("-")] = 0.0  # none has ended; as in TRL
        self._entries = {}
        return computed


def log_rewards(
    metrics: Metrics, names: Sequence[str], scored: Scored, valid: Tensor, all_sum: Reduction
) -> None:
    """Log each reward over the completions it applies to, and their sum; `valid` is `[batch]`."""
    for name, scores, failed in zip(names, scored.rewards.unbind(1), scored.failed.unbind(1)):
        applies = valid & ~scores.isnan() & ~failed
        metrics.mean(f"rewards/{name}/mean", scores, applies)
        variance = ppo_math.masked_var(scores.nan_to_num(), applies, all_sum)
        # a reward that applies to none, on any rank, has no deviation
        metrics.mean(f"rewards/{name}/std", variance.sqrt(), all_sum(applies.sum()) > 0)
        metrics.total(f"rewards/{name}/failed", failed & valid)
    valid = valid & scored.usable
    metrics.mean("reward", scored.totals, valid)
    deviation = ppo_math.masked_var(scored.totals, valid, all_sum).sqrt()
    metrics.mean("reward_std", deviation, all_sum(valid.sum()) > 0)


def log_groups(metrics: Metrics, scored: Scored, group_size: int, gather: Reduction) -> None:
    """Log the share of prompts whose completions all have the same reward."""
    if group_size > 1:
        differs = in_groups_that_differ(
            scored.totals, scored.usable, scored.sizes, group_size, gather
        )
        any_usable = gather(scored.usable).view(-1, group_size).any(1)
        metrics.mean("frac_reward_zero_std", ~differs, any_usable.repeat_interleave(group_size))


def log_critic(
    metrics: Metrics, result: CriticAdvantages, places: Tensor, is_new: bool, all_sum: Reduction
) -> None:
    """Log what the critic explains of the outcomes, with and without the clock, and the weights of
    the baseline's parts.

    Of the rollout that a critic is fitted to (`is_new`) it has explained nothing yet.
    """
    explained: dict[str, Tensor | float] = {"": 0.0, "_without_clock": 0.0}
    if not is_new:
        values = result.explains
        outcomes = result.outcomes
        counted = result.counted
        explained[""] = ppo_math.explained_variance(values, outcomes, counted, all_sum)
        explained["_without_clock"] = explained_without_clock(
            values, outcomes, ppo_math.place_numbers(places), counted, all_sum
        )
    for name, share in explained.items():
        metrics.mean(f"value/explained_variance{name}", share)
    if result.weights is not None:
        counts = result.counted.any(1)
        for name, weights in zip(("critic", "group"), result.weights.unbind(1)):
            metrics.mean(f"value/weight_of_{name}", weights, counts)


def log_completions(
    metrics: Metrics, tokens: TokenScores, completion_mask: Tensor, stopped: Tensor, valid: Tensor
) -> None:
    """Log KL (with a reference), entropy, and lengths; `stopped` and `valid` are `[batch]`."""
    mask = completion_mask & valid[:, None]
    lengths = completion_mask.sum(1)
    if tokens.ref_logprobs is not None:
        kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, "k1")
        metrics.mean("kl", kl, mask)
        metrics.mean("kl_per_completion", (kl * mask).sum(1), valid)
    metrics.mean("entropy", tokens.entropies, mask)
    for name, rows in {"length": valid, "terminated_length": stopped & valid}.items():
        metrics.mean(f"completions/mean_{name}", lengths, rows)
        metrics.maximum(f"completions/max_{name}", lengths, rows)
        metrics.minimum(f"completions/min_{name}", lengths, rows)
    metrics.mean("completions/clipped_ratio", ~stopped, valid)


def log_episodes(
    metrics: Metrics,
    episodes: Sequence[Episode],
    num_valid: int,
    valid: Tensor,
    names: list,
    values: Mapping,
) -> None:
    """Log turns, tool calls (under TRL's names) and failures, and `[batch]` values of several
    environments by name."""
    if not episodes[0].messages:
        return
    for name in names:
        chosen = torch.tensor([x.columns.get("environment") == name for x in episodes])
        rows = chosen.to(valid.device, non_blocking=True) & valid
        metrics.total(f"episodes/{name}/count", rows)
        for part, x in values.items():
            metrics.mean(f"episodes/{name}/{part}", x, rows)
    device = metrics.device
    of_each = {
        "turns": [x.turns for x in episodes],
        "overlong": [x.is_overlong for x in episodes],
        "limited": [x.ending == "limited" for x in episodes],
    }
    for name, numbers in of_each.items():
        metrics.mean(f"episodes/{name}", torch.tensor(numbers, device=device), valid)
    # what fails is counted in episodes without a score, too
    played = episodes[:num_valid]
    calls = [len(x.failed_calls) for x in played]
    failed = [float(failure) for episode in played for failure in episode.failed_calls]
    metrics.total("episodes/failed", float(sum(x.error is not None for x in played)))
    metrics.mean("tools/call_frequency", torch.tensor(calls, device=device))
    metrics.mean("tools/failure_frequency", torch.tensor(failed, device=device))


def log_hacking(
    metrics: Metrics,
    completions: Sequence,
    lengths: Tensor,
    scored: Scored,
    monitors: Mapping[str, Tensor],
    valid: Tensor,
    all_sum: Reduction,
    gather: Reduction,
) -> None:
    """Log signs of reward hacking: length, repetition, monitors."""
    has_any = all_sum(valid.sum()) > 0
    correlation = ppo_math.masked_correlation(scored.totals, lengths.float(), valid, all_sum)
    metrics.mean("reward/length_correlation", correlation, has_any)
    # share of completions, over all ranks, that occurred before; ranks exchange digests, not texts
    digests = [hashlib.sha256(str(text).encode()).digest()[:8] for text in completions]
    numbers = [int.from_bytes(digest, "big", signed=True) for digest in digests]
    local = torch.stack(
        [torch.tensor(numbers).to(valid.device, non_blocking=True), valid.long()], 1
    )
    everyone, counts = gather(local).cpu().unbind(1)
    everyone = everyone[counts.bool()]
    repeated = 1 - len(everyone.unique()) / max(len(everyone), 1)
    metrics.mean("completions/repeated_ratio", repeated, has_any)
    for name, scores in monitors.items():
        applies = valid & ~scores.isnan()
        metrics.mean(f"monitor/{name}/mean", scores, applies)
        metrics.mean(f"monitor/{name}/gap", scored.totals - scores, applies)


def check_metric_name(name: str) -> None:
    """Raise a `ValueError` if a metric of a reward function would be mixed up with one of the
    trainer's."""
    if name.split("/")[0] in RESERVED or name.startswith(("eval_", "train_")):
        raise ValueError(
            f"`log_metric` got the name {name!r}, which the trainer logs itself; use another one."
        )


# ---- the metric that chooses the best model ----

OF_EVALUATIONS = set(
    "reward reward_std reward/length_correlation entropy unscored_completions "
    "nonfinite_completions completions/clipped_ratio completions/repeated_ratio time/generate "
    "time/score time/forward".split()
)
OF_EVALUATIONS |= {
    f"completions/{which}_{length}"
    for which in ("mean", "min", "max")
    for length in ("length", "terminated_length")
}
OF_THE_TRAINER = set("runtime samples_per_second steps_per_second model_preparation_time".split())
OF_A_REFERENCE = {"kl", "kl_per_completion"}
OF_A_SAMPLER = {
    *(f"sampling/sampling_logp_difference/{part}" for part in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{x}" for x in ("mean", "min", "max", "effective_share")),
}
OF_EPISODES = set(
    "episodes/turns episodes/failed episodes/overlong episodes/limited tools/call_frequency "
    "tools/failure_frequency".split()
)
OF_AN_ENVIRONMENT = "reward", "length", "turns", "count"


def evaluation_metrics(
    args: PPOConfig,
    rewards: Sequence[Any],
    monitors: Sequence[Any],
    environments: Sequence[str] | None,
) -> set[str]:
    """Names of what an evaluation measures, if its rows have it, besides metrics of the user's."""
    names = OF_EVALUATIONS.copy()
    if args.uses_reference:
        names |= OF_A_REFERENCE
    if args.eval_temperature is None:  # else it is not sampled as it is scored
        names |= OF_A_SAMPLER
    if environments is not None:
        names |= OF_EPISODES
        names |= {f"episodes/{x}/{part}" for x in environments for part in OF_AN_ENVIRONMENT}
    for reward in rewards:
        names |= {f"rewards/{reward.name}/{part}" for part in ("mean", "std", "failed")}
    for reward in monitors:
        names |= {f"monitor/{reward.name}/{part}" for part in ("mean", "gap")}
    return names


def check_best_metric(
    args: PPOConfig,
    eval_dataset: Any,
    rewards: Sequence[Any],
    monitors: Sequence[Any],
    environments: Sequence[str] | None,  # names, if there are several; None without episodes
) -> None:
    """Raise a `ValueError` if no evaluation logs the metric for the best model, or if it is
    constant."""
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no":
        return
    names = evaluation_metrics(args, rewards, monitors, environments) | OF_THE_TRAINER
    if isinstance(eval_dataset, dict):
        prefixes = [f"{name}_" for name in eval_dataset]
    else:
        prefixes = [""]
    bare = metric.removeprefix("eval_")
    of_dataset = [bare.removeprefix(prefix) for prefix in prefixes if bare.startswith(prefix)]
    if names.isdisjoint(of_dataset) and not any(map(_may_log, list(rewards) + list(monitors))):
        listed = [f"eval_{prefixes[0]}{name}" for name in sorted(names)]
        likely = get_close_matches(f"eval_{bare}", listed, n=1) or [f"eval_{prefixes[0]}reward"]
        raise ValueError(
            f"`metric_for_best_model` must be a metric of the evaluation, got {metric!r}; did you "
            f"mean {likely[0]!r}? An evaluation logs {', '.join(listed)}, and what reward functions "
            "log with `log_metric`."
        )
    is_of_reward = any(
        name.partition("/")[0] in ("reward", "rewards", "reward_std") for name in of_dataset
    )
    if is_of_reward and [reward.name for reward in rewards] == ["no_reward"]:
        raise ValueError(
            f"`metric_for_best_model={metric!r}` is constant in a run without rewards; use e.g. "
            "'eval_kl' with `greater_is_better=False`, or a metric of `monitor_funcs`."
        )


def _may_log(reward: Any) -> bool:
    """Whether a reward may log metrics: its code names `log_metric`, passes on what it gets, or
    is unknown."""
    function = getattr(reward, "function", None)
    if function is None:  # a classifier does not, an object of the user's may
        return type(reward).__module__.partition(".")[0] != __name__.partition(".")[0]
    while isinstance(function, partial):
        function = function.func
    try:
        source = inspect.getsource(function.__code__)  # of a wrapper, not of what it wraps
    except (OSError, TypeError, AttributeError):
        return True
    passes_on = len(re.findall(r"\*\*\w", source)) > 1  # more than the signature's `**kwargs`
    return passes_on or "log_metric" in source
