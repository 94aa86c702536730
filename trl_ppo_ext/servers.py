"""Addresses and keys of servers that a run uses."""

import ipaddress
import os
import re
from contextlib import suppress
from functools import cache

import httpx2

tls = cache(httpx2.create_ssl_context)  # it reads a hundred certificates: once, not for each client


def read_key(api_key_env: str) -> str:
    """Read a key from the environment."""
    key = os.environ.get(api_key_env, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        is_name = re.fullmatch(r"[A-Z_][A-Z0-9_]*", api_key_env)
        variable = f"`{api_key_env}`" if is_name else "whose name is `api_key_env` (not shown: it may be a key)"
        raise ValueError(
            f"The environment variable {variable} is not set to a key, which has no spaces and only ASCII "
            "characters; export it with the server's key."
        )
    return key


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine."""
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
