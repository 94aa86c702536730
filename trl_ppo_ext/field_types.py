"""Values of a config's fields against their annotations: a YAML file puts anything into any field."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .redaction import is_secret, shortened

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "left out"}
_NAMES |= {list: "a list", dict: "a mapping"}
_MAY_BE_NONE = ("max_grad_norm",)
# in YAML 1.1 `eval_strategy: no` is a boolean
_QUOTES = " In YAML, no, off, yes and on are booleans: put them in quotes."


def check_types(
    config: Any, leave_out: tuple[str, ...] = (), whole_numbers: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse values that are not of the type of their field."""
    for name, (hints, choices) in _hints(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name, None)
        if name in leave_out or (value is None and NoneType in hints):
            continue
        if not any(_fits(value, hint) for hint in hints):
            needed = list(dict.fromkeys(_needed(hint) for hint in hints if hint is not NoneType))
            if int in hints and name in whole_numbers:
                needed = [whole_numbers[name]]
            quotes = _QUOTES if isinstance(value, bool) and str in hints else ""
            raise ValueError(f"`{name}` must be {' or '.join(needed)}, got {shown(name, value)}.{quotes}")
        if choices and value is not None and value not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {shown(name, value)}.")
        for text in value if isinstance(value, list | tuple) else [value]:
            _check_text(name, text)


def check_json(config: Any, names: tuple[str, ...], or_file: bool = False) -> None:
    """Refuse text that is no JSON object in fields that hold a mapping."""
    for name in names:
        value = getattr(config, name, None)
        if not isinstance(value, str) or (or_file and os.path.isfile(value)):
            continue
        try:
            mapping = isinstance(json.loads(value), dict)
        except (ValueError, RecursionError):
            mapping = False
        if not mapping:
            file = ", or the path of a file" if or_file else ""
            raise ValueError(
                f"`{name}` must be a mapping, or JSON text of one such as '{{\"a\": 1}}'{file}, got other text."
            )


def shown(name: str, value: Any) -> str:
    """A value as an error may show it: in one short line, and nothing that could be a secret."""
    if is_secret(name) or isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__}"
    return f"{shortened(repr(value), 80)} ({type(value).__name__})"


@cache
def _hints(config_class: type) -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Types that each field may have, unions taken apart, and its choices, if it has a few."""
    hints, found = get_type_hints(config_class), {}
    for field in (field for field in fields(config_class) if field.init):
        members = tuple(_members(hints[field.name]))
        # nothing is what some fields without a better word for it are set to, and falsy where a boolean is meant
        if field.default is None or field.name in _MAY_BE_NONE or bool in members:
            members += (NoneType,)
        enums = [hint for hint in members if isinstance(hint, type) and issubclass(hint, Enum)]
        choices = [member.value for hint in enums for member in hint] or field.metadata.get("choices") or ()
        found[field.name] = members, tuple(choices)
    return found


def _members(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _check_text(name: str, text: Any) -> None:
    """Text that no file name and no log can hold would fail late."""
    if isinstance(text, str) and ("\0" in text or text != text.encode(errors="replace").decode()):
        raise ValueError(f"`{name}` holds a NUL or half a surrogate pair, which no file can; take it out.")


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if hint is int or hint is float:
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str | os.PathLike)
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list | tuple) and all(_fits(entry, get_args(hint)[0]) for entry in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return isinstance(value, hint)


def _needed(hint: Any) -> str:
    if get_origin(hint) is list:
        (entry,) = get_args(hint)
        return f"a list of {'text' if entry is str else 'numbers' if entry is float else entry.__name__}"
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    hint = get_origin(hint) or hint
    return "text" if issubclass(hint, Enum) else _NAMES.get(hint, f"a {hint.__name__}")
