"""Keys of servers; settings and text for logs, errors and files: without secrets, printable, and
short."""

import os
import re
import warnings
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

# `hub_token`, `accessToken`, `X-Api-Key`, `PGPASSWORD`, `headers`; not `max_new_tokens`,
# `eos_token`, `hotkey`
_SECRET = re.compile(
    r"passw(or)?d|passphrase|passcode|secret(?!ar)|credential|cookie|bearer|authorization|mnemonic|session_?id"
    r"|conn(ection)?[-_ ]?string|_pat$|(api|auth|access|refresh|private)[-_ ]?(key|token)s?[-_]?\d*$"
    r"|(?<![a-z])(?<!(eos|bos|pad|unk|sep|cls)_)(?<!(stop|mask)_)"
    r"(token|key|pwd|pass|o?auth|jwt|sig|signature|dsn|otp|webhook(_url)?|headers?)$"
)
# `name = `, `"name": `, `["name"] = `, `name => `, `<name>`, `("name", `, `name%3D`, `--name `
_NAME = re.compile(
    r"""(?<![\w.~-])(?:3F|26)?+((--)?[\w.~-]++)"""
    r"""(\\*["']?\]?[ \t]*(?:=>|:?=(?!=)|:(?!//)|%3D)[ \t]*(?:\w+\((?=["'])|b)?"""
    r"""|>|["'], ?b?(?=["'])|(?(2)[ ]+(?!-)|(?!)))"""
)
_VALUE = re.compile(  # in quotes, or a word, which may follow a scheme and precede further cookies
    r"""(?s)(?!None|True|False|[<{\[(])(?:(\\*["']).{0,9999}?\1|["']?(?:[A-Z][a-z]+[ ]+(?=\S*\d))?"""
    r"""[^\s&#;"'),}<]+(?:;[ ][\w.-]+=[^\s;"']+)*)"""
)
_WITH_DIGIT = re.compile(r"""\\*["']?(?=\S{0,99}\d)[^\s"'),;]{6}""")
# e.g. of a proxy
_USER = re.compile(r"""(?<=://)([^\s/?#@:"']{0,99}:[^\s"']{0,999}|[^\s/?#"']{1,999})@""")
_KEY = re.compile(  # keys of known forms
    r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY.*?(-----END [A-Z ]*-----|$)|((?<![\w-])|(?<=\\[nrt]))("
    r"(hf|gh[a-z]|github_pat|gsk|npm|[rs]k_(live|test)|whsec|dop_v1|r8|shp[a-z]+|xox[a-z]|xapp|gl[a-z]+|sk|GOCSPX|nvapi"
    r"|pypi|sbp)[-_](?=[\w-]*[\dA-Z])[\w-]{16,}|A[BCKS]IA[A-Z\d]{12}\w{4,}|AIza[\w-]{30,}|(ya29|hvs|SG)\.[\w.-]{20,}"
    r"|eyJ[\w-]{8,}\.[\w.-]+|(AC|SK|dapi|key-)[a-f\d]{32}|[Bb](earer|asic) (?=\S*\d)[^\s\"']{8,})"
    r"|[a-f\d]{32}-us\d+|AGE-SECRET-KEY-\w+|\d{8,10}:AA[\w-]{30,}|(?<=hooks\.slack\.com/services/)[\w/]+"
)
# logins of programs, and long words of small and capital letters with three digits
_OPAQUE = re.compile(
    r"((?<=-u )|(?<=-user ))[^\s:]+:\S+|(?<=login )\S+\s+password\s+\S+"
    r"|(?<![A-Za-z\d])(?=[A-Z\d]*[a-z])(?=[a-z\d]*[A-Z])(?=([A-Za-z]*\d){3})[A-Za-z\d]{24,}"
)
_KEPT = set("\n\t\u200c\u200d")  # the last two join letters and emoji


def is_secret(name: str) -> bool:
    """Return whether the value under a name is a secret."""
    return _SECRET.search(re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name).lower()) is not None


def without_keys(text: str) -> str:
    """Mask users and passwords of addresses, and keys of known forms: of text that may be code."""
    return _KEY.sub("***", _USER.sub("***@", text))


