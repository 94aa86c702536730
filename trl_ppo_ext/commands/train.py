"""`trl-ppo train`: a PPO run from a YAML file and a command line, or with `--dry_run` a preview
of it."""

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from peft import PeftConfig
from transformers.hf_argparser import HfArg

from ..arguments import (
    Prompts,
    read_prompts,
    settle_trainer_arguments,
    tokenizer_name,
    without_rewards,
)
from ..checkpoints.atomic import checkpoints
from ..checkpoints.files import CheckpointError, check_links, check_target
from ..checkpoints.resume import check_earlier_run
from ..config import PPOConfig
from ..data import PROMPT_IDS, prompt_limit
from ..episodes import Environments
from ..modeling.adapters import read_adapter, read_critic
from ..modeling.loading import add_policy_adapter, hub_kwargs, load_config
from ..ppo.metrics import check_best_metric
from ..redaction import shortened
from ..rewards import (
    FunctionReward,
    RewardAdapter,
    is_function,
    is_model,
    no_reward,
    with_distinct_names,
)
from ..tools.memory import GIB, PROMPT_LENGTH, estimate_memory, on_meta
from ..tracking.completions import check_trackers
from .estimate import print_estimate, work_of
from .launch import (
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
        help=(
            "Check configs and prompts (the first ten rows of a Hub dataset), print the plan, and "
            "stop."
        ),
    )


def main(argv: Sequence[str]) -> None:
    """Train from the beginning or from a checkpoint, then save and push; or preview the run."""
    description = "Train a policy with PPO, and save it in output_dir."
    script, args, model = parse(
        "trl-ppo train", argv, description, script_class=TrainScriptArguments
    )
    if cast(TrainScriptArguments, script).dry_run:
        dry_run(script, args, model)
        return
    if args.resume_from_checkpoint is None:
        check_earlier_run(str(args.output_dir))  # before anything is loaded
    trainer = build_trainer(script, args, model, load_datasets(script))
    try:
        trainer.train()
    except CheckpointError:
        raise
    except (ValueError, OSError) as error:
        # shown with its traceback and its cause, unlike wrong arguments
        steps = trainer.state.global_step
        if not checkpoints(str(args.output_dir)):
            raise RuntimeError(f"The run failed after {steps} optimizer steps.") from error
        raise RuntimeError(
            f"The run failed after {steps} optimizer steps. Resume from the last checkpoint with "
            "--resume_from_checkpoint true, once the cause is fixed."
        ) from error
    if args.push_to_hub:
        trainer.push_to_hub(datasets=[script.dataset_name])
        trainer.accelerator.print(f"Pushed to {trainer.hub_model_id}.")
    else:
        trainer.save_model()
    trainer.accelerator.print(f"Saved in {args.output_dir}.")
    trainer.end()


def dry_run(script: PPOScriptArguments, args: PPOConfig, model: PPOModelConfig) -> None:
    """Check settings, data and files without loading weights, and print the plan of the run."""
    splits = _some_rows(script)
    arguments = trainer_arguments(script, args, model, splits)
    datasets = {name: arguments.pop(name, None) for name in ("eval_dataset", "train_dataset")}
    environments = Environments(arguments.pop("tools"), arguments.pop("environment_factory"))
    settle_trainer_arguments(
        **arguments,
        **datasets,
        environments=environments,
        reward_processing_classes=[],
        optimizer=None,
    )
    if not (arguments["reward_funcs"] or environments.give_rewards):
        args = arguments["args"] = without_rewards(args, environments)
    name = arguments["model"]
    adapter = arguments["peft_config"]
    _check_directory(args, name)
    _check_saved_parts(args, arguments)
    if isinstance(adapter, PeftConfig):
        _check_modules(adapter, args, name)
    _check_best_metric(args, arguments, datasets["eval_dataset"], environments)
    prompts = read_prompts(
        name,
        tokenizer_name(name, adapter),
        None,
        args,
        environments,
        datasets["train_dataset"],
        datasets["eval_dataset"],
    )
    if not PartialState().is_main_process:
        return
    rewards = (script.reward_funcs or []) + [reward.name for reward in environments.rewards]
    monitored = script.monitor_funcs or ["none"]
    is_quantized = arguments["quantization_config"] is not None
    print(f"model:   {name}; {'quantized' if is_quantized else 'not quantized'}")
    print(f"rewards: {', '.join(rewards) or 'none'}; monitored: {', '.join(monitored)}")
    _print_plan(args, arguments, prompts)


