"""Tasks of ScienceWorld about the life span of animals as a plain environment: a reward for each
part of the engine's score.

    python recipes/scienceworld/science_world.py     # plays and prints one episode of each task

`pip install scienceworld` brings the engine, which needs Java 8 or later; nothing else is
downloaded.
"""

import re
import sys
import threading
from functools import cache
from pathlib import Path

from scienceworld import ScienceWorldEnv

TASKS = (
    "lifespan-longest-lived",
    "lifespan-shortest-lived",
    "lifespan-longest-lived-then-shortest-lived",
)
START = Path("runs/SmolLM2-135M-scienceworld")
SHOWN = 8  # variations of each task, which are not played later
SIMPLER = "openDoors"
TURNS = 8  # at most; the engine needs 5
RULES = {
    "role": "system",
    "content": "You play a text game. Answer with one command: go to a place, or focus on an animal.",
}
# the engine has more, among them "reset task", which would pay for the same way again
COMMAND = re.compile(r"(go to|focus on|look at) [\w -]+|look around")
ALWAYS_SEEN = "agent", "air"
# the worlds of all episodes are in one Java process, and episodes are played in threads
_ENGINE = threading.RLock()


@cache
def engine() -> ScienceWorldEnv:
    """The Java process, which starts in some seconds."""
    return ScienceWorldEnv()


class ScienceWorld:
    """An episode of a task; one that fails ends, and keeps what it earned."""

    def reset(self, row: dict, seed: int) -> str:
        with _ENGINE:
            self.world = engine()._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
            self.world.load(row["task"], row["variation"], SIMPLER, False)
            self.world.reset()
            task = self.world.freeActionTaskDesc()
            here = self.world.freeActionLook()
        self.left = row["turns"]
        self.score = 0.0
        self.won = False
        return f"{' '.join(task.split()[2:])}\n{seen(here)}"

    def step(self, text: str) -> tuple[str, float, bool]:
        command = text.strip()
        self.left -= 1
        if not COMMAND.fullmatch(command):
            return "You cannot do that.", 0.0, not self.left
        with _ENGINE:
            answer = self.world.step(command)
            if answer.startswith("Ambiguous request"):
                self.world.step("")  # it asks for a number, or nothing to cancel
            score = self.world.getScore()
            done = self.world.getCompleted()
            here = self.world.freeActionLook()
        failed = score < 0  # the engine's score of a wrong animal is -1
        gained = 0.0 if failed else score - self.score
        self.score += gained
        self.won = score == 1
        answer = answer.splitlines()[0]
        if command.startswith(("go", "look around")):
            answer += f" {seen(here)}"
        return answer, gained, done or failed or not self.left


def seen(look: str) -> str:
    """Names of what there is, and the places that can be gone to."""
    things = re.findall(r"^\t(?:an? |the )?(?:substance called )?([\w -]+)", look, re.MULTILINE)
    doors = re.findall(r"^\tA door to the ([\w -]+?) \(", look, re.MULTILINE)
    names = [x.strip() for x in things if x not in ALWAYS_SEEN and not x.startswith("A door")]
    return f"You see: {', '.join(names)}. You can go to: {', '.join(doors)}."


@cache
def variations(split: str) -> dict[str, list[int]]:
    """Numbers of each task's variations in `"train"`, `"dev"` or `"test"`, as the engine splits
    them."""
    found = {}
    with _ENGINE:
        for task in TASKS:
            engine().load(task)
            found[task] = list(getattr(engine(), f"get_variations_{split}")())
    return found


def solution(task: str, variation: int) -> list[str]:
    """The engine's own way through a task, with the animals' names as they are seen there."""
    with _ENGINE:
        engine().load(task, variation, SIMPLER, generateGoldPath=True)
        gold = engine().get_gold_action_sequence()
        engine().reset()
        commands = []
        for action in gold:
            # doors are open, and nothing has to be waited for
            if not action.startswith(("go to", "focus on")):
                continue
            if action.startswith("focus on"):
                kind = set(action.split()[2:]) - {"baby", "egg"}
                names = re.findall(r"^\t(?:an?|the) ([\w -]+)", engine().look(), re.MULTILINE)
                action = "focus on " + next(x for x in names if kind <= set(x.split()))
            commands.append(action)
            engine().server.step(action)
    return commands


def rows(split: str, count: int | None = None) -> list[dict]:
    """A row per variation, at most `count` of each task."""
    return [
        {
            "prompt": [RULES, {"role": "user", "content": ""}],
            "task": task,
            "variation": number,
            "turns": TURNS,
        }
        for task, numbers in variations(split).items()
        for number in numbers[:count]
    ]


def walkthrough(row: dict) -> list[dict]:
    """Messages of an episode that follows the engine's own way."""
    played = ScienceWorld()
    messages = [RULES, {"role": "user", "content": played.reset(row, 0)}]
    for command in solution(row["task"], row["variation"]):
        answer, _, _ = played.step(command)
        messages += [{"role": "assistant", "content": command}, {"role": "user", "content": answer}]
    return messages[:-1]


def start_model() -> str:
    """Path of SmolLM2-135M-Instruct after it was shown some of the engine's ways, which is done
    once."""
    if not START.exists():
        sys.path.append(str(Path(__file__).resolve().parents[1] / "smollm2"))
        from player import teach

        teach([walkthrough(row) for row in rows("dev", SHOWN)], START)
    return str(START)


if __name__ == "__main__":
    for row in rows("dev", 1):
        print(f"\n== {row['task']}, variation {row['variation']}")
        for message in walkthrough(row):
            print(f"{message['role']:9} {message['content']}")
