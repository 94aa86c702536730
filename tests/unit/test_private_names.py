"""Private names of other packages: all that are touched are listed, exist, and are said if one
is missing."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers.utils import logging

import trl_ppo_ext
from trl_ppo_ext import PPOTrainer, private_names
from trl_ppo_ext.private_names import PRIVATE_NAMES, missing_names, warn_of_missing_names

PACKAGE = Path(trl_ppo_ext.__file__).parent
LISTED = {name for _, name, _ in PRIVATE_NAMES}
OF_PYTHON = {"_asdict", "_replace"}  # of named tuples


def private_uses():
    """Private attributes by name, which no module of the package defines, with the places where
    they are used."""
    own = set()
    used = defaultdict(list)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                ):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name) if name.startswith("_") and not name.startswith("__"):
                    used[name].append(f"{file.name}:{node.lineno}")
    return {name: places for name, places in used.items() if name not in own}


def test_installed_versions_have_every_name():
    assert missing_names() == []


def test_every_private_attribute_is_listed():
    unlisted = {
        name: places for name, places in private_uses().items() if name not in LISTED | OF_PYTHON
    }
    of_torch = {name for name in unlisted if hasattr(torch.nn.Module(), name)}
    assert {name: places for name, places in unlisted.items() if name not in of_torch} == {}


def test_every_overridden_private_method_is_listed():
    overridden = {
        name for name in vars(PPOTrainer) if name.startswith("_") and not name.startswith("__")
    }
    overridden &= set(dir(transformers.Trainer))
    assert overridden and overridden <= LISTED


def test_no_name_is_listed_without_use():
    source = "".join(
        file.read_text(encoding="utf-8")
        for file in PACKAGE.rglob("*.py")
        if file.stem != "private_names"
    )
    assert [name for name in LISTED if name not in source] == []


@pytest.mark.parametrize(
    "owner, name, lost",
    [
        (transformers.Trainer, "_load_best_model", "`load_best_model_at_end`"),
        (BaseTunerLayer, "_disable_adapters", "the reference"),
        (transformers.cache_utils, "DynamicLayer", "rows that leave"),
    ],
)
def test_renamed_name_is_said_once(owner, name, lost, tmp_path, monkeypatch, caplog):
    """With what is lost, when a trainer is built."""
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    entry = next(x for x in PRIVATE_NAMES if x[1] == name)
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", [(entry[0], f"{name}_renamed", entry[2])])
    warn_of_missing_names.cache_clear()
    for folder in ("a", "b"):
        PPOTrainer(
            llama(),
            length_reward,
            config(tmp_path / folder),
            prompts(),
            processing_class=tokenizer(),
        )
    said = [
        x.getMessage()
        for x in caplog.records
        if f"has no `{name}_renamed` any more" in x.getMessage()
    ]
    assert len(said) == 1 and lost in said[0] and hasattr(owner, name)
    warn_of_missing_names.cache_clear()