def _some_rows(script: PPOScriptArguments) -> dict[str, Dataset]:
    """The datasets, of the Hub a few rows."""
    streamed = copy(script)
    source = script.dataset_name
    streamed.dataset_streaming |= source is not None and not os.path.exists(source)
    return {
        name: Dataset.from_list(list(rows.take(ROWS)))
        if isinstance(rows, IterableDataset)
        else rows
        for name, rows in load_datasets(streamed).items()
    }


def _check_directory(args: PPOConfig, name: str) -> None:
    """Check where the run reports and writes."""
    check_trackers(args.report_to)
    check_target(str(args.output_dir), name)
    check_links(str(args.output_dir))
    if args.resume_from_checkpoint is None:
        check_earlier_run(str(args.output_dir))


def _check_saved_parts(args: PPOConfig, arguments: dict[str, Any]) -> None:
    """Read a saved critic, and the adapters of rewards."""
    if args.critic_init is not None:
        model = arguments["model"]
        read_critic(args.critic_init, args.critic, model, args.reward_label, args.gamma)
    for reward in arguments["reward_funcs"] + arguments["monitor_funcs"]:
        if isinstance(reward, RewardAdapter):
            read_adapter(reward.path)


def _check_best_metric(
    args: PPOConfig, arguments: dict[str, Any], eval_dataset: Any, environments: Environments
) -> None:
    """Check the metric for the best model, unless it may be of a reward model, whose name is not
    known before it is loaded."""
    given = arguments["reward_funcs"], arguments["monitor_funcs"]
    is_of_reward = "/" in (args.metric_for_best_model or "")
    if is_of_reward and any(map(is_model, chain(*given))):
        return
    if not (given[0] or environments.give_rewards):
        given = [no_reward], given[1]
    of_rewards, of_monitors = (
        [FunctionReward(x) if is_function(x) else x for x in part if not is_model(x)]
        for part in given
    )
    rewards = with_distinct_names([*of_rewards, *environments.rewards])
    monitors = with_distinct_names(of_monitors)
    played = None
    if environments.kinds:
        played = [name for name in environments.kinds if name is not None]
    check_best_metric(args, eval_dataset, rewards, monitors, played)


def _check_modules(adapter: PeftConfig, args: PPOConfig, name: str) -> None:
    """Let PEFT check the names of the adapter's modules."""
    config = load_config("model", name, hub_kwargs(args))
    base = on_meta(config, trust_remote_code=args.trust_remote_code)
    with torch.device("meta"):
        add_policy_adapter(base, copy(adapter))


def _print_plan(args: PPOConfig, arguments: dict[str, Any], prompts: Prompts) -> None:
    """Print sizes, memory, and one prompt."""
    ids = prompts.train[PROMPT_IDS]
    context = prompts.context_length
    lengths = list(map(len, ids))
    described = f"{min(lengths)} to {max(lengths)} tokens in {len(lengths)} rows"
    print(f"prompts: {described}, of a context of {context}")
    print(args.plan(args.world_size).summary(args.max_steps, args.num_train_epochs))
    print(work_of(args, args.world_size))
    room = prompt_limit(args.max_completion_length, context, args.max_prompt_length)
    device = args.device
    most = min(max(PROMPT_LENGTH, *lengths), room)
    available = None
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory / GIB
    try:
        estimate = estimate_memory(**arguments, prompt_length=most, device=device.type)
    except ValueError as error:
        print(f"memory:  not estimated: {error}")
    else:
        print(f"memory:  with prompts of {most} tokens, on each process")
        print_estimate(estimate, available)
    first = shortened(prompts.tokenizer.decode(ids[0]), LONGEST)
    print(f"\nThe first prompt, as the model reads it:\n{first}")
