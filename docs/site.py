"""MkDocs hooks: repository pages outside docs/, names in docstrings, and terms of the search."""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")


def _outside(path: Path) -> list[Path]:
    """Repository files outside docs/ that a page links to."""
    targets = [
        (path.parent / target).resolve()
        for target in LINK.findall(path.read_text(encoding="utf-8"))
    ]
    inside = [target for target in targets if target.is_file() and target.is_relative_to(ROOT)]
    return [target for target in inside if not target.is_relative_to(ROOT / "docs")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add linked repository files to the site, and the links of linked Markdown pages."""
    waiting = [target for path in sorted((ROOT / "docs").glob("*.md")) for target in _outside(path)]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(ROOT).as_posix()
        if files.get_file_from_path(name) is not None:
            continue
        file = File.generated(config, name, abs_src_path=str(path))
        file.inclusion = InclusionLevel.NOT_IN_NAV  # unless mkdocs.yml names it
        files.append(file)
        if path.suffix == ".md":
            waiting += _outside(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between docs/ and the repository: in the site, docs/ is the root."""
    source = Path(page.file.abs_src_path or "")
    if source.parent == ROOT / "docs":
        return re.sub(r"(?<=\]\()\.\./(?=[^)\s]+[)#])", "", markdown)
    depth = len(source.relative_to(ROOT).parts) - 1
    return markdown.replace("](" + "../" * depth + "docs/", "](" + "../" * depth)


def _plain_type(code: re.Match) -> str:
    """Argument type of a Hugging Face docstring, without Markdown and without the default."""
    text = (
        re.sub(r"\[`~?([\w.]+)`\]", r"\1", code[1])
        .replace("`", "")
        .replace("*optional*", "optional")
    )
    return f"<code>{re.sub(r', defaults to [^<]*', '', text)}</code>"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Render [`name`] of docstrings as code, and mark the tables of fields for site.css."""
    if page.file.src_uri == "fields.md":
        html = html.replace("<table>", '<table class="fields">')
    html = re.sub(r"<code>([^<>]*(?:`|\*optional\*)[^<>]*)</code>", _plain_type, html)
    return re.sub(r"\[<code>~?(?:[\w.]*\.)?(\w+)</code>\]", r"<code>\1</code>", html)


def _parts(text: str) -> list[str]:
    """Words inside the terms of a text: `log(kl_coef=0)` has kl_coef, kl and coef."""
    parts = []
    for term in re.split(r"[\s-]+", text):
        names = re.findall(r"\w+", term)
        words = re.findall(r"[^\W_]+", term)
        if len(names) > 1:
            parts += names
        if len(words) > len(names):
            parts += words
    return parts


@event_priority(-100)  # after the search plugin has written its index
def on_post_build(config: MkDocsConfig) -> None:
    """Let the search find words inside names of fields and files: it matches whole terms only."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for entry in index["docs"]:
        # at the end, because results show the beginning
        entry["text"] = " ".join([entry["text"], *_parts(entry["title"] + " " + entry["text"])])
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
