"""The recipe's episodes, played by the real engine."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "scienceworld"
sys.path.append(str(RECIPE))
pytestmark = pytest.mark.slow
# `recipes` may be a path, whose folder has the same name
pytest.importorskip(
    "scienceworld.scienceworld", reason="needs the package, see `make test-environments`"
)
from science_world import TASKS, TURNS, ScienceWorld, rows, solution  # noqa: E402


@pytest.fixture(scope="module")
def episodes():
    return rows("dev", 2)


def play(row, commands):
    """All that an episode shows and pays, until it ends."""
    played = ScienceWorld()
    steps = [(played.reset(row, 0), 0.0, False)]
    for command in commands:
        steps.append(played.step(command))
        if steps[-1][2]:
            break
    return played, steps


def way(row):
    return solution(row["task"], row["variation"])


def test_way_of_the_engine_wins_and_earns_one(episodes):
    for row in episodes:
        played, steps = play(row, way(row))
        assert played.won and steps[-1][2]
        assert sum(reward for _, reward, _ in steps) == pytest.approx(1)
        assert [done for _, _, done in steps[:-1]] == [False] * (len(steps) - 1)


def test_wrong_animal_ends_the_episode_and_takes_nothing_back(episodes):
    row = next(row for row in episodes if row["task"] == TASKS[0])
    *moves, right = way(row)
    _, steps = play(row, moves)
    names = steps[-1][0].partition("You see: ")[2].partition(".")[0].split(", ")
    animals = [x for x in names if x.startswith("baby ") or x.endswith(" egg")]
    wrong = next(x for x in animals if x != right.removeprefix("focus on "))
    played, steps = play(row, [*moves, f"focus on {wrong}"])
    assert not played.won and steps[-1][1:] == (0.0, True)
    assert 0 < sum(reward for _, reward, _ in steps) < 1


def test_other_commands_of_the_engine_take_a_turn_and_change_nothing(episodes):
    others = ["reset task", "", "wait1", "go to outside\nlook around", "inventory", "teleport to x"]
    played, steps = play(episodes[0], others)
    assert [step[1:] for step in steps[1:]] == [(0.0, False)] * len(others)
    assert {step[0] for step in steps[1:]} == {"You cannot do that."} and not played.won
    _, steps = play(episodes[0], ["look around"] * 2 * TURNS)
    assert len(steps) == 1 + TURNS and steps[-1][2]


def test_ambiguous_command_is_cancelled():
    """The engine would wait for a number, and take the next command for one."""
    answers = []
    for row in rows("dev", 8):
        first = way(row)[0]
        _, steps = play(row, ["look at door", first])
        answers.append(steps[1][0])
        assert steps[2][0].startswith(("You move to", "You focus on"))
    assert any(x.startswith("Ambiguous request") for x in answers)


def test_episodes_in_one_process_do_not_see_each_other(episodes):
    """Neither when they take turns, nor in threads."""
    alone = [play(row, way(row))[1] for row in episodes]
    with ThreadPoolExecutor(8) as threads:
        in_threads = list(threads.map(lambda row: play(row, way(row))[1], episodes * 4))
    assert in_threads == alone * 4
    worlds = [ScienceWorld() for _ in episodes]
    steps = [[(world.reset(row, 0), 0.0, False)] for world, row in zip(worlds, episodes)]
    ways = [way(row) for row in episodes]
    for turn in range(TURNS):
        for world, commands, seen in zip(worlds, ways, steps):
            if turn < len(commands):
                seen.append(world.step(commands[turn]))
    assert steps == alone


def test_splits_share_no_episode():
    splits = [
        {(row["task"], row["variation"]) for row in rows(split)}
        for split in ("train", "dev", "test")
    ]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 375
