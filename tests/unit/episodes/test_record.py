"""Answers on disk: a resumed run takes them in place of asking again."""

import random
import threading

import pytest
from scripted import call, player_of, rows_of

from trl_ppo_ext import StepResult
from trl_ppo_ext.episodes.record import ANSWERS, Record, forget, void_errors
from trl_ppo_ext.rewards import RewardError, ScoringBatch


class Killed(BaseException):
    """End of a process, in a test."""


def recording(tmp_path, turns, rows, tools=None, factory=None, **settings):
    disk = {"output_dir": str(tmp_path), "process_index": 0, "save_strategy": "steps"}
    return player_of(turns, rows, tools, factory, **disk | settings)


def dies(player, call):
    """Let a player end before its turn of this number."""
    generate = player.generator.generate

    def dying(*args, **kwargs):
        if len(player.generator.calls) == call:
            raise Killed
        return generate(*args, **kwargs)

    player.generator.generate = dying
    return player


asked = []


def draw(key: str) -> str:
    """
    Draw a number.

    Args:
        key: Of the question.
    """
    asked.append(key)
    if key == "broken":
        raise RuntimeError(f"no luck {random.SystemRandom().random()}")
    return StepResult(str(random.SystemRandom().random()), reward=random.SystemRandom().random())


class Dice:
    """Environment with a state, whose answers are random."""

    fails = False

    def reset(self, **row):
        self.rolls = []

    def roll(self, key: str) -> str:
        """
        Roll a dice.

        Args:
            key: Of the roll.
        """
        self.rolls.append(key)
        return str(random.SystemRandom().random())

    def get_reward(self):
        asked.append("reward")
        if self.fails:
            raise OSError("connection lost")
        return float(len(self.rolls)) + random.SystemRandom().random()


TURNS = {
    "Q1": [call("draw", key="a"), call("draw", key="b") + "\n" + call("broken"), "done"],
    "Q2": [call("draw", key="c"), call("draw", key="broken"), call("draw", key="d"), "done"],
}


def messages_of(episodes):
    return [episode.messages for episode in episodes]


def test_recorded_answers_of_tools_are_not_asked_again(tmp_path):
    rows = rows_of("Q1", "Q2")
    asked.clear()
    with pytest.raises(Killed):
        dies(recording(tmp_path, TURNS, rows, [draw]), 2).play(rows, [0, 0], 4)
    assert sorted(asked) == ["a", "b", "broken", "c"]
    resumed = recording(tmp_path, TURNS, rows, [draw])
    first = resumed.play(rows, [0, 0], 4)
    assert sorted(asked) == ["a", "b", "broken", "c", "d"]
    again = recording(tmp_path, TURNS, rows, [draw]).play(rows, [0, 0], 4)
    assert messages_of(again) == messages_of(first) and len(asked) == 5
    for episode, other in zip(first, again):
        assert episode.rewards == other.rewards and episode.failed_calls == other.failed_calls
        assert episode.ids == other.ids and len(episode.rewards) >= 2
    recording(tmp_path, TURNS, rows, [draw]).play(rows, [0, 0], 6)  # another rollout
    recording(tmp_path, TURNS, rows, [draw]).play(rows, [0, 0])  # an evaluation
    assert len(asked) == 15


def test_other_transcript_is_asked_anew(tmp_path):
    rows = rows_of("Q1", "Q2")
    recording(tmp_path, TURNS, rows, [draw]).play(rows, [0, 0], 0)
    asked.clear()
    other = TURNS | {"Q1": [call("draw", key="x"), call("draw", key="b"), "done"]}
    recording(tmp_path, other, rows, [draw]).play(rows, [0, 0], 0)
    assert asked == ["x", "b"]


def test_environment_runs_recorded_turns_again_for_its_state(tmp_path):
    turns = {"Q": [call("roll", key=f"{n}") for n in range(3)] + ["done"]}
    rows = rows_of("Q")
    with pytest.raises(Killed):
        dies(recording(tmp_path, turns, rows, factory=Dice), 2).play(rows, [0], 0)
    player = recording(tmp_path, turns, rows, factory=Dice)
    episodes = player.play(rows, [0], 0)
    assert episodes[0].environment.rolls == ["0", "1", "2"]
    again = recording(tmp_path, turns, rows, factory=Dice)
    assert messages_of(again.play(rows, [0], 0)) == messages_of(episodes)


