"""Pages of the documentation and their fenced code blocks."""

import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
OTHERS = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md")
OTHERS += ("benchmarks/README.md", "benchmarks/NOTES.md")
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in OTHERS)]
# their runs have tests of their own; commands are checked
RECIPES = sorted((ROOT / "recipes").rglob("README.md"))
NOT_RUN = re.compile(r"<!--\s*not run:\s*(.+?)\s*-->", re.DOTALL)


class Block(NamedTuple):
    """A fenced block, with the reason of a `<!-- not run: reason -->` right before it."""

    page: str
    line: int
    language: str
    code: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Fenced blocks in their order."""
    found = []
    reason = None
    for token in MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8")):
        if token.type == "fence":
            language = (token.info.split() or [""])[0]
            found.append(Block(name(path), token.map[0] + 1, language, token.content, reason))
        if token.type == "html_block":
            match = NOT_RUN.search(token.content)
        else:
            match = None
        if match:
            reason = " ".join(match[1].split())
        else:
            reason = None
    return found


def spans(text: str) -> list[str]:
    """Inline code outside of fenced blocks."""
    return re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of all tables, heads included."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
