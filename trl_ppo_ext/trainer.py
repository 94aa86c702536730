"""PPO as a [`~transformers.Trainer`]: collect a rollout, then epochs of minibatches."""

import math
import time
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from .arguments import as_list, check_trainer_arguments, load_tokenizer, refuse_unknown_arguments
from .checkpoints.hub import PublishingTrainer
from .checkpoints.saving import SavingTrainer
from .config import PPOConfig
from .data.prompts import RolloutSampler, RolloutStream, Rows, tokenize_prompts
from .data.supervised import PTXSampler, tokenize_ptx
from .distributed import loading_whole
from .generation import build_generator
from .modeling import load_actor_critic
from .modeling.averaging import AveragedWeights, AveragingCallback
from .modeling.optimizers import check_given_optimizers
from .ppo.batch_plan import BatchPlan
from .ppo.metrics import Metrics
from .ppo.nonfinite import StepGuard
from .ppo.random_state import seeded_apart
from .ppo.rollouts import Experience
from .ppo.samples import Samples
from .ppo.throughput import Throughput
from .ppo.updates import Updates, set_learning_rate
from .rewards import Reward, RewardFunc, build_rewards
from .sequences import MicroBatch, Sequences
from .sharded import without_step
from .tracking.completions import print_completions
from .tracking.run_log import RunLog
from .tracking.trackers import check_trackers, log_completions


