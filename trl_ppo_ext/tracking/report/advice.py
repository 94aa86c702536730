"""Advice: what a curve of a known meaning says, from which step on, and what to do about it."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .curves import Curve, Trend, crossing, trend, turning_point
from .curves import number as _n
from .reading import Run

FEWEST_TO_JUDGE = 20  # points before a curve that stands still says anything


class Advice(NamedTuple):
    """What a curve says."""

    title: str  # its meaning in a few words
    seen: str  # what is seen, in numbers
    remedy: str  # what to do
    step: int | None = None  # step from which on it is seen
    metrics: tuple[str, ...] = ()  # the curves


Rule = Callable[[Run], Iterator[Advice]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a rule to those that a report asks."""
    RULES.append(function)
    return function


def advise(run: Run) -> list[Advice]:
    """Ask all rules."""
    return [advice for ask in RULES for advice in ask(run)]


def _goes(run: Run, name: str) -> Trend | None:
    return trend(run.curves.get(name))


def _named(run: Run, prefix: str, suffix: str = "/mean") -> dict[str, Curve]:
    """Curves of all rewards, or of all monitors, by the name of the reward."""
    found = {name: curve for name, curve in run.curves.items() if name.startswith(prefix) and name.endswith(suffix)}
    return {name[len(prefix) : -len(suffix)]: curve for name, curve in found.items()}


def _setting(run: Run, name: str) -> Any:
    return run.config.get(name, run.trainer_config.get(name))


def _now(run: Run, name: str) -> str:
    """` (now 0.05)`, where the setting is known."""
    value = _setting(run, name)
    return "" if value is None else f" (now {value})"


@rule
def over_optimisation(run: Run) -> Iterator[Advice]:
    """A monitored reward falls while the one that is optimised does not."""
    reward = run.curves.get("reward")
    optimised = trend(reward)
    if reward is None or optimised is None:
        return
    kl_name = "kl_per_completion" if "kl_per_completion" in run.curves else "kl"
    kl = _goes(run, kl_name)
    for name, curve in _named(run, "monitor/").items():
        step, goes = turning_point(curve), trend(curve)
        if step is None or goes is None or optimised.end < reward.at(step) - 2 * optimised.error:
            continue
        falls = f"`monitor/{name}` falls from {_n(curve.at(step))} to {_n(goes.end)} after step {step}, while the "
        falls += f"reward goes from {_n(reward.at(step))} to {_n(optimised.end)}"
        metrics = (f"monitor/{name}/mean", "reward", kl_name)
        if kl is not None and kl.rises:
            falls += f" and the KL rises to {_n(kl.end)}"
            remedy = f"Raise `kl_coef`{_now(run, 'kl_coef')}, or stop at step {step}."
            yield Advice(
                "Over-optimisation: the reward is climbed, its purpose is not", falls + ".", remedy, step, metrics
            )
        else:
            remedy = (
                f"Read completions of step {step} beside the last ones, and mend the reward; or stop at step {step}."
            )
            yield Advice("The reward may be hacked", falls + ".", remedy, step, metrics)


@rule
def traded_rewards(run: Run) -> Iterator[Advice]:
    """One reward falls while their sum rises."""
    total, parts = _goes(run, "reward"), _named(run, "rewards/")
    if total is None or not total.rises or len(parts) < 2:
        return
    for name, curve in parts.items():
        goes = trend(curve)
        if goes is not None and goes.falls:
            yield Advice(
                "One reward is traded for the others",
                f"`rewards/{name}` falls from {_n(goes.start)} to {_n(goes.end)}, while the sum rises from "
                f"{_n(total.start)} to {_n(total.end)}.",
                f"Give it more weight in `reward_weights`{_now(run, 'reward_weights')}.",
                turning_point(curve),
                (f"rewards/{name}/mean", "reward"),
            )


