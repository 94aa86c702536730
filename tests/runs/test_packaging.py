"""What is published: the public names, the files, the wheel, and which module may import which."""

import ast
import configparser
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from shutil import copytree

import pytest
from transformers import TrainingArguments

import trl_ppo_ext

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_ppo_ext"


def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def modules():
    return sorted(module.name for module in pkgutil.walk_packages([str(PACKAGE)], "trl_ppo_ext."))


# ---- the public surface ----


def test_public_names_are_documented_and_listed():
    assert trl_ppo_ext.__all__ == sorted(trl_ppo_ext.__all__)
    for name in trl_ppo_ext.__all__:
        assert inspect.getdoc(getattr(trl_ppo_ext, name)), name
        assert name in dir(trl_ppo_ext)


def test_nothing_else_is_public():
    """In a process of its own: modules that were imported are attributes of the package."""
    program = "import trl_ppo_ext as p; print(*(n for n in vars(p) if not n.startswith('_')))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    imported = {"import_module", "TYPE_CHECKING", "Any"}
    assert set(done.stdout.split()) <= imported | set(trl_ppo_ext.__all__)


# ---- rooms ----

# a module imports only from lower floors, or from its own room
FLOORS = [
    {
        "batch_plan",
        "concurrency",
        "ppo_math",
        "private_names",
        "redaction",
        "text",
    },
    {"sequences", "trl_names"},
    {"config"},
    {"distributed"},
    {"data", "modeling"},
    {"rewards"},
    {"episodes"},
    {"arguments", "ppo"},
    {"tracking"},
    {"checkpoints"},
    {"trainer"},
    {"tools"},
    {"commands"},
]


def imports():
    """Modules of the package that each module imports, also within functions, except for type
    checking."""
    paths = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    paths = {name.removesuffix("__init__").removesuffix("."): path for name, path in paths.items()}
    found = {}
    for name, path in paths.items():
        package = path.relative_to(PACKAGE).parts[:-1]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.If)
                and isinstance(node.test, ast.Name)
                and node.test.id == "TYPE_CHECKING"
            ):
                node.body = []
        found[name] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            source = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
            names = {".".join([*source, alias.name]) for alias in node.names}
            found[name] |= {x if x in paths else ".".join(source) for x in names}
    return found


def room(module):
    return next(
        (name for name in (module, module.split(".")[0]) if any(name in floor for floor in FLOORS)),
        module,
    )


def test_modules_import_only_from_lower_floors():
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    graph = imports()
    graph.pop("")  # the public names
    assert level.keys() == {room(module) for module in graph}
    wrong = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others - {""}  # the package, for its version
        if room(other) != room(module) and level[room(other)] >= level[room(module)]
    ]
    assert not wrong


def test_modules_have_no_import_cycle():
    graph = imports()
    assert sum(map(len, graph.values())) > 100
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", ["ppo_math", "batch_plan", "sequences"])
def test_lowest_floor_imports_only_torch(module):
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    named = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    named |= {
        node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    }
    assert not {name.split(".")[0] for name in named} - {"torch"} - sys.stdlib_module_names


def test_every_field_of_the_config_is_read():
    """As an attribute or by its name; those of TrainingArguments are the Trainer's, names of
    vLLM's are built."""
    own = (
        trl_ppo_ext.PPOConfig.__annotations__.keys() - TrainingArguments.__dataclass_fields__.keys()
    )
    read = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            if isinstance(node, ast.Constant) and path.name not in ("config.py", "memory.py"):
                read.add(node.value)
    assert not {name for name in own - read if not name.startswith("vllm_")}


# ---- what is optional ----


def test_package_imports_without_optional_dependencies(tmp_path):
    """In a process in which the packages of the extras are not there."""
    (tmp_path / "run_log.jsonl").write_text(
        '{"kind": "metrics", "time": 1, "step": 1, "metrics": {"reward": 1}}\n'
    )
    requirements = "\n".join(dict(setup()["options.extras_require"]).values())
    names = {
        re.split(r"[^\w-]", line.strip())[0].replace("-", "_") for line in requirements.splitlines()
    } - {""}
    assert {"bokeh", "deepspeed", "wandb", "tensorboard", "trackio", "starlette"} <= names
    names -= {"httpx2"}  # the Hub's own client needs it
    # the clients themselves, and what draws
    of_extras = {
        "rewards.http": "judge",
        "episodes.vllm_server": "vllm",
        "tracking.report": "report",
    }
    everything = sorted(set(modules()) - {f"trl_ppo_ext.{name}" for name in of_extras})
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(names)!r}))\n"
        f"for name in {everything!r}: importlib.import_module(name)\n"
        "from trl_ppo_ext import PPOTrainer\n"
        "from trl_ppo_ext.commands.main import main\n"
        "sys.modules['httpx2'] = None\n"
        f"for name, extra in {of_extras!r}.items():\n"
        "    try: importlib.import_module(f'trl_ppo_ext.{name}')\n"
        "    except ImportError as error: assert f'trl_ppo_ext[{extra}]' in str(error), error\n"
        "    else: raise AssertionError(name)\n"
        f"assert main(['report', {str(tmp_path)!r}]) == 2\n"
        "main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'pip install "trl_ppo_ext[report]"' in done.stderr
    assert "probe" in done.stdout


# ---- the wheel ----


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the checkout stays as it is."""
    pytest.importorskip(
        "setuptools", "77", reason="the wheel is built with setuptools of this environment"
    )
    folder = tmp_path_factory.mktemp("wheel")
    copytree(PACKAGE, folder / "source" / "trl_ppo_ext", ignore=lambda *_: {"__pycache__"})
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / name).is_file():
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", ".", "./source"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_wheel_has_exactly_the_files_of_the_package(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {
        path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == {path.relative_to(ROOT).as_posix() for path in files}


@pytest.mark.slow
def test_installed_wheel_works_outside_of_the_checkout(wheel, tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        "installed",
    ]
    subprocess.run([*command, str(wheel)], check=True, cwd=tmp_path)
    site = tmp_path / "installed"
    environment = os.environ | {"PYTHONPATH": str(site)}

    def run(*command):
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(site) in run(sys.executable, "-c", "import trl_ppo_ext; print(trl_ppo_ext.__file__)")
    preset = (
        "from trl_ppo_ext import PPOConfig; PPOConfig.preset('n_plus', 'out', use_cpu=True, "
        "bf16=False)"
    )
    run(sys.executable, "-c", preset)
    printed = run(site / "bin" / "trl-ppo", "--help")
    for command in import_module("trl_ppo_ext.commands.main").COMMANDS:
        assert command in printed
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    run(sys.executable, "-c", program, *modules())


def test_extra_installs_the_vllm_that_is_tested():
    script, page = (
        (ROOT / name).read_text() for name in ("tests/with_vllm/install.py", "docs/generation.md")
    )
    version, transformers = (
        re.search(x, script)[1] for x in ('VLLM = "(.*)"', r"transformers==([\d.]+)")
    )
    assert f"vllm=={version};" in setup()["options.extras_require"]["vllm-colocate"]
    assert f"Tested: vLLM {version}," in page and f"with transformers {transformers}," in page
