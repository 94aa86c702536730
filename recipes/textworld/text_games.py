"""Games of Microsoft's TextWorld as a plain environment: a reward for each step of a quest, and for
the win.

    python recipes/textworld/text_games.py     # makes and prints a game of each size

`pip install textworld` brings the engine and its compiler; nothing else is downloaded.
"""

import re
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import textworld
from textworld.generator import compile_game, make_game

GAMES = "runs/textworld/games"
SIZES = ((2, 3, 3), (3, 4, 4), (4, 5, 5))  # rooms, objects, and commands of the quest
RULES = {"role": "system", "content": "You play a text game. Answer with one command."}
# the engine reads all games with one parser, and episodes begin in threads
_LOADING = threading.Lock()
_INFOS = textworld.EnvInfos(
    admissible_commands=True,
    description=True,
    feedback=True,
    intermediate_reward=True,
    objective=True,
    policy_commands=True,
    won=True,
)
# by the interpreter; TextWorld keeps the score
warnings.filterwarnings("ignore", "Game .* is not fully supported")


class TextWorld:
    """An episode of a game."""

    def reset(self, row: dict, seed: int) -> str:
        with _LOADING:
            self.engine = textworld.start(row["game"], _INFOS)
        self.state = self.engine.reset()
        self.left = row["turns"]
        self.won = False
        self.steps = len(self.state.policy_commands)
        return f"{self.state.objective}\n{self.seen(self.state.description)}"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.left -= 1
        # among others, "save" would write a file
        if text.strip() not in self.state.admissible_commands:
            return self.seen("You cannot do that."), 0.0, not self.left
        self.state, _, done = self.engine.step(text.strip())
        self.won = bool(self.state.won)
        reward = self.state.intermediate_reward / self.steps + self.won
        return self.seen(self.state.feedback), reward, done or not self.left

    def seen(self, text: str) -> str:
        """Text without its decoration, and the commands that change something."""
        words = " ".join(re.sub(r"-= .*? =-|\n>.*", "", text, flags=re.DOTALL).split())
        commands = (
            x
            for x in self.state.admissible_commands
            if not x.startswith(("examine", "inventory", "look"))
        )
        return f"{words}\nCommands: {', '.join(commands)}"


def game(size: tuple[int, int, int], seed: int, folder: str = GAMES) -> str:
    """Path of a game, which is made once, in about a second."""
    path = Path(folder, f"{'-'.join(map(str, size))}-{seed}.z8")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # an interruption leaves no half of a game
        with tempfile.TemporaryDirectory(dir=path.parent) as part:
            options = textworld.GameOptions()
            options.nb_rooms, options.nb_objects, options.quest_length = size
            options.seeds = seed
            options.path = str(Path(part, path.name))
            # short texts
            options.grammar.theme = "basic"
            options.grammar.only_last_action = True
            compile_game(make_game(options), options)
            for suffix in (".json", ".z8"):
                Path(options.path).with_suffix(suffix).rename(path.with_suffix(suffix))
    return str(path)


def rows(seeds: range, sizes: tuple = SIZES, folder: str = GAMES) -> list[dict]:
    """A row per game, small games first; an episode may take twice as many turns as the quest
    has commands."""
    chosen = [(size, seed) for size in sizes for seed in seeds]
    return [
        {
            "prompt": [RULES, {"role": "user", "content": ""}],
            "game": game(size, seed, folder),
            "turns": 2 * size[2],
        }
        for size, seed in chosen
    ]


def walkthrough(row: dict) -> list[dict]:
    """Messages of an episode that follows the engine's own solution."""
    played = TextWorld()
    messages = [RULES, {"role": "user", "content": played.reset(row, 0)}]
    done = False
    while not done:
        command = played.state.policy_commands[0]
        seen, _, done = played.step(command)
        messages += [{"role": "assistant", "content": command}, {"role": "user", "content": seen}]
    return messages[:-1]


if __name__ == "__main__":
    for row in rows(range(1), folder=sys.argv[1] if len(sys.argv) > 1 else GAMES):
        print(f"\n== {row['game']}")
        for message in walkthrough(row):
            print(f"{message['role']:9} {message['content']}")
