"""Published PPO settings: one YAML file of `PPOConfig` fields per paper, with the source of each value."""

from pathlib import Path
from typing import Any

import yaml

PRESETS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def load_preset(name: str) -> dict[str, Any]:
    """Read the fields of a preset."""
    if name not in PRESETS:
        raise ValueError(f"Unknown preset {name!r}; choose one of {', '.join(map(repr, PRESETS))}.")
    return yaml.safe_load(PRESETS[name].read_text(encoding="utf-8"))
