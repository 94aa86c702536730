"""Advice: what a curve shows, from which step on, and what to change."""

import math
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from .reading import Curve, Run

FEWEST = 10  # points below which a curve has no trend
FEWEST_FLAT = 20  # points below which a flat curve means nothing


def number(value: float) -> str:
    """Format a number with three digits, and thousands in full."""
    text = f"{value:.3g}"
    rounded = float(text)
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e9 else text


class Trend(NamedTuple):
    """Start and end of a curve, and how much of the difference can be noise."""

    curve: Curve  # finite values only
    start: float  # mean of the first fifth
    end: float  # mean of the last fifth
    noise: float  # standard deviation about the trend
    error: float  # standard error of `end - start` for independent points
    scale: float  # largest absolute value of the smoothed curve

    @property
    def rises(self) -> bool:
        """True if the end is above the start by more than noise, and by enough to matter."""
        return self.end - self.start > max(4 * self.error, 0.02 * self.scale)

    @property
    def falls(self) -> bool:
        """True if the end is below the start by more than noise, and by enough to matter."""
        return self.start - self.end > max(4 * self.error, 0.02 * self.scale)

    def first_above(self, level: float) -> int | None:
        """First step at which the smoothed curve is above a level."""
        return next(iter(self.curve.steps[self.curve.smooth().values > level].tolist()), None)

    def first_below(self, level: float) -> int | None:
        """First step at which the smoothed curve is below a level."""
        return next(iter(self.curve.steps[self.curve.smooth().values < level].tolist()), None)

    def turning_point(self) -> int | None:
        """Step of the maximum, if the curve then falls by more than noise."""
        smooth = self.curve.smooth().values
        top = int(np.argmax(smooth))
        least = max(5 * self.noise / math.sqrt(self.curve.window), 0.25 * np.ptp(smooth), 0.02 * self.scale)
        return int(self.curve.steps[top]) if smooth[top] - self.end > least else None


