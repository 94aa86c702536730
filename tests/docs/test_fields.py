"""docs/fields.md is what docs/fields.py writes."""

import re
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import transformers
from pages import ROOT

from trl_ppo_ext import PPOConfig


@pytest.fixture(scope="module")
def fields():
    spec = spec_from_file_location("fields", ROOT / "docs" / "fields.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_of_fields_is_current(fields):
    pinned = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    if transformers.__version__ != pinned:
        pytest.skip(f"the table is that of transformers {pinned}")
    assert fields.PAGE.read_text(encoding="utf-8") == fields.page(pinned), "run `python docs/fields.py`"


def test_tables_have_every_field_except_the_trainers_once(fields):
    text = fields.page("0")
    names = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    names += re.findall(r"`(\w+)`", re.search(r"^Already the case, or without effect: .*$", text, re.MULTILINE)[0])
    inherited = {field.name for field in fields.fields(fields.TrainingArguments)} - PPOConfig.__annotations__.keys()
    settable = [field.name for field in fields.fields(PPOConfig) if field.init]
    settable = [name for name in settable if name not in inherited or name in fields._UNSUPPORTED]
    assert sorted(names) == sorted(settable)
    assert all(f"## {part}\n" in text for part in fields.PARTS.values())
    assert (
        "| `kl_coef` | `float` | `0.05` |" in text and "| `neftune_noise_alpha` |" in text.partition("## Inherited")[2]
    )
