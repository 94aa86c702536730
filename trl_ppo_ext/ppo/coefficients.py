"""Coefficients of the loss and the reward: fixed, or steered towards a target by what is measured."""

import math
from collections.abc import Mapping
from typing import Any, Protocol


class Coefficient(Protocol):
    """What every coefficient can do; its state is plain numbers, for a checkpoint."""

    @property
    def value(self) -> float:
        """What to multiply with now."""

    def update(self, measured: float, completions: int) -> None:
        """Learn what was measured over the last `completions` completions."""

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs to continue."""

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a `state_dict`."""


def _check(condition: bool, name: str, needed: str, given: float) -> None:
    if not condition:
        raise ValueError(f"`{name}` must be {needed}, got {given}.")


def _check_state(coefficient: Coefficient, state: Mapping[str, float]) -> None:
    needed = sorted(coefficient.state_dict())
    if sorted(state) != needed:
        raise ValueError(
            f"A saved coefficient with the entries {sorted(state)} cannot continue as {type(coefficient).__name__}, "
            f"which has {needed}: resume with the coefficient settings of the run that was saved."
        )


class FixedCoefficient:
    """A coefficient that stays what it is.

    It has no state: what counts is the value it is made with, also when a run resumes with another one.

    Args:
        value (`float`): The coefficient.
    """

    def __init__(self, value: float):
        self.value = value

    def update(self, measured: float, completions: int) -> None:
        """Do nothing.

        Args:
            measured (`float`): Ignored.
            completions (`int`): Ignored.
        """

    def state_dict(self) -> dict[str, float]:
        """Return an empty state.

        Returns:
            `dict[str, float]`: Empty.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Accept an empty state.

        Args:
            state (`dict[str, float]`): Result of `state_dict`.

        Raises:
            ValueError: If the state is that of another kind of coefficient.
        """
        _check_state(self, state)


class AdaptiveKL:
    r"""KL coefficient that rises while the KL is above its target and falls while it is below, in proportion.

    error = clip(measured/target − 1, −0.2, 0.2),  value ← value·(1 + error·completions/horizon)

    Args:
        value (`float`): Coefficient at the start, above 0.
        target (`float`): Mean KL of a completion to hold, in nats (the sum over its tokens), above 0.
        horizon (`float`): Completions over which a full error multiplies the coefficient by about e^±0.2, above 0.

    Raises:
        ValueError: If one of them is not above 0.

    Source: https://huggingface.co/papers/1909.08593
    """

    MAX_ERROR = 0.2

    def __init__(self, value: float, target: float, horizon: float):
        for name, given in (("value", value), ("target", target), ("horizon", horizon)):
            _check(0 < given < math.inf, name, "a finite number above 0", given)
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, measured: float, completions: int) -> None:
        """Move the coefficient by what was measured; a measurement that is not finite changes nothing.

        Args:
            measured (`float`): Mean KL of a completion, in nats.
            completions (`int`): Completions over which it was measured.

        Raises:
            ValueError: If one step could make the coefficient negative, since the horizon is too short.
        """
        # refused at the first update, before an error of the wrong sign comes
        if completions * self.MAX_ERROR >= self.horizon:
            raise ValueError(
                f"A horizon of {self.horizon} completions is too short for updates of {completions} completions: the "
                f"coefficient could turn negative. Set the horizon above {completions * self.MAX_ERROR:g}, better to "
                "many times the completions of a rollout."
            )
        if math.isfinite(measured):
            error = min(max(measured / self.target - 1, -self.MAX_ERROR), self.MAX_ERROR)
            self.value *= 1 + error * completions / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient.

        Returns:
            `dict[str, float]`: What `load_state_dict` takes.
        """
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state.

        Args:
            state (`dict[str, float]`): Result of `state_dict`.

        Raises:
            ValueError: If the state is that of another kind of coefficient.
        """
        _check_state(self, state)
        self.value = float(state["value"])


class AdaptiveEntropy:
    r"""Entropy coefficient that holds the policy's entropy up at a target and leaves it alone above.

    c rises by `step`, to at most 1, after a measured entropy below the target, and falls by `step`, never
    below 0, after one above. It is applied only where the last measured entropy was at or below the target: `value` is
    c there and 0 elsewhere.

    Args:
        value (`float`): c at the start, applied until something is measured; the authors' runs start at 0.
        target (`float`): Mean entropy of a token to hold, in nats, at least 0.
        step (`float`, *optional*, defaults to `0.005`): What an update adds or takes, above 0.

    Raises:
        ValueError: If `value` or `target` is negative, or `step` is not above 0.

    Source: https://huggingface.co/papers/2505.22312
    """

    MAX_VALUE = 1.0  # a target that cannot be reached must not let the bonus grow without end

    def __init__(self, value: float, target: float, step: float = 0.005):
        for name, given in (("value", value), ("target", target)):
            _check(0 <= given < math.inf, name, "a finite number of at least 0", given)
        _check(0 < step < math.inf, "step", "a finite number above 0", step)
        self.coefficient, self.target, self.step = value, target, step
        self.applied = True

    @property
    def value(self) -> float:
        """The coefficient c where it is applied, 0 where the entropy needs no help."""
        return self.coefficient if self.applied else 0.0

    def update(self, measured: float, completions: int) -> None:
        """Move the coefficient by what was measured; a measurement that is not finite changes nothing.

        Args:
            measured (`float`): Mean entropy of a token, in nats.
            completions (`int`): Ignored: the step is per update.
        """
        if not math.isfinite(measured):
            return
        if measured < self.target:
            self.coefficient = min(self.coefficient + self.step, max(self.MAX_VALUE, self.coefficient))
        elif measured > self.target:
            self.coefficient = max(self.coefficient - self.step, 0.0)
        self.applied = measured <= self.target

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient and whether it is applied.

        Returns:
            `dict[str, float]`: What `load_state_dict` takes.
        """
        return {"coefficient": self.coefficient, "applied": float(self.applied)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state.

        Args:
            state (`dict[str, float]`): Result of `state_dict`.

        Raises:
            ValueError: If the state is that of another kind of coefficient.
        """
        _check_state(self, state)
        self.coefficient, self.applied = float(state["coefficient"]), bool(state["applied"])


def kl_coefficient(args: Any) -> Coefficient:
    """The coefficient of the KL penalty that a config asks for.

    Args:
        args ([`PPOConfig`]): The run's config.

    Returns:
        [`Coefficient`]: Steered if `kl_target` is set, else fixed.
    """
    if args.kl_target is None:
        return FixedCoefficient(args.kl_coef)
    return AdaptiveKL(args.kl_coef, args.kl_target, args.kl_horizon)


def entropy_coefficient(args: Any) -> Coefficient:
    """The coefficient of the entropy bonus that a config asks for.

    Args:
        args ([`PPOConfig`]): The run's config.

    Returns:
        [`Coefficient`]: Steered if `entropy_target` is set, else fixed.
    """
    if args.entropy_target is None:
        return FixedCoefficient(args.entropy_coef)
    return AdaptiveEntropy(args.entropy_coef, args.entropy_target)
