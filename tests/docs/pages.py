"""The documentation's Markdown: code blocks, tables, links and headings."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
RECIPES = sorted((ROOT / "recipes").rglob("README.md"))  # their runs have tests of their own; commands are checked
NOT_RUN = re.compile(r"<!--\s*not run:\s*(.+?)\s*-->", re.DOTALL)


class Block(NamedTuple):
    """A fenced block; `not_run` is the reason that the comment before it gives, if there is one."""

    page: str
    line: int
    language: str
    code: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def tokens(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Fenced blocks in their order."""
    found, reason = [], None
    for token in tokens(path):
        if token.type == "fence":
            language = token.info.split()[0] if token.info else ""
            found.append(Block(name(path), token.map[0] + 1, language, token.content, reason))
        match = NOT_RUN.search(token.content) if token.type == "html_block" else None
        reason = " ".join(match[1].split()) if match else None
    return found


def all_blocks() -> list[Block]:
    return [block for path in PAGES for block in blocks(path)]


def tables(path: Path) -> list[list[list[str]]]:
    """Tables as rows of cells in Markdown; the first row of each is its head."""
    found: list[list[list[str]]] = []
    cells = False
    for token in tokens(path):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            cells = True
        elif token.type == "inline" and cells:
            found[-1][-1].append(token.content)
            cells = False
    return found


def table_after(path: Path, heading: str) -> list[list[str]]:
    """Rows, without the head, of the first table under a heading."""
    start = next(i for i, token in enumerate(tokens(path)) if token.type == "inline" and token.content == heading)
    before = sum(token.type == "table_open" for token in tokens(path)[:start])
    return tables(path)[before][1:]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", prose(text))


def inlines(path: Path) -> Iterator[Token]:
    """What stands in the text, blocks of code left out."""
    for token in tokens(path):
        yield from token.children or []


def links(path: Path) -> list[str]:
    return [str(token.attrs["href"]) for token in inlines(path) if token.type == "link_open"]


def anchors(path: Path) -> set[str]:
    """Ids of the headings, as Python-Markdown and GitHub make them."""
    headings = [after for token, after in zip(tokens(path), tokens(path)[1:]) if token.type == "heading_open"]
    texts = ["".join(child.content for child in heading.children or []) for heading in headings]
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in texts}
