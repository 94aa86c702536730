"""docs/fields.md is what docs/fields.py writes."""

import re
import runpy

import pytest
import transformers
from pages import ROOT


def test_table_of_fields_is_current():
    pinned = re.search(
        r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )[1]
    if transformers.__version__ != pinned:
        pytest.skip(f"the table is that of transformers {pinned}")
    fields = runpy.run_path(str(ROOT / "docs" / "fields.py"))
    assert fields["PAGE"].read_text(encoding="utf-8") == fields["page"](pinned), (
        "run `python docs/fields.py`"
    )
