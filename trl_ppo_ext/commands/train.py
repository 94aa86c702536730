"""`trl-ppo train`: a run from a YAML file and a command line, or with `--dry_run` a look at what it would be."""

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

ROWS = 10  # that a dry run reads
LONGEST = 4000  # characters of a prompt that it shows


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
    """[`PPOConfig`] as a YAML file says it."""

    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "A checkpoint to go on from, or true for the newest whole one in output_dir."},
    )

    def __post_init__(self):
        if isinstance(self.resume_from_checkpoint, bool):
            self.resume_from_checkpoint = str(self.resume_from_checkpoint)
        super().__post_init__()


class RunError(RuntimeError):
    """Raised from what went wrong after training had begun, so that it is shown with all that led to it."""


def main(argv: Sequence[str]) -> None:
    """Train, save and push, or say what a run would be."""
    script_args, args, model_args, mixture = parse(
        "train",
        argv,
        "Train a policy with PPO, and save it in output_dir.",
        TrainConfig,
        TrainScriptArguments,
    )
    if getattr(script_args, "dry_run", False):
        dry_run(script_args, args, model_args, mixture)
        return
    trainer = build_trainer(script_args, args, model_args, load_datasets(script_args, mixture))
    train(trainer, _datasets_on_the_hub(script_args, mixture))


def train(trainer: PPOTrainer, datasets: list[str] | None = None) -> None:
    """Train from the beginning or from a checkpoint, save, and push if that is asked for."""
    args = trainer.args
    try:
        trainer.train(resume_from_checkpoint=_checkpoint(args))
    except CheckpointError:
        raise
    except (ValueError, OSError) as error:  # of wrong arguments a command shows one line, and this is none of those
        raise RunError(
            f"The run failed after {trainer.state.global_step} optimizer steps: {type(error).__name__}: "
            f"{sentence(error)} Once that is mended, go on from the last checkpoint, if there is one, with "
            "--resume_from_checkpoint true."
        ) from error
    if args.push_to_hub:
        _push(trainer, {"datasets": datasets} if datasets else {})
    else:
        trainer.save_model()
    trainer.accelerator.print(f"Saved in {args.output_dir}.")
    trainer.end()


def _push(trainer: PPOTrainer, metadata: dict[str, Any]) -> None:
    try:
        trainer.push_to_hub(**metadata)
    except PushError as error:  # it says what to do, and nothing of the run is lost
        raise ValueError(str(error)) from error
    trainer.accelerator.print(f"Pushed to {trainer.hub_model_id}.")


def _checkpoint(args: PPOConfig) -> str | bool | None:
    given = args.resume_from_checkpoint
    named = {"true": True, "false": None, "none": None}
    return named.get(str(given).lower(), given)


def _datasets_on_the_hub(script_args: PPOScriptArguments, mixture: MixtureConfig) -> list[str]:
    names = [script_args.dataset_name, *(entry.path for entry in mixture.datasets)]
    return [name for name in dict.fromkeys(names) if name and name.count("/") <= 1 and not os.path.exists(name)]


# ---- what a run would be ----


def dry_run(
    script_args: PPOScriptArguments, args: PPOConfig, model_args: PPOModelConfig, mixture: MixtureConfig
) -> None:
    """Check everything that can be checked without weights, and print what the run would be."""
    built = trainer_arguments(script_args, args, model_args, _ten_rows(script_args, mixture))
    model = str(model_args.model_name_or_path)
    check_trainer_arguments(
        model,
        built["reward_funcs"],
        built["monitor_funcs"],
        args,
        built["train_dataset"],
        [],
        None,
        built["quantization_config"],
        built["peft_config"],
    )
    if args.critic_init is not None:
        _check_critic(args, model)
    tokenizer, context = load_tokenizer(model, model, None, args)
    template_kwargs = cast(dict, args.chat_template_kwargs)  # parsed by now, if it came as a string
    tokenized = {
        name: tokenize_prompts(built[name], tokenizer, name, args.max_completion_length, context, template_kwargs)
        for name in ("train_dataset", "eval_dataset")
        if name in built
    }
    if args.process_index:  # the first one says it for all
        return
    prompts = tokenized["train_dataset"][PROMPT_IDS]
    _print_plan(args, built, model, [len(ids) for ids in prompts], context)
    _print_memory(args, built, model, _longest_prompt([len(ids) for ids in prompts], context, args))
    print(f"\nThe first prompt, as the model reads it:\n{shortened(tokenizer.decode(prompts[0]), LONGEST)}")


