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
from huggingface_hub import ModelCardData
from torch import Tensor
from transformers.hf_argparser import HfArg

from ..checkpoints.files import save_critic
from ..config import PPOConfig
from ..data.prompts import RolloutSampler
from ..modeling.adapter_files import CRITIC_NUMBERS, public_name
from ..ppo import math as ppo_math
from ..ppo.batch_plan import BatchPlan
from ..ppo.metrics import Metrics
from ..ppo.rollouts import Rollout, RolloutCollector, Samples
from ..trainer import PPOTrainer
from .launch import build_trainer, load_datasets, parse, spread_rows

HELD_OUT = 256  # completions that the explained variance is measured on, at least
CARD = """---
{metadata}
---

# A pretrained critic for PPO

Predicts the score by {rewards} of a frozen policy on `{base}`. Trained by trl_ppo_ext for {steps} optimizer steps with
γ = {gamma:g} and λ = {lam:g}. Explained variance of the returns on held-out rollouts: {explained_variance_after:.3f},
{explained_variance_before:.3f} before training. Start from it on the same base:
`PPOConfig(critic="{kind}", critic_init="path/or/id/of/this/folder")`.
"""


def check_can_pretrain(critic: str, push_to_hub: bool) -> None:
    """Raise for a run without a critic, or one that pushes the policy."""
    if critic == "none":
        raise ValueError("`critic='none'` leaves nothing to pretrain; set `critic` to 'side', 'head' or 'adapter'.")
    if push_to_hub:
        raise ValueError("`push_to_hub` must be False for a critic; upload its folder with `hf upload NAME FOLDER`.")


@dataclass
class PretrainCriticConfig(PPOConfig):
    """[`PPOConfig`] with the defaults of `trl-ppo pretrain-critic`.

    Source: https://huggingface.co/papers/2503.01491
    """

    _argument_group_name = "training (fields of PPOConfig; those about the policy's update have no effect)"

    lam_critic: float | None = HfArg(default=1.0, help="Lambda of the critic's targets; 1 is Monte Carlo.")

    def __post_init__(self):
        check_can_pretrain(self.critic, self.push_to_hub)
        super().__post_init__()


