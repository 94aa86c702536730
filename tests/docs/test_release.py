"""The metadata of a release: its long description, addresses, notes and workflow."""

import configparser
import re
import sys

import pytest
import yaml
from pages import ROOT

sys.path.append(str(ROOT / ".github" / "release"))
import metadata
import notes

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = "https://github.com/owner/name/blob/v0.1.0/"
FILE = "https://raw.githubusercontent.com/owner/name/v0.1.0/"


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


# ---- the long description ----


def test_long_description_has_no_relative_link():
    text = metadata.absolute_links(README, "owner/name", "v0.1.0")
    assert len(links(text)) == len(links(README)) > 20
    assert not [link for link in links(text) if not link.startswith("https://")]


def test_long_description_links_to_files_that_exist():
    text = metadata.absolute_links(README, "owner/name", "v0.1.0")
    addresses = [link for link in links(text) if link.startswith((PAGE, FILE))]
    assert len(addresses) > 20
    for address in addresses:
        path = address.removeprefix(PAGE).removeprefix(FILE).split("#")[0]
        assert (ROOT / path).exists(), address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#b)", f"[a]({PAGE}docs/a.md#b)"),
        ("[`a`](tests/a.py)", f"[`a`]({PAGE}tests/a.py)"),
        ("[two\nlines](a.md)", f"[two\nlines]({PAGE}a.md)"),
        ("[a](#limits)", f"[a]({PAGE}README.md#limits)"),
        ("![a](docs/a.svg)", f"![a]({FILE}docs/a.svg)"),
        ("[a](https://x.org/y)", "[a](https://x.org/y)"),
        ("```python\nx[0](y)\n```", "```python\nx[0](y)\n```"),
    ],
)
def test_link_becomes_absolute(text, expected):
    assert metadata.absolute_links(text, "owner/name", "v0.1.0") == expected


def test_addresses_are_written_into_setup_cfg():
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    before = configparser.ConfigParser()
    before.read_string(setup)
    after = configparser.ConfigParser()
    after.read_string(metadata.with_project_urls(setup, "owner/name", "v0.1.0"))
    urls = after["metadata"].pop("project_urls").split("\n")[1:]
    assert "Repository = https://github.com/owner/name" in urls
    for url in urls:
        address = url.split(" = ")[1]
        if address.startswith(PAGE):
            assert (ROOT / address.removeprefix(PAGE)).is_file(), address
    assert after == before


def test_setup_cfg_without_the_mark_is_an_error():
    with pytest.raises(ValueError, match="must have the line"):
        metadata.with_project_urls("[metadata]\n", "owner/name", "v0.1.0")


# ---- the notes ----


@pytest.fixture
def release(tmp_path):
    """Files that name a version, as a maintainer has changed them."""
    (tmp_path / "trl_ppo_ext").mkdir()
    (tmp_path / "trl_ppo_ext" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.1.0\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2030-01-31\n\nFirst.\n\n"
        "### Added\n\n- All.\n\n## [0.0.1] - 2029-01-31\n\nOld.\n"
    )
    return tmp_path


def test_notes_are_the_section_of_the_version(release):
    assert notes.notes("v0.1.0", release) == "First.\n\n### Added\n\n- All.\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("trl_ppo_ext/__init__.py", "0.1.0", "0.1.0.dev0", r"v0.1.0.dev0 as in trl_ppo_ext/__init"),
        ("CITATION.cff", "0.1.0", "0.0.1", "v0.0.1 as in CITATION.cff"),
        ("CHANGELOG.md", "2030-01-31", "unreleased", "must have a date, got 'unreleased'"),
        ("CHANGELOG.md", "[0.1.0]", "[0.2.0]", r"must have a section \[0.1.0\]"),
    ],
)
def test_notes_of_an_unready_release_are_an_error(release, file, old, new, message):
    path = release / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        notes.notes("v0.1.0", release)


def test_citation_has_the_version_of_the_package():
    package = (ROOT / "trl_ppo_ext" / "__init__.py").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    number = notes.version(package, r'^__version__ = "(.+)"$')
    assert notes.version(citation, r"^version: (.+)$") == number


# ---- the workflow ----


def test_release_workflow_gives_each_job_what_it_needs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {}
    assert {name: job["permissions"] for name, job in jobs.items()} == {
        "build": {"contents": "read"},
        "check": {"contents": "read"},
        "attest": {"id-token": "write", "attestations": "write"},
        "publish": {"id-token": "write"},
        "draft": {"contents": "write"},
    }
    assert jobs["publish"]["environment"]["name"] == "pypi"
    order = [job.get("needs") for job in jobs.values()]
    assert order == [None, "build", ["build", "check"], "attest", "publish"]


def test_release_workflow_builds_once_and_checks_first():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    commands = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    check = next(n for n, line in enumerate(commands) if "notes.py" in line)
    build = next(n for n, line in enumerate(commands) if "make release-build" in line)
    assert check < build
    # what the requirements of the wheel do cannot change what is published
    steps = workflow["jobs"]["check"]["steps"]
    assert "make release-use" in [step.get("run") for step in steps]
    assert not [step for step in steps if "upload" in step.get("uses", "")]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\nrelease-check: release-build release-use\n" in makefile
    assert "\nrelease-build:" in makefile and "\nrelease-use:" in makefile
    others = [job for name, job in workflow["jobs"].items() if name not in ("build", "check")]
    uses = [step["uses"] for job in others for step in job["steps"] if "uses" in step]
    assert not [name for name in uses if "checkout" in name]


def test_classifiers_name_the_versions_of_python_that_are_tested():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    classifiers = parser["metadata"]["classifiers"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    tested = workflow["jobs"]["wheel"]["strategy"]["matrix"]["python"]
    assert re.findall(r"Python :: (3\.\d+)$", classifiers, re.MULTILINE) == tested
    assert parser["options"]["python_requires"] == f">={tested[0]}"
