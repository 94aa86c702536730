"""Datasets by name: on the Hub, in a file, or in a directory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from ..redaction import sentence

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_REMEDY = "Name a dataset on the Hub (and its config), a .json, .jsonl or .parquet file, or a directory."


def load_splits(
    name: str, config: str | None = None, streaming: bool = False, argument: str = "dataset_name"
) -> Mapping[str, Any]:
    """Load all splits of a dataset."""
    path = Path(name)
    # a name that can only be a path is not looked up on the Hub
    is_path = name.startswith(("/", "./", "../")) or path.suffix in (*FILE_FORMATS, ".csv", ".txt")
    if is_path and not path.exists():
        raise ValueError(f"`{argument}={name!r}` does not exist; the working directory is {os.getcwd()}. {_REMEDY}")
    if path.is_file() and path.suffix not in FILE_FORMATS:
        raise ValueError(f"`{argument}={name!r}` must be a file of the types {', '.join(FILE_FORMATS)}; convert it.")
    saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    if config is not None and (saved or path.is_file()):
        raise ValueError(f"`dataset_config={config!r}` selects a part of a dataset on the Hub; remove it for {name}.")
    if saved and streaming:
        raise ValueError(f"`dataset_streaming=True` does not support {name}, written by `save_to_disk`; remove it.")
    try:
        if saved:
            loaded = load_from_disk(name)
            return loaded if isinstance(loaded, Mapping) else {"train": loaded}
        if path.is_file():
            return load_dataset(FILE_FORMATS[path.suffix], data_files=name, streaming=streaming)
        return load_dataset(name, name=config, streaming=streaming)
    except DatasetGenerationError as error:
        raise ValueError(f"`{argument}={name!r}` cannot be read: {error.__cause__ or error}") from error
    except (OSError, ValueError, RuntimeError) as error:  # missing, unreachable, of several configs, or a script
        raise ValueError(f"`{argument}={name!r}` cannot be loaded: {sentence(error)} {_REMEDY}") from error


def get_split(splits: Mapping[str, Any], split: str, argument: str) -> Any:
    """Select a split by name."""
    if split not in splits:
        raise ValueError(f"The dataset has no split {split!r}; set `{argument}` to one of {sorted(splits)}.")
    return splits[split]


def spread_indices(length: int, count: int) -> list[int]:
    """Row numbers at equal distances, so that a dataset sorted by source is sampled evenly."""
    count = min(count, length)
    return [index * length // count for index in range(count)]
