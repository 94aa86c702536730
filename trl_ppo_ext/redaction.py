"""Keys of servers; settings and text for logs, errors and files: without secrets, printable, and short."""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

# matches `hub_token`, `accessToken`, `X-Api-Key`, `auth`, `headers`; not `max_new_tokens`, `eos_token` or `keys`
_SECRET = re.compile(
    r"(?<![a-z])(passw(or)?d|passphrase|secret|credential|authorization|cookie|apikey)s?(?![a-z])"
    r"|(?<![a-z])(?<!(eos|bos|pad|unk|sep|cls)_)(?<!(stop|mask)_)(token|key|pwd|auth|jwt|sig|signature|headers?)$"
    r"|(api|auth|access|secret)[-_ ]?(key|token)s$"
)
_USER = re.compile(r"""(?<=://)([^\s/?#@:"']*:[^\s"']*|[^\s/?#"']+)@""")  # in an address, e.g. of a proxy
_SETTING = re.compile(r"""(?<![\w.~-])([\w.~-]+)(=["']?|["']: ?["']?)(?!None|True|False|<)[^\s&#;"'),}]+""")
_KEY = re.compile(  # keys of known forms
    r"\b((hf|gh[a-z]|github_pat)_|(xox[a-z]|glpat|sk)-|AKIA|ASIA|AIza)[\w-]{16,}|\beyJ[\w-]{8,}\.[\w.-]+"
    r"|(?<=[Bb]earer )(?=\S*\d)[^\s\"']{8,}"
)
_KEPT = set("\n\t\u200c\u200d")  # the last two join letters and emoji


def is_secret(name: str) -> bool:
    """Return whether the value under a name is a secret."""
    return _SECRET.search(re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name).lower()) is not None


def redacted(text: str) -> str:
    """Mask users and passwords of addresses, `name=value` of secrets, and keys of known forms."""
    text = _USER.sub("***@", text)
    text = _SETTING.sub(lambda match: f"{match[1]}{match[2]}***" if is_secret(match[1]) else match[0], text)
    return _KEY.sub("***", text)


def read_key(api_key_env: str | None) -> str:
    """Read a server's key from the environment; it is empty without a variable."""
    key = os.environ.get(api_key_env or "", "").strip()
    if api_key_env and not re.fullmatch(r"[!-~]+", key):
        is_name = re.fullmatch(r"[A-Z_][A-Z0-9_]*", api_key_env)
        variable = f"`{api_key_env}`" if is_name else "whose name is `api_key_env` (not shown: it may be a key)"
        raise ValueError(
            f"The environment variable {variable} is not set to a key, which has no spaces and only ASCII "
            "characters; export it with the server's key."
        )
    return key


def without_key(text: str, key: str) -> str:
    """Hide a text that repeats six letters of a key, also in another case, percent-encoded, or split."""
    letters, secret = (re.sub(r"[^a-z\d]", "", unquote(x).lower()) for x in (text, key))
    parts = {secret[start : start + 6] for start in range(max(len(secret) - 5, 1))} - {""}
    return "*** (it repeats a part of the key)" if any(part in letters for part in parts) else text


def without_secrets(settings: Any, name: str = "") -> Any:
    """Replace every secret by a placeholder, at any depth."""
    if isinstance(settings, Mapping):
        # everything under `credentials` is secret
        hidden = {key: without_secrets(x, name if is_secret(name) else str(key)) for key, x in settings.items()}
        return {redacted(key) if isinstance(key, str) else key: x for key, x in hidden.items()}
    if type(settings) in (list, tuple, set, frozenset):
        if isinstance(settings, tuple) and len(settings) == 2 and is_secret(str(settings[0])):
            name = str(settings[0])  # a header as a pair
        return type(settings)(without_secrets(value, name) for value in settings)
    if is_secret(name) and not isinstance(settings, bool | None):
        return f"<{name.upper()}>"
    return redacted(settings) if isinstance(settings, str) else settings


def shown(name: str, value: Any) -> str:
    """Value for an error message, in one short line; only its type if it may be a secret."""
    if is_secret(name) or isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__}"
    return f"{shortened(repr(value), 80)} ({type(value).__name__})"


def printable(text: str) -> str:
    """Escape control characters, which a terminal would execute."""
    return "".join(c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode() for c in text)


def shortened(text: Any, longest: int = 500) -> str:
    """The beginning of a text, printable and without secrets."""
    text = printable(redacted(str(text)[: longest + 1000]))
    return text if len(text) <= longest else text[:longest] + "..."


def sentence(text: Any, longest: int = 500) -> str:
    """A text, shortened, that ends like a sentence."""
    text = shortened(text, longest).rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
