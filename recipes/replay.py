"""Print an episode or completion of a run, turn by turn: `python recipes/replay.py RUN_DIR --row
3 --step 40`."""

import argparse
from collections.abc import Sequence
from textwrap import indent

from trl_ppo_ext.redaction import printable
from trl_ppo_ext.tracking.reading import CREDIT, read_run


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="output_dir of a run")
    add(
        "--row", type=int, default=0, help="row of those logged at the step (default: 0, the first)"
    )
    add("--step", type=int, help="step of the log (default: the last with rows)")
    add(
        "--mode",
        default="train",
        help="train (default), eval, or eval_NAME in a dict of evaluation sets",
    )
    print(replay(**vars(parser.parse_args(argv))))


def replay(run_dir: str, row: int, step: int | None = None, mode: str = "train") -> str:
    """Prompt and turns of a logged row, with the rewards, values and advantages of its turns."""

    def line(title: str, numbers: dict[str, float | None]) -> str:
        return "  ".join(
            [title, *(f"{name} {x:.4g}" for name, x in numbers.items() if x is not None)]
        )

    sheets = {sheet.step: sheet.rows for sheet in read_run(run_dir).sheets if sheet.mode == mode}
    if not sheets:
        raise ValueError(
            f"`{run_dir}` has no completions of mode {mode!r} in its log yet; choose another "
            "`--mode`."
        )
    step = max(sheets) if step is None else step
    if step not in sheets:
        raise ValueError(
            f"`--step` must be one with logged completions, {list(sheets)}, got {step}."
        )
    if not 0 <= row < len(sheets[step]):
        raise ValueError(
            f"`--row` must be from 0 to {len(sheets[step]) - 1} at step {step}, got {row}."
        )
    logged = sheets[step][row]
    totals = line(
        f"step {step}  row {row}", {name: logged[name] for name in ("score", "kl", "tokens")}
    )
    lines = [
        totals if logged["ended"] else f"{totals}  truncated",
        line("rewards", logged["rewards"]),
    ]
    lines += ["", "prompt", indent(logged["prompt"], "    ")]
    for turn in logged["turns"]:
        credit = line(turn["role"] or "completion", {name: turn[name] for name in CREDIT})
        lines += ["", credit, indent(turn["text"], "    ")]
    return printable("\n".join(lines))


if __name__ == "__main__":
    main()
