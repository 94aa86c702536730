"""Checkpoints that are whole or not there: written aside, flushed, renamed, and verified before they are read."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .files import CheckpointError

logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"
STAGING = ".saving"  # no name that anything takes for a checkpoint
REPLACED = ".replaced"


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(staged: Path) -> None:
    """List the files of a directory with what is in them, and flush all of it to the disk."""
    files = {
        str(path.relative_to(staged)): {"size": path.stat().st_size, "sha256": _digest(path)}
        for path in _files(staged)
    }
    (staged / MANIFEST).write_text(json.dumps(files, indent=1))
    for path in [*_files(staged), staged / MANIFEST]:
        _flush(path)
    for folder in {path.parent for path in staged.rglob("*")} | {staged}:
        _flush(folder)


def publish(staged: Path, final: Path) -> None:
    """Make a directory that was written aside a checkpoint: seal it, and rename it."""
    seal(staged)
    heal(final.parent)
    aside = final.parent / REPLACED
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        aside.mkdir()
        os.replace(final, aside / final.name)
    os.replace(staged, final)
    _flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def heal(output_dir: str | os.PathLike) -> None:
    """Put back a checkpoint whose replacement was cut short between two renames."""
    for replaced in Path(output_dir).glob(f"{REPLACED}/{PREFIX_CHECKPOINT_DIR}-*"):
        if not (Path(output_dir) / replaced.name).exists():
            os.replace(replaced, Path(output_dir) / replaced.name)


def verify(directory: str | os.PathLike) -> None:
    """Check that a checkpoint is what was written."""
    path = Path(directory)
    try:
        listed = json.loads((path / MANIFEST).read_text())
        entries = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in listed.items()}
        if not entries:
            raise ValueError("it lists no file")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"`{directory}` is no whole checkpoint of PPOTrainer: its {MANIFEST} cannot be read ({error}). Resume "
            "from another checkpoint."
        ) from None
    for name, written in entries.items():
        _verify_file(path, name, *written)


def _verify_file(directory: Path, name: str, size: int, digest: str) -> None:
    file = directory / name
    if not file.is_file():
        raise CheckpointError(f"`{directory}` is damaged: {name} is missing. Resume from another checkpoint.")
    try:
        as_written = file.stat().st_size == size and _digest(file) == digest
    except OSError as error:  # of a disk that fails
        raise CheckpointError(
            f"`{directory}` is damaged: {name} cannot be read ({error}). Resume from another checkpoint."
        ) from None
    if not as_written:
        raise CheckpointError(
            f"`{directory}` is damaged: {name} ({file.stat().st_size} bytes) is not what was written ({size} bytes, "
            f"by its {MANIFEST}). Resume from another checkpoint."
        )


def is_whole(directory: str | os.PathLike) -> bool:
    """Whether a checkpoint is what was written."""
    try:
        verify(directory)
    except CheckpointError:
        return False
    return True


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """Directories that are named as checkpoints."""
    numbered = []
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if path.is_dir() and number.isdecimal():
            numbered.append((int(number), path))
    return [path for _, path in sorted(numbered, reverse=True)]


def newest_whole(output_dir: str | os.PathLike) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are named in a warning and left where they are."""
    heal(output_dir)
    found = checkpoints(output_dir)
    for path in found:
        try:
            verify(path)
        except CheckpointError as error:
            logger.warning("%s Falling back to an older checkpoint.", error)
        else:
            return path
    if found:
        raise CheckpointError(
            f"None of the {len(found)} checkpoints in `{output_dir}` is whole; the newest is {found[0].name}. Start "
            "anew in another directory, or restore one of them."
        )
    return None


def rotate(latest: Path, limit: int | None, best: str | None, whole: dict[Path, bool]) -> None:
    """Delete checkpoints beyond a number: damaged ones first, then those that were written first.

    The latest and the best are kept in any case.
    """
    found = checkpoints(latest.parent)
    if not limit or len(found) <= limit:
        return
    kept = {latest} | {path for path in found if best is not None and path.resolve() == Path(best).resolve()}
    for path in found:
        if path not in whole:
            whole[path] = is_whole(path)
    others = [path for path in found if path not in kept]
    others.sort(key=lambda path: (whole[path], path.stat().st_mtime), reverse=True)  # equal ones stay newest first
    for path in others[max(limit - len(kept), 0) :]:
        shutil.rmtree(path, ignore_errors=True)
        whole.pop(path)
