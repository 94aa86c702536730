"""HTTP client of judges and remote rewards: bounded in time, size and concurrency, and careful with keys.

Retries, back-off and connections are those of the `openai` client. Import this module only where it is used.
"""

import asyncio
import ipaddress
import json
import os
import random
import re
import ssl
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import httpx2
import openai

from .base import RewardError, run_coroutine

CONNECT_TIMEOUT = 10.0  # seconds; a host that is up accepts at once
MAX_RESPONSE_BYTES = 4 * 2**20  # more than the longest answer of a reasoning model
_OUTAGE = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)


def read_key(api_key_env: str) -> str:
    """Read a key from the environment."""
    if not re.fullmatch(r"[A-Za-z_]\w*", api_key_env, re.ASCII):
        raise ValueError(
            "`api_key_env` must be the name of an environment variable that holds the key, such as OPENAI_API_KEY; "
            "the given value is not a name, and is not shown because it may be a key."
        )
    name = f"`{api_key_env}`" if api_key_env.isupper() else "that `api_key_env` names (not shown: it may be a key)"
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise ValueError(f"The environment variable {name} is not set or empty; export it with the server's key.")
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"The environment variable {name} is not a key: it holds a space or a non-ASCII character.")
    return key


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def checked_url(url: str) -> httpx2.URL:
    """Check the address of a server."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):  # their messages repeat a part of the address, which may be a password
        raise ValueError("`url` must be an address such as http://localhost:8000/v1.") from None
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError(
            f"`url` for {parsed.host} must not have a user, a password, a query or a fragment, since addresses are "
            "logged; pass the key with `api_key_env`."
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        shown = "another" if "@" in str(url) else repr(url)
        raise ValueError(f"`url` must start with http:// or https:// and name a host, got {shown}.")
    return parsed


def excerpt(text: str) -> str:
    """Return the beginning of a server's text as one printable line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:1000]).split())
    return line if len(line) <= 160 else line[:160] + "..."


@cache
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context()  # reads a hundred certificates: once, not for each batch


class _UnusableAnswerError(ValueError):
    """Raised for an answer that is not worth a retry."""