class Secretive(Dice):
    """Environment with a text that critic or reference reads."""

    def privileged_state(self):
        asked.append("state")
        return "seven"


def test_recorded_privileged_state_is_not_asked_again(tmp_path):
    """It changes no state, so the environment is not run for it, as it is for its turns."""
    turns = {"Q": [call("roll", key="1"), "done"]}
    rows = rows_of("Q")
    shown = {"reference_prompt": "privileged_state"}
    asked.clear()
    for _ in range(2):
        player = recording(tmp_path, turns, rows, factory=Secretive, **shown)
        [episode] = player.play(rows, [0], 0)
        assert episode.other_prompts and asked.count("state") == 1


def rewards_of(player, rows):
    episodes = player.play(rows, [0], 0)
    batch = ScoringBatch(["Q"], [""], [x.completion_ids for x in episodes], episodes=episodes)
    return player.environments.rewards[0].score(batch).result(10)[0]


def test_recorded_rewards_are_not_asked_again(tmp_path):
    turns = {"Q": [call("roll", key="0"), "done"]}
    rows = rows_of("Q")
    asked.clear()
    first, again = (
        rewards_of(recording(tmp_path, turns, rows, factory=Dice), rows) for _ in range(2)
    )
    assert first == again and asked == ["reward"]


def test_errors_are_recorded_until_they_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Dice, "fails", True)
    turns = {"Q": [call("roll", key="0"), "done"]}
    rows = rows_of("Q")
    asked.clear()
    first, again = (
        rewards_of(recording(tmp_path, turns, rows, factory=Dice), rows) for _ in range(2)
    )
    assert (
        isinstance(again, RewardError)
        and str(first) == str(again)
        and "OSError: connection lost" in str(again)
    )
    assert asked == ["reward"]
    void_errors(str(tmp_path), rank=0)
    monkeypatch.setattr(Dice, "fails", False)
    assert 1 < rewards_of(recording(tmp_path, turns, rows, factory=Dice), rows)[-1][1] < 2


def test_timeout_of_a_turn_is_recorded(tmp_path):
    class Slow:
        played = 0

        def reset(self, row, seed):
            return " go"

        def step(self, text):
            Slow.played += 1
            threading.Event().wait(0.2)

    rows = rows_of("Q")
    for _ in range(2):
        player = recording(tmp_path, {"Q": ["x"]}, rows, factory=Slow, environment_timeout=0.02)
        assert (
            str(player.play(rows, [0], 0)[0].error) == "no result within environment_timeout=0.02 s"
        )
    assert Slow.played == 1


def test_line_that_a_kill_cut_is_asked_again(tmp_path):
    rows = rows_of("Q1")
    recording(tmp_path, TURNS, rows, [draw]).play(rows, [0], 0)
    path = tmp_path / ANSWERS / "0-0.jsonl"
    complete = path.read_text()
    # the first call of a tool is there, its turn is cut
    path.write_text(complete[: complete.index("turn") + 30])
    asked.clear()
    for _ in range(2):
        recording(tmp_path, TURNS, rows, [draw]).play(rows, [0], 0)
    assert asked == ["b"]


def test_answers_are_kept_until_a_checkpoint_has_them(tmp_path):
    rows = rows_of("Q1")
    for step in (0, 2, 10):
        recording(tmp_path, TURNS, rows, [draw]).play(rows, [0], step)
    other = recording(tmp_path, TURNS, rows, [draw], process_index=1)
    other.play(rows, [0], 2)
    forget(str(tmp_path), rank=0, before=10)
    assert sorted(x.name for x in (tmp_path / ANSWERS).iterdir()) == ["10-0.jsonl", "2-1.jsonl"]
    recording(tmp_path, TURNS, rows, [draw], save_strategy="no").play(rows, [0], 12)
    assert sorted(x.name for x in (tmp_path / ANSWERS).iterdir()) == ["12-0.jsonl", "2-1.jsonl"]