class PPOTrainer(PublishingTrainer, SavingTrainer):
    """Trainer for Proximal Policy Optimization on one frozen base model.

    The base plays policy (LoRA adapter on), reference (adapter off) and critic (value head on the policy's trunk, or
    on an adapter of its own). The arguments are those of TRL's `GRPOTrainer`.

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
        optimizers (`tuple`, *optional*): Optimizer, of all that is trained, and its scheduler; AdamW by default.
        quantization_config (`BitsAndBytesConfig`, *optional*): Quantisation of the base, if `model` is a string.
        peft_config (`PeftConfig`, *optional*): Config of the policy's adapter; LoRA of rank 16 by default.
        monitor_funcs (`str`, `PreTrainedModel`, `Callable`, or a list of these, *optional*):
            Rewards that are scored and logged, never optimised: where they fall while the reward rises, it is hacked.
        ptx_dataset (`Dataset`, *optional*):
            Text that the policy goes on learning from, with weight `args.ptx_coef`: rows with `"text"`, `"messages"`,
            or `"prompt"` and `"completion"`. Every optimizer step takes as many rows as completions.

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
        ptx_dataset: Dataset | None = None,
        **unknown: Any,
    ):
        model_id = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        if args is None:
            args = PPOConfig(f"{model_id.rstrip('/').split('/')[-1] or 'model'}-PPO")
        rewards_given, monitors_given = as_list(reward_funcs), as_list(monitor_funcs)
        tokenizers = as_list(reward_processing_classes)
        refuse_unknown_arguments(unknown)
        check_trainer_arguments(
            model,
            rewards_given,
            monitors_given,
            args,
            train_dataset,
            tokenizers,
            optimizers[0],
            quantization_config,
            peft_config,
        )
        check_trackers(args)
        tokenizer, context_length = load_tokenizer(model, model_id, processing_class, args)
        template_kwargs = cast(dict, args.chat_template_kwargs)  # parsed by now, if it came as a string
        self._tokenize = partial(
            tokenize_prompts,
            tokenizer=tokenizer,
            max_completion_length=args.max_completion_length,
            context_length=context_length,
            chat_template_kwargs=template_kwargs,
        )
        if train_dataset is not None:
            train_dataset = self._tokenize(train_dataset, name="train_dataset")
        eval_dataset = self._tokenized_for_evaluation(eval_dataset)
        if ptx_dataset is not None:
            longest = min(args.ptx_max_length, context_length or args.ptx_max_length)
            ptx_dataset = tokenize_ptx(ptx_dataset, tokenizer, longest, template_kwargs)
        # each process reads a stream itself: the main one could not send text to the others
        args.accelerator_config.dispatch_batches = False

        set_seed(args.seed)  # LoRA weights are drawn when the adapter is made
        actor_critic = load_actor_critic(model, args, quantization_config, peft_config, args.device)
        check_given_optimizers(*optimizers, actor_critic)
        with loading_whole():
            settings: dict[str, Any] = {
                "batch_size": args.per_device_reward_batch_size,
                "label": args.reward_label,
                "quantization": args.reward_quantization,
                "offload": args.offload_rewards,
                "device": args.device,
                "trust_remote_code": args.trust_remote_code,
            }
            rewards = build_rewards(rewards_given, tokenizers, actor_critic, tokenizer, **settings)
            monitors = build_rewards(monitors_given, None, actor_critic, tokenizer, **settings)
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
        self._shard()
        self._assemble(rewards, monitors, ptx_dataset)

    def _tokenized_for_evaluation(self, dataset: Any) -> Any:
        if dataset is None:
            return None
        if isinstance(dataset, dict):
            return {key: self._tokenize(value, name=f"eval_dataset[{key!r}]") for key, value in dataset.items()}
        return self._tokenize(dataset, name="eval_dataset")

    def _assemble(self, rewards: list[Reward], monitors: list[Reward], ptx_dataset: Dataset | None) -> None:
        """What collects rollouts, what learns from them, and what watches over it."""
        args, actor_critic, tokenizer = self.args, self.actor_critic, self.processing_class
        self.plan = BatchPlan.from_config(args, args.world_size)
        generator = build_generator(actor_critic, tokenizer, args, self.accelerator)
        self.experience = Experience(actor_critic, generator, rewards, monitors, tokenizer, args, self.accelerator)
        self._metrics = {"train": Metrics(), "eval": Metrics()}
        ptx = None
        if ptx_dataset is not None:
            ptx = PTXSampler.from_config(ptx_dataset, self.plan, args, tokenizer.pad_token_id)
        self.updates = Updates(args, self.plan, self._metrics["train"], self.experience.all_sum, ptx)
        self.guard = StepGuard(args.max_skipped_steps, args.output_dir, args.process_index, tokenizer)
        self.averaged_policy: AveragedWeights | None = None
        if args.ema_decay is not None:
            self.averaged_policy = AveragedWeights(actor_critic.policy_parameters(), args.ema_decay)
            self.add_callback(AveragingCallback(self.averaged_policy))
        self._may_step = True
        self._samples: Samples | None = None
        names = [[reward.name for reward in asked] for asked in (rewards, monitors)]
        self.run_log = RunLog(actor_critic.config._name_or_path, *names)
        self.add_callback(self.run_log)
        self.throughput = Throughput(actor_critic, self.plan, args.device)

    # ---- data: one dataloader batch is the prompts of a whole rollout, repeated for each of its micro-batches ----

    def get_train_dataloader(self) -> DataLoader:
        """Dataloader whose batches are rollouts of prompts."""
        if self.train_dataset is None:
            raise ValueError("`train()` needs a `train_dataset`; pass one to PPOTrainer.")
        self.updates.forget()  # what an earlier `train()` left unfinished is no part of this one
        self.throughput.restart()
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
        """Dataloader of an evaluation set, given to the trainer or to `evaluate`."""
        if isinstance(eval_dataset, Dataset | IterableDataset) and eval_dataset is not self.eval_dataset:
            eval_dataset = self._tokenize(eval_dataset, name="eval_dataset")
        return super().get_eval_dataloader(eval_dataset)

    # ---- the algorithm: collect a rollout, then epochs of minibatches ----

    def training_step(self, model: nn.Module, inputs: Rows, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One micro-batch; the first of a rollout collects it."""
        updates = self.updates
        micro_batch = next(updates.micro_batches, None)
        if micro_batch is None:
            self._collect(inputs)
            micro_batch = next(updates.micro_batches)
        start = time.perf_counter()
        if updates.stopped_early:
            loss = torch.zeros((), device=self.args.device)
            self._may_step = not self.accelerator.sync_gradients or updates.may_step()
        else:
            loss = super().training_step(model, micro_batch, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._before_optimizer_step(model)
        seconds = (time.perf_counter() - start) * self.plan.micro_steps
        self._metrics["train"].mean("time/update", torch.tensor(seconds, device=loss.device))
        return loss

    def _before_optimizer_step(self, model: nn.Module) -> None:
        """The gradients of an optimizer step are there: see whether it may be taken, and by whom."""
        if not self._may_step:
            self._skip_step(model)
        elif self.state.global_step < self.args.value_warmup_steps:
            for parameter in self.actor_critic.policy_parameters().values():
                parameter.grad = None  # no gradient, no step: neither momentum nor weight decay touch it

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float:
        """The norm of a gradient that is about to be applied; one that is not finite is not."""
        if not self.accelerator.sync_gradients:  # no step is taken, and a gradient scaler must not hear of one
            return torch.zeros((), device=self.args.device)
        grad_norm = super()._get_grad_norm(model, grad_norm)
        # a gradient scaler looks for itself, and needs the step to adapt
        if self.accelerator.scaler is None:
            finite = math.isfinite(float(grad_norm))
            counted = torch.tensor(float(not finite and self.is_world_process_zero()), device=self.args.device)
            self._metrics["train"].total("skipped_steps", counted)
            step = self.state.global_step + 1
            self.guard.see(finite, step, self.updates.rollout, self.updates.suspects)
            if not finite:
                self._skip_step(model)
        return grad_norm

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        return super()._clip_grad_norm(model)

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:
        return inputs  # on the device already

    def _collect(self, rows: Rows) -> None:
        """Collect a rollout and begin its updates."""
        metrics = self._metrics["train"]
        self.actor_critic.eval()
        rollout, self._samples, coefficients = self.experience.collect(rows, metrics, self.state)
        metrics.mean("kl_coef", torch.tensor(coefficients.kl, device=self.args.device))
        metrics.mean("entropy_coef", torch.tensor(coefficients.entropy, device=self.args.device))
        self._count_tokens(self._samples.sequences)
        self.updates.start(rollout, coefficients, self.state.global_step)

    def _count_tokens(self, sequences: Sequences) -> None:
        lengths = torch.stack([sequences.prompt_lengths.sum(), sequences.completion_lengths.sum()])
        prompt_tokens, completion_tokens = self.experience.all_sum(lengths.to(self.args.device)).tolist()
        self.state.num_input_tokens_seen += prompt_tokens + completion_tokens
        self.throughput.add(prompt_tokens, completion_tokens)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """PPO's loss of a micro-batch, as its share of the optimizer step's loss over all processes."""
        # gradients are averaged over processes, the loss is a sum
        loss = self.updates.loss(model, inputs) * self.accelerator.num_processes
        if self.accelerator.sync_gradients:  # the last micro-batch of its optimizer step
            self._may_step = self.updates.may_step()
            if self.is_deepspeed_enabled and not self._may_step:
                loss = without_step(loss, model(inputs.rollout.sequences).logprobs)
        return loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, with `critic_learning_rate` for the critic."""
        made = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if self.args.critic_learning_rate is not None and not made:
            set_learning_rate(optimizer, self.actor_critic.critic_parameters(), self.args.critic_learning_rate)
        return optimizer

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
        with seeded_apart(self.args.seed, self.args.process_index, self.args.device):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._compute_metrics("eval")
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _compute_metrics(self, mode: str) -> dict[str, float]:
        def all_max(values: Tensor) -> Tensor:
            return self.accelerator.gather(values[None]).amax(0)

        return self._metrics[mode].compute(self.experience.all_sum, all_max)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics since the last log."""
        if self._metrics["train"] and "loss" in logs:
            logs |= self._compute_metrics("train")
            logs["num_tokens"] = self.state.num_input_tokens_seen
            logs |= self.throughput.since_last()
        super().log(logs, start_time)
        if self._samples is not None and self.accelerator.is_main_process:
            evaluated = any(name.startswith("eval_") for name in logs)
            self.run_log.completions(self._samples, self.state, "eval" if evaluated else "train")
            if self.args.log_completions:
                self._show_completions(self._samples, "eval/completions" if evaluated else "completions")
            self._samples = None

    def _show_completions(self, samples: Samples, key: str) -> None:
        """On the terminal, and in the trackers that have tables."""
        step, rewards, monitors = self.state.global_step, self.run_log.rewards, self.run_log.monitors
        print_completions(samples, rewards, step, self.args.num_completions_to_print)
        log_completions(cast(list, self.args.report_to), samples, rewards, monitors, step, key)

    def end(self) -> None:
        """Finish the trackers and leave the process group, once, at the very end of a script."""
        self.accelerator.wait_for_everyone()
        # DDP's reducer must not be the last to hold the process group: it would take the group down while it holds the
        # interpreter's lock, and wait for threads that need it
        self.model_wrapped = self.model
        self.accelerator.free_memory()
        super().end()
