"""`trl-ppo` itself: its help, and its exit status."""

import json
import subprocess
import sys

import pytest

import trl_ppo_ext
from trl_ppo_ext.commands import main as cli


def test_errors_hide_passwords(capsys):
    assert cli.main(["report", "https://me:hunter2@host/run"]) == 2
    error = capsys.readouterr().err
    assert "https://***@host/run" in error and "hunter2" not in error


def test_help_lists_every_command_without_torch():
    program = (
        "import sys\nfrom trl_ppo_ext.commands.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'transformers', 'trl'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in cli.COMMANDS)


def test_version_is_printed_in_a_checkout(capsys):
    """Where the package was never installed, `importlib.metadata` has no version."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert (
        stop.value.code == 0 and capsys.readouterr().out == f"trl-ppo {trl_ppo_ext.__version__}\n"
    )


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0 and f"usage: trl-ppo {command}" in capsys.readouterr().out


def test_report_writes_a_page(tmp_path, capsys):
    start = {
        "kind": "run",
        "time": 1.0,
        "step": 0,
        "config": {},
        "model": "base",
        "rewards": ["r"],
        "monitors": [],
    }
    start |= {"max_steps": 1, "changed": []} | {
        name: {} for name in ("trainer_config", "environment", "plan")
    }
    metrics = {"kind": "metrics", "time": 2.0, "step": 1, "metrics": {"reward": 0.5}}
    run = tmp_path / "first"
    run.mkdir()
    (run / "run_log.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (start, metrics))
    )
    assert cli.main(["report", str(run)]) == 0 and "first" in (run / "report.html").read_text()
    assert cli.main(["report", str(run), "--output", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").is_file() and "other.html" in capsys.readouterr().out


def test_interrupted_command_exits_with_130(monkeypatch):
    def interrupt(run_dir):
        raise KeyboardInterrupt

    monkeypatch.setattr("trl_ppo_ext.tracking.report.read_run", interrupt)
    assert cli.main(["report", "run"]) == 130


def test_import_hides_noise_of_other_packages():
    code = (
        "import logging, warnings, trl_ppo_ext\nwarnings.warn('`is_gradient_checkpointing` is "
        "deprecated and will be removed', "
        "FutureWarning)\nlogging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to "
        "load CPU gemm_4bit_forward')\nwarnings.warn('another', FutureWarning)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if "Warning" in line] == [
        "<string>:4: FutureWarning: another"
    ]
    assert "gemm" not in done.stderr
