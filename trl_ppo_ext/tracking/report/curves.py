"""Curves of a run, and what can be said of them in numbers: smoothed, where they start and end, what is noise."""

from typing import NamedTuple

import numpy as np

FEWEST = 10  # points of which anything is said
MOST_DRAWN = 1_000  # points of a curve in a report


def number(value: float) -> str:
    """A number as it is read: three digits, and thousands in full."""
    text = f"{value:.3g}"
    rounded = float(text)
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e9 else text


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average that leaves out what is not finite."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    place = np.arange(len(values))
    low, high = np.maximum(place - window // 2, 0), np.minimum(place + window // 2 + 1, len(values))
    number = counts[high] - counts[low]
    return np.where(number > 0, (sums[high] - sums[low]) / np.maximum(number, 1), np.nan)


class Curve(NamedTuple):
    """A metric over optimizer steps."""

    steps: np.ndarray  # [n] Steps, rising
    values: np.ndarray  # [n] Values; NaN where one was not finite

    @classmethod
    def of(cls, points: dict[int, float]) -> "Curve":
        """Make a curve of values by step."""
        steps = sorted(points)
        return cls(np.array(steps, dtype=np.int64), np.array([points[step] for step in steps], dtype=float))

    def finite(self) -> "Curve":
        """The curve without values that are not finite."""
        kept = np.isfinite(self.values)
        return Curve(self.steps[kept], self.values[kept])

    @property
    def window(self) -> int:
        """Points that smoothing averages: a twelfth of all."""
        return max(len(self.values) // 12, 1)

    def smooth(self) -> "Curve":
        """The smoothed curve."""
        return Curve(self.steps, smoothed(self.values, self.window))

    def thinned(self, most: int = MOST_DRAWN) -> "Curve":
        """The curve with fewer points, and all its peaks: the least and the largest value of every stretch."""
        if len(self.values) <= most:
            return self
        kept: set[int] = set()
        for part in np.array_split(np.arange(len(self.values)), most // 2):
            values = self.values[part]
            if np.isfinite(values).any():
                kept |= {int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])}
            else:
                kept.add(int(part[0]))
        index = sorted(kept)
        return Curve(self.steps[index], self.values[index])

    def at(self, step: int) -> float:
        """The smoothed value at a step, or at the last before it."""
        index = max(int(np.searchsorted(self.steps, step, side="right")) - 1, 0)
        return float(self.smooth().values[index])


class Trend(NamedTuple):
    """How a curve goes: means of its first and of its last fifth, and what of the difference can be noise."""

    start: float  # mean of the first fifth
    end: float  # mean of the last fifth
    error: float  # standard error of a difference of such means, were the points independent
    scale: float  # largest absolute value of the smoothed curve

    @property
    def rises(self) -> bool:
        """Whether it rises by more than noise, and by enough to matter."""
        return self.end - self.start > max(4 * self.error, 0.02 * self.scale)

    @property
    def falls(self) -> bool:
        """The same for falling."""
        return self.start - self.end > max(4 * self.error, 0.02 * self.scale)


def noise(values: np.ndarray) -> float:
    """Standard deviation about the trend, from the differences of neighbours; a few jumps do not count."""
    differences = np.diff(values)
    spread = np.median(np.abs(differences - np.median(differences)))
    return float(1.4826 * spread / np.sqrt(2))


def trend(curve: Curve | None) -> Trend | None:
    """Say how a curve goes."""
    if curve is None or len(curve.finite().values) < FEWEST:
        return None
    values = curve.finite().values
    fifth = max(len(values) // 5, 2)
    error = noise(values) * float(np.sqrt(2 / fifth))
    scale = float(np.abs(smoothed(values, max(len(values) // 12, 1))).max())
    return Trend(float(values[:fifth].mean()), float(values[-fifth:].mean()), error, scale)


def turning_point(curve: Curve | None) -> int | None:
    """Step after which a curve only falls, by more than noise."""
    goes = trend(curve)
    if curve is None or goes is None:
        return None
    curve = curve.finite()
    smooth = curve.smooth().values
    top = int(np.argmax(smooth))
    fall = float(smooth[top]) - goes.end
    least = max(5 * noise(curve.values) / np.sqrt(curve.window), 0.25 * float(np.ptp(smooth)), 0.02 * goes.scale)
    return int(curve.steps[top]) if fall > least else None


def crossing(curve: Curve, level: float, above: bool = True) -> int | None:
    """First step at which the smoothed curve is beyond a level."""
    values = curve.smooth().values
    beyond = np.flatnonzero(values > level if above else values < level)
    return int(curve.steps[beyond[0]]) if len(beyond) else None
