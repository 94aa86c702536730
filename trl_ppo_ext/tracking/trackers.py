"""Completions as tables in the trackers that have them, and what trackers must not be told."""

import os
from importlib import import_module
from typing import Any

from pandas import DataFrame

from ..ppo.rollouts import Samples

WITH_TABLES = ("wandb", "trackio")


def check_trackers(args: Any) -> None:
    """Refuse what a tracker would upload that is not to be uploaded."""
    log_model = os.environ.get("WANDB_LOG_MODEL", "")
    if "wandb" in args.report_to and log_model.lower() not in ("", "false", "0"):
        raise ValueError(
            f"WANDB_LOG_MODEL={log_model} would make the Trainer upload the whole base model, and its pickled "
            "arguments with the Hub's token in them. Unset it; `push_to_hub` and `hub_strategy` push the adapter."
        )


def as_text(entry: Any) -> str:
    """A prompt or completion as text; what cannot be encoded becomes its code."""
    if isinstance(entry, list) and all(isinstance(message, dict) for message in entry):
        entry = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in entry)
    return str(entry).encode("utf-8", "backslashreplace").decode()


def _column(values: list) -> list:
    """One type a column, as tables of trackers want it: numbers, or text."""
    if all(isinstance(value, int | float) for value in values):
        return [float(value) for value in values]
    return [as_text(value) for value in values]


def completions_table(samples: Samples, rewards: list[str], monitors: list[str], step: int) -> DataFrame:
    """Prompts, completions and scores of all that was sampled on this process."""
    prompts, completions = samples.batch.prompts, samples.batch.completions
    columns: dict[str, list] = {"step": [step] * len(completions)}
    columns |= {"prompt": [as_text(entry) for entry in prompts]}
    columns |= {"completion": [as_text(entry) for entry in completions]}
    scores = zip([*rewards, *monitors], [*samples.scored.rewards.T.tolist(), *samples.monitored.T.tolist()])
    for name, values in [*scores, ("score", samples.scored.totals.tolist()), *samples.extra.items()]:
        while name in columns:  # a reward named as another column
            name = f"{name}_"
        columns[name] = _column(list(values))
    return DataFrame(columns)


def log_completions(
    report_to: list[str], samples: Samples, rewards: list[str], monitors: list[str], step: int, key: str
) -> None:
    """Show completions in the trackers that have tables, and whose run the Trainer has begun."""
    named = [name for name in WITH_TABLES if name in report_to]
    if not named:
        return
    table = completions_table(samples, rewards, monitors, step)
    for name in named:
        tracker = import_module(name)
        if _runs(name, tracker):
            tracker.log({key: tracker.Table(dataframe=table), "train/global_step": step})


def _runs(name: str, tracker: Any) -> bool:
    if name == "wandb":
        return tracker.run is not None
    return tracker.context_vars.current_run.get() is not None
