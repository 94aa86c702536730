"""PPO as a [`~transformers.Trainer`]: collect a rollout, then epochs of minibatches."""

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset
from transformers import (
    BitsAndBytesConfig,
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
)
from transformers.integrations import apply_liger_kernel
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, SaveStrategy
from transformers.utils import logging

from . import distributed
from .arguments import (
    as_list,
    check_callbacks,
    check_methods,
    check_unknown_arguments,
    read_prompts,
    settle_trainer_arguments,
    tokenizer_name,
    warn_of_turns_that_go_on,
    without_rewards,
)
from .checkpoints import files, hub, resume, save
from .checkpoints.atomic import rotate
from .concurrency import FAILURES
from .config import METRIC_SCHEDULES, PPOConfig
from .data import PROMPT_IDS, RolloutSampler, Rows, StreamedRows, weighted_rows
from .episodes import Environments, Player, build_player, record
from .modeling.adapters import check_has_adapter
from .modeling.critics import CriticFactory
from .modeling.loading import add_critic_to_optimizer, load_actor_critic
from .ppo.credit import build_credit
from .ppo.guards import SamplerComparison, count_skipped
from .ppo.metrics import Metrics, check_best_metric, evaluation_metrics
from .ppo.progress import Progress
from .ppo.rollouts import Components, EvaluationBatch, Samples, collect, sample
from .ppo.state import RunState
from .ppo.updates import MicroBatch, Updates, set_apart
from .private_names import warn_of_missing_names
from .rewards import (
    ClassifierReward,
    RewardError,
    RewardFunc,
    load_rewards,
    no_reward,
)
from .rewards.scoring import RandomState, Reward, fixed_seed, guarded
from .tracking.completions import (
    check_trackers,
    completions_table,
    log_completions,
    print_completions,
    save_completions,
)
from .tracking.run_log import RunLog, Terminal
from .trl_names import TABLES

logger = logging.get_logger(__name__)


