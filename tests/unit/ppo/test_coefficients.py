"""Coefficients: how far and which way they move, and resuming bit for bit."""

import json

import pytest

from trl_ppo_ext.ppo.math import AdaptiveEntropy, AdaptiveKL, Coefficient


def makers():
    return {
        "fixed": lambda: Coefficient(0.05),
        "kl": lambda: AdaptiveKL(0.05, target=6.0, horizon=10_000),
        "entropy": lambda: AdaptiveEntropy(0.02, target=0.3, step=0.01),
    }


# ---- KL ----


@pytest.mark.parametrize(
    ("measured", "error"),
    [
        pytest.param(6.0, 0.0, id="at the target"),
        pytest.param(6.6, 0.1, id="a tenth above"),
        pytest.param(5.4, -0.1, id="a tenth below"),
        pytest.param(7.2, 0.2, id="at the upper clip"),
        pytest.param(60.0, 0.2, id="far above"),
        pytest.param(0.0, -0.2, id="no KL"),
        pytest.param(-1.0, -0.2, id="an estimate below 0"),
    ],
)
@pytest.mark.parametrize("completions", [64, 512])
def test_kl_coefficient_moves_with_the_clipped_proportional_error(measured, error, completions):
    coefficient = AdaptiveKL(0.05, target=6.0, horizon=10_000)
    coefficient.update(measured, completions)
    assert coefficient.value == pytest.approx(0.05 * (1 + error * completions / 10_000), rel=1e-12)


def test_kl_coefficient_settles_at_the_target():
    """A policy whose KL is inversely proportional to the coefficient meets the target at one coefficient only."""
    for start in (0.001, 10.0):
        coefficient = AdaptiveKL(start, target=6.0, horizon=2_000)
        for _ in range(1_000):
            coefficient.update(0.3 / coefficient.value, 512)
        assert coefficient.value == pytest.approx(0.05, rel=1e-6)


def test_entropy_coefficient_by_hand():
    coefficient = AdaptiveEntropy(0.0, target=0.3)
    history = []
    for measured in (0.2, 0.1, 0.3, 0.4, 0.2, 0.5, 0.5, 0.5, 0.1):
        coefficient.update(measured, 64)
        history.append((coefficient.value, coefficient.coefficient))
    expected = [
        (0.005, 0.005),  # below: raised
        (0.010, 0.010),
        (0.010, 0.010),  # at the target: applied, not moved
        (0.0, 0.005),  # above: lowered and not applied
        (0.010, 0.010),  # below again: goes on from where it was
        (0.0, 0.005),
        (0.0, 0.0),
        (0.0, 0.0),  # never below 0
        (0.005, 0.005),
    ]
    assert history == [pytest.approx(pair, abs=1e-15) for pair in expected]


def test_entropy_coefficient_holds_the_target():
    """An entropy that sinks by itself and rises with the bonus ends within a step's effect of the target."""
    coefficient, entropy = AdaptiveEntropy(0.0, target=0.3, step=0.001), 1.0
    seen = []
    for _ in range(2_000):
        coefficient.update(entropy, 64)
        entropy = max(entropy - 0.01 + coefficient.value, 0.0)
        seen.append(entropy)
    assert min(seen[-500:]) > 0.2
    assert max(seen[-500:]) < 0.4


@pytest.mark.parametrize("make", makers().values(), ids=makers())
@pytest.mark.parametrize("stop", range(5))
def test_coefficient_resumes_from_json_bit_for_bit(make, stop):
    measurements = [0.1, 0.35, 5.9, 0.2, 7.3, 0.3]
    through, stopped, resumed = make(), make(), make()
    for measured in measurements[:stop]:
        stopped.update(measured, 64)
        through.update(measured, 64)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict(), allow_nan=False)))
    assert resumed.value == through.value
    for measured in measurements[stop:]:
        resumed.update(measured, 64)
        through.update(measured, 64)
        assert resumed.value == through.value


def test_fixed_coefficient_resumes_with_its_new_value():
    changed = Coefficient(0.1)
    changed.load_state_dict(Coefficient(0.05).state_dict())
    assert changed.value == 0.1
