"""Advice: what a curve shows, from which step on, and what to change."""

import fnmatch
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .reading import Curve, Run

FEWEST = 3  # rollouts, and points of a curve, below which nothing is judged
FEWEST_TREND = 10  # points below which a curve has no trend
FEWEST_FLAT = 20  # points below which a flat curve means nothing


def number(value: float) -> str:
    """Format a number with three digits, and thousands in full."""
    text = f"{value:.3g}"
    rounded = float(text)
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e9 else text


class Trend(NamedTuple):
    """Start and end of a curve, and how much of the difference can be noise."""

    curve: Curve  # finite values only
    start: float = math.nan  # mean of the first fifth
    end: float = math.nan  # mean of the last fifth
    noise: float = math.nan  # standard deviation about the trend
    error: float = math.nan  # standard error of `end - start` for independent points
    scale: float = math.nan  # largest absolute value of the smoothed curve
    rises: bool = False  # by more than noise, and by enough to matter
    falls: bool = False

    def first(self, above: float = math.inf, below: float = -math.inf) -> int | None:
        """First step at which the smoothed curve is above or below a level."""
        smooth = self.curve.smooth().values
        return next(iter(self.curve.steps[(smooth > above) | (smooth < below)].tolist()), None)

    def turning_point(self) -> int | None:
        """Step of the maximum, if the curve then falls by more than noise."""
        smooth = self.curve.smooth().values
        if len(smooth) < FEWEST_TREND:
            return None
        top = int(np.argmax(smooth))
        least = max(5 * self.noise / math.sqrt(self.curve.window), 0.25 * np.ptp(smooth), 0.02 * self.scale)
        return int(self.curve.steps[top]) if smooth[top] - self.end > least else None


# every comparison with NaN is false, so that a missing curve triggers no rule
NO_TREND = Trend(Curve(np.empty(0, int), np.empty(0)))


