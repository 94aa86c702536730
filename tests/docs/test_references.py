"""What pages name is there: functions, papers, fields, commands, messages, links."""

import ast
import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from pages import PAGES, ROOT, anchors, blocks, links, name, spans, tables, tokens

import trl_ppo_ext
from trl_ppo_ext import PPOConfig
from trl_ppo_ext.commands import main as cli

PAPER = re.compile(r"https://huggingface\.co/papers/\d{4}\.\d{5}")
HOW = ROOT / "docs" / "how_it_works.md"
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
    inside = [match for span in spans(text) for match in re.findall(r"^trl_ppo_ext(?:\.\w+)+$", span)]
    return {*inside, *re.findall(r"^::: (\S+)", text, re.MULTILINE)}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_names_of_the_package_resolve(path):
    for dotted in dotted_names(TEXTS[path]):
        assert resolve(dotted) is not None


def test_a_name_that_is_not_there_is_seen():
    with pytest.raises(AttributeError):
        resolve("trl_ppo_ext.ppo_math.made_up")
    assert dotted_names("`trl_ppo_ext.ppo_math.gae`, a\n::: trl_ppo_ext.PPOConfig") == {
        "trl_ppo_ext.ppo_math.gae",
        "trl_ppo_ext.PPOConfig",
    }


# ---- how it works ----


def sections():
    """Text of each section with an equation."""
    parts = re.split(r"^## ", TEXTS[HOW], flags=re.MULTILINE)[1:]
    return {part.split("\n")[0]: part for part in parts if "```text" in part and "──►" not in part}


@pytest.mark.parametrize("section", sections())
def test_an_equation_has_its_function(section):
    assert dotted_names(sections()[section])


@pytest.mark.parametrize("dotted", sorted(dotted_names(TEXTS[HOW])))
def test_a_function_that_cites_a_paper_is_shown_with_it(dotted):
    cited = set(PAPER.findall(inspect.getdoc(resolve(dotted)) or ""))
    section = next(text for text in sections().values() if dotted in text)
    assert cited <= set(PAPER.findall(section))


def test_every_function_that_cites_a_paper_is_explained():
    """A new one in the mathematics must be added to the page."""
    for module in (trl_ppo_ext.ppo_math, import_module("trl_ppo_ext.ppo.math")):
        for member, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and PAPER.search(inspect.getdoc(function) or ""):
                assert f"{module.__name__}.{member}" in dotted_names(TEXTS[HOW])


def test_the_equations_of_the_page_are_those_of_the_docstrings():
    """White space aside."""

    def plain(text):
        return re.sub(r"\s+", "", text)

    docstrings = plain("".join(inspect.getdoc(resolve(dotted)) or "" for dotted in dotted_names(TEXTS[HOW])))
    for equation in ("δₜ=rₜ+γ·V(sₜ₊₁)−V(sₜ)", "Lₜ=max(−ρₜ·Âₜ,", "λ=1−1/(α·length)", "Lₜ=½·max((Vₜ−Rₜ)²,"):
        assert equation in docstrings
        assert equation in plain(TEXTS[HOW])


def test_papers_are_linked_as_papers():
    for path, text in TEXTS.items():
        assert "arxiv.org" not in text, f"{name(path)}: link to huggingface.co/papers/<id>"
        for link in re.findall(r"https://huggingface\.co/papers/[^)\s]*", text):
            assert PAPER.fullmatch(link), f"{name(path)}: {link}"


# ---- fields and commands ----


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_settings_that_are_shown_exist(path):
    """`field=value` in the text, where the field is that of a config."""
    fields = {field.name for field in dataclasses.fields(PPOConfig)}
    others = {"model", "eval_dataset", "bnb_4bit_quant_type", "quantization_config", "peft_config", "task_type"}
    others |= {"dataset_num_proc", "bias", "monitor_funcs"}
    others |= {"ptx_dataset", "reward_funcs", "callbacks", "target_modules", "allow_all"}
    for span in spans(TEXTS[path]):
        match = re.fullmatch(r"(\w+)=\S.*", span)
        if match and not span.startswith("get_") and not match[1].isupper():
            assert match[1] in fields | others, span


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_in_the_text_exist(path):
    for command in re.findall(r"`trl-ppo ([a-z][\w-]*)", TEXTS[path]):
        assert command in cli.COMMANDS


def test_every_command_is_in_the_documentation():
    text = "".join(TEXTS.values())
    assert not [command for command in cli.COMMANDS if f"trl-ppo {command}" not in text]


def test_every_field_is_in_the_reference():
    documented = inspect.getdoc(PPOConfig) or ""
    own = [field for field in PPOConfig.__annotations__ if not field.startswith("_")]
    assert not [field for field in own if f"{field} (`" not in documented]


def test_the_reference_has_the_public_names():
    assert {f"trl_ppo_ext.{public}" for public in trl_ppo_ext.__all__} <= dotted_names(
        TEXTS[ROOT / "docs" / "reference.md"]
    )


# ---- messages ----


def messages():
    """Text of the package's string constants; what is put into them is left out."""
    for path in Path(trl_ppo_ext.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_that_are_quoted_are_given():
    quoted = [row[0] for table in tables(ROOT / "docs" / "troubleshooting.md") for row in table[1:]]
    quoted = [cell[1:-1].replace("`", "") for cell in quoted if cell.startswith('"')]
    given = [message.replace("`", "") for message in messages()]
    assert len(quoted) > 10
    assert not [quote for quote in quoted if not any(quote in message for message in given)]


# ---- links ----


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_links_lead_somewhere(path):
    for link in links(path):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file), link


def test_a_page_has_one_title():
    for path in PAGES:
        assert sum(token.type == "heading_open" and token.tag == "h1" for token in tokens(path)) == 1, path


def test_what_is_marked_as_not_run_gives_its_reason():
    for path in PAGES:
        marked = TEXTS[path].count("\n<!-- not run:")
        assert marked == sum(block.not_run is not None for block in blocks(path)), f"{name(path)}: no block follows"
