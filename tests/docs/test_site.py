"""The site builds without a warning: every page is in it, and every link and anchor resolves."""

import os
import subprocess
import sys

import pytest
import yaml
from pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for module in ("mkdocs", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason="pip install mkdocs 'mkdocstrings[python]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_builds_strictly(site):
    """`--strict` makes warnings errors, and mkdocs.yml asks for one where a link, an anchor or a
    page is missing."""
    for page in (ROOT / "docs").glob("*.md"):
        built = site / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert built.is_file(), page


def test_reference_shows_docstrings(site):
    text = (site / "reference" / "index.html").read_text(encoding="utf-8")
    assert (
        "PPOTrainer" in text
        and "reward_funcs" in text
        and "[`" not in text
        and "*optional*" not in text
    )


def test_pages_load_nothing_from_other_hosts(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for mark in ("<script src=", '<link rel="stylesheet" href=', "<img src="):
            for part in text.split(mark)[1:]:
                assert not part.lstrip('"').startswith(("http", "//")), (
                    f"{page.relative_to(site)}: {part[:80]}"
                )


def test_workflow_publishes_the_strictly_built_site():
    """The folder that mkdocs writes is the one that is uploaded."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text(encoding="utf-8"))
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    steps = workflow["jobs"]["build"]["steps"]
    assert "python -m mkdocs build --strict" in [step.get("run") for step in steps]
    (upload,) = [step for step in steps if "upload-pages-artifact" in step.get("uses", "")]
    assert f"site_dir: {upload['with']['path']}\n" in config
    assert workflow["jobs"]["deploy"]["needs"] == "build"
