"""What documented shell commands say is there: commands, flags, files, targets."""

import configparser
import io
import re
import shlex
from contextlib import redirect_stdout
from functools import cache
from itertools import pairwise

import yaml
from accelerate.commands.launch import launch_command_parser
from pages import ROOT

from trl_ppo_ext.commands import main as cli

# what changes nothing that could be checked here
PLAIN = {"cd", "mkdir", "export", "source", "cat", "ls", "git"}
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")


class DocumentationError(AssertionError):
    """A documented command names what is not there."""


def commands(code: str) -> list[list[str]]:
    """Commands of a block as words, without comments and environment variables."""
    lines = code.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
            words = words[1:]
        rest: list[str] = []
        for word in [*words, "&&"]:
            if word in ("&&", ";", "|", "||", "&"):
                found.append(rest)
                rest = []
            else:
                rest.append(word)
    return [words for words in found if words]


@cache
def known_flags(command: str) -> frozenset[str]:
    """Flags in the help of a sub-command of `trl-ppo`."""
    if command not in cli.COMMANDS:
        raise DocumentationError(f"There is no `trl-ppo {command}`; there are {', '.join(cli.COMMANDS)}.")
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            cli.main([command, "--help"])
    except SystemExit as ended:
        assert ended.code in (0, None)
    return frozenset(FLAG.findall(printed.getvalue()))


def check_trl_ppo(words: list[str], files: frozenset[str]) -> None:
    if not words or words in (["--help"], ["--version"]):
        return
    command, *arguments = words
    known = known_flags(command)
    flags = [word.split("=")[0] for word in arguments if word.startswith("--")]
    unknown = sorted(
        {flag for flag in flags if flag not in known and flag.replace("-", "_") not in known} - {"--help"}
    )
    if unknown:
        raise DocumentationError(f"`trl-ppo {command}` has no {', '.join(unknown)}.")
    if command not in cli.LAUNCHERS and "--help" not in arguments:
        try:
            cli.parser(command).parse_args(words)
        except SystemExit:
            raise DocumentationError(f"`trl-ppo {shlex.join(words)}` cannot be parsed.") from None
    check_config_file(arguments, files)


def check_config_file(arguments: list[str], files: frozenset[str]) -> None:
    """A file that is named with its folder is in the repository, unless the page shows it; others are the reader's."""
    for flag, value in pairwise(arguments):
        named = flag in ("--config", "--config_file") and "/" in value
        if named and value not in files and not (ROOT / value).is_file():
            raise DocumentationError(f"{flag} names {value}, neither in the repository nor shown on the page.")


def check_accelerate(words: list[str], files: frozenset[str]) -> None:
    if words[:1] != ["launch"]:
        return
    try:
        args = launch_command_parser().parse_args(words[1:])
    except SystemExit:
        raise DocumentationError(f"`accelerate {shlex.join(words)}` cannot be parsed.") from None
    check_config_file(words, files)
    check_python([*(["-m"] if args.module else []), args.training_script, *args.training_script_args], files)


def check_python(words: list[str], files: frozenset[str]) -> None:
    if words[0] == "-m":
        if words[1] == "trl_ppo_ext.commands.main":
            check_trl_ppo(words[2:], files)
        return
    if words[0].startswith("-") or words[0] in files:
        return
    script = ROOT / words[0]
    if "/" not in words[0]:
        return  # the reader's own
    if not script.is_file():
        raise DocumentationError(f"There is no {words[0]} in the repository.")
    source = script.read_text(encoding="utf-8")
    if script.name == "ppo.py":  # what `trl-ppo train` is, under another name
        check_trl_ppo(["train", *words[1:]], files)
        return
    for flag in (word.split("=")[0] for word in words[1:] if word.startswith("--")):
        if flag not in source and flag.removeprefix("--").replace("-", "_") not in source:
            raise DocumentationError(f"{words[0]} has no {flag}.")


def check_pip(words: list[str]) -> None:
    """Extras of this package exist."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    for word in words:
        for extra in re.findall(r"^(?:\.|trl_ppo_ext.*)\[([\w,-]+)\]", word):
            missing = set(extra.split(",")) - set(setup["options.extras_require"])
            if missing:
                raise DocumentationError(f"setup.cfg has no extra {', '.join(missing)}.")


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for word in words:
        if "=" not in word and not word.startswith("-") and word not in targets:
            raise DocumentationError(f"The Makefile has no target {word}.")


def check_files(words: list[str]) -> None:
    """Files that are named with their folder are in the repository."""
    for word in words:
        if "/" in word and not word.startswith("-") and not (ROOT / word).is_file():
            raise DocumentationError(f"There is no {word} in the repository.")


def check_command(words: list[str], files: frozenset[str]) -> None:
    """Check a command.

    Args:
        words (`list[str]`): The command.
        files (`frozenset[str]`): Files that the page shows or has written by then.

    Raises:
        DocumentationError: If it names what is not there, or it is not known how to check it.
    """
    program, *arguments = words
    if program == "trl-ppo":
        check_trl_ppo(arguments, files)
    elif program == "accelerate":
        check_accelerate(arguments, files)
    elif program in ("python", "python3"):
        check_python(arguments, files) if arguments else None
    elif program in ("pip", "pip3"):
        check_pip(arguments)
    elif program == "make":
        check_make(arguments)
    elif program == "sbatch":
        check_files(arguments)
    elif program not in PLAIN:
        raise DocumentationError(
            f"It is not known how to check `{program}`; teach tests/docs/shell.py, or put `<!-- not run: reason -->` "
            "before the block."
        )


def shown_files(code: str) -> dict[str, dict]:
    """The file that a YAML block is, by the name in the comment on its first line."""
    match = re.match(r"#\s*([\w./-]+\.ya?ml)\b", code)
    return {match[1]: yaml.safe_load(code)} if match else {}
