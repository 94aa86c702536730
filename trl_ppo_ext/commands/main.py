"""Console script `trl-ppo`. Only the chosen subcommand's module is imported, so `--help` does not load torch."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from textwrap import indent

from .. import __version__
from ..redaction import printable, redacted

COMMANDS = {
    "estimate": "estimate the memory of a run, and settings that would make it fit",
    "probe": "measure whether a critic pays on a task, before training",
    "replay": "print an episode or completion of a run, turn by turn",
    "report": "write the report of a running or finished run, as one HTML file",
    "train": "train a policy with PPO; --dry_run checks the arguments and stops",
}
# each has a module in this folder: TRL's parser reads its arguments, and a config file
LAUNCHERS = {"estimate", "probe", "train"}


def parser() -> argparse.ArgumentParser:
    """Build the parser of the help, and of the subcommands without a module."""
    root = argparse.ArgumentParser(prog="trl-ppo", description="PPO for Hugging Face TRL.")
    root.add_argument("--version", action="version", version=f"trl-ppo {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    subs = {name: commands.add_parser(name, help=line) for name, line in COMMANDS.items()}
    for name, run in (("replay", replay), ("report", report)):
        subs[name].add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a run")
        subs[name].set_defaults(run=run)
    subs["report"].add_argument("--output", metavar="FILE", help="file to write (default: report.html in RUN_DIR)")
    add = subs["replay"].add_argument
    add("--row", type=int, default=0, help="row of those logged at the step (default: 0, the first)")
    add("--step", type=int, help="step of the log (default: the last with rows)")
    add("--mode", default="train", help="train (default), eval, or eval_NAME in a dict of evaluation sets")
    return root


def report(run_dir: str, output: str | None = None) -> str:
    """Write the report of a run, and return its path and size."""
    from ..tracking.reading import REPORT
    from ..tracking.report import write_report

    path = write_report(run_dir, output or os.path.join(run_dir, REPORT))
    return f"{path} ({path.stat().st_size / 1e6:.1f} MB)"


def replay(run_dir: str, row: int, step: int | None = None, mode: str = "train") -> str:
    """Prompt and turns of a logged row, with the rewards, values and advantages of its turns."""
    from ..tracking.reading import CREDIT, read_run

    def line(title: str, numbers: dict[str, float | None]) -> str:
        return "  ".join([title, *(f"{name} {x:.4g}" for name, x in numbers.items() if x is not None)])

    sheets = {sheet.step: sheet.rows for sheet in read_run(run_dir).sheets if sheet.mode == mode}
    if not sheets:
        raise ValueError(f"`{run_dir}` has no completions of mode {mode!r} in its log yet; choose another `--mode`.")
    step = max(sheets) if step is None else step
    if step not in sheets:
        raise ValueError(f"`--step` must be one with logged completions, {[*sheets]}, got {step}.")
    if not 0 <= row < len(sheets[step]):
        raise ValueError(f"`--row` must be from 0 to {len(sheets[step]) - 1} at step {step}, got {row}.")
    logged = sheets[step][row]
    totals = line(f"step {step}  row {row}", {name: logged[name] for name in ("score", "kl", "tokens")})
    lines = [totals if logged["ended"] else f"{totals}  truncated", line("rewards", logged["rewards"])]
    lines += ["", "prompt", indent(logged["prompt"], "    ")]
    for turn in logged["turns"]:
        credit = line(turn["role"] or "completion", {name: turn[name] for name in CREDIT})
        lines += ["", credit, indent(turn["text"], "    ")]
    return printable("\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = argv[0] if argv else None
    try:
        if command in LAUNCHERS:
            import_module(f"trl_ppo_ext.commands.{command}").main(argv[1:])
        else:
            options = vars(parser().parse_args(argv))
            run = options.pop("run")
            options.pop("command")
            print(run(**options))
    except (ValueError, OSError, ImportError) as error:  # wrong arguments, a missing model, a missing extra
        text = "\n- ".join(" ".join(part.split()) for part in str(error).split("\n- "))
        print(f"trl-ppo {command}: error: {printable(redacted(text))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        return getattr(error, "code", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
