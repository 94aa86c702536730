"""The client side of rewards over HTTP: bounded in time, size and concurrency, and careful with keys."""

import asyncio
import ipaddress
import json
import logging
import os
import random
import re
import ssl
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, TypeVar

import httpx2
import torch

from .asynchronous import run_coroutine

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_TIMEOUT = 10.0  # seconds; a host that is up accepts at once, so a shorter wait than for an answer
FIRST_BACKOFF = 0.5  # seconds before the first retry; doubled before each further one
MAX_RESPONSE_BYTES = 4 * 2**20  # more than the longest answer of a model that thinks aloud
_RETRIED = {408, 425, 429}
_JITTER = random.SystemRandom()  # the global generator belongs to the run: drawing from it would change the training


@dataclass(frozen=True)
class Failure:
    """Why a request has no result."""

    cause: str  # what went wrong the last time; free of keys
    attempts: int  # how often it was sent; 0 if the server had been given up before

    def __str__(self) -> str:
        if not self.attempts:
            return f"was not asked any more, since every request before failed: {self.cause}"
        return f"failed after {self.attempts} attempt{'s' * (self.attempts > 1)}: {self.cause}"


class _AttemptError(Exception):
    """Raised by one attempt; carries text only, never a request, whose headers hold the key."""

    def __init__(self, cause: str, retried: bool, retry_after: float | None = None):
        super().__init__(cause)
        self.cause, self.retried, self.retry_after = cause, retried, retry_after


@dataclass
class _Outage:
    """Requests that failed for good in a row; past `limit` the server is given up for the rest of the batch.

    Without it, a batch of 1000 against a dead server would wait out every retry of every request, for hours.
    """

    limit: int
    failed: int = 0
    cause: str = ""


class _Bearer(httpx2.Auth):
    """Puts the key into each request's headers; holds the variable's name, never the key."""

    def __init__(self, api_key_env: str):
        self.api_key_env = api_key_env

    def auth_flow(self, request: httpx2.Request) -> Iterator[httpx2.Request]:  # type: ignore[override]
        request.headers["Authorization"] = f"Bearer {read_key(self.api_key_env)}"
        yield request


