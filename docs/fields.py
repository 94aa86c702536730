"""Write docs/fields.md, the tables of fields of `PPOConfig`: `python docs/fields.py`."""

import re
from dataclasses import MISSING, Field, fields
from inspect import formatannotation
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from transformers import TrainingArguments

from trl_ppo_ext.config import OPTIONS, PPOConfig
from trl_ppo_ext.trl_names import NO_EFFECT, TABLES

PAGE = Path(__file__).with_suffix(".md")
# first field of each part
PARTS = {
    "learning_rate": "Changed defaults of the Trainer",
    "model_init_kwargs": "Model",
    "shuffle_dataset": "Prompts and sampling",
    "reward_weights": "Rewards",
    "num_ppo_epochs": "Updates, KL and critic",
    "resume_from_checkpoint": "Failures and logs",
}
HEAD = """# All fields of `PPOConfig`

`docs/fields.py` writes this page from the code. `None` means a default that depends on other fields, or
none; the description says which. [Set up a run](set_up.md#what-to-turn-first) says which fields to change first.
"""
INHERITED = """
## Inherited from the Trainer

All other fields of `TrainingArguments` keep their meaning; transformers [documents][args] them. Unsupported are, in
version {version}:

[args]: https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments

| field | reason |
|---|---|
"""


def cell(text: str) -> str:
    """Text in one line of a table."""
    text = re.sub(r"\[`~?(?:[\w.]*\.)?(\w+)`\]", r"`\1`", text)  # names in docstrings
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def default(field: Field) -> str:
    """Default of a field as code."""
    if field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        value = field.default
    return f"`{getattr(value, 'value', value)!r}`"


def kind(config: type, name: str) -> str:
    """Type of a field, without None."""
    hint = get_type_hints(config)[name]
    types = [
        x
        for x in (get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint])
        if x is not NoneType
    ]
    if get_origin(types[0]) is dict:  # JSON on a command line
        types = [dict]
    words = [
        ", ".join(map(repr, get_args(x))) if get_origin(x) is Literal else formatannotation(x)
        for x in types
    ]
    return cell(" or ".join(words))


def row(config: type, name: str, shown: str) -> str:
    """Row of a field of our own."""
    entry = config.__dataclass_fields__[name]
    return (
        f"| `{shown}` | `{kind(config, name)}` | {default(entry)} | {cell(entry.metadata['help'])} "
        "|"
    )


def page(version: str) -> str:
    """The page, for a version of transformers."""
    lines = [HEAD.rstrip("\n")]
    inherited = [INHERITED.format(version=version).rstrip("\n")]
    own = [name for name in PPOConfig.__annotations__ if name in PPOConfig.__dataclass_fields__]
    for name in own:
        if name in PARTS:
            lines += [
                "",
                f"## {PARTS[name]}",
                "",
                "| field | type | default | |",
                "|---|---|---|---|",
            ]
        lines.append(row(PPOConfig, name, name))
    for name, options in OPTIONS.items():
        lines += ["", f"## Keys of `{name}`", "", "| key | type | default | |", "|---|---|---|---|"]
        lines += [row(options, entry.name, f'"{entry.name}"') for entry in fields(options)]
    trainer = {field.name for field in fields(TrainingArguments)}
    of_trl = [
        "",
        "## TRL's names",
        "",
        "[Coming from GRPO](from_grpo.md) and [from TRL's PPO](from_trl_ppo.md) explain them. The "
        "last ones",
        "are of TRL 0.11 and of transformers before 5.",
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
        elif field.init and field.name not in own and field.name in TABLES["unsupported"]:
            inherited.append(f"| `{field.name}` | {cell(TABLES['unsupported'][field.name])} |")
    of_trl += ["", f"{NO_EFFECT[:-1]}: {', '.join(idle)}."]
    return "\n".join([*lines, *of_trl, *inherited]) + "\n"


if __name__ == "__main__":
    from transformers import __version__

    PAGE.write_text(page(__version__), encoding="utf-8")
