"""What one rollout leaves to the next: moments, coefficients, and their JSON."""

import json
import math

import pytest
import torch

from trl_ppo_ext.modeling.critics import CriticState
from trl_ppo_ext.ppo.places import Information
from trl_ppo_ext.ppo.state import RunState
from trl_ppo_ext.ppo_math import Moments, adapt_kl_coef

MASK = torch.ones(4, 10, dtype=torch.bool)


def add(moments, x, mask=MASK, memory=None, all_sum=torch.clone):
    return moments.add(x, mask, all_sum, memory)


# ---- moments


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_moments_in_parts_equal_those_of_all_values(shift):
    x = (torch.randn(12, 10, dtype=torch.float64) + shift).split(4)
    moments = Moments()
    for part in x:
        moments = add(moments, part)
    values = torch.cat(x)
    assert moments.mean == pytest.approx(values.mean().item())
    assert moments.sample_deviation == pytest.approx(values.std().item(), rel=1e-6)
    deviation = values.std(correction=0).item()
    assert (moments.squares / moments.weight) ** 0.5 == pytest.approx(deviation, rel=1e-6)
    assert moments.unit == pytest.approx(max(deviation, 1e-4 * shift), rel=1e-6)


def test_earlier_moments_weigh_as_much_as_the_rows_of_the_memory():
    first = torch.randn(4, 10)
    second = torch.randn(4, 10) + 5
    moments = add(add(Moments(), first), second, memory=3)
    share = 3 * 10 / 40  # three rows of ten values, of four
    total = 40 * (1 + share)
    mean = (share * first.sum() + second.sum()) / total
    variance = (share * ((first - mean) ** 2).sum() + ((second - mean) ** 2).sum()) / total
    assert (moments.mean, moments.unit) == pytest.approx(
        (mean.item(), variance.sqrt().item()), rel=1e-5
    )
    few = add(add(Moments(), first), second, memory=100)
    assert few == pytest.approx(add(add(Moments(), first), second))  # no more than there was


def test_unit_follows_returns_that_improve_quickly():
    """A reward that rises from -300 to -60 in a rollout: its spread, not that of the rise, is
    the unit."""
    moments = Moments()
    for mean, spread in ((-300, 60), (-60, 20), (-30, 11), (-25, 11)):
        moments = add(
            moments, mean + spread * torch.randn(64, 90), torch.ones(64, 90).bool(), memory=8
        )
    assert moments.unit < 2 * 11  # 113 with the shift between five rollouts


def test_masked_values_never_count():
    x = torch.randn(4, 10)
    mask = MASK.clone()
    mask[:, 5:] = False
    moments = add(Moments(), torch.where(mask, x, 1e6), mask)
    assert moments.mean == pytest.approx(x[:, :5].mean().item(), abs=1e-6)
    nothing = add(moments, x, torch.zeros_like(mask))
    assert (nothing.mean, nothing.unit) == pytest.approx((moments.mean, moments.unit))


def test_moments_of_ranks_equal_those_of_one_process():
    x, other = torch.randn(2, 4, 10, dtype=torch.float64)
    whole = add(Moments(), torch.cat([x, other]), MASK.repeat(2, 1))

    # what the other rank adds: sum and counts, then squares around the shared mean
    def all_sum(own):
        counts = torch.stack([other.sum(), MASK.sum(), torch.tensor(4)])
        return own + (counts if own.ndim else ((other - whole.mean) ** 2).sum())

    assert add(Moments(), x, all_sum=all_sum) == pytest.approx(whole)


@pytest.mark.parametrize("values", [[], [3.0], [3.0] * 40])
def test_values_without_spread_have_the_unit_one(values):
    x = torch.tensor([values])
    moments = add(Moments(), x, torch.ones_like(x))
    assert moments.sample_deviation == moments.unit == 1


def test_adding_returns_new_moments_and_keeps_the_old():
    moments = add(Moments(), torch.randn(4, 10))
    before = tuple(moments)
    add(moments, torch.randn(4, 10))
    assert tuple(moments) == before


class AppleTensor(torch.Tensor):
    """Tensor as on an Apple GPU, which has no float64."""

    device = torch.device("mps")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return out


def test_moments_need_no_float64_on_apple_gpus():
    x, mask = (
        values.as_subclass(AppleTensor) for values in (torch.tensor([1.0, 2.0, 6.0]), torch.ones(3))
    )
    assert tuple(Moments().add(x, mask)) == (3.0, 3.0, 14.0)


# ---- state


def test_state_survives_json_bit_for_bit():
    scores, *moments = [add(Moments(), torch.randn(4, 10)) for _ in range(3)]
    state = RunState(
        1 / 3,
        {"": scores, "lake": Moments()},
        {},
        CriticState(*moments),
        spreads=(1 / 7, 1 / 3),
        information={"": Information(1 / 7, 2 / 7)},
    )
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state


# ---- coefficients


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
@pytest.mark.parametrize("completions", [64, 512, 20_000])
def test_kl_coef_moves_with_the_clipped_proportional_error(measured, error, completions):
    moved = adapt_kl_coef(0.05, measured, target=6.0, horizon=10_000, completions=completions)
    assert moved == pytest.approx(0.05 * (1 + error * min(completions / 10_000, 1)), rel=1e-12)


def test_kl_coefficient_settles_at_the_target():
    """A policy whose KL is inversely proportional to the coefficient meets the target at one
    coefficient only."""
    for value in (0.001, 10.0):
        for _ in range(1_000):
            value = adapt_kl_coef(value, 0.3 / value, target=6.0, horizon=2_000, completions=512)
        assert value == pytest.approx(0.05, rel=1e-6)


def test_kl_coefficient_does_not_depend_on_small_step_sizes():
    often = seldom = 0.05
    for _ in range(200):
        often = adapt_kl_coef(often, 60.0, 6.0, 100_000, 50)
    for _ in range(100):
        seldom = adapt_kl_coef(seldom, 60.0, 6.0, 100_000, 100)
    assert often == pytest.approx(seldom, rel=1e-5)
    assert often == pytest.approx(0.05 * math.exp(0.2 * 10_000 / 100_000), rel=1e-5)


@pytest.mark.parametrize("measured", [math.nan, math.inf, -math.inf])
def test_nonfinite_measurement_changes_nothing(measured):
    assert adapt_kl_coef(0.05, measured, 6.0, 10_000, 64) == 0.05