@rule
def length_drift(run: Run) -> Iterator[Advice]:
    """Completions grow with the reward."""
    length, reward = _goes(run, "completions/mean_length"), _goes(run, "reward")
    if length is None or reward is None or not (length.rises and reward.rises and length.end > 1.3 * length.start):
        return
    correlated = _goes(run, "reward/length_correlation")
    if correlated is not None and correlated.end < 0.2:  # longer, but within a rollout length does not pay
        return
    curve = run.curves["completions/mean_length"]
    paid = "" if correlated is None else f"; within a rollout, reward and length correlate at {_n(correlated.end)}"
    yield Advice(
        "Length drift: the reward may pay for length",
        f"Completions grow from {_n(length.start)} to {_n(length.end)} tokens while the reward rises{paid}.",
        "See below whether longer completions say more. If not: add a reward that charges for length, monitor a "
        "reward that does not see it (`monitor_funcs`), or lower `max_completion_length`"
        f"{_now(run, 'max_completion_length')}.",
        crossing(curve, 1.3 * length.start),
        ("completions/mean_length", "reward/length_correlation"),
    )


@rule
def cut_off(run: Run) -> Iterator[Advice]:
    """Many completions do not end."""
    goes = _goes(run, "completions/clipped_ratio")
    if goes is None or goes.end < 0.25:
        return
    yield Advice(
        "Completions are cut off",
        f"{goes.end:.0%} of the last completions ran into `max_completion_length`"
        f"{_now(run, 'max_completion_length')} ({goes.start:.0%} at the start).",
        "Raise `max_completion_length`, charge for it with `missing_eos_penalty`, or leave them out with "
        "`mask_truncated_completions`.",
        crossing(run.curves["completions/clipped_ratio"], 0.25),
        ("completions/clipped_ratio",),
    )


@rule
def entropy_collapse(run: Run) -> Iterator[Advice]:
    """The policy becomes sure of everything."""
    goes = _goes(run, "entropy")
    if goes is None or goes.start <= 0 or not goes.falls or goes.end > 0.3 * goes.start:
        return
    yield Advice(
        "Entropy collapses: the policy stops exploring",
        f"The entropy falls from {_n(goes.start)} to {_n(goes.end)} nats.",
        f"Raise `entropy_coef`{_now(run, 'entropy_coef')} or set `entropy_target`; lower `learning_rate`"
        f"{_now(run, 'learning_rate')}, or raise `kl_coef`{_now(run, 'kl_coef')}.",
        crossing(run.curves["entropy"], 0.5 * goes.start, above=False),
        ("entropy",),
    )


@rule
def mode_collapse(run: Run) -> Iterator[Advice]:
    """Completions repeat one another."""
    goes = _goes(run, "completions/distinct_ratio")
    if goes is None or not goes.falls or goes.start - goes.end < 0.1:
        return
    yield Advice(
        "Completions become the same",
        f"Distinct completions fall from {goes.start:.0%} to {goes.end:.0%} of a rollout.",
        f"Raise `kl_coef`{_now(run, 'kl_coef')} or `entropy_coef`{_now(run, 'entropy_coef')}, and see below which "
        "answer is given to everything: the reward likes it.",
        crossing(run.curves["completions/distinct_ratio"], goes.start - 0.05, above=False),
        ("completions/distinct_ratio",),
    )


@rule
def large_updates(run: Run) -> Iterator[Advice]:
    """A rollout is used for more than it can say."""
    limits = {"approx_kl": (0.05, "about 0.02"), "clip_ratio/region_mean": (0.3, "about 0.2")}
    for name, (most, usual) in limits.items():
        goes = _goes(run, name)
        if goes is not None and goes.end > most:
            yield Advice(
                "Updates are too large",
                f"`{name}` is {_n(goes.end)} at the end; {usual} is where it should stay below.",
                f"Lower `learning_rate`{_now(run, 'learning_rate')} or `num_ppo_epochs`{_now(run, 'num_ppo_epochs')}, "
                f"or set `target_kl`{_now(run, 'target_kl')}.",
                crossing(run.curves[name], most),
                (name,),
            )
            return


