"""Tasks of benchmarks/learning/arena.py: their rewards and their optima by dynamic programming."""

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "learning"))
import arena

LENGTH = 32


def rewards(name, completions, seed=0):
    task = arena.Task(name, seed)
    return task, task([f"w{n % arena.KINDS} w3" for n in range(len(completions))], completions)


def best_completion():
    tokens = [3]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + 1) % arena.KINDS)
    return tokens[1:]


@pytest.mark.parametrize("name", ["token", "chain"])
def test_optimum_by_dynamic_programming_is_a_reward_per_token(name):
    # value by the last token, and for the chain by whether all tokens were right
    values = {(token, alive): 0 for token in range(arena.KINDS) for alive in (True, False)}
    for _ in range(LENGTH):
        after = values
        values = {}
        for token, alive in after:
            options = []
            for choice in range(arena.KINDS):
                right = arena.right_tokens([token], [choice])[0]
                lives = alive and right
                options.append((lives if name == "chain" else right) + after[choice, lives])
            values[token, alive] = max(options)
    assert values[3, True] == LENGTH
    task, scores = rewards(name, [best_completion()])
    assert scores == [[1.0] * LENGTH] and task.shares == [1.0]


def test_every_token_has_one_right_successor():
    successors = [
        [b for b in range(arena.KINDS) if arena.right_tokens([a], [b])[0]]
        for a in range(arena.KINDS)
    ]
    assert sorted(map(tuple, successors)) == [(token,) for token in range(arena.KINDS)]


def test_chain_pays_nothing_after_a_wrong_token():
    completion = best_completion()
    completion[4] = (completion[4] + 1) % arena.KINDS
    _, (scores,) = rewards("chain", [completion])
    assert scores == [1.0] * 4 + [0.0] * (LENGTH - 4)


def test_mixed_task_accepts_one_to_all_first_tokens():
    """A completion is paid at its end."""
    task = arena.Task("mixed", 0)
    numbers = range(arena.KINDS)
    prompts = [[i, j] for i in numbers for j in numbers]
    paid = {
        tuple(x): sum(task([f"w{x[0]} w{x[1]}"] * 13, [[first] + [0] * 7 for first in range(13)]))
        for x in prompts
    }
    assert min(paid.values()) == 1 and max(paid.values()) == arena.KINDS
    assert statistics.mean(paid.values()) == pytest.approx(arena.KINDS / 2, abs=1)
    assert sum(n in (1, arena.KINDS) for n in paid.values()) > 0.3 * len(paid)


def test_noise_has_mean_zero_and_the_scale_of_its_prompt():
    _, scores = rewards("noise", [best_completion()] * 2400)
    for prompt, scale in ((0, 0.1), (arena.KINDS - 1, 10)):
        numbers = [x / scale for row in scores[prompt :: arena.KINDS] for x in row]
        assert statistics.mean(numbers) == pytest.approx(1, abs=0.05)
        assert statistics.stdev(numbers) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", arena.STEP_LENGTHS)
def test_steps_pay_first_tokens_at_the_ends_of_their_steps(name):
    length = arena.STEP_LENGTHS[name]
    firsts = best_completion()[: arena.STEPS]
    # wrong, and so is the one that follows, which has another cue
    firsts[2] = (firsts[2] + 1) % arena.KINDS
    completion = [0] * arena.LENGTHS[name]
    completion[::length] = firsts
    task, (pairs,) = rewards(name, [completion])
    ends = [length - 1, 2 * length - 1, 3 * length - 1, 4 * length - 1]
    assert pairs == list(zip(ends, [1.0, 1.0, 0.0, 0.0]))
    assert task.shares == [0.5] and task.steps == [[1.0, 1.0, 0.0, 0.0]]
    completion[::length] = best_completion()[: arena.STEPS]
    assert arena.Task(name, 0)(["w0 w3"], [completion])[0] == list(zip(ends, [1.0] * arena.STEPS))


def test_only_default_rivals_keep_the_critic_rate_of_the_config():
    assert arena.settings_of("cost", "PPO, default", 1e-3) == {"critic_learning_rate": None}
    assert arena.settings_of("cost", "PPO, side", 1e-3)["critic_learning_rate"] == 1e-3
    assert "critic_learning_rate" not in arena.settings_of("cost", "RLOO", 1e-3)
    assert arena.settings_of("steps 50", "PPO, per step", 1e-3)["lam"] ** 50 == pytest.approx(0.8)


def test_merged_results_have_one_rate_per_rival():
    def run(seed, rate, rival="PPO", end=0.5):
        return {
            "task": "cost",
            "rival": rival,
            "seed": seed,
            "rate": rate,
            "shares": [end],
            "explained": [],
        }

    other = run(0, 1e-3, "RLOO")
    tuned = run(100, 3e-4)
    first = run(0, 1e-3)
    at_another_rate = run(2, 3e-4)
    again = run(0, 1e-3, end=0.7)
    added = run(1, 1e-3)
    runs = [other, tuned, first, at_another_rate]
    assert arena.merged(runs, [again, added]) == [other, tuned, again, added]
    with pytest.raises(ValueError, match="two rates"):
        arena.table([first, at_another_rate])
