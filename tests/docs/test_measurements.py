"""benchmarks/README.md has the tables of the saved results."""

import subprocess
import sys

import pytest
from pages import ROOT

PROGRAM = """
import tables
text = tables.PAGE.read_text(encoding="utf-8")
assert {place[2] for place in tables.PLACE.finditer(text)} == tables.TABLES.keys()
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


@pytest.mark.parametrize("program", [PROGRAM, RATES], ids=["tables", "rates"])
def test_tables_are_those_of_the_results_and_of_one_rate(program):
    """In a process of its own: a benchmark and a folder of the tests have a module of the same name."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
