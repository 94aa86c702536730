"""What PPOTrainer saves and takes up again: adapters, critic, average, statistics, and what is under way."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PPOConfig
from ..modeling import ActorCritic, whole_weights
from ..modeling.averaging import AveragedWeights
from ..ppo.metrics import Metrics
from ..ppo.nonfinite import StepGuard
from ..ppo.rollouts import Experience
from ..ppo.updates import Updates
from ..sharded import ShardedTrainer
from . import files as checkpoint
from .model_card import model_card
from .resume import ResumableTrainer


class SavingTrainer(ShardedTrainer, ResumableTrainer):
    """The saving half of [`PPOTrainer`]: plain PEFT adapters, the critic beside them, everything else as numbers."""

    args: PPOConfig
    actor_critic: ActorCritic
    experience: Experience
    updates: Updates
    guard: StepGuard
    averaged_policy: AveragedWeights | None
    _metrics: dict[str, Metrics]

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        output_dir = output_dir or self.args.output_dir
        if not self.args.should_save:
            return
        os.makedirs(output_dir, exist_ok=True)
        checkpoint.save_actor_critic(self.actor_critic, output_dir, state_dict)
        if self.averaged_policy is not None:
            policy, name = self.actor_critic.policy, self.actor_critic.policy_adapter
            averages = self.averaged_policy.state_dict()
            checkpoint.save_adapter(policy, name, os.path.join(output_dir, checkpoint.AVERAGED), averages)
        state = self.experience.state_dict() | {"settings": checkpoint.run_settings(self.args)}
        checkpoint.save_state(state, output_dir)
        self.processing_class.save_pretrained(output_dir)
        self._card(self.final_place(output_dir)).save(os.path.join(output_dir, "README.md"))

    def _load_weights(self, directory: str) -> None:
        checkpoint.load_actor_critic_weights(self.actor_critic, directory)
        if self.averaged_policy is None:
            return
        policy, name = self.actor_critic.policy, self.actor_critic.policy_adapter
        averaged = os.path.join(directory, checkpoint.AVERAGED)
        if self.args.resume_with_changed_settings and not os.path.isdir(averaged):  # it starts from the weights
            self.averaged_policy.load_state_dict(whole_weights(self.actor_critic.policy_parameters()))
        else:
            self.averaged_policy.load_state_dict(checkpoint.read_averages(policy, name, averaged))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(resume_from_checkpoint)
        self.experience.load_state_dict(checkpoint.load_state(resume_from_checkpoint))

    def _check_resumed(self, directory: str) -> None:
        checkpoint.check_settings(directory, checkpoint.load_state(directory).get("settings", {}), self.args)

    def _run_state(self) -> dict[str, Tensor]:
        rollout, metrics = self.updates.state_dict(self.state.global_step), self._metrics["train"].state_dict()
        parts = {"rollout": rollout, "metrics": metrics, "guard": {"skipped": torch.tensor(self.guard.skipped)}}
        return {f"{part}.{key}": x for part, tensors in parts.items() for key, x in tensors.items()}

    def _load_run_state(self, state: dict[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"rollout": {}, "metrics": {}, "guard": {}}
        for key, x in state.items():
            part, _, name = key.partition(".")
            parts[part][name] = x
        if parts["rollout"]:
            self.updates.load_state_dict(parts["rollout"], self.state.global_step)
        self._metrics["train"].load_state_dict(parts["metrics"], self.args.device)
        self.guard.skipped = int(parts["guard"]["skipped"])

    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint)

    def _card(self, output_dir: str, **metadata: Any):
        return model_card(
            self.args,
            self.actor_critic.config._name_or_path or None,
            self.hub_model_id or os.path.abspath(output_dir),
            [reward.name for reward in self.experience.rewards],
            self.state.log_history,
            self.state.global_step,
            self.actor_critic.policy.peft_config[self.actor_critic.policy_adapter],
            self.actor_critic.reference_adapter is not None,
            **metadata,
        )

    def create_model_card(self, **metadata: Any) -> None:
        """Write the model card of the run into its output directory."""
        if self.is_world_process_zero():
            self._card(self.args.output_dir, **metadata).save(os.path.join(self.args.output_dir, "README.md"))
