"""Sampling by CUDA graphs."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def steps():
    place = str(BENCHMARKS / "speed")
    sys.path.insert(1, place)
    yield importlib.import_module("steps")
    sys.path.remove(place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_graphs_have_the_tokens_of_single_steps(steps, family, dtype):
    compared = steps.compare(family, dtype)
    assert compared["differ"] == []
    assert compared["graphs"] > 1
