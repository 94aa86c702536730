"""Advice: what went wrong in a run, what followed, and what to change; `templates/rules.yaml`
has the texts."""

import fnmatch
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import yaml
from pandas import Series

from .reading import Run, evaluation_prefixes, smooth

FEWEST = 3  # rollouts, and points of a curve, below which nothing is judged
FEWEST_TREND = 5  # points below which a curve has no trend
FEWEST_FLAT = 10  # rollouts below which a flat curve means nothing
SMALL = 5e-4  # nats per token that the updates of a rollout move the policy, below which it is slow


def number(value: float) -> str:
    """Format a number with three digits, and thousands in full."""
    text = f"{value:.3g}"
    rounded = float(text)
    if 1e3 <= abs(rounded) < 1e9:
        return f"{rounded:,.0f}"
    return text


class Trend:
    """Start and end of a curve, and its noise: with too few points NaN, which makes every
    comparison false."""

    def __init__(self, curve: Series | None):
        # 1. Points, and a smooth curve through them.
        if curve is None or len(curve) < FEWEST:
            values = Series(dtype=float)
        else:
            values = curve
        self.values = values
        self.smooth = smooth(values)
        self.scale = float(self.smooth.abs().max())
        enough = len(values) >= FEWEST_TREND

        # 2. Noise of a point. The median absolute difference of neighbors estimates it without the
        # trend and without a few jumps. Of few neighbors, it is often too small.
        differences = values.diff()
        noise = 1.4826 / math.sqrt(2) * float((differences - differences.median()).abs().median())
        noise *= 1 + 3 / max(len(values) - 1, 1)

        # 3. Levels: means of the first and the last fifth, and a median, which no outlier moves.
        fifth = max(len(values) // 5, 1)
        first = fifth
        self.start = float(values.iloc[:first].mean())
        # a fast change would hide in the mean
        if enough and abs(values.iloc[0] - self.start) > 4 * noise:
            first = 1
            self.start = float(values.iloc[0])
        self.end = float(values.iloc[-fifth:].mean())
        if enough:
            self.recent = float(values.iloc[-max(fifth, FEWEST_TREND) :].median())
        else:
            self.recent = math.nan
        # standard error of `end - start` for independent points
        self.error = noise * math.sqrt(1 / first + 1 / fifth)

        # 4. Direction, of a change that is more than noise, and enough to matter.
        change = self.end - self.start
        is_clear = enough and (self._is_ordered() or self._has_settled())
        least_change = max(0 if is_clear else 4 * self.error, 0.02 * self.scale)
        self.rises = enough and change > least_change
        self.falls = enough and -change > least_change
        self.collapses = self.falls and self.end <= 0.3 * self.start

        # 5. The step from which on it went down again.
        top = self.smooth.max()
        bottom = self.smooth.min()
        least_fall = max(5.5 * self.error, 0.25 * (top - bottom), 0.02 * self.scale)
        has_turned = enough and top - self.end > least_fall
        self.turns = int(self.smooth.idxmax()) if has_turned else None

    def _is_ordered(self) -> bool:
        """True if the points are nearly in order, as 1 % of those of noise are."""
        steps = Series(range(len(self.values)), self.values.index, dtype=float)
        order = self.values.rank().corr(steps)
        return abs(order) > min(0.94, 2.5 / math.sqrt(len(self.values) - 1))

    def _has_settled(self) -> bool:
        """True if all but the first points agree on a level that is far from the first two: the
        noise of few points contains the way there."""
        early = len(self.values) // 4
        if early < 2:
            return False
        later = self.values.iloc[early:]
        gaps = (later.mean() - self.values.iloc[:2]).to_numpy()
        # few points underestimate their spread; the first log may be of fewer rollouts
        bound = 4 * (1 + 3 / (len(later) - 1)) * math.sqrt(1 + 1 / len(later)) * later.std()
        is_one_way = gaps[0] * gaps[1] > 0
        return is_one_way and abs(gaps[0]) > bound and abs(gaps[1]) > bound / 3

    def first(self, above: float = math.inf, below: float = -math.inf) -> int | None:
        """First step at which the smoothed curve is above or below a level."""
        return next(iter(self.smooth.index[(self.smooth > above) | (self.smooth < below)]), None)

    def __str__(self) -> str:
        top = self.smooth[self.turns] if self.turns is not None else -math.inf
        if top > self.start + 0.1 * self.scale:
            best = f" to {number(top)} at step {self.turns}, then"
        else:
            best = ""
        start = number(self.start)
        end = number(self.end)
        if start == end and not best:
            return f"at {end}"
        return f"from {start}{best} to {end}"


class Curves:
    """Trends of a run by name, and what several rules read of them."""

    def __init__(self, run: Run):
        curves = dict(run.curves)
        if "episodes/limited" in curves:  # longer completions would have ended there, too
            truncated = curves["completions/clipped_ratio"]
            curves["completions/clipped_ratio"] = truncated - curves["episodes/limited"]
        # often won in one way
        self.names = list(run.curves)
        self.has_turns = "episodes/turns" in run.curves
        # a baseline that weighs the critic's values by what they explain
        self.is_weighed = "value/weight_of_critic" in run.curves
        self.of = cache(lambda name: Trend(curves.get(name)))
        self.reward, self.kl, self.spread = map(
            self.of, ("reward", "kl_per_completion", "reward_std")
        )
        widest = self.spread.values.max()
        # rewards that should fall
        weights = run.start["config"].get("reward_weights") or []
        self.penalties = [
            self.of(f"rewards/{name}/mean")
            for name, weight in zip(run.start.get("rewards", []), weights)
            if weight < 0
        ]
        # before it, only the critic learns, or the learning rate still rises
        critic_warmup = (run.start["config"].get("critic_kwargs") or {}).get("warmup_steps", 0)
        rates = self.of("learning_rate").values
        # it rises again at a restart, and where a resumed run got more steps
        rises = (rates.diff().iloc[1:] > 0).cummin()
        self.warmup = max([critic_warmup, *rates.index[1:][rises.to_numpy()]])
        self.rollouts = max(run.rollouts_after(self.warmup), 0)
        is_enough = run.rollouts >= FEWEST_FLAT and len(self.reward.values) >= FEWEST_TREND
        self.rises = self.reward.rises and self.reward.turns is None
        self.is_long = is_enough and self.rollouts >= FEWEST_FLAT
        self.falls = is_enough and (self.reward.falls or self.reward.turns is not None)
        self.rounding = 1e-6 * max(self.reward.scale, 1.0)  # largest spread of equal rewards
        self.all_equal = self.spread.end <= self.rounding
        self.narrows = self.spread.end <= 0.5 * widest  # there is less and less to learn
        # also with too few logs for a trend
        self.has_gained = (
            self.rises or self.reward.end - self.reward.start > 0.1 * self.reward.scale
        )
        self.is_solved = self.rises and (self.all_equal or self.spread.end <= 0.1 * widest)

    def hacks(self, monitor: Trend) -> bool:
        """True if a monitored reward turns down while the optimized reward does not."""
        x = self.reward
        turns = monitor.turns
        return (
            turns is not None and len(x.values) > 0 and x.end >= x.smooth.asof(turns) - 2 * x.error
        )

    def pays(self, length: Trend) -> bool:
        """True if longer completions of a rollout score higher, and completions become longer or
        are cut."""
        long = length.first(above=length.start + 0.8 * (length.smooth.max() - length.start))
        # later all may be cut; of completions of one length it is 0
        correlation = (
            self.of("reward/length_correlation").values.loc[:long].replace(0, math.nan).mean()
        )
        drifts = (
            self.rises
            and length.rises
            and length.end > 1.3 * length.start
            and not correlation < 0.3
        )
        return drifts or (correlation > 0.8 and self.of("completions/clipped_ratio").end >= 0.25)

    def is_dead(self) -> bool:
        """True if the policy does not change; without a reference, its updates and its entropy
        show that."""
        entropy = self.of("entropy")
        largest = self.of("approx_kl").values.max()
        return not (abs(self.kl.end) >= 0.05 or largest >= 5e-3 or entropy.rises or entropy.falls)

    def hardly_moves(self, moved: Trend) -> bool:
        """True if no rollout after the warm-up has moved the policy far, and the reward does not
        clearly rise."""
        after = moved.values.loc[self.warmup + 1 :]
        is_enough = len(after) >= FEWEST_TREND
        return is_enough and after.max() < SMALL and not (self.rises or self.all_equal)

    def is_unconfirmed(self, evaluated: Trend) -> bool:
        """True if the reward has risen since the first evaluation, evaluations by less than a
        quarter of that, and they are clearly below the reward: the first may have been high."""
        x = self.reward
        if not self.rises or len(evaluated.values) < FEWEST:
            return False
        # an evaluation may come before the first rollout
        first = max(evaluated.values.index[0], x.smooth.index[0])
        gain = x.end - x.smooth.asof(first)
        # one evaluation, or one rollout, may be off
        is_clear = gain > max(3 * x.error, 3 * evaluated.error, 0.1 * x.scale)
        is_low = evaluated.end < x.end - 0.25 * gain
        return is_clear and is_low and evaluated.end - evaluated.start < 0.25 * gain

    def is_traded(self, part: Trend) -> bool:
        """True if one of several rewards gets worse while the sum rises."""
        has_others = len(fnmatch.filter(self.names, "rewards/*/mean")) > 1
        gets_worse = part.rises if part in self.penalties else part.falls
        return has_others and gets_worse and self.rises

    def is_constant(self, spread: Trend) -> bool:
        """True if one of several rewards had no spread in any log, and their sum has some."""
        has_others = len(fnmatch.filter(self.names, "rewards/*/std")) > 1
        never_differs = spread.values.max() <= self.rounding
        return has_others and never_differs and not self.all_equal

    def has_fixed_length(self, truncated: Trend) -> bool:
        """True if nearly all completions have the full length from the start, and the reward
        rises: then a fixed length may be meant."""
        return self.rises and truncated.start >= 0.95 and truncated.smooth.min() >= 0.9

    def of_critic(self) -> str | None:
        """Sentence on the critic's use; `None` without a critic, or before enough logs."""
        explained = self.of("value/explained_variance_without_clock").recent
        if math.isnan(explained):
            explained = self.of("value/explained_variance").recent
        if math.isnan(explained):
            return None
        share = f"{100 * max(explained, 0.0):.0f} %"
        if explained >= 0.3:
            return f"The critic explains {share} of what differs between returns."
        if explained >= 0.05:
            return (
                f"The critic explains {share} of what differs between returns, so advantages are "
                "a little less noisy than without it."
            )
        if self.is_weighed:
            return (
                f"The critic explains {share} of what differs between returns, hardly more than a "
                "constant. Values that do not fit the returns are not used "
                "(`value/weight_of_critic`). It is usual if one score comes at the end, or if the "
                "rewards of tokens cannot be foreseen."
            )
        return f"The critic explains {share} of what differs between returns: it does not help."

    def outcome(self) -> str:
        """Sentence on the trend of the reward and the KL."""
        x = self.reward
        kl = round(self.kl.end, 2) + 0.0  # without the sign of 0
        if len(x.values):
            goes = f"stays at {number(x.end)}"
        else:
            goes = "has too few logs"
        if x.rises or x.falls or x.turns is not None:
            goes = f"{'rises' if self.rises else 'falls' if x.falls else 'goes'} {x}"
        return (
            "The reward "
            f"{goes}{'' if math.isnan(kl) else f' at a KL of {number(kl)} nats per completion'}"
        )


# by name of the rule: whether it holds, and from which step on, for its curve and all curves
CONDITIONS: dict[str, Callable[[Trend, Curves], tuple[bool, int | None]]] = {
    "over-optimized": lambda x, c: (c.hacks(x) and c.kl.rises, x.turns),
    "hacked": lambda x, c: (c.hacks(x) and not c.kl.rises, x.turns),
    "length": lambda x, c: (c.pays(x), x.first(above=1.3 * x.start)),
    "kl": lambda x, c: (x.end >= 50 and not c.of("kl").end < 0.1, x.first(above=50)),
    "traded": lambda x, c: (c.is_traded(x), x.turns),
    "constant": lambda x, c: (c.is_constant(x), None),
    "unconfirmed": lambda x, c: (c.is_unconfirmed(x), None),
    "cut": lambda x, c: (x.end >= 0.75 and c.all_equal and not c.has_gained, None),
    "equal": lambda x, c: (c.all_equal and not c.has_gained, None),
    "entropy": lambda x, c: (
        x.collapses and not (c.rises and c.narrows),
        x.first(below=0.5 * x.start),
    ),
    "drifts": lambda x, c: (
        x.rises and x.end >= 1.2 * x.start and c.of("kl").end >= 0.2,
        x.first(above=1.2 * x.start),
    ),
    "endless": lambda x, c: (x.start < 0.25 <= x.end, x.first(above=0.25)),
    "harm": lambda x, c: (
        x.recent < -0.5 and not c.narrows and not c.is_weighed,
        x.first(below=-0.5),
    ),
    "updates": lambda x, c: (x.end >= 0.25, x.first(above=0.25)),
    "clip": lambda x, c: (x.end >= 0.3, x.first(above=0.3)),
    "skip": lambda x, c: (x.end >= 0.4, x.first(above=0.4)),
    "negative": lambda x, c: (
        x.end < -max(4 * x.error, 0.05),
        x.first(below=-max(4 * x.error, 0.05)),
    ),
    "dead": lambda x, c: (c.is_long and not c.rises and c.is_dead(), None),
    "small": lambda x, c: (c.hardly_moves(x), None),
    "falls": lambda x, c: (c.falls, x.turns),
    "settled": lambda x, c: (
        x.collapses and c.rises and c.narrows and not c.is_solved,
        x.first(below=0.5 * x.start),
    ),
    "fixed": lambda x, c: (c.has_fixed_length(x), None),
    "truncated": lambda x, c: (x.start >= 0.25 <= x.end and not c.has_fixed_length(x), None),
    "repeated": lambda x, c: (
        x.rises and x.end >= x.start + 0.1 and not c.has_turns,
        x.first(above=x.start + 0.05),
    ),
    "critic": lambda x, c: (
        -0.5 <= x.recent < 0.1 and not c.narrows and not c.is_weighed,
        None,
    ),
    "flat": lambda x, c: (c.is_long and not (c.rises or c.falls), None),
    "slow": lambda x, c: (
        x.end >= max(1, 0.5 * sum(c.of(n).end for n in fnmatch.filter(c.names, "time/*"))),
        None,
    ),
}

TABLE = yaml.safe_load(
    Path(__file__).with_name("templates").joinpath("rules.yaml").read_text(encoding="utf-8")
)
OPTIONAL = {"also": "", "explains": ""} | dict.fromkeys(("grave", "live", "note", "quiet"), False)
RULES = [SimpleNamespace(**OPTIONAL | row) for row in TABLE]


class Advice(NamedTuple):
    """A problem that curves show, or else a note, and the rules that hold as its consequences."""

    rule: SimpleNamespace  # row of the table
    seen: str  # in numbers
    remedy: str
    step: int | None  # where it starts
    is_problem: bool
    consequences: list["Advice"]


class Judgement(NamedTuple):
    """A verdict, whose first sentence has the first cause of trouble or else the outcome, all
    advice, and a sentence on the critic."""

    kind: str  # "good", "problem" or "early"
    verdict: str
    advice: list[Advice]
    critic: str | None = None


def metrics_of(rule: SimpleNamespace, names: list[str]) -> list[str]:
    """Metrics that a rule is applied to; a user's own may end as those of an evaluation set do."""
    found = fnmatch.filter(names, rule.curve)
    if rule.name != "unconfirmed":
        return found
    prefixes = evaluation_prefixes(names)
    return [name for name in found if name.removesuffix("reward") in prefixes]


def judge(run: Run) -> Judgement:
    """Apply all rules. A remedy shows the current value of each setting that it names."""
    settings = run.start["trainer_config"] | run.start["config"]
    curves = Curves(run)
    advice = list[Advice]()

    def with_value(match: re.Match) -> str:
        value = settings.get(match[1])
        return match[0] if value is None else f"{match[0]} (now {value})"

    # 1. Rules from causes to consequences. The KL to a reference that sees more begins high, and
    # teaches by itself.
    if settings.get("reference_prompt"):
        silent = ["kl", "cut", "equal"] + ["flat"] * curves.all_equal
    else:
        silent = []
    for rule in RULES:
        for name in metrics_of(rule, curves.names):
            holds = False
            step = None
            curve = run.curves[name]
            if rule.name not in CONDITIONS:  # a count that must stay 0
                holds = curve.any()
                step = int(curve.ne(0).idxmax())
                seen = f"`{name}` adds up to {curve.sum():.0f}"
            elif run.rollouts >= FEWEST:
                holds, step = CONDITIONS[rule.name](curves.of(name), curves)
                known = [
                    other for other in (name, *rule.also.split()) if len(curves.of(other).values)
                ]
                seen = ", ".join(f"`{other}` {curves.of(other)}" for other in known)
            if holds and rule.name not in silent:
                remedy = re.sub(r"`(\w+)(=[^`]*)?`", with_value, rule.remedy.format(step=step))
                is_problem = rule.grave or not (curves.rises or rule.note)
                item = Advice(rule, seen, remedy, step, is_problem, [])
                causes = (
                    x for x in advice if x.is_problem and rule.name in x.rule.explains.split()
                )
                next((x.consequences for x in causes), advice).append(item)

    # 2. The verdict
    kind, verdict = _verdict(run, curves, advice, may_be_flat="flat" in silent)
    return Judgement(kind, verdict, advice, curves.of_critic())


def _verdict(run: Run, curves: Curves, advice: list[Advice], may_be_flat: bool) -> tuple[str, str]:
    """Kind and sentence of a judgement."""
    problems = [x.rule.cause for x in advice if x.is_problem]
    outcome = curves.outcome()
    if problems:
        return "problem", f"{problems[0]}. {outcome}."
    if not curves.rises and not (may_be_flat and curves.is_long):
        logs = len(run.curves.get("reward", ()))
        unit = "rollouts after the warm-up" if curves.warmup else "rollouts"
        few = (
            f"{curves.rollouts} of at least {FEWEST_FLAT} {unit}, {logs} of at least "
            f"{FEWEST_TREND} logs"
        )
        return "early", f"Too early to judge: {few}."
    causes = [x.rule.cause for x in advice if not x.rule.quiet]
    notes = " and ".join(cause[0].lower() + cause[1:] for cause in causes)
    if curves.is_solved:
        outcome = f"Solved: the{outcome[3:]}"
    return "good", f"{outcome}, but {notes}." if notes else f"{outcome}."
