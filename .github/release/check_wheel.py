"""Install the wheel of dist/ into an empty environment, and use it from an empty folder.

python .github/release/check_wheel.py ENVIRONMENT

torch comes in its tested version, because an index may offer a build of gigabytes; all else in the
newest versions that the wheel's own requirements allow.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST_RUN = Path(__file__).with_name("first_run.py")
IMPORT = """
import trl_ppo_ext
from trl_ppo_ext import PPOConfig
assert "site-packages" in trl_ppo_ext.__file__, trl_ppo_ext.__file__
assert all(getattr(trl_ppo_ext, name) for name in trl_ppo_ext.__all__ if name != "Judge")
config = PPOConfig.preset("n_plus", "out", use_cpu=True, bf16=False)
assert config.num_ppo_epochs == 4, config
print(trl_ppo_ext.__version__)
"""


def main() -> None:
    """Run the checks in their order; the first that fails ends the script."""
    environment = Path(sys.argv[1]).resolve()
    (wheel,) = (ROOT / "dist").glob("*.whl")
    version = wheel.name.split("-")[1]
    python = environment / "bin" / "python"
    folder = tempfile.mkdtemp()
    variables = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    variables["HF_HUB_OFFLINE"] = "1"
    start = time.perf_counter()

    def run(what: str, *command: object, status: int = 0) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
        )
        if done.returncode != status:
            sys.exit(f"{what}: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        print(f"{time.perf_counter() - start:5.0f} s  {what}", flush=True)
        return done.stdout + done.stderr

    def install(what: str, *requirements: object) -> None:
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(f"install {what}", python, *pip, *requirements)

    def check(is_right: bool, text: str) -> None:
        if not is_right:
            sys.exit(f"Unexpected: {text}")

    # 1. an empty environment
    venv.create(environment, clear=True, with_pip=True)
    index = os.environ.get("TORCH_INDEX_URL")
    extra = ["--extra-index-url", index] if index else []  # for torch only
    install("torch", "--constraint", ROOT / "constraints.txt", "torch", *extra)
    install(wheel.name, wheel)
    run("pip check", python, "-m", "pip", "check")

    # 2. the package, its command and its files
    command = environment / "bin" / "trl-ppo"
    printed = run('import, PPOConfig.preset("n_plus", "out")', python, "-c", IMPORT)
    check(printed.strip().endswith(version), printed)
    printed = run("trl-ppo --version", command, "--version")
    check(printed == f"trl-ppo {version}\n", printed)

    # 3. a run of two steps, saved and loaded without the package
    printed = run("train for two steps", python, FIRST_RUN)
    check("2 steps, saved and loaded" in printed, printed)

    # 4. its report, which needs an extra and names it
    printed = run("trl-ppo report without the extra", command, "report", "out", status=2)
    check("trl_ppo_ext[report]" in printed, printed)
    install("the extra report", f"{wheel}[report]")
    run("trl-ppo report", command, "report", "out")
    check((Path(folder) / "out" / "report.html").stat().st_size > 10_000, "an empty report")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
