"""`trl-ppo train`: a PPO run from a YAML file and a command line, or with `--dry_run` a preview of it."""

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
from datasets import Dataset

from ..arguments import check_trainer_arguments, load_tokenizer
from ..checkpoints.files import CheckpointError
from ..checkpoints.hub import PushError
from ..config import PPOConfig
from ..data.prompts import PROMPT_IDS, tokenize_prompts
from ..memory import GIB, PROMPT_LENGTH, estimate_memory
from ..modeling.critic_init import read_critic
from ..ppo.batch_plan import BatchPlan
from ..redaction import sentence, shortened
from ..trainer import PPOTrainer
from .arguments import MixtureConfig, PPOModelConfig, PPOScriptArguments, parse
from .estimate import print_estimate
from .launch import build_trainer, load_datasets, trainer_arguments

ROWS = 10  # read by a dry run
LONGEST = 4000  # characters of the prompt that it prints


@dataclass
class TrainScriptArguments(PPOScriptArguments):
    """[`PPOScriptArguments`] of `trl-ppo train`."""

    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Check configs, tokenizer and ten rows, print the batch plan, the memory estimate and one prompt, "
            "and stop."
        },
    )


@dataclass(repr=False)
class TrainConfig(PPOConfig):
    """[`PPOConfig`] from a YAML file."""

    _argument_group_name = "training (fields of PPOConfig)"

    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "A checkpoint to resume from, or true for the newest complete one in output_dir."},
    )

    def __post_init__(self):
        if isinstance(self.resume_from_checkpoint, bool):
            self.resume_from_checkpoint = str(self.resume_from_checkpoint)
        super().__post_init__()


class RunError(RuntimeError):
    """Raised when training has begun and fails; shown with its traceback, unlike wrong arguments."""


def main(argv: Sequence[str]) -> None:
    """Train, save and push, or preview the run."""
    script_args, args, model_args, mixture = parse(
        "train", argv, "Train a policy with PPO, and save it in output_dir.", TrainConfig, TrainScriptArguments
    )
    if cast(TrainScriptArguments, script_args).dry_run:
        dry_run(script_args, args, model_args, mixture)
        return
    trainer = build_trainer(script_args, args, model_args, load_datasets(script_args, mixture))
    train(trainer, _datasets_on_the_hub(script_args, mixture))


def train(trainer: PPOTrainer, datasets: list[str] | None = None) -> None:
    """Train from the beginning or from a checkpoint, then save and, with `push_to_hub`, push."""
    metadata: dict[str, Any] = {"datasets": datasets} if datasets else {}
    checkpoint: Any = trainer.args.resume_from_checkpoint
    checkpoint = {"true": True, "false": None, "none": None}.get(str(checkpoint).lower(), checkpoint)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except CheckpointError:
        raise
    except (ValueError, OSError) as error:
        raise RunError(
            f"The run failed after {trainer.state.global_step} optimizer steps: {type(error).__name__}: "
            f"{sentence(error)} Once that is fixed, resume from the last checkpoint, if there is one, with "
            "--resume_from_checkpoint true."
        ) from error
    if trainer.args.push_to_hub:
        try:
            trainer.push_to_hub(**metadata)
        except PushError as error:  # nothing of the run is lost, and the error has a remedy
            raise ValueError(str(error)) from error
        trainer.accelerator.print(f"Pushed to {trainer.hub_model_id}.")
    else:
        trainer.save_model()
    trainer.accelerator.print(f"Saved in {trainer.args.output_dir}.")
    trainer.end()


def _datasets_on_the_hub(script_args: PPOScriptArguments, mixture: MixtureConfig) -> list[str]:
    names = [script_args.dataset_name, *(entry.path for entry in mixture.datasets)]
    return [name for name in dict.fromkeys(names) if name and name.count("/") <= 1 and not os.path.exists(name)]