def pretrain_critic(trainer: PPOTrainer, output_dir: str | None = None) -> dict[str, float]:
    """Train only the critic, on rollouts of the frozen policy, and save it.

    The policy stays frozen afterwards, so build another trainer for the run that starts from the critic.

    Args:
        trainer ([`PPOTrainer`]):
            Trainer of the run, not trained yet. `lam_critic=1.0` in its config gives Monte Carlo targets.
        output_dir (`str`, *optional*): Directory of the critic; the run's `output_dir` by default.

    Returns:
        `dict[str, float]`: `"explained_variance_before"` and `"explained_variance_after"`, on the same held-out
        rollouts against their Monte Carlo returns, and `"steps"`.

    Raises:
        `ValueError`: If there is no critic, or no `train_dataset`.

    Source: https://huggingface.co/papers/2503.01491
    """
    args, actor_critic = trainer.args, trainer.actor_critic
    check_can_pretrain(args.critic, args.push_to_hub)
    if trainer.train_dataset is None:
        raise ValueError("Pretraining a critic needs a `train_dataset`; pass one to PPOTrainer.")
    for parameter in actor_critic.policy_parameters().values():
        parameter.requires_grad_(False)
    trainer.collector.warns_of_far_scores = False  # they mislead only a policy that learns
    trainer.remove_callback(trainer.run_log)  # the folder holds a critic to publish, not a run
    rollouts = held_out_rollouts(trainer, HELD_OUT)
    numbers = {"explained_variance_before": explained_variance(trainer, rollouts)}
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    numbers["explained_variance_after"] = explained_variance(trainer, rollouts)
    numbers["steps"] = trainer.state.global_step
    weights = actor_critic.trained_weights()  # all processes gather sharded ones
    if args.should_save:
        directory = Path(output_dir or args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        save_critic(actor_critic, str(directory), weights)
        _describe(trainer, directory, numbers)
    return numbers


def held_out_rollouts(
    trainer: PPOTrainer, completions: int, num_generations: int = 1, **changes: Any
) -> list[tuple[Rollout, Samples]]:
    """Collect rollouts that are not trained on, without changing the run's statistics and noise.

    A prompt has `num_generations` completions in consecutive rows, and `changes` replaces fields of the config.
    """
    args, run, plan, device = copy(trainer.args), trainer.collector, trainer.plan, trainer.accelerator.device
    # Monte Carlo returns: with another λ they would depend on the critic. Normalizing would rewrite the value head
    vars(args).update({"lam_critic": 1.0, "normalize_values": False} | changes)
    roles = run.actor_critic, run.generator, run.rewards
    # without monitored rewards, which nothing would log
    collector = RolloutCollector(*roles, [], run.tokenizer, args, run.accelerator, run.guard)
    if (episodes := run.episodes) is not None:  # without the record of their answers, which is the run's
        collector.episodes = cast(Any, SimpleNamespace(sample=lambda rows, seeds, step: episodes.sample(rows, seeds)))
    collector.load_state_dict(run.state_dict())
    size, rounds, process = plan.completions_per_process, -(-completions // plan.completions), args.process_index
    prompts = _held_out_rows(trainer, -(-rounds * plan.completions // num_generations))
    rows = [row for row in prompts for _ in range(num_generations)]
    head = trainer.actor_critic.eval().value_head
    rollouts, units = [], [(x, x.clone()) for x in (() if head is None else head.buffers())]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(2**32 + args.seed + process)  # the run's own noise begins at its seed
        for number in range(rounds):
            start = (process * rounds + number) * size
            # rewards draw their noise by the step; from step 1 on, scores that mislead a new critic are no news
            state = replace(trainer.state, global_step=trainer.state.global_step + number + 1)
            rollouts.append(collector.collect(rows[start : start + size], Metrics(device), state))
    for buffer, unit in units:
        buffer.copy_(unit)
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
    """Share of the returns' variance that the critic explains, over the tokens of all rollouts and processes."""
    trainer.actor_critic.eval()
    collector, pairs = trainer.collector, []
    for rollout, samples in rollouts:
        sequences, mask = rollout.sequences, rollout.response_mask
        if trainer.args.advantage_level == "turn":
            mask = mask & ppo_math.turn_starts(sequences.turns)[0]
        if collector.earned is not None:  # in the units that the critic has now
            sequences = collector.earned.read_by_critic(sequences, samples.scored)
        values = cast(Tensor, collector.score_tokens(sequences).values)
        pairs.append((values[mask], cast(Tensor, rollout.returns)[mask]))
    values, returns = map(torch.cat, zip(*pairs))
    return float(ppo_math.explained_variance(values, returns, torch.ones_like(returns), collector.all_sum))


def _describe(trainer: PPOTrainer, directory: Path, numbers: dict[str, float]) -> None:
    """Write the critic's numbers and its model card."""
    args, base = trainer.args, trainer.actor_critic.config._name_or_path
    names = [reward.name for reward in trainer.collector.rewards]
    about: dict[str, Any] = {"kind": args.critic, "base_model": public_name(base), "rewards": names}
    about |= {"gamma": args.gamma, "lam": args.lam if args.lam_critic is None else args.lam_critic, **numbers}
    (directory / CRITIC_NUMBERS).write_text(json.dumps(about, indent=2) + "\n")
    tags = ["trl_ppo_ext", "ppo", "trl", "rlhf", "critic"]
    metadata = ModelCardData(base_model=base if base and not Path(base).exists() else None, tags=tags)
    about["rewards"] = ", ".join(f"`{' '.join(name.replace('`', '').split())}`" for name in names)
    card = CARD.format(metadata=metadata.to_yaml(), base=about["base_model"] or "a base without a name", **about)
    (directory / "README.md").write_text(card)


def main(argv: Sequence[str]) -> None:
    """Pretrain a critic, and print its explained variance."""
    description = "Train a critic on rollouts of a frozen policy, and save it in output_dir."
    script, args, model, mixture = parse("pretrain-critic", argv, description, PretrainCriticConfig)
    splits = load_datasets(script, mixture)
    held_out = splits.get(script.dataset_test_split)  # measured on, even when `eval_strategy` is "no"
    overrides = {} if held_out is None else {"eval_dataset": held_out}
    trainer = build_trainer(script, args, model, splits, **overrides)
    numbers = pretrain_critic(trainer)
    trainer.accelerator.print(
        f"Explained variance before: {numbers['explained_variance_before']:.3f}\n"
        f"Explained variance after:  {numbers['explained_variance_after']:.3f}\n"
        f"Start from it: PPOConfig(critic={args.critic!r}, critic_init={args.output_dir!r})"
    )
    trainer.end()
