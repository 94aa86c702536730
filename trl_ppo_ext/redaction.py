"""Settings and errors as they may be shown: in logs, reports and files, without tokens and keys, and not too long."""

import re
from collections.abc import Mapping
from typing import Any

# of `hub_token`, `use_auth_token`, `X-Api-Key`, `credentials`; not of `max_new_tokens`, `eos_token_id` or `keys`
_SECRET = re.compile(
    r"(^|[-_])(token|(api|access|secret|private)[-_]?key|password|secret|authorization|credentials?)$", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether what stands under a name is not to be shown."""
    return _SECRET.search(name) is not None


def without_secrets(settings: Any, name: str = "") -> Any:
    """Put a placeholder in place of every secret, at any depth."""
    if isinstance(settings, str | bytes | bytearray) and is_secret(name):
        return f"<{name.upper()}>"
    if isinstance(settings, Mapping):
        # all of what stands under `credentials` is secret
        return {key: without_secrets(value, name if is_secret(name) else str(key)) for key, value in settings.items()}
    if type(settings) in (list, tuple):  # a named tuple cannot be made of a generator
        return type(settings)(without_secrets(value, name) for value in settings)
    return settings


def shortened(text: Any, longest: int = 500) -> str:
    """The beginning of a text that may be of any length."""
    text = str(text)
    return text if len(text) <= longest else text[:longest] + "..."


def sentence(text: Any, longest: int = 500) -> str:
    """A text, shortened, as a sentence that another one may follow."""
    text = shortened(text, longest).rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
