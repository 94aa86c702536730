"""Advice: what a curve shows, from which step on, and what to change."""

import fnmatch
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from pandas import Series

from .reading import Run, smooth

FEWEST = 3  # rollouts, and points of a curve, below which nothing is judged
FEWEST_TREND = 10  # points below which a curve has no trend
FEWEST_FLAT = 20  # points below which a flat curve means nothing


def number(value: float) -> str:
    """Format a number with three digits, and thousands in full."""
    text = f"{value:.3g}"
    rounded = float(text)
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e9 else text


class Trend:
    """Start and end of a curve, and its noise: with too few points NaN, which makes every comparison false."""

    def __init__(self, curve: Series | None):
        values = Series(dtype=float) if curve is None or len(curve) < FEWEST else curve
        self.values = values
        self.smooth = smooth(values)
        enough = len(values) >= FEWEST_TREND
        fifth = max(len(values) // (5 if enough else 2), 1)  # of a short curve its half
        self.start, self.end = float(values.iloc[:fifth].mean()), float(values.iloc[-fifth:].mean())
        # The median absolute difference of neighbors estimates the noise without the trend and without a few jumps.
        differences = values.diff()
        noise = 1.4826 / math.sqrt(2) * float((differences - differences.median()).abs().median())
        self.error = noise * math.sqrt(2 / fifth)  # standard error of `end - start` for independent points
        self.scale = float(self.smooth.abs().max())
        least = max(4 * self.error, 0.02 * self.scale)  # more than noise, and enough to matter
        self.rises, self.falls = enough and self.end - self.start > least, enough and self.start - self.end > least

    def first(self, above: float = math.inf, below: float = -math.inf) -> int | None:
        """First step at which the smoothed curve is above or below a level."""
        return next(iter(self.smooth.index[(self.smooth > above) | (self.smooth < below)]), None)

    def turning_point(self) -> int | None:
        """Step of the maximum, if the curve then falls by more than noise."""
        if len(self.values) < FEWEST_TREND:
            return None
        top = self.smooth.max()
        least = max(5.5 * self.error, 0.25 * (top - self.smooth.min()), 0.02 * self.scale)
        return int(self.smooth.idxmax()) if top - self.end > least else None


class Advice(NamedTuple):
    """A problem that curves show, and its remedy."""

    title: str
    seen: str  # the symptom in numbers
    remedy: str
    step: int | None  # where it starts


TRUNCATED = "Raise `max_completion_length`, set `missing_eos_penalty`, or exclude them (`mask_truncated_completions`)."
SMALLER_STEPS = "Lower `learning_rate`, `num_ppo_epochs` or `target_kl`."
EXCLUDED = "Find out what excludes completions: failing rewards, or `mask_truncated_completions` if none emits EOS."
# metric, level that its end must stay below, title, remedy
TOO_HIGH = (
    ("completions/clipped_ratio", 0.25, "Many completions are truncated", TRUNCATED),
    ("approx_kl", 0.05, "Updates move the policy too far", SMALLER_STEPS),
    ("clip_ratio/region_mean", 0.3, "Too many tokens are clipped", SMALLER_STEPS),
    ("stopped_early", 0.4, "`target_kl` skips many optimizer steps", "Lower `learning_rate` or `num_ppo_epochs`."),
)
# pattern of a count that must stay 0, title, remedy
FAILURES = (
    ("skipped_steps", "Non-finite gradients", "Lower `learning_rate` or `max_grad_norm`; prefer `bf16` to `fp16`."),
    ("nonfinite_completions", "Non-finite log-probs", "Prefer `bf16` to `fp16`, or lower `learning_rate`."),
    ("empty_steps", "Steps without a token to learn from", EXCLUDED),
    ("rewards/*/failed", "A reward failed", "Read its errors in the run's warnings; `reward_on_error` handles them."),
)


def _monitors(run: Run) -> Iterator[Advice]:
    """A monitored reward turns down while the optimized reward does not."""
    reward, kl = Trend(run.curves.get("reward")), Trend(run.curves.get("kl_per_completion"))
    for name in fnmatch.filter(run.curves, "monitor/*/mean"):
        monitor = Trend(run.curves[name])
        step = monitor.turning_point()
        if step is None or not len(reward.values) or not reward.end >= reward.smooth.asof(step) - 2 * reward.error:
            continue
        title, remedy = "The reward may be hacked", f"Read completions and fix the reward, or stop at step {step}."
        seen = (
            f"After step {step}, `{name}` falls from {number(monitor.smooth[step])} to {number(monitor.end)} while "
            f"the reward goes from {number(reward.smooth.asof(step))} to {number(reward.end)}"
        )
        if kl.rises:
            title, remedy = "Over-optimization of the reward", f"Raise `kl_coef`, or stop at step {step}."
            seen += f" and the KL rises to {number(kl.end)}"
        yield Advice(title, f"{seen}.", remedy, step)


def _failures(run: Run) -> Iterator[Advice]:
    """Counts that should stay 0; they need no trend."""
    for pattern, title, remedy in FAILURES:
        for name in fnmatch.filter(run.curves, pattern):
            failures = run.curves[name][run.curves[name] > 0]
            if len(failures):
                seen = f"`{name}` adds up to {failures.sum():.0f}: the first at step {failures.index[0]}."
                yield Advice(title, seen, remedy, int(failures.index[0]))


def _trends(run: Run) -> list[Advice]:
    """Rules on the start and the end of curves."""
    advice: list[Advice] = []

    def of(name: str) -> Trend:
        return Trend(run.curves.get(name))

    def rule(applies: bool, title: str, remedy: str, *metrics: str, step: int | None = None) -> None:
        if applies:
            known = [(name, of(name)) for name in metrics if len(of(name).values)]
            moves = ", ".join(f"`{name}` from {number(goes.start)} to {number(goes.end)}" for name, goes in known)
            advice.append(Advice(title, f"From the first fifth to the last: {moves}.", remedy, step))

    reward, spread, entropy, kl = map(of, ("reward", "reward_std", "entropy", "kl_per_completion"))
    length, correlation = of("completions/mean_length"), of("reward/length_correlation")
    repeated, explained = of("completions/repeated_ratio"), of("value/explained_variance")
    enough = len(reward.values) >= FEWEST_FLAT
    equal, negative = 1e-6 * max(reward.scale, 1.0), -max(4 * kl.error, 0.05)
    parts = fnmatch.filter(run.curves, "rewards/*/mean")

    remedy = "Give it more weight in `reward_weights`."
    for name in parts if len(parts) > 1 else ():
        is_traded, step = reward.rises and of(name).falls, of(name).turning_point()
        rule(is_traded, "One reward is traded for the others", remedy, name, "reward", step=step)

    # unless short completions score as well within a rollout
    drifts = length.rises and reward.rises and length.end > 1.3 * length.start and not correlation.end < 0.2
    title, step = "Length drift: the reward may favor long completions", length.first(above=1.3 * length.start)
    remedy = (
        "Read the completions below. If the longer ones say no more, add a reward that penalizes length, monitor one "
        "that ignores it (`monitor_funcs`), or lower `max_completion_length`."
    )
    rule(drifts, title, remedy, "completions/mean_length", "reward", "reward/length_correlation", step=step)

    title, step = "All completions get the same reward", spread.first(below=equal)
    remedy = "Use graded rewards, easier prompts or a higher `temperature`. At the reward's maximum, the run is done."
    rule(spread.end <= equal, title, remedy, "reward_std", "reward", step=step)

    for name, level, title, remedy in TOO_HIGH:
        rule(of(name).end >= level, title, remedy, name, step=of(name).first(above=level))

    collapses = entropy.falls and entropy.start > 0 and entropy.end <= 0.3 * entropy.start
    title, step = "Entropy collapse: the policy stops exploring", entropy.first(below=0.5 * entropy.start)
    remedy = "Raise `entropy_coef`; lower `learning_rate` or raise `kl_coef`."
    rule(collapses, title, remedy, "entropy", step=step)

    collapses = repeated.rises and repeated.end - repeated.start >= 0.1
    title, step = "Mode collapse: completions become identical", repeated.first(above=repeated.start + 0.05)
    remedy = "Raise `kl_coef` or `entropy_coef`. Read below which answer every prompt gets: the reward favors it."
    rule(collapses, title, remedy, "completions/repeated_ratio", step=step)

    fails = explained.end < 0.1 and len(explained.values) >= FEWEST_FLAT
    remedy = "Raise `critic_learning_rate`, run `trl-ppo pretrain-critic`, or set `critic='none'`."
    rule(fails, "The critic does not predict the returns", remedy, "value/explained_variance")

    title = "Negative KL: completions are not sampled from the policy's own distribution"
    remedy = "Sample from the full distribution: `top_p=1.0`, `top_k=0`, `min_p=None`, `repetition_penalty=1.0`."
    rule(kl.end < negative, title, remedy, "kl_per_completion", step=kl.first(below=negative))

    remedy = "Lower `learning_rate`. Check that higher scores are better, and lower `kl_coef` if the KL dominates."
    rule(enough and reward.falls, "The reward falls", remedy, "reward")

    is_flat = enough and not (reward.falls or reward.rises) and not abs(kl.end) >= 0.05  # NaN without a reference
    remedy = "Raise `learning_rate`, or lower `kl_coef`."
    rule(is_flat, "The policy hardly changes", remedy, "reward", "kl_per_completion")
    return advice


def advise(run: Run) -> list[Advice]:
    """Apply all rules. A remedy shows the current value of each setting that it names."""
    settings = run.start["trainer_config"] | run.start["config"]

    def with_value(match: re.Match) -> str:
        value = settings.get(match[1])
        return match[0] if value is None else f"{match[0]} (now {value})"

    curves = [*_monitors(run), *_trends(run)] if run.rollouts >= FEWEST else []
    advice = [*curves, *_failures(run)]
    return [item._replace(remedy=re.sub(r"`(\w+)(=[^`]*)?`", with_value, item.remedy)) for item in advice]
