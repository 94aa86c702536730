"""Console script `trl-ppo`.

Only the chosen subcommand's module is imported, so `--help` does not load torch.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .. import __version__
from ..redaction import printable, redacted

COMMANDS = {
    "chat": "talk to a trained adapter and its base, side by side",
    "estimate": "estimate the memory of a run, and settings that would make it fit",
    "probe": "measure whether a critic pays on a task, before training",
    "report": "write the report of a running or finished run, as one HTML file",
    "train": "train a policy with PPO; --dry_run checks the arguments and stops",
}
# TRL's parser reads their arguments, and a config file
LAUNCHERS = COMMANDS.keys() - {"chat", "report"}


def read_mapping(text: str) -> dict[str, Any]:
    """Read the JSON of a mapping from the command line."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"must be the JSON of a mapping, e.g. '{{\"enable_thinking\": true}}', got {text!r}"
        )
    return value


def parser() -> argparse.ArgumentParser:
    """Build the parser of the help, and of `chat` and `report`."""
    root = argparse.ArgumentParser(prog="trl-ppo", description="PPO for Hugging Face TRL.")
    root.add_argument("--version", action="version", version=f"trl-ppo {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    subs = {name: commands.add_parser(name, help=line) for name, line in COMMANDS.items()}
    subs["report"].add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a run")
    subs["report"].add_argument(
        "--output", metavar="FILE", help="file to write (default: report.html in RUN_DIR)"
    )
    chat = subs["chat"].add_argument
    chat("run_dir", metavar="RUN_DIR", help="output_dir of a run, or one of its checkpoints")
    chat("--prompt", action="append", metavar="TEXT", help="answer it and stop; may be repeated")
    chat("--plain", action="store_true", help="continue texts, without the chat template")
    chat(
        "--chat_template_kwargs",
        type=read_mapping,
        metavar="JSON",
        help="arguments of the chat template, in place of the training's of the same names",
    )
    chat("--trust_remote_code", action="store_true", help="run the code of the base's repository")
    chat("--max_new_tokens", type=int, default=256, metavar="N", help="default: 256")
    chat("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    chat("--seed", type=int, default=0, metavar="N", help="of sampled answers (default: 0)")
    chat(
        "--dtype",
        choices=["auto", "bfloat16", "float16", "float32"],
        default="auto",
        help="of the base (default: auto, as it was saved)",
    )
    return root


def report(run_dir: str, output: str | None) -> None:
    """Write the report of a run."""
    from ..tracking.reading import REPORT
    from ..tracking.report import write_report

    path = write_report(run_dir, output or os.path.join(run_dir, REPORT))
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv:
        command = argv[0]
    else:
        command = None
    try:
        if command in LAUNCHERS:
            import_module(f"trl_ppo_ext.commands.{command}").main(argv[1:])
        else:
            options = parser().parse_args(argv)
            if options.command == "chat":
                from .chat import talk

                talk(options)
            else:
                report(options.run_dir, options.output)
    # wrong arguments, a missing model, a missing extra
    except (ValueError, OSError, ImportError) as error:
        text = "\n- ".join(" ".join(part.split()) for part in str(error).split("\n- "))
        print(f"trl-ppo {command}: error: {printable(redacted(text))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        return getattr(error, "code", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