def read_key(api_key_env: str) -> str:
    """Read a key from the environment. No variable here holds it, so that tracebacks with locals do not show it."""
    name = f"`{api_key_env}`" if api_key_env.isupper() else "that `api_key_env` names (not shown: it may be a key)"
    if not re.fullmatch(r"[A-Za-z_]\w*", api_key_env, re.ASCII):
        raise ValueError(
            "`api_key_env` must be the name of an environment variable that holds the key, such as OPENAI_API_KEY; "
            "what was given is not a name, and is not shown because it may be a key."
        )
    if not os.environ.get(api_key_env, "").strip():
        raise ValueError(f"The environment variable {name} is not set or empty; export it with the server's key.")
    if not re.fullmatch(r"[!-~]+", os.environ[api_key_env].strip()):
        raise ValueError(
            f"The environment variable {name} holds a space or a character that is not ASCII; no key has."
        )
    return os.environ[api_key_env].strip()


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def checked_url(url: str, api_key_env: str | None = None) -> httpx2.URL:
    """Check a server's address."""
    example = "such as http://localhost:8000/v1"
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):  # their text repeats a part of the address, which may be a password
        raise ValueError(f"`url` is not an address; give one {example}.") from None
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError(
            f"`url` for {parsed.host} has a user, a password, a query or a fragment. An address is logged and saved, "
            "so it must not hold secrets: give it without them, and the key by `api_key_env`."
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        shown = "that" if "@" in str(url) else repr(url)
        raise ValueError(f"`url` must start with http:// or https:// and name a host, {example}; {shown} does not.")
    if api_key_env and parsed.scheme == "http" and not is_loopback(parsed.host):
        warnings.warn(
            f"The key in `{api_key_env}` goes to {parsed.host} unencrypted over http://; use https://, or a tunnel to "
            "that machine and a loopback address.",
            stacklevel=4,
        )
    return parsed


def finite_number(value: Any) -> float:
    """Check a score that came over the network."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{excerpt(repr(value))} is not a number") from None
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{number} is not finite in float32")
    return number


def excerpt(text: str) -> str:
    """One printable line of a server's text, for an error message."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:1000]).split())
    return line if len(line) <= 160 else line[:160] + "..."


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait by a `Retry-After` header (RFC 9110, 10.2.3): seconds, or an HTTP date; `None` if neither."""
    if value is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", value.strip(), re.ASCII):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())  # HTTP dates are in GMT
    except (ValueError, TypeError, OverflowError):
        return None


@cache
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context()  # reads the certificates of a hundred authorities: once, not for each batch


class HttpClient:
    """Posts the JSON bodies of a batch to one address, together, and gives a result or a [`Failure`] for each.

    An attempt ends within `timeout` whatever the server does. 408, 425, 429, 5xx, failed connections, timeouts and
    answers that are not JSON are tried again, after a wait that doubles from half a second, with jitter, or that
    `Retry-After` asks for; no wait is longer than `timeout`. So a request ends within `(2 * max_retries + 1) *
    timeout` after it was first sent. When `max(8, concurrency)` requests in a row have failed like this, the rest of
    the batch fails at once. Redirects are not followed, since the key and the completions would go with them.
    """

    def __init__(self, url: str, api_key_env: str | None, concurrency: int, timeout: float, max_retries: int):
        for name, value, least in (("concurrency", concurrency, 1), ("max_retries", max_retries, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}.")
        if not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise ValueError(f"`timeout` must be a number of seconds above 0, got {timeout!r}.")
        parsed = checked_url(url, api_key_env)
        self.url = str(parsed)
        self.host = parsed.netloc.decode("ascii")
        self.api_key_env = api_key_env
        self.concurrency = concurrency
        self.timeout = timeout
        self.max_retries = max_retries
        self._check_key()

    def post_all(self, bodies: Sequence[dict], read: Callable[[Any, dict], T]) -> list[T | Failure]:
        """Post each body."""
        self._check_key()
        return run_coroutine(self._post_all(bodies, read)) if bodies else []

    def _check_key(self) -> None:
        if self.api_key_env is not None:
            read_key(self.api_key_env)

    def _connections(self) -> httpx2.AsyncClient:
        host = httpx2.URL(self.url).host
        return httpx2.AsyncClient(
            auth=_Bearer(self.api_key_env) if self.api_key_env is not None else None,
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            timeout=httpx2.Timeout(self.timeout, connect=min(CONNECT_TIMEOUT, self.timeout)),
            limits=httpx2.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
            follow_redirects=False,
            verify=_tls(),
            # what is meant for this machine never goes to a proxy
            mounts={f"all://{host}": None} if is_loopback(host) else None,
        )

    async def _post_all(self, bodies: Sequence[dict], read: Callable[[Any, dict], T]) -> list[T | Failure]:
        slots = asyncio.Semaphore(self.concurrency)
        outage = _Outage(max(8, self.concurrency))

        async def post(body: dict) -> T | Failure:
            async with slots:  # kept while waiting to retry: a server in trouble gets no further requests meanwhile
                return await self._post(client, body, read, outage)

        async with self._connections() as client:
            return await asyncio.gather(*(post(body) for body in bodies))

    async def _post(
        self, client: httpx2.AsyncClient, body: dict, read: Callable[[Any, dict], T], outage: _Outage
    ) -> T | Failure:
        for attempt in range(1, self.max_retries + 2):
            if outage.failed >= outage.limit:
                return Failure(outage.cause, attempt - 1)
            try:
                answer = await self._attempt(client, body)
            except _AttemptError as error:
                cause = self._without_key(error.cause)
                if not error.retried:
                    return Failure(cause, attempt)
                logger.info("%s: attempt %d of %d failed: %s", self.host, attempt, self.max_retries + 1, cause)
                if attempt <= self.max_retries:
                    await asyncio.sleep(self._wait(attempt, error.retry_after))
            else:
                outage.failed = 0
                try:
                    return read(answer, body)
                except ValueError as unusable:
                    return Failure(self._without_key(str(unusable)), attempt)
        outage.failed += 1
        outage.cause = cause
        return Failure(cause, self.max_retries + 1)

    def _wait(self, attempt: int, retry_after: float | None) -> float:
        if retry_after is not None:  # all are told the same time: spread them a little
            return min(retry_after + _JITTER.uniform(0, FIRST_BACKOFF / 2), self.timeout)
        return min(FIRST_BACKOFF * 2 ** (attempt - 1), self.timeout) * _JITTER.uniform(0.5, 1)

    async def _attempt(self, client: httpx2.AsyncClient, body: dict) -> Any:
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _AttemptError(f"the request cannot be written as JSON: {error}", False) from None
        try:
            # httpx's timeouts start anew with each byte; this one ends the attempt
            async with asyncio.timeout(self.timeout), client.stream("POST", self.url, content=content) as response:
                return await self._answer(response)
        except httpx2.ConnectTimeout:
            raise _AttemptError("no connection within the time allowed; check that the server runs", True) from None
        except (TimeoutError, httpx2.TimeoutException):
            raise _AttemptError(
                f"no complete answer within timeout={self.timeout:g} s; raise `timeout`, or lower `concurrency`", True
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise _AttemptError(
                f"the connection failed ({excerpt(detail)}); check that the server runs", True
            ) from None

    async def _answer(self, response: httpx2.Response) -> Any:
        status = f"{response.status_code} {response.reason_phrase}".strip()
        if response.is_redirect:
            # only scheme, host and path: a query may hold secrets
            target = re.sub(
                r"(?<=//)[^/]*@|[?#].*", "", self._without_key(response.headers.get("location", "nowhere"))
            )
            raise _AttemptError(
                f"it answered {status}, a redirect to {excerpt(target)}. "
                "Redirects are not followed; give that address as `url` if it is the right one",
                False,
            )
        if response.is_success:
            return self._json(await self._content(response, MAX_RESPONSE_BYTES))
        text = self._without_key((await self._content(response, None)).decode(errors="replace"))
        said = f": {excerpt(text)}" if text.strip() else ""
        retried = response.status_code in _RETRIED or response.status_code >= 500
        raise _AttemptError(f"it answered {status}{said}", retried, _retry_after(response.headers.get("retry-after")))

    async def _content(self, response: httpx2.Response, limit: int | None) -> bytes:
        """Read an answer; past `limit` refuse it, or with `None` keep its beginning."""
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            # a few compressed bytes can grow to gigabytes; we asked for plain ones
            raise _AttemptError("it answered with compressed content, which was not asked for", False)
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if limit is None and len(content) > 4096:
                break
            if limit is not None and len(content) > limit:
                raise _AttemptError(f"it answered with more than {limit} bytes, the most that is read", False)
        return bytes(content)

    def _json(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            text = self._without_key(content[:4096].decode(errors="replace"))
            raise _AttemptError(
                f"it answered with {len(content)} bytes that are not JSON: {excerpt(text)}", True
            ) from None

    def _without_key(self, text: str) -> str:
        """Servers repeat a wrong key in their error messages."""
        if self.api_key_env is None or not os.environ.get(self.api_key_env, "").strip():
            return text
        return text.replace(os.environ[self.api_key_env].strip(), "***")
