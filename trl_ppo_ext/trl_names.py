"""Fields of TRL's `GRPOConfig` and of its last `PPOConfig`, accepted by [`PPOConfig`] under TRL's
names.

A field with the same meaning sets ours. Others are accepted at values that change nothing, and
refused at the rest; names.yaml lists them. Checkpoints and logs show ours only, and no other module
reads these names.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from transformers.utils import logging

from .redaction import shown

logger = logging.get_logger(__name__)
Settings = dict[str, Any]  # of PPOConfig


def _choose(name: str, value: Any, options: dict[Any, Settings], why: str) -> Settings:
    if value not in options:
        choices = ", ".join(map(repr, options))
        raise ValueError(f"`{name}` must be one of {choices}, got {shown(name, value)}: {why}.")
    return options[value]


def _loss_type(config: Any, value: str) -> Settings:
    means = {
        "dapo": "token",
        "grpo": "sequence_mean",
        "luspo": "sequence_sum",
        "dr_grpo": "constant",
    }
    options = {name: {"loss_aggregation": mean} for name, mean in means.items()}
    return _choose(
        "loss_type",
        value,
        options,
        "'bnpo' depends on the micro-batch, others are not PPO's clipped loss",
    )


def _scale_rewards(config: Any, value: Any) -> Settings:
    scale = {True: "group", False: "none"}.get(value, value)
    options = dict[Any, Settings]()
    if config.critic == "none":
        options |= {
            "group": {"advantage_estimator": "grpo"},
            "none": {"advantage_estimator": "dr_grpo"},
        }
    else:  # no groups are compared; what remains is whether advantages are scaled
        options |= {
            "group": {},
            "batch": {"whiten_advantages": True},
            "none": {"whiten_advantages": False},
        }
        if scale == "group" or (scale == "none" and config.normalize_values is not False):
            if scale == "group":
                remedy = "remove it, or set `critic='none'`"
            else:
                remedy = "for unscaled ones set `normalize_values=False`"
            message = (
                "`scale_rewards=%r` is ignored: a critic's advantages are in units of the returns; "
                "%s."
            )
            logger.warning(message, value, remedy)
    for_batch = ""
    if config.critic == "none":
        for_batch = "; 'batch' is `advantage_estimator='dr_grpo', whiten_advantages=True`"
    return _choose(
        "scale_rewards",
        scale,
        options,
        f"advantages are those of `critic={config.critic!r}`{for_batch}",
    )


def _num_mini_batches(config: Any, steps: int) -> Settings:
    accumulation = config.gradient_accumulation_steps
    if steps < 1 or accumulation < 1 or max(steps, accumulation) % min(steps, accumulation):
        raise ValueError(
            "`steps_per_generation` must be a multiple or a divisor of "
            f"`gradient_accumulation_steps` ({accumulation}), got {steps}."
        )
    if steps < accumulation:  # several rollouts of one policy are one, sampled in parts
        return {
            "num_mini_batches": 1,
            "per_device_generation_batch_size": steps * config.per_device_train_batch_size,
        }
    return {"num_mini_batches": steps // accumulation}


def _with_clip(config: Any, settings: Settings) -> Settings:
    """Settings of GRPO's clip, with GRPO's default of `epsilon` unless it is set."""
    if config.cliprange:
        return settings
    return settings | {"cliprange": 0.2}


def _dual_clip(config: Any, delta: float) -> Settings:
    high = config.cliprange_high or config.cliprange or 0.2
    if delta < 1 + high:  # then GRPO clips positive advantages at `delta` too
        raise ValueError(
            f"`delta` must be at least 1 + the upper clip range ({high}), got {delta}; omit it."
        )
    return _with_clip(config, {"dual_clip": delta})


_FORWARD_BATCH_SIZES = "per_device_generation_batch_size", "per_device_reward_batch_size"
ANY = ...
NO_EFFECT = "Already the case, or without effect."
_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (bool, dict, float, int, str)} | {
    "int | str": int | str
}
# of fields whose value determines the settings: functions from config and value
_SETTINGS: dict[str, Callable[[Any, Any], Settings]] = {
    "epsilon_high": lambda config, high: _with_clip(config, {"cliprange_high": high}),
    "delta": _dual_clip,
    "num_iterations": lambda _, n: {} if n == 1 else {"num_ppo_epochs": n},  # both default to 1
    "steps_per_generation": _num_mini_batches,
    "loss_type": _loss_type,
    "scale_rewards": _scale_rewards,
    # GRPO weighs k3 by the ratio, which gives a token the gradient of its own k1 in the reward
    "use_bias_correction_kl": lambda _, on: (
        {} if on else {"kl_estimator": "k3", "kl_placement": "loss"}
    ),
    "use_vllm": lambda _, on: {"generation_backend": "vllm" if on else "transformers"},
    "local_rollout_forward_batch_size": lambda _, n: dict.fromkeys(_FORWARD_BATCH_SIZES, n),
    "stop_token_id": lambda _, token: {"stop_token_ids": [token]},
}
TABLES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
# name: type; accepted values besides None; the field of PPOConfig that it sets (with the key of a
# mapping), a function from config and value to such fields, or why other values are refused
NAMES: dict[str, tuple[Any, Any, str | Callable[[Any, Any], Settings]]] = {
    name: (
        _TYPES[x["type"]],
        x.get("only", ANY),
        _SETTINGS.get(name) or x.get("sets") or x.get("why", NO_EFFECT),
    )
    for name, x in TABLES["fields"].items()
}
# the field that those functions set, where it is one at any value
_SETS_ONE = {
    "epsilon_high": "cliprange_high",
    "delta": "dual_clip",
    "num_iterations": "num_ppo_epochs",
    "steps_per_generation": "num_mini_batches",
    "loss_type": "loss_aggregation",
    "use_vllm": "generation_backend",
    "stop_token_id": "stop_token_ids",
}
# what happens instead of what a field means in TRL
INSTEAD = {name: x["says"] for name, x in TABLES["fields"].items() if "says" in x}
# keys of `generation_kwargs` that are fields
_SAMPLING = {
    key: key for key in "temperature top_p top_k min_p repetition_penalty stop_strings".split()
}
_SAMPLING["max_new_tokens"] = "max_completion_length"
# True by default, which adds the flags --no_NAME
_ON = {"ds3_gather_for_generation", "log_multimodal", "use_bias_correction_kl"}


def _field(name: str) -> tuple[str, Any, Any]:
    kind, accepted, effect = NAMES[name]
    help_text = "See docs/from_grpo.md and docs/from_trl_ppo.md."
    if name in INSTEAD:
        help_text = f"No effect; {INSTEAD[name]}."
    elif accepted is not ANY:
        help_text = f"{accepted} only: {effect}."
    elif isinstance(effect, str):
        if effect == NO_EFFECT:
            help_text = effect
        else:
            help_text = f"Sets `{effect}`."
    metadata: dict[str, Any] = {"help": help_text}
    if kind is bool and name not in _ON:
        metadata |= {"nargs": "?", "const": True}  # --use_vllm is --use_vllm true
    hint: Any = kind
    if kind is dict:
        hint = dict | str
    return name, hint | None, field(default=True if name in _ON else None, metadata=metadata)


TRLFields: Any = make_dataclass("TRLFields", map(_field, NAMES))


def _set(config: Any, name: str, settings: Settings) -> None:
    """Set fields of PPOConfig from a field of TRL, which gets its default; mappings are merged."""
    fields = config.__dataclass_fields__
    value = getattr(config, name)
    for ours, new in settings.items():
        old = getattr(config, ours)
        merges = isinstance(old, dict) and isinstance(new, dict)
        if merges:
            differs = old | new != new | old
        else:
            is_set = ours in config.given or old != fields[ours].default
            differs = is_set and old != new
        if differs:
            raise ValueError(
                f"`{name}` is {shown(name, value)}, which sets `{ours}` to {shown(ours, new)}, but "
                f"`{ours}` is {shown(ours, old)}; remove one of the two."
            )
        setattr(config, ours, old | new if merges else new)
        config.given.add(ours)
    setattr(config, name, fields[name].default)


def own_name(name: str) -> str:
    """Field of PPOConfig that a field of TRL sets by itself, or the name itself."""
    if name in _SETS_ONE:
        return _SETS_ONE[name]
    _, accepted, effect = NAMES.get(name, (None, None, ""))
    if accepted is ANY and isinstance(effect, str) and "." not in effect:
        return effect
    return name


def as_mapping(value: Any) -> Settings | None:
    """A mapping, also as JSON; `None` if it is none, which the config refuses with a reason."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    return value if isinstance(value, dict) else None


