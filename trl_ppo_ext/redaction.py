"""Settings as they may be shown: in logs, reports and files, without tokens and keys."""

import re
from collections.abc import Mapping
from typing import Any

# of `hub_token`, `token`, `use_auth_token`, `api_key`, `password`; not of `max_new_tokens` or `eos_token_id`
SECRET = re.compile(r"(^|_)(token|api_?key|password|secret|authorization)$", re.IGNORECASE)


def without_secrets(settings: Any, name: str = "") -> Any:
    """Put a placeholder in place of every secret, at any depth.

    Args:
        settings (`Any`): A mapping of settings, or what stands in one.
        name (`str`, *optional*): Name under which it stands there.

    Returns:
        `Any`: The same, with `<NAME>` for text under a name that is that of a secret.
    """
    if isinstance(settings, str) and SECRET.search(name):
        return f"<{name.upper()}>"
    if isinstance(settings, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in settings.items()}
    if type(settings) in (list, tuple):  # a named tuple cannot be made of a generator
        return type(settings)(without_secrets(value, name) for value in settings)
    return settings
