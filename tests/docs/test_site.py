"""The site builds without a warning: every page is in it, and every link and anchor resolves."""

import json
import os
import re
import shutil
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
    assert "<code>reward_funcs</code>" in text  # the name of a parameter, not part of a broken line


# what readers look for: the page that answers it
SEARCHES = {
    "NaN": "resume/",
    "OOM": "read_a_run/",
    "reward goes down": "read_a_run/",
    "KL": "how_it_works/",
    "length": "set_up/",
    "vLLM": "generation/",
    "resume": "resume/",
    "Qwen3": "models/",
    "LoRA rank": "set_up/",
    "learning rate": "read_a_run/",
    "csv": "first_run/",
    "kl_coef": "variants/",
}
# as search/worker.js does
RANKS = """
const fs = require("fs");
const [folder, ...queries] = process.argv.slice(1);
const lunr = require(folder + "/lunr.js");
const data = JSON.parse(fs.readFileSync(folder + "/search_index.json"));
lunr.tokenizer.separator = new RegExp(data.config.separator);
const index = lunr(function () {
  this.field("title");
  this.field("text");
  this.ref("location");
  data.docs.forEach((entry) => this.add(entry));
});
const first = queries.map((query) => index.search(query).slice(0, 5).map((hit) => hit.ref));
console.log(JSON.stringify(first));
"""


@pytest.fixture(scope="module")
def search_index(site):
    return json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))


def test_search_accepts_short_terms(search_index):
    assert search_index["config"]["min_search_length"] <= 2


@pytest.mark.parametrize(("query", "page"), SEARCHES.items())
def test_search_terms_are_on_their_page(search_index, query, page):
    texts = [
        f"{entry['title']} {entry['text']}".lower()
        for entry in search_index["docs"]
        if entry["location"].startswith(page)
    ]
    terms = [set(re.split(search_index["config"]["separator"], text)) for text in texts]
    words = {word.lower() for word in query.split()}
    assert any(words <= {term.strip(".,:;()") for term in page_terms} for page_terms in terms)


def test_search_ranks_pages_first(site):
    node = shutil.which("node")
    if node is None:
        pytest.skip("the search of the site is JavaScript")
    command = [node, "-e", RANKS, str(site / "search"), *SEARCHES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for (query, page), hits in zip(SEARCHES.items(), json.loads(done.stdout)):
        assert any(hit.startswith(page) for hit in hits), (query, hits)


def test_tables_of_fields_have_a_style_of_their_own(site):
    text = (site / "fields" / "index.html").read_text(encoding="utf-8")
    assert '<table class="fields">' in text and "<table>" not in text
    assert "table.fields" in (site / "site.css").read_text(encoding="utf-8")


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