def redacted(text: str) -> str:
    """Mask also `name=value` of secrets, and what looks random: of errors."""
    text = without_keys(text)
    end = 0
    parts = list[str]()
    for match in _NAME.finditer(text):
        if match.start() < end or not is_secret(match[1]):
            continue
        # e.g. "missing key: name", "pass: 3" or `key=len` may be no setting
        is_word = re.fullmatch(
            r"(?i)key\W.*|(token|pass|auth|headers?)\W*[:,].*", match[1] + match[3]
        )
        if is_word and not _WITH_DIGIT.match(text, match.end()):
            continue
        if value := _VALUE.match(text, match.end()):
            parts += [text[end : match.end()], f"{value[1] or ''}***{value[1] or ''}"]
            end = value.end()
    return _OPAQUE.sub("***", "".join(parts) + text[end:])


def is_local(url: str) -> bool:
    """Return whether an address is on this machine, to which requests go through no proxy."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def read_key(api_key_env: str | None, url: str) -> str:
    """Read a server's key from the environment; it is empty without a variable."""
    key = os.environ.get(api_key_env or "", "").strip()
    if api_key_env and not re.fullmatch(r"[!-~]+", key):
        is_name = re.fullmatch(r"[A-Z_][A-Z0-9_]*", api_key_env)
        if is_name:
            variable = f"`{api_key_env}`"
        else:
            variable = "whose name is `api_key_env` (not shown: it may be a key)"
        raise ValueError(
            f"The environment variable {variable} is not set to a key, which has no spaces and "
            "only ASCII characters; export it with the server's key."
        )
    if key and urlsplit(url).scheme == "http" and not is_local(url):
        address = (
            f"{redacted(url)}, unencrypted: whoever sees the traffic reads it; use https or a "
            "tunnel."
        )
        warnings.warn(f"The key of `{api_key_env}` is sent to {address}", stacklevel=2)
    return key


def without_key(text: str, key: str) -> str:
    """Beginning of a server's text, unless it repeats six letters of a key: in any case,
    encoded, or split."""
    letters, secret = (re.sub(r"[^a-z\d]", "", unquote(x).lower()) for x in (text[:2000], key))
    repeats = any(secret[start : start + 6] in letters for start in range(len(secret) - 5))
    if 0 < len(secret) < 8:  # such as `token`, which other words contain
        repeats = re.search(rf"\b{re.escape(key)}\b", text) is not None
    if repeats:
        return "*** (it repeats a part of the key)"
    return shortened(" ".join(text[:2000].split()))


def without_secrets(settings: Any, name: str = "") -> Any:
    """Replace every secret by a placeholder, at any depth."""
    if isinstance(settings, Mapping):
        # everything under `credentials` is secret
        hidden = {
            key: without_secrets(x, name if is_secret(name) else str(key))
            for key, x in settings.items()
        }
        return {redacted(key) if isinstance(key, str) else key: x for key, x in hidden.items()}
    if type(settings) in (list, tuple, set, frozenset):
        if isinstance(settings, tuple) and len(settings) == 2 and is_secret(str(settings[0])):
            name = str(settings[0])  # a header as a pair
        return type(settings)(without_secrets(value, name) for value in settings)
    if is_secret(name) and not isinstance(settings, bool | None):
        return f"<{name.upper()}>"
    if isinstance(settings, str):
        return redacted(settings)
    return settings


def shown(name: str, value: Any) -> str:
    """Value for an error message, in one short line; only its type if it may be a secret."""
    if is_secret(name) or isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__}"
    return f"{shortened(repr(value), 80)} ({type(value).__name__})"


def printable(text: str) -> str:
    """Escape control characters, which a terminal would execute."""
    return "".join(
        c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode() for c in text
    )


def shortened(text: Any, longest: int = 500) -> str:
    """The beginning of a text, printable and without secrets."""
    text = printable(redacted(str(text)[: longest + 1000]))
    if len(text) <= longest:
        return text
    return text[:longest] + "..."
