"""Tables of completions in Weights & Biases and trackio."""

import os
from importlib import import_module
from typing import Any

from pandas import DataFrame

from ..ppo.rollouts import Samples
from .completions import as_text

WITH_TABLES = ("wandb", "trackio")


def check_trackers(args: Any) -> None:
    """Raise an error if a tracker would upload the base model."""
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
