"""`trl-ppo train`: a PPO run from a YAML file and a command line, or with `--dry_run` a preview of it."""

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from datasets import Dataset, IterableDataset
from transformers.hf_argparser import HfArg

from ..arguments import check_trainer_arguments, load_tokenizer
from ..checkpoints.files import CheckpointError, check_target
from ..checkpoints.hub import PushError
from ..config import PPOConfig
from ..data.prompts import PROMPT_IDS, prompt_limit, tokenize_prompts
from ..environments import Environments
from ..memory import GIB, PROMPT_LENGTH, estimate_memory
from ..modeling.adapter_files import read_critic
from ..ppo.batch_plan import BatchPlan
from ..redaction import sentence, shortened
from ..tracking.completions import check_trackers
from .estimate import print_estimate
from .launch import (
    MixtureConfig,
    PPOModelConfig,
    PPOScriptArguments,
    build_trainer,
    load_datasets,
    parse,
    trainer_arguments,
)

ROWS = 10  # of a stream or of the Hub, read by a dry run
LONGEST = 4000  # characters of the prompt that it prints


@dataclass
class TrainScriptArguments(PPOScriptArguments):
    """[`PPOScriptArguments`] of `trl-ppo train`."""

    dry_run: bool = HfArg(
        default=False,
        help="Check configs and prompts (the first ten rows of a Hub dataset), print the plan, and stop.",
    )


@dataclass(repr=False)
class TrainConfig(PPOConfig):
    """[`PPOConfig`] from a YAML file."""

    _argument_group_name = "training (fields of PPOConfig)"

    resume_from_checkpoint: str | None = HfArg(
        default=None,
        help="A checkpoint to resume from, true for the newest complete one in output_dir, or false to begin anew in "
        "a directory with checkpoints.",
    )

    def __post_init__(self):
        if self.hub_model_id is not None and not self.push_to_hub:
            raise ValueError("`hub_model_id` needs `push_to_hub`; set it to true, or omit `hub_model_id`.")
        super().__post_init__()


def main(argv: Sequence[str]) -> None:
    """Train from the beginning or from a checkpoint, then save and push; or preview the run."""
    description = "Train a policy with PPO, and save it in output_dir."
    script, args, model, mixture = parse("train", argv, description, TrainConfig, TrainScriptArguments)
    if cast(TrainScriptArguments, script).dry_run:
        dry_run(script, args, model, mixture)
        return
    trainer = build_trainer(script, args, model, load_datasets(script, mixture))
    try:
        trainer.train()
    except CheckpointError:
        raise
    except (ValueError, OSError) as error:
        notes = " ".join([sentence(error), *getattr(error, "__notes__", [])])
        raise RuntimeError(  # shown with its traceback, unlike wrong arguments
            f"The run failed after {trainer.state.global_step} optimizer steps: {type(error).__name__}: {notes} Once "
            "fixed, resume from the last checkpoint with --resume_from_checkpoint true."
        ) from error
    if trainer.args.push_to_hub:
        names = [script.dataset_name, *(entry.path for entry in mixture.datasets)]
        ids = [name for name in dict.fromkeys(names) if name and name.count("/") < 2 and not os.path.exists(name)]
        metadata: dict[str, Any] = {"datasets": ids} if ids else {}
        try:
            trainer.push_to_hub(**metadata)
        except PushError as error:  # nothing of the run is lost, and the error has a remedy
            raise ValueError(str(error)) from error
        trainer.accelerator.print(f"Pushed to {trainer.hub_model_id}.")
    else:
        trainer.save_model()
    trainer.accelerator.print(f"Saved in {trainer.args.output_dir}.")
    trainer.end()


def first_rows(script: PPOScriptArguments, mixture: MixtureConfig) -> dict[str, Any]:
    """Splits: of the Hub the first rows, of files and of a mixture (`datasets`) all."""

    def first(rows: Any) -> Any:
        return Dataset.from_list(list(islice(rows, ROWS))) if isinstance(rows, IterableDataset) else rows

    streamed, name = copy(script), script.dataset_name
    streamed.dataset_streaming |= name is not None and not os.path.exists(name)  # on the Hub
    return {name: first(split) for name, split in load_datasets(streamed, mixture).items()}


