"""PPO as a [`~transformers.Trainer`]: collect a rollout, then epochs of minibatches."""

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_utils import EvalLoopOutput

from . import checkpoint, ppo_math
from .arguments import as_list, check_trainer_arguments, load_tokenizer, refuse_unknown_arguments
from .batch_plan import BatchPlan
from .completions import print_completions
from .config import PPOConfig
from .data import RolloutSampler, RolloutStream, Rows, tokenize_prompts
from .experience import Experience, Samples
from .generation import TransformersGenerator
from .hub import push_in_background
from .metrics import Metrics
from .model_card import model_card
from .modeling import load_actor_critic
from .rewards import RewardFunc, build_rewards
from .rollout import MicroBatch, micro_batches, schedule


class PPOTrainer(Trainer):
    """Trainer for Proximal Policy Optimization on one frozen base model.

    The base plays policy (LoRA adapter on), reference (adapter off) and critic (value head on the policy's trunk). The
    arguments are those of TRL's `GRPOTrainer`.

    Source: https://huggingface.co/papers/1707.06347, for language models https://huggingface.co/papers/2203.02155

    Example:

    ```python
    from datasets import load_dataset
    from trl_ppo_ext import PPOTrainer

    trainer = PPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs="Skywork/Skywork-Reward-V2-Qwen3-0.6B",
        train_dataset=load_dataset("trl-lib/ultrafeedback-prompt", split="train"),
    )
    trainer.train()
    ```

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            The base model. A string is loaded in the run's dtype with `args.model_init_kwargs`. The adapter of a
            `PeftModel` starts the policy, and a frozen copy of it is the reference.
        reward_funcs (`str`, `PreTrainedModel`, [`RewardAdapter`], [`Judge`], `Callable`, or a list of these):
            Functions with TRL's signature, sequence classifiers (given as a string, loaded frozen and quantised, see
            `args.reward_quantization`), adapters on the policy's base, judges and remote rewards. Several are summed
            with `args.reward_weights`.
        args ([`PPOConfig`], *optional*): The run's config.
        train_dataset (`Dataset` or `IterableDataset`):
            Rows with a `"prompt"`, text or chat messages; their other columns reach the reward functions.
        eval_dataset (`Dataset`, `IterableDataset` or a `dict` of them, *optional*): The same for evaluation.
        processing_class (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the policy; that of `model` by default.
        reward_processing_classes (`PreTrainedTokenizerBase` or a list, *optional*): Tokenizers of the classifiers.
        callbacks (`list[TrainerCallback]`, *optional*): Further callbacks.
        optimizers (`tuple`, *optional*): Optimizer and scheduler; AdamW with a linear schedule by default.
        quantization_config (`BitsAndBytesConfig`, *optional*): Quantisation of the base, if `model` is a string.
        peft_config (`PeftConfig`, *optional*): Config of the policy's adapter; LoRA of rank 16 by default.
        monitor_funcs (`str`, `PreTrainedModel`, `Callable`, or a list of these, *optional*):
            Rewards that are scored and logged, never optimised: where they fall while the reward rises, it is hacked.

    Raises:
        `TypeError` or `ValueError`: If an argument cannot be honoured, before anything is trained and, where that can
            be known, before anything is loaded.
    """

    # every micro-batch is divided by the tokens of its whole optimizer step, so the Trainer must not divide again
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        monitor_funcs: RewardFunc | list[RewardFunc] | None = None,
        **unknown: Any,
    ):
        model_id = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        if args is None:
            args = PPOConfig(f"{model_id.rstrip('/').split('/')[-1] or 'model'}-PPO")
        rewards_given, monitors_given = as_list(reward_funcs), as_list(monitor_funcs)
        tokenizers = as_list(reward_processing_classes)
        refuse_unknown_arguments(unknown)
        check_trainer_arguments(
            model, rewards_given, monitors_given, args, train_dataset, tokenizers, quantization_config, peft_config
        )
        tokenizer, context_length = load_tokenizer(model, model_id, processing_class, args)
        self._tokenize = partial(
            tokenize_prompts,
            tokenizer=tokenizer,
            max_completion_length=args.max_completion_length,
            context_length=context_length,
            chat_template_kwargs=cast(dict, args.chat_template_kwargs),  # parsed by now, if it came as a string
        )
        if train_dataset is not None:
            train_dataset = self._tokenize(train_dataset, name="train_dataset")
        if isinstance(eval_dataset, dict):
            eval_dataset = {
                key: self._tokenize(value, name=f"eval_dataset[{key!r}]") for key, value in eval_dataset.items()
            }
        elif eval_dataset is not None:
            eval_dataset = self._tokenize(eval_dataset, name="eval_dataset")
        # each process reads a stream itself: the main one could not send text to the others
        args.accelerator_config.dispatch_batches = False

        set_seed(args.seed)  # LoRA weights are drawn when the adapter is made
        actor_critic = load_actor_critic(model, args, quantization_config, peft_config, args.device)
        rewards = build_rewards(rewards_given, tokenizers, args, actor_critic, tokenizer)
        monitors = build_rewards(monitors_given, None, args, actor_critic, tokenizer)
        super().__init__(
            model=actor_critic,
            args=args,
            data_collator=Rows,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        set_seed(args.seed, device_specific=True)  # processes must not sample with the same noise
        self.actor_critic = actor_critic
        self.plan = BatchPlan.from_config(args, args.world_size)
        generator = TransformersGenerator(actor_critic, tokenizer, args, self.accelerator)
        self.experience = Experience(actor_critic, generator, rewards, monitors, tokenizer, args, self.accelerator)
        self._micro_batches: Iterator[MicroBatch] = iter(())
        self._tokens_per_step = torch.zeros(0)
        self._metrics = {"train": Metrics(), "eval": Metrics()}
        self._samples: Samples | None = None
        self._since_log = (time.perf_counter(), 0)

    # ---- data: one dataloader batch is the prompts of a whole rollout, repeated for each of its micro-batches ----

    def get_train_dataloader(self) -> DataLoader:
        """Dataloader whose batches are rollouts of prompts."""
        if self.train_dataset is None:
            raise ValueError("`train()` needs a `train_dataset`; pass one to PPOTrainer.")
        self._micro_batches = iter(())  # what an earlier `train()` left unfinished is no part of this one
        dataset = self.train_dataset
        if isinstance(dataset, IterableDataset):
            plan = self.plan
            dataset = RolloutStream(dataset, plan.prompts, plan.num_generations, plan.micro_steps)
        return self._get_dataloader(
            dataset, "Training", self.plan.completions_per_process, self._get_train_sampler, is_training=True
        )

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        plan, args = self.plan, self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        rows = len(train_dataset if train_dataset is not None else self.train_dataset)
        return RolloutSampler(rows, plan.prompts, plan.num_generations, plan.micro_steps, args.shuffle_dataset, seed)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | IterableDataset | None = None) -> DataLoader:
        """Dataloader of an evaluation set, given to the trainer or to `evaluate`.

        Args:
            eval_dataset (`str`, `Dataset` or `IterableDataset`, *optional*): Its name, or the set itself.

        Returns:
            `DataLoader`: Batches of rows.
        """
        if isinstance(eval_dataset, Dataset | IterableDataset) and eval_dataset is not self.eval_dataset:
            eval_dataset = self._tokenize(eval_dataset, name="eval_dataset")
        return super().get_eval_dataloader(eval_dataset)

    # ---- the algorithm: collect a rollout, then epochs of minibatches ----

    def training_step(self, model: nn.Module, inputs: Rows, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One micro-batch; the first of a rollout collects it."""
        micro_batch = next(self._micro_batches, None)
        if micro_batch is None:
            self._micro_batches = self._collect(inputs)
            micro_batch = next(self._micro_batches)
        start = time.perf_counter()
        loss = super().training_step(model, micro_batch, num_items_in_batch)
        seconds = (time.perf_counter() - start) * self.plan.micro_steps
        self._metrics["train"].mean("time/update", torch.tensor(seconds, device=loss.device))
        return loss

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:
        return inputs  # on the device already

    def _collect(self, rows: Rows) -> Iterator[MicroBatch]:
        """Collect a rollout and cut it into the micro-batches of all its epochs."""
        metrics = self._metrics["train"]
        self.actor_critic.eval()
        rollout, self._samples = self.experience.collect(rows, metrics, self.state)
        metrics.mean("kl_coef", torch.tensor(self.args.kl_coef, device=self.args.device))
        plan = schedule(len(rollout), self.plan)
        tokens = rollout.response_mask.sum(1).cpu()[plan].sum((1, 2))
        self._tokens_per_step = self.experience.all_sum(tokens.to(self.args.device))
        sequences = rollout.sequences
        lengths = torch.stack([sequences.prompt_lengths.sum(), sequences.completion_lengths.sum()])
        prompt_tokens, completion_tokens = self.experience.all_sum(lengths.to(self.args.device)).tolist()
        self.state.num_input_tokens_seen += prompt_tokens + completion_tokens
        self._since_log = (self._since_log[0], self._since_log[1] + completion_tokens)
        # a run resumed within a rollout goes on where it stopped
        done = self.state.global_step * self.args.gradient_accumulation_steps % self.plan.micro_steps
        return micro_batches(rollout, plan, start=done)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """PPO's loss of a micro-batch, as its share of the optimizer step's mean over tokens on all processes."""
        args, rollout = self.args, inputs.rollout
        with_entropy = args.entropy_coef != 0
        outputs = model(rollout.sequences, args.temperature, with_entropy, with_entropy)
        per_token = ppo_math.clipped_policy_loss(
            outputs.logprobs, rollout.old_logprobs, rollout.advantages, args.cliprange, args.cliprange
        )
        value_loss = ppo_math.clipped_value_loss(
            outputs.values, rollout.old_values, rollout.returns, args.cliprange_value
        )
        self._log_update(rollout, outputs, per_token, value_loss)
        per_token = per_token + args.vf_coef * value_loss
        if with_entropy:
            per_token = per_token - args.entropy_coef * outputs.entropies
        tokens = self._tokens_per_step[inputs.step]
        loss = ppo_math.aggregate_loss(per_token, rollout.response_mask, "token", denominator=tokens)
        return loss * self.accelerator.num_processes  # gradients are averaged over processes, the loss is a sum

    @torch.no_grad()
    def _log_update(self, rollout: Any, outputs: Any, policy_loss: Tensor, value_loss: Tensor) -> None:
        metrics, mask = self._metrics["train"], rollout.response_mask
        log_ratio = outputs.logprobs - rollout.old_logprobs
        ratio = log_ratio.exp()
        too_low = (ratio < 1 - self.args.cliprange) & (rollout.advantages < 0)
        too_high = (ratio > 1 + self.args.cliprange) & (rollout.advantages > 0)
        metrics.mean("loss/policy", policy_loss, mask)
        metrics.mean("loss/value", value_loss, mask)
        metrics.mean("ratio/mean", ratio, mask)
        metrics.maximum("ratio/max", ratio, mask)
        metrics.mean("approx_kl", torch.expm1(log_ratio) - log_ratio, mask)
        metrics.mean("clip_ratio/low_mean", too_low, mask)
        metrics.mean("clip_ratio/high_mean", too_high, mask)
        metrics.mean("clip_ratio/region_mean", too_low | too_high, mask)
        if self.args.cliprange_value is not None:
            unclipped = 0.5 * (outputs.values - rollout.returns) ** 2
            metrics.mean("value/clip_ratio", value_loss > unclipped, mask)

    # ---- evaluation and logging ----

    def prediction_step(
        self, model: nn.Module, inputs: Rows, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, None, None]:
        """Sample, score, and add to the metrics."""
        gradient_state, counted = self.accelerator.gradient_state, len(inputs)
        if gradient_state.end_of_dataloader and gradient_state.remainder > 0:
            # the last batch is filled up with rows from the beginning, which count once
            counted = gradient_state.remainder - self.accelerator.process_index * self.args.eval_batch_size
        self._samples = self.experience.evaluate(inputs, self._metrics["eval"], self.state, counted)
        return None, None, None

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs) -> EvalLoopOutput:
        """The Trainer's loop, with the metrics of what was sampled."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._compute_metrics("eval")
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _compute_metrics(self, mode: str) -> dict[str, float]:
        def all_max(values: Tensor) -> Tensor:
            return self.accelerator.gather(values[None]).amax(0)

        return self._metrics[mode].compute(self.experience.all_sum, all_max)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics since the last log.

        Args:
            logs (`dict[str, float]`): What the Trainer logs.
            start_time (`float`, *optional*): Start of training.
        """
        if self._metrics["train"] and "loss" in logs:
            logs |= self._compute_metrics("train")
            logs["num_tokens"] = self.state.num_input_tokens_seen
            (since, tokens), now = self._since_log, time.perf_counter()
            if tokens:  # a rollout was collected since
                logs["tokens_per_second"] = tokens / (now - since)
                self._since_log = (now, 0)
        super().log(logs, start_time)
        if self.args.log_completions and self._samples is not None and self.accelerator.is_main_process:
            names = [reward.name for reward in self.experience.rewards]
            print_completions(self._samples, names, self.state.global_step, self.args.num_completions_to_print)
            self._samples = None

    def end(self) -> None:
        """Finish the trackers and leave the process group, once, at the very end of a script."""
        self.accelerator.wait_for_everyone()
        # DDP's reducer must not be the last to hold the process group: it would take the group down while it holds the
        # interpreter's lock, and wait for threads that need it
        self.model_wrapped = self.model
        self.accelerator.free_memory()
        super().end()

    # ---- saving: a plain PEFT adapter, the value head beside it ----

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        output_dir = output_dir or self.args.output_dir
        if not self.args.should_save:
            return
        os.makedirs(output_dir, exist_ok=True)
        checkpoint.save_adapter(self.actor_critic, output_dir, state_dict)
        checkpoint.save_state(self.experience.shaping.state_dict(), output_dir)
        self.processing_class.save_pretrained(output_dir)
        self._card(output_dir).save(os.path.join(output_dir, "README.md"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint.load_adapter(self.actor_critic, resume_from_checkpoint)
        self.experience.shaping.load_state_dict(checkpoint.load_state(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        checkpoint.load_adapter(self.actor_critic, self.state.best_model_checkpoint)

    def _card(self, output_dir: str, **metadata: Any):
        return model_card(
            self.args,
            self.actor_critic.config._name_or_path or None,
            self.hub_model_id or output_dir,
            [reward.name for reward in self.experience.rewards],
            self.state.log_history,
            self.state.global_step,
            self.actor_critic.policy.peft_config[self.actor_critic.policy_adapter],
            self.actor_critic.reference_adapter is not None,
            **metadata,
        )

    def create_model_card(self, **metadata: Any) -> None:
        """Write the model card of the run into its output directory.

        Args:
            metadata (`dict`): Further fields of the card's metadata: `tags`, `language`, `license`, `datasets`, ...
        """
        if self.is_world_process_zero():
            self._card(self.args.output_dir, **metadata).save(os.path.join(self.args.output_dir, "README.md"))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        push_in_background(self, checkpoint_folder)
