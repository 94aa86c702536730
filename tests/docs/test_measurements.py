"""benchmarks/README.md has the tables of the saved results."""

import sys

from pages import ROOT


def test_tables_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    text = tables.PAGE.read_text(encoding="utf-8")
    assert {place[2] for place in tables.PLACE.finditer(text)} == tables.TABLES.keys()
    assert tables.filled(text) == text, f"run `{sys.executable} benchmarks/tables.py`"
