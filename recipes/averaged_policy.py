"""Exponential moving average of the policy's adapter, as a callback of any `PPOTrainer`.

PPOTrainer(..., callbacks=[AveragedPolicy(0.992)])

Every checkpoint but that of a run which ends by an error gets the averaged adapter in `ema/`, and so
does the run's directory at the end. It is a plain PEFT adapter. The decay of InstructGPT is 0.992
(https://huggingface.co/papers/2203.02155).
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from trl_ppo_ext.distributed import set_weights, unsharded_weights
from trl_ppo_ext.modeling.adapters import save_adapter


class AveragedPolicy(TrainerCallback, ExportableState):
    """After every optimizer step: average ← decay·average + (1 − decay)·weight, from a copy of the
    first weights.

    The averages are part of `trainer_state.json`, so a resumed run continues with them bit for bit.
    """

    def __init__(self, decay: float):
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be at least 0 and below 1, got {decay}.")
        self.decay = decay
        self.saved = ""
        self.averages: dict[str, Tensor] = {}  # by parameter, unsharded

    def state(self) -> dict:
        if self.averages:
            saved = b64encode(save(self.averages)).decode()
        else:
            saved = ""
        return {"args": {"decay": self.decay}, "attributes": {"saved": saved}}

    def on_train_begin(self, args, state, control, model, **kwargs):
        weights = unsharded_weights(model.policy_parameters())
        # float32: in bf16 a step of (1 − decay) would often round to nothing
        averages = {
            name: x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
            for name, x in weights.items()
        }
        if self.saved:
            restored = load(b64decode(self.saved))
        else:
            restored = self.averages
        self.averages = {name: restored.get(name, x).to(x.device) for name, x in averages.items()}
        self.saved = ""

    def on_step_end(self, args, state, control, model, **kwargs):
        for name, weight in unsharded_weights(model.policy_parameters()).items():
            self.averages[name].lerp_(weight.to(self.averages[name].dtype), 1 - self.decay)

    def on_save(self, args, state, control, model, **kwargs):
        checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if args.should_save and checkpoint.is_dir():  # none is written with NaN in a weight
            save_adapter(model.policy, model.policy_adapter, str(checkpoint / "ema"), self.averages)

    def on_train_end(self, args, state, control, model, **kwargs):
        if args.should_save:
            save_adapter(
                model.policy, model.policy_adapter, str(Path(args.output_dir, "ema")), self.averages
            )

    @contextmanager
    def swapped(self, model) -> Iterator[None]:
        """Use the averaged weights in `trainer.model` within a context, e.g. for
        `trainer.evaluate()`."""
        if not self.averages:
            raise ValueError(
                "There is no average before training; train first, or load a saved one, "
                "`peft_config='out/ema'`."
            )
        parameters = model.policy_parameters()
        # copies of all before the first change: tied weights have several names
        weights = {name: weight.clone() for name, weight in unsharded_weights(parameters).items()}
        try:
            set_weights(parameters, self.averages)
            yield
        finally:
            set_weights(parameters, weights)
