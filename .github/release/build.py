"""Build the sdist and the wheel from a copy of the checkout, and check what is inside.

python .github/release/build.py [--repository OWNER/NAME --ref v0.1.0]

Needs the package `build`. Writes to dist/. With a repository the metadata names it; without one the
long description has relative links, which is enough for checks.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from zipfile import ZipFile

import metadata

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
# files that are no modules
DATA = """py.typed names.yaml presets/n_plus.yaml tracking/templates/page.html
tracking/templates/rules.yaml checkpoints/model_card.md.jinja""".split()


def copy_of_checkout(folder: Path) -> Path:
    """Copy the files of the repository, so that the checkout stays unchanged."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    return Path(shutil.copytree(ROOT, folder / "source", ignore=ignored))


def build(source: Path, output: Path, *options: str) -> None:
    """Run `python -m build`."""
    command = [sys.executable, "-m", "build", *options, "--outdir", str(output), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-4000:] + done.stderr[-4000:])


def contents(wheel: Path) -> dict[str, bytes]:
    """Files of a wheel, except the list of their checksums."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: archive.read(name) for name in names}


def check_wheel(wheel: Path, source: Path) -> int:
    """Exit unless a wheel has exactly the files of the package; return how many."""
    inside = {name for name in contents(wheel) if ".dist-info/" not in name}
    package = source / "trl_ppo_ext"
    files = {x.relative_to(source).as_posix() for x in package.rglob("*") if x.is_file()}
    missing = {f"trl_ppo_ext/{name}" for name in DATA} - inside
    if inside != files or missing:
        sys.exit(f"Of the wheel and the package differ: {sorted(inside ^ files)} {sorted(missing)}")
    return len(inside)


def main() -> None:
    """Build in a temporary folder, check, and copy both files to dist/."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", metavar="OWNER/NAME")
    parser.add_argument("--ref", help="tag or commit that the links name")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        # 1. the sources, and the address that the metadata names
        source = copy_of_checkout(Path(folder))
        if options.repository:
            metadata.write(source, options.repository, options.ref or "main")

        # 2. the sdist, the wheel of the sdist, and the wheel of the checkout
        built = Path(folder) / "built"
        fresh = Path(shutil.copytree(source, Path(folder) / "fresh"))
        build(source, built)
        build(fresh, Path(folder) / "direct", "--wheel")
        (sdist,) = built.glob("*.tar.gz")
        (wheel,) = built.glob("*.whl")
        (direct,) = (Path(folder) / "direct").glob("*.whl")

        # 3. checks
        if contents(wheel) != contents(direct):
            sys.exit("The wheel of the sdist and the wheel of the checkout differ.")
        number = check_wheel(wheel, copy_of_checkout(Path(folder) / "clean"))
        with tarfile.open(sdist) as archive:
            roots = {name.split("/")[1] for name in archive.getnames() if "/" in name}
        if roots & {"tests", "benchmarks", "recipes"}:
            sys.exit(f"The sdist must have no tests, benchmarks or recipes, got {sorted(roots)}.")

        # 4. the only two files of dist/
        DIST.mkdir(exist_ok=True)
        for old in DIST.iterdir():
            old.unlink()
        for file in (sdist, wheel):
            (DIST / file.name).write_bytes(file.read_bytes())
            print(f"dist/{file.name}: {file.stat().st_size / 1e6:.2f} MB")
    print(f"The wheel has the {number} files of trl_ppo_ext, and the sdist builds the same wheel.")


if __name__ == "__main__":
    main()