def trend(curve: Curve | None) -> Trend:
    """Start, end and noise of a curve; `NO_TREND` if it has too few points."""
    if curve is None or len(curve.finite().values) < FEWEST:
        return NO_TREND
    curve = curve.finite()
    enough = len(curve.values) >= FEWEST_TREND
    fifth = max(len(curve.values) // (5 if enough else 2), 1)  # of a short curve its half
    # The median absolute difference of neighbors estimates the noise without the trend and without a few jumps.
    differences = np.diff(curve.values)
    noise = float(1.4826 / math.sqrt(2) * np.median(np.abs(differences - np.median(differences))))
    start, end = float(curve.values[:fifth].mean()), float(curve.values[-fifth:].mean())
    error, scale = noise * math.sqrt(2 / fifth), float(np.abs(curve.smooth().values).max())
    least = max(4 * error, 0.02 * scale)
    rises, falls = enough and end - start > least, enough and start - end > least
    return Trend(curve, start, end, noise, error, scale, rises, falls)


class Advice(NamedTuple):
    """A problem that curves show, and its remedy."""

    title: str
    seen: str  # the symptom in numbers
    remedy: str
    step: int | None  # where it starts
    metrics: tuple[str, ...]  # curves that show it


SMALLER_STEPS = "Lower `learning_rate` or `num_ppo_epochs`, or set `target_kl`."
UNEXPLAINED = 0.1  # explained variance below which a critic is of no use
# metric, level that its end must stay below, title, remedy
TOO_HIGH = (
    (
        "completions/clipped_ratio",
        0.25,
        "Many completions are truncated",
        "Raise `max_completion_length`, penalize truncation (`missing_eos_penalty`), or exclude truncated completions "
        "(`mask_truncated_completions`).",
    ),
    ("approx_kl", 0.05, "Updates move the policy too far", SMALLER_STEPS),
    ("clip_ratio/region_mean", 0.3, "Too many tokens are clipped", SMALLER_STEPS),
    ("stopped_early", 0.4, "`target_kl` skips many optimizer steps", "Lower `learning_rate` or `num_ppo_epochs`."),
)
# pattern of a count that must stay 0, title, remedy
FAILURES = (
    ("skipped_steps", "Non-finite gradients", "Lower `learning_rate` or `max_grad_norm`; prefer `bf16` to `fp16`."),
    ("nonfinite_completions", "Non-finite log-probs", "Prefer `bf16` to `fp16`, or lower `learning_rate`."),
    (
        "empty_steps",
        "Steps without a token to learn from",
        "Find out why completions are excluded: failing rewards, or `mask_truncated_completions` when none emits EOS.",
    ),
    ("rewards/*/failed", "A reward failed", "Read its errors in the run's warnings; `reward_on_error` handles them."),
)


def _monitors(run: Run) -> Iterator[Advice]:
    """A monitored reward turns down while the optimized reward does not."""
    reward, kl = trend(run.curves.get("reward")), trend(run.curves.get("kl_per_completion"))
    for name in fnmatch.filter(run.curves, "monitor/*/mean"):
        monitor = trend(run.curves[name])
        step = monitor.turning_point()
        if reward is NO_TREND or step is None or not reward.end >= reward.curve.at(step) - 2 * reward.error:
            continue
        title, remedy = "The reward may be hacked", f"Read completions and fix the reward, or stop at step {step}."
        seen = (
            f"After step {step}, `{name}` falls from {number(monitor.curve.at(step))} to {number(monitor.end)} while "
            f"the reward goes from {number(reward.curve.at(step))} to {number(reward.end)}"
        )
        if kl.rises:
            title, remedy = "Over-optimization of the reward", f"Raise `kl_coef`, or stop at step {step}."
            seen += f" and the KL rises to {number(kl.end)}"
        yield Advice(title, f"{seen}.", remedy, step, (name, "reward", "kl_per_completion"))


def _failures(run: Run) -> Iterator[Advice]:
    """Counts that should stay 0; they need no trend."""
    for pattern, title, remedy in FAILURES:
        for name in fnmatch.filter(run.curves, pattern):
            counts = np.nan_to_num(run.curves[name].values)
            if counts.sum() > 0:
                first = int(run.curves[name].steps[np.argmax(counts > 0)])
                seen = f"`{name}` adds up to {counts.sum():.0f}: the first at step {first}."
                yield Advice(title, seen, remedy, first, (name,))


def _trends(run: Run) -> list[Advice]:
    """Rules on the start and the end of curves."""

    def of(name: str) -> Trend:
        return trend(run.curves.get(name))

    reward, spread, entropy, kl = of("reward"), of("reward_std"), of("entropy"), of("kl_per_completion")
    length, correlation = of("completions/mean_length"), of("reward/length_correlation")
    distinct, explained = of("completions/distinct_ratio"), of("value/explained_variance")
    enough = len(reward.curve.values) >= FEWEST_FLAT
    equal, negative = 1e-6 * max(reward.scale, 1.0), -max(4 * kl.error, 0.05)
    times = [f"time/{phase}" for phase in ("score", "generate", "forward", "update")]
    parts = fnmatch.filter(run.curves, "rewards/*/mean")

    advice: list[Advice] = []

    def rule(applies: bool, title: str, remedy: str, *metrics: str, step: int | None = None) -> None:
        if applies:
            known = [(name, of(name)) for name in metrics if of(name) is not NO_TREND]
            moves = ", ".join(f"`{name}` from {number(goes.start)} to {number(goes.end)}" for name, goes in known)
            advice.append(Advice(title, f"From the first fifth to the last: {moves}.", remedy, step, metrics))

    for name in parts:
        rule(
            reward.rises and of(name).falls and len(parts) > 1,
            "One reward is traded for the others",
            "Give it more weight in `reward_weights`.",
            *(name, "reward"),
            step=of(name).turning_point(),
        )
    rule(
        # unless short completions score as well within a rollout
        length.rises and reward.rises and length.end > 1.3 * length.start and not correlation.end < 0.2,
        "Length drift: the reward may favor long completions",
        "Read the completions below. If the longer ones say no more, add a reward that penalizes length, monitor one "
        "that ignores it (`monitor_funcs`), or lower `max_completion_length`.",
        *("completions/mean_length", "reward", "reward/length_correlation"),
        step=length.first(above=1.3 * length.start),
    )
    rule(
        spread.end <= equal,
        "All completions get the same reward",
        "Use graded rewards, easier prompts or a higher `temperature`. At the reward's maximum, the run is done.",
        *("reward_std", "reward"),
        step=spread.first(below=equal),
    )
    for name, level, title, remedy in TOO_HIGH:
        rule(of(name).end >= level, title, remedy, name, step=of(name).first(above=level))
    rule(
        entropy.falls and entropy.start > 0 and entropy.end <= 0.3 * entropy.start,
        "Entropy collapse: the policy stops exploring",
        "Raise `entropy_coef` or set `entropy_target`; lower `learning_rate` or raise `kl_coef`.",
        "entropy",
        step=entropy.first(below=0.5 * entropy.start),
    )
    rule(
        distinct.falls and distinct.start - distinct.end >= 0.1,
        "Mode collapse: completions become identical",
        "Raise `kl_coef` or `entropy_coef`. Read below which answer every prompt gets: the reward favors it.",
        "completions/distinct_ratio",
        step=distinct.first(below=distinct.start - 0.05),
    )
    rule(
        explained.end < UNEXPLAINED and len(explained.curve.values) >= FEWEST_FLAT,
        "The critic does not predict the returns",
        "Raise `critic_learning_rate` or `value_warmup_steps`, run `trl-ppo pretrain-critic`, or set `critic='none'`.",
        "value/explained_variance",
    )
    rule(
        kl.end < negative,
        "Negative KL: completions are not sampled from the policy's own distribution",
        "Sample from the full distribution: `top_p=1.0`, `top_k=0`, `min_p=None`, `repetition_penalty=1.0`.",
        "kl_per_completion",
        step=kl.first(below=negative),
    )
    rule(
        enough and reward.falls,
        "The reward falls",
        "Lower `learning_rate`. Check that higher scores are better, and lower `kl_coef` if the KL dominates.",
        "reward",
    )
    rule(
        enough and not reward.falls and not reward.rises and abs(kl.end) < 0.05,
        "The policy hardly changes",
        "Raise `learning_rate`, or lower `kl_coef`.",
        *("reward", "kl_per_completion"),
    )
    rule(
        of(times[0]).end >= max(sum(of(name).end for name in times[1:]), 1e-9),
        "Scoring takes most of the time",
        "Make reward functions that wait `async`, load reward models in 4-bit (`reward_quantization`), raise "
        "`per_device_reward_batch_size`, or serve the rewards from another GPU (`vllm serve`).",
        *times,
    )
    return advice


def advise(run: Run) -> list[Advice]:
    """Apply all rules."""

    def with_value(match: re.Match) -> str:
        value = run.config.get(match[1], run.trainer_config.get(match[1]))
        return match[0] if value is None else f"{match[0]} (now {value})"

    # A remedy shows the current value of each setting that it names.
    curves = [*_monitors(run), *_trends(run)] if run.rollouts >= FEWEST else []
    advice = [*curves, *_failures(run)]
    return [item._replace(remedy=re.sub(r"`(\w+)(=[^`]*)?`", with_value, item.remedy)) for item in advice]


def verdict(run: Run, advice: list[Advice]) -> str:
    """One sentence on the health of a run."""
    titles = [item.title for item in advice if not item.metrics[0].startswith("time/")]  # a slow run is healthy
    if titles:
        return f"Needs attention: {'; '.join(titles)}."
    if run.rollouts < FEWEST:
        return f"Too early to judge: {run.rollouts} of at least {FEWEST} rollouts."
    reward = trend(run.curves.get("reward"))
    if not reward.rises:
        return "No curve shows a known problem, but the reward does not rise clearly, or not yet."
    return (
        f"Healthy: no curve shows a known problem, and the reward rises {number(reward.start)} → {number(reward.end)}."
    )
