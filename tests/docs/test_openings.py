"""Every page of docs/ begins with an example."""

import re

import pytest
from pages import NOT_RUN, ROOT, blocks, name

EXAMPLES = {"python", "yaml", "bash"}
MOST_WORDS = 60
# page -> why it has no example
EXCEPTIONS = {
    "docs/fields.md": "docs/fields.py writes this list of fields",
    "docs/index.md": "a list of the other pages",
    "docs/reference.md": "mkdocstrings fills in this list of names",
}
PAGES = {name(path): path for path in sorted((ROOT / "docs").glob("*.md"))}


def begins_with_an_example(text, page_blocks):
    """Count words before the first example: headings and tables too, but no HTML comments."""
    examples = [block for block in page_blocks if block.language in EXAMPLES]
    if not examples:
        return False
    before = "\n".join(text.splitlines()[: examples[0].line - 1])
    return len(re.findall(r"\w\S*", NOT_RUN.sub("", before))) <= MOST_WORDS


@pytest.mark.parametrize("page", sorted(PAGES.keys() - EXCEPTIONS.keys()))
def test_page_begins_with_an_example(page):
    path = PAGES[page]
    assert begins_with_an_example(path.read_text(encoding="utf-8"), blocks(path))


@pytest.mark.parametrize("page", sorted(EXCEPTIONS))
def test_exceptions_have_no_example_at_their_beginning(page):
    """Otherwise the page needs no exception."""
    path = PAGES[page]
    assert not begins_with_an_example(path.read_text(encoding="utf-8"), blocks(path))


@pytest.mark.parametrize(
    ("words", "language", "expected"),
    [(60, "python", True), (61, "python", False), (5, "text", False)],
)
def test_words_before_an_example_are_counted(tmp_path, monkeypatch, words, language, expected):
    monkeypatch.setattr("pages.ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text("# Page\n\n" + "word " * (words - 1) + f"\n\n```{language}\nx = 1\n```\n")
    assert begins_with_an_example(path.read_text(), blocks(path)) == expected
