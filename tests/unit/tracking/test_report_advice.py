"""Advice of the report: a symptom triggers its rule, and a harmless curve near it does not."""

import numpy as np
import pytest
from pandas import Series

from trl_ppo_ext.tracking.advice import Trend, advise, number
from trl_ppo_ext.tracking.reading import Run
from trl_ppo_ext.tracking.report import thinned

# ---- curves ----


def test_thinning_keeps_every_peak():
    values = np.sin(np.arange(10_000) / 500)
    values[[123, 7_777]] = 50, -50
    thin = thinned(Series(values), 1_000)
    assert len(thin) <= 1_000 and thin.index.is_monotonic_increasing and thin.index.is_unique
    assert thin.max() == 50 and thin.min() == -50
    assert np.array_equal(thin.values, values[thin.index])


def test_noise_neither_rises_nor_falls_nor_turns():
    wrong = 0
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(1, 0.5, 200)
        goes = Trend(Series(noise))
        wrong += goes.rises or goes.falls or goes.turning_point() is not None
    assert wrong <= 3


def test_numbers_have_three_digits_and_full_thousands():
    texts = {2074.4: "2,070", 999.7: "1,000", -1234567: "-1,230,000", 0.0123456: "0.0123", 0.0: "0", 1.5e12: "1.5e+12"}
    assert {value: number(value) for value in texts} == texts


# ---- advice: what must trigger a rule, and what must not ----

N = 100
UP, DOWN, FLAT, ZERO = np.linspace(0, 1, N), np.linspace(1, 0, N), np.ones(N), np.zeros(N)
PEAK = np.concatenate([np.linspace(0, 1, 60), np.linspace(1, 0.2, 40)])  # falls from step 60 on
GOOD = {"reward": UP, "reward_std": FLAT, "kl_per_completion": 5 * UP, "entropy": 2 - UP}

# title: (curves that must trigger it, curves near them that must not)
CASES = {
    "Over-optimization": (
        {"reward": UP, "monitor/judge/mean": PEAK, "kl_per_completion": 30 * UP},
        {"reward": UP, "monitor/judge/mean": UP, "kl_per_completion": 30 * UP},
    ),
    "The reward may be hacked": (
        {"reward": UP, "monitor/judge/mean": PEAK},
        {"reward": PEAK, "monitor/judge/mean": PEAK},  # both fall
    ),
    "One reward is traded": (
        {"reward": UP, "rewards/a/mean": 2 * UP, "rewards/b/mean": DOWN},
        {"reward": UP, "rewards/a/mean": 2 * UP, "rewards/b/mean": FLAT},
    ),
    "Length drift": (
        {"reward": UP, "completions/mean_length": 50 + 100 * UP, "reward/length_correlation": 0.6 * FLAT},
        {"reward": UP, "completions/mean_length": 50 + 100 * UP, "reward/length_correlation": -0.1 * FLAT},
    ),
    "Many completions": ({"completions/clipped_ratio": 0.6 * UP}, {"completions/clipped_ratio": 0.1 * FLAT}),
    "Entropy collapse": ({"entropy": 2 * DOWN + 0.05}, {"entropy": 2 - 0.6 * UP}),
    "Mode collapse": ({"completions/repeated_ratio": 0.4 * UP}, {"completions/repeated_ratio": 0.05 * UP}),
    "Updates move the policy too far": ({"approx_kl": 0.2 * UP}, {"approx_kl": 0.015 * FLAT}),
    "Too many tokens are clipped": ({"clip_ratio/region_mean": 0.5 * UP}, {"clip_ratio/region_mean": 0.1 * FLAT}),
    "`target_kl` skips": ({"stopped_early": UP}, {"stopped_early": 0.1 * FLAT}),
    "The critic does not predict": ({"value/explained_variance": 0.02 * FLAT}, {"value/explained_variance": 0.7 * UP}),
    "All completions get the same reward": (
        {"reward": FLAT, "reward_std": np.maximum(0.5 - UP, 0)},
        {"reward": FLAT, "reward_std": 0.1 * FLAT},
    ),
    "The reward falls": ({"reward": DOWN}, {"reward": UP}),
    "The policy hardly changes": (
        {"reward": FLAT, "kl_per_completion": 0.001 * UP},
        {"reward": FLAT, "kl_per_completion": 5 * UP},
    ),
    "Negative KL": ({"kl_per_completion": -3 * UP}, {"kl_per_completion": 0.01 * np.sin(np.arange(N))}),
    "Non-finite gradients": ({"skipped_steps": (np.arange(N) == 40) * 2.0}, {"skipped_steps": ZERO}),
    "A reward failed": ({"rewards/a/failed": UP}, {"rewards/a/failed": ZERO}),
}


def synthetic(curves, noise=0.0):
    draw = np.random.default_rng(0)
    steps = np.arange(1, N + 1)

    def noisy(values):  # what is exactly 0, or constant, stays so
        spread = np.ptp(values)
        return values + noise * spread * draw.normal(size=N) * (values != 0)

    return run_of({name: Series(noisy(values), steps) for name, values in curves.items()})


def run_of(curves, **plan):
    start = {"config": {"kl_coef": 0.05, "top_p": 0.9}, "trainer_config": {}, "plan": plan}
    return Run("run", start, curves, [], [], 0.0, 0.0)


def matching(name, run):
    return [advice for advice in advise(run) if advice.title.startswith(name)]


@pytest.mark.parametrize("name", CASES)
def test_symptom_triggers_advice_and_a_harmless_curve_near_it_does_not(name):
    symptom, harmless = CASES[name]
    for noise in (0.0, 0.03):
        (advice,) = matching(name, synthetic(symptom, noise))
        assert advice.remedy and any(f"`{metric}`" in advice.seen for metric in symptom)
        assert matching(name, synthetic(harmless, noise)) == []


def test_good_run_gets_no_advice():
    assert advise(synthetic(GOOD)) == advise(synthetic(GOOD, noise=0.1)) == advise(run_of({})) == []


def test_monitor_without_a_reward_gets_no_advice():
    run = synthetic({"monitor/judge/mean": PEAK})
    run.curves["reward"] = Series(np.ones(2), [1, 2])
    assert advise(run) == []


def test_over_optimization_names_the_turning_point_and_remedies():
    (advice,) = matching("Over-optimization", synthetic(CASES["Over-optimization"][0]))
    assert 55 <= advice.step <= 65
    assert f"stop at step {advice.step}" in advice.remedy and "Raise `kl_coef` (now 0.05)" in advice.remedy
    assert "KL rises to" in advice.seen


def test_level_is_judged_from_the_third_rollout():
    for points, plan, judged in ((2, {}, False), (3, {}, True), (8, {"optimizer_steps": 4}, False)):
        curve = Series(np.full(points, 0.9), np.arange(1, points + 1))
        run = run_of({"reward": curve, "completions/clipped_ratio": curve}, **plan)
        assert [item.title for item in advise(run)] == ["Many completions are truncated"] * judged


def test_few_points_have_no_trend():
    for points in range(3, 10):
        goes = Trend(Series(np.linspace(0, 1, points)))
        assert goes.start < goes.end and not goes.rises and goes.turning_point() is None


def test_failures_are_summed_with_their_first_step():
    (advice,) = matching("Non-finite gradients", synthetic({"skipped_steps": (np.arange(N) >= 98) * 2.0}))
    assert "adds up to 4:" in advice.seen and advice.step == 99
