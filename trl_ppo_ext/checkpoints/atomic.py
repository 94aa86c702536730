"""Checkpoint directories: written aside, sealed with checksums, renamed when complete, verified
before reading."""

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
STAGING = ".saving"  # neither matches the name of a checkpoint
REPLACED = ".replaced"


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(staged: Path) -> None:
    """Write the manifest of a directory, and flush its files and folders to the disk."""
    files = sorted(path for path in staged.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = {
        str(path.relative_to(staged)): {"size": path.stat().st_size, "sha256": _digest(path)}
        for path in files
    }
    (staged / MANIFEST).write_text(json.dumps(entries, indent=1))
    for path in list(staged.rglob("*")) + [staged]:
        _flush(path)


def publish(staged: Path, final: Path) -> None:
    """Seal a directory, and rename it to its final name, in place of an older checkpoint of that
    name."""
    seal(staged)
    restore_replaced(final.parent)
    aside = final.parent / REPLACED
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():  # a directory cannot be renamed over another one
        aside.mkdir()
        os.replace(final, aside / final.name)
    os.replace(staged, final)
    _flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def restore_replaced(output_dir: str | os.PathLike) -> None:
    """Rename an older checkpoint back if `publish` was killed between its two renames."""
    for replaced in Path(output_dir).glob(f"{REPLACED}/{PREFIX_CHECKPOINT_DIR}-*"):
        if not (Path(output_dir) / replaced.name).exists():
            os.replace(replaced, Path(output_dir) / replaced.name)


def find_damage(directory: str | os.PathLike) -> str | None:
    """Description of the first mismatch between a checkpoint and its manifest, `None` if all
    files match."""
    path = Path(directory)
    name = MANIFEST
    remedy = "Resume from another checkpoint."
    if not (path / MANIFEST).is_file():
        return f"`{path}` has no {MANIFEST}: it does not exist, or is of another trainer. {remedy}"
    try:
        for name, entry in json.loads((path / MANIFEST).read_text()).items():
            size = (path / name).stat().st_size
            if size != entry["size"] or _digest(path / name) != entry["sha256"]:
                return (
                    f"`{path}` is damaged: {name} ({size} bytes) differs from {MANIFEST}. {remedy}"
                )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return (
            f"`{path}` is damaged: {name} cannot be read or compared with {MANIFEST} ({error}). "
            f"{remedy}"
        )
    return None


def verify(directory: str | os.PathLike) -> None:
    """Raise [`CheckpointError`] unless every file of a checkpoint matches its manifest."""
    damage = find_damage(directory)
    if damage is not None:
        raise CheckpointError(damage)


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """Directories named as checkpoints, the latest step first."""
    paths = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    numbered = [
        (path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-"), path)
        for path in paths
        if path.is_dir()
    ]
    by_step = [(int(number), path) for number, path in numbered if number.isdecimal()]
    return [path for _, path in sorted(by_step, reverse=True)]


def latest_valid_checkpoint(output_dir: str | os.PathLike) -> Path:
    """The latest checkpoint that passes verification. Damaged ones are kept, with a warning."""
    restore_replaced(output_dir)
    candidates = checkpoints(output_dir)
    for path in candidates:
        damage = find_damage(path)
        if damage is None:
            return path
        logger.warning("%s Falling back to an older checkpoint.", damage)
    if candidates:
        damaged = f" ({len(candidates)} are damaged)"
    else:
        damaged = ""
    raise CheckpointError(
        f"`{output_dir}` has no checkpoint to resume from{damaged}; restore one, name another, or "
        "call `train()` without `resume_from_checkpoint`."
    )


def rotate(latest: Path, limit: int | None, best: str | None, validity: dict[Path, bool]) -> None:
    """Delete checkpoints beyond `limit`, damaged and old ones first, never the latest or the
    best."""
    candidates = checkpoints(latest.parent)
    if limit is None or limit <= 0 or len(candidates) <= limit:  # as in the Trainer
        return
    # a cache: verification reads every byte
    validity |= {path: find_damage(path) is None for path in candidates if path not in validity}
    kept = {latest.resolve(), Path(best or latest).resolve()}
    others = [path for path in candidates if path.resolve() not in kept]
    others.sort(key=lambda path: validity[path], reverse=True)  # which keeps the order of steps
    for path in others[max(limit - (len(candidates) - len(others)), 0) :]:
        shutil.rmtree(path, ignore_errors=True)
        del validity[path]
