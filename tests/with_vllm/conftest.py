import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# this folder, too, is a package of that name
INSTALLED = getattr(find_spec("vllm"), "origin", None) is not None
if INSTALLED:  # before anything imports it
    os.environ |= {
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first rollout compiles for seconds
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    } | os.environ


def pytest_collection_modifyitems(items):
    """Skip what starts vLLM, with the reason, where it is not installed; servers come before
    engines."""
    # tests of a server fork, and a fork of a process that has an engine crashes at its end
    items.sort(key=lambda item: item.path.name in ("test_colocated.py", "test_runs_with_vllm.py"))
    for item in items:
        if not INSTALLED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs vLLM, see `make test-vllm`"))
