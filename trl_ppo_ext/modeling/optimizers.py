"""Checks of an optimizer that is given to [`PPOTrainer`]."""

from typing import Any

import torch

from . import ActorCritic


def check_given_optimizers(optimizer: torch.optim.Optimizer | None, scheduler: Any, actor_critic: ActorCritic) -> None:
    """Refuse an optimizer that does not hold all that is trained, and a scheduler of another optimizer."""
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "The scheduler in `optimizers` belongs to an optimizer that is not in it, so the learning rate would not "
            "follow it. Set `lr_scheduler_type` and `lr_scheduler_kwargs` instead."
        )
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return
    held = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {name: x for name, x in actor_critic.named_parameters() if x.requires_grad}
    missing = [name for name, x in trained.items() if id(x) not in held]
    if missing:
        raise ValueError(
            f"`optimizers` holds an optimizer without {len(missing)} of the {len(trained)} weights that are trained, "
            f"such as `{missing[-1]}`: the trainer makes adapters and value head, so none that was made before can "
            "hold them, and they would never change. Choose with `optim`, `optim_args`, `learning_rate` and "
            "`critic_learning_rate`, or override `create_optimizer` in a subclass of PPOTrainer."
        )
