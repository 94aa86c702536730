"""`trl-ppo pretrain-critic`: train a critic on rollouts of a frozen policy, and save it for PPO runs."""

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from datasets import IterableDataset
from torch import Tensor

from ..checkpoints.files import save_critic
from ..config import PPOConfig
from ..data import RolloutSampler
from ..episodes import Episode
from ..modeling import ValueHead
from ..modeling.adapters import CRITIC_NUMBERS, public_name
from ..ppo import math as ppo_math
from ..ppo.batch_plan import BatchPlan
from ..ppo.metrics import Metrics
from ..ppo.rollouts import Rollout, Samples, collect, score_tokens, with_rewards_so_far
from ..trainer import PPOTrainer
from .launch import build_trainer, load_datasets, parse, spread_rows

HELD_OUT = 256  # completions that the explained variance is measured on, at least
USEFUL = 0.1  # explained variance of a critic that is worth starting from


@dataclass
class PretrainCriticConfig(PPOConfig):
    """[`PPOConfig`] of a critic, which learns Monte Carlo returns (https://huggingface.co/papers/2503.01491)."""

    _argument_group_name = "training (fields of PPOConfig; those about the policy's update have no effect)"

    def __post_init__(self):
        if self.push_to_hub:  # it would create the repository of a policy
            remedy = "upload its folder with `hf upload NAME FOLDER`"
            raise ValueError(f"`push_to_hub` must be False for a critic; {remedy}.")
        super().__post_init__()


def pretrain_critic(trainer: PPOTrainer, output_dir: str | None = None) -> dict[str, float]:
    """Train only the critic, on rollouts of the frozen policy, and save it.

    The policy stays frozen afterwards, so build another trainer for the run that starts from the critic.

    Args:
        trainer ([`PPOTrainer`]): Trainer of the run, not trained yet.
        output_dir (`str`, *optional*): Directory of the critic; the run's `output_dir` by default.

    Returns:
        `dict[str, float]`: `"explained_variance_before"` and `"explained_variance_after"`, on the same held-out
        rollouts against their Monte Carlo returns, and `"steps"`.

    Raises:
        `ValueError`: If there is no critic.

    Source: https://huggingface.co/papers/2503.01491
    """
    actor_critic = trainer.actor_critic
    if actor_critic.value_head is None:
        raise ValueError("`critic='none'` leaves nothing to pretrain; set `critic` to 'side', 'head' or 'adapter'.")
    for parameter in actor_critic.policy_parameters().values():
        parameter.requires_grad_(False)
    trainer.remove_callback(trainer.run_log)  # the folder holds a critic to publish, not a run
    rollouts = held_out_rollouts(trainer, HELD_OUT)
    numbers = {"explained_variance_before": explained_variance(trainer, rollouts)}
    trainer.train()
    numbers["explained_variance_after"] = explained_variance(trainer, rollouts)
    numbers["steps"] = trainer.state.global_step
    weights = actor_critic.trained_weights()  # all processes gather sharded ones
    if trainer.is_world_process_zero():
        directory = output_dir or str(trainer.args.output_dir)
        save_critic(actor_critic, directory, weights, trainer.run_state.critic)
        base, rewards = public_name(actor_critic.config._name_or_path), trainer.reward_func_names
        about = {"base_model": base, "rewards": rewards, "gamma": trainer.args.gamma} | numbers
        Path(directory, CRITIC_NUMBERS).write_text(json.dumps(about, indent=2) + "\n")
    return numbers


