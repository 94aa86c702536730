"""A Trainer of adapters under DeepSpeed and FSDP: what is frozen is not saved, and what is sharded is gathered."""

import os

import torch
from accelerate import DistributedType
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from . import fsdp
from .config import PPOConfig
from .modeling import ActorCritic


def without_step(loss: Tensor, outputs: Tensor) -> Tensor:
    """Make DeepSpeed skip an optimizer step, which it takes within the backward unless the gradient is NaN."""
    outputs.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
    return loss.detach() + 0 * outputs.sum()


class ShardedTrainer(Trainer):
    """The part of [`PPOTrainer`] that knows of DeepSpeed and FSDP; without them, it does nothing."""

    args: PPOConfig
    actor_critic: ActorCritic
    is_fsdp_enabled: bool

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; where FSDP is asked for, it is one that knows of it."""
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or not fsdp.is_asked_for(self.args):
            return
        if self.accelerator.distributed_type != DistributedType.MULTI_CPU:
            raise ValueError(
                "FSDP is asked for, and there is a single process to shard over; start several with `accelerate "
                "launch --num_processes N`, or leave FSDP out."
            )
        state = self.accelerator.state  # on CPUs Accelerate leaves FSDP out without a word
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp.plugin_of(self.args)
        self.is_fsdp_enabled = True

    def _shard(self) -> None:
        """Before anything refers to parameters: FSDP replaces them."""
        if self.is_fsdp_enabled:
            fsdp.shard(self.actor_critic, self.accelerator)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        if self.is_fsdp_enabled:
            return self._prepare_under_fsdp(max_steps, train_dataloader, resume_from_checkpoint)
        if not self.is_deepspeed_enabled:
            self._forget_evaluation()
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        engine, train_dataloader = super()._prepare_for_training(max_steps, train_dataloader, None)
        self.actor_critic.check_logits()  # a sharded model can run now
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
            # not strict: the frozen base is not in it
            engine.load_checkpoint(resume_from_checkpoint, load_module_strict=False)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return engine, train_dataloader

    def _forget_evaluation(self) -> None:
        """An evaluation marks the model as prepared: Accelerate would leave DDP out, and each process train alone."""
        if self.model_wrapped is not self.model:
            return
        self.model._is_accelerate_prepared = False
        self.accelerator._models = [model for model in self.accelerator._models if model is not self.model]
        self.model.__dict__.pop("forward", None)  # with autocast around it

    def _prepare_under_fsdp(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        optimizer = self.create_optimizer()
        held = [list(group["params"]) for group in optimizer.param_groups]
        model, train_dataloader = super()._prepare_for_training(max_steps, train_dataloader, None)
        # Accelerate finds parameters by their address, and all of which a process has no part have the same
        for group, parameters in zip(optimizer.param_groups, held):
            group["params"] = parameters
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
            self.is_fsdp_enabled = False  # the state was saved as one process alone would have it
            try:
                self._load_optimizer_and_scheduler(resume_from_checkpoint)
            finally:
                self.is_fsdp_enabled = True
            fsdp.spread_optimizer_state(optimizer)
        return model, train_dataloader

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        return grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled:
            state = fsdp.whole_optimizer_state(self.optimizer)
            if self.args.should_save:
                torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
            return
        if not self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.model_wrapped.save_checkpoint(output_dir, exclude_frozen_parameters=True)
        if self.args.should_save and not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper):
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save adapters and critic."""
        if not self.is_deepspeed_enabled and not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        weights = self.actor_critic.trained_weights()
        with self._noting():  # of ResumableTrainer, with which it is combined
            self._save(output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _skip_step(self, model: nn.Module) -> None:
        """Leave out the optimizer step whose gradient is there; the learning rate goes on as after any step."""
        model.zero_grad()
        if self.is_deepspeed_enabled:  # it has left the step out, and the Trainer would hold the learning rate
            self.optimizer.optimizer.overflow = False
        # to Accelerate this is no step, so the optimizer's momentum moves nothing
        self.accelerator.gradient_state._set_sync_gradients(False)
