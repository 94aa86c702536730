"""`trl-ppo report`: the report of a run as one HTML file."""

import argparse
import os

from ..tracking.reading import REPORT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a run")
    hint = f"the file to write (default: {REPORT} in RUN_DIR)"
    parser.add_argument("--output", metavar="FILE", default=argparse.SUPPRESS, help=hint)


def main(options: argparse.Namespace) -> None:
    """Write the report."""
    from ..tracking.report import write_report  # imports bokeh, an extra

    path = write_report(options.run_dir, getattr(options, "output", os.path.join(options.run_dir, REPORT)))
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
