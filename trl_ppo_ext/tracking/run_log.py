"""What a run writes as it goes, for `trl-ppo report`: JSON lines, appended by the main process."""

import json
import math
import os
import time
from dataclasses import fields
from typing import Any, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..ppo.rollouts import Samples
from ..redaction import without_secrets
from .environment import environment
from .report.reading import RUN_LOG

logger = logging.get_logger(__name__)

ROWS = 16  # completions at a time
LONGEST = 2_000  # characters of a prompt, a completion, or an entry of another column
TIMES = 60  # over a run, as many for evaluation
COLUMNS = 8  # that reward functions added


def _settings(args: Any) -> dict[str, dict[str, Any]]:
    """The config in two parts, PPO's own fields and the Trainer's, without secrets."""
    of_trainer = {field.name for field in fields(TrainingArguments)}
    settings = without_secrets(args.to_dict())
    return {
        "config": {name: value for name, value in settings.items() if name not in of_trainer},
        "trainer_config": {name: value for name, value in settings.items() if name in of_trainer},
    }


def _number(value: Any) -> Any:
    """A number that JSON has; what is not finite becomes `null`."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(entry: Any) -> str:
    """A prompt or completion as text, cut off where it is very long."""
    if isinstance(entry, list) and all(isinstance(message, dict) for message in entry):
        entry = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in entry)
    text = str(entry)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text) - LONGEST} more characters)"


class RunLog(TrainerCallback):
    """Appends to `run_log.jsonl` in the output directory, from the beginning of training.

    What cannot be written is left out, with one warning: a log never ends a run.
    """

    def __init__(self, model: str | None, rewards: list[str], monitors: list[str]):
        self.model = model
        self.rewards = rewards
        self.monitors = monitors
        self._path: str | None = None  # until training begins
        self._due = {"train": 0.0, "eval": 0.0}  # step from which completions are written again
        self._warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write what the run is; where it begins tells a reader which earlier lines it takes the place of."""
        if not state.is_world_process_zero:
            return
        self._path = os.path.join(cast(str, args.output_dir), RUN_LOG)
        self._due = dict.fromkeys(self._due, 0.0)

        def about() -> dict[str, Any]:
            names = {"model": self.model, "rewards": self.rewards, "monitors": self.monitors}
            place = {"step": state.global_step, "max_steps": state.max_steps}
            launch = {
                "device": str(args.device),
                "processes": args.world_size,
                "parallel_mode": args.parallel_mode.value,
            }
            return place | names | _settings(args) | {"environment": environment() | launch}

        self._append("run", about)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the metrics as they are logged."""
        self._append(
            "metrics",
            lambda: {"step": state.global_step, "metrics": {name: _number(x) for name, x in (logs or {}).items()}},
        )

    def completions(self, samples: Samples, state: TrainerState, mode: str) -> None:
        """Write some completions with their scores, where enough steps have gone since the last time."""
        step = state.global_step
        if self._path is None or (step < self._due[mode] and step < state.max_steps):
            return
        self._due[mode] = step + max(state.max_steps / TIMES, 1)
        self._append("completions", lambda: {"step": step, "mode": mode, "rows": self._rows(samples)})

    def _rows(self, samples: Samples) -> list[dict[str, Any]]:
        batch, tokens = samples.batch, samples.tokens
        count = min(ROWS, len(batch))
        scores, monitored = samples.scored.rewards[:count].tolist(), samples.monitored[:count].tolist()
        totals = samples.scored.totals[:count].tolist()
        kls = (tokens.logprobs - tokens.ref_logprobs)[:count].sum(1).tolist()
        stopped = samples.stopped[:count].tolist()
        extra = list(samples.extra.items())[:COLUMNS]
        return [
            {
                "prompt": _text(batch.prompts[row]),
                "completion": _text(batch.completions[row]),
                "score": _number(totals[row]),
                "rewards": dict(zip(self.rewards, map(_number, scores[row]))),
                "monitors": dict(zip(self.monitors, map(_number, monitored[row]))),
                "kl": _number(kls[row]),
                "tokens": len(batch.completion_ids[row]),
                "ended": stopped[row],
                "extra": {name: _text(values[row]) for name, values in extra},
            }
            for row in range(count)
        ]

    def _append(self, kind: str, make: Any) -> None:
        """Append a line, made here so that an entry that cannot be made ends nothing either."""
        if self._path is None:
            return
        try:
            entry = {"kind": kind, "time": time.time()} | make()
            line = json.dumps(entry, default=str).encode() + b"\n"
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            with open(self._path, "ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a run was killed while it wrote
                        line = b"\n" + line
                file.write(line)
        except Exception as error:  # whatever it is, the run matters more
            if not self._warned:
                logger.warning("`%s` cannot be written, and the report will lack what is missing: %s", RUN_LOG, error)
            self._warned = True