class PPOTrainer(Trainer):
    """Trainer for Proximal Policy Optimization on one frozen base model.

    The base plays policy (LoRA adapter on), reference (adapter off) and critic (a network on its
    states, or a value head on its own adapter). The arguments are those of TRL's `GRPOTrainer`.

    Source: https://huggingface.co/papers/1707.06347, for language models
    https://huggingface.co/papers/2203.02155

    Example:

    ```python
    from datasets import load_dataset
    from trl_ppo_ext import PPOConfig, PPOTrainer

    trainer = PPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs="Skywork/Skywork-Reward-V2-Qwen3-0.6B",
        args=PPOConfig("Qwen2.5-0.5B-PPO", kl_coef=0.05),
        train_dataset=load_dataset("trl-lib/ultrafeedback-prompt", split="train"),
    )
    trainer.train()
    ```

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            The base model. A string is loaded in the run's dtype with `model_init_kwargs`. The
            adapter of a `PeftModel` starts the policy, and a frozen copy of it is the reference.
        reward_funcs (`str`, `PreTrainedModel`, [`RewardAdapter`], [`Judge`], `Callable` or a list):
            Functions with TRL's signature, sequence classifiers (loaded frozen and quantized if
            given as a string, see `reward_quantization`), adapters on the policy's base, judges,
            and objects with `name` and `score`. Several are summed with `reward_weights`. With
            `reference_prompt` there may be none.
        args ([`PPOConfig`], *optional*): Config of the run.
        train_dataset (`Dataset` or `IterableDataset`):
            Rows with a `"prompt"` (text or chat messages); reward functions receive the other
            columns.
        eval_dataset (`Dataset`, `IterableDataset` or a `dict` of them, *optional*):
            Evaluation rows of the same form.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            Tokenizer of the policy. Defaults to the model's.
        reward_processing_classes (`PreTrainedTokenizerBase` or a list, *optional*):
            Tokenizers of the classifiers.
        callbacks (`list[TrainerCallback]`, *optional*): Additional callbacks.
        optimizers (`tuple`, *optional*):
            Optimizer of all trained weights, and its scheduler. Defaults to AdamW.
        quantization_config (`BitsAndBytesConfig`, *optional*):
            Quantization of the base, if `model` is a string.
        peft_config (`PeftConfig` or `str`, *optional*):
            Config of the policy's adapter, or path or id of a saved adapter on `model`, which
            starts the policy. Defaults to LoRA of rank 16.
        tools (`Callable` or `list[Callable]`, *optional*):
            Functions, also asynchronous ones, that the policy may call between its turns. They need
            type hints and a Google-style docstring, and the chat template must render tool calls.
        rollout_func (`Callable`, *optional*):
            Function from prompts and this trainer to a `dict` with the `"prompt_ids"` and
            `"completion_ids"` that it has sampled with the policy. Its other entries are passed to
            the reward functions.
        environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            Returns an environment with `reset`: a class whose methods are tools, with or without
            `get_reward`, as in TRL, or one with `step`. With a dictionary, the column `environment`
            of a row chooses. See docs/environments.md.
        monitor_funcs (`str`, `PreTrainedModel`, `Callable`, or a list of these, *optional*):
            Rewards that are logged but never optimized. If they fall while the reward rises, the
            reward is hacked.
        critic_factory (`Callable`, *optional*):
            Function from the policy to a [`Critic`] of your own, in place of the one that `critic`
            of the config names. See docs/critics.md.
        curriculum (`Callable`, *optional*):
            Weighs the rows of the dataset by their scores. See docs/environments.md.

    Raises:
        `TypeError` or `ValueError`: If an argument is invalid, before anything is trained and, if
            possible, before anything is loaded.
    """

    # a micro-batch is divided by the tokens (or completions) of its whole optimizer step: the
    # Trainer must not divide
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase
        | list[PreTrainedTokenizerBase | None]
        | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[
            torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None
        ] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | str | None = None,
        tools: Callable | list[Callable] | None = None,
        rollout_func: Callable[..., dict] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
        monitor_funcs: RewardFunc | list[RewardFunc] | None = None,
        curriculum: Callable[[Tensor, Tensor], Any] | None = None,
        critic_factory: CriticFactory | None = None,
        **unknown: Any,
    ):
        # 1. Check the arguments, before anything is loaded.
        check_unknown_arguments(unknown)
        check_methods(type(self))
        if isinstance(model, str):
            model_id = model
        else:
            model_id = getattr(getattr(model, "config", None), "_name_or_path", "")
        if args is None:
            args = PPOConfig(f"{model_id.rstrip('/').split('/')[-1] or 'model'}-PPO")
        reward_list = as_list(reward_funcs)
        monitor_list = as_list(monitor_funcs)
        reward_tokenizers = as_list(reward_processing_classes)
        environments = Environments(as_list(tools), environment_factory, rollout_func)
        optimizer, scheduler = optimizers
        settle_trainer_arguments(
            model=model,
            reward_funcs=reward_list,
            monitor_funcs=monitor_list,
            args=args,
            train_dataset=train_dataset,
            reward_processing_classes=reward_tokenizers,
            optimizer=optimizer,
            quantization_config=quantization_config,
            peft_config=peft_config,
            eval_dataset=eval_dataset,
            environments=environments,
            curriculum=curriculum,
            critic_factory=critic_factory,
        )
        if not (reward_list or environments.give_rewards):
            reward_list = [no_reward]
            if critic_factory is None:
                args = without_rewards(args, environments)
        check_trackers(args.report_to)
        if args.process_index == 0:
            warn_of_missing_names()
        files.check_target(args.output_dir, model_id)
        files.check_links(args.output_dir)
        if train_dataset is not None or environments.kinds:
            resume.warn_of_earlier_run(args)
        if args.push_to_hub:
            is_main = args.process_index == 0
            distributed.on_every_rank(
                partial(hub.create_repository, args), hub.PushError, runs=is_main
            )

        # 2. Tokenize and check every prompt.
        named = tokenizer_name(model_id, peft_config) if processing_class is None else model_id
        prompts = read_prompts(
            model, named, processing_class, args, environments, train_dataset, eval_dataset
        )
        tokenizer, context_length, template_kwargs, self._tokenize, train_dataset, eval_dataset = (
            prompts
        )

        # 3. Load one base with its adapters, and the rewards.
        if peft_config is None and not isinstance(model, PeftModel) and args.process_index == 0:
            logger.warning(
                "PPOTrainer trains an adapter, not all weights: without `peft_config`, LoRA of "
                "rank 16."
            )
        set_seed(args.seed)  # LoRA weights are drawn when the adapter is created
        actor_critic = load_actor_critic(
            model,
            args,
            quantization_config=quantization_config,
            peft_config=peft_config,
            device=args.device,
            critic_factory=critic_factory,
        )
        if args.use_liger_kernel:  # for layers only: log-probs are fused already
            without_loss = {"cross_entropy": False, "fused_linear_cross_entropy": False}
            apply_liger_kernel(actor_critic.policy, (args.liger_kernel_config or {}) | without_loss)
        with distributed.loading_unsharded():
            rewards, monitors = load_rewards(
                reward_list,
                monitor_list,
                environments.rewards,
                reward_tokenizers,
                actor_critic,
                tokenizer,
                args,
            )
        add_critic_to_optimizer(optimizer, scheduler, actor_critic)
        self._inputs = files.fingerprints(
            actor_critic, tokenizer, template_kwargs, rewards, train_dataset, curriculum
        )

        # 4. Set up the Trainer.
        super().__init__(
            model=cast(Any, actor_critic),
            args=args,
            data_collator=cast(Any, Rows),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=cast(Any, optimizers),
        )
        # by this constructor; others that are evaluated are not
        self._tokenized = [train_dataset]
        self._tokenized += (
            eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        )
        set_seed(args.seed, device_specific=True)  # ranks must not sample with the same noise
        distributed.enable_fsdp_on_cpu(self)
        if self.is_fsdp_enabled:  # before anything refers to parameters, which FSDP replaces
            distributed.shard(actor_critic, actor_critic.policy.get_base_model(), self.accelerator)

        # 5. Assemble what collects a rollout, and the updates from it.
        self.actor_critic = actor_critic
        self.curriculum = curriculum
        player = build_player(
            actor_critic, tokenizer, args, self.accelerator, environments, context_length, self
        )
        player.run = files.digest_of_run(args, self._inputs)
        player.begin_next = self._begin_next if args.vllm_options.overlap_rollouts else None
        if args.process_index == 0 and not args.stop_strings:
            stops = player.generator.stop_token_ids
            warn_of_turns_that_go_on(self.train_dataset, tokenizer, template_kwargs, stops)
        self._assemble(player, rewards, monitors)
        self._begin_state()

        # 6. Show parts under TRL's names, and add the callbacks.
        self._reward_funcs = [
            x.model if isinstance(x, ClassifierReward) else entry
            for x, entry in zip(rewards, reward_list + environments.rewards)
        ]
        self.reward_func_names = [reward.name for reward in rewards]
        self.reward_processing_classes = [getattr(reward, "tokenizer", None) for reward in rewards]
        self.tools = environments.tools
        self.tokenizer = tokenizer
        self.ref_model = None  # as with an adapter
        users = [
            x
            for x in callbacks or ()
            if not getattr(x, "__module__", "").startswith("transformers.")
        ]
        played = player.names if environments.kinds or environments.rollout_func else None
        self._evaluation_metrics = evaluation_metrics(args, rewards, monitors, played)
        # the user's callbacks and subclasses may add metrics
        if not users and type(self) is PPOTrainer:
            check_best_metric(args, eval_dataset, rewards, monitors, played)
        self._add_callbacks(model_id)

    def _assemble(self, player: Player, rewards: list[Reward], monitors: list[Reward]) -> None:
        """Put together what collects a rollout, the chain of its credit, and the updates."""
        args = self.args
        all_sum = partial(self.accelerator.reduce, reduction="sum")
        self.plan = args.plan(self.accelerator.num_processes)
        self.metrics = {mode: Metrics(self.accelerator.device) for mode in ("train", "eval")}
        sampler = None
        if args.generation_backend == "vllm":
            sampler = SamplerComparison(args, self.actor_critic.dtype, all_sum)
        self.components = Components(
            actor_critic=self.actor_critic,
            player=player,
            rewards=rewards,
            monitors=monitors,
            tokenizer=cast(PreTrainedTokenizerBase, self.processing_class),
            args=args,
            accelerator=self.accelerator,
            sampler=sampler,
        )
        self.credit = build_credit(self.components, self.metrics["train"])
        self.updates = Updates(args, self.plan, self.metrics["train"], all_sum)
        self.run_state = RunState(args.kl_coef)
        if self.actor_critic.value_head is not None:
            critic = self.actor_critic.value_head.saved_state
            self.run_state = self.run_state._replace(critic=critic)
            self._install_critic()

    def _tell(self, text: str) -> None:
        """Print a line on the main process, unless a script has removed the terminal's lines."""
        if self.terminal in self.callback_handler.callbacks:
            self.terminal.tell(text)

    def _add_callbacks(self, model_id: str) -> None:
        """Add the run's log, its lines in the terminal, and what is done after every step."""
        monitors = [monitor.name for monitor in self.components.monitors]
        self.run_log = RunLog(model_id, self.reward_func_names, monitors, self.plan)
        self.terminal = Terminal(self.reward_func_names, self.plan, self.args.disable_tqdm)
        # the Trainer's own printing, which it added last
        self.callback_handler.callbacks[-1] = self.terminal
        # before those that may fail at a step's end
        self.callback_handler.callbacks.insert(0, _StepCallback(self))
        self.add_callback(self.run_log)

    def _begin_state(self) -> None:
        """State of a trainer that has not trained yet."""
        # 1. of an optimizer step
        self._next_rows: list[dict] = []  # of a rollout that was begun
        self._samples: dict[str, Samples] = {}  # last batch by mode, logged with the next metrics
        self._takes_step = True
        self._last_step = 0
        self._tokens_since_log = 0
        self._last_log = time.perf_counter()
        self._skipped = 0  # optimizer steps in a row
        self._is_collecting = False
        self._evaluated = "eval"  # prefix of the last evaluation's metrics
        self._eval_rows = 0  # of this evaluation so far

        # 2. of a training
        self._begun = False
        # of the checkpoint that a training ended with, and logs until its weights were loaded
        self.best_step: int | None = None
        self.logs_before_best = 0
        self._save_is_due = True
        self.signals = resume.StopSignals()
        self.preempted = False
        self._validity: dict[Path, bool] = {}  # of checkpoints that were verified
        self._resumed: resume.Checkpoint | None = None  # its progress is still to be restored
        self._change = files.SettingsChange({}, set())  # from the checkpoint's settings
        # returns the progress of the last complete optimizer step; None if the weights left it
        self._last_complete: Callable[[], Progress] | None = None
        self._process_state = {
            kind: dict(kind._shared_state) for kind in (PartialState, AcceleratorState)
        }

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set what only GRPOTrainer reads, and other arguments: both would change
        nothing, or only a part."""
        if name in TABLES["attributes"]:
            raise AttributeError(
                f"`{name}` of GRPOTrainer cannot be set here, where nothing reads it. Use "
                f"{TABLES['attributes'][name]}, or rename an attribute of your own."
            )
        if name == "args" and "components" in vars(self) and value is not self.args:
            raise AttributeError(
                "`args` cannot be replaced once the trainer is built, which has read most of them; "
                "build another trainer."
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Say what replaces an attribute of GRPOTrainer."""
        if name in TABLES["attributes"] and not hasattr(type(self), name):
            raise AttributeError(
                f"{type(self).__name__} has no attribute `{name}`, as GRPOTrainer has; use "
                f"{TABLES['attributes'][name]}."
            )
        return super().__getattribute__(name)  # raises what a property raised, too

    @property
    def environments(self) -> list | None:
        """Environments of the last episodes, as in TRL; `None` without."""
        return [episode.environment for episode in self.components.player.lent] or None

    @property
    def reward_funcs(self) -> tuple[Any, ...]:
        """Rewards, which a run does not change: other ones need another trainer."""
        return tuple(self._reward_funcs)

    @property
    def reward_weights(self) -> Tensor:
        """Weights of the rewards, which a run does not change."""
        return torch.tensor(self.components.reward_weights or [1.0] * len(self.components.rewards))

    def __getstate__(self) -> Any:
        """Refuse to be pickled: a run is more than an object."""
        raise TypeError(
            "A `PPOTrainer` cannot be pickled; `save_model()` saves its adapters, and checkpoints "
            "the run, which `train(resume_from_checkpoint=True)` continues."
        )

    # ---- the algorithm: collect a rollout, then epochs of minibatches ----

    def training_step(
        self, model: nn.Module, inputs: Rows, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run one micro-batch; before the first one of a rollout collect it (only this uses
        `inputs`)."""
        # 1. Collect a rollout (ppo/rollouts.py).
        begin = time.perf_counter()
        micro_batch = next(self.updates.micro_batches, None)
        if micro_batch is None:
            self._collect(inputs)
            micro_batch = next(self.updates.micro_batches)

        # 2. Update: loss (ppo/updates.py) and backward, unless `target_kl` has ended the rollout's
        # updates.
        start = time.perf_counter()
        is_last = self.accelerator.sync_gradients  # of its optimizer step
        if is_last and self.is_deepspeed_enabled:
            self._last_complete = None  # its backward takes the step
        if self.updates.stopped_early:
            loss = torch.zeros((), device=self.accelerator.device)
            self._takes_step = not is_last or self.updates.may_step()
        else:
            # calls `compute_loss`
            loss = super().training_step(model, micro_batch, num_items_in_batch)

        # 3. Step: the Trainer takes it, unless it is skipped here, or in `_get_grad_norm` for a
        # non-finite gradient.
        if is_last and not self._takes_step:
            self._skip_step(model)
        elif is_last and not self.updates.trains_policy(self.state.global_step):
            for parameter in self.actor_critic.policy_parameters().values():
                # without a gradient neither momentum nor weight decay move the policy
                parameter.grad = None
        metrics = self.metrics["train"]
        end = time.perf_counter()
        # per rollout, as the other times
        metrics.mean("time/update", (end - start) * self.plan.micro_steps)
        # as in GRPO
        metrics.mean("step_time", (end - begin) * self.plan.gradient_accumulation_steps)
        # NaN would stay in the Trainer's running sum, whose own filter waits for the device
        return loss.nan_to_num(0.0, 0.0, 0.0)

    def _collect(self, row_numbers: Rows) -> None:
        numbers = list(row_numbers)
        size = self.plan.completions_per_process
        # those of the dataloader are read before the last scores are known
        if self.curriculum is not None:
            seed = hash((self.args.prompt_seed, self.state.global_step)) % 2**31
            with guarded(seed, self.accelerator.device):
                draw = partial(
                    weighted_rows, self.curriculum, self.run_state.played, self.plan, seed
                )
                drawn = distributed.on_every_rank(draw, Exception)
            numbers = drawn[self.accelerator.process_index * size :][:size]
        prompts = self._next_rows or self._read(numbers)
        self._next_rows = []
        self.actor_critic.eval()  # the Trainer's `training_step` returns to train mode
        metrics = self.metrics["train"]
        self._is_collecting = True
        try:
            rollout, self.run_state, samples = collect(
                self.components, self.credit, prompts, self.run_state, metrics, self.state
            )
        finally:
            self._is_collecting = False
        if self.curriculum is not None:
            scores = torch.stack([samples.scored.usable.float(), samples.scored.totals], 1)
            scores = self.accelerator.gather(scores).T.cpu().double()
            played = self.run_state.played.index_add(1, torch.tensor(drawn), scores)
            self.run_state = self.run_state._replace(played=played)
        self._samples["train"] = samples
        self._install_critic()
        self.updates.start(rollout, self.state.global_step)
        sequences = samples.sequences
        lengths = torch.tensor([int(sequences.prompt_lengths.sum()), len(sequences.positions)])
        lengths = lengths.to(self.accelerator.device, non_blocking=True)
        prompt_tokens, completion_tokens = self.components.all_sum(lengths).tolist()
        self.state.num_input_tokens_seen += prompt_tokens + completion_tokens
        self._tokens_since_log += completion_tokens

    def _install_critic(self) -> None:
        """Let the critic use the state of the run: collecting a rollout has not changed it."""
        critic = self.actor_critic.value_head
        if critic is not None:
            critic.install(self.run_state.critic)

    def _read(self, numbers: Sequence[int]) -> list[dict]:
        unique = sorted(set(numbers))
        read = partial(self._train_rows.__getitems__, unique)
        rows = dict(zip(unique, distributed.on_every_rank(read, Exception)))
        return [rows[number] for number in numbers]

    def _begin_next(self) -> None:
        """Sample the next rollout while this one is scored and learned."""
        step = self.state.global_step + self.plan.optimizer_steps
        if step < self.state.max_steps:
            size = self.plan.completions_per_process
            generator = cast(Any, self.components.player.generator)
            numbers = self._sampler.rollout(step)[self.accelerator.process_index * size :][:size]
            self._next_rows = self._read(numbers)  # a stream returns them only once
            generator.begin([row[PROMPT_IDS] for row in self._next_rows])

    def compute_loss(
        self, model: nn.Module, inputs: MicroBatch, *args: Any, **kwargs: Any
    ) -> Tensor:
        """PPO's loss of a micro-batch: its share of the optimizer step's loss, times the number
        of ranks."""
        # DDP averages gradients over ranks; the denominator is global already
        loss = self.updates.loss(model, inputs) * self.accelerator.num_processes
        if self.accelerator.sync_gradients:  # the last micro-batch of its optimizer step
            self._takes_step = self.updates.may_step()
            # its backward would take the step
            if self.is_deepspeed_enabled and not self._takes_step:
                loss = distributed.skip_deepspeed_step(
                    loss, model(inputs.rollout.sequences).logprobs
                )
        return loss

    def _measure_updates(self) -> None:
        """Log the distance of the policy from the one that sampled, after the rollout's last
        optimizer step."""
        if self.state.global_step % self.plan.optimizer_steps:
            return
        was_training = self.actor_critic.training
        self.actor_critic.eval()
        with self.accelerator.autocast():
            self.updates.measure(self.actor_critic)
        self.actor_critic.train(was_training)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Leave clipping to `_get_grad_norm`, which the Trainer calls next."""

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: Tensor | float | None = None
    ) -> Tensor | float:
        """Clip the gradients of policy and critic; return the policy's norm.

        Skip the step if one is not finite.
        """
        # the step is skipped, and a gradient scaler must not count it
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.accelerator.device)
        if self.is_deepspeed_enabled:  # it has clipped them, together
            grad_norm = total = super()._get_grad_norm(model)
        else:  # each by itself: a large value loss must not shrink the policy's step
            self.accelerator.unscale_gradients()
            bound = self.args.max_grad_norm or math.inf
            roles = self.actor_critic.policy_parameters(), self.actor_critic.critic_parameters()
            norms = [nn.utils.clip_grad_norm_(role.values(), bound) for role in roles if role]
            norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
            grad_norm = norms[0]
            total = sum(norms)
            for norm in norms[1:]:
                self.metrics["train"].mean("value/grad_norm", norm)
        if self.accelerator.scaler is None:  # a gradient scaler checks gradients itself
            finite = math.isfinite(float(total))
            self.metrics["train"].total(
                "skipped_steps", float(not finite and self.is_world_process_zero())
            )
            self._skipped = count_skipped(self._skipped, finite, self.state.global_step + 1)
            if not finite:
                self._skip_step(model)
        return grad_norm

    def _skip_step(self, model: nn.Module) -> None:
        """Skip the current optimizer step, but not the step of the learning rate."""
        model.zero_grad()
        # it has skipped the step; the Trainer must still step the learning rate
        if self.is_deepspeed_enabled:
            self.optimizer.optimizer.overflow = False
        # Accelerate then ignores `optimizer.step()`, as within gradient accumulation
        self.accelerator.gradient_state._set_sync_gradients(False)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the Trainer's optimizer, with `critic_learning_rate` for the critic."""
        exists = self.optimizer is not None
        head = self.actor_critic.value_head
        learning_rate = self.args.critic_learning_rate or getattr(head, "learning_rate", None)
        optimizer = super().create_optimizer(model)
        # always groups of its own: a resumed run may set another rate
        if not exists:
            set_apart(optimizer, self.actor_critic.critic_parameters(), learning_rate)
        # as schedules that count steps record it; a resumed run under another rate reads it
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return optimizer

    # ---- progress: what an optimizer step leaves to the next ----

    def progress(self) -> Progress:
        """What the optimizer steps so far leave to the next one."""
        step = self.state.global_step
        return Progress(
            run=self.run_state,
            rollout=self.updates.in_progress(step),
            metrics=self.metrics["train"].state_dict(),
            loss=self._tr_loss.clone(),
            last_logged=self._globalstep_last_logged,
            skipped=self._skipped,
            tokens_seen=self.state.num_input_tokens_seen,
            ahead=self.components.player.generator.ahead,
            random=RandomState.capture(self.accelerator.device),
        )

    def restore(self, progress: Progress) -> None:
        """Continue from the progress of a checkpoint, of the last complete step after an error, or
        from none."""
        self.run_state = progress.run
        self._install_critic()
        self.updates.reset()
        if progress.rollout is not None:
            with self.accelerator.autocast():
                # the rest of the rollout is packed as its beginning was
                self.actor_critic.prepare_forwards()
            self.updates.resume(progress.rollout, self.state.global_step)
        self.metrics["train"].load_state_dict(progress.metrics)
        self._tr_loss = progress.loss.clone().to(self.accelerator.device)
        self._globalstep_last_logged = progress.last_logged
        self._skipped = progress.skipped
        self.state.num_input_tokens_seen = progress.tokens_seen
        self.components.player.generator.ahead = progress.ahead
        if progress.random is not None:
            progress.random.restore()

    # ---- data ----

    def _restore_process_state(self) -> None:
        """Restore what Accelerate holds per process, which every new `TrainingArguments` clears."""
        for kind, state in self._process_state.items():
            kind._shared_state.update(state)

    def _get_dataloader(
        self, dataset: Any, description: str, is_training: bool = False, **kwargs: Any
    ) -> DataLoader:
        """Loader of rows to evaluate, or of the numbers of rows to train on."""
        self._restore_process_state()
        if is_training:
            return self._training_loader(dataset, description, **kwargs)
        return self._evaluation_loader(dataset, description, **kwargs)

    def _evaluation_loader(self, dataset: Any, description: str, **kwargs: Any) -> DataLoader:
        """Loader of rows, each once per completion."""
        if not any(dataset is x for x in self._tokenized):
            dataset = self._tokenize(
                dataset, name=f"{'test' if description == 'test' else 'eval'}_dataset"
            )
        # without a length, rows that fill up ranks could not be told
        if isinstance(dataset, IterableDataset):
            dataset = list(dataset)
        copies = range(self.args.num_generations_eval or 1)
        dataset = Subset(dataset, [row for row in range(len(dataset)) for _ in copies])
        # even batches: the last one is filled on every rank, by rows that do not count
        count = math.ceil(len(dataset) / self.accelerator.num_processes)
        kwargs["batch_size"] = (
            math.ceil(count / math.ceil(count / self.args.eval_batch_size)) if count else 1
        )
        return self._unpinned_loader(dataset, description, **kwargs)

    def _training_loader(self, dataset: Any, description: str, **kwargs: Any) -> DataLoader:
        """Loader of row numbers: a rollout's prompts, repeated for its micro-batches. A training
        begins with it."""
        if not any(dataset is x for x in self._tokenized):
            raise ValueError(
                "`train_dataset` was replaced after the trainer was built, which has checked and "
                "tokenized the first one; build another trainer with the new one."
            )
        is_stream = isinstance(dataset, IterableDataset)
        if is_stream:
            self._train_rows = StreamedRows(dataset, self.plan.prompts)
            rollouts = math.ceil(self.args.max_steps / self.plan.optimizer_steps)
            numbers = range(rollouts * self.plan.prompts)
        else:
            self._train_rows = dataset
            numbers = range(len(dataset))
        if self.curriculum is not None:
            self.run_state = self.run_state._replace(
                played=torch.zeros(2, len(numbers), dtype=torch.float64)
            )
        shuffles = self.args.shuffle_dataset and not is_stream
        self._sampler = sampler = RolloutSampler(
            len(numbers), self.plan, shuffles, self.args.prompt_seed, self._steps_to_go
        )
        kwargs |= {"batch_size": self.plan.completions_per_process, "sampler_fn": lambda _: sampler}
        rows = cast(Dataset, numbers)
        return self._unpinned_loader(rows, description, is_training=True, **kwargs)

    def _steps_to_go(self) -> tuple[int, int]:
        """The step that training is at, and the last one."""
        step = self.state.global_step
        last = self.state.max_steps
        ended = any(
            x.early_stopping_patience_counter >= x.early_stopping_patience
            for x in self._early_stops
        )
        if step and ended:
            logger.warning_once(
                "The run was stopped early, and does not go on. To continue it, raise "
                "`early_stopping_patience`."
            )
            return last, last
        return step, last

    def _unpinned_loader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """The Trainer's loader without pinned memory: batches have no tensors, and without a GPU
        torch warns of it in each epoch."""
        pins = self.args.dataloader_pin_memory
        self.args.dataloader_pin_memory = False
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.args.dataloader_pin_memory = pins

    # ---- evaluation and logging ----

    def prediction_step(
        self, model: nn.Module, inputs: Rows, *args: Any, **kwargs: Any
    ) -> tuple[None, None, None]:
        """Sample and score, and add to the metrics."""
        gradient_state = self.accelerator.gradient_state
        num_valid = len(inputs)
        if gradient_state.end_of_dataloader and gradient_state.remainder > 0:
            # the last batch is filled with rows from the beginning, which count once
            num_valid = max(
                gradient_state.remainder - self.accelerator.process_index * len(inputs), 0
            )
        # Accelerate deals batches of one size to the processes in turn
        first = self._eval_rows + self.accelerator.process_index * len(inputs)
        self._eval_rows += self.accelerator.num_processes * len(inputs)
        evaluated = EvaluationBatch(first, num_valid)
        metrics = self.metrics["eval"]
        self._samples["eval"] = sample(
            self.components, inputs, self.run_state, metrics, self.state, evaluated
        )
        return None, None, None

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs) -> EvalLoopOutput:
        """Run the Trainer's loop with its own random numbers, and add the metrics of the
        samples."""
        if self._is_collecting:
            raise RuntimeError(
                "`evaluate` and `predict` must not be called while a rollout is collected, e.g. "
                "by a reward function or an environment; call them in a `TrainerCallback`, or set "
                "`eval_strategy`."
            )
        self._evaluated = metric_key_prefix
        self._eval_rows = 0
        self.metrics["eval"].load_state_dict({})  # of an evaluation that failed
        with fixed_seed(self.args.seed + self.accelerator.process_index, self.accelerator.device):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._compute_metrics("eval")
        output.metrics.update(
            {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        )
        self._fill_in_best_metric(output.metrics, metric_key_prefix)
        return output

    def _fill_in_best_metric(self, metrics: dict[str, float], prefix: str) -> None:
        """Let the metric for the best model be NaN, never the best, where all rows failed or none
        has it."""
        if self.args.metric_for_best_model is None:
            return
        best = f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"
        if best in metrics or not best.startswith(f"{prefix}_"):  # measured, or of another split
            return
        if f"{prefix}_reward" not in metrics:
            metrics[best] = math.nan
        elif best.removeprefix(f"{prefix}_") in self._evaluation_metrics:
            metrics[best] = math.nan
            logger.warning_once(
                f"`metric_for_best_model={best!r}` is not in this evaluation, e.g. since no row has "
                "such an environment or reward, so this is not the best model; choose another "
                "metric, or add such rows."
            )

    def predict(self, *args, **kwargs) -> PredictionOutput:
        """Sample and score rows, which are not logged."""
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._samples.pop("eval", None)  # or a later log would take them for its own

    def _compute_metrics(self, mode: str) -> dict[str, float]:
        gather = self.accelerator.gather
        return self.metrics[mode].compute(
            self.components.all_sum, lambda x: gather(x[None]).amax(0)
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the metrics since the last log."""
        # the summary at the end has what was not logged yet, as in TRL
        if self.metrics["train"] and not logs.keys().isdisjoint(("loss", "train_loss")):
            logs |= self._compute_metrics("train")
            logs["num_tokens"] = self.state.num_input_tokens_seen
            if self._tokens_since_log:
                now = time.perf_counter()
                logs["tokens_per_second"] = self._tokens_since_log / (now - self._last_log)
                self._tokens_since_log = 0
                self._last_log = now
        # of any `metric_key_prefix`
        if logs.keys().isdisjoint(("loss", "train_loss")):
            mode = "eval"
        else:
            mode = "train"
        samples = self._samples.pop(mode, None)
        step = self.state.global_step
        table = None
        if samples is not None and self.args.log_completions and self.accelerator.is_main_process:
            table = completions_table(samples, self.run_log.rewards, self.run_log.monitors, step)
            # above the line of metrics, which would scroll away
            print_completions(table, step, self.args.num_completions_to_print)
        is_due = self.control.should_log
        super().log(logs, start_time)
        if mode == "eval":  # e.g. of a callback, which must not stand for the step's own log
            self.control.should_log = is_due
        if samples is None or not self.accelerator.is_main_process:
            return
        self.run_log.completions(samples, self.state, self._evaluated if mode == "eval" else None)
        if table is not None:
            prefix = f"{self._evaluated}_" if mode == "eval" else ""
            save_completions(table, cast(str, self.args.output_dir), step, prefix)
            if mode == "eval":
                key = "eval/completions"
            else:
                key = "completions"
            log_completions(cast(list, self.args.report_to), table, step, key)

    # ---- training, from the beginning or from a checkpoint ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> Any:
        """Train, from the beginning or from a checkpoint (a path, or `True` for the latest valid
        one).

        The default is the config's `resume_from_checkpoint`. `False` begins anew in a directory
        that has checkpoints. Exits with code 75 after SIGTERM, SIGINT or SIGHUP, once a checkpoint
        is saved. An error that ends the run first saves a checkpoint of the last optimizer step,
        which a note of the exception names.
        """
        if self.train_dataset is None:
            raise ValueError(
                "`train_dataset` must be a dataset to train on, got None; pass it to PPOTrainer, "
                "or set `max_steps` if an environment writes the prompts."
            )
        source = (
            self.args.resume_from_checkpoint
            if resume_from_checkpoint is None
            else resume_from_checkpoint
        )
        # of a command line
        source = {"true": True, "false": False, "none": None}.get(str(source).lower(), source)
        check_has_adapter(self.actor_critic.policy, self.actor_critic.policy_adapter)
        self._forget_last_training()
        check_callbacks(self.callback_handler.callbacks)
        # what was drawn since the constructor must not matter
        set_seed(self.args.seed, device_specific=True)
        with resume.locked(self.args.output_dir, self.args.should_save):
            checkpoint = self._open_directory(source)
            self._begun = True
            self.restore(Progress(self.run_state))  # an earlier training may have ended anywhere
            with self.signals.watched():
                output = self._train(checkpoint, *args, **kwargs)
        if self.preempted:
            if self.accelerator.num_processes > 1:
                # otherwise a rank that exits may abort the others, and change their exit code
                self.end()
            message = resume.how_to_continue(self.args.output_dir, self.state.global_step)
            self._tell(message)
            if self.signals.received == signal.SIGINT:
                raise resume.Interrupted(message)
            raise SystemExit(resume.PREEMPTED)
        if self.signals.received is not None:  # after the last step, when no step could handle it
            signal.raise_signal(self.signals.received)
        return output

    def _forget_last_training(self) -> None:
        """Begin with nothing of an earlier `train()` but the weights and the run state."""
        self.preempted = False
        self.best_step = None
        self._resumed = None
        self._last_complete = None
        self._change = files.SettingsChange({}, set())
        self._validity.clear()
        self._next_rows = []
        self._restore_process_state()

    def _open_directory(self, source: str | bool | None) -> str | None:
        """Path of the checkpoint to resume from; what does not belong to this run is moved aside,
        or deleted."""
        output_dir = cast(str, self.args.output_dir)
        is_writer = self.args.should_save
        resumed_from = None
        if source:
            self._resumed = resume.find_checkpoint(source, self.args, self._inputs)
            self._change = self._resumed.change
            parent = Path(self._resumed.directory).resolve().parent
            # a checkpoint of another directory begins a new run in this one
            if parent == Path(output_dir).resolve():
                resumed_from = self._resumed.directory
        # a second training must not be mixed with the first one's checkpoints either
        begins_anew = source is False or self._begun
        resume.prepare_directory(output_dir, is_writer, begins_anew, resumed_from)
        if resumed_from is None:  # answers to the episodes of an earlier run
            answers = Path(output_dir, record.ANSWERS)
            delete = partial(shutil.rmtree, answers, ignore_errors=True)
            distributed.on_every_rank(delete, runs=is_writer)
        if self._resumed is not None:
            return self._resumed.directory
        for callback in self._early_stops:  # of an earlier training
            callback.early_stopping_patience_counter = 0
        return None

    @property
    def _early_stops(self) -> list[EarlyStoppingCallback]:
        callbacks = self.callback_handler.callbacks
        return [x for x in callbacks if isinstance(x, EarlyStoppingCallback)]

    def _train(self, checkpoint: str | None, *args, **kwargs) -> Any:
        """Run the Trainer's loop; after an error save a checkpoint of the last complete step."""
        began_with = self.run_state
        # the Trainer would apply the kernels to the actor-critic, in vain
        uses_liger = self.args.use_liger_kernel
        self.args.use_liger_kernel = False
        try:
            return super().train(checkpoint, *args, **kwargs)
        except FAILURES as error:  # a callback may call `sys.exit()`
            if isinstance(error, RewardError):
                record.void_errors(cast(str, self.args.output_dir), self.accelerator.process_index)
            self._save_after_error(error)
            if self.state.global_step == 0:  # a rollout that nothing was learned from
                self.run_state = began_with
                self._install_critic()
            raise
        finally:
            self.args.use_liger_kernel = uses_liger

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, checkpoint: Any
    ) -> Any:
        prepare = super()._prepare_for_training
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            distributed.forget_evaluation(self)
            return prepare(max_steps, train_dataloader, checkpoint)
        return distributed.prepare_sharded(
            self, partial(prepare, max_steps, train_dataloader), checkpoint
        )

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        files.load_actor_critic_weights(self.actor_critic, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        load = partial(super()._load_optimizer_and_scheduler, checkpoint)
        if "optim" in self._change.listed and not self.is_deepspeed_enabled:
            load = partial(resume.load_without_optimizer, self.optimizer, load)
        if self._change.listed:
            resume.load_under_own_rates(
                self.optimizer,
                self.lr_scheduler,
                load,
                follows_same_metric=not self._change.of_best,
            )
        else:
            load()

    def _load_callback_state(self) -> None:
        """Leave callbacks to [`_StepCallback`]: the Trainer would replace the script's objects
        by new ones."""

    def _load_best_model(self) -> None:
        best = cast(str, self.state.best_model_checkpoint)
        files.load_actor_critic_weights(self.actor_critic, best)
        if self.actor_critic.value_head is not None:
            critic = self.actor_critic.value_head.saved_state
            self.run_state = self.run_state._replace(critic=critic)
            self._install_critic()
        self.best_step = int(Path(best).name.rpartition("-")[2])
        self.logs_before_best = len(self.state.log_history)
        self.run_log.best_is_loaded(self.best_step)
        value = self.state.best_metric
        reason = "" if value is None else f" ({self.args.metric_for_best_model} {value:.4g})"
        self._tell(f"loaded the best checkpoint, of step {self.best_step}{reason}")

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        """Log, evaluate and save; then keep what the next optimizer step changes before it is
        complete."""
        self._last_complete = self.progress  # called if an error comes: nothing is unfinished
        step = self.state.global_step
        state = self.state
        ends = float(state.epoch).is_integer() or step >= state.max_steps
        # the Trainer calls this after every step, and again at the end of an epoch, and the last
        # step waits for that: a checkpoint would lack what is due then
        first_at_step = step != self._last_step
        self._last_step = step
        if first_at_step:
            due = not ends
        else:
            due = ends or not self.preempted
        if due and step > self._initial_global_step:  # otherwise the run had ended already
            self._save_is_due = (
                self.control.should_save or self.args.save_strategy == SaveStrategy.BEST
            )
            self.control.should_save |= self.preempted
            self._warn_of_evaluation_in_warmup()
            super()._maybe_log_save_evaluate(*args, **kwargs)
        complete = self.progress()
        self._last_complete = lambda: complete

    def _evaluate(self, *args: Any, skip_scheduler: bool = False, **kwargs: Any) -> Any:
        """Evaluate; a resumed run does not begin with it, since early stopping would count it."""
        begins = skip_scheduler  # the Trainer passes it for `eval_on_start` only
        if begins and self.state.global_step:
            return {}
        return super()._evaluate(*args, skip_scheduler=skip_scheduler, **kwargs)

    def _warn_of_evaluation_in_warmup(self) -> None:
        """Warn if early stopping or the schedule is to judge a policy that has not moved yet."""
        warmup_steps = self.args.critic_options.warmup_steps
        in_warmup = self.control.should_evaluate and self.state.global_step < warmup_steps
        reads_metric = self._early_stops or self.args.lr_scheduler_type in METRIC_SCHEDULES
        if in_warmup and reads_metric and self.is_world_process_zero():
            logger.warning_once(
                "Evaluations before step %d are of a policy that has not moved yet, since "
                "`critic_kwargs['warmup_steps']` is %d, and early stopping or the schedule reads "
                "them; raise `eval_delay`.",
                warmup_steps,
                warmup_steps,
            )

    def _finalize_training(self, *args, **kwargs) -> Any:
        """Finalize training; keep the checkpoint of a signal, and skip a damaged best
        checkpoint."""
        self._last_complete = None  # the weights may become those of the best checkpoint
        self.components.player.generator.release()
        if self.preempted:
            if save.checkpoint_of(self.args, self.state) not in self._validity:
                # e.g. with `save_strategy="best"`, it is not saved yet
                self._save_checkpoint(self.model, None)
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            self._finish_current_push()
            self.is_in_train = False
            return None
        self._settle_best_checkpoint()
        return super()._finalize_training(*args, **kwargs)

    def _settle_best_checkpoint(self) -> None:
        """Forget a best checkpoint that is damaged, or lies in the directory of another run."""
        best = self.state.best_model_checkpoint
        if best is None:
            return
        damage = save.damage_of(Path(best), self.args.should_save)
        if damage is not None:
            logger.warning(
                "The best checkpoint cannot be used (%s); the model keeps its last weights.", damage
            )
        is_intact = damage is None
        if is_intact and os.path.samefile(Path(best).parent, cast(str, self.args.output_dir)):
            return
        # It is of the run that this one resumed from. With `save_total_limit=1` the Trainer deletes
        # every checkpoint that is not the best, here all of this run.
        if is_intact and self.args.load_best_model_at_end:
            self._load_best_model()
        self.state.best_model_checkpoint = None

    def end(self) -> None:
        """Finish the trackers and leave the process group, once, at the very end of a script."""
        self.accelerator.wait_for_everyone()
        # DDP's reducer must not hold the last reference to the process group: it would destroy the
        # group while holding the GIL, and deadlock
        self.model_wrapped = self.model
        self.accelerator.free_memory()
        super().end()

    # ---- saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save adapters, critic, tokenizer and model card."""
        output_dir = output_dir or self.args.output_dir
        files.check_target(output_dir, self.actor_critic.config._name_or_path)
        weights = self.actor_critic.trained_weights()  # all ranks gather them
        if self.args.should_save:
            self._write_model(output_dir, output_dir, weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_model(
        self, directory: str, final_directory: str, weights: dict[str, Tensor]
    ) -> None:
        files.save_actor_critic(self.actor_critic, directory, weights, self.run_state.critic)
        state = {
            "run": self.run_state.to_json(),
            "settings": files.run_settings(self.args) | self._inputs,
            # for `trl-ppo chat`; a resumed run compares the digest among its inputs
            "chat_template_kwargs": json.loads(
                json.dumps(self.args.chat_template_kwargs, default=str)
            ),
        }
        Path(directory, files.STATE).write_text(json.dumps(state, indent=2))
        self.processing_class.save_pretrained(directory)
        hub.model_card(self, final_directory).save(os.path.join(directory, "README.md"))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, delete older ones, and push it."""
        final = self._write_checkpoint()
        if final is not None and self.args.should_save:
            rotate(
                final, self.args.save_total_limit, self.state.best_model_checkpoint, self._validity
            )
        if final is not None and self.args.push_to_hub:
            hub.push_in_background(self, str(final))

    def _write_checkpoint(self) -> Path | None:
        """Write a checkpoint from which the run continues bit for bit; none with NaN."""
        args = self.args
        state = self.state
        final = save.checkpoint_of(args, state)

        # 1. All ranks gather what is not here, before one of them can fail to write.
        weights = self.actor_critic.trained_weights()
        if not save.are_finite(weights, final):
            return None
        optimizer = self._optimizer_state()
        progress = self.progress().tensors()
        # no interruption may choose the best
        if state.best_global_step == state.global_step and self._save_is_due:
            state.best_model_checkpoint = str(final)

        # 2. Each writes its files.
        def write(directory: Path) -> None:
            if args.should_save:
                self._write_model(str(directory), str(final), weights)
                callbacks = self.callback_handler.callbacks
                save.write_trainer_files(directory, optimizer, self.lr_scheduler, state, callbacks)
            self._save_scaler(str(directory))
            self._save_rng_state(str(directory))
            save.write_progress(directory, args.process_index, progress)

        def write_together(directory: Path) -> None:
            # its ranks write together, and one that fails raises by itself
            self.model_wrapped.save_checkpoint(str(directory), exclude_frozen_parameters=True)
            self.accelerator.wait_for_everyone()

        together = write_together if self.is_deepspeed_enabled else None
        save.write_aside(final, write, together, is_writer=args.should_save)
        self._validity[final] = True
        record.forget(cast(str, args.output_dir), args.process_index, before=state.global_step)
        return final

    def _optimizer_state(self) -> dict[str, Any] | None:
        """State of the optimizer, unsharded; `None` with DeepSpeed, which writes its own."""
        if self.is_deepspeed_enabled:
            return None
        if self.is_fsdp_enabled:
            return distributed.unsharded_optimizer_state(self.optimizer)
        return self.optimizer.state_dict()

    def _save_after_error(self, error: BaseException) -> None:
        """Save a checkpoint of the last complete step before an error leaves `train()`, and name
        it in a note."""
        last_complete = self._last_complete
        self._last_complete = None
        may_save = save.may_save_after(error, self.accelerator.num_processes)
        if last_complete is None or not may_save:
            return
        try:
            self.restore(last_complete())
            saved = save.checkpoint_of(self.args, self.state)
            # callbacks may have added files to one of this step, or removed it
            is_there = saved in self._validity
            if is_there and save.damage_of(saved, self.args.should_save) is None:
                final: Path | None = saved
            else:
                final = self._write_checkpoint()
        except Exception as failure:  # must not hide the first one
            error.add_note(
                "The optimizer steps since the last checkpoint are lost, saving failed too: "
                f"{failure}"
            )
            return
        if final is not None:
            error.add_note(
                f"`{final}` holds all optimizer steps so far; resume with "
                "`resume_from_checkpoint=True`."
            )

    def create_model_card(
        self, model_name: Any = None, dataset_name: Any = None, tags: Any = None, **fields
    ) -> None:
        """Write the model card of the run to its output directory; `fields` are further metadata
        of the card."""
        if self.is_world_process_zero():
            fields |= {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
            hub.model_card(self, self.args.output_dir, **fields).save(
                os.path.join(self.args.output_dir, "README.md")
            )

    push_to_hub = hub.push_run


class _StepCallback(TrainerCallback):
    """Restores progress when training begins; after every step measures the updates, and stops
    on a signal."""

    def __init__(self, trainer: PPOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Restore what the Trainer does not, after it has set up its own state."""
        trainer = self.trainer
        trainer._last_step = state.global_step
        trainer._tokens_since_log = 0
        trainer._last_log = time.perf_counter()
        checkpoint = trainer._resumed
        trainer._resumed = None
        if checkpoint is None:
            return
        progress = resume.usable_progress(checkpoint, trainer.run_state.played)
        trainer.restore(progress)
        trainer._total_loss_scalar = -progress.loss.item()  # the final mean is of this `train()`
        state.compute_steps(args, state.max_steps)  # the Trainer has loaded those of the checkpoint
        resume.restore_callbacks(
            trainer.callback_handler.callbacks,
            state.stateful_callbacks,
            constructs=args.restore_callback_states_from_checkpoint,
        )
        best = resume.best_checkpoint_in(args.output_dir, checkpoint.directory)
        if checkpoint.change.of_best:
            # the best by another metric, with which no value of this one may be compared
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            for callback in trainer._early_stops:
                callback.early_stopping_patience_counter = 0
        elif best is not None:
            state.best_model_checkpoint = best
        place = f"after step {state.global_step} of {state.max_steps}"
        trainer._tell(f"resumed: {checkpoint.directory}, {place}")

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        """Forget the last complete step: the weights are about to leave it."""
        self.trainer._last_complete = None

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Measure the updates of a rollout, and agree on all ranks whether to stop."""
        trainer = self.trainer
        trainer._last_complete = trainer.progress  # also if a callback fails now
        trainer._measure_updates()
        received = trainer.signals.received is not None
        if trainer.accelerator.num_processes > 1:
            anywhere = torch.tensor(float(received), device=trainer.accelerator.device)
            received = trainer.accelerator.reduce(anywhere, reduction="sum").item() > 0
        if received:
            trainer.preempted = control.should_training_stop = True
