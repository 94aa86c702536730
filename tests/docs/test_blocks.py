"""Every code block of the documentation is right: Python runs, commands and settings exist."""

import ast
import json

import pytest
import shell
import stand_ins
import yaml
from pages import PAGES, RECIPES, ROOT, all_blocks, blocks, name

import trl_ppo_ext
from trl_ppo_ext.commands.launch import parse

BLOCKS = all_blocks()
CHECKED = {"python", "bash", "yaml", "json", "text", ""}
WITH_PYTHON = [path for path in PAGES if any(b.language == "python" and not b.not_run for b in blocks(path))]


def of(language):
    found = [block for block in BLOCKS if block.language == language and not block.not_run]
    return pytest.mark.parametrize("block", found, ids=str)


def run(block, namespace):
    """Execute a block; what it takes for granted is made first."""
    tree = ast.parse(block.code)
    wanted = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for known in (wanted & stand_ins.NAMES.keys()) - namespace.keys():
        namespace[known] = stand_ins.NAMES[known]()
    # in a traceback, the lines are those of the page
    exec(compile("\n" * block.line + block.code, ROOT / block.page, "exec"), namespace)


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_python_runs(path, working_directory, monkeypatch):
    """All blocks of a page, one after the other in one namespace."""
    found = [block for block in blocks(path) if block.language == "python" and not block.not_run]
    trains = any("Trainer(" in block.code or ".train(" in block.code for block in found)
    stand_ins.install(monkeypatch, trains)
    namespace = {"__name__": "__main__"} | {name: getattr(trl_ppo_ext, name) for name in trl_ppo_ext.__all__}
    for block in found:
        run(block, namespace)


COMMANDS = [block for path in [*PAGES, *RECIPES] for block in blocks(path) if block.language == "bash"]


@pytest.mark.parametrize("block", [block for block in COMMANDS if not block.not_run], ids=str)
def test_commands_are_there(block):
    page = blocks(ROOT / block.page)
    files = {file for other in page if other.language == "yaml" for file in shell.shown_files(other.code)}
    files |= {line.split()[-1] for other in page for line in other.code.splitlines()[:1] if line.startswith("# ")}
    for words in shell.commands(block.code):
        shell.check_command(words, frozenset(files))


@of("yaml")
def test_settings_are_there(block, working_directory):
    """A file of a run is read as `trl-ppo` reads it; one for accelerate has the fields of its config."""
    settings = yaml.safe_load(block.code)
    assert isinstance(settings, dict)
    if "compute_environment" in settings:
        from accelerate.commands.config.config_args import ClusterConfig

        assert settings.keys() <= set(ClusterConfig.__dataclass_fields__)
        return
    (working_directory / "documented.yaml").write_text(block.code, encoding="utf-8")
    on_a_cpu = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
    parse("train", ["--config", "documented.yaml", *on_a_cpu], "")


def test_json_is_json():
    for block in BLOCKS:
        if block.language == "json" and not block.not_run:
            json.loads(block.code)


def test_every_block_is_checked_or_says_why_not():
    """A language that is not known here would otherwise pass unseen."""
    unknown = [
        f"{block} ({block.language})" for block in BLOCKS if block.language not in CHECKED and not block.not_run
    ]
    assert not unknown, f"teach tests/docs, or put `<!-- not run: reason -->` before: {unknown}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.not_run], ids=str)
def test_not_run(block):
    """In the summary, each of these stands with its reason."""
    pytest.skip(block.not_run)


# ---- the checks see what is wrong ----


@pytest.mark.parametrize(
    "command",
    [
        "trl-ppo made-up",
        "trl-ppo estimate --no_such_field 3",
        "trl-ppo estimate --config recipes/missing.yaml",
        "trl-ppo check-reward MODEL",
        "accelerate launch --no_such_flag train.py",
        "accelerate launch recipes/missing.py",
        "accelerate launch -m trl_ppo_ext.commands.main pretrain-critic --no_such_field 3",
        "make nothing-of-the-kind",
        "pip install '.[made-up]'",
        "sbatch recipes/missing.slurm",
        "frobnicate",
        "cd somewhere && trl-ppo made-up",
    ],
)
def test_a_wrong_command_is_seen(command):
    with pytest.raises(shell.DocumentationError):
        for words in shell.commands(command):
            shell.check_command(words, frozenset())


def test_a_dataset_without_a_stand_in_is_seen():
    with pytest.raises(KeyError, match="add its schema"):
        stand_ins.load_dataset("somebody/something", split="train")
