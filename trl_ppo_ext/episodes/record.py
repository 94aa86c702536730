"""Answers of tools and environments on disk, which a resumed run takes in place of asking again."""

import hashlib
import json
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from ..redaction import redacted

logger = logging.get_logger(__name__)

# in the output directory: a file per rollout, named by its optimizer step, and rank
ANSWERS = ".answers"


class Answer(NamedTuple):
    """Answer of an environment to a turn of the policy."""

    messages: list[dict[str, Any]] = []  # noqa: RUF012 (never changed); without any, the policy has ended the episode
    reward: float | None = None
    done: bool = False
    truncated: bool = False  # ended by a limit of the environment, not by a final state
    failed: list[bool] = []  # noqa: RUF012 per tool call


def _files(output_dir: str, rank: int) -> dict[int, Path]:
    """Files of a rank by optimizer step."""
    paths = Path(output_dir, ANSWERS).glob(f"*-{rank}.jsonl")
    steps = ((path.name.removesuffix(f"-{rank}.jsonl"), path) for path in paths)
    return {int(step): path for step, path in steps if step.isdecimal()}


def forget(output_dir: str, rank: int, before: int) -> None:
    """Delete the answers of rollouts that are part of a checkpoint."""
    for step, path in _files(output_dir, rank).items():
        if step < before:
            path.unlink(missing_ok=True)


def void_errors(output_dir: str, rank: int) -> None:
    """Let a resumed run ask again where an error has ended the run."""
    for path in _files(output_dir, rank).values():
        with suppress(OSError):
            _append(path, {"errors": "void"})


def _append(path: Path, entry: dict[str, Any]) -> None:
    line = json.dumps(entry, default=float)  # numbers of NumPy and torch
    with open(path, "a", encoding="utf-8") as file:
        # a line break first: the line before may lack its end, if the run was killed
        file.write(f"\n{line}")


class Record:
    """Answers to the episodes of a rollout, which only a run of the same settings takes; without
    a path, none."""

    def __init__(self, path: Path | None, longest: int = 0, run: str = ""):
        self.path = path
        self.run = run  # digest of settings and inputs
        self.is_own = run == ""  # whether the last line about a run is this one's
        self.longest = longest  # characters of a message
        self.answers: dict[str, Any] = {}  # an exception where the environment failed
        self.groups: list[list[int]] = []  # rows that were sampled together, in order
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            entry: Any = None
            with suppress(ValueError):
                entry = json.loads(line)
            match entry:
                case {"run": str(name)}:
                    self.is_own = name == run
                case {"errors": "void"}:  # whichever run wrote last
                    self.answers = {
                        k: x for k, x in self.answers.items() if not isinstance(x, Exception)
                    }
                case _ if not self.is_own:
                    continue
                case {"group": [*rows]}:
                    self.groups.append(rows)
                case {"key": str(key), "error": [name, text]}:
                    self.answers[key] = type(name, (Exception,), {})(text)
                case {"key": str(key), "answer": answer}:
                    self.answers[key] = Answer(*answer)
                case {"key": str(key), "value": value}:
                    self.answers[key] = value

    def add(self, key: str, result: Any) -> None:
        """Append an answer."""
        if self.path is None:
            return
        entry = {"value": result}
        if isinstance(result, Exception):
            entry = {"error": [type(result).__name__, redacted(str(result))]}
        elif isinstance(result, Answer):  # a longer text would not fit, and not be read
            cut = [
                {**message, "content": message["content"][: self.longest]}
                for message in result.messages
            ]
            entry = {"answer": result._replace(messages=cut)}
        self._write({"key": key, **entry})

    def add_group(self, rows: list[int]) -> None:
        """Append the rows of episodes that are sampled next, together."""
        self._write({"group": rows})

    def _write(self, entry: dict[str, Any]) -> None:
        """Append an entry, at once; if that fails, warn and go on."""
        if self.path is None:
            return
        try:
            if not self.is_own:
                _append(self.path, {"run": self.run})
                self.is_own = True
            _append(self.path, entry)
        except (TypeError, ValueError, OSError) as error:
            logger.warning_once(
                f"An answer of a tool or environment cannot be recorded ({error}). If the run is "
                "killed in this rollout, the resumed one asks again."
            )


class Place(NamedTuple):
    """Place in an episode at which something is asked: its row, and all tokens before."""

    record: Record
    row: int = 0
    key: str = ""

    def after(self, ids: list[int]) -> "Place":
        """Place after some tokens. A resumed run that samples others finds no answer there, and asks
        again."""
        if self.record.path is None:
            return self
        digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()
        return self._replace(key=f"row {self.row}, {len(ids)} tokens {digest},")

    async def answer(
        self, part: str, ask: Callable[[], Awaitable[Any]], has_state: bool = False
    ) -> Any:
        """Recorded answer, or a new one.

        With a state, what is asked runs again, and its new answer is ignored.
        """
        key = f"{self.key} {part}"
        answers = self.record.answers
        recorded = answers.get(key)
        if isinstance(recorded, Exception):
            raise recorded
        if key in answers:
            if has_state:
                await ask()
            return recorded
        try:
            result = await ask()
        except Exception as error:
            self.record.add(key, error)
            raise
        self.record.add(key, result)
        return result


NOWHERE = Place(Record(None))