def test_record_of_a_long_answer_is_bounded(tmp_path):
    def flood() -> str:
        """Flood."""
        return "x" * 10_000_000

    rows = rows_of("Q")
    player = recording(tmp_path, {"Q": [call("flood")]}, rows, [flood], max_completion_length=100)
    (episode,) = player.play(rows, [0], 0)
    assert episode.ending == "cut" and (tmp_path / ANSWERS / "0-0.jsonl").stat().st_size < 20_000


# ---- secrets in errors ----


class Leaking:
    """Environment and tool whose errors hold a password."""

    def reset(self, **row):
        self.rewards = []

    def query(self, key: str) -> str:
        """
        Query.

        Args:
            key: Of the question.
        """
        raise ConnectionError(
            f"{key}: cannot connect to postgresql://admin:hunter2@db/x, password=hunter2"
        )

    def get_reward(self):
        raise ConnectionError("no reward from db; api_key: hunter2")


def test_errors_of_tools_and_environments_hide_secrets(tmp_path):
    rows = rows_of("Q")
    player = recording(tmp_path, {"Q": [call("query", key="a"), "done"]}, rows, factory=Leaking)
    (episode,) = player.play(rows, [0], 0)
    batch = ScoringBatch(["Q"], [""], [episode.completion_ids], episodes=[episode])
    failures = player.environments.rewards[0].score(batch).result(10)
    assert "a: cannot connect to postgresql://***@db/x" in episode.messages[1]["content"]
    assert (
        "no reward from db" in str(failures) and "hunter2" not in f"{episode.messages} {failures}"
    )
    assert "hunter2" not in player.tokenizer.decode(episode.ids)
    recorded = "".join(path.read_text() for path in (tmp_path / ANSWERS).iterdir())
    assert "cannot connect" in recorded and "no reward" in recorded and "hunter2" not in recorded


# ---- runs of others


def playing(tmp_path, run, rows=None):
    rows = rows or rows_of("Q1")
    player = recording(tmp_path, TURNS, rows, [draw])
    player.run = run
    return player.play(rows, [0], 0)


def test_answers_to_a_run_of_other_settings_are_asked_anew(tmp_path):
    first = playing(tmp_path, "this run")
    asked.clear()
    assert playing(tmp_path, "this run")[0].messages == first[0].messages and not asked
    other = playing(tmp_path, "a stranger's")
    assert asked and other[0].messages != first[0].messages
    asked.clear()
    assert playing(tmp_path, "a stranger's")[0].messages == other[0].messages and not asked
    # both are there
    assert playing(tmp_path, "this run")[0].messages == first[0].messages and not asked


def test_errors_are_void_whichever_run_wrote_last(tmp_path):
    path = tmp_path / ANSWERS / "0-0.jsonl"
    Record(path, run="this run").add("k", ValueError("server down"))
    Record(path, run="another").add("k", 1)
    assert str(Record(path, run="this run").answers["k"]) == "server down"
    void_errors(str(tmp_path), 0)
    assert not Record(path, run="this run").answers and Record(path, run="another").answers


def test_answers_without_a_run_are_those_of_no_run(tmp_path):
    """Those of a version that did not record the run."""
    playing(tmp_path, "")
    asked.clear()
    playing(tmp_path, "this run")
    assert asked


@pytest.mark.parametrize(
    "name", ["notes-0.jsonl", "-0.jsonl", "1.5-0.jsonl", "copy of 2-0.jsonl", "3-1-0.jsonl"]
)
def test_files_of_others_beside_answers_stay(tmp_path, name):
    playing(tmp_path, "this run")
    (tmp_path / ANSWERS / name).write_text("mine")
    void_errors(str(tmp_path), 0)
    forget(str(tmp_path), rank=0, before=10)
    assert [path.name for path in (tmp_path / ANSWERS).iterdir()] == [name]
    assert (tmp_path / ANSWERS / name).read_text() == "mine"
