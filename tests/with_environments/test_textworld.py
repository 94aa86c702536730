"""The recipe's games, made by the real engine, and its chat template."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny import byte_tokenizer
from trl.chat_template_utils import parse_response

ROOT = Path(__file__).parents[2]
FOLDERS = "recipes/textworld", "recipes/smollm2", "benchmarks/learning"
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
pytestmark = pytest.mark.slow
pytest.importorskip("textworld.generator", reason="needs the package, see `make test-environments`")
from agents import as_tool, costly  # noqa: E402
from player import RESPONSES, TEMPLATE  # noqa: E402
from text_games import TextWorld, rows, walkthrough  # noqa: E402

SIZE = (2, 3, 3)


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    return rows(range(2), (SIZE,), str(tmp_path_factory.mktemp("games")))


def commands(row):
    return [x["content"] for x in walkthrough(row) if x["role"] == "assistant"]


def test_walkthrough_wins_with_a_reward_for_each_command(games):
    for row in games:
        played = TextWorld()
        played.reset(row, 0)
        *rewards, (_, last, done) = [played.step(command) for command in commands(row)]
        assert [reward for _, reward, _ in rewards] == [pytest.approx(1 / played.steps)] * len(
            rewards
        )
        assert played.won and done and last == pytest.approx(1 + 1 / played.steps)


def test_inadmissible_command_takes_a_turn_and_reaches_no_engine(games, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    played = TextWorld()
    first = played.reset(games[0], 0)
    steps = [
        played.step(text)
        for text in ("save", "", "two\nlines", "restart", "quit", "examine nothing")
    ]
    listed = first.partition("\n")[2].partition("\n")[2]
    assert [x[:2] for x in steps] == [(f"You cannot do that.\n{listed}", 0.0)] * 6
    assert [x[2] for x in steps] == [False] * 5 + [True] and not list(tmp_path.iterdir())


def test_games_started_in_threads_equal_those_started_in_turn(games):
    def start(number):
        return TextWorld().reset(games[number % 2], 0)

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(start, range(64))) == [start(number) for number in range(64)]


def test_cost_is_subtracted_from_the_reward_of_each_command(games):
    plain = TextWorld()
    paid = costly(TextWorld, 0.05)()
    tool = as_tool(costly(TextWorld, 0.05))()
    plain.reset(games[0], 0)
    paid.reset(games[0], 0)
    tool.reset(**games[0])
    texts = ["no command", *commands(games[0])]
    rewards = [(plain.step(text)[1], paid.step(text)[1]) for text in texts]
    for text in texts:
        tool.command(text)
    assert [x - 0.05 for x, _ in rewards] == pytest.approx([x for _, x in rewards])
    assert tool.get_reward() == pytest.approx(sum(x for _, x in rewards))
    assert paid.won and tool.won and costly(TextWorld, 0.0) is TextWorld


def test_tools_play_the_same_episode(games):
    played = TextWorld()
    tool = as_tool(TextWorld)()
    assert tool.reset(**games[0]) == played.reset(games[0], 0)
    *seen, last = [tool.command(command) for command in commands(games[0])]
    assert (
        seen == [played.step(command)[0] for command in commands(games[0])][:-1]
        and len(last) > 1000
    )
    assert tool.won and tool.get_reward() == pytest.approx(2)


def test_turns_and_tool_calls_are_rendered_to_the_same_tokens(games):
    text = byte_tokenizer()
    text.chat_template = TEMPLATE
    text.response_template = RESPONSES
    messages = walkthrough(games[0])
    as_calls = []
    for message in messages:
        as_calls.append(
            message | ({"role": "tool", "name": "command"} if message["role"] == "user" else {})
        )
        if message["role"] == "assistant":
            prefix = text.apply_chat_template(
                as_calls[:-1], add_generation_prompt=True, return_dict=False
            )
            as_calls[-1] = parse_response(
                text, text(f"{message['content']}<|im_end|>")["input_ids"], prefix=prefix
            )
            assert as_calls[-1]["tool_calls"][0]["function"] == {
                "name": "command",
                "arguments": {"command": message["content"]},
            }
    plain, called = (text.apply_chat_template(x, tokenize=False) for x in (messages, as_calls))
    assert plain == called
