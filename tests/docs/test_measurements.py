"""benchmarks/README.md and benchmarks/NOTES.md have the tables of the saved results, and what waits
for a GPU runs with tiny models."""

import json
import os
import subprocess
import sys

import pytest
from pages import ROOT

PROGRAM = """
import tables
texts = [page.read_text(encoding="utf-8") for page in tables.PAGES]
places = [place[2] for text in texts for place in tables.PLACE.finditer(text)]
assert sorted(places) == sorted(tables.TABLES), "each table is on one page, once"
for text in texts:
    assert tables.filled(text) == text, "run `python benchmarks/tables.py`"
"""


RATES = """
import real
run = {"task": "reviews", "rival": "PPO", "rate": 1e-3, "seed": 0, "settings": {}}
tuned, other = run | {"seed": real.TUNED_ON, "rate": 5e-4}, run | {"seed": 1, "rate": 5e-4}
assert real.chosen([run, tuned, other | {"settings": {"lam": 0.5}}]) == {("reviews", "PPO"): [run]}
try:
    real.chosen([run, other])
except ValueError as error:
    assert "two rates" in str(error)
else:
    raise AssertionError("runs of two rates were averaged")
"""


TEXT = """
import real, student
assert real.interval([1.0, 2.0]) == "1.50"
assert real.interval([1.0, 2.0, 3.0]) == "2.00 ± 2.48"
assert student.margin([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.78 * 2.5**0.5 / 5**0.5
logs = [{"value/explained_variance": [-1, -1, 0.5]}, {"value/explained_variance_first": [0, 0.1, 0.2]}, {}]
group = [{"logged": log} for log in logs] + [{}]
assert real.worse_than_constant(group) == "50 %, first 0 %"
assert real.worse_than_constant([{}]) == ""
"""


@pytest.mark.parametrize(
    ("program", "folder"),
    [(PROGRAM, "."), (RATES, "learning"), (TEXT, "learning")],
    ids=["tables", "rates", "cells"],
)
def test_tables_are_those_of_the_results_and_of_one_rate(program, folder):
    """In a process of its own: a benchmark and a folder of the tests have a module of the same
    name."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "benchmarks" / folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def run_tiny(results, folder, cases):
    """Run cases of the GPU benchmark with tiny models; return its process and all results."""
    command = [
        sys.executable,
        "benchmarks/speed/gpu.py",
        "--tiny",
        "--results",
        str(results),
        "--cases",
        *cases,
    ]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done, json.loads(results.read_text())["results"]


def test_gpu_benchmark_measures_every_part_despite_a_failure(tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")  # found, but no attention
    fails = "0.5B bf16, packed, flash attention"
    needs_vllm = ["7B NF4, vLLM samples", "0.5B bf16, overlap"]
    cases = [
        fails,
        "llama, tokens",
        "7B NF4, 16 rows",
        "0.5B bf16, packed",
        "0.5B bf16, padded",
        "7B NF4, NF4 reward",
        "7B NF4, NF4 reward, TRL GRPO",
        "7B NF4, transformers samples",
        *needs_vllm,
    ]
    results = tmp_path / "results.json"
    done, found = run_tiny(results, tmp_path, cases)
    assert done.returncode == 1, done.stderr  # of the case that failed
    assert found.keys() == set(cases)
    assert found[fails]["status"] == "failed" and "flash" in found[fails]["reason"].lower()
    for name in needs_vllm:  # with vLLM it would run
        assert found[name].get("reason", "not installed: vllm") == "not installed: vllm"
    ended = [name for name in cases if name != fails and name not in needs_vllm]
    assert all(found[name]["status"] == "done" for name in ended), found
    tokens = found["llama, tokens"]["tokens"]
    assert len(set(tokens["float32"]["lengths"])) > 2
    times = found["7B NF4, 16 rows"]
    assert {"single steps ms/token", "generate ms/token"} <= times["measured"].keys()
    assert any("gemm_4bit" in kernel or "dequantize" in kernel for kernel, *_ in times["longest"])
    packed, padded = (
        found[name]["measured"]["computed per real token"]
        for name in ("0.5B bf16, packed", "0.5B bf16, padded")
    )
    assert packed == 1 < padded
    assert found["7B NF4, NF4 reward"]["estimate"]["peak_gb"] > 0
    assert found["7B NF4, NF4 reward, TRL GRPO"]["median_s"] > 0
    assert found["7B NF4, transformers samples"]["measured"]["tokens/s of many lengths"] > 0


def test_gpu_benchmark_goes_on_where_an_earlier_call_ended(tmp_path):
    results = tmp_path / "results.json"
    first, second = "llama, tokens", "qwen2, tokens"
    _, before = run_tiny(results, tmp_path, [first])
    before[second] = before[first] | {"code": "of another state"}
    results.write_text(json.dumps({"results": before}))
    done, after = run_tiny(results, tmp_path, [first, second])
    assert done.returncode == 0, done.stderr
    assert f"done before: {first}\n" in done.stdout
    assert after[first] == before[first]
    assert after[second]["code"] == before[first]["code"]
