"""Train the runs of a list one after the other, and save their results.

Under a launcher, every process is one of the run's. Without one, the processes of each list of runs
are forks, with environment variables such as those of a launcher.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from processes import finished, start
from runs_of_tiny import write_completions
from tiny import config, llama, prompts, tokenizer
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trl_ppo_ext import PPOTrainer, RewardAdapter
from trl_ppo_ext.sequences import Sequences

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from supervised_loss import PTXTrainer

FIXED = ([[5, 6, 7], [8]], [[9, 10, 11], [12, 13]])  # prompts and completions


def completions_of(prompts):
    """The same completions on any number of processes, of very different lengths, some cut off."""
    generators = [torch.Generator().manual_seed(sum(ids)) for ids in prompts]
    lengths = [1 + sum(ids) % 8 for ids in prompts]
    drawn = [torch.randint(4, 32, (n,), generator=g).tolist() for n, g in zip(lengths, generators)]
    return [ids if len(ids) == 8 else [*ids[:-1], 1] for ids in drawn]


def reward(completion_ids, **kwargs):
    return [sum(ids) / 50 for ids in completion_ids]


def failing_once(completion_ids, trainer_state, **kwargs):
    """Has no score for any completion of the third rollout."""
    return [
        float("nan") if trainer_state.global_step == 4 else sum(ids) / 50 for ids in completion_ids
    ]


def part_of_the_parameters(actor_critic):
    """How much of all parameters FSDP has left on this process."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in actor_critic.parameters()]
    return sum(x.numel() for x in parts) / sum(x.numel() for x in actor_critic.parameters())


def reward_adapter(output_dir):
    """An adapter on the policy's base, as every process would find it."""
    torch.manual_seed(5)
    config = LoraConfig(
        r=4, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False
    )
    if torch.distributed.is_initialized():
        process = torch.distributed.get_rank()
    else:
        process = 0
    path = f"{output_dir} reward {process}/polite"
    get_peft_model(llama(classifier=True), config).save_pretrained(path)
    return RewardAdapter(path, check_base=False)


def without_a_gradient_at(trainer, step):
    """The last process's gradient of a step is no number."""
    compute_loss = trainer.compute_loss
    last = trainer.args.process_index == trainer.args.world_size - 1

    def computing(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        if trainer.state.global_step == step and last:
            loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss

    trainer.compute_loss = computing


class Collectives(TorchDispatchMode):
    """Counts what processes exchange."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.namespace == "c10d"
        return function(*args, **kwargs or {})


def counting(trainer):
    """Collectives of each time that episodes are played, beside the forwards of each process."""
    player = trainer.components.player
    forwards = []
    counts = []
    play = player.play
    trainer.actor_critic.trunk.register_forward_pre_hook(lambda *given: forwards.append(given))

    def counted(*given):
        forwards.clear()
        with Collectives() as collectives:
            episodes = play(*given)
        counts.append([collectives.count, gather_object([len(forwards)])])
        return episodes

    player.play = counted
    return counts


class Game:
    """Plain environment whose episodes have one to four turns, by their prompt; every other one
    is then truncated."""

    def reset(self, *, seed=None, options=None):
        self.left = 1 + len(options["prompt"].split()) % 4
        self.truncates = self.left % 2 == 0
        return " w1", {}

    def step(self, text):
        self.left -= 1
        ends = self.left == 0
        return (
            f" w{self.left} w2",
            len(text) / 10,
            ends and not self.truncates,
            ends and self.truncates,
            {},
        )


def train(
    output_dir,
    settings,
    sample=False,
    model=None,
    classifier=None,
    resume_from=None,
    nan_at=None,
    others=False,
    plays=False,
    weighs=False,
):
    """One run; its completions are those of `completions_of` unless it is to sample.

    `model` is a path for the model's own loading, which shards it as it loads; `classifier` that of
    a second reward, which every process loads whole; `others` takes all other ways in which the
    model is run, and evaluates a stream; `plays` samples episodes of several turns, and `weighs`
    has a curriculum.
    """
    if "ptx_coef" in settings:
        ptx = Dataset.from_dict({"text": ["w1 w2 w3 w4", "w5 w6", "w7 w8 w9"]})
    else:
        ptx = None
    if ptx:
        supervised = {"ptx_dataset": ptx, "ptx_coef": settings["ptx_coef"]}
    else:
        supervised = {}
    settings = {name: value for name, value in settings.items() if name != "ptx_coef"}
    defaults = {
        "num_mini_batches": 1,
        "num_ppo_epochs": 2,
        "max_steps": 6,
        "entropy_coef": 0.01,
        "normalize_rewards": True,
        "max_grad_norm": 0.0,  # DeepSpeed clips the gradients of policy and critic together
    }
    rewards = [
        failing_once if "reward_on_error" in settings else reward,
        *([classifier] if classifier else []),
    ]
    trainer = (PTXTrainer if ptx else PPOTrainer)(
        model or llama(),
        rewards + ([reward_adapter(output_dir)] if others else []),
        config(output_dir, **defaults | settings),
        prompts(),
        # of a length that two do not share
        eval_dataset=prompts(7).to_iterable_dataset() if others else prompts(7),
        processing_class=tokenizer(),
        **supervised,
        environment_factory=Game if plays else None,
        curriculum=(lambda episodes, scores: 0.01 + scores.clamp(min=0)) if weighs else None,
    )
    if not (sample or plays):
        write_completions(trainer, completions_of)
    if nan_at is not None:
        without_a_gradient_at(trainer, nan_at)
    if plays:
        counts = counting(trainer)
    else:
        counts = []
    if others or plays:
        trainer.evaluate()
    if others:
        trainer.train()
    trainer.train(resume_from_checkpoint=resume_from)
    evaluation = trainer.evaluate()
    trainer.save_model()
    with torch.no_grad():
        logprobs = trainer.actor_critic(
            Sequences.from_token_ids(*FIXED, 0, trainer.args.device)
        ).logprobs
    if trainer.is_world_process_zero():
        plugin = trainer.accelerator.state.deepspeed_plugin
        about = {
            "num_processes": trainer.accelerator.num_processes,
            "zero_stage": plugin and plugin.zero_stage,
        }
        about["part"] = (
            part_of_the_parameters(trainer.actor_critic) if trainer.is_fsdp_enabled else None
        )
        about |= {"logprobs": logprobs.tolist(), "plays": counts}
        with open(f"{output_dir}/log.json", "w") as file:
            json.dump([about, *trainer.state.log_history, evaluation], file)
    return trainer


def train_all(runs, variables=None):
    os.environ |= variables or {}
    AcceleratorState._reset_state(reset_partial_state=True)  # of earlier tests
    for run in runs:
        last = train(**run)
    last.end()


def import_deepspeed():
    """Import it without an extension that takes a minute to compile, and that gloo replaces."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main(lists):
    """`lists` has the processes and the runs of each way to start them."""
    if "deepspeed" in json.dumps(lists).lower():
        import_deepspeed()  # once, for all forks
    for processes, runs, variables in lists:
        codes = finished(start(partial(train_all, runs, variables), processes), bound=300)
        if codes != [0] * processes:
            sys.exit(f"exit codes {codes}")


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import_deepspeed()
    train_all(json.loads(sys.argv[1]))
