"""A model card to publish: what a run of the demo has learned, for people who have not seen it."""

from html import escape
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from huggingface_hub import ModelCard
from matplotlib import pyplot

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
METADATA = {
    "finetuned_from": BASE,
    "license": "apache-2.0",
    "language": "en",
    "model_name": "SmolLM2-135M-reviews-PPO",
}
CURVE = "reward.png"  # beside the card
CURVES = {
    "reward": "reward model (optimized)",
    "monitor/textblob/mean": "TextBlob (only measured)",
}
ABOUT = """
## What it does

It continues openings such as "The hotel was" with a positive review. It is a demonstration of PPO, not a writer of
reviews for use: what it says about things is invented.

| 160 reviews of things that were not trained, at temperature 0.7 | base | with this adapter |
|---|---:|---:|
{rows}

![Reward over completions]({curve})

{samples}

## License and data

The base is {base}, licensed Apache-2.0. The adapter was trained on
weights that were converted from a 4-bit GGUF file of it, so results on the original weights differ. The prompts are
openings that were written for this demonstration. The reward model was trained on reviews that the base itself wrote,
scored by VADER. The judge is TextBlob. No text of other people was used. This adapter is licensed Apache-2.0.
"""


def draw(history: list[dict], completions_per_step: float, folder: Path) -> None:
    """Draw the rewards of a run over its completions, beside the card."""
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    for name, label in CURVES.items():
        points = [(row["step"], row[name]) for row in history if name in row]
        seen = [step * completions_per_step for step, _ in points]
        axes.plot(seen, [value for _, value in points], marker="o", label=label)
    axes.set_xlabel("completions")
    axes.set_ylabel("mean score")
    axes.legend()
    figure.savefig(folder / CURVE, dpi=120)
    pyplot.close(figure)


def quote(text: str) -> str:
    """Sampled text as a quotation of Markdown, on one line and without HTML."""
    return f"> {escape(' '.join(text.split()), quote=False)}"


def write_card(folder: Path, rows: dict[str, tuple[str, str]], pairs: list[tuple]) -> Path:
    """Complete the card that the trainer wrote in a folder.

    `rows` are measurements of base and adapter by their name, and `pairs` are prompts with both
    completions.
    """
    table = "\n".join(f"| {name} | {before} | {after} |" for name, (before, after) in rows.items())
    samples = [
        f'"{prompt}", base and adapter:\n\n{quote(before)}\n\n{quote(after)}'
        for prompt, before, after in pairs
    ]
    about = ABOUT.format(rows=table, curve=CURVE, samples="\n\n".join(samples), base=BASE)
    path = folder / "README.md"
    card = ModelCard.load(path)
    introduction, usage = card.text.split("\n## Usage", 1)
    card.text = f"{introduction.rstrip()}\n{about}\n## Usage{usage}"
    card.save(path)
    return path
