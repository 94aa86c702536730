"""Completions as the page shows them: as many as there is room for, evenly over the steps."""

import json
import math
from functools import partial
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from .reading import Run, Sheet

ROOM = 1_500_000  # characters of all completions in a page
MOST_SHEETS = 40  # of a run


def safe_json(value: Any) -> Markup:
    """JSON that may stand in a script tag: `<`, `>`, `&` and `'` are escaped, whatever the text says."""
    return htmlsafe_json_dumps(value, dumps=partial(json.dumps, separators=(",", ":"), allow_nan=False))


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(f"{value:.5g}") if is_number else None


def _scores(row: dict[str, Any], key: str) -> list[list[Any]]:
    scores = row.get(key)
    return [[str(name), _number(value)] for name, value in scores.items()] if isinstance(scores, dict) else []


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """A row with what the page shows, of the types that it expects."""
    extra = row.get("extra")
    return {
        "prompt": str(row.get("prompt", "")),
        "completion": str(row.get("completion", "")),
        "score": _number(row.get("score")),
        "rewards": _scores(row, "rewards"),
        "monitors": _scores(row, "monitors"),
        "kl": _number(row.get("kl")),
        "tokens": _number(row.get("tokens")),
        "ended": row.get("ended") is not False,
        "extra": [[str(name), str(text)] for name, text in extra.items()] if isinstance(extra, dict) else [],
    }


def _evenly(sheets: list[Sheet], most: int) -> list[Sheet]:
    """Some of the sheets, the first and the last among them."""
    if len(sheets) <= most:
        return sheets
    gaps = max(most - 1, 1)
    return [sheets[round(index * (len(sheets) - 1) / gaps)] for index in range(most)]


def chosen_sheets(runs: list[Run], room: int = ROOM) -> tuple[list[dict[str, Any]], int]:
    """Choose the completions of a page."""
    there = sum(len(run.sheets) for run in runs)
    room //= max(len(runs), 1)
    chosen = []
    for run in runs:
        rows_by_sheet = {sheet[:2]: [_row(row) for row in sheet.rows] for sheet in run.sheets}
        sizes = {key: len(safe_json(rows)) for key, rows in rows_by_sheet.items()}
        most, kept = MOST_SHEETS, _evenly(run.sheets, MOST_SHEETS)
        while most > 2 and sum(sizes[sheet[:2]] for sheet in kept) > room:
            most = max(most * 3 // 4, 2)
            kept = _evenly(run.sheets, most)
        for sheet in kept:
            rows = rows_by_sheet[sheet[:2]]
            while len(rows) > 1 and len(safe_json(rows)) > room / len(kept) and sizes[sheet[:2]] > room / len(kept):
                if sum(sizes[other[:2]] for other in kept) <= room:
                    break
                rows = rows[: len(rows) // 2]
            chosen.append({"run": run.name, "step": sheet.step, "mode": sheet.mode, "rows": rows})
    return chosen, there
