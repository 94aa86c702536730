"""A Trainer of adapters under DeepSpeed: what is frozen is not saved, and what is sharded is gathered."""

import os

import torch
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from .modeling import ActorCritic


def without_step(loss: Tensor, outputs: Tensor) -> Tensor:
    """Make DeepSpeed leave out an optimizer step: it takes them within the backward, unless the gradient is no number.

    Args:
        loss (`Tensor`): Loss of the step's last micro-batch.
        outputs (`Tensor`): What the model said; no mask lies between it and the parameters.

    Returns:
        `Tensor`: The same loss, with a gradient that is no number.
    """
    outputs.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
    return loss.detach() + 0 * outputs.sum()


class ShardedTrainer(Trainer):
    """The part of [`PPOTrainer`] that knows of DeepSpeed; without it, it does nothing."""

    actor_critic: ActorCritic

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        if not self.is_deepspeed_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        engine, train_dataloader = super()._prepare_for_training(max_steps, train_dataloader, None)
        self.actor_critic.check_logits()  # a sharded model can run now
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
            # not strict: the frozen base is not in it
            engine.load_checkpoint(resume_from_checkpoint, load_module_strict=False)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return engine, train_dataloader

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.model_wrapped.save_checkpoint(output_dir, exclude_frozen_parameters=True)
        if self.args.should_save and not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper):
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save adapters and critic.

        Args:
            output_dir (`str`, *optional*): Where to; `args.output_dir` by default.
            _internal_call (`bool`, *optional*, defaults to `False`): Whether the Trainer calls it.
        """
        if not self.is_deepspeed_enabled:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir, state_dict=self.actor_critic.trained_weights())
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _skip_step(self, model: nn.Module) -> None:
        """Leave out the optimizer step whose gradient is there; the learning rate goes on as after any step."""
        model.zero_grad()
        if self.is_deepspeed_enabled:  # it has left the step out, and the Trainer would hold the learning rate
            self.optimizer.optimizer.overflow = False
        # to Accelerate this is no step, so the optimizer's momentum moves nothing
        self.accelerator.gradient_state._set_sync_gradients(False)
