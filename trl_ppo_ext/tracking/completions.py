"""Completions as text, and as a table on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..ppo.rollouts import Samples

LONGEST = 20_000  # characters of a cell; more would flood the terminal
_KEPT = set("\n\t\u200c\u200d")  # the last two join letters and emoji


def as_text(entry: Any) -> str:
    """A prompt or completion as text, with a line per message."""
    if isinstance(entry, list) and all(isinstance(message, dict) for message in entry):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in entry)
    return str(entry)


def printable(text: str, encoding: str = "utf-8") -> str:
    """Escape control characters, which a terminal would execute, and characters that it cannot encode."""
    kept, cut = text[:LONGEST], len(text) - LONGEST
    shown = "".join(c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode() for c in kept)
    shown = shown.encode(encoding, "backslashreplace").decode(encoding)
    return shown if cut <= 0 else f"{shown}... ({cut} more characters)"


def print_completions(samples: Samples, reward_names: list[str], step: int, rows: int) -> None:
    """Print prompts, completions and their scores."""
    console = Console()

    def cell(entry: Any) -> Text:
        return Text(printable(as_text(entry), console.encoding))  # `Text` is never parsed as markup

    table = Table(title=f"Step {step}", show_lines=True, expand=True)
    table.add_column("prompt", style="bright_yellow")
    table.add_column("completion", style="bright_green")
    for name in [*reward_names, "score"]:
        table.add_column(cell(name), justify="right", style="bold cyan")
    for name in samples.extra:
        table.add_column(cell(name))
    for row in range(min(rows, len(samples.batch))):
        scores = [*samples.scored.rewards[row].tolist(), samples.scored.totals[row].item()]
        texts = [samples.batch.prompts[row], samples.batch.completions[row]]
        extra = [values[row] for values in samples.extra.values()]
        table.add_row(*map(cell, texts), *(f"{score:.2f}" for score in scores), *map(cell, extra))
    console.print(table)
