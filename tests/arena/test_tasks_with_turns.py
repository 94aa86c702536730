"""Tasks of benchmarks/learning/turns.py: their best policies reach the optimum, and no
other one is above."""

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "learning"))
import turns

EPISODES = 2000
SPELLED = [turns.TASKS[f"spelled {name}"] for name in turns.SPELLED]


def written(task, action):
    """Words of an action, after one that does nothing if there are several."""
    if task not in SPELLED:
        return f"w{action}"
    first, last = divmod(action, task.digits[1])
    if first >= task.digits[0]:
        return ""
    return f"w9 w{first} w{next(n for n in task.stops if n % task.digits[1] == last)}"


def mean_reward(task, policy):
    """Mean sum of rewards of a policy from the words seen so far to an action."""
    sums = []
    for seed in range(EPISODES):
        environment = task()
        total = 0.0
        done = False
        seen = [environment.reset({"prompt": "w20", "number": seed}, seed).split()]
        while not done:
            observation, reward, done = environment.step(written(task, policy(seen)))
            seen.append(observation.split())
            total += reward
        sums.append(total)
    return statistics.mean(sums), 4 * statistics.stdev(sums) / EPISODES**0.5 + 1e-9


def last(seen):
    return int(seen[-1][0][1:])


def bisection():
    bounds = {}

    def policy(seen):
        low, high = bounds["range"] = (0, turns.KINDS - 1) if len(seen) == 1 else bounds["range"]
        if len(seen) > 1:
            low, high = (
                (bounds["guess"] + 1, high) if last(seen) == 0 else (low, bounds["guess"] - 1)
            )
        bounds["range"], bounds["guess"] = (low, high), (low + high) // 2
        return bounds["guess"]

    return policy


def lake():
    values = [0.0] * 16
    best = {}
    for left in range(1, turns.Lake.turns + 1):
        worth = {
            (cell, action): sum(
                p * (r + values[after]) for p, after, r in turns.Lake.outcomes(cell, action)
            )
            for cell in range(16)
            for action in range(4)
        }
        for cell in range(16):
            best[left, cell] = max(range(4), key=lambda action: worth[cell, action])
        values = [worth[cell, best[left, cell]] for cell in range(16)]
    return lambda seen: best[
        turns.Lake.turns + 1 - len(seen), 4 * int(seen[-1][0][1:]) + int(seen[-1][1][1:])
    ]


def stop_at(limit):
    return lambda seen: int(len(seen) > limit)


BEST = {
    "cues": lambda seen: (5 * last(seen) + 1) % turns.KINDS,
    "mistake": lambda seen: (last(seen) + 1) % 4,
    "guess": bisection(),
    "lake": lake(),
    "stop": stop_at(4),
    "cost": lambda seen: (last(seen) + 2) % 6,
}
BEST |= {name: BEST["cost"] for name in turns.TASKS if "cost" in name}
# share of the optimum that a policy may have which does not look; else 0.2
EASY = {"cost, ends": 0.5}
BEST |= {f"spelled {name}": BEST[name] for name in turns.SPELLED if name in BEST}


@pytest.mark.parametrize("name", BEST)
def test_best_policy_reaches_the_optimum(name):
    task = turns.TASKS[name]
    mean, error = mean_reward(task, BEST[name])
    assert mean == pytest.approx(task.optimum(), abs=error)


@pytest.mark.parametrize("name", turns.TASKS)
def test_constant_policies_are_below_the_optimum(name):
    task = turns.TASKS[name]
    for action in (0, 1, 20):
        mean, error = mean_reward(task, lambda seen, action=action: action)
        assert mean < task.optimum() + error
    assert turns.share(task, mean) < EASY.get(name, 0.2) + error


@pytest.mark.parametrize(
    "text, pays", [("w10", 1), ("w2 w12", 1), ("w1 w10", 0), ("", 0), ("w0", 0), ("w0 <pad>", 0)]
)
def test_action_without_a_last_digit_pays_nothing(text, pays):
    environment = turns.TASKS["spelled mistake"]()
    environment.reset({}, seed=0)
    environment.cue = 3  # so that 0 is right
    assert environment.step(text)[1] == pays == environment.alive


@pytest.mark.parametrize("name", [name for name in BEST if "cost" in name])
def test_one_word_in_six_is_right_and_no_word_is_wrong(name):
    wins = 0
    for cue in range(6):
        for text in [f"w{word}" for word in range(24)] + ["", "<pad>"]:
            environment = turns.TASKS[name]()
            environment.reset({"number": cue}, seed=0)
            environment.cue = cue
            environment.step(text)
            assert not (environment.won and text in ("", "<pad>"))
            wins += environment.won
    assert wins == 24


@pytest.mark.parametrize("cost, count", [(0.1, 12), (0.02, 30)])
def test_each_turn_costs_and_only_the_first_answer_counts(cost, count):
    for first, others, won in (("w5", "w0", True), ("w0", "w5", False)):
        environment = turns.costly(cost, count)()
        environment.reset({"number": 3}, seed=0)
        steps = [environment.step(first if turn == 0 else others) for turn in range(count)]
        rewards = [reward for _, reward, _ in steps]
        assert rewards == pytest.approx([-cost] * (count - 1) + [won - cost])
        assert [done for *_, done in steps] == [False] * (count - 1) + [True]
        assert turns.share(environment, sum(rewards)) == pytest.approx(float(won))


def test_first_right_answer_ends_the_episode_and_pays():
    environment = turns.CostEnds()
    environment.reset({}, seed=0)
    for _ in range(3):
        assert environment.step("")[1:] == (-0.1, False)
    assert environment.step(f"w{(environment.cue + 2) % 6}")[1:] == (pytest.approx(0.9), True)
    assert turns.CostEnds.optimum() == pytest.approx(0.9)


def test_stopping_earlier_or_later_pays_less():
    rewards = [mean_reward(turns.Stop, stop_at(limit))[0] for limit in range(8)]
    assert max(rewards) <= turns.Stop.optimum() + 0.1 and rewards[0] < rewards[4] > rewards[7]


def test_every_secret_can_be_found_so_wordle_pays_all():
    assert turns.Wordle.optimum() == pytest.approx(1.3)
    assert len(set(turns.Wordle.secrets)) == turns.WORDS


def test_episodes_fit_their_length_and_groups_share_a_secret():
    for task in turns.TASKS.values():
        environment = task()
        seen = environment.reset({"number": 7}, seed=1).split()
        # of a turn
        if task in SPELLED:
            words = 3
        else:
            words = 1
        assert task.length == task.turns * (words + len(seen)) or issubclass(task, turns.Wordle)
    for task in (turns.Guess, turns.Wordle):
        one = task()
        other = task()
        one.reset({"number": 7}, seed=1)
        other.reset({"number": 7}, seed=2)
        assert one.secret == other.secret