def overridden(defaults: Settings, overrides: Settings) -> Settings:
    """Settings, of a preset or a file, without those that overrides set by any of their names."""
    given = {name: x for name, x in overrides.items() if x is not None or name not in NAMES}
    names = {own_name(name) for name in given}
    sampling = as_mapping(given.get("generation_kwargs")) or {}
    names |= {_SAMPLING[key] for key in sampling if key in _SAMPLING}
    if "steps_per_generation" in given:  # it makes a rollout of another size
        names.add("generation_batch_size")
    kept = {name: x for name, x in defaults.items() if own_name(name) not in names}
    # its keys are settings, too
    mapping = as_mapping(defaults.get("generation_kwargs"))
    if mapping is not None:
        kept["generation_kwargs"] = {
            key: x for key, x in mapping.items() if _SAMPLING.get(key) not in names
        }
    return kept


def merged(defaults: Settings, overrides: Settings) -> Settings:
    """Settings, of a preset or a file, with those that override them; of two mappings the keys."""
    kept = overridden(defaults, overrides)
    settings = kept | overrides
    for key, value in (defaults | kept).items():
        if key == "lr_scheduler_kwargs" and "lr_scheduler_type" in overrides:
            continue  # they are those of another schedule
        of_default = as_mapping(value)
        own = as_mapping(overrides.get(key))
        if of_default is not None and own is not None:
            settings[key] = of_default | own
    return settings


