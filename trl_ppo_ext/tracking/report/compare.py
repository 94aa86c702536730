"""`trl-ppo compare`: several runs over each other, as one HTML file."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="output_dirs of two runs or more")
    parser.add_argument("--output", metavar="FILE", default="compare.html", help="where to write it")


def main(args: argparse.Namespace) -> None:
    """Write the comparison."""
    from .page import write_report

    if len(args.run_dirs) < 2:
        raise ValueError(
            f"`compare` needs two runs or more, and got `{args.run_dirs[0]}` alone; see `trl-ppo report`."
        )
    path = write_report(args.run_dirs, args.output)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
