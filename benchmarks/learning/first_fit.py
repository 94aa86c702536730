"""How much of the returns of others the side critic's first fit explains, with the state in which
each turn begins and without it.

    python benchmarks/learning/first_fit.py moods --completions 512
    # with the environment of agents.py
    python benchmarks/learning/first_fit.py textworld --completions 128

The model that a run begins with plays one rollout of a task of real.py or agents.py. The critic is
fitted to some of its completions, and predicts the Monte Carlo returns of the others, at all tokens
that count: 0 is their mean, and 1 is perfect. Prints means over `SPLITS` choices of completions. One
thread.
"""

import argparse
import statistics
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import agents
import real
import torch
from torch import Tensor

from trl_ppo_ext import ppo_math
from trl_ppo_ext.modeling import SideCritic
from trl_ppo_ext.modeling.critics import DIRECTIONS
from trl_ppo_ext.ppo import credit
from trl_ppo_ext.ppo.baseline import FOLDS

SIZES = (32, 64, 128, 256)  # completions that are fitted to
SPLITS = 8
MICRO_BATCH = 8
RATE = 1e-4  # nothing is updated


class FirstRollout(NamedTuple):
    """What a new critic is fitted to, by token that counts."""

    critic: SideCritic
    summaries: Tensor
    returns: Tensor
    rows: Tensor  # number of the completion
    completions: int


def first_rollout(task: str, completions: int) -> FirstRollout:
    """Rollout of the model that runs of a task begin with."""
    seen = []

    def keep(
        critic: SideCritic,
        summaries: list[Tensor],
        state: Any,
        rewards: Tensor,
        steps: Tensor,
        mask: Tensor,
        gamma: Tensor,
        **others: Any,
    ) -> NoReturn:
        returns = ppo_math.gae(rewards, torch.zeros_like(rewards), steps, gamma, 1.0)[1]
        rows = torch.arange(len(rewards))[:, None].expand_as(mask)
        of_tokens = torch.cat(summaries), returns[mask], rows[mask]
        counted = (x[steps[mask]] for x in of_tokens)
        seen.append(FirstRollout(critic, *counted, len(rewards)))
        raise SystemExit

    settings = {
        "generation_batch_size": completions,
        "per_device_train_batch_size": MICRO_BATCH,
        "max_steps": completions // MICRO_BATCH,
    }
    with patch.object(credit, "fit_new_critic", keep), suppress(SystemExit):
        if task in agents.ENGINES:
            engine = agents.ENGINES[task]()
            copies = -(-completions // len(engine.trained))
            engine = replace(engine, trained=engine.trained * copies)
            agents.train(engine, "PPO", RATE, 0, settings)
        else:
            real.train(task, "PPO", RATE, 0, **settings)
    return seen[0]


def explained(rollout: FirstRollout, size: int, split: int, reads_turns: bool) -> float:
    """Share of the variance of other completions' returns that a fit to `size` of them explains."""
    generator = torch.Generator().manual_seed(split)
    order = torch.randperm(rollout.completions, generator=generator).argsort()[rollout.rows]
    is_in = order < size
    mean = rollout.returns[is_in].mean()
    deviation = rollout.returns[is_in].std()
    summaries = rollout.summaries.clone()
    if not reads_turns:
        summaries[:, :DIRECTIONS] = 0
    counts = torch.bincount(torch.arange(size) % FOLDS, minlength=FOLDS).float()
    targets = (rollout.returns - mean) / deviation
    fit = rollout.critic.fit([summaries], targets, is_in, order % FOLDS, counts, torch.clone)
    errors = (targets - fit.outputs)[~is_in]
    return 1 - float(errors.var() / targets[~is_in].var())


def main() -> None:
    """Print the table of a task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=[*real.TASKS, *agents.ENGINES])
    parser.add_argument("--completions", type=int, default=512)
    options = parser.parse_args()
    rollout = first_rollout(options.task, options.completions)
    for size in SIZES:
        if size < options.completions:
            means = {
                name: statistics.mean(
                    explained(rollout, size, split, reads_turns) for split in range(SPLITS)
                )
                for name, reads_turns in (("with it", True), ("without", False))
            }
            numbers = ", ".join(f"{name} {x:.2f}" for name, x in means.items())
            print(f"{options.task}, fitted to {size} completions: {numbers}", flush=True)


if __name__ == "__main__":
    main()