@rule
def stopped_updates(run: Run) -> Iterator[Advice]:
    """`target_kl` ends most updates."""
    goes = _goes(run, "stopped_early")
    if goes is None or goes.end < 0.4:
        return
    yield Advice(
        "`target_kl` stops many updates",
        f"{goes.end:.0%} of the last optimizer steps were not taken: time is spent on rollouts that teach little.",
        f"Lower `learning_rate`{_now(run, 'learning_rate')} or `num_ppo_epochs`{_now(run, 'num_ppo_epochs')}.",
        crossing(run.curves["stopped_early"], 0.4),
        ("stopped_early",),
    )


@rule
def blind_critic(run: Run) -> Iterator[Advice]:
    """The critic predicts nothing of the returns."""
    name = "value/explained_variance"
    curve, goes = run.curves.get(name), _goes(run, name)
    if curve is None or goes is None or len(curve.finite().values) < FEWEST_TO_JUDGE or goes.end >= 0.1:
        return
    yield Advice(
        "The critic explains none of the returns",
        f"`{name}` is {_n(goes.end)} at the end; 1 is all, 0 is what a constant explains.",
        f"Raise `critic_learning_rate`{_now(run, 'critic_learning_rate')}, give it a start (`value_warmup_steps`"
        f"{_now(run, 'value_warmup_steps')}, or `trl-ppo pretrain-critic`), or do without it (`critic='none'`).",
        None,
        (name,),
    )