def dry_run(
    script_args: PPOScriptArguments, args: PPOConfig, model_args: PPOModelConfig, mixture: MixtureConfig
) -> None:
    """Check everything that needs no weights, and print a preview of the run."""
    # 1. the checks of the trainer, on a few rows
    kwargs = trainer_arguments(script_args, args, model_args, _first_rows(script_args, mixture))
    model = str(model_args.model_name_or_path)
    check_trainer_arguments(
        model,
        kwargs["reward_funcs"],
        kwargs["monitor_funcs"],
        args,
        kwargs["train_dataset"],
        [],
        None,
        kwargs["quantization_config"],
        kwargs["peft_config"],
    )
    # 2. the critic that it starts from
    try:
        if args.critic_init is not None:
            read_critic(args.critic_init, args.critic, model, args.reward_label)
    except (ValueError, OSError) as error:
        if "critic_init" in str(error):
            raise
        raise ValueError(f"`critic_init={args.critic_init!r}` cannot be used: {error}") from error
    # 3. the tokenizer, and the length of prompts
    tokenizer, context = load_tokenizer(model, model, None, args)
    template_kwargs = cast(dict, args.chat_template_kwargs)  # parsed by now, if it came as a string
    for name in kwargs.keys() & {"train_dataset", "eval_dataset"}:
        dataset = kwargs[name]
        kwargs[name] = tokenize_prompts(dataset, tokenizer, name, args.max_completion_length, context, template_kwargs)
    if args.process_index:  # the first process prints for all
        return
    prompts = kwargs["train_dataset"][PROMPT_IDS]
    lengths = [len(ids) for ids in prompts]
    # 4. sizes, memory, and one prompt
    _print_plan(args, kwargs, lengths, context)
    longest = max(PROMPT_LENGTH, *lengths)
    if context is not None:  # longer prompts would be refused
        longest = min(longest, context - args.max_completion_length)
    _print_memory(args, kwargs, longest)
    print(f"\nThe first prompt, as the model reads it:\n{shortened(tokenizer.decode(prompts[0]), LONGEST)}")


def _first_rows(script_args: PPOScriptArguments, mixture: MixtureConfig) -> Mapping[str, Any]:
    """First rows of the splits that a run uses; no more is fetched from the Hub."""
    script_args, name = copy(script_args), script_args.dataset_name
    if name is not None and not os.path.exists(name):
        script_args.dataset_streaming = True
    splits = load_datasets(script_args, mixture)
    for split in splits.keys() & {script_args.dataset_train_split, script_args.dataset_test_split}:
        splits[split] = Dataset.from_list(list(islice(splits[split], ROWS)))
    return splits


def _print_plan(args: PPOConfig, kwargs: dict[str, Any], lengths: list[int], context: int | None) -> None:
    """Print models, prompts, and the sizes of a rollout and of the run."""

    def names(rewards: list[Any]) -> str:
        named = [getattr(x, "name", None) or getattr(x, "__name__", None) or str(x) for x in rewards]
        return ", ".join(named)

    plan = BatchPlan.from_config(args, args.world_size)
    quantized = ", quantized" if kwargs["quantization_config"] is not None else ""
    monitored = f"; monitored: {names(kwargs['monitor_funcs'])}" if kwargs["monitor_funcs"] else ""
    processes = f"{plan.num_processes} process{'es' * (plan.num_processes > 1)} on {args.device.type}"
    run = f"{args.num_train_epochs:g} passes over the dataset (num_train_epochs); max_steps would end it sooner"
    if args.max_steps > 0:
        rollouts = -(-args.max_steps // plan.optimizer_steps)
        run = f"{args.max_steps} optimizer steps = {rollouts} rollouts = {rollouts * plan.completions} completions"
    print(
        f"model:   {kwargs['model']}{quantized}; critic: {args.critic}\n"
        f"rewards: {names(kwargs['reward_funcs'])}{monitored}\n"
        f"prompts: {min(lengths)} to {max(lengths)} tokens in the first {len(lengths)} rows, and up to "
        f"{args.max_completion_length} per completion, in a context of {context or 'unknown length'}\n"
        f"rollout: {plan.completions} completions of {plan.prompts} prompts ({plan.num_generations} each) = "
        f"{plan.micro_batch_size} per micro-batch × {plan.gradient_accumulation_steps} micro-batches × "
        f"{plan.num_mini_batches} minibatches × {processes}\n"
        f"updates: {plan.optimizer_steps} optimizer steps per rollout = {plan.num_ppo_epochs} epochs × "
        f"{plan.num_mini_batches} minibatches of {plan.completions // plan.num_mini_batches} completions\n"
        f"run:     {run}"
    )


def _print_memory(args: PPOConfig, kwargs: dict[str, Any], prompt_length: int) -> None:
    on_gpu = args.device.type == "cuda"
    try:
        estimate = estimate_memory(
            kwargs["model"],
            args,
            **{key: kwargs[key] for key in ("reward_funcs", "monitor_funcs", "quantization_config", "peft_config")},
            ptx="ptx_dataset" in kwargs,
            prompt_length=prompt_length,
            device="cuda" if on_gpu else "cpu",
        )
    except ValueError as error:
        print(f"memory:  not estimated: {error}")
        return
    print(f"memory:  with prompts of {prompt_length} tokens, on each process")
    print_estimate(estimate, torch.cuda.get_device_properties(args.device).total_memory / GIB if on_gpu else None)
    if not on_gpu:
        print("For a GPU: trl-ppo estimate, with these arguments and --gpu or --memory.")
