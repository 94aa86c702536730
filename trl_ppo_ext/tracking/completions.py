"""Completions as tables: on the terminal, in Weights & Biases and in trackio."""

import json
import os
from importlib import import_module
from typing import Any

from pandas import DataFrame
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from ..ppo.rollouts import Samples
from ..redaction import printable

WITH_TABLES = ("wandb", "trackio")
LONGEST = 20_000  # characters of a cell; more would flood the terminal


def as_text(entry: Any) -> str:
    """A prompt or completion as text, with a line per message."""
    if isinstance(entry, list) and all(isinstance(message, dict) for message in entry):
        lines = []
        for message in entry:
            calls = [call.get("function", call) for call in message.get("tool_calls") or []]
            called = [f"{call.get('name')}({json.dumps(call.get('arguments'))})" for call in calls]
            lines.append(f"{message.get('role')}: {' '.join([str(message.get('content')), *called]).strip()}")
        return "\n".join(lines)
    return str(entry)


def printable_cell(text: str, encoding: str = "utf-8") -> str:
    """Escape control characters and those that the terminal cannot encode, and shorten."""
    shown, cut = printable(text[:LONGEST]).encode(encoding, "backslashreplace").decode(encoding), len(text) - LONGEST
    return shown if cut <= 0 else f"{shown}... ({cut} more characters)"


def print_completions(samples: Samples, reward_names: list[str], step: int, rows: int | None) -> None:
    """Print prompts, completions and their scores; all rows for `None`."""
    if rows == 0:
        return
    console = Console()

    def cell(entry: Any) -> Text:
        return Text(printable_cell(as_text(entry), console.encoding))  # `Text` is never parsed as markup

    table = Table(title=f"Step {step}", show_lines=True, expand=True)
    table.add_column("prompt", style="bright_yellow")
    table.add_column("completion", style="bright_green")
    for name in [*reward_names, "score"]:
        table.add_column(cell(name), justify="right", style="bold cyan")
    for name in samples.extra:
        table.add_column(cell(name))
    for row in range(len(samples.batch))[:rows]:
        scores = [*samples.scored.rewards[row].tolist(), samples.scored.totals[row].item()]
        texts = [samples.batch.prompts[row], samples.batch.completions[row]]
        extra = [values[row] for values in samples.extra.values()]
        table.add_row(*map(cell, texts), *(f"{score:.2f}" for score in scores), *map(cell, extra))
    console.print(table)


def check_trackers(args: Any) -> None:
    """Raise an error if a tracker is not installed, or would upload the base model."""
    known = INTEGRATION_TO_CALLBACK.keys() - {"azure_ml", "flyte"}  # these are available without being listed
    for name in (known & set(args.report_to)) - set(get_available_reporting_integrations()):
        raise ValueError(f"`report_to` names {name!r}, which is not installed; install its package, or remove it.")
    log_model = os.environ.get("WANDB_LOG_MODEL", "")
    if "wandb" in args.report_to and log_model.lower() not in ("", "false", "0"):
        raise ValueError(
            f"WANDB_LOG_MODEL={log_model} makes the Trainer upload the whole base model, and its pickled arguments "
            "with the Hub token. Unset it; `push_to_hub` and `hub_strategy` push the adapter."
        )


def _column(values: list) -> list:
    """Numbers or text, since a tracker's table needs one type per column."""
    if all(isinstance(value, int | float) for value in values):
        return [float(value) for value in values]
    return [as_text(value).encode("utf-8", "backslashreplace").decode() for value in values]


def completions_table(samples: Samples, rewards: list[str], monitors: list[str], step: int) -> DataFrame:
    """Prompts, completions and scores of this process."""
    prompts, completions = samples.batch.prompts, samples.batch.completions
    columns = {"step": [step] * len(prompts), "prompt": _column(prompts), "completion": _column(completions)}
    scores = zip([*rewards, *monitors], [*samples.scored.rewards.T.tolist(), *samples.monitored.T.tolist()])
    for name, values in [*scores, ("score", samples.scored.totals.tolist()), *samples.extra.items()]:
        while name in columns:  # a reward with the name of another column
            name = f"{name}_"
        columns[name] = _column(list(values))
    return DataFrame(columns)


def log_completions(
    report_to: list[str], samples: Samples, rewards: list[str], monitors: list[str], step: int, key: str
) -> None:
    """Log a table to each tracker that supports tables and that the Trainer has started."""
    names = [name for name in WITH_TABLES if name in report_to]
    if not names:
        return
    table = completions_table(samples, rewards, monitors, step)
    for name in names:
        tracker: Any = import_module(name)
        started = tracker.run if name == "wandb" else tracker.context_vars.current_run.get()
        if started is not None:
            tracker.log({key: tracker.Table(dataframe=table), "train/global_step": step})
