"""The site builds without a warning: every page is in it, and every link and anchor resolves."""

import importlib.util
import os
import subprocess
import sys

import pytest
import yaml
from pages import ROOT

NEEDED = ("mkdocs", "mkdocstrings", "mkdocstrings_handlers.python")


def missing():
    for module in NEEDED:
        try:
            if importlib.util.find_spec(module) is None:
                return module
        except ModuleNotFoundError:
            return module
    return None


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if missing():
        pytest.skip(f"{missing()} is not installed: pip install mkdocs 'mkdocstrings[python]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_builds_strictly(site):
    """`--strict` makes warnings errors, and mkdocs.yml asks for one where a link, an anchor or a page is missing."""
    for page in (ROOT / "docs").glob("*.md"):
        built = site / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert built.is_file(), page


def test_reference_shows_docstrings(site):
    text = (site / "reference" / "index.html").read_text(encoding="utf-8")
    assert "kl_placement" in text
    assert "Generalized advantage estimation over the response tokens" in text
    assert "[`" not in text
    assert "[RewardAdapter]" not in text
    assert "*optional*" not in text


def test_links_to_recipes_stay_in_the_site(site):
    assert (site / "recipes" / "docstrings" / "index.html").is_file()
    text = (site / "first_run" / "index.html").read_text(encoding="utf-8")
    assert 'href="../recipes/docstrings/"' in text


def test_pages_load_nothing_from_other_hosts(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for mark in ("<script src=", '<link rel="stylesheet" href=', "<img src="):
            for part in text.split(mark)[1:]:
                assert not part.lstrip('"').startswith(("http", "//")), f"{page.relative_to(site)}: {part[:80]}"


def test_navigation_has_every_page():
    def files(entry):
        if isinstance(entry, str):
            return [entry]
        return [file for value in (entry if isinstance(entry, list) else entry.values()) for file in files(value)]

    loaded = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    recipes = [path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("README.md")]
    assert sorted(files(loaded["nav"])) == sorted([*pages, *recipes, "benchmarks/README.md"])
