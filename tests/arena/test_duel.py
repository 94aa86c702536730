"""Charts of benchmarks/duel.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import arena
import duel

CURVES = {"PPO": [n / (arena.ROLLOUTS - 1) for n in range(arena.ROLLOUTS)], "GRPO": [0.5] * arena.ROLLOUTS}


def test_chart_begins_at_zero_and_ends_at_the_optimum():
    lines = duel.chart(CURVES).splitlines()
    assert lines[0].startswith(" optimum ┤") and lines[0].rstrip().endswith("●")
    assert lines[duel.HEIGHT - 1].startswith("       0 ┤●")
    assert f"{arena.ROLLOUT * arena.ROLLOUTS:,} completions each    ● PPO 100%    ○ GRPO 50%" in lines[-1]
    assert duel.chart({"PPO": [], "GRPO": []}).endswith("0 completions each    ")
