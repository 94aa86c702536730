"""Metrics that add up exactly over micro-batches, rollouts and processes."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Metrics:
    """Running sums on the device: nothing is synchronised until [`Metrics.compute`] is called.

    A mean is kept as numerator and denominator, so that tokens, not batches, are averaged, and ranks with more tokens
    weigh more. All processes must add the same names.
    """

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Average `values` over the mask."""
        values = values.detach().float()
        mask = torch.ones_like(values) if mask is None else mask.to(values.dtype)
        # a NaN at a masked position must not leak into the sum
        entry = torch.stack([torch.where(mask.bool(), values, 0).sum(), mask.sum()])
        self._sums[name] = self._sums[name] + entry if name in self._sums else entry

    def total(self, name: str, values: Tensor) -> None:
        """Sum `values`."""
        entry = values.detach().float().sum()
        self._totals[name] = self._totals[name] + entry if name in self._totals else entry

    def maximum(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Keep the largest of `values` over the mask."""
        values = values.detach().float()
        if mask is not None:
            values = values.masked_fill(~mask.bool(), -torch.inf)
        entry = values.max() if values.numel() else values.new_tensor(-torch.inf)
        self._maxima[name] = torch.maximum(self._maxima[name], entry) if name in self._maxima else entry

    def minimum(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Keep the smallest of `values` over the mask."""
        self.maximum(f"-{name}", -values, mask)

    def state_dict(self) -> dict[str, Tensor]:
        """What was added since the last [`Metrics.compute`], on this process."""
        kinds = {"sum": self._sums, "total": self._totals, "max": self._maxima}
        return {f"{kind}:{name}": x for kind, entries in kinds.items() for name, x in entries.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device | str) -> None:
        """Take up what [`Metrics.state_dict`] gave."""
        kinds: dict[str, dict[str, Tensor]] = {"sum": {}, "total": {}, "max": {}}
        for key, x in state.items():
            kind, _, name = key.partition(":")
            kinds[kind][name] = x.to(device)
        self._sums, self._totals, self._maxima = kinds["sum"], kinds["total"], kinds["max"]

    def __bool__(self) -> bool:
        return bool(self._sums or self._totals or self._maxima)

    def compute(self, all_sum: Callable[[Tensor], Tensor], all_max: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Reduce over processes, give every metric as a number, and start anew."""
        computed: dict[str, float] = {}
        if self._sums:
            totals = all_sum(torch.stack(list(self._sums.values()))).tolist()
            computed |= {name: total / count for name, (total, count) in zip(self._sums, totals) if count}
        if self._totals:
            computed |= zip(self._totals, all_sum(torch.stack(list(self._totals.values()))).tolist())
        if self._maxima:
            largest = all_max(torch.stack(list(self._maxima.values()))).tolist()
            for name, value in zip(self._maxima, largest):
                if value != -float("inf"):
                    computed |= {name[1:]: -value} if name.startswith("-") else {name: value}
        self._sums, self._totals, self._maxima = {}, {}, {}
        return computed