def held_out_rollouts(
    trainer: PPOTrainer, completions: int, num_generations: int = 1, **changes: Any
) -> list[tuple[Rollout, Samples]]:
    """Collect rollouts that are not trained on; the state that each leaves is dropped, and the run's noise restored.

    A prompt has `num_generations` completions in consecutive rows, and `changes` replaces fields of the config.
    """
    args, plan, accelerator = copy(trainer.args), trainer.plan, trainer.accelerator
    # Monte Carlo returns: with another λ they would depend on the critic
    vars(args).update({"critic_options": replace(args.critic_options, lam=1.0)} | changes)
    start = 0

    def play(rows: list[dict], *_: Any) -> list[Episode]:
        """Play without the record of answers, which is the run's; environments of a prompt have one seed."""
        seeds = [hash((args.seed, (start + row) // num_generations)) % 2**31 for row in range(len(rows))]
        return trainer.roles.player.play(rows, seeds)

    # monitored rewards and the comparison with a sampler are for the log of a run
    player: Any = SimpleNamespace(play=play, generator=SimpleNamespace(ahead=None))
    roles = replace(trainer.roles, args=args, monitors=[], sampler=None, player=player)
    device, process = accelerator.device, accelerator.process_index
    size, rounds = plan.completions_per_process, -(-completions // plan.completions)
    prompts = _held_out_rows(trainer, -(-rounds * plan.completions // num_generations))
    rows = [row for row in prompts for _ in range(num_generations)]
    trainer.actor_critic.eval()
    rollouts = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(2**32 + args.seed + process)  # the run's own noise begins at its seed
        for number in range(rounds):
            start = (process * rounds + number) * size
            # rewards draw their noise by the step; equal scores are no news from step 1 on
            state = replace(trainer.state, global_step=trainer.state.global_step + number + 1)
            part = rows[start : start + size]
            rollout, _, samples = collect(roles, part, trainer.run_state, Metrics(device), state)
            rollouts.append((rollout, samples))
    return rollouts


def _held_out_rows(trainer: PPOTrainer, count: int) -> list[dict[str, Any]]:
    """Rows of the evaluation sets, or else those that training reaches last."""
    args, sets, train = trainer.args, trainer.eval_dataset, trainer.train_dataset
    if sets is None and not isinstance(train, IterableDataset):
        order = RolloutSampler(len(train), BatchPlan(1), args.shuffle_dataset, args.prompt_seed).order(epoch=0)
        train = train.select(order[::-1][:count])
    sets = list(sets.values()) if isinstance(sets, dict) else [train if sets is None else sets]
    rows = [row for dataset in sets for row in spread_rows(dataset, -(-count // len(sets)))]
    return [rows[index % len(rows)] for index in range(count)]


def explained_variance(trainer: PPOTrainer, rollouts: Sequence[tuple[Rollout, Samples]]) -> float:
    """Share of the Monte Carlo returns' variance that the critic explains, over all tokens and processes."""
    trainer.actor_critic.eval()
    roles, run, pairs = trainer.roles, trainer.run_state, []
    units = cast(ValueHead, trainer.actor_critic.value_head).units(run.returns)
    for rollout, samples in rollouts:
        sequences, mask = rollout.sequences, rollout.response_mask
        if trainer.args.advantage_level == "turn":
            mask = mask & ppo_math.turn_starts(sequences.turns)[0]
        if sequences.earned is not None:  # in the units that the critic reads now
            sequences = with_rewards_so_far(sequences, samples.scored.tokens, sequences.completion_mask, run)
        values = units.values(score_tokens(roles, sequences).values)
        pairs.append((values[mask], cast(Tensor, samples.returns)[mask]))
    values, returns = map(torch.cat, zip(*pairs))
    return float(ppo_math.explained_variance(values, returns, torch.ones_like(returns), roles.all_sum))


def main(argv: Sequence[str]) -> None:
    """Pretrain a critic, and print its explained variance."""
    description = "Train a critic on rollouts of a frozen policy, and save it in output_dir."
    script, args, model = parse("pretrain-critic", argv, description, PretrainCriticConfig)
    trainer = build_trainer(script, args, model, load_datasets(script))
    numbers = pretrain_critic(trainer)
    for name in ("explained_variance_before", "explained_variance_after"):
        trainer.accelerator.print(f"{name}: {numbers[name]:.3f}")
    advice = f"Start a run from it with `critic_init={args.output_dir!r}`."
    if numbers["explained_variance_after"] < USEFUL:
        advice = "It hardly predicts the returns, so it does not help a run. Train it longer (`max_steps`), raise "
        advice += "`critic_learning_rate`, or check with `trl-ppo probe` whether the returns can be predicted."
    trainer.accelerator.print(advice)
    trainer.end()
