"""Check that documented shell commands name programs, flags, files and targets that exist."""

import configparser
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from itertools import dropwhile, groupby

from accelerate.commands.launch import launch_command_parser
from pages import ROOT

from trl_ppo_ext.commands import main as cli

UNCHECKED = {"accelerate", "cat", "cd", "export", "git", "ls", "mkdir", "sbatch", "source"}
SEPARATORS = {"&&", "||", "|", ";", "&"}


class CommandError(AssertionError):
    """A documented command names something that does not exist."""


def commands(code: str) -> Iterator[list[str]]:
    """Commands of a block as words, without comments and environment variables."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        for separator, group in groupby(words, SEPARATORS.__contains__):
            command = list(dropwhile(lambda word: re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", word), group))
            if command and not separator:
                yield command


def demand(condition: object, message: str) -> None:
    if not condition:
        raise CommandError(message)


@cache
def known_flags(command: str) -> set[str]:
    """Flags in the help of a sub-command of `trl-ppo`."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            cli.main([command, "--help"])
    except SystemExit as ended:
        assert ended.code in (0, None)
    return {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", printed.getvalue())}


def check_trl_ppo(words: list[str]) -> None:
    if words in ([], ["--help"], ["--version"]):
        return
    command, *arguments = words
    demand(command in cli.COMMANDS, f"`trl-ppo {command}` does not exist; there are {', '.join(cli.COMMANDS)}.")
    flags = {word.split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")} - {"__help"}
    unknown = flags - known_flags(command)
    demand(not unknown, f"`trl-ppo {command}` has no {unknown}.")
    if command not in cli.LAUNCHERS and "--help" not in arguments:
        parse(cli.parser(command), words)


def parse(parser, words: list[str]):
    try:
        return parser.parse_args(words)
    except SystemExit:
        raise CommandError(f"`{shlex.join(words)}` cannot be parsed.") from None


def check_files(words: list[str], shown: set[str]) -> None:
    """Files with a folder are in the repository, or the page shows them; others are the reader's."""
    for word in words:
        is_file = re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|ya?ml|slurm)", word)
        demand(not is_file or word in shown or (ROOT / word).is_file(), f"The repository has no {word}.")


def check_pip(words: list[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    for extras in re.findall(r"(?:^|\s)(?:\.|trl_ppo_ext\S*)\[([\w,-]+)\]", " ".join(words)):
        missing = set(extras.split(",")) - set(setup["options.extras_require"])
        demand(not missing, f"setup.cfg has no extra {missing}.")


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    unknown = {word for word in words if "=" not in word and word[0] != "-"} - set(targets)
    demand(not unknown, f"The Makefile has no target {unknown}.")


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "trl_ppo_ext.commands.main"]:
        check_trl_ppo(words[2:])
    elif words[:1] == ["recipes/ppo.py"]:  # `trl-ppo train` by another name
        check_trl_ppo(["train", *words[1:]])
    elif words and (ROOT / words[0]).is_file():
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        for flag in re.findall(r"--([\w-]+)", " ".join(words[1:])):
            demand(flag in source or flag.replace("-", "_") in source, f"{words[0]} has no --{flag}.")


def check(words: list[str], shown: set[str]) -> None:
    """Check a command; `shown` are the files that its page shows."""
    check_files(words, shown)
    program, *arguments = words
    if program == "accelerate" and arguments[0] == "launch":
        args = parse(launch_command_parser(), arguments[1:])
        program, arguments = "python", ["-m"] * bool(args.module) + [args.training_script, *args.training_script_args]
    if program == "trl-ppo":
        check_trl_ppo(arguments)
    elif program in ("python", "python3"):
        check_python(arguments)
    elif program in ("pip", "pip3"):
        check_pip(arguments)
    elif program == "make":
        check_make(arguments)
    else:
        demand(
            program in UNCHECKED,
            f"No check for `{program}`: add one to tests/docs/shell.py, or put `<!-- not run: reason -->` before it.",
        )
