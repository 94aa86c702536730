"""Kill a run at random moments, resume it, and compare what comes of it with the run that nothing happened to.

Started as a process of its own: every run is a fork of it, so that what takes seconds is imported once.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers.utils import logging

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.whole_checkpoints import checkpoints

STEPS = 18
TIMED = ("time/", "tokens_per_second", "train_", "epoch")


def train(output_dir, settings):
    """Train in this process, from the newest whole checkpoint if there is one."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    args = config(
        output_dir,
        **{
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": 1,
            "save_total_limit": 3,
            "logging_steps": 4,  # what was measured before a checkpoint is logged after it
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "normalize_rewards": True,
            "kl_target": 0.5,
            "kl_horizon": 100,
            "ema_decay": 0.5,
            "critic": "adapter",
        }
        | settings,
    )
    trainer = PPOTrainer(llama(), length_reward, args, prompts(), processing_class=tokenizer())
    trainer.train(resume_from_checkpoint=bool(checkpoints(output_dir)) or None)


def start(output_dir, settings):
    """Train in a fork; return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        train(output_dir, settings)
        os._exit(0)
    except SystemExit as stopped:
        os._exit(stopped.code)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def finished(child):
    """Exit code of a process, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(output_dir):
    """Weights of the last checkpoint, and what was logged, timings aside."""
    last = Path(output_dir) / f"checkpoint-{STEPS}"
    weights = {
        f"{path.relative_to(last)}:{name}": x
        for path in sorted(last.rglob("*.safetensors"))
        if not path.name.startswith("run_state")
        for name, x in load_file(path).items()
    }
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return weights, [{k: v for k, v in log.items() if not k.startswith(TIMED)} for log in history]


def same(one, other):
    """Whether two outcomes are equal, bit for bit."""
    weights = one[0].keys() == other[0].keys() and all(torch.equal(x, other[0][name]) for name, x in one[0].items())
    return weights and one[1] == other[1]


def main(folder, kills, number, settings):
    """Print, for each run that was killed: when, at which step it resumed, and whether it ended as it should."""
    logging.set_verbosity_error()
    folder, generator = Path(folder), random.Random(0)
    began = time.monotonic()
    assert finished(start(folder / "whole", settings)) == 0
    length, expected = time.monotonic() - began, outcome(folder / "whole")
    for kill in range(kills):
        output_dir = folder / f"killed-{kill}"
        child, moment = start(output_dir, settings), generator.uniform(0.02, 0.98) * length
        time.sleep(moment)
        os.kill(child, number)
        code = finished(child)
        found = checkpoints(output_dir)
        resumed_from = int(found[0].name.split("-")[1]) if found else 0
        aside = (output_dir / ".saving").exists()
        ended = finished(start(output_dir, settings))
        equal = ended == 0 and same(outcome(output_dir), expected)
        told = {"moment": moment, "code": code, "step": resumed_from, "aside": aside, "ended": ended, "equal": equal}
        print(json.dumps(told), flush=True)
        if equal:
            shutil.rmtree(output_dir)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), getattr(signal, sys.argv[3]), json.loads(sys.argv[4]))