def dry_run(script: PPOScriptArguments, args: PPOConfig, model: PPOModelConfig, mixture: MixtureConfig) -> None:
    """Check everything that needs no weights, and print the plan of the run."""
    # 1. Read a few rows.
    splits = first_rows(script, mixture)

    # 2. Run the trainer's checks, up to the weights.
    arguments = trainer_arguments(script, args, model, splits)
    evaluation, name, start = arguments.pop("eval_dataset", None), arguments["model"], args.critic_init
    environments = Environments(arguments.pop("tools"), arguments.pop("environment_factory"))
    checked = {"eval_dataset": evaluation, "environments": environments}
    check_trainer_arguments(**arguments, **checked, reward_processing_classes=[], optimizer=None)
    check_trackers(args)
    check_target(str(args.output_dir), name)
    try:
        if start is not None:
            read_critic(start, args.critic, name, args.reward_label)
    except (ValueError, OSError) as error:
        raise ValueError(f"`critic_init={start!r}` cannot be used: {error}") from error
    tokenizer, context, vocab_size = load_tokenizer(name, name, None, args)
    length, template_kwargs = args.max_completion_length, cast(dict, args.chat_template_kwargs)
    _, prompt_kwargs = environments.prepare(arguments["train_dataset"], tokenizer, template_kwargs, args, 1)
    limit, overlong = prompt_limit(length, context, args.max_prompt_length), args.overlong_prompts
    for rows, argument in ((evaluation, "eval_dataset"), (arguments.pop("train_dataset"), "train_dataset")):
        if rows is not None:
            rows = tokenize_prompts(
                rows,
                tokenizer,
                argument,
                length,
                None,
                prompt_kwargs,
                critic_prompt=args.critic_prompt,
                vocab_size=vocab_size,
            )
            prompts = rows[PROMPT_IDS]
            lengths = [len(ids) for ids in prompts]
            too_long = f"{sum(n > limit for n in lengths)} of {len(lengths)} prompts have more than {limit} tokens"
            if max(lengths) > limit and (overlong == "error" or (overlong == "drop" and min(lengths) > limit)):
                change = "raise `max_prompt" if limit == args.max_prompt_length else "lower `max_completion"
                remedy = f"{change}_length`, or set `overlong_prompts` to 'truncate'"
                raise ValueError(f"`{argument}`: {too_long}, up to {max(lengths)}; {remedy}.")
    if args.process_index:  # the first process prints for all
        return

    # 3. Print sizes, memory, and one prompt.
    device, rewards = args.device, [*(script.reward_funcs or []), *(x.name for x in environments.rewards)]
    print(
        f"model:   {name}; {'quantized' if arguments['quantization_config'] else 'not quantized'}\n"
        f"rewards: {', '.join(rewards)}; monitored: {', '.join(script.monitor_funcs or ['none'])}\n"
        f"prompts: {min(lengths)} to {max(lengths)} tokens in {len(lengths)} rows, and up to {length} per completion, "
        f"in a context of {context or 'unknown length'}{f'; {too_long} ({overlong})' * (max(lengths) > limit)}\n"
        f"{BatchPlan.from_config(args, args.world_size).summary(args.max_steps, args.num_train_epochs)}"
    )
    longest = min(max(PROMPT_LENGTH, *lengths), limit)
    try:
        estimate = estimate_memory(**arguments, prompt_length=longest, device=device.type)
        print(f"memory:  with prompts of {longest} tokens, on each process")
        on_gpu = device.type == "cuda"
        print_estimate(estimate, torch.cuda.get_device_properties(device).total_memory / GIB if on_gpu else None)
    except ValueError as error:
        print(f"memory:  not estimated: {error}")
    print(f"\nThe first prompt, as the model reads it:\n{shortened(tokenizer.decode(prompts[0][-limit:]), LONGEST)}")
