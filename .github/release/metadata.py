"""Name the repository in the metadata of a source folder, as a package index shows it.

python .github/release/metadata.py FOLDER --repository OWNER/NAME --ref v0.1.0

Relative links of README.md are dead on an index, and no file of the repository names its address.
This rewrites README.md and setup.cfg of FOLDER, so use a copy: build.py makes one.
"""

import argparse
import re
from pathlib import Path

FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\[\]]*\])\((?P<target>[^)\s]+)\)")
MARK = "# .github/release/metadata.py writes project_urls here\n"


def absolute_links(text: str, repository: str, ref: str, page: str = "README.md") -> str:
    """Make each relative link of a page absolute: to GitHub's page of a file, or to an image."""

    def absolute(link: re.Match) -> str:
        target = link["target"]
        if re.match(r"[a-z]+:", target):
            return link[0]
        if target.startswith("#"):
            target = page + target
        if link["image"]:
            address = f"https://raw.githubusercontent.com/{repository}/{ref}/{target}"
        else:
            address = f"https://github.com/{repository}/blob/{ref}/{target}"
        return f"{link['image']}{link['text']}({address})"

    # code keeps its brackets: the odd parts are fenced blocks
    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(absolute, part) for part in parts[::2]]
    return "".join(parts)


def with_project_urls(setup: str, repository: str, ref: str) -> str:
    """Write the addresses of a repository into the text of setup.cfg."""
    if setup.count(MARK) != 1:
        raise ValueError(f"setup.cfg must have the line {MARK!r} once, got {setup.count(MARK)}.")
    address = f"https://github.com/{repository}"
    urls = {
        "Repository": address,
        "Documentation": f"{address}/blob/{ref}/docs/index.md",
        "Changelog": f"{address}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    lines = [f"    {name} = {url}\n" for name, url in urls.items()]
    return setup.replace(MARK, "project_urls =\n" + "".join(lines))


def write(folder: Path, repository: str, ref: str) -> None:
    """Rewrite README.md and setup.cfg of a source folder."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"`repository` must be OWNER/NAME, got {repository!r}.")
    readme = folder / "README.md"
    setup = folder / "setup.cfg"
    text = absolute_links(readme.read_text(encoding="utf-8"), repository, ref)
    settings = with_project_urls(setup.read_text(encoding="utf-8"), repository, ref)
    readme.write_text(text, encoding="utf-8")
    setup.write_text(settings, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository", required=True, metavar="OWNER/NAME")
    parser.add_argument("--ref", required=True, help="tag or commit that the links name")
    options = parser.parse_args()
    write(options.folder, options.repository, options.ref)
