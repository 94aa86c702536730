"""Tasks of the arena with turns: text environments with chance, whose optimum is known by dynamic
programming.

`reset(row, seed)` returns the first observation, and `step(text)` an observation, a reward and
whether the episode ends. A secret belongs to the row, so that the episodes of a group share it.
Chance follows the seed and all actions so
far: episodes of a group share it until their actions differ, as two runs of a real environment
would. An action is a word, w0 to w20. One that is not valid has no effect, or is wrong. `length` is
that of an episode in tokens, and `optimum()` the expected sum of rewards of the best policy.

In these tasks a turn is a word. In the spelled ones it has several, with the same optimum.
"""

import random
from functools import cache
from itertools import product
from typing import Any

# numbers in most tasks, and words in all
KINDS = 12
WORDS = 21


def number(text: str) -> int:
    """Action of a turn; -1 if there is none."""
    words = text.split()
    if words and words[0][1:].isdigit():
        return int(words[0][1:])
    return -1


class Chance:
    """Dice of an episode."""

    def __init__(self, seed: int):
        self.past = str(seed)

    def after(self, text: str) -> random.Random:
        """Dice of the turn that an action begins."""
        self.past += f" {number(text)}"
        return random.Random(self.past)


class Cues:
    """16 turns with a random cue; its right answer pays 1, and N(0, 1) is added to each turn's
    reward."""

    turns = 16
    length = 32

    def reset(self, row: dict, seed: int) -> str:
        self.chance = Chance(seed)
        self.turn = 0
        self.cue = self.chance.after("").randrange(KINDS)
        return f" w{self.cue}"

    def step(self, text: str) -> tuple[str, float, bool]:
        right = number(text) == (5 * self.cue + 1) % KINDS
        dice = self.chance.after(text)
        self.turn += 1
        self.cue = dice.randrange(KINDS)
        return f" w{self.cue}", right + dice.gauss(0, 1), self.turn == self.turns

    @classmethod
    def optimum(cls) -> float:
        return float(cls.turns)


class Lake:
    """FrozenLake 4×4, 16 moves: w0 to w3, and so on, go left, down, right, up, and slip to either
    side with 1/10 each.

    The goal pays 1; goal and holes lead back to the first cell.
    """

    turns = 16
    length = 48
    holes = (5, 7, 11, 12)
    goal = 15
    moves = ((0, -1), (1, 0), (0, 1), (-1, 0))

    def reset(self, row: dict, seed: int) -> str:
        self.chance = Chance(seed)
        self.turn = 0
        self.cell = 0
        return self.seen()

    def seen(self) -> str:
        return f" w{self.cell // 4} w{self.cell % 4}"

    @classmethod
    def outcomes(cls, cell: int, action: int) -> list[tuple[float, int, float]]:
        """Probability, next cell and reward of each outcome of a move."""
        if not 0 <= action < 4:
            return [(1.0, cell, 0.0)]
        reached = []
        for turn, chance in ((0, 0.8), (1, 0.1), (3, 0.1)):
            row, column = (x + d for x, d in zip(divmod(cell, 4), cls.moves[(action + turn) % 4]))
            if 0 <= row < 4 and 0 <= column < 4:
                after = 4 * row + column
            else:
                after = cell
            reward = float(after == cls.goal)
            reached.append((chance, 0 if after in (*cls.holes, cls.goal) else after, reward))
        return reached

    def step(self, text: str) -> tuple[str, float, bool]:
        action = number(text)
        outcomes = self.outcomes(self.cell, action % 4 if action >= 0 else action)
        _, self.cell, reward = self.chance.after(text).choices(
            outcomes, [chance for chance, *_ in outcomes]
        )[0]
        self.turn += 1
        return self.seen(), reward, self.turn == self.turns

    @classmethod
    def optimum(cls) -> float:
        values = [0.0] * 16
        for _ in range(cls.turns):
            values = [
                max(
                    sum(p * (r + values[after]) for p, after, r in cls.outcomes(cell, a))
                    for a in range(4)
                )
                for cell in range(16)
            ]
        return values[0]


