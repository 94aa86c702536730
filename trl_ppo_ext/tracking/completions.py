"""Completions as tables: on the terminal, in Weights & Biases and in trackio."""

import math
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from pandas import DataFrame
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.utils import logging

from ..data import as_text, message_text
from ..ppo.rollouts import Samples
from ..redaction import printable, without_keys
from .reading import CREDIT, CUT

logger = logging.get_logger(__name__)

COMPLETIONS = "completions"  # in the output directory of a run: a file per logged table
WITH_TABLES = ("wandb", "trackio")
LONGEST = 20_000  # characters of a cell; more would flood the terminal
MOST_TURNS = 64  # of an episode, with the environment's


def limited(text: str, longest: int) -> str:
    """The first characters of a text, with keys and passwords masked."""
    text = without_keys(text)
    cut = len(text) - longest
    if cut <= 0:
        return text
    return f"{text[:longest]}... ({cut} {CUT}"


def turns_of(samples: Samples, rows: int | None) -> list[list[dict[str, Any]]]:
    """Turns of each completion, one without a role if nobody answers the policy.

    A turn of the policy has the `reward` that entered in it, and the `value` and `advantage` of its
    first token.
    """
    rewards = samples.scored.tokens[:rows].cpu()
    values, advantages = (
        x if x is None else x[:rows].cpu() for x in (samples.values, samples.advantages)
    )
    completions = []
    for row, episode in enumerate(samples.batch.episodes[:rows]):
        answered = episode.messages + episode.unread
        messages = [(x["role"], message_text(x)) for x in answered] or [
            ("", as_text(episode.completion))
        ]
        turns: list[dict[str, Any]] = [
            {"role": role, "text": text} | dict.fromkeys(CREDIT) for role, text in messages
        ]
        sampled = [turn for turn in turns if turn["role"] in ("", "assistant")]
        for turn, start, end in zip(
            sampled, episode.starts, episode.starts[1:] + [len(episode.completion_ids)]
        ):
            turn["reward"] = rewards[row, start:end].sum().item()
            turn["value"] = None if values is None else values[row, start].item()
            turn["advantage"] = None if advantages is None else advantages[row, start].item()
        completions.append(turns)
    return completions


def limited_turns(turns: list[dict[str, Any]], longest: int) -> list[dict[str, Any]]:
    """The first and the last turns, with about so many characters; short texts leave theirs to
    long ones."""
    omitted = len(turns) - MOST_TURNS
    if omitted > 0:
        note = {"role": "", "text": f"({omitted} turns omitted)"} | dict.fromkeys(CREDIT)
        turns = turns[: MOST_TURNS // 2] + [note] + turns[-MOST_TURNS // 2 :]
    share = room = longest
    for number, length in enumerate(sorted(len(turn["text"]) for turn in turns)):
        share = room // (len(turns) - number)
        room -= min(length, share)
    return [turn | {"text": limited(turn["text"], share)} for turn in turns]


def check_trackers(report_to: list[str]) -> None:
    """Raise an error if a tracker is not installed, or would upload the base model."""
    # these are available without being listed
    known = INTEGRATION_TO_CALLBACK.keys() - {"azure_ml", "flyte"}
    for name in (known & set(report_to)) - set(get_available_reporting_integrations()):
        raise ValueError(
            f"`report_to` names {name!r}, which is not installed; install its package, or remove "
            "it."
        )
    log_model = os.environ.get("WANDB_LOG_MODEL", "")
    if "wandb" in report_to and log_model.lower() not in ("", "false", "0"):
        raise ValueError(
            f"WANDB_LOG_MODEL={log_model} makes the Trainer upload the whole base model, and its "
            "pickled arguments with the Hub token. Unset it; `push_to_hub` pushes the adapter."
        )


def _column(values: list) -> list:
    """Numbers, NaN where there is none, or text: a tracker's table needs one type per column."""
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, int | float) for value in present):
        return [math.nan if value is None else float(value) for value in values]
    return [
        without_keys(as_text(value)).encode("utf-8", "backslashreplace").decode()
        for value in values
    ]


def completions_table(
    samples: Samples, rewards: list[str], monitors: list[str], step: int
) -> DataFrame:
    """Prompts, completions and scores of this process."""
    prompts = samples.batch.prompts
    completions = samples.batch.completions
    columns = {
        "step": [step] * len(prompts),
        "prompt": _column(prompts),
        "completion": _column(completions),
    }
    scores = zip(
        rewards + monitors, samples.scored.rewards.T.tolist() + samples.monitored.T.tolist()
    )
    for name, values in [
        *scores,
        ("score", samples.scored.totals.tolist()),
        *samples.extra.items(),
    ]:
        (name,) = _column([name])
        while name in columns:  # a reward with the name of another column
            name = f"{name}_"
        columns[name] = _column(list(values))
    return DataFrame(columns)


def print_completions(completions: DataFrame, step: int, rows: int | None) -> None:
    """Print the first rows of a table of completions; all for `None`."""
    if rows == 0:
        return
    console = Console()
    table = Table(title=f"Step {step}", show_lines=True, expand=True)

    def cell(entry: float | str) -> Text:
        if isinstance(entry, float):
            text = f"{entry:.4g}"
        else:
            text = printable(limited(entry, LONGEST))
        encoded = text.encode(console.encoding, "backslashreplace")  # what the terminal can show
        return Text(encoded.decode(console.encoding))  # `Text` is never parsed as markup

    for name in completions.columns[1:]:  # the step is in the title
        style = {"prompt": "bright_yellow", "completion": "bright_green"}.get(name, "bold cyan")
        table.add_column(cell(name), style=style)
    for row in completions[:rows].to_numpy().tolist():
        table.add_row(*map(cell, row[1:]))
    with tqdm.external_write_mode():  # no progress bar within the table
        console.print(table)


def save_completions(completions: DataFrame, output_dir: str, step: int, prefix: str) -> None:
    """Write a table of completions where TRL does; a full disk must not end the run."""
    prefix = prefix.replace("/", "_")  # of a set such as "math/500"
    path = Path(output_dir, COMPLETIONS, f"{prefix}completions_{step:05d}.parquet")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        completions.to_parquet(path, index=False)
    except (OSError, ValueError) as error:
        logger.warning_once(
            f"Completions cannot be written to `{path.parent}` ({error}); the run continues."
        )


def log_completions(report_to: list[str], completions: DataFrame, step: int, key: str) -> None:
    """Log a table of completions to each tracker that supports tables and that the Trainer has
    started."""
    for name in [name for name in WITH_TABLES if name in report_to]:
        tracker: Any = import_module(name)
        if (tracker.run if name == "wandb" else tracker.context_vars.current_run.get()) is not None:
            tracker.log({key: tracker.Table(dataframe=completions), "train/global_step": step})
