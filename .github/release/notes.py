"""Check that a tag may be released, and print its section of the changelog.

python .github/release/notes.py v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def version(text: str, pattern: str) -> str:
    """Read a version, which must be there once."""
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return found


def section(changelog: str, release: str) -> str:
    """Text below the heading of a version, which must have a date."""
    heading = rf"^## \[{re.escape(release)}\] - ([^\n]+)$"
    match = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError(f"CHANGELOG.md must have a section [{release}].")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", match[1]):
        raise ValueError(f"Section [{release}] of CHANGELOG.md must have a date, got {match[1]!r}.")
    return match[2].strip() + "\n"


def notes(tag: str, root: Path = ROOT) -> str:
    """Check the versions of a tag, and return its section of the changelog."""
    package = (root / "trl_ppo_ext" / "__init__.py").read_text(encoding="utf-8")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    found = {
        "trl_ppo_ext/__init__.py": version(package, r'^__version__ = "(.+)"$'),
        "CITATION.cff": version(citation, r"^version: (.+)$"),
    }
    for file, number in found.items():
        if tag != f"v{number}":
            raise ValueError(f"The tag must be v{number} as in {file}, got {tag!r}.")
    return section((root / "CHANGELOG.md").read_text(encoding="utf-8"), tag.removeprefix("v"))


if __name__ == "__main__":
    try:
        print(notes(sys.argv[1]), end="")
    except ValueError as error:
        sys.exit(str(error))
