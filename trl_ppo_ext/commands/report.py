"""`trl-ppo report` and `compare`: one run, or several runs in the same plots, as one HTML file."""

import argparse
import os

from ..tracking.reading import REPORT
from ..tracking.report import write_report

COMPARISON = "compare.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="output_dir of a run, or a checkpoint")
    parser.add_argument(
        "--output",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"the file to write (default: {REPORT} in the run's directory, or {COMPARISON} here for several runs)",
    )


def main(options: argparse.Namespace) -> None:
    """Write the report."""
    directories = options.run_dirs
    default = os.path.join(directories[0], REPORT) if len(directories) == 1 else COMPARISON
    path = write_report(directories, getattr(options, "output", default))
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
