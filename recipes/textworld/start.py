"""SmolLM2-135M-Instruct after a short supervised start on the engine's own walkthroughs.

python recipes/textworld/start.py            # writes runs/SmolLM2-135M-textworld
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "smollm2"))

from player import teach
from text_games import SIZES, rows, walkthrough

SHOWN = 8  # games of each size, which are not played later
START = Path("runs/SmolLM2-135M-textworld")


def start_model() -> str:
    """Path of the model after it was shown walkthroughs, which is done once."""
    if not START.exists():
        teach([walkthrough(row) for row in rows(range(1000, 1000 + SHOWN), SIZES)], START)
    return str(START)


if __name__ == "__main__":
    print(start_model())
