"""Exponential moving average of the weights that are trained."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..distributed import set_weights, unsharded_weights


class AveragedWeights:
    """Average of parameters: after every step, average ← decay·average + (1 − decay)·weight.

    The averages start as a copy of the weights, so no bias is corrected. `torch.optim.swa_utils.AveragedModel` would
    copy the whole model, and does not gather sharded parameters. InstructGPT's decay is 0.992.

    Source: https://huggingface.co/papers/2203.02155
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self.parameters = dict(parameters)
        self._update = get_ema_multi_avg_fn(decay)
        # float32: in bf16 a step of (1 − decay) would often round to nothing
        self._averages = {
            name: x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
            for name, x in unsharded_weights(self.parameters).items()
        }

    def update(self) -> None:
        """Add the weights of one more optimizer step."""
        weights = unsharded_weights(self.parameters)
        self._averages = {name: x.to(weights[name].device) for name, x in self._averages.items()}
        averages = list(self._averages.values())
        self._update(averages, [weights[name].to(x.dtype) for name, x in self._averages.items()], 1)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Use the averaged weights within a context."""
        # copies of all before the first change: tied weights have several names
        weights = {name: weight.clone() for name, weight in unsharded_weights(self.parameters).items()}
        try:
            set_weights(self.parameters, self._averages)
            yield
        finally:
            set_weights(self.parameters, weights)

    def state_dict(self) -> dict[str, Tensor]:
        """Averages by name, not copied."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state returned by [`state_dict`]."""
        for name, average in self._averages.items():
            average.copy_(state[name])
