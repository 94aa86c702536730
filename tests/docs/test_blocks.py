"""Code blocks of the documentation work: Python runs, and settings exist."""

import ast

import pytest
import stand_ins
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from pages import PAGES, ROOT, blocks, name

import trl_ppo_ext
from trl_ppo_ext.commands.launch import parse

BLOCKS = [block for path in PAGES for block in blocks(path)]
PYTHON = {
    path: [x for x in blocks(path) if x.language == "python" and not x.not_run] for path in PAGES
}


@pytest.mark.parametrize("path", [path for path, found in PYTHON.items() if found], ids=name)
def test_python_blocks_of_a_page_run(path, working_directory, monkeypatch):
    """One after the other in one namespace; the names that they take for granted are made first."""
    trains = any("Trainer(" in block.code or ".train(" in block.code for block in PYTHON[path])
    stand_ins.install(monkeypatch, trains)
    namespace = {"__name__": "__main__"} | {
        name: getattr(trl_ppo_ext, name) for name in trl_ppo_ext.__all__
    }
    for block in PYTHON[path]:
        used = {node.id for node in ast.walk(ast.parse(block.code)) if isinstance(node, ast.Name)}
        for known in (used & stand_ins.NAMES.keys()) - namespace.keys():
            namespace[known] = stand_ins.NAMES[known]()
        # in a traceback, the lines are those of the page
        exec(compile("\n" * block.line + block.code, ROOT / block.page, "exec"), namespace)


@pytest.mark.parametrize(
    "block", [x for x in BLOCKS if x.language == "yaml" and not x.not_run], ids=str
)
def test_settings_exist(block, working_directory):
    """The file of a run is read as `trl-ppo` reads it; one for accelerate has the fields of its
    config."""
    settings = yaml.safe_load(block.code)
    if "compute_environment" in settings:
        assert settings.keys() <= set(ClusterConfig.__dataclass_fields__)
        return
    (working_directory / "documented.yaml").write_text(block.code, encoding="utf-8")
    on_a_cpu = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
    parse("train", ["--config", "documented.yaml", *on_a_cpu], "")


def test_every_block_has_a_known_language():
    """Another would pass unchecked."""
    known = {"python", "bash", "yaml", "json", "text", ""}
    assert not [str(block) for block in BLOCKS if block.language not in known and not block.not_run]
