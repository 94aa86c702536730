"""`trl-ppo pretrain-critic`: train a critic on rollouts of a policy that stays as it is, and save it for PPO runs."""

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from datasets import IterableDataset
from huggingface_hub import ModelCardData
from torch import Tensor

from ..checkpoints.files import save_critic
from ..config import PPOConfig
from ..data.prompts import RolloutSampler
from ..modeling.adapter_files import CRITIC_NUMBERS, public_name
from ..ppo import math as ppo_math
from ..ppo.metrics import Metrics
from ..ppo.rollouts import Experience
from ..sequences import Rollout
from ..trainer import PPOTrainer
from .launch import build_trainer, load_datasets, parse

HELD_OUT = 256  # completions that the explained variance is measured on, at least
CARD = """---
{metadata}
---

# A pretrained critic for PPO

It predicts what a frozen policy on `{base}` will score with {rewards}: trained for {steps} optimizer steps on its
rollouts by trl_ppo_ext, with γ = {gamma:g} and λ = {lam:g} for the targets. On held-out rollouts it explains
{after:.3f} of the variance of the returns, {before:.3f} before training.

It is no model of its own. A PPO run on the same base, with the same adapter to start from, begins with it:

```python
from trl_ppo_ext import PPOConfig

args = PPOConfig(critic="{kind}", critic_init="path/or/id/of/this/folder")
```
"""


def check_can_pretrain(args: PPOConfig) -> None:
    """Refuse a config with which there is no critic to pretrain, or it would not be where it is expected."""
    if args.critic == "none":
        raise ValueError("`critic='none'` leaves nothing to pretrain; set `critic` to 'head' or 'adapter'.")
    if args.push_to_hub:
        raise ValueError(
            "`push_to_hub=True` would push the run's checkpoints, not the critic; leave it False and upload the "
            "folder with `hf upload NAME FOLDER`."
        )


@dataclass
class PretrainCriticConfig(PPOConfig):
    """[`PPOConfig`] with the defaults of `trl-ppo pretrain-critic`.

    Source: https://huggingface.co/papers/2503.01491
    """

    _argument_group_name = "training (fields of PPOConfig; those about the policy's update have no effect)"

    lam_critic: float | None = field(
        default=1.0, metadata={"help": "Lambda of the critic's targets; 1 is Monte Carlo."}
    )

    def __post_init__(self):
        check_can_pretrain(self)
        super().__post_init__()


def pretrain_critic(trainer: PPOTrainer, output_dir: str | None = None) -> dict[str, float]:
    """Train the critic alone, on rollouts of the frozen policy, and save it.

    The policy stays frozen afterwards: a run that starts from the critic builds a trainer of its own.

    Args:
        trainer ([`PPOTrainer`]):
            The run, not trained yet. The critic's λ is that of its config; `lam_critic=1.0` gives Monte Carlo targets.
        output_dir (`str`, *optional*): Where the critic is saved; the run's `output_dir` by default.

    Returns:
        `dict[str, float]`: `"explained_variance_before"` and `"explained_variance_after"`, on the same held-out
        rollouts against their Monte Carlo returns, and `"steps"`.

    Raises:
        `ValueError`: If there is no critic, or no `train_dataset`.

    Source: https://huggingface.co/papers/2503.01491
    """
    check_can_pretrain(trainer.args)
    if trainer.train_dataset is None:
        raise ValueError("Pretraining a critic needs a `train_dataset`; pass one to PPOTrainer.")
    trainer.actor_critic.freeze_policy()
    trainer.remove_callback(trainer.run_log)  # the folder is the critic's, to be passed on
    rollouts = held_out_rollouts(trainer, HELD_OUT)
    numbers = {"explained_variance_before": explained_variance(trainer, rollouts)}
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    numbers["explained_variance_after"] = explained_variance(trainer, rollouts)
    numbers["steps"] = trainer.state.global_step
    weights = trainer.actor_critic.trained_weights()  # sharded ones are gathered by all processes
    if trainer.args.should_save:
        _save(trainer, output_dir or trainer.args.output_dir, numbers, weights)
    return numbers


