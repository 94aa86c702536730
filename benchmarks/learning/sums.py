"""Long sums, step by step: `chain_sum` of reasoning-gym with 32 terms of two digits, and an answer
of one line per term, of about 400 tokens.

    pip install reasoning-gym gguf

The base does not know the form, so it is first shown sums of other numbers, most of them shorter.
Right are lines that add the next term to the line before.
"""

import random
import re
from functools import cache
from pathlib import Path

from smollm2 import base_model

SHOWN = 320
ROWS = 1024
TERMS = 32
SHORTEST = 8  # of what is shown
WARM = Path(f"runs/SmolLM2-135M-sums-{SHOWN}")
LINE = re.compile(r"(-?\d+) ([+-]) (\d+) = (-?\d+)")


def drawn(number: int, seed: int, terms: int) -> list[dict]:
    """Prompts with their terms."""
    from reasoning_gym import create_dataset

    sums = create_dataset(
        "chain_sum",
        min_terms=terms,
        max_terms=terms,
        min_digits=2,
        max_digits=2,
        size=number,
        seed=seed,
    )
    rows = []
    for row in sums:
        signed = row["metadata"]["expression"].replace("- ", "-").replace("+ ", "")
        numbers = [int(term) for term in signed.split()]
        rows.append({"prompt": row["question"] + "\n", "terms": numbers})
    return rows


def rows(seed: int) -> list[dict]:
    """Prompts of a run."""
    return drawn(ROWS, 1000 + seed, TERMS)


def worked_out(terms: list[int]) -> str:
    """The answer, a line per term."""
    total = terms[0]
    lines = []
    for term in terms[1:]:
        sign = "+" if term >= 0 else "-"
        lines.append(f"{total} {sign} {abs(term)} = {total + term}")
        total += term
    return "\n".join(lines)


def right_lines(text: str, terms: list[int]) -> list[bool]:
    """Whether each line adds the next term to what the line before has reached."""
    reached = terms[0]
    right = []
    for line, term in zip(text.split("\n"), terms[1:]):
        read = LINE.fullmatch(line.strip())
        if read is None:
            right.append(False)
            continue
        start, sign, number, result = read.groups()
        added = int(sign + number)
        right.append(int(start) == reached and added == term and int(result) == reached + term)
        reached = int(result)
    return right


def right(completions: list[str], terms: list[list[int]], **kwargs) -> list[float]:
    """Share of the answer's lines that are right."""
    return [
        sum(right_lines(text, numbers)) / (len(numbers) - 1)
        for text, numbers in zip(completions, terms)
    ]


@cache
def newline() -> int:
    """Token that ends a line."""
    from transformers import AutoTokenizer

    (token,) = AutoTokenizer.from_pretrained(base_model()).encode("\n")
    return token


def by_line(
    completions: list[str], completion_ids: list[list[int]], terms: list[list[int]], **kwargs
) -> list[list[tuple[int, float]]]:
    """What [`right`] scores, each line paid where it ends."""
    paid = []
    for text, ids, numbers in zip(completions, completion_ids, terms):
        ends = [place for place, token in enumerate(ids) if token == newline()] + [len(ids) - 1]
        lines = right_lines(text, numbers)
        paid.append([(end, x / (len(numbers) - 1)) for end, x in zip(ends, lines)])
    return paid


def warm_base() -> str:
    """Path of the model after it was shown examples, which is done once."""
    if not WARM.exists():
        import torch
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        draw = random.Random(0)
        shown = []
        for place in range(SHOWN):
            shown += drawn(1, place, draw.randint(SHORTEST, TERMS))
        data = Dataset.from_list(
            [{"prompt": row["prompt"], "completion": worked_out(row["terms"])} for row in shown]
        )
        args = SFTConfig(
            "runs/sums",
            learning_rate=2e-4,
            num_train_epochs=1,
            per_device_train_batch_size=8,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(base_model(), args=args, train_dataset=data)
        trainer.train()
        part = WARM.with_suffix(".part")  # an interruption leaves no folder that looks complete
        trainer.save_model(part)
        part.rename(WARM)
    return str(WARM)
