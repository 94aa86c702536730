"""Write docs/fields.md, the table of all fields of `PPOConfig`: `python docs/fields.py`."""

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path

from transformers import TrainingArguments

from trl_ppo_ext.config import _UNSUPPORTED, PPOConfig
from trl_ppo_ext.trl_fields import NO_EFFECT

PAGE = Path(__file__).with_suffix(".md")
# first field of each part
PARTS = {
    "learning_rate": "Changed defaults of the Trainer",
    "model_init_kwargs": "Model",
    "shuffle_dataset": "Prompts and sampling",
    "reward_weights": "Rewards",
    "num_ppo_epochs": "Updates, KL and critic",
    "offload_rollout": "Memory, failures and logs",
}
HEAD = """# All fields of `PPOConfig`

`docs/fields.py` writes this page from the code. `None` means a default that depends on other fields, or
none; the description says which. [Hyperparameters](hyperparameters.md) says which fields to change first.
"""
INHERITED = """
## Inherited from the Trainer

These are the fields of transformers {version}. Its [documentation][args] describes them in full.

[args]: https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments

| field | default | |
|---|---|---|
"""


def cell(text: str) -> str:
    """Text in one line of a table."""
    text = re.sub(r"\[`~?(?:[\w.]*\.)?(\w+)`\]", r"`\1`", text)  # names in docstrings
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def default(field: Field) -> str:
    """Default of a field as code."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return f"`{getattr(value, 'value', value)!r}`"


def page(version: str) -> str:
    """The page, for a version of transformers."""
    docs = re.findall(r"^ {8}(\w+) \(`(.*?)`.*?\):(.*\n(?: {12}.*\n)*)", PPOConfig.__doc__ or "", re.MULTILINE)
    described = {name: (kind, text) for name, kind, text in docs}
    lines, inherited = [HEAD.rstrip("\n")], [INHERITED.format(version=version).rstrip("\n")]
    own = [name for name in PPOConfig.__annotations__ if name in PPOConfig.__dataclass_fields__]
    for name in own:
        if name in PARTS:
            lines += ["", f"## {PARTS[name]}", "", "| field | type | default | |", "|---|---|---|---|"]
        kind, text = described[name]
        lines.append(f"| `{name}` | `{kind}` | {default(PPOConfig.__dataclass_fields__[name])} | {cell(text)} |")
    trainer = {field.name for field in fields(TrainingArguments)}
    of_trl = [
        "",
        "## TRL's names",
        "",
        "[Coming from GRPO](from_grpo.md) and [from TRL's PPO](from_trl_ppo.md) explain them.",
        "",
        "| field | |",
        "|---|---|",
    ]
    idle = []
    for field in fields(PPOConfig):
        if field.metadata.get("help") == NO_EFFECT:
            idle.append(f"`{field.name}`")
        elif field.init and field.name not in trainer and field.name not in own:
            of_trl.append(f"| `{field.name}` | {cell(str(field.metadata.get('help', '')))} |")
        elif field.init and field.name not in own:
            text = re.split(r"(?<=\.)\s", str(field.metadata.get("help", "")).strip())[0]
            if field.name in _UNSUPPORTED:
                text = f"**Not supported:** {_UNSUPPORTED[field.name]}."
            inherited.append(f"| `{field.name}` | {default(field)} | {cell(text)} |")
    of_trl += ["", f"{NO_EFFECT[:-1]}: {', '.join(idle)}."]
    return "\n".join([*lines, *of_trl, *inherited]) + "\n"


if __name__ == "__main__":
    from transformers import __version__

    PAGE.write_text(page(__version__), encoding="utf-8")
