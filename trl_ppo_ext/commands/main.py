"""Console script `trl-ppo`. Only the chosen subcommand's module is imported, so `--help` does not load torch."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ..redaction import printable, redacted

# subcommand: (module with `add_arguments(parser)` and `main(options)`, line of help)
COMMANDS = {
    "check-reward": ("commands.check_reward", "compare a reward model in full precision and quantized"),
    "dequantize": ("commands.dequantize", "write a 4-bit base as a plain checkpoint, e.g. for vLLM"),
    "estimate": ("commands.estimate", "estimate the memory of a run, and settings that would make it fit"),
    "pretrain-critic": ("commands.pretrain_critic", "train a critic on rollouts of a frozen policy"),
    "probe": ("commands.probe", "measure whether a critic pays on a task, before training"),
    "replay": ("commands.replay", "print an episode or completion of a run, turn by turn"),
    "report": ("commands.report", "write the report of a running or finished run, as one HTML file"),
    "train": ("commands.train", "train a policy with PPO; --dry_run checks the arguments and stops"),
}
# these also read a config file, so TRL's parser reads their arguments: `main(argv)`
LAUNCHERS = {"estimate", "pretrain-critic", "probe", "train"}


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Build the parser, with the arguments of one subcommand."""
    root = argparse.ArgumentParser(prog="trl-ppo", description="PPO for Hugging Face TRL.")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, line) in COMMANDS.items():
        sub = commands.add_parser(name, help=line, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        if name == command:
            module = import_module(f"trl_ppo_ext.{module_name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.main)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = argv[0] if argv else None
    try:
        if command in LAUNCHERS:
            import_module(f"trl_ppo_ext.{COMMANDS[command][0]}").main(argv[1:])
        else:
            options = parser(command).parse_args(argv)
            options.run(options)
    except (ValueError, OSError, ImportError) as error:  # wrong arguments, a missing model, a missing extra
        print(f"trl-ppo {command}: error: {printable(redacted(' '.join(str(error).split())))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
