"""Names on the pages exist: functions, fields, commands, messages, files; and every public name
is on a page."""

import dataclasses
import re
from importlib import import_module
from pathlib import Path

import pytest
from pages import PAGES, RECIPES, ROOT, name, rows, spans

import trl_ppo_ext
from trl_ppo_ext import PPOConfig
from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.config import OPTIONS

TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}


def resolve(dotted):
    """The object that a dotted path names."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AttributeError(dotted)


def dotted_names(text):
    return {
        *re.findall(r"`(trl_ppo_ext(?:\.\w+)+)`", text),
        *re.findall(r"^::: (\S+)", text, re.MULTILINE),
    }


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_names_of_the_package_resolve(path):
    for dotted in dotted_names(TEXTS[path]):
        assert resolve(dotted) is not None


def test_public_names_are_in_the_reference():
    reference = dotted_names(TEXTS[ROOT / "docs" / "reference.md"])
    assert {f"trl_ppo_ext.{public}" for public in trl_ppo_ext.__all__} <= reference


@pytest.mark.parametrize("config", [PPOConfig, *OPTIONS.values()])
def test_fields_of_the_config_have_a_text(config):
    own = [field for field in dataclasses.fields(config) if field.name in config.__annotations__]
    assert own and not [field.name for field in own if not field.metadata.get("help")]


# ---- fields, commands, messages, files

# of the trainer and of other libraries
OTHER_FIELDS = """model eval_dataset bnb_4bit_quant_type quantization_config peft_config task_type dataset_num_proc
bias monitor_funcs reward_funcs callbacks target_modules allow_all""".split()


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_settings_in_the_text_exist(path):
    fields = {field.name for field in dataclasses.fields(PPOConfig)} | set(OTHER_FIELDS)
    for span in spans(TEXTS[path]):
        match = re.fullmatch(r"(?!get_)(\w+)=\S.*", span)
        assert not match or match[1].isupper() or match[1] in fields, span


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_in_the_text_exist(path):
    assert set(re.findall(r"(?:`|^\$? ?)trl-ppo ([a-z][\w-]*)", TEXTS[path], re.MULTILINE)) <= set(
        cli.COMMANDS
    )


def test_every_command_is_documented():
    text = "".join(TEXTS.values())
    assert not [command for command in cli.COMMANDS if f"trl-ppo {command}" not in text]


def test_quoted_messages_are_raised():
    """Messages in the tables of docs/read_a_run.md; parts that are filled in are not compared."""
    files = Path(trl_ppo_ext.__file__).parent.rglob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    # a message over several lines
    source = re.sub(r"\"\s*f?\"", "", source).replace("`", "").replace('\\"', '"')
    first_cells = [row[0] for row in rows(TEXTS[ROOT / "docs" / "read_a_run.md"])]
    quotes = [cell[1:-1].replace("`", "") for cell in first_cells if cell.startswith('"')]
    assert len(quotes) > 10
    assert not [
        quote for quote in quotes for part in quote.split("…") if part.strip() not in source
    ]


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_links_to_files_exist(path):
    """mkdocs checks the pages of the site, anchors too; not those on GitHub."""
    for link in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", [*PAGES, *RECIPES], ids=name)
def test_scripts_of_benchmarks_exist(path):
    text = path.read_text(encoding="utf-8")
    for script in re.findall(r"(?<![\w/.])benchmarks/[\w/]+\.(?:py|sh)\b", text):
        assert (ROOT / script).is_file(), script
