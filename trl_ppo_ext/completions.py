"""A table of completions on the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .samples import Samples


def _plain(entry: str | list) -> Text:
    """Text as it is: what a model wrote is never read as markup."""
    if isinstance(entry, str):
        return Text(entry)
    return Text("\n".join(f"{message['role']}: {message['content']}" for message in entry))


def print_completions(samples: Samples, reward_names: list[str], step: int, rows: int) -> None:
    """Print prompts, completions and their scores.

    Args:
        samples ([`Samples`]): What was sampled.
        reward_names (`list[str]`): Names of the rewards.
        step (`int`): Optimizer step, for the title.
        rows (`int`): How many to print.
    """
    table = Table(title=f"Step {step}", show_lines=True, expand=True)
    table.add_column("prompt", style="bright_yellow")
    table.add_column("completion", style="bright_green")
    for name in [*reward_names, "score"]:
        table.add_column(Text(name), justify="right", style="bold cyan")
    for name in samples.extra:
        table.add_column(Text(name))
    for row in range(min(rows, len(samples.batch))):
        scores = [*samples.scored.rewards[row].tolist(), samples.scored.totals[row].item()]
        texts = [_plain(samples.batch.prompts[row]), _plain(samples.batch.completions[row])]
        extra = [Text(str(values[row])) for values in samples.extra.values()]
        table.add_row(*texts, *(f"{score:.2f}" for score in scores), *extra)
    Console().print(table)
