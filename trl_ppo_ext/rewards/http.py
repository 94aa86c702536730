"""Rewards over HTTP: judges, and classifiers behind `vllm serve` or TEI; imported only when needed."""

import asyncio
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from json import JSONDecodeError
from typing import Any, ClassVar

import regex
from transformers import AutoTokenizer

from ..concurrency import finished, started
from ..data.prompts import as_text, message_text
from ..redaction import shortened, without_key
from .model import joined
from .scoring import RewardError, ScoringBatch

try:
    import httpx2
    import openai

    from ..servers import is_loopback, read_key, tls
except ImportError as error:
    raise ImportError(f'Rewards over HTTP need an extra ({error}); run pip install "trl_ppo_ext[judge]".') from error

# without a user, a password, a query or a fragment, since addresses are logged
ADDRESS = r"https?://(\[[\da-f:]+\]|[^][\s/?#@:]+)(:\d+)?(/[^\s?#@]*)?"
OUTAGE = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)
# The 8 of "8/10", "8 / 10" and "8 out of 10"; not a part of 1,000 or 1.2.3
NUMBER = r"(?<![\w.,/])(?<!/ )(?<!out of )[-+]?\d+(?:\.\d+)?(?!\d|[.,]\d)"


class _BoundedClient(httpx2.AsyncClient):
    async def send(self, request: httpx2.Request, **kwargs: Any) -> httpx2.Response:
        try:
            async with asyncio.timeout(request.extensions["timeout"]["read"]):  # its own restarts with each byte
                return await super().send(request, **kwargs)
        except TimeoutError:
            raise httpx2.ReadTimeout("", request=request) from None


