"""A table of completions on the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..ppo.rollouts import Samples

LONGEST = 20_000  # characters of an entry; more drowns the terminal
_KEPT = set("\n\t\u200c\u200d")  # the last two join letters and emoji


def printable(text: str, encoding: str = "utf-8") -> str:
    """Text that a terminal shows and does not obey: control and escape characters become their codes."""
    kept, cut = text[:LONGEST], len(text) - LONGEST
    shown = "".join(c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode() for c in kept)
    shown = shown.encode(encoding, "backslashreplace").decode(encoding)
    return shown if cut <= 0 else f"{shown}... ({cut} more characters)"


def _plain(entry: str | list, encoding: str) -> Text:
    """Text as it is: what a model wrote is never read as markup."""
    if not isinstance(entry, str):
        entry = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in entry)
    return Text(printable(entry, encoding))


def print_completions(samples: Samples, reward_names: list[str], step: int, rows: int) -> None:
    """Print prompts, completions and their scores."""
    console = Console()
    table = Table(title=f"Step {step}", show_lines=True, expand=True)
    table.add_column("prompt", style="bright_yellow")
    table.add_column("completion", style="bright_green")
    for name in [*reward_names, "score"]:
        table.add_column(_plain(name, console.encoding), justify="right", style="bold cyan")
    for name in samples.extra:
        table.add_column(_plain(name, console.encoding))
    for row in range(min(rows, len(samples.batch))):
        scores = [*samples.scored.rewards[row].tolist(), samples.scored.totals[row].item()]
        written = samples.batch.prompts[row], samples.batch.completions[row]
        texts = [_plain(entry, console.encoding) for entry in written]
        extra = [_plain(str(values[row]), console.encoding) for values in samples.extra.values()]
        table.add_row(*texts, *(f"{score:.2f}" for score in scores), *extra)
    console.print(table)