def trend(curve: Curve | None) -> Trend | None:
    """Start, end and noise of a curve with enough points."""
    if curve is None or len(curve.finite().values) < FEWEST:
        return None
    curve = curve.finite()
    fifth = max(len(curve.values) // 5, 2)
    # The median absolute difference of neighbors estimates the noise without the trend and without a few jumps.
    differences = np.diff(curve.values)
    noise = float(1.4826 / math.sqrt(2) * np.median(np.abs(differences - np.median(differences))))
    start, end = float(curve.values[:fifth].mean()), float(curve.values[-fifth:].mean())
    return Trend(curve, start, end, noise, noise * math.sqrt(2 / fifth), float(np.abs(curve.smooth().values).max()))


class Advice(NamedTuple):
    """A symptom and its remedy."""

    title: str
    seen: str  # the symptom in numbers
    remedy: str
    step: int | None  # where it starts
    metrics: tuple[str, ...]  # curves that show it


class Rule(NamedTuple):
    """Advice that depends on the trend of one metric."""

    metric: str
    applies: Callable[[Trend], bool]
    title: str
    seen: str  # format string with the trend as `{0}`
    remedy: str
    step: Callable[[Trend], int | None] = lambda goes: None  # where the symptom starts


RULES = (
    Rule(
        "completions/clipped_ratio",
        lambda goes: goes.end >= 0.25,
        "Many completions are truncated",
        "{0.end:.0%} of the last completions reached `max_completion_length` ({0.start:.0%} at the start).",
        "Raise `max_completion_length`, penalize truncation (`missing_eos_penalty`), or exclude truncated completions "
        "(`mask_truncated_completions`).",
        lambda goes: goes.first_above(0.25),
    ),
    Rule(
        "entropy",
        lambda goes: goes.start > 0 and goes.falls and goes.end <= 0.3 * goes.start,
        "Entropy collapse: the policy stops exploring",
        "The entropy falls from {0.start:.3g} to {0.end:.3g} nats per token.",
        "Raise `entropy_coef` or set `entropy_target`; lower `learning_rate` or raise `kl_coef`.",
        lambda goes: goes.first_below(0.5 * goes.start),
    ),
    Rule(
        "completions/distinct_ratio",
        lambda goes: goes.falls and goes.start - goes.end >= 0.1,
        "Mode collapse: completions become identical",
        "Distinct completions fall from {0.start:.0%} to {0.end:.0%} of a rollout.",
        "Raise `kl_coef` or `entropy_coef`. Read below which answer every prompt gets: the reward favors it.",
        lambda goes: goes.first_below(goes.start - 0.05),
    ),
    Rule(
        "approx_kl",
        lambda goes: goes.end > 0.05,
        "Updates move the policy too far",
        "`approx_kl` is {0.end:.3g} at the end; a usual value is below 0.02.",
        "Lower `learning_rate` or `num_ppo_epochs`, or set `target_kl`.",
        lambda goes: goes.first_above(0.05),
    ),
    Rule(
        "clip_ratio/region_mean",
        lambda goes: goes.end > 0.3,
        "Too many tokens are clipped",
        "`clip_ratio/region_mean` is {0.end:.3g} at the end; a usual value is below 0.2.",
        "Lower `learning_rate` or `num_ppo_epochs`, or set `target_kl`.",
        lambda goes: goes.first_above(0.3),
    ),
    Rule(
        "stopped_early",
        lambda goes: goes.end >= 0.4,
        "`target_kl` skips many optimizer steps",
        "{0.end:.0%} of the last optimizer steps were skipped, so each rollout teaches little.",
        "Lower `learning_rate` or `num_ppo_epochs`.",
        lambda goes: goes.first_above(0.4),
    ),
    Rule(
        "value/explained_variance",
        lambda goes: goes.end < 0.1 and len(goes.curve.values) >= FEWEST_FLAT,
        "The critic does not predict the returns",
        "`value/explained_variance` is {0.end:.3g} at the end. 1 is perfect; a constant reaches 0.",
        "Raise `critic_learning_rate`, warm up the critic (`value_warmup_steps` or `trl-ppo pretrain-critic`), or set "
        "`critic='none'`.",
    ),
    Rule(
        "kl_per_completion",
        lambda goes: goes.end < -max(4 * goes.error, 0.05),
        "Negative KL: completions are not sampled from the policy's own distribution",
        "`kl_per_completion` is {0.end:.3g} at the end. Samples from the policy's own distribution average 0 or more.",
        "Sample from the full distribution: `top_p=1.0`, `top_k=0`, `min_p=None`, `repetition_penalty=1.0`.",
        lambda goes: goes.first_below(-max(4 * goes.error, 0.05)),
    ),
)
# Metrics that count failures: title, event and remedy.
FAILURES = {
    "skipped_steps": (
        "Non-finite gradients",
        "optimizer steps were skipped",
        "Lower `learning_rate` or `max_grad_norm`, and prefer `bf16` to `fp16`.",
    ),
    "nonfinite_completions": (
        "Non-finite log-probs",
        "completions were excluded",
        "Prefer `bf16` to `fp16`, and inspect the rollouts saved in the output directory.",
    ),
    "empty_steps": (
        "Steps without a token to learn from",
        "optimizer steps had no valid token",
        "Find out why completions are excluded: failing rewards, or `mask_truncated_completions` when none emits EOS.",
    ),
    "rewards/*/failed": (
        "A reward failed",
        "completions got no score from it",
        "Read its errors in the run's warnings. `reward_on_error` controls what happens when a reward fails.",
    ),
}


def _setting(run: Run, name: str) -> Any:
    return run.config.get(name, run.trainer_config.get(name))


def _means(run: Run, prefix: str) -> dict[str, Trend]:
    """Trends of the metrics `<prefix><name>/mean`, by `<prefix><name>`."""
    trends = {name: trend(curve) for name, curve in run.curves.items() if fnmatchcase(name, f"{prefix}*/mean")}
    return {name.removesuffix("/mean"): goes for name, goes in trends.items() if goes is not None}


def _over_optimization(run: Run) -> Iterator[Advice]:
    """A monitored reward turns down while the optimized reward does not."""
    kl_name = "kl_per_completion" if "kl_per_completion" in run.curves else "kl"
    reward, kl = trend(run.curves.get("reward")), trend(run.curves.get(kl_name))
    for name, monitor in _means(run, "monitor/").items():
        step = monitor.turning_point()
        if reward is None or step is None or reward.end < reward.curve.at(step) - 2 * reward.error:
            continue
        title, remedy = "The reward may be hacked", f"Read completions and fix the reward, or stop at step {step}."
        seen = (
            f"After step {step}, `{name}` falls from {number(monitor.curve.at(step))} to {number(monitor.end)} while "
            f"the reward goes from {number(reward.curve.at(step))} to {number(reward.end)}"
        )
        if kl is not None and kl.rises:
            title, remedy = "Over-optimization of the reward", f"Raise `kl_coef`, or stop at step {step}."
            seen += f" and the KL rises to {number(kl.end)}"
        yield Advice(title, f"{seen}.", remedy, step, (f"{name}/mean", "reward", kl_name))


def _traded_rewards(run: Run) -> Iterator[Advice]:
    """One reward falls while the sum rises."""
    total, rewards = trend(run.curves.get("reward")), _means(run, "rewards/")
    for name, reward in rewards.items():
        if total is not None and total.rises and reward.falls and len(rewards) > 1:
            yield Advice(
                "One reward is traded for the others",
                f"`{name}` falls from {number(reward.start)} to {number(reward.end)} while the sum rises from "
                f"{number(total.start)} to {number(total.end)}.",
                "Give it more weight in `reward_weights`.",
                reward.turning_point(),
                (f"{name}/mean", "reward"),
            )


def _length_drift(run: Run) -> Iterator[Advice]:
    """Completions grow with the reward, unless short ones score as well within a rollout."""
    metrics = ("completions/mean_length", "reward/length_correlation", "reward")
    length, correlation, reward = (trend(run.curves.get(name)) for name in metrics)
    if length is None or reward is None or not length.rises or not reward.rises or length.end <= 1.3 * length.start:
        return
    if correlation is None or correlation.end >= 0.2:
        within = "" if correlation is None else f" Their correlation in a rollout is {number(correlation.end)}."
        grow = f"{number(length.start)} to {number(length.end)} tokens"
        yield Advice(
            "Length drift: the reward may favor long completions",
            f"Completions grow from {grow} while the reward rises.{within}",
            "Read the completions below. If the longer ones say no more, add a reward that penalizes length, monitor "
            "one that ignores it (`monitor_funcs`), or lower `max_completion_length`.",
            length.first_above(1.3 * length.start),
            metrics[:2],
        )


def _reward_scale(run: Run) -> Iterator[Advice]:
    """All rewards are equal, or far from 0, which is what a new critic predicts."""
    reward, spread = trend(run.curves.get("reward")), trend(run.curves.get("reward_std"))
    explained = trend(run.curves.get("value/explained_variance"))
    if reward is None or spread is None:
        return
    if spread.end <= 1e-6 * max(reward.scale, 1.0):
        yield Advice(
            "All completions get the same reward",
            f"Completions of the last rollouts all got a reward of {number(reward.end)}: there is nothing to learn.",
            "Use a reward with intermediate values, easier prompts, or a higher `temperature`. If the reward is at "
            "its maximum, the run is done.",
            spread.first_below(1e-6 * max(reward.scale, 1.0)),
            ("reward_std", "reward"),
        )
    # With `lam=1` every token's return contains the score, whatever the critic predicts.
    handled = any(_setting(run, name) for name in ("normalize_rewards", "reward_baseline", "critic_init"))
    if explained is None or handled or _setting(run, "lam") == 1:
        return
    values = explained.curve.values
    median = float(np.median(values[: len(values) // 2]))  # a mean would follow a few outliers
    if 0 < 3 * spread.start < abs(reward.start) and median < 0.1:
        yield Advice(
            "The reward is far from 0, where the critic starts",
            f"The first rewards are {number(reward.start)} ± {number(spread.start)}, and the median of "
            f"`value/explained_variance` over the first half of the run is {number(median)}. Until the critic has "
            "learned the mean, only the last tokens of a completion receive it: EOS looks "
            f"{'worse' if reward.start < 0 else 'better'} than continuing.",
            "Set `normalize_rewards=True` or `reward_baseline='reference'`, or start from a `critic_init` made by "
            "`trl-ppo pretrain-critic`.",
            None,
            ("reward", "value/explained_variance", "completions/mean_length"),
        )


def _stagnation(run: Run) -> Iterator[Advice]:
    """The reward falls, or does not change because the policy does not move."""
    reward, kl = trend(run.curves.get("reward")), trend(run.curves.get("kl_per_completion"))
    if reward is None or len(reward.curve.values) < FEWEST_FLAT:
        return
    seen = f"The reward goes from {number(reward.start)} to {number(reward.end)} over {run.last_step} steps"
    if reward.falls:
        remedy = "Lower `learning_rate`. Check that higher scores are better, and lower `kl_coef` if the KL dominates."
        yield Advice("The reward falls", f"{seen}.", remedy, None, ("reward",))
    elif not reward.rises and kl is not None and abs(kl.end) < 0.05:
        seen += f", at a KL of {number(kl.end)} nats per completion."
        remedy = "Raise `learning_rate`, or lower `kl_coef`."
        yield Advice("The policy hardly changes", seen, remedy, None, ("reward", "kl_per_completion"))


def _failures(run: Run) -> Iterator[Advice]:
    """Counts that should stay 0."""
    for pattern, (title, event, remedy) in FAILURES.items():
        for name in (name for name in run.curves if fnmatchcase(name, pattern)):
            counts = np.nan_to_num(run.curves[name].values)
            if counts.sum() > 0:
                first = int(run.curves[name].steps[np.argmax(counts > 0)])
                seen = f"`{name}` adds up to {counts.sum():.0f}: {event}, first at step {first}."
                yield Advice(title, seen, remedy, first, (name,))


def _slow_rewards(run: Run) -> Iterator[Advice]:
    """Scoring takes half of the time."""
    phases = [trend(run.curves.get(f"time/{name}")) for name in ("score", "generate", "forward", "update")]
    times = [phase.end for phase in phases if phase is not None]
    if len(times) == 4 and times[0] >= 0.5 * sum(times) > 0:
        yield Advice(
            "Scoring takes most of the time",
            f"Rewards take {number(times[0])} s of {number(sum(times))} s per rollout.",
            "Make reward functions that wait `async`, load reward models in 4-bit (`reward_quantization`), raise "
            "`per_device_reward_batch_size`, or serve the rewards from another GPU (`trl-ppo serve-reward`).",
            None,
            ("time/score",),
        )


def advise(run: Run) -> list[Advice]:
    """Apply all rules."""
    advice = [*_over_optimization(run), *_traded_rewards(run), *_length_drift(run), *_reward_scale(run)]
    for rule in RULES:
        goes = trend(run.curves.get(rule.metric))
        if goes is not None and rule.applies(goes):
            seen = rule.seen.format(goes)
            advice.append(Advice(rule.title, seen, rule.remedy, rule.step(goes), (rule.metric,)))
    advice += [*_stagnation(run), *_failures(run), *_slow_rewards(run)]

    def with_value(match: re.Match) -> str:
        value = _setting(run, match[1])
        return match[0] if value is None else f"{match[0]} (now {value})"

    # A remedy shows the current value of each setting that it names.
    return [item._replace(remedy=re.sub(r"`(\w+)(=[^`]*)?`", with_value, item.remedy)) for item in advice]