class Wordle:
    """A secret of 21 words of 3 of 6 letters, 4 guesses by number; w0 gray, w1 yellow, w2 green per
    letter.

    A green letter that was not green before pays 0.1, the secret 1.
    """

    turns = 4
    length = 16
    secrets = tuple(word for word in product(range(6), repeat=3) if sum(word) % 9 == 4)

    def reset(self, row: dict, seed: int) -> str:
        self.secret = random.Random(row["number"]).choice(self.secrets)
        self.turn = 0
        self.green = (False,) * 3
        return " w11"

    @staticmethod
    @cache
    def marks(secret: tuple, guess: tuple) -> tuple[int, ...]:
        """2 for a letter at its place, 1 for one that is elsewhere, 0 for another."""
        return tuple(2 if s == g else 1 if g in secret else 0 for s, g in zip(secret, guess))

    def step(self, text: str) -> tuple[str, float, bool]:
        chosen = number(text)
        if 0 <= chosen < len(self.secrets):
            guess = self.secrets[chosen]
        else:
            guess = (9, 9, 9)
        marks = self.marks(self.secret, guess)
        reward = 0.1 * sum(mark == 2 and not was for mark, was in zip(marks, self.green)) + (
            guess == self.secret
        )
        self.green = tuple(was or mark == 2 for mark, was in zip(marks, self.green))
        self.turn += 1
        return (
            "".join(f" w{mark}" for mark in marks),
            reward,
            guess == self.secret or self.turn == self.turns,
        )

    @classmethod
    def optimum(cls) -> float:
        @cache
        def value(left: tuple, green: tuple, turns: int) -> float:
            """Sum over the secrets that are left of the best expected reward."""
            if not left or not turns:
                return 0.0
            best = 0.0
            for guess in cls.secrets:
                parts: dict[tuple, list] = {}
                total = 0.0
                for secret in left:
                    marks = cls.marks(secret, guess)
                    total += 0.1 * sum(mark == 2 and not was for mark, was in zip(marks, green)) + (
                        guess == secret
                    )
                    if guess != secret:
                        parts.setdefault(marks, []).append(secret)
                for marks, rest in parts.items():
                    seen = tuple(was or mark == 2 for mark, was in zip(marks, green))
                    total += value(tuple(rest), seen, turns - 1)
                best = max(best, total)
            return best

        return value(cls.secrets, (False,) * 3, cls.turns) / len(cls.secrets)


class Mistake:
    """12 turns with a random cue; its right answer pays 1, but nothing pays after the first
    wrong one, unannounced."""

    turns = 12
    length = 24

    def reset(self, row: dict, seed: int) -> str:
        self.chance = Chance(seed)
        self.turn = 0
        self.alive = True
        self.cue = self.chance.after("").randrange(4)
        return f" w{self.cue}"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.alive = self.alive and number(text) == (self.cue + 1) % 4
        self.turn += 1
        self.cue = self.chance.after(text).randrange(4)
        return f" w{self.cue}", float(self.alive), self.turn == self.turns

    @classmethod
    def optimum(cls) -> float:
        return float(cls.turns)


class Guess:
    """A number from 0 to 11, 4 guesses; the answer is w0 (higher), w1 (lower) or w2 (right,
    which pays 1)."""

    turns = 4
    length = 8

    def reset(self, row: dict, seed: int) -> str:
        self.secret = random.Random(row["number"]).randrange(KINDS)
        self.turn = 0
        return " w3"

    def step(self, text: str) -> tuple[str, float, bool]:
        guess = number(text)
        self.turn += 1
        right = guess == self.secret
        return (
            f" w{2 if right else 0 if guess < self.secret else 1}",
            float(right),
            right or self.turn == self.turns,
        )

    def privileged_state(self) -> str:
        """What the critic of "PPO, adapter" sees."""
        return f"w{self.secret}"

    @classmethod
    def optimum(cls) -> float:
        """Bisection finds up to 2^turns - 1 numbers."""
        return min(1.0, (2**cls.turns - 1) / KINDS)


class Stop:
    """A sum grows by w0 (go) by 1 with 3/4, and is lost with 1/4; w1 (stop) pays it.

    Each go also pays 0.2 at once. At most 8 turns.
    """

    turns = 8
    length = 16

    def reset(self, row: dict, seed: int) -> str:
        self.chance = Chance(seed)
        self.turn = 0
        self.sum = 0
        return " w0"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        if number(text) != 0:
            return " w11", float(self.sum) if number(text) == 1 else 0.0, True
        if self.chance.after(text).random() < 0.25:
            return " w11", 0.2, True
        self.sum += 1
        return f" w{self.sum}", 0.2, self.turn == self.turns

    @classmethod
    def optimum(cls) -> float:
        value = 0.0  # after the last turn nothing is paid any more
        for turn in reversed(range(cls.turns)):
            value = max(float(turn), 0.2 + 0.75 * value)
        return value


