"""Logs of the main process: JSON lines for `trl-ppo report`, and one line per log in the
terminal."""

import json
import math
import os
import platform
import shlex
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
from accelerate.state import PartialState
from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from .. import __version__
from ..batch_plan import BatchPlan
from ..config import PPOConfig
from ..ppo.rollouts import Samples
from ..redaction import shortened
from .advice import judge, number
from .completions import as_text, limited, limited_turns, turns_of
from .reading import RUN_LOG, Run, curves_of

logger = logging.get_logger(__name__)

ROWS = 16  # completions per entry
LONGEST = 2_000  # characters of a prompt, a completion, or a cell of another column
TIMES = 60  # entries with completions over a run, and as many for evaluation
LONGEST_EPISODE = 8_000  # characters of all turns of an episode
PACKAGES = (
    "torch transformers trl peft accelerate datasets bitsandbytes deepspeed safetensors "
    "huggingface_hub tokenizers"
).split()
# label of each in the terminal
MAIN_METRICS = {
    "reward": "reward",
    "kl_per_completion": "KL",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "value/explained_variance": "explained",
    "tokens_per_second": "tokens/s",
}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of this package, which may run from a checkout, and of those that are installed."""
    versions = {"trl_ppo_ext": __version__}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def environment() -> dict[str, Any]:
    """Versions and GPUs, without names of people or machines, paths or environment variables."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "packages": package_versions(PACKAGES),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "gpus": [f"{gpu.name} ({gpu.total_memory / 2**30:.1f} GiB)" for gpu in gpus],
    }


