"""`trl-ppo replay`: print an episode or completion of a run, turn by turn."""

import argparse
import sys
from textwrap import indent

from ..redaction import printable
from ..tracking.reading import CREDIT, read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a run")
    parser.add_argument("--row", type=int, default=0, help="row of those logged at the step, counted from 0")
    parser.add_argument(
        "--step", type=int, default=argparse.SUPPRESS, help="optimizer step of the log (default: the last with rows)"
    )
    parser.add_argument("--mode", default="train", help="train, eval, or eval_NAME in a dict of evaluation sets")


def _line(title: str, numbers: dict[str, float | None]) -> str:
    return "  ".join([title, *(f"{name} {x:.4g}" for name, x in numbers.items() if x is not None)])


def replay(run_dir: str, row: int, step: int | None = None, mode: str = "train") -> str:
    """Prompt and turns of a logged row, with the rewards, values and advantages of its turns."""
    sheets = {sheet.step: sheet.rows for sheet in read_run(run_dir).sheets if sheet.mode == mode}
    if not sheets:
        raise ValueError(f"`{run_dir}` has no completions of mode {mode!r} in its log yet; choose another `--mode`.")
    step = max(sheets) if step is None else step
    if step not in sheets:
        raise ValueError(f"`--step` must be one with logged completions, {[*sheets]}, got {step}.")
    if not 0 <= row < len(sheets[step]):
        raise ValueError(f"`--row` must be from 0 to {len(sheets[step]) - 1} at step {step}, got {row}.")
    logged = sheets[step][row]
    totals = _line(f"step {step}  row {row}", {name: logged[name] for name in ("score", "kl", "tokens")})
    lines = [totals if logged["ended"] else f"{totals}  truncated", _line("rewards", logged["rewards"])]
    lines += ["", "prompt", indent(logged["prompt"], "    ")]
    for turn in logged["turns"]:
        credit = _line(turn["role"] or "completion", {name: turn[name] for name in CREDIT})
        lines += ["", credit, indent(turn["text"], "    ")]
    return printable("\n".join(lines))


def main(options: argparse.Namespace) -> None:
    """Print a row."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    print(replay(options.run_dir, options.row, getattr(options, "step", None), options.mode))
