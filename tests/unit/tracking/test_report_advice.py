"""Advice of the report: a curve with a known meaning triggers its rule, one that is near it does not."""

import numpy as np
import pytest

from trl_ppo_ext.tracking.report.advice import RULES, advise
from trl_ppo_ext.tracking.report.curves import Curve, number, trend, turning_point
from trl_ppo_ext.tracking.report.reading import Run

# ---- curves ----


def test_thinning_keeps_the_ends_of_every_stretch():
    values = np.sin(np.arange(10_000) / 500)
    values[[123, 7_777]] = 50, -50
    thin = Curve(np.arange(10_000), values).thinned(1_000)
    assert len(thin.values) <= 1_000 and np.all(np.diff(thin.steps) > 0)
    assert thin.values.max() == 50 and thin.values.min() == -50
    assert np.array_equal(thin.values, values[thin.steps])


def test_noise_alone_neither_rises_nor_falls_nor_turns():
    wrong = 0
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(1, 0.5, 200)
        goes = trend(Curve(np.arange(200), noise))
        wrong += goes.rises or goes.falls or turning_point(Curve(np.arange(200), noise)) is not None
    assert wrong <= 3


@pytest.mark.parametrize(
    "value, text",
    [
        (2074.4, "2,070"),
        (999.7, "1,000"),
        (-1234567, "-1,230,000"),
        (999.4, "999"),
        (0.0123456, "0.0123"),
        (0.0, "0"),
        (1.5e12, "1.5e+12"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_three_digits_and_thousands_in_full(value, text):
    assert number(value) == text


# ---- advice: what must trigger a rule, and what must not ----

N = 100
UP, DOWN, FLAT, ZERO = np.linspace(0, 1, N), np.linspace(1, 0, N), np.ones(N), np.zeros(N)
PEAK = np.concatenate([np.linspace(0, 1, 60), np.linspace(1, 0.2, 40)])  # falls from step 60 on
GOOD = {"reward": UP, "reward_std": FLAT, "kl_per_completion": 5 * UP, "entropy": 2 - UP}
TIMES = {"time/generate": 5 * FLAT, "time/forward": FLAT, "time/update": 4 * FLAT}
FAR = {"reward": -25 + UP, "reward_std": 3 * FLAT}  # of 0, in units of its spread

# rule: (curves that must trigger it, curves near them that must not)
CASES = {
    "over_optimisation": (
        {"reward": UP, "monitor/judge/mean": PEAK, "kl_per_completion": 30 * UP},
        {"reward": UP, "monitor/judge/mean": UP, "kl_per_completion": 30 * UP},
    ),
    "over_optimisation, both fall": (None, {"reward": PEAK, "monitor/judge/mean": PEAK, "kl_per_completion": 30 * UP}),
    "traded_rewards": (
        {"reward": UP, "rewards/a/mean": 2 * UP, "rewards/b/mean": DOWN},
        {"reward": UP, "rewards/a/mean": 2 * UP, "rewards/b/mean": FLAT},
    ),
    "length_drift": (
        {"reward": UP, "completions/mean_length": 50 + 100 * UP, "reward/length_correlation": 0.6 * FLAT},
        {"reward": UP, "completions/mean_length": 50 + 100 * UP, "reward/length_correlation": -0.1 * FLAT},
    ),
    "cut_off": ({"completions/clipped_ratio": 0.6 * UP}, {"completions/clipped_ratio": 0.1 * FLAT}),
    "entropy_collapse": ({"entropy": 2 * DOWN + 0.05}, {"entropy": 2 - 0.6 * UP}),
    "mode_collapse": ({"completions/distinct_ratio": 1 - 0.4 * UP}, {"completions/distinct_ratio": 1 - 0.05 * UP}),
    "large_updates": ({"approx_kl": 0.2 * UP}, {"approx_kl": 0.015 * FLAT, "clip_ratio/region_mean": 0.1 * FLAT}),
    "large_updates, clipped": ({"clip_ratio/region_mean": 0.5 * UP}, None),
    "stopped_updates": ({"stopped_early": UP}, {"stopped_early": 0.1 * FLAT}),
    "blind_critic": ({"value/explained_variance": 0.02 * FLAT}, {"value/explained_variance": 0.7 * UP}),
    "far_from_zero": (
        FAR | {"value/explained_variance": -0.5 * FLAT + 0.4 * UP},
        FAR | {"value/explained_variance": 0.7 * FLAT},
    ),
    "far_from_zero, spread": (None, FAR | {"reward_std": 10 * FLAT, "value/explained_variance": -0.5 * FLAT}),
    "no_differences": (
        {"reward": FLAT, "reward_std": np.maximum(0.5 - UP, 0)},
        {"reward": FLAT, "reward_std": 0.1 * FLAT},
    ),
    "reward_that_does_not_rise": ({"reward": DOWN}, {"reward": UP}),
    "reward_that_does_not_rise, stands": (
        {"reward": FLAT, "kl_per_completion": 0.001 * UP},
        {"reward": FLAT, "kl_per_completion": 5 * UP},
    ),
    "negative_kl": ({"kl_per_completion": -3 * UP}, {"kl_per_completion": 0.01 * np.sin(np.arange(N))}),
    "counted_failures": ({"skipped_steps": (np.arange(N) == 40) * 2.0}, {"skipped_steps": ZERO}),
    "counted_failures, of a reward": ({"rewards/a/failed": UP}, {"rewards/a/failed": ZERO}),
    "slow_rewards": (TIMES | {"time/score": 40 * FLAT}, TIMES | {"time/score": FLAT}),
}


def synthetic(curves, noise=0.0):
    draw = np.random.default_rng(0)
    steps = np.arange(1, N + 1)

    def noisy(values):  # what is exactly 0, or constant, stays so
        spread = np.ptp(values)
        return values + noise * spread * draw.normal(size=N) * (values != 0)

    curves = {name: Curve(steps, noisy(values)) for name, values in curves.items()}
    return Run("run", ".", curves, config={"kl_coef": 0.05, "top_p": 0.9})


def given_by(name, run):
    asked = next(rule for rule in RULES if rule.__name__ == name.split(",")[0])
    return list(asked(run))


@pytest.mark.parametrize("name", [name for name, (must, _) in CASES.items() if must is not None])
def test_a_curve_with_a_meaning_is_told_with_its_remedy(name):
    for noise in (0.0, 0.03):
        (advice,) = given_by(name, synthetic(CASES[name][0], noise))
        assert advice.title and "`" in advice.remedy and set(advice.metrics) & set(CASES[name][0])


@pytest.mark.parametrize("name", [name for name, (_, must_not) in CASES.items() if must_not is not None])
def test_a_curve_without_it_is_not(name):
    for noise in (0.0, 0.03):
        assert given_by(name, synthetic(CASES[name][1], noise)) == []


def test_every_rule_has_its_two_cases_and_a_good_run_gets_no_advice():
    for rule in RULES:
        mine = [case for name, case in CASES.items() if name.split(",")[0] == rule.__name__]
        assert all(any(case[which] is not None for case in mine) for which in (0, 1)), rule.__name__
    assert advise(synthetic(GOOD)) == [] and advise(synthetic(GOOD, noise=0.1)) == []
    assert advise(Run("run", ".")) == []


def test_over_optimisation_names_the_step_of_the_turn_and_both_remedies():
    (advice,) = given_by("over_optimisation", synthetic(CASES["over_optimisation"][0]))
    assert 55 <= advice.step <= 65
    assert f"stop at step {advice.step}" in advice.remedy and "Raise `kl_coef` (now 0.05)" in advice.remedy
    assert "KL rises to" in advice.seen
    (advice,) = given_by("over_optimisation", synthetic({"reward": UP, "monitor/judge/mean": PEAK}))
    assert "hacked" in advice.title and "kl_coef" not in advice.remedy


@pytest.mark.parametrize(
    "setting", [{"normalize_rewards": True}, {"reward_baseline": "reference"}, {"critic_init": "critic"}, {"lam": 1.0}]
)
def test_a_reward_far_from_zero_is_no_trouble_where_that_is_seen_to(setting):
    run = synthetic(CASES["far_from_zero"][0])
    (advice,) = given_by("far_from_zero", run)
    assert "-24.9 ± 3," in advice.seen and "worse than going on" in advice.seen
    run.config |= setting
    assert given_by("far_from_zero", run) == []


def test_counts_are_summed_and_the_first_step_is_named():
    (advice,) = given_by("counted_failures", synthetic({"skipped_steps": (np.arange(N) >= 98) * 2.0}))
    assert advice.seen.startswith("4 ") and advice.step == 99
