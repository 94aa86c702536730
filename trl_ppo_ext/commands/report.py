"""`trl-ppo report`: the report of a run, as one HTML file."""

import argparse
import os


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a run, going on or ended, or a checkpoint")
    parser.add_argument(
        "--output", metavar="FILE", default=argparse.SUPPRESS, help="where to write it (default: RUN_DIR/report.html)"
    )


def main(args: argparse.Namespace) -> None:
    """Write the report."""
    from ..tracking.report.page import write_report
    from ..tracking.report.reading import REPORT

    path = write_report([args.run_dir], getattr(args, "output", os.path.join(args.run_dir, REPORT)))
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
