"""Wordle as a plain environment: six guesses, and a reward for each."""

import re

GUESSES = 6
RULES = (
    "Guess my word of five letters. After each guess I write G below a letter in its place, Y "
    f"below a letter that is in another place, and - below any other. You have {GUESSES} guesses. "
    "Write each as <guess>crane</guess>."
)
_GUESS = re.compile(r"<guess>\s*([a-z]{5})\s*</guess>", re.IGNORECASE)


def to_prompt(row: dict) -> dict[str, list[dict[str, str]]]:
    """Write the rules; the secret stays in its column, which only the environment reads."""
    return {"prompt": [{"role": "user", "content": RULES}]}


def marks(guess: str, secret: str) -> str:
    """Return a mark for each letter; one that the secret has once is marked once, the first time
    or in its place."""
    left = [letter for letter, other in zip(secret, guess) if letter != other]
    result = ""
    for letter, other in zip(guess, secret):
        if letter == other:
            result += "G"
        elif letter in left:
            left.remove(letter)
            result += "Y"
        else:
            result += "-"
    return result


class Wordle:
    """An episode of the game."""

    def reset(self, row: dict, seed: int) -> None:
        self.secret = row["secret"]
        self.guesses = 0
        self.places = set()

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the marks, the reward of the guess, and whether the game is over."""
        self.guesses += 1
        found = _GUESS.findall(text)
        if not found:
            return (
                "Write a word of five letters as <guess>crane</guess>.",
                -0.1,
                self.guesses == GUESSES,
            )
        guess = found[-1].lower()
        if guess == self.secret:
            return "", 1.0, True
        result = marks(guess, self.secret)
        places = {place for place, mark in enumerate(result) if mark == "G"}
        reward = 0.1 * len(places - self.places)  # each place is paid once
        self.places |= places
        return f"{' '.join(guess)}\n{' '.join(result)}", reward, self.guesses == GUESSES