def held_out_rollouts(trainer: PPOTrainer, completions: int) -> list[Rollout]:
    """Collect rollouts that are not trained on; nothing of the run changes, neither its statistics nor its noise.

    Prompts are those of the evaluation sets, spread evenly, or else those that training comes to last (of a stream,
    the first). Their returns are Monte Carlo whatever λ the run has: with another they would lean on the critic.
    """
    args, run, size = copy(trainer.args), trainer.experience, trainer.plan.completions_per_process
    args.lam_critic = 1.0
    # monitored rewards are left out: nobody would see what they give
    experience = Experience(run.actor_critic, run.generator, run.rewards, [], run.tokenizer, args, run.accelerator)
    experience.load_state_dict(run.state_dict())
    rounds = -(-completions // trainer.plan.completions)
    rows = _held_out_rows(trainer, rounds * trainer.plan.completions)
    device, first = args.device, args.process_index * rounds * size
    trainer.actor_critic.eval()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # a stream of its own: the run's begins at its seed
        torch.manual_seed(2**32 + args.seed + args.process_index)
        starts = range(first, first + rounds * size, size)
        return [experience.collect(rows[start : start + size], Metrics(), trainer.state).rollout for start in starts]


def _held_out_rows(trainer: PPOTrainer, count: int) -> list[dict[str, Any]]:
    args, sets = trainer.args, trainer.eval_dataset
    if sets is None:
        train = sets = trainer.train_dataset
        if not isinstance(train, IterableDataset):
            seed = args.seed if args.data_seed is None else args.data_seed
            order = list(RolloutSampler(len(train), 1, 1, 1, args.shuffle_dataset, seed))
            sets = train.select(order[::-1][:count])
    sets = list(sets.values()) if isinstance(sets, dict) else [sets]
    rows = [row for dataset in sets for row in _spread(dataset, -(-count // len(sets)))]
    return [rows[index % len(rows)] for index in range(count)]


def _spread(dataset: Any, count: int) -> list[dict[str, Any]]:
    if isinstance(dataset, IterableDataset):
        return list(islice(dataset, count))
    count = min(count, len(dataset))
    return [dataset[index * len(dataset) // count] for index in range(count)]


def explained_variance(trainer: PPOTrainer, rollouts: Sequence[Rollout]) -> float:
    """Share of the returns' variance that the critic explains now, over the tokens of all rollouts and processes."""
    trainer.actor_critic.eval()
    score, all_sum = trainer.experience.score_tokens, trainer.experience.all_sum
    values = torch.cat([cast(Tensor, score(each.sequences).values)[each.response_mask] for each in rollouts])
    returns = torch.cat([cast(Tensor, each.returns)[each.response_mask] for each in rollouts])
    every = torch.ones_like(returns)
    return float(ppo_math.explained_variance(values, returns, every, all_sum))


def _save(trainer: PPOTrainer, output_dir: str, numbers: dict[str, float], weights: dict[str, Tensor]) -> None:
    args, base = trainer.args, trainer.actor_critic.config._name_or_path
    directory = Path(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    save_critic(trainer.actor_critic, output_dir, weights)
    lam = args.lam if args.lam_critic is None else args.lam_critic
    rewards = [reward.name for reward in trainer.experience.rewards]
    about = {"kind": args.critic, "base_model": public_name(base), "rewards": rewards, "gamma": args.gamma, "lam": lam}
    (directory / CRITIC_NUMBERS).write_text(json.dumps(about | numbers, indent=2) + "\n")
    metadata = ModelCardData(
        base_model=base if base and not Path(base).exists() else None,  # a path means nothing to the Hub
        tags=["trl_ppo_ext", "ppo", "trl", "rlhf", "critic"],
    )
    card = CARD.format(
        metadata=metadata.to_yaml(),
        base=public_name(base) or "a base without a name",
        rewards=", ".join(f"`{' '.join(name.replace('`', '').split())}`" for name in rewards),
        steps=numbers["steps"],
        gamma=args.gamma,
        lam=lam,
        before=numbers["explained_variance_before"],
        after=numbers["explained_variance_after"],
        kind=args.critic,
    )
    (directory / "README.md").write_text(card)


def main(argv: Sequence[str]) -> None:
    """Pretrain a critic and say what came of it."""
    script_args, args, model_args, mixture = parse(
        "pretrain-critic",
        argv,
        "Train a critic on rollouts of a frozen policy, and save it in output_dir for PPOConfig(critic_init=...).",
        PretrainCriticConfig,
    )
    datasets = load_datasets(script_args, mixture)
    script_args.ptx_dataset_name = None  # a frozen policy learns nothing from it
    held_out = datasets.get(script_args.dataset_test_split)
    trainer = build_trainer(
        script_args, args, model_args, datasets, **({} if held_out is None else {"eval_dataset": held_out})
    )
    numbers = pretrain_critic(trainer)
    start = f"PPOConfig(critic={args.critic!r}, critic_init={args.output_dir!r})"
    trainer.accelerator.print(
        f"Explained variance before: {numbers['explained_variance_before']:.3f}\n"
        f"Explained variance after:  {numbers['explained_variance_after']:.3f}\n"
        f"Start from it: {start}"
    )
    trainer.end()
