"""Settings and values for logs, errors and files: without secrets, and short."""

import re
from collections.abc import Mapping
from typing import Any

# matches `hub_token`, `use_auth_token`, `X-Api-Key`, `credentials`; not `max_new_tokens`, `eos_token_id` or `keys`
_SECRET = re.compile(
    r"(^|[-_])(token|(api|access|secret|private)[-_]?key|password|secret|authorization|credentials?)$", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Return whether the value under a name is a secret."""
    return _SECRET.search(name) is not None


def without_secrets(settings: Any, name: str = "") -> Any:
    """Replace every secret by a placeholder, at any depth."""
    if isinstance(settings, str | bytes | bytearray) and is_secret(name):
        return f"<{name.upper()}>"
    if isinstance(settings, Mapping):
        # everything under `credentials` is secret
        return {key: without_secrets(value, name if is_secret(name) else str(key)) for key, value in settings.items()}
    if type(settings) in (list, tuple):  # a named tuple cannot be built from a generator
        return type(settings)(without_secrets(value, name) for value in settings)
    return settings


def shown(name: str, value: Any) -> str:
    """Value for an error message, in one short line; only its type if it may be a secret."""
    if is_secret(name) or isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__}"
    return f"{shortened(repr(value), 80)} ({type(value).__name__})"


def shortened(text: Any, longest: int = 500) -> str:
    """The beginning of a text."""
    text = str(text)
    return text if len(text) <= longest else text[:longest] + "..."


def sentence(text: Any, longest: int = 500) -> str:
    """A text, shortened, that ends like a sentence."""
    text = shortened(text, longest).rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
