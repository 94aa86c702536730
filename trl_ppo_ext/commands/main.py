"""The console script `trl-ppo`. A sub-command's module is imported when it is chosen, so that help comes at once."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# sub-command: (module with `add_arguments(parser)` and `main(args)`, line of help)
COMMANDS = {
    "check-reward": ("check_reward", "compare a reward model in full precision and in 4-bit on preference pairs"),
    "compare": ("report.compare", "write the curves of several runs over each other, as one HTML file"),
    "env": ("environment", "print versions and hardware, for a bug report"),
    "estimate": ("estimate", "say what memory a run will need, and which settings would make it fit"),
    "pretrain-critic": ("pretrain_critic", "train a critic on rollouts of a frozen policy, to start PPO runs from"),
    "report": ("report.command", "write the report of a run, going on or ended, as one HTML file"),
    "serve-reward": ("commands.serve_reward", "serve a reward model over HTTP, for RemoteReward"),
    "train": ("train", "train a policy with PPO; with --dry_run, say what the run would be"),
}
# these read a config file too, so TRL's parser reads their arguments: `main(argv)`
LAUNCHERS = {"estimate", "pretrain-critic", "train"}


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Build the parser."""
    root = argparse.ArgumentParser(prog="trl-ppo", description="PPO for Hugging Face TRL.")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, line) in COMMANDS.items():
        sub = commands.add_parser(name, help=line, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        if name == command and name not in LAUNCHERS:
            module = import_module(f".{module_name}", "trl_ppo_ext")
            module.add_arguments(sub)
            sub.set_defaults(run=module.main)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = argv[0] if argv else None
    try:
        if command in LAUNCHERS:
            import_module(f".{COMMANDS[command][0]}", "trl_ppo_ext").main(argv[1:])
        else:
            args = parser(command).parse_args(argv)
            args.run(args)
    except (ValueError, OSError) as error:  # wrong arguments, a model that is not there, a port that is taken
        print(f"trl-ppo {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
