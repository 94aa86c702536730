"""Exponential moving average of the weights that are trained."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from . import check_fit, set_weights, whole_weights


class AveragedWeights:
    """Exponential moving average of parameters: after every step, average ← decay·average + (1 − decay)·weight.

    The averages start as a copy of the weights, so no bias needs to be corrected. They are float32 (float64 where the
    weights are), as in bf16 a step of (1 − decay) would often round to nothing, and follow their weights from device
    to device. InstructGPT's decay is 0.992.

    Source: https://huggingface.co/papers/2203.02155
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float):
        if not 0 <= decay < 1:
            raise ValueError(
                f"The decay of averaged weights must be at least 0 and below 1, got {decay}; "
                "0.99 averages over about the last 100 optimizer steps."
            )
        if not parameters:
            raise ValueError("There are no parameters to average; give those that are trained.")
        self.parameters = dict(parameters)
        self.decay = decay
        self._is_swapped = False
        self._averages = {
            name: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in whole_weights(self.parameters).items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of one more optimizer step into the average; nothing waits for the device."""
        if self._is_swapped:
            raise RuntimeError("The model has the averaged weights; leave `swapped()` before `update()`.")
        for name, weight in whole_weights(self.parameters).items():
            average = self._averages[name] = self._averages[name].to(weight.device)
            average.lerp_(weight.to(average.dtype), 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the averaged weights, and afterwards its own again, bit for bit.

        The weights are overwritten in place: whatever else refers to their memory sees the averages too.
        """
        if self._is_swapped:
            raise RuntimeError("The model has the averaged weights already; `swapped()` cannot be nested.")
        # all copies before the first change: tied weights come under several names
        own = {name: weight.clone() for name, weight in whole_weights(self.parameters).items()}
        self._is_swapped = True
        try:
            set_weights(self.parameters, self._averages)
            yield
        finally:
            set_weights(self.parameters, own)
            self._is_swapped = False

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the averages of a checkpoint."""
        try:
            check_fit(needed=self._averages, given=state)
        except ValueError as error:
            raise ValueError(
                f"The averaged weights do not fit the model: {error} They belong to another base model or another "
                "`peft_config`."
            ) from None
        for name, average in self._averages.items():
            average.copy_(state[name])


class AveragingCallback(TrainerCallback):
    """Takes the weights of every optimizer step into the average."""

    def __init__(self, average: AveragedWeights):
        self.average = average

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """After an optimizer step, taken or left out, before anything is saved."""
        self.average.update()