@dataclass(eq=False, repr=False)
class HttpReward:
    """Posts completions to one address. A dead server is given up for the rest of a batch."""

    url: str
    model: str
    _: KW_ONLY
    name: str | None = None
    api_key_env: str | None = None  # the key itself is in no attribute
    batch_size: int = 32
    concurrency: int = 4
    timeout: float = 60.0
    max_retries: int = 4
    kind: ClassVar[str]
    expected: ClassVar[str]
    # the body of a request for some rows, and the scores in its answer; a ValueError is the cause of a failure
    _body: ClassVar[Callable[[Any, ScoringBatch, slice], dict[str, Any]]]
    _read: ClassVar[Callable[[Any, Any], list[float]]]

    def __post_init__(self):
        for name, least in (("batch_size", 1), ("concurrency", 1), ("max_retries", 0), ("timeout", 0.001)):
            if not getattr(self, name) >= least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)!r}.")
        if not re.fullmatch(ADDRESS, self.url):
            needed = "an address such as http://localhost:8000/v1, without a user, a password, a query or a fragment"
            raise ValueError(f"`url` must be {needed}, since addresses are logged; pass the key with `api_key_env`.")
        self.address = httpx2.URL(self.url)
        is_open = self.address.scheme == "http" and not is_loopback(self.address.host)
        if self.api_key_env is not None and read_key(self.api_key_env) and is_open:
            warnings.warn(f"The key in `{self.api_key_env}` goes to {self.url} unencrypted; use https.", stacklevel=4)
        self.name = self.name or self.model.rstrip("/").split("/")[-1]

    def score(self, batch: ScoringBatch) -> list[float | RewardError]:
        """Score completions; a failed request fails its completions."""
        return finished(started(self._post_all(batch)))

    async def _post_all(self, batch: ScoringBatch) -> list[Any]:
        # explicit, so that OpenAI credentials in the environment are never sent
        authorization: Any = openai.Omit() if self.api_key_env is None else f"Bearer {read_key(self.api_key_env)}"
        options: openai.RequestOptions = {"headers": {"Authorization": authorization}}
        slots, outage = asyncio.Semaphore(self.concurrency), list[str]()  # causes of the last failures in a row

        async def post(rows: slice) -> list[Any]:
            size = len(batch.prompts[rows])
            async with slots:  # held during retries, so that a failing server gets no further requests
                try:
                    if len(outage) >= max(8, self.concurrency):
                        raise ValueError(f"skipped, because all requests before it failed: {outage[-1]}")
                    body = self._body(batch, rows)
                    answer = await client.post(self.url, cast_to=httpx2.Response, body=body, options=options)
                    outage.clear()
                    try:
                        scores = self._read(answer.json())
                    except (LookupError, TypeError, AttributeError, JSONDecodeError):
                        cause = f"it answered {self._excerpt(answer.text)}, which is not {self.expected}"
                        raise ValueError(cause) from None
                    if len(scores) != size:
                        raise ValueError(f"it returned {len(scores)} scores for {size} completions")
                    return scores
                except (openai.OpenAIError, ValueError) as error:
                    cause = self._cause(error)
                    outage.extend([cause] * isinstance(error, OUTAGE))
                server = self.address.netloc.decode("ascii")
                return [RewardError(f"The {self.kind} `{self.name}` at {server} failed: {cause}.")] * size

        async with self._client() as client:
            parts = [slice(start, start + self.batch_size) for start in range(0, len(batch), self.batch_size)]
            return list(chain(*await asyncio.gather(*map(post, parts))))

    def _client(self) -> openai.AsyncOpenAI:
        try:  # requests to this machine go through no proxy; redirects, which would get the key, are not followed
            limits, trust_env = httpx2.Limits(max_connections=None), not is_loopback(self.address.host)
            http_client = _BoundedClient(verify=tls(), limits=limits, trust_env=trust_env)
        except (httpx2.InvalidURL, ValueError):  # the exception repeats a part of the address, which may be a password
            variables = "`HTTPS_PROXY`, `HTTP_PROXY` or `ALL_PROXY`"
            raise ValueError(f"{variables} must be an address such as http://user:password@proxy:3128.") from None
        return openai.AsyncOpenAI(
            api_key="in the header",
            base_url=self.url,
            timeout=httpx2.Timeout(self.timeout, connect=min(10.0, self.timeout)),  # a host that is up accepts at once
            max_retries=self.max_retries,
            http_client=http_client,
        )

    def _cause(self, error: Exception) -> str:
        cause = error.__cause__
        if isinstance(error, openai.APIStatusError):
            answer, hint = error.response, ""
            if target := answer.headers.get("location"):  # only scheme, host and path: the rest may hold secrets
                target = self._excerpt(re.sub(r"(?<=//)[^/]*@|[?#].*", "", target))
                hint = f", a redirect to {target}; use that as `url` if it is the right address"
            return f"it answered {answer.status_code} {answer.reason_phrase}{hint}: {self._excerpt(answer.text)}"
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
    r"""Language model behind OpenAI's `/chat/completions` that rates a completion with a number.

    An answer that is truncated, has no match of `pattern`, or a number outside `score_range` is a failure.

    Args:
        url (`str`): Base address of the API, e.g. `http://localhost:8000/v1`.
        model (`str`): Model name on the server.
        prompt_template (`str`):
            Rubric with `{completion}`, usually `{prompt}`, and optionally dataset columns in braces. Other braces
            are kept, and inserted text is never interpreted. Ask for a last line like `Score: <1 to 10>`.
        name (`str`, *optional*): Name in metrics and errors. Defaults to the last part of `model`.
        api_key_env (`str`, *optional*): Environment variable that holds the key, sent as a bearer token.
        pattern (`str`, *optional*):
            Regular expression (of the `regex` package) of the score, e.g. `r"Score:\s*(-?[\d.]+)"`: the first group
            of its last match, or the whole match. Matches any number by default; the 8 in `8/10`.
        score_range (`tuple[float, float]`, *optional*): Least and greatest accepted score.
        concurrency (`int`, *optional*, defaults to `32`): Simultaneous requests per process of the run.
        timeout (`float`, *optional*, defaults to `60.0`): Seconds per attempt.
        max_retries (`int`, *optional*, defaults to `4`): Attempts after the first.
        temperature (`float`, *optional*, defaults to `0.0`): Temperature of the judge. `None` leaves it to the server.
        max_tokens (`int`, *optional*, defaults to `1024`): Longest answer. `None` leaves it to the server.
        extra_body (`dict`, *optional*): Further fields of the request, which take precedence. Do not pass secrets.
        system_prompt (`str`, *optional*): System message before the rubric.
    """

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
    kind, expected = "judge", "a chat completion"

    def __post_init__(self):
        if "{completion}" not in self.prompt_template:
            raise ValueError("`prompt_template` must contain `{completion}`, which the judge scores; add it.")
        if self.score_range is not None and not self.score_range[0] < self.score_range[1]:
            raise ValueError(f"`score_range` must be (least, greatest), got {self.score_range!r}.")
        try:
            regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"`pattern` must be a regular expression, got {self.pattern!r}: {error}.") from None
        self.url = self.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        super().__post_init__()

    def _body(self, batch: ScoringBatch, rows: slice) -> dict[str, Any]:
        prompt, completion = batch.prompts[rows.start], batch.completions[rows.start]
        text = completion if isinstance(completion, str) else "\n".join(map(message_text, completion))
        values = {column: str(entries[rows.start]) for column, entries in batch.columns.items()}
        rubric = fill(self.prompt_template, values | {"prompt": as_text(prompt), "completion": text})
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        body = {"model": self.model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        body |= {"messages": [*system, {"role": "user", "content": rubric}]} | (self.extra_body or {})
        return {name: value for name, value in body.items() if value is not None}

    def _read(self, answer: Any) -> list[float]:
        choice = answer["choices"][0]
        text, reason = message_text(choice["message"]), choice.get("finish_reason")
        shown = self._excerpt(text)
        if reason in ("length", "content_filter"):  # the last number of a truncated answer is meaningless
            raise ValueError(f'its answer was truncated (finish_reason="{reason}"); raise `max_tokens`: {shown}')
        try:  # nested repeats can take years
            matches = list(regex.finditer(self.pattern, text, timeout=1.0))
        except TimeoutError:
            cause = f"`pattern` {self.pattern!r} searched its answer for more than 1 s"
            raise ValueError(f"{cause}; remove nested repeats such as (a+)+ from it: {shown}") from None
        if not matches:
            raise ValueError(f"its answer has no match of `pattern` {self.pattern!r}: {shown!r}")
        score = float(next(filter(None, matches[-1].groups()), matches[-1][0]))
        if self.score_range is not None and not self.score_range[0] <= score <= self.score_range[1]:
            raise ValueError(f"its answer's score {score:g} is outside `score_range` {self.score_range}")
        return [score]


@dataclass(eq=False, repr=False)
class RemoteReward(HttpReward):
    """Sequence classifier behind `/classify` of `vllm serve` or `/predict` of text-embeddings-inference (TEI).

    It gets the text that a classifier in the run would get, and its raw output is the score.

    Args:
        url (`str`): Address of the endpoint. An address without a path gets `/classify`.
        model (`str`): Model id or path of the classifier, whose tokenizer writes chat messages as text.
        label (`int` or `str`, *optional*): Output of a model with several: its index for vLLM, its name for TEI.
        batch_size (`int`, *optional*, defaults to `32`): Completions per request, which fail together.
        concurrency (`int`, *optional*, defaults to `4`): Simultaneous requests per process of the run.
        name, api_key_env, timeout, max_retries: As those of [`Judge`].
    """

    label: int | str | None = None
    kind, expected = "remote reward", "scores of `/classify` (vLLM) or `/predict` (TEI)"

    def __post_init__(self):
        self.url = re.sub(r"^(https?://[^/?#]+)/?$", r"\1/classify", self.url)
        super().__post_init__()
        if not self.url.endswith(("/classify", "/predict")):
            raise ValueError(f"`url` must end with /classify (vLLM) or /predict (TEI), got {self.url}; change it.")
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)

    def _body(self, batch: ScoringBatch, rows: slice) -> dict[str, Any]:
        texts, special = joined(batch.prompts[rows], batch.completions[rows], self.tokenizer)
        if self.url.endswith("/classify"):
            return {"input": texts, "use_activation": False, "add_special_tokens": special}
        if not special and self.tokenizer.bos_token_id in self.tokenizer("")["input_ids"]:  # TEI adds it again
            texts = [text.removeprefix(self.tokenizer.bos_token) for text in texts]
        return {"inputs": [[text] for text in texts], "raw_scores": True, "truncate": False}

    def _read(self, answer: Any) -> list[float]:
        if self.url.endswith("/classify"):
            rows = [dict(enumerate(entry["probs"])) for entry in answer["data"]]
        else:
            rows = [{entry["label"]: entry["score"] for entry in row} for row in answer]
        label = next(iter(rows[0])) if self.label is None and len(rows[0]) == 1 else self.label
        if label not in rows[0]:
            names = self._excerpt(", ".join(map(repr, rows[0])))
            raise ValueError(f"`label` must be one of its outputs ({names}), got {self.label!r}")
        return [float(row[label]) for row in rows]


def fill(template: str, values: dict[str, str]) -> str:
    """Replace `{name}` by values in one pass, so that inserted text is not interpreted."""
    if unknown := set(re.findall(r"\{([A-Za-z_]\w+)\}", template)) - set(values):
        known = ", ".join(sorted(values))
        names = ", ".join(f"{{{name}}}" for name in sorted(unknown))
        warnings.warn(f"`prompt_template` has {names}, none of {known}; it is sent unchanged.", stacklevel=4)
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)
