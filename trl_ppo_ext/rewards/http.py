"""Rewards over HTTP: judges, and servers that score batches; imported only when needed."""

import asyncio
import json
import os
import re
import warnings
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import Any, ClassVar

import httpx2
import openai
import regex

from ..concurrency import finished, started
from ..redaction import shortened, without_key
from ..servers import is_loopback, read_key, tls
from .scoring import RewardError, ScoringBatch

CONNECT_TIMEOUT = 10.0  # seconds; a host that is up accepts at once
MAX_RESPONSE_BYTES = 4 * 2**20  # more than the longest answer of a reasoning model
PATTERN_TIMEOUT = 1.0  # seconds that `pattern` may search an answer; nested repeats can take years
_OUTAGE = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)
# The 8 of "8/10", "8 / 10" and "8 out of 10"; not a part of 1,000 or 1.2.3
NUMBER = r"(?<![\w.,/])(?<!/ )(?<!out of )[-+]?\d+(?:\.\d+)?(?!\d|[.,]\d)"


class _BoundedClient(httpx2.AsyncClient):
    """HTTP client that bounds the time and the size of a complete answer."""

    async def send(self, request: httpx2.Request, **kwargs: Any) -> httpx2.Response:
        """Send a request once. An `OpenAIError` is not retried."""
        content = bytearray()
        try:
            # the client's own timeouts restart with each byte
            async with (
                asyncio.timeout(request.extensions["timeout"]["read"]),
                aclosing(await super().send(request, **kwargs | {"stream": True})) as response,
            ):
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    # a few compressed bytes can grow to gigabytes
                    raise openai.OpenAIError("it answered with compressed content, which was not requested")
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > MAX_RESPONSE_BYTES:
                        raise openai.OpenAIError(f"it answered with more than {MAX_RESPONSE_BYTES} bytes")
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


