"""Presets: what the page says of them is what they are, and each makes a config with its paper's sizes."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.ppo.batch_plan import BatchPlan
from trl_ppo_ext.presets import PRESETS

PAGE = Path(__file__).parents[3] / "docs" / "presets.md"
SECTION = re.compile(r"^## `(\w+)`$", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$")
# name: prompts of a rollout, completions of an optimizer step, optimizer steps that a rollout feeds
SIZES = {
    "instructgpt": (512, 64, 8),
    "n_plus": (512, 512, 4),
    "vapo": (512, 512, 16),
    "orz": (128, 8192, 1),
    "dapo": (512, 512, 16),
}


def tables():
    """Rows (field, value, source) of each preset's table; a row that cannot be read fails here."""
    _, *parts = SECTION.split(PAGE.read_text(encoding="utf-8"))
    rows = {}
    for name, section in zip(parts[::2], parts[1::2]):
        assert name not in rows
        lines = [line for line in section.splitlines() if line.startswith("|")]
        assert lines[:2] == ["| field | value | source |", "|---|---|---|"]
        cells = [ROW.match(line) for line in lines[2:]]
        assert all(cells), [line for line, cell in zip(lines[2:], cells) if not cell]
        rows[name] = [(cell[1], ast.literal_eval(cell[2]), cell[3]) for cell in cells]
    return rows


def config(name, tmp_path):
    return PPOConfig(tmp_path, use_cpu=True, bf16=False, **PRESETS[name])


def test_the_page_has_every_preset_and_no_other():
    assert list(tables()) == list(PRESETS) == list(SIZES)


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_tells_every_value_and_its_source(name):
    rows = tables()[name]
    told = {field: value for field, value, _ in rows}
    assert len(told) == len(rows)
    # repr, as 1 == 1.0 == True
    assert {field: repr(value) for field, value in told.items()} == {
        field: repr(value) for field, value in PRESETS[name].items()
    }
    assert all(source.strip() for _, _, source in rows)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_hold_fields_of_the_config_alone(name):
    assert PRESETS[name].keys() <= {field.name for field in dataclasses.fields(PPOConfig) if field.init}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_a_config_that_keeps_its_values(name, tmp_path):
    made = config(name, tmp_path)
    assert {field: getattr(made, field) for field in PRESETS[name]} == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_sizes_of_its_paper(name, tmp_path):
    plan = BatchPlan.from_config(config(name, tmp_path), num_processes=1)
    assert (plan.prompts, plan.mini_batch_size, plan.optimizer_steps) == SIZES[name]


@pytest.mark.parametrize("name, iterations", [("instructgpt", 10), ("dapo", 20)])
def test_warmup_that_papers_count_in_rollouts_is_that_many_optimizer_steps(name, iterations):
    assert PRESETS[name]["warmup_steps"] == iterations * SIZES[name][2]


@pytest.mark.parametrize("name, episodes, rollout", [("instructgpt", 256_000, 512), ("n_plus", 1_000_000, 512)])
def test_the_page_tells_the_optimizer_steps_of_the_papers_episodes(name, episodes, rollout):
    section = PAGE.read_text(encoding="utf-8").split(f"## `{name}`")[1].split("\n## ")[0]
    assert f"`max_steps={episodes // rollout * SIZES[name][2]}`" in section