def _check_critic(args: PPOConfig, model: str) -> None:
    path = str(args.critic_init)
    try:
        read_critic(path, args.critic, model, args.reward_label)
    except (ValueError, OSError) as error:
        if "critic_init" in str(error):
            raise
        raise ValueError(f"`critic_init={path!r}` cannot be used: {error}") from error


def _ten_rows(script_args: PPOScriptArguments, mixture: MixtureConfig) -> Mapping[str, Any]:
    """The first rows of each split that is used; of a dataset on the Hub no more than these are fetched."""
    script_args, name = copy(script_args), script_args.dataset_name
    if name is not None and not os.path.exists(name):
        script_args.dataset_streaming = True
    splits = {script_args.dataset_train_split, script_args.dataset_test_split}
    loaded = load_datasets(script_args, mixture)
    return {split: _first(loaded[split]) if split in splits else loaded[split] for split in loaded}


def _first(dataset: Any) -> Dataset:
    if isinstance(dataset, Dataset):
        return dataset.select(range(min(ROWS, len(dataset))))
    return Dataset.from_list(list(islice(dataset, ROWS)))


def _print_plan(args: PPOConfig, built: dict[str, Any], model: str, lengths: list[int], context: int | None) -> None:
    plan = BatchPlan.from_config(args, args.world_size)
    rewards = [_name(reward) for reward in built["reward_funcs"]]
    monitors = [_name(reward) for reward in built["monitor_funcs"]]
    processes = f"{plan.num_processes} process{'es' * (plan.num_processes > 1)} on {args.device.type}"
    lines = {
        "model": f"{model}{', quantised' * (built['quantization_config'] is not None)}; critic: {args.critic}",
        "rewards": ", ".join(rewards) + (f"; watched: {', '.join(monitors)}" if monitors else ""),
        "prompts": f"{min(lengths)} to {max(lengths)} tokens in the first {len(lengths)} rows, and up to "
        f"{args.max_completion_length} of a completion, in a context of {context or 'no known length'}",
        "rollout": f"{plan.completions} completions of {plan.prompts} prompts ({plan.num_generations} each) = "
        f"{plan.micro_batch_size} a micro-batch × {plan.gradient_accumulation_steps} micro-batches × "
        f"{plan.num_mini_batches} minibatches × {processes}",
        "updates": f"{plan.optimizer_steps} optimizer steps a rollout = {plan.num_ppo_epochs} epochs × "
        f"{plan.num_mini_batches} minibatches of {plan.completions // plan.num_mini_batches} completions",
        "run": _length_of_run(args, plan),
    }
    for title, line in lines.items():
        print(f"{title + ':':9}{line}")


def _length_of_run(args: PPOConfig, plan: BatchPlan) -> str:
    if args.max_steps > 0:
        rollouts = -(-args.max_steps // plan.optimizer_steps)
        return f"{args.max_steps} optimizer steps = {rollouts} rollouts = {rollouts * plan.completions} completions"
    return f"{args.num_train_epochs:g} times over the dataset (num_train_epochs); max_steps would end it sooner"


def _name(reward: Any) -> str:
    if isinstance(reward, str):
        return reward
    return str(getattr(reward, "name", None) or getattr(reward, "__name__", None) or reward)


def _longest_prompt(lengths: list[int], context: int | None, args: PPOConfig) -> int:
    """Of prompts of which a few are known; longer ones than the context has room for are refused."""
    longest = max(PROMPT_LENGTH, *lengths)
    return longest if context is None else min(longest, context - args.max_completion_length)


def _print_memory(args: PPOConfig, built: dict[str, Any], model: str, prompt_length: int) -> None:
    on_gpu = args.device.type == "cuda"
    try:
        estimate = estimate_memory(
            model,
            args,
            reward_funcs=built["reward_funcs"],
            monitor_funcs=built["monitor_funcs"],
            quantization_config=built["quantization_config"],
            peft_config=built["peft_config"],
            ptx="ptx_dataset" in built,
            prompt_length=prompt_length,
            device="cuda" if on_gpu else "cpu",
        )
    except ValueError as error:
        print(f"memory:  not estimated: {error}")
        return
    print(f"memory:  with prompts of {prompt_length} tokens, on each process")
    memory = torch.cuda.get_device_properties(args.device).total_memory / GIB if on_gpu else None
    print_estimate(estimate, memory)
    if not on_gpu:
        print("For a GPU: trl-ppo estimate, with these arguments and --gpu or --memory.")