@dataclass(eq=False, repr=False)
class HttpReward:
    """Posts `batch_size` completions per request to one address, `concurrency` requests at a time.

    Each attempt ends within `timeout`. The `openai` client retries 408, 409, 429, 5xx, failed connections, timeouts
    and answers that are not JSON. After `max(8, concurrency)` such failures in a row, the rest of the batch fails at
    once: a dead server would take hours otherwise. Redirects are not followed, because they would receive the key.
    """

    url: str
    _: KW_ONLY
    name: str | None = None
    api_key_env: str | None = None  # the key itself is in no attribute
    batch_size: int = 32
    concurrency: int = 4
    timeout: float = 60.0
    max_retries: int = 4
    kind: ClassVar[str]

    def __post_init__(self):
        for name, least in (("batch_size", 1), ("concurrency", 1), ("max_retries", 0), ("timeout", 0.001)):
            if not getattr(self, name) >= least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)!r}.")
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL:
            url = httpx2.URL("")  # the exception repeats a part of the address, which may be a password
        secret = url.userinfo or url.query or url.fragment
        if url.scheme not in ("http", "https") or not url.host or secret:
            raise ValueError(
                "`url` must be an address such as http://localhost:8000/v1, without a user, a password, a query or a "
                "fragment, since addresses are logged; pass the key with `api_key_env`."
            )
        self.name = self.name or url.host
        if self.api_key_env is not None:
            read_key(self.api_key_env)
            if url.scheme == "http" and not is_loopback(url.host):
                warnings.warn(
                    f"The key in `{self.api_key_env}` goes to {url.host} unencrypted over http://; use https://, or a "
                    "tunnel to that machine and a loopback address.",
                    stacklevel=4,
                )

    def score(self, batch: ScoringBatch) -> list[float | RewardError | None]:
        """Score completions; a failed request fails its completions."""
        return finished(started(self._post_all(batch)))

    def _body(self, batch: ScoringBatch, rows: slice) -> dict[str, Any]:
        raise NotImplementedError

    def _read(self, answer: Any) -> list[Any]:
        raise NotImplementedError  # a ValueError is the cause of a failure

    async def _post_all(self, batch: ScoringBatch) -> list[Any]:
        # explicit, so that OpenAI credentials in the environment are never sent
        authorization = openai.Omit() if self.api_key_env is None else f"Bearer {read_key(self.api_key_env)}"
        options: openai.RequestOptions = {"headers": {"Authorization": authorization}}
        url = httpx2.URL(self.url)
        try:
            http_client = _BoundedClient(
                follow_redirects=False,
                verify=tls(),
                limits=httpx2.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
                # requests to this machine never go through a proxy
                mounts={f"all://{url.host}": None} if is_loopback(url.host) else None,
            )
        except (httpx2.InvalidURL, ValueError):  # the exception repeats a part of the address, which may be a password
            variables = "`HTTPS_PROXY`, `HTTP_PROXY` or `ALL_PROXY`"
            raise ValueError(f"{variables} must be an address such as http://user:password@proxy:3128.") from None
        client = openai.AsyncOpenAI(
            api_key="in the header",
            base_url=self.url,
            timeout=httpx2.Timeout(self.timeout, connect=min(CONNECT_TIMEOUT, self.timeout)),
            max_retries=self.max_retries,
            default_headers={"Accept-Encoding": "identity"},
            http_client=http_client,
        )
        slots = asyncio.Semaphore(self.concurrency)
        outage: list[str] = []  # causes of the last failures in a row

        async def post(rows: slice) -> list:
            body, size = self._body(batch, rows), len(batch.prompts[rows])
            async with slots:  # held during retries, so that a failing server gets no further requests
                try:
                    if len(outage) >= max(8, self.concurrency):
                        raise ValueError(f"skipped, because all requests before it failed: {outage[-1]}")
                    response = await client.post(self.url, cast_to=httpx2.Response, body=body, options=options)
                    outage.clear()
                    scores = self._read(response.json())
                    if len(scores) != size:
                        raise ValueError(f"it returned {len(scores)} scores for {size} completions")
                    return scores
                except (openai.OpenAIError, TypeError, ValueError) as error:
                    cause = self._cause(error)
                    if isinstance(error, _OUTAGE):
                        outage.append(cause)
                    server = url.netloc.decode("ascii")
                    return [RewardError(f"The {self.kind} `{self.name}` at {server} failed: {cause}.")] * size

        async with client:
            parts = [slice(start, start + self.batch_size) for start in range(0, len(batch), self.batch_size)]
            return list(chain(*await asyncio.gather(*map(post, parts))))

    def _cause(self, error: Exception) -> str:
        cause = error.__cause__
        if isinstance(error, openai.APIStatusError):
            response = error.response
            status = f"it answered {response.status_code} {response.reason_phrase}".strip()
            if response.is_redirect:  # only scheme, host and path: the rest may hold secrets
                target = re.sub(r"(?<=//)[^/]*@|[?#].*", "", response.headers.get("location", "nowhere"))
                status += f", a redirect to {self._excerpt(target)}; use that as `url` if it is the right address"
            return f"{status}: {self._excerpt(response.text)}".rstrip(": ")
        if isinstance(cause, httpx2.DecodingError):
            return self._excerpt(cause)
        if isinstance(error, openai.APITimeoutError) and not isinstance(cause, httpx2.ConnectTimeout):
            return f"no complete answer within timeout={self.timeout:g} s; raise `timeout`, or lower `concurrency`"
        if isinstance(error, openai.APIConnectionError):
            failure = f"{type(cause).__name__}: {self._excerpt(cause)}"
            return f"the connection failed ({failure}); check that the server runs"
        return self._excerpt(error, 500)

    def _excerpt(self, text: Any, longest: int = 160) -> str:
        """Return the beginning of a server's text in one line, without the key, which servers repeat."""
        key = os.environ.get(self.api_key_env or "", "").strip()
        return shortened(" ".join(without_key(str(text)[:2000], key).split()), longest)


