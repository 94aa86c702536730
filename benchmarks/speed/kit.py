"""Wheels for a GPU machine without a package index, in folders of at most 56 MiB:

    bash benchmarks/speed/kit.sh --python 3.12 --have freeze.txt

`--have` is the output of `pip freeze` on that machine, and what is good enough there is not
collected; torch and its CUDA libraries must be there already. Bring one folder per call:

    WHEELS=benchmarks/.environments/kit/base-1 bash benchmarks/speed/gpu.sh

gpu.sh installs what it finds there, keeps what earlier calls have installed, and skips cases that
lack a package.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from gpu import ENVIRONMENTS, ROOT, TRL, asked_for
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

LARGEST = 56 * 2**20  # bytes of a folder, since one call copies it with a checkout
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17, 12, 5)]
PLATFORMS += [f"manylinux{n}_x86_64" for n in ("2014", "2010", "1")]
# The machine has these. pip would download their wheels to read them, so wheels without content
# stand for them, of versions that all packages accept.
THERE = {"torch": "2.11.0+there", "triton": "3.6.0+there"}
# packages of each group, and what needs them; a dependency is in the first group that needs it
GROUPS = {
    "base": (
        [x for x in asked_for() if x.strip() and not x.startswith(("torch", "bitsandbytes"))],
        "all cases",
    ),
    "nf4": (["bitsandbytes"], "cases with NF4 in their names"),
    "liger": (["liger-kernel"], "cases with Liger in their names"),
    "trl": ([f"trl=={TRL}"], f"cases with TRL {TRL} in their names"),
    "recipes": (
        ["textblob", "vaderSentiment", "gguf"],
        "no case; recipes/smollm2 and benchmarks/learning/real.py",
    ),
    "tests": (["pytest"], "no case; `python -m pytest -m gpu tests/gpu`"),
}


def pip(*arguments: str) -> None:
    """Run pip; end with its message if it fails."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pip failed: {done.stderr.strip()}")


def target(args: argparse.Namespace) -> list[str]:
    """Options of pip for the machine."""
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={args.python}"]
    return options + [f"--platform={platform}" for platform in args.platform]


def stand_in(name: str, version: str, folder: Path) -> None:
    """Write a wheel without content or requirements."""
    info = f"{name}-{version}.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{info}/{file}", text)


def resolve(requirements: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Metadata of packages and of all their dependencies, in the versions of this project."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lines = [x for x in lines if x.split("==")[0] not in THERE]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name, version in THERE.items():
            stand_in(name, version, folder)
            lines.append(f"{name}=={version}")
        (folder / "constraints.txt").write_text("\n".join(lines))
        pip(
            "install",
            "--dry-run",
            "--ignore-installed",
            f"--target={folder / 'nothing'}",
            f"--report={folder / 'report.json'}",
            f"--constraint={folder / 'constraints.txt'}",
            f"--find-links={folder}",
            *target(args),
            *requirements,
        )
        report = json.loads((folder / "report.json").read_text())
    return [package["metadata"] for package in report["install"]]


def needed_versions(
    name: str, requirements: list[str], packages: list[dict[str, Any]], python: str
) -> SpecifierSet:
    """Versions of a package that all others accept."""
    texts = list(requirements)
    for package in packages:
        texts += package.get("requires_dist", [])
    environment = {"extra": "", "python_version": python, "python_full_version": f"{python}.0"}
    versions = SpecifierSet()
    for text in texts:
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate(environment)
        if applies and canonicalize_name(requirement.name) == name:
            versions &= requirement.specifier
    return versions


def versions_there(path: Path | None) -> dict[str, str]:
    """Versions of the machine's packages."""
    if path is None:
        return {}
    pairs = [x.split("==") for x in path.read_text().splitlines() if "==" in x]
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def parts(wheels: list[Path]) -> list[list[Path]]:
    """Wheels in as few folders as fit: the largest first, each into the first with room."""
    folders: list[list[Path]] = []
    for wheel in sorted(wheels, key=lambda x: -x.stat().st_size):
        size = wheel.stat().st_size
        if size > LARGEST:
            sys.exit(f"{wheel.name} has {size / 2**20:.0f} MiB; bring it in another way")
        for folder in folders:
            if sum(x.stat().st_size for x in folder) + size <= LARGEST:
                folder.append(wheel)
                break
        else:
            folders.append([wheel])
    return folders


def missing(requirements: list[str], args: argparse.Namespace) -> list[str]:
    """Packages, with their versions, that the machine lacks."""
    packages = resolve(requirements, args)
    there = versions_there(args.have)
    wanted = []
    for package in packages:
        name = canonicalize_name(package["name"])
        versions = needed_versions(name, requirements, packages, args.python)
        is_there = name in there and versions.contains(there[name], prereleases=True)
        if name not in THERE and not is_there:
            wanted.append(f"{name}=={package['version']}")
    return wanted


def collect(group: str, args: argparse.Namespace, collected: set[str]) -> None:
    """Download the wheels of a group that neither the machine nor an earlier group has."""
    requirements, purpose = GROUPS[group]
    if group == "trl":  # the older version runs with what the newer one needs
        wanted = requirements
    else:
        wanted = [x for x in missing(requirements, args) if x not in collected]
    collected.update(wanted)
    if not wanted:
        print(f"{group}: nothing is missing")
        return
    folder = args.out / group
    pip("download", "--no-deps", f"--dest={folder}", *target(args), *wanted)
    for number, wheels in enumerate(parts(list(folder.glob("*.whl"))), 1):
        part = args.out / f"{group}-{number}"
        part.mkdir()
        size = sum(x.stat().st_size for x in wheels) / 2**20
        for wheel in wheels:
            wheel.rename(part / wheel.name)
        print(f"{part}: {len(wheels)} wheels, {size:.1f} MiB, for {purpose}", flush=True)
    folder.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="version on the machine")
    parser.add_argument("--platform", nargs="+", default=PLATFORMS, help="tags of its wheels")
    parser.add_argument("--have", type=Path, help="output of `pip freeze` on the machine")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--out", type=Path, default=ENVIRONMENTS / "kit")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        parser.error(f"{args.out} must be empty; delete it, or choose another `--out`")
    collected: set[str] = set()
    for group in args.groups:
        collect(group, args, collected)


if __name__ == "__main__":
    main()
