"""Train a critic on rollouts of the frozen policy: `python recipes/pretrain_critic.py run.yaml
--output_dir critic`.

It learns Monte Carlo returns (https://huggingface.co/papers/2503.01491), and starts any number of
runs with `critic_init`. Arguments are those of `trl-ppo train`, except for `--dry_run`; those about
the policy's update have no effect.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import EarlyStoppingCallback

from trl_ppo_ext import PPOTrainer, ppo_math
from trl_ppo_ext.checkpoints.files import save_critic
from trl_ppo_ext.checkpoints.resume import check_earlier_run
from trl_ppo_ext.commands.launch import build_trainer, load_datasets, parse
from trl_ppo_ext.config import METRIC_SCHEDULES
from trl_ppo_ext.modeling import Critic
from trl_ppo_ext.modeling.adapters import CRITIC_NUMBERS, public_name
from trl_ppo_ext.ppo.rollouts import Rollout, Samples, observed_by_critic, score_tokens
from trl_ppo_ext.tools.probe import held_out_rollouts

HELD_OUT = 256  # completions that the explained variance is measured on, at least
USEFUL = 0.1  # explained variance of a critic that is worth starting from


def pretrain_critic(trainer: PPOTrainer, output_dir: str | None = None) -> dict[str, float]:
    """Train only the critic, on rollouts of the frozen policy, and save it.

    The policy stays frozen afterwards, and the trainer trains no more: build another one that
    starts from the critic. Early stopping and `load_best_model_at_end` do not apply: they follow the
    policy's metric, which stays as it is.

    Args:
        trainer ([`PPOTrainer`]): Trainer of the run, not trained yet.
        output_dir (`str`, *optional*): Directory of the critic; the run's `output_dir` by default.

    Returns:
        `dict[str, float]`: `"explained_variance_before"` and `"explained_variance_after"`, on the
        same held-out rollouts against their Monte Carlo returns, and `"steps"`.

    Raises:
        `ValueError`: If there is no critic, or the schedule or what is saved follows a metric.
    """
    actor_critic = trainer.actor_critic
    if actor_critic.value_head is None:
        raise ValueError(
            "`critic='none'` leaves nothing to pretrain; set `critic` to 'side', 'head' or "
            "'adapter'."
        )
    for name in ("lr_scheduler_type", "save_strategy"):
        value = getattr(trainer.args, name)
        if value in (*METRIC_SCHEDULES, "best"):
            raise ValueError(
                f"`{name}={value.value!r}` follows a metric of the policy, which is frozen; set "
                "another one to pretrain the critic."
            )
    if trainer.args.resume_from_checkpoint is None:
        check_earlier_run(str(trainer.args.output_dir))  # before anything is sampled
    trainer.args.load_best_model_at_end = False
    for callback in list(trainer.callback_handler.callbacks):
        if isinstance(callback, EarlyStoppingCallback):
            trainer.remove_callback(callback)
    for parameter in actor_critic.policy_parameters().values():
        parameter.requires_grad_(False)
    trainer.remove_callback(trainer.run_log)  # the folder holds a critic to publish, not a run
    rollouts = held_out_rollouts(trainer, HELD_OUT)
    numbers = {"explained_variance_before": explained_variance(trainer, rollouts)}
    trainer.train()
    numbers["explained_variance_after"] = explained_variance(trainer, rollouts)
    numbers["steps"] = trainer.state.global_step
    trainer.train = refuse_to_train
    weights = actor_critic.trained_weights()  # all processes gather sharded ones
    if trainer.is_world_process_zero():
        directory = output_dir or str(trainer.args.output_dir)
        save_critic(actor_critic, directory, weights, trainer.run_state.critic)
        base = public_name(actor_critic.config._name_or_path)
        rewards = trainer.reward_func_names
        about = {"base_model": base, "rewards": rewards, "gamma": trainer.args.gamma} | numbers
        Path(directory, CRITIC_NUMBERS).write_text(json.dumps(about, indent=2) + "\n")
    return numbers


def refuse_to_train(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise: the optimizer of a pretrained critic has no weights of the policy."""
    needed = (
        "a new trainer with `critic_init`, after `pretrain_critic` has frozen the policy of this "
        "one"
    )
    raise RuntimeError(f"`train` needs {needed}; build one.")


def explained_variance(trainer: PPOTrainer, rollouts: Sequence[tuple[Rollout, Samples]]) -> float:
    """Share of the Monte Carlo returns' variance that the critic explains, over all tokens and
    processes."""
    trainer.actor_critic.eval()
    components = trainer.components
    run = trainer.run_state
    pairs = []
    critic = cast(Critic, trainer.actor_critic.value_head)
    units = critic.units(run.critic.returns)
    for rollout, samples in rollouts:
        sequences = rollout.sequences
        mask = rollout.response_mask
        if trainer.args.advantage_level == "turn":
            mask = mask & ppo_math.turn_starts(sequences.turns)[0]
        # in the units that the critic reads now
        sequences = observed_by_critic(
            critic, sequences, samples.scored.tokens, sequences.completion_mask, run
        )
        values = units.values(score_tokens(components, sequences).values)
        pairs.append((values[mask], cast(Tensor, samples.returns)[mask]))
    values, returns = map(torch.cat, zip(*pairs))
    return float(
        ppo_math.explained_variance(values, returns, torch.ones_like(returns), components.all_sum)
    )


def main(argv: Sequence[str]) -> None:
    """Pretrain a critic, and print its explained variance."""
    description = "Train a critic on rollouts of a frozen policy, and save it in output_dir."
    script, args, model = parse("pretrain_critic.py", argv, description)
    if args.push_to_hub:  # it would create the repository of a policy
        remedy = "upload its folder with `hf upload NAME FOLDER`"
        raise ValueError(f"`push_to_hub` must be False for a critic; {remedy}.")
    trainer = build_trainer(script, args, model, load_datasets(script))
    numbers = pretrain_critic(trainer)
    for name in ("explained_variance_before", "explained_variance_after"):
        trainer.accelerator.print(f"{name}: {numbers[name]:.3f}")
    advice = f"Start a run from it with `critic_init={args.output_dir!r}`."
    if numbers["explained_variance_after"] < USEFUL:
        advice = (
            "It hardly predicts the returns, so it does not help a run. Train it longer "
            "(`max_steps`), raise "
        )
        advice += (
            "`critic_learning_rate`, or check with `trl-ppo probe` whether the returns can be "
            "predicted."
        )
    trainer.accelerator.print(advice)
    trainer.end()


if __name__ == "__main__":
    main(sys.argv[1:])