@dataclass(eq=False, repr=False)
class Judge(HttpReward):
    r"""Language model that reads a rubric, a prompt and a completion, and answers with a number.

    Works with every server that has OpenAI's `/chat/completions`: vLLM, SGLang, llama.cpp, TGI, hosted ones. The
    score is the last match of `pattern` in the answer. An answer that is truncated, has no match, or has a number
    outside `score_range` is a failure of that completion.

    Args:
        url (`str`): Base address of the API, e.g. `http://localhost:8000/v1`.
        model (`str`): Model name on the server.
        prompt_template (`str`):
            Rubric with `{completion}`, usually `{prompt}`, and optionally dataset columns in braces. Other braces
            are kept, and inserted text is never interpreted. Ask for a last line like `Score: <1 to 10>`.
        name (`str`, *optional*): Name in metrics and errors. Defaults to the last part of `model`.
        api_key_env (`str`, *optional*): Environment variable that holds the key, sent as a bearer token.
        pattern (`str`, *optional*):
            Regular expression (of the `regex` package, a superset of `re`) of the number, which is the first group
            that matches or the whole match, e.g. `r"Score:\s*(-?[\d.]+)"`. Matches any number by default; the 8 in
            `8/10`.
        score_range (`tuple[float, float]`, *optional*): Least and greatest accepted score.
        concurrency (`int`, *optional*, defaults to `32`): Simultaneous requests per process of the run.
        timeout (`float`, *optional*, defaults to `60.0`): Seconds per attempt.
        max_retries (`int`, *optional*, defaults to `4`): Attempts after the first.
        temperature (`float`, *optional*, defaults to `0.0`): Temperature of the judge. `None` leaves it to the server.
        max_tokens (`int`, *optional*, defaults to `1024`): Longest answer. `None` leaves it to the server.
        extra_body (`dict`, *optional*):
            Further fields of the request, e.g. `max_completion_tokens`. Do not pass secrets.
        system_prompt (`str`, *optional*): System message before the rubric.

    Raises:
        `ValueError`: If an argument is invalid, or the variable of the key is not set.
    """

    model: str
    prompt_template: str
    _: KW_ONLY
    pattern: str = NUMBER
    score_range: tuple[float, float] | None = None
    concurrency: int = 32
    temperature: float | None = 0.0
    max_tokens: int | None = 1024
    extra_body: dict[str, Any] | None = None
    system_prompt: str | None = None
    batch_size: int = field(default=1, init=False)
    kind: ClassVar[str] = "judge"

    def __post_init__(self):
        if "{completion}" not in self.prompt_template:
            raise ValueError("`prompt_template` must contain `{completion}`, which the judge scores; add it.")
        fixed = {"model", "messages", "stream", "n"} & set(self.extra_body or {})
        if fixed:
            raise ValueError(f"`extra_body` must not set {', '.join(sorted(fixed))}: the judge sets it.")
        if self.score_range is not None and not self.score_range[0] < self.score_range[1]:
            raise ValueError(f"`score_range` must be (least, greatest), got {self.score_range!r}.")
        try:
            regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"`pattern` must be a regular expression, got {self.pattern!r}: {error}.") from None
        self.url = self.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.name = self.name or self.model.rstrip("/").split("/")[-1]
        super().__post_init__()

    def _body(self, batch: ScoringBatch, rows: slice) -> dict[str, Any]:
        row = rows.start
        values = {column: str(entries[row]) for column, entries in batch.columns.items()}
        values |= {"prompt": readable(batch.prompts[row]), "completion": readable(batch.completions[row], False)}
        messages = [{"role": "user", "content": fill(self.prompt_template, values)}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        limits = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        limits = {name: limit for name, limit in limits.items() if limit is not None}
        return {"model": self.model, **limits, **(self.extra_body or {}), "messages": messages}

    def _read(self, answer: Any) -> list[float]:
        try:
            choice = answer["choices"][0]
            text = readable_content(choice["message"]["content"])
        except (LookupError, TypeError, AttributeError):
            raise ValueError(f"it answered {self._excerpt(answer)}, which is not a chat completion") from None
        shown, reason = self._excerpt(text), choice.get("finish_reason")
        if reason in ("length", "content_filter"):  # the last number of a truncated answer is meaningless
            remedy = "; raise `max_tokens`, or request a shorter answer" if reason == "length" else ""
            raise ValueError(f'its answer was truncated (finish_reason="{reason}"){remedy}: {shown}')
        try:
            matches = list(regex.finditer(self.pattern, text, timeout=PATTERN_TIMEOUT))
        except TimeoutError:
            cause = f"`pattern` {self.pattern!r} searched its answer for more than {PATTERN_TIMEOUT:g} s"
            raise ValueError(f"{cause}; remove nested repeats such as (a+)+ from it: {shown}") from None
        if not matches:
            raise ValueError(f"its answer has no match of `pattern` {self.pattern!r}: {shown!r}")
        score = float(next(filter(None, matches[-1].groups()), matches[-1][0]))
        if self.score_range is not None and not self.score_range[0] <= score <= self.score_range[1]:
            raise ValueError(f"its answer's score {score:g} is outside `score_range` {self.score_range}")
        return [score]


@dataclass(eq=False, repr=False)
class RemoteReward(HttpReward):
    """Server that takes `{"prompts": [...], "completions": [...]}` and answers `{"scores": [...]}`.

    A score is a number, null if the reward does not apply, or a list of per-token rewards. Prompts and completions
    are sent as in the dataset: text or chat messages. `trl-ppo serve-reward MODEL` starts such a server.

    Args:
        url (`str`): Address to post to. An address without a path gets `/score`.
        name (`str`, *optional*): Name in metrics and errors. Defaults to the host.
        api_key_env (`str`, *optional*): Environment variable that holds the key of the server, sent as a bearer token.
        batch_size (`int`, *optional*, defaults to `32`):
            Completions per request. All of them fail if the request fails.
        concurrency (`int`, *optional*, defaults to `4`): Simultaneous requests per process of the run.
        timeout (`float`, *optional*, defaults to `60.0`): Seconds per attempt.
        max_retries (`int`, *optional*, defaults to `4`): Attempts after the first.

    Raises:
        `ValueError`: If an argument is invalid, or the variable of the key is not set.
    """

    kind: ClassVar[str] = "remote reward"

    def __post_init__(self):
        self.url = re.sub(r"^(https?://[^/?#]+)/?$", r"\1/score", self.url)
        super().__post_init__()

    def _body(self, batch: ScoringBatch, rows: slice) -> dict[str, Any]:
        return {"prompts": batch.prompts[rows], "completions": batch.completions[rows]}

    def _read(self, answer: Any) -> list[Any]:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise ValueError(f'it answered {self._excerpt(answer)}, not {{"scores": [...]}}')
        # an entry with text is invalid, and shown in an error
        return [self._excerpt(score) if '"' in json.dumps(score) else score for score in scores]


def fill(template: str, values: dict[str, str]) -> str:
    """Replace `{name}` by values in one pass, so that inserted text is not interpreted."""
    unknown = set(re.findall(r"\{([A-Za-z_]\w+)\}", template)) - set(values)
    if unknown:
        warnings.warn(
            f"`prompt_template` has {', '.join(f'{{{name}}}' for name in sorted(unknown))}, which is not prompt, "
            f"completion or a column of the dataset ({', '.join(sorted(values))}); it is sent unchanged.",
            stacklevel=4,
        )
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def readable(text: Any, with_roles: bool = True) -> str:
    """Return a prompt or a completion as plain text."""
    if isinstance(text, str):
        return text
    turns = []
    for message in text:
        content = readable_content(message.get("content"))
        if message.get("tool_calls"):
            content = f"{content}\n{json.dumps(message['tool_calls'], ensure_ascii=False, default=str)}".strip()
        turns.append(f"{str(message['role']).capitalize()}: {content}" if with_roles else content)
    return "\n\n".join(turns)


def readable_content(content: Any) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in content or [])
