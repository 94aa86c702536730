"""Kill a run at random moments, resume it, and compare what comes of it with the run that nothing
happened to.

Started as a process of its own; every process of a run is a fork of it.
"""

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from processes import finished, start
from safetensors.torch import load_file
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers import EarlyStoppingCallback
from transformers.utils import logging

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.checkpoints import save as saving
from trl_ppo_ext.checkpoints.atomic import checkpoints, find_damage

STEPS = 12
BOUND = 600  # seconds after which a process hangs, as long as it is not known how long a run takes
TIMED = (
    "time/",
    "step_time",
    "tokens_per_second",
    "train_",
    "epoch",
    "eval_time/",
    "eval_runtime",
    "eval_samples_",
)
TIMED += ("eval_steps_",)
SETTINGS = {
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
    "critic": "adapter",
}


def train(output_dir, settings):
    """Train in this process, from the newest whole checkpoint if there is one."""
    settings = SETTINGS | settings
    patience = settings.pop("patience", None)
    if patience:
        callbacks = [EarlyStoppingCallback(patience)]
    else:
        callbacks = None
    rank = int(os.environ.get("RANK", "0"))
    fails = settings.pop("fails", None)
    model = settings.pop("model", None) or llama()
    dataset = prompts(settings.pop("rows", 16))
    if settings.pop("stream", False):
        dataset = dataset.to_iterable_dataset().shuffle(seed=3, buffer_size=5)
    if settings.pop("disk", None) == rank:
        fill_disk()

    def reward(completion_ids, prompts, target, trainer_state, **kwargs):
        if target[0] >= 0:  # not of an evaluation
            with open(f"{output_dir}/prompts-{rank}", "a") as file:
                print(json.dumps([trainer_state.global_step, prompts]), file=file)
        if fails == rank and trainer_state.global_step >= 4:
            raise ValueError("the judge is on strike")
        return length_reward(completion_ids)

    os.makedirs(output_dir, exist_ok=True)
    args = config(output_dir, **settings)
    evaluated = prompts(4).map(lambda row: {"target": -1})
    trainer = PPOTrainer(model, reward, args, dataset, evaluated, tokenizer(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=bool(checkpoints(output_dir)) or None)
    trainer.save_model(f"{output_dir}/end")
    if rank == 0:
        trainer.state.save_to_json(f"{output_dir}/end/trainer_state.json")
    trainer.end()


def fill_disk():
    """From now on, there is no room for the third thing that this process writes."""
    save_file = saving.save_file
    left = iter([True, True])

    def full(*args):
        if not next(left, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*args)

    saving.save_file = full


def drawn(output_dir, processes):
    """Prompts of every rollout, by process and by the optimizer steps before it."""
    found = {}
    for rank in range(processes):
        for line in (Path(output_dir) / f"prompts-{rank}").read_text().splitlines():
            step, prompts = json.loads(line)
            if found.setdefault((rank, step), prompts) != prompts:
                raise AssertionError(
                    f"process {rank} drew other prompts at step {step} when it was resumed"
                )
    return found


def newest(output_dir):
    """Step of the newest checkpoint; 0 without one."""
    found = checkpoints(output_dir)
    if found:
        return int(found[0].name.split("-")[1])
    return 0


def outcome(output_dir):
    """Weights at the end, and what was logged, timings aside."""
    last = Path(output_dir) / "end"
    weights = {
        f"{path.relative_to(last)}:{name}": x
        for path in sorted(last.rglob("*.safetensors"))
        for name, x in load_file(path).items()
    }
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    history = [log for log in history if "train_runtime" not in log]  # one per start
    return weights, [{k: v for k, v in log.items() if not k.startswith(TIMED)} for log in history]


def same(one, other):
    """Whether two outcomes are equal, bit for bit."""
    weights = one[0].keys() == other[0].keys() and all(
        torch.equal(x, other[0][name]) for name, x in one[0].items()
    )
    return weights and one[1] == other[1]


class Killer:
    """Kills runs of one kind.

    Args:
        folder (`Path`): Where they are written.
        processes (`int`): Processes of a run.
        settings (`dict`): What differs from `SETTINGS`.
    """

    def __init__(self, folder, processes, settings):
        self.folder = folder
        self.processes = processes
        self.settings = settings
        self.random = random.Random(0)
        self.bound = BOUND
        began = time.monotonic()
        codes = self.finished(self.start(folder / "whole"))
        assert codes == [0] * processes, codes
        self.length = time.monotonic() - began
        self.expected = outcome(folder / "whole")
        self.bound = max(60.0, 5 * self.length)
        self.drawn = drawn(folder / "whole", processes)

    def start(self, output_dir, **settings):
        return start(lambda: train(output_dir, self.settings | settings), self.processes)

    def finished(self, children):
        return finished(children, self.bound)

    def kill(self, name, number, whom):
        """Send a signal to one process or to all of them, and resume; say what came of it.

        At a random moment; or, where `whom` is a step, to one when a checkpoint of that step or a
        later one is there.
        """
        output_dir = self.folder / name
        children = self.start(output_dir)
        moment = self.random.uniform(0.02, 0.98) * self.length
        if isinstance(whom, int):
            waited = time.monotonic() + self.bound
            while newest(output_dir) < whom and time.monotonic() < waited:
                time.sleep(0.005)
        else:
            time.sleep(moment)
        if whom == "all":
            chosen = children
        else:
            chosen = [children[self.random.randrange(len(children))]]
        for child in chosen:
            os.kill(child, number)
        codes = self.finished(children)
        step = newest(output_dir)
        ended = self.finished(self.start(output_dir))
        equal = (
            ended == [0] * self.processes
            and same(outcome(output_dir), self.expected)
            and drawn(output_dir, self.processes) == self.drawn
        )
        last = checkpoints(output_dir)[:1]
        if equal:
            shutil.rmtree(output_dir)
        return {
            "moment": moment,
            "codes": codes,
            "step": step,
            "ended": ended,
            "equal": equal,
            "last": [path.name for path in last],
        }

    def fail(self, name, **settings):
        """Train with something that fails on one process."""
        codes = self.finished(self.start(self.folder / name, **settings))
        whole = [path.name for path in checkpoints(self.folder / name) if find_damage(path) is None]
        return {"codes": codes, "checkpoints": whole}


def main(folder, scenarios, settings):
    """Print what came of each scenario: processes, the signal or what fails, for whom, how
    often, own settings."""
    logging.set_verbosity_error()
    if settings.get("use_vllm"):
        import vllm  # noqa: F401  once, for all forks
    folder = Path(folder)
    killers = {}
    for name, (processes, number, whom, times, *own) in scenarios.items():
        kind = f"{processes} {own}"
        if kind not in killers:
            killers[kind] = Killer(
                folder / (name if own else f"{processes}"), processes, settings | dict(*own)
            )
        for turn in range(times):
            if number in ("fails", "disk"):
                # the error itself saves
                if number == "fails":
                    saving = {"save_strategy": "no"}
                else:
                    saving = {}
                told = killers[kind].fail(f"{name}-{turn}", **{number: whom}, **saving)
            else:
                told = killers[kind].kill(f"{name}-{turn}", getattr(signal, number), whom)
            print(json.dumps({"scenario": name} | told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