def moved(config: Any, kwargs: Settings) -> Settings | None:
    """Set the fields of PPOConfig that are keys of `generation_kwargs`, and return the others."""
    _set(
        config,
        "generation_kwargs",
        {_SAMPLING[key]: x for key, x in kwargs.items() if key in _SAMPLING},
    )
    return {
        key: x
        for key, x in kwargs.items()
        if key not in _SAMPLING and (key, x) != ("do_sample", True)
    } or None


@contextmanager
def applied(config: Any) -> Iterator[None]:
    """Set the config's fields from TRL's; errors raised within the context name both."""
    sources = dict[str, str]()
    idle = []
    for name, (_, accepted, effect) in NAMES.items():
        value = getattr(config, name)
        settings = Settings()
        if (
            value is None
            or value is config.__dataclass_fields__[name].default
            or name == "total_episodes"
        ):
            continue
        if accepted not in (ANY, value):
            needed = "omitted" if accepted is None else f"{accepted!r} or omitted"
            raise ValueError(f"`{name}` must be {needed}, got {shown(name, value)}: {effect}.")
        if name in INSTEAD:
            if value:
                logger.warning("`%s=%s` has no effect; %s.", name, value, INSTEAD[name])
        elif effect == NO_EFFECT:
            idle.append(name)
        elif not isinstance(effect, str):
            settings = effect(config, value)
        elif accepted is ANY:
            ours, _, key = effect.partition(".")
            settings = {ours: {key: value} if key else value}
        _set(config, name, settings)
        sources |= dict.fromkeys(settings, name)
    if idle:
        logger.warning(
            "Fields of TRL that are already the case, or without effect: %s.", ", ".join(idle)
        )
    try:
        yield
        if config.total_episodes is not None:
            plan = config.plan(config.world_size)
            rollouts = -(-config.total_episodes // plan.completions)
            _set(config, "total_episodes", {"max_steps": rollouts * plan.optimizer_steps})
    except ValueError as error:
        used = [
            f"`{name}` sets `{ours}`."
            for ours, name in sources.items()
            if re.search(rf"`{ours}\b", str(error))
        ]
        if used:
            raise ValueError(" ".join([str(error)] + used)) from error
        raise


def remedy_of(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """What to do with an unknown name; empty if nothing like it is known."""
    if name in TABLES["unknown"]:
        return TABLES["unknown"][name]
    return "".join(
        f"did you mean `{match}`?" for match in get_close_matches(name, known, 1, cutoff)
    )
