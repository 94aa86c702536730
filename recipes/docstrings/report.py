"""Report: a table of measures, completions side by side, and a plot of the curves."""

import os
import textwrap

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt

CURVES = ["reward", "monitor/ruff/mean", "kl_per_completion", "entropy", "completions/mean_length", "loss/value"]


def print_table(columns: dict[str, dict[str, float]]) -> None:
    """
    Print one row per measure and one column per model.

    Args:
        columns (`dict[str, dict[str, float]]`):
            Measures by name, by the heading of their column. A measure that a column lacks is left blank.
    """
    measures = list(dict.fromkeys(name for column in columns.values() for name in column))
    width = max(len(name) for name in measures)
    print("  ".join([" " * width] + [f"{heading:>12}" for heading in columns]))
    for name in measures:
        cells = [f"{column[name]:>12.3f}" if name in column else " " * 12 for column in columns.values()]
        print("  ".join([f"{name:<{width}}", *cells]))


def print_samples(signatures: list[str], before: list[str | None], after: list[str | None], width: int = 56) -> None:
    """
    Print completions of the same signatures side by side.

    Args:
        signatures (`list[str]`):
            Signatures.
        before (`list[str | None]`):
            Completions before PPO, `None` without EOS.
        after (`list[str | None]`):
            Completions after PPO.
        width (`int`, *optional*, defaults to `56`):
            Width of a column, in characters.
    """
    for signature, *texts in zip(signatures, before, after, strict=True):
        cells = [textwrap.wrap(text or "(no EOS)", width) or ["(empty)"] for text in texts]
        print(signature)
        for i in range(max(map(len, cells))):
            left, right = (cell[i] if i < len(cell) else "" for cell in cells)
            print(f"    {left:<{width}}  | {right}".rstrip())


def plot_curves(log_history: list[dict[str, float]], path: str | os.PathLike) -> None:
    """
    Plot the curves of a training run.

    Args:
        log_history (`list[dict[str, float]]`):
            The `state.log_history` of a trainer.
        path (`str` or `os.PathLike`):
            File of the plot.
    """
    curves = {key: [(row["step"], row[key]) for row in log_history if key in row] for key in CURVES}
    curves = {key: points for key, points in curves.items() if points}
    if not curves:
        return
    figure, axes = plt.subplots(1, len(curves), figsize=(3.2 * len(curves), 2.8), squeeze=False, layout="constrained")
    for axis, (key, points) in zip(axes[0], curves.items(), strict=True):
        axis.plot(*zip(*points, strict=True))
        axis.set_title(key)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
