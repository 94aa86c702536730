"""benchmarks/README.md has the tables of the saved results."""

import subprocess
import sys

from pages import ROOT

PROGRAM = """
import tables
text = tables.PAGE.read_text(encoding="utf-8")
assert {place[2] for place in tables.PLACE.finditer(text)} == tables.TABLES.keys()
assert tables.filled(text) == text, "run `python benchmarks/tables.py`"
"""


def test_tables_are_those_of_the_results():
    """In a process of its own: a benchmark and a folder of the tests have a module of the same name."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
