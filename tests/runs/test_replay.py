"""recipes/replay.py: an episode as it was logged, with the numbers of its turns."""

import json
import re
import sys
from pathlib import Path

import pytest
from runs_of_tiny import rollouts_of, trainer

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from replay import main, replay


def turn(role, text, reward=None, value=None, advantage=None):
    return {"role": role, "text": text, "reward": reward, "value": value, "advantage": advantage}


TURNS = [
    turn("assistant", "look", 0.5, 1.25, -0.75),
    turn("tool", "line\n\x1b[2Jnext"),
    turn("assistant", "done\ud800", -1.0, 0.0, 2.0),
]


@pytest.fixture
def run(tmp_path):
    row = {
        "prompt": "Q",
        "turns": TURNS,
        "score": -0.5,
        "rewards": {"Game": -0.5},
        "kl": None,
        "tokens": 9,
        "ended": True,
    }
    plain = row | {"turns": [turn("", "whole", 1.0)]}
    sheets = [
        ("train", 2, [row | {"prompt": "early"}]),
        ("train", 4, [row, row | {"ended": False}, plain]),
    ]
    begun = {"config": {"gamma": 1.0}} | {
        name: {} for name in ("trainer_config", "environment", "plan")
    }
    entries = [
        {
            "kind": "run",
            "time": 1.0,
            "step": 0,
            "model": None,
            "max_steps": 4,
            "changed": [],
            **begun,
        }
    ]
    for mode, step, rows in [*sheets, ("eval", 4, [row | {"prompt": "held out"}])]:
        entries.append(
            {"kind": "completions", "time": 2.0, "step": step, "mode": mode, "rows": rows}
        )
    (tmp_path / "run_log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(tmp_path)


def test_replay_prints_turns_with_their_numbers(run, capsys):
    main([run])
    assert capsys.readouterr().out.splitlines() == [
        "step 4  row 0  score -0.5  tokens 9",
        "rewards  Game -0.5",
        "",
        "prompt",
        "    Q",
        "",
        "assistant  reward 0.5  value 1.25  advantage -0.75",
        "    look",
        "",
        "tool",
        "    line",
        r"    \x1b[2Jnext",
        "",
        "assistant  reward -1  value 0  advantage 2",
        r"    done\ud800",
    ]


def test_replay_chooses_row_step_and_mode(run):
    assert replay(run, 1).splitlines()[0] == "step 4  row 1  score -0.5  tokens 9  truncated"
    assert "early" in replay(run, 0, step=2) and "held out" in replay(run, 0, mode="eval")
    assert "completion  reward 1\n    whole" in replay(run, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--row", "3"], "`--row` must be from 0 to 2 at step 4, got 3"),
        (["--step", "3"], "`--step` must be one with logged completions, [2, 4], got 3"),
        (["--mode", "test"], "has no completions of mode 'test' in its log yet"),
    ],
)
def test_replay_of_what_was_not_logged_names_what_was(run, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        main([run, *arguments])


def test_replay_of_a_completion_has_its_value_and_advantage(tmp_path):
    built = trainer(tmp_path, max_steps=4)
    seen = rollouts_of(built)
    built.train()
    rollout, samples = seen[-1]
    value = samples.values[1, 0].item()
    advantage = rollout.advantages[1, 0].item()
    score = samples.scored.totals[1].item()
    expected = f"completion  reward {score:.4g}  value {value:.4g}  advantage {advantage:.4g}\n"
    assert expected in replay(str(tmp_path), 1)