@rule
def far_from_zero(run: Run) -> Iterator[Advice]:
    """Scores lie far from 0, where a new critic expects them."""
    reward, spread = _goes(run, "reward"), _goes(run, "reward_std")
    name = "value/explained_variance"
    curve = run.curves.get(name)
    if reward is None or spread is None or curve is None or _goes(run, name) is None:
        return
    if any(_setting(run, setting) for setting in ("normalize_rewards", "reward_baseline", "critic_init")):
        return
    if _setting(run, "lam") == 1:  # every token sees the end
        return
    values = curve.finite().values
    first = float(np.median(values[: len(values) // 2]))  # the mean would be that of a few outliers
    if not 0 < 3 * spread.start < abs(reward.start) or first >= 0.1:
        return
    yield Advice(
        "The reward is far from 0, where the critic starts",
        f"The first rewards are {_n(reward.start)} ± {_n(spread.start)}, and `{name}` is {_n(first)} over the first "
        "half of the run: until the critic knows that mean, only a completion's last tokens see it, and ending is "
        f"taught to be {'worse' if reward.start < 0 else 'better'} than going on.",
        "Set `normalize_rewards=True` or `reward_baseline='reference'`, or start from a `critic_init` (`trl-ppo "
        "pretrain-critic` makes one).",
        None,
        ("reward", name, "completions/mean_length"),
    )


@rule
def no_differences(run: Run) -> Iterator[Advice]:
    """All completions get the same reward."""
    spread, reward = _goes(run, "reward_std"), _goes(run, "reward")
    if spread is None or reward is None or spread.end > 1e-6 * max(reward.scale, 1.0):
        return
    yield Advice(
        "The reward tells nothing apart",
        f"All completions of the last rollouts got the same reward ({_n(reward.end)}).",
        "Give a reward with steps in between, easier prompts, or a higher `temperature`"
        f"{_now(run, 'temperature')}; where the reward is at its highest, the run is done.",
        crossing(run.curves["reward_std"], 1e-6 * max(reward.scale, 1.0), above=False),
        ("reward_std", "reward"),
    )


@rule
def reward_that_does_not_rise(run: Run) -> Iterator[Advice]:
    """The reward stands still or falls."""
    curve, goes, kl = run.curves.get("reward"), _goes(run, "reward"), _goes(run, "kl_per_completion")
    if curve is None or goes is None or goes.rises or len(curve.finite().values) < FEWEST_TO_JUDGE:
        return
    seen = f"The reward goes from {_n(goes.start)} to {_n(goes.end)} over {run.last_step} steps"
    rate, coef = _now(run, "learning_rate"), _now(run, "kl_coef")
    if goes.falls:
        remedy = (
            f"Lower `learning_rate`{rate}, see that higher scores mean better, and that `kl_coef`{coef} is not so "
        )
        yield Advice(
            "The reward falls", seen + ".", remedy + "high that the KL is all that counts.", None, ("reward",)
        )
    elif kl is not None and abs(kl.end) < 0.05:
        seen += f", with a KL of {_n(kl.end)} nats a completion: the policy hardly moves."
        remedy = f"Raise `learning_rate`{rate}, or lower `kl_coef`{coef}."
        yield Advice("The policy stands still", seen, remedy, None, ("reward", "kl_per_completion"))


@rule
def negative_kl(run: Run) -> Iterator[Advice]:
    """An average of log π/π_ref over samples of π is not below 0."""
    goes = _goes(run, "kl_per_completion")
    if goes is None or goes.end >= -max(4 * goes.error, 0.05):
        return
    yield Advice(
        "The KL is negative: the samples are not the policy's",
        f"`kl_per_completion` is {_n(goes.end)} at the end; samples of the policy itself would give 0 or more.",
        f"Sample from the whole distribution: `top_p=1.0`{_now(run, 'top_p')}, `top_k=0`{_now(run, 'top_k')}, "
        f"`min_p=None`{_now(run, 'min_p')}, `repetition_penalty=1.0`{_now(run, 'repetition_penalty')}.",
        crossing(run.curves["kl_per_completion"], -max(4 * goes.error, 0.05), above=False),
        ("kl_per_completion",),
    )


COUNTS = {
    "skipped_steps": (
        "Gradients were not finite",
        "optimizer steps were skipped",
        "Lower `learning_rate` or `max_grad_norm`, and prefer `bf16` to `fp16`.",
    ),
    "nonfinite_completions": (
        "Forwards were not finite",
        "completions were left out",
        "Prefer `bf16` to `fp16`, and look at the rollouts that were written down in the output directory.",
    ),
    "empty_steps": (
        "Steps with nothing to learn from",
        "optimizer steps had no token that counts",
        "See why completions are left out: failing rewards, or `mask_truncated_completions` where none of them ends.",
    ),
}


@rule
def counted_failures(run: Run) -> Iterator[Advice]:
    """What should not happen did."""
    counts = dict(COUNTS)
    for name in _named(run, "rewards/", "/failed"):
        counts[f"rewards/{name}/failed"] = (
            f"The reward `{name}` failed",
            "completions got no score from it",
            "See the run's warnings for its errors; `reward_on_error` says what follows.",
        )
    for name, (title, what, remedy) in counts.items():
        curve = run.curves.get(name)
        total = 0.0 if curve is None else float(np.nansum(curve.values))
        if curve is not None and total > 0:
            first = int(curve.steps[np.flatnonzero(np.nan_to_num(curve.values) > 0)[0]])
            yield Advice(title, f"{total:.0f} {what}, the first at step {first}.", remedy, first, (name,))


@rule
def slow_rewards(run: Run) -> Iterator[Advice]:
    """Scoring takes most of the time."""
    phases = {name: _goes(run, f"time/{name}") for name in ("generate", "score", "forward", "update")}
    times = {name: goes.end for name, goes in phases.items() if goes is not None and math.isfinite(goes.end)}
    total = sum(times.values())
    if len(times) < 4 or total <= 0 or times["score"] < 0.5 * total:
        return
    yield Advice(
        "Scoring takes most of the time",
        f"Of {_n(total)} s a rollout, the rewards take {_n(times['score'])} s.",
        "Make reward functions `async` where they wait, load reward models in 4-bit (`reward_quantization`), raise "
        "`per_device_reward_batch_size`, or serve them on another GPU (`trl-ppo serve-reward`).",
        None,
        ("time/score",),
    )
