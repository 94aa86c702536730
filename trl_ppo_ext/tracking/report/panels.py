"""Which metrics a report draws together, and what to look for in them."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple


class Panel(NamedTuple):
    """One plot."""

    title: str  # its heading
    metrics: tuple[str, ...]  # names of metrics, * stands for anything; of evaluations those too
    look_for: str = ""  # what to look for
    kind: str = "steps"


class Section(NamedTuple):
    """Plots under one heading."""

    title: str  # the heading
    panels: tuple[Panel, ...]  # the plots


SECTIONS = (
    Section(
        "Reward",
        (
            Panel(
                "Reward",
                ("reward", "objective"),
                "Rising. The objective is the reward as it is shaped (normalised, say), less the KL's price.",
            ),
            Panel("Parts of the reward", ("rewards/*/mean",), "One that falls while the others rise is traded away."),
            Panel("Monitored rewards", ("monitor/*/mean",), "Never optimised: where they fall, the reward is hacked."),
            Panel("Spread of the reward", ("reward_std", "rewards/*/std"), "At 0 nothing can be learned."),
        ),
    ),
    Section(
        "Distance from the reference",
        (
            Panel("KL", ("kl_per_completion",), "In nats a completion. 0 at the first step, then growing slowly."),
            Panel("KL of a token", ("kl", "loss/kl"), "In nats, mean over tokens."),
            Panel("KL coefficient", ("kl_coef",), "What a nat costs; it moves where `kl_target` steers it."),
            Panel("Entropy", ("entropy",), "Slow decline; a collapse means repetition."),
            Panel("Entropy coefficient", ("entropy_coef",), "It moves where `entropy_target` steers it."),
            Panel(
                "Reward against KL",
                ("reward", "kl_per_completion"),
                "What the distance buys: a curve that flattens or bends down has gone far enough.",
                "against",
            ),
        ),
    ),
    Section(
        "Is the reward hacked?",
        (
            Panel(
                "Reward and monitored rewards",
                ("reward", "monitor/*/mean"),
                "Each from its least to its largest value. They should rise together.",
                "scaled",
            ),
            Panel("Reward less monitored", ("monitor/*/gap",), "Growing apart is the first sign."),
            Panel("Length and reward", ("completions/mean_length", "reward"), "Do they rise together?", "scaled"),
            Panel(
                "Does length pay?", ("reward/length_correlation",), "Correlation of reward and length in a rollout."
            ),
            Panel("Distinct completions", ("completions/distinct_ratio",), "Falling means that one answer fits all."),
            Panel("Do rewards disagree?", ("rewards/disagreement",), "Spread of the rewards of one completion."),
        ),
    ),
    Section(
        "Updates",
        (
            Panel(
                "Clipped tokens", ("clip_ratio/*",), "Share of tokens whose gradient the clip stops: below about 0.2."
            ),
            Panel("KL of an update", ("approx_kl",), "From the sampling policy: below about 0.02."),
            Panel("Ratio", ("ratio/mean", "ratio/max"), "New over old probability; the mean stays near 1."),
            Panel("Policy loss", ("loss/policy", "loss/ptx"), "Says little by itself."),
            Panel("Gradient norm", ("grad_norm",), "Before clipping."),
            Panel("Learning rate", ("learning_rate",)),
            Panel("Stopped early", ("stopped_early",), "Share of steps that `target_kl` did not let happen."),
        ),
    ),
    Section(
        "Critic",
        (
            Panel("Value loss", ("loss/value",), "Falling."),
            Panel(
                "Explained variance", ("value/explained_variance",), "Rising towards 1; 0 is what a constant explains."
            ),
            Panel("Clipped values", ("value/clip_ratio",), "Share of tokens whose value loss is the clipped one."),
        ),
    ),
    Section(
        "Lengths",
        (
            Panel(
                "Length", ("completions/mean_length", "completions/min_length", "completions/max_length"), "Tokens."
            ),
            Panel("Cut off", ("completions/clipped_ratio",), "Share that ran into `max_completion_length`."),
            Panel("Length of those that ended", ("completions/mean_terminated_length",), "Tokens."),
        ),
    ),
    Section(
        "Speed",
        (
            Panel("Time by phase", ("time/*",), "Seconds a rollout on each process."),
            Panel("Tokens a second", ("tokens_per_second",), "Completion tokens, on all processes."),
            Panel("Model FLOP utilisation", ("mfu",), "Share of the GPUs' arithmetic that is used."),
        ),
    ),
)
# of the Trainer, or drawn as something else
NOT_DRAWN = re.compile(
    r"(train|eval|eval_.+)_(runtime|samples_per_second|steps_per_second|model_preparation_time)"
    r"|train_loss|train_tokens_per_second|total_flos|num_tokens|num_input_tokens_seen|.*completions/repeated_ratio"
)
# not drawn where they are 0 throughout
QUIET_AT_0 = (
    "entropy_coef",
    "stopped_early",
    "nonfinite_completions",
    "empty_steps",
    "skipped_steps",
    "rewards/*/failed",
)
MOST_OTHERS = 24


def matches(name: str, pattern: str) -> bool:
    """Whether a metric is one of those that a panel names, of training or of an evaluation."""
    return any(fnmatchcase(name, prefix + pattern) for prefix in ("", "eval_", "eval_*_"))


def chosen(panel: Panel, names: Iterable[str]) -> list[str]:
    """Metrics of a panel, in its order."""
    names = list(names)
    return list(dict.fromkeys(name for pattern in panel.metrics for name in names if matches(name, pattern)))


def trained(name: str, names: Iterable[str]) -> str:
    """The metric of training that an evaluation's belongs to."""
    if not name.startswith("eval_"):
        return name
    return next((other for other in names if other != name and matches(name, _literal(other))), name)


def other_panels(names: Iterable[str]) -> tuple[list[Panel], list[str]]:
    """Panels for metrics that no other panel draws: those of reward functions, and counts of failures."""
    drawn = [pattern for section in SECTIONS for panel in section.panels for pattern in panel.metrics]
    left = [
        name
        for name in names
        if not NOT_DRAWN.fullmatch(name) and not any(matches(name, pattern) for pattern in drawn)
    ]
    alone = list(dict.fromkeys(trained(name, left) for name in left))
    panels = [Panel(name, (_literal(name),)) for name in alone]
    return panels[:MOST_OTHERS], alone[MOST_OTHERS:]


def _literal(name: str) -> str:
    """A name as a pattern that matches it alone."""
    return re.sub(r"([*?[])", r"[\1]", name)