def _json(value: Any) -> Any:
    """Plain values for JSON, which has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {str(name): _json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _text(entry: Any) -> str:
    return limited(as_text(entry), LONGEST)


def evaluation_of(logs: Iterable[str]) -> str | None:
    """Prefix of the evaluation whose metrics were logged, e.g. `eval`; `None` for other logs."""
    names = set(logs)
    for name in logs:
        prefix = name.removesuffix("_runtime")
        # a reward function may log a metric of such a name, but not all three
        speeds = {f"{prefix}_samples_per_second", f"{prefix}_steps_per_second"}
        if prefix != name and speeds <= names:
            return prefix
    return None


def _lacks_end(path: str) -> bool:
    """Whether the last line of a file has no end, e.g. because a run was killed in it."""
    if not os.path.isfile(path) or not os.path.getsize(path):
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


class RunLog(TrainerCallback):
    """Appends to `run_log.jsonl` in the output directory; if that fails, warns once and never
    ends the run."""

    def __init__(self, model: str | None, rewards: list[str], monitors: list[str], plan: BatchPlan):
        self.model = model
        self.rewards = rewards
        self.monitors = monitors
        self.plan = plan
        self._path: str | None = None  # set on the main process when training begins
        self._due: dict[str, float] = {}  # step of the next entry with completions, by mode
        self._warned = False

    def on_train_begin(
        self, args: PPOConfig, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        """Log models, settings and environment; entries of an earlier run after this step are
        then void."""
        if not state.is_world_process_zero:
            return
        self._path = os.path.join(cast(str, args.output_dir), RUN_LOG)
        self._due = {}
        trainer_fields = {field.name for field in fields(TrainingArguments)}
        settings = args.to_dict()
        self._append(
            "run",
            state,
            max_steps=state.max_steps,
            model=self.model,
            rewards=self.rewards,
            monitors=self.monitors,
            plan=asdict(self.plan),
            changed=args.changed_fields,
            config={name: value for name, value in settings.items() if name not in trainer_fields},
            trainer_config={
                name: value for name, value in settings.items() if name in trainer_fields
            },
            environment=environment(),
        )

    def on_log(
        self, args: PPOConfig, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Log the metrics of the Trainer's log."""
        self._append("metrics", state, metrics=logs)

    def on_train_end(
        self, args: PPOConfig, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        """Log the end: a run without it is still running, was killed, or failed."""
        self._append("end", state)

    def best_is_loaded(self, step: int) -> None:
        """Log the step of the checkpoint whose weights the run ends with."""
        self._append("best", TrainerState(global_step=step))

    def completions(self, samples: Samples, state: TrainerState, evaluated: str | None) -> None:
        """Log some completions with their scores, at most every sixtieth of the run.

        Those of an evaluation have the prefix of its metrics.
        """
        step = state.global_step
        if evaluated is None:
            mode = "train"
        elif evaluated.startswith("eval"):
            mode = evaluated
        else:
            mode = f"eval_{evaluated}"
        if self._path is None or (step < self._due.get(mode, 0) and step < state.max_steps):
            return
        self._due[mode] = step + max(state.max_steps / TIMES, 1)
        batch = samples.batch
        tokens = samples.tokens
        rewards = samples.scored.rewards.tolist()
        monitored = samples.monitored.tolist()
        totals = samples.scored.totals.tolist()
        stopped = samples.stopped.tolist()
        kls = (
            None
            if tokens.ref_logprobs is None
            else (tokens.logprobs - tokens.ref_logprobs).sum(1).tolist()
        )
        rows = [
            {
                "prompt": _text(batch.prompts[row]),
                "turns": limited_turns(turns, LONGEST_EPISODE if len(turns) > 1 else LONGEST),
                "score": totals[row],
                "rewards": dict(zip(self.rewards, rewards[row])),
                "monitors": dict(zip(self.monitors, monitored[row])),
                "kl": None if kls is None else kls[row],
                "tokens": len(batch.completion_ids[row]),
                "ended": stopped[row],
                "extra": {name: _text(values[row]) for name, values in samples.extra.items()},
            }
            for row, turns in enumerate(turns_of(samples, ROWS))
        ]
        self._append("completions", state, mode=mode, rows=rows)

    def _append(self, kind: str, state: TrainerState, **entry: Any) -> None:
        if self._path is None:
            return
        try:
            entry = _json({"kind": kind, "time": time.time(), "step": state.global_step, **entry})
            begin = "\n" if kind == "run" and _lacks_end(self._path) else ""
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with open(self._path, "a") as file:
                file.write(f"{begin}{json.dumps(entry, default=shortened)}\n")
        except Exception as error:  # a log must never end a run
            if not self._warned:
                logger.warning(
                    "`%s` cannot be written, so the report will be incomplete: %s", RUN_LOG, error
                )
            self._warned = True


def _parts_of_reward(logs: dict[str, float], prefix: str, rewards: list[str]) -> list[str]:
    """Means of several rewards, e.g. `(format 0, judge 0.51)`."""
    names = {label: f"{prefix}rewards/{label}/mean" for label in rewards}
    parts = [f"{label} {number(logs[name])}" for label, name in names.items() if name in logs]
    if len(parts) < 2:
        return []
    return [f"({', '.join(parts)})"]


class Terminal(ProgressCallback, PrinterCallback):
    """Prints the plan, a line per log, and grave problems; both callbacks of transformers print
    every metric."""

    def __init__(self, rewards: list[str], plan: BatchPlan, disable_tqdm: bool):
        super().__init__()
        self.rewards = rewards
        self.plan = plan
        self.disable_tqdm = disable_tqdm
        # time and step at the beginning of the first whole rollout
        self._began: tuple[float, int] | None = None
        self._pace: float | None = None  # seconds per optimizer step, once a rollout is learned

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Print the plan, and begin the progress bar at the step that the run resumes from."""
        self.current_step = state.global_step
        # names of rules, and number of logs
        self._warned = set[str]()
        self._judged = 0
        self._began = None
        self._pace = None
        if state.global_step % self.plan.optimizer_steps == 0:
            self._began = (time.monotonic(), state.global_step)
        if state.is_world_process_zero:
            tqdm.write(self.plan.summary(state.max_steps, state.num_train_epochs))
            self.training_bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                disable=self.disable_tqdm,
                dynamic_ncols=True,
            )

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Advance the progress bar; measure the pace after whole rollouts, whose steps differ."""
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step % self.plan.optimizer_steps:
            return
        now = time.monotonic()
        if self._began is None:  # the run was resumed within a rollout
            self._began = (now, state.global_step)
        else:
            began, first_step = self._began
            self._pace = (now - began) / (state.global_step - first_step)

    def tell(self, text: str) -> None:
        """Print a line above the progress bar, on the main process."""
        if PartialState().is_main_process:
            tqdm.write(text)

    def on_prediction_step(self, *positional: Any, **kwargs: Any) -> None:
        """Advance the progress bar of an evaluation."""
        if not self.disable_tqdm:
            super().on_prediction_step(*positional, **kwargs)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Print the main metrics in one line, and what goes gravely wrong once."""
        if not state.is_world_process_zero or "train_runtime" in logs:  # the latter sums up the run
            return
        evaluation = evaluation_of(logs)
        prefix = "" if evaluation is None else f"{evaluation}_"
        shown = {
            label: logs[prefix + name]
            for name, label in MAIN_METRICS.items()
            if prefix + name in logs
        }
        # steps that collect no rollout have metrics of the update only
        shown = shown or {name: logs[name] for name in ("loss", "grad_norm") if name in logs}
        place = f"step {state.global_step:{len(str(state.max_steps))}}/{state.max_steps}"
        cells = [f"{label} {number(value)}" for label, value in shown.items()]
        cells[1:1] = _parts_of_reward(logs, prefix, self.rewards)
        if self._pace is not None and not prefix and state.global_step < state.max_steps:
            seconds = self._pace * (state.max_steps - state.global_step)
            cells.append(f"{timedelta(seconds=round(seconds))} left")
        tqdm.write("  ".join([place, *filter(None, [prefix.strip("_")]), *cells]))
        # all of a long run would take time
        if "reward" not in logs or len(state.log_history) <= 1.1 * self._judged:
            return
        self._judged = len(state.log_history)
        start = {
            "rewards": self.rewards,
            "plan": asdict(self.plan),
            "config": args.to_dict(),
            "trainer_config": {},
        }
        for item in judge(Run("", start, curves_of(state.log_history), [], [], 0.0, 0.0)).advice:
            if (item.rule.grave or item.rule.live) and item.rule.name not in self._warned:
                self._warned.add(item.rule.name)
                tqdm.write(f"warning: {item.rule.cause}: {item.seen}. {item.remedy}")

    def on_train_end(
        self, args: PPOConfig, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        """End the progress bar; print where the run stopped, and the command of its report."""
        super().on_train_end(args, state, control, **kwargs)
        directory = cast(str, args.output_dir)
        if state.global_step < state.max_steps:
            self.tell(f"stopped at step {state.global_step} of {state.max_steps}")
        if state.is_world_process_zero and os.path.isfile(os.path.join(directory, RUN_LOG)):
            tqdm.write(f"see `trl-ppo report {shlex.quote(directory)}`")
