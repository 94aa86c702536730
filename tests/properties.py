"""Strategies of the property tests."""

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st

property_test = settings(derandomize=True, deadline=None, database=None, max_examples=40)
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
seeds = st.integers(0, 2**31)


@st.composite
def batches(draw, tensors=2, least_rows=1, whole_groups=1):
    """Tensors `[batch, response]` in float64 and a mask with any holes, whole rows of which may
    count nothing."""
    rows = draw(st.integers(least_rows, 6)) * whole_groups
    shape = rows, draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(seeds))
    size = draw(st.sampled_from([1e-3, 1.0, 50.0]))
    made = [
        size * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(tensors)
    ]
    mask = (
        torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    ).long()
    return *made, mask


def close(one, other, rtol=1e-9, atol=1e-9):
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
