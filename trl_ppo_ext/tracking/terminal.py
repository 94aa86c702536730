"""The terminal during training: the plan of the run, one line per log, and where the results are."""

import os
import shlex
from importlib.util import find_spec
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerState
from transformers.utils import logging

from ..config import PPOConfig
from ..ppo.batch_plan import BatchPlan
from .advice import number
from .reading import INSTALL, MAIN_METRICS, RUN_LOG

logger = logging.get_logger(__name__)


class Terminal(ProgressCallback, PrinterCallback):
    """Replaces both callbacks of transformers, which print every metric; those go to `logging` instead."""

    def __init__(self, plan: BatchPlan):
        super().__init__()
        self.plan = plan
        self.checkpoint: str | None = None  # that the run resumes from

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Print the plan, and begin the progress bar."""
        self.current_step = state.global_step
        if not state.is_world_process_zero:
            return
        tqdm.write(self.plan.summary(state.max_steps, args.num_train_epochs))
        if self.checkpoint is not None:
            tqdm.write(f"resumed from {self.checkpoint}, after step {state.global_step}")
        self.training_bar = tqdm(
            total=state.max_steps, initial=state.global_step, disable=args.disable_tqdm, dynamic_ncols=True
        )

    def on_prediction_step(self, args: PPOConfig, *positional: Any, **kwargs: Any) -> None:
        """Advance the progress bar of an evaluation."""
        if not args.disable_tqdm:  # an evaluation may come before any training
            super().on_prediction_step(args, *positional, **kwargs)

    def on_log(self, args: PPOConfig, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the main metrics in one line."""
        if not state.is_world_process_zero or "train_runtime" in logs:  # the latter sums up the run
            return
        logger.info("step %d: %s", state.global_step, logs)
        prefix = next((name.removesuffix("runtime") for name in logs if name.endswith("_runtime")), "")
        shown = {label: logs[prefix + name] for name, label in MAIN_METRICS.items() if prefix + name in logs}
        # steps that collect no rollout have metrics of the update only
        shown = shown or {name: logs[name] for name in ("loss", "grad_norm") if name in logs}
        place = f"step {state.global_step:{len(str(state.max_steps))}}/{state.max_steps}"
        cells = [f"{label} {number(value)}" for label, value in shown.items()]
        tqdm.write("  ".join([place, *filter(None, [prefix.strip("_")]), *cells]))

    def on_train_end(self, args: PPOConfig, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """End the progress bar, and name the report, unless the run has no log."""
        super().on_train_end(args, state, control, **kwargs)
        if state.is_world_process_zero and os.path.isfile(os.path.join(args.output_dir, RUN_LOG)):
            needed = "" if find_spec("bokeh") else f" (needs {INSTALL})"
            tqdm.write(f"see `trl-ppo report {shlex.quote(args.output_dir)}`{needed}")
