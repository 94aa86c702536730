"""Code blocks of the documentation work: Python runs, commands and settings exist."""

import ast
import json
import re

import pytest
import shell
import stand_ins
import yaml
from pages import PAGES, RECIPES, ROOT, blocks, name

import trl_ppo_ext
from trl_ppo_ext.commands.launch import parse

BLOCKS = [block for path in PAGES for block in blocks(path)]
WITH_PYTHON = [path for path in PAGES if any(b.language == "python" and not b.not_run for b in blocks(path))]


def of(language, among=BLOCKS):
    found = [block for block in among if block.language == language and not block.not_run]
    return pytest.mark.parametrize("block", found, ids=str)


def run(block, namespace):
    """Execute a block; the names that it takes for granted are made first."""
    wanted = {node.id for node in ast.walk(ast.parse(block.code)) if isinstance(node, ast.Name)}
    for known in (wanted & stand_ins.NAMES.keys()) - namespace.keys():
        namespace[known] = stand_ins.NAMES[known]()
    # in a traceback, the lines are those of the page
    exec(compile("\n" * block.line + block.code, ROOT / block.page, "exec"), namespace)


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_python_blocks_of_a_page_run(path, working_directory, monkeypatch):
    """One after the other in one namespace."""
    found = [block for block in blocks(path) if block.language == "python" and not block.not_run]
    trains = any("Trainer(" in block.code or ".train(" in block.code for block in found)
    stand_ins.install(monkeypatch, trains)
    namespace = {"__name__": "__main__"} | {name: getattr(trl_ppo_ext, name) for name in trl_ppo_ext.__all__}
    for block in found:
        run(block, namespace)


@of("bash", among=[block for path in [*PAGES, *RECIPES] for block in blocks(path)])
def test_commands_exist(block):
    # a file that a page shows has its name in a comment on the first line
    shown = {
        match[1] for other in blocks(ROOT / block.page) if (match := re.match(r"# .*?([\w./-]+)$", other.code, re.M))
    }
    for words in shell.commands(block.code):
        shell.check(words, shown)


@of("yaml")
def test_settings_exist(block, working_directory):
    """The file of a run is read as `trl-ppo` reads it; one for accelerate has the fields of its config."""
    settings = yaml.safe_load(block.code)
    if "compute_environment" in settings:
        from accelerate.commands.config.config_args import ClusterConfig

        assert settings.keys() <= set(ClusterConfig.__dataclass_fields__)
        return
    (working_directory / "documented.yaml").write_text(block.code, encoding="utf-8")
    on_a_cpu = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
    parse("train", ["--config", "documented.yaml", *on_a_cpu], "")


@of("json")
def test_json_blocks_parse(block):
    json.loads(block.code)


def test_every_block_has_a_known_language():
    """Another would pass unchecked."""
    known = {"python", "bash", "yaml", "json", "text", ""}
    assert not [str(block) for block in BLOCKS if block.language not in known and not block.not_run]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.not_run], ids=str)
def test_block_is_not_run(block):
    """The summary shows each of these with its reason."""
    pytest.skip(block.not_run)


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
def test_wrong_command_is_detected(command):
    with pytest.raises(shell.CommandError):
        for words in shell.commands(command):
            shell.check(words, set())


def test_dataset_without_a_stand_in_raises():
    with pytest.raises(KeyError, match="add its schema"):
        stand_ins.load_dataset("somebody/something", split="train")