class Cost:
    """Turns that each cost; the right answer to the first one's cue, of 6, pays 1 after the last
    turn.

    A word answers by its remainder after division by 6, so that one of six is right. The further
    turns do nothing.
    """

    cues = 6
    turns = 12
    length = 24
    cost = 0.1  # of a turn

    def reset(self, row: dict, seed: int) -> str:
        self.cue = row["number"] % self.cues
        self.turn = 0
        self.won = False
        return f" w{self.cue}"

    def is_right(self, text: str) -> bool:
        """Whether an action is the right answer to the cue."""
        answer = number(text)
        return answer >= 0 and answer % self.cues == (self.cue + 2) % self.cues

    def step(self, text: str) -> tuple[str, float, bool]:
        if self.turn == 0:
            self.won = self.is_right(text)
        self.turn += 1
        is_last = self.turn == self.turns
        reward = float(self.won and is_last) - self.cost
        return " w11", reward, is_last

    @classmethod
    def fixed_cost(cls) -> float:
        """Cost of an episode whatever is done in it.

        Without it, the share of the optimum is the rate of success.
        """
        return cls.cost * cls.turns

    @classmethod
    def optimum(cls) -> float:
        return 1 - cls.fixed_cost()


class CostEnds(Cost):
    """12 turns with a random cue of 6, each of which costs; the first right answer pays 1 and
    ends the episode."""

    def reset(self, row: dict, seed: int) -> str:
        self.chance = Chance(seed)
        self.cue = self.chance.after("").randrange(self.cues)
        self.turn = 0
        self.won = False
        return f" w{self.cue}"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.won = self.is_right(text)
        self.turn += 1
        self.cue = self.chance.after(text).randrange(self.cues)
        is_last = self.won or self.turn == self.turns
        return f" w{self.cue}", float(self.won) - self.cost, is_last

    @classmethod
    def fixed_cost(cls) -> float:
        return 0.0

    @classmethod
    def optimum(cls) -> float:
        value = 0.0  # after the last turn nothing is paid any more
        for _ in range(cls.turns):
            answer_right = 1.0
            answer_wrong = value
            value = max(answer_right, answer_wrong) - cls.cost
        return value


def costly(cost: float, turns: int) -> Any:
    """Task of that many turns, each of which has this cost."""
    return type("Cost", (Cost,), {"cost": cost, "turns": turns, "length": 2 * turns})


def share(task: Any, mean_reward: float) -> float:
    """Share of the optimum that a mean sum of rewards is, both without costs that nothing can
    avoid."""
    if hasattr(task, "fixed_cost"):
        fixed_cost = task.fixed_cost()
    else:
        fixed_cost = 0.0
    return (mean_reward + fixed_cost) / (task.optimum() + fixed_cost)


class Spelled:
    """A task whose actions are written as two digits: the last two words of a turn.

    Those before do nothing.

    w10 to w20 end a turn, and are its last digit; the first one is below, and 0 if it is missing.
    """

    stops = tuple(range(10, WORDS + 1))
    digits: tuple[int, int]  # numbers of each

    def step(self, text: str) -> tuple[str, float, bool]:
        first, last = [-1, 0, *map(number, text.split())][-2:]
        action = first % self.digits[0] * self.digits[1] + last % self.digits[1]
        return super().step(f"w{action}" if last >= 10 else "")  # type: ignore[misc]


def spelled(task: Any, digits: tuple[int, int]) -> Any:
    """Task of turns of three words on average at most, or the episode is cut."""
    settings = {"digits": digits, "length": task.length + 2 * task.turns}
    return type(f"Spelled{task.__name__}", (Spelled, task), settings)


TASKS = {
    "cues": Cues,
    "lake": Lake,
    "wordle": Wordle,
    "mistake": Mistake,
    "guess": Guess,
    "stop": Stop,
}
SPELLED = {"cues": (3, 4), "lake": (2, 2), "wordle": (3, 7), "mistake": (2, 2), "stop": (2, 2)}
TASKS |= {f"spelled {name}": spelled(TASKS[name], digits) for name, digits in SPELLED.items()}
TASKS |= {
    "cost": Cost,
    "cost, 30 turns": costly(0.1, 30),
    "cost 0.02": costly(0.02, 12),
    "cost 0.02, 30 turns": costly(0.02, 30),
    "cost, ends": CostEnds,
    "no cost": costly(0.0, 12),
    "no cost, 30 turns": costly(0.0, 30),
}

if __name__ == "__main__":
    for name, task in TASKS.items():
        print(f"{name:20} {task.optimum():.4f}")