class _BoundedClient(httpx2.AsyncClient):
    """Reads whole answers within `seconds` and `MAX_RESPONSE_BYTES`, and counts the attempts of each task."""

    def __init__(self, seconds: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.seconds = seconds
        self.attempts: Counter[asyncio.Task | None] = Counter()

    async def send(self, request: httpx2.Request, **kwargs: Any) -> httpx2.Response:
        """Send a request once."""
        self.attempts[asyncio.current_task()] += 1
        content = bytearray()
        try:
            async with asyncio.timeout(self.seconds):  # the client's own timeouts restart with each byte
                response = await super().send(request, **kwargs | {"stream": True})
                try:
                    if response.headers.get("content-encoding", "identity").lower() != "identity":
                        # a few compressed bytes can grow to gigabytes
                        raise _UnusableAnswerError("it answered with compressed content, which was not asked for")
                    async for chunk in response.aiter_raw():
                        content += chunk
                        if len(content) > MAX_RESPONSE_BYTES:
                            raise _UnusableAnswerError(f"it answered with more than {MAX_RESPONSE_BYTES} bytes")
                finally:
                    await response.aclose()
        except TimeoutError:
            raise httpx2.ReadTimeout("", request=request) from None
        if response.is_success:
            try:
                json.loads(content)
            except (ValueError, RecursionError):  # e.g. the page of a proxy whose server restarts: worth a retry
                start = content[:1000].decode(errors="replace")
                cause = f"it answered with {len(content)} bytes that are not JSON: {start}"
                raise httpx2.DecodingError(cause) from None
        return httpx2.Response(response.status_code, headers=response.headers, content=bytes(content), request=request)


class HttpClient:
    """Posts the JSON bodies of a batch to one address, `concurrency` at a time.

    Each attempt ends within `timeout`. The `openai` client retries 408, 409, 429, 5xx, failed connections, timeouts
    and answers that are not JSON. After `max(8, concurrency)` such failures in a row, the rest of the batch fails at
    once: a dead server would take hours otherwise. Redirects are not followed: the key would go with them.
    """

    def __init__(self, url: str, api_key_env: str | None, concurrency: int, timeout: float, max_retries: int):
        for name, value, least in (("concurrency", concurrency, 1), ("max_retries", max_retries, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
        if not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise ValueError(f"`timeout` must be a number of seconds above 0, got {timeout!r}.")
        parsed = checked_url(url)
        self.url = str(parsed)
        self.host = parsed.netloc.decode("ascii")
        self.loopback = is_loopback(parsed.host)
        self.api_key_env = api_key_env  # the key itself is in no attribute
        self.concurrency = concurrency
        self.timeout = timeout
        self.max_retries = max_retries
        if api_key_env is not None:
            read_key(api_key_env)
            if parsed.scheme == "http" and not self.loopback:
                warnings.warn(
                    f"The key in `{api_key_env}` goes to {parsed.host} unencrypted over http://; use https://, or a "
                    "tunnel to that machine and a loopback address.",
                    stacklevel=3,
                )

    def post_all(
        self, bodies: Sequence[dict], read: Callable[[Any, dict], Any], fail: Callable[[str], RewardError]
    ) -> list[Any]:
        """Return `read(answer, body)` for each body, or `fail(cause)` if there is no answer or `read` refuses it."""
        state = random.getstate()  # the jitter of back-off must not change the run's random numbers
        try:
            return run_coroutine(self._post_all(bodies, read, fail))
        finally:
            random.setstate(state)

    async def _post_all(self, bodies: Sequence[dict], read: Callable, fail: Callable[[str], RewardError]) -> list[Any]:
        try:
            authorization = openai.Omit() if self.api_key_env is None else f"Bearer {read_key(self.api_key_env)}"
        except ValueError as error:
            raise fail(f"cannot be asked: {str(error).rstrip('.')}") from None
        # explicit, so that credentials of OpenAI's in the environment are never sent
        options: openai.RequestOptions = {"headers": {"Authorization": authorization}}
        http = _BoundedClient(
            self.timeout,
            follow_redirects=False,
            verify=_tls(),
            limits=httpx2.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
            # requests to this machine never go through a proxy
            mounts={f"all://{httpx2.URL(self.url).host}": None} if self.loopback else None,
        )
        client = openai.AsyncOpenAI(
            api_key="in the header",
            base_url=self.url,
            timeout=httpx2.Timeout(self.timeout, connect=min(CONNECT_TIMEOUT, self.timeout)),
            max_retries=self.max_retries,
            default_headers={"Accept-Encoding": "identity"},
            http_client=http,
        )
        slots = asyncio.Semaphore(self.concurrency)
        outage: list[str] = []  # causes of the last failures in a row

        async def post(body: dict) -> Any:
            async with slots:  # held during retries: a server in trouble gets no further requests meanwhile
                if len(outage) >= max(8, self.concurrency):
                    return fail(f"was not asked any more, since every request before failed: {outage[-1]}")
                try:
                    response = await client.post(self.url, cast_to=httpx2.Response, body=body, options=options)
                    outage.clear()
                    return read(response.json(), body)
                except (openai.APIError, TypeError, ValueError) as error:
                    cause = self._without_key(self._cause(error))
                    if isinstance(error, _OUTAGE):
                        outage.append(cause)
                    attempts = http.attempts[asyncio.current_task()] or 1
                    return fail(f"failed after {attempts} attempt{'s' * (attempts > 1)}: {cause}")

        async with client:
            return await asyncio.gather(*(post(body) for body in bodies))

    def _cause(self, error: Exception) -> str:
        if isinstance(error, openai.APIStatusError):
            response = error.response
            status = f"it answered {response.status_code} {response.reason_phrase}".strip()
            if response.is_redirect:
                # only scheme, host and path: the rest may hold secrets
                target = re.sub(r"(?<=//)[^/]*@|[?#].*", "", response.headers.get("location", "nowhere"))
                return (
                    f"{status}, a redirect to {excerpt(self._without_key(target))}. Redirects are not followed; use "
                    "that address as `url` if it is the right one"
                )
            return f"{status}: {excerpt(self._without_key(response.text))}".rstrip(": ")
        if isinstance(error, openai.APITimeoutError):
            if isinstance(error.__cause__, httpx2.ConnectTimeout):
                return "no connection in time; check that the server runs"
            return f"no complete answer within timeout={self.timeout:g} s; raise `timeout`, or lower `concurrency`"
        if isinstance(error, openai.APIConnectionError):
            text = excerpt(self._without_key(str(error.__cause__)))
            if isinstance(error.__cause__, httpx2.DecodingError):
                return text
            return f"the connection failed ({type(error.__cause__).__name__}: {text}); check that the server runs"
        return str(error)

    def _without_key(self, text: str) -> str:
        """Remove the key: servers repeat a wrong one in their messages."""
        key = os.environ.get(self.api_key_env or "", "").strip()
        return text.replace(key, "***") if key else text
