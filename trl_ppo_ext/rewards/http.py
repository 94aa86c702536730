"""Rewards over HTTP, such as judges; imported only when needed."""

import asyncio
import re
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from json import JSONDecodeError
from typing import Any, ClassVar

from ..data import as_text
from ..redaction import is_local, read_key, without_key
from .answers import limit_answer
from .scoring import RewardError, ScoringBatch

try:
    import httpx2
    import openai
except ImportError as error:
    raise ImportError(
        f'Rewards over HTTP need an extra ({error}); run pip install "trl_ppo_ext[judge]".'
    ) from error

PAUSE = 60.0  # seconds, the longest before an attempt that a server may ask for
# The 8 of "8/10", "8 / 10" and "8 out of 10"; not a part of 1,000 or 1.2.3
NUMBER = r"(?<![\w.,/])(?<!/ )(?<!out of )[-+]?\d+(?:\.\d+)?(?!\d|[.,]\d)"


@dataclass(eq=False, repr=False)
class HttpReward:
    """Posts completions to one address. A dead server is given up for the rest of a batch."""

    url: str
    model: str
    _: KW_ONLY
    name: str | None = None
    api_key_env: str | None = None  # the key itself is in no attribute
    concurrency: int = 32
    timeout: float = 60.0
    max_retries: int = 4
    # for its server, apart from coroutines of users, which may block their loop
    only_waits: ClassVar[bool] = True
    # the body of the request for a completion, and the score in its answer; a ValueError is the
    # cause of a failure
    _body: ClassVar[Callable[[Any, ScoringBatch, int], dict[str, Any]]]
    _read: ClassVar[Callable[[Any, Any], float]]

    def __post_init__(self):
        if not re.fullmatch(r"https?://[^\s?#@]+", self.url):  # addresses are logged
            raise ValueError(
                "`url` must be an address such as http://localhost:8000/v1, without a user, a "
                "password, a query or a fragment; pass the key with `api_key_env`."
            )
        if self.concurrency < 1:
            raise ValueError(f"`concurrency` must be at least 1, got {self.concurrency}.")
        self.name = self.name or self.model.rstrip("/").split("/")[-1]
        read_key(self.api_key_env, self.url)  # a missing one raises before the run

    async def score(self, batch: ScoringBatch) -> list[float | RewardError]:
        """Score completions; a failed request fails its completion."""
        # causes of those since the last answer
        slots = asyncio.Semaphore(self.concurrency)
        failures = list[str]()
        key = read_key(self.api_key_env, self.url)
        # explicit, so that OpenAI credentials in the environment are never sent
        options: Any = {"headers": {"Authorization": f"Bearer {key}" if key else openai.Omit()}}

        async def post(row: int) -> float | RewardError:
            body = None
            # held during retries, so that a failing server gets no further requests
            async with slots:
                try:
                    if len(failures) >= max(8, self.concurrency):
                        raise ValueError(
                            f"skipped, because all requests before it failed: {failures[0]}"
                        )
                    body = self._body(batch, row)
                    # an attempt ends after `timeout` seconds without a byte, and all of them when a
                    # server drips
                    async with asyncio.timeout((1 + self.max_retries) * (self.timeout + PAUSE)):
                        answer = await client.post(
                            self.url, cast_to=httpx2.Response, body=body, options=options
                        )
                    failures.clear()
                    try:
                        return self._read(answer.json())
                    except (LookupError, TypeError, AttributeError, JSONDecodeError):
                        raise ValueError(f"it answered in an unknown form: {answer.text}") from None
                except Exception as error:  # e.g. a chat template rejects a sampled call
                    detail: Any = error.__cause__
                    if isinstance(error, openai.APIStatusError):
                        detail = error.response.text
                    cause = (
                        f"{type(error).__name__}: {without_key(f'{error} {detail or str()}', key)}"
                    )
                    # also after a timeout
                    if isinstance(error, openai.APIConnectionError | TimeoutError):
                        cause += f" Check that the server runs, or raise timeout={self.timeout:g}."
                    failures.extend([cause] if body else [])
                return RewardError(f"The reward `{self.name}` at {self.url} failed with {cause}")

        async with openai.AsyncOpenAI(
            api_key="in the header",
            base_url=self.url,
            # a host that is up accepts at once
            timeout=httpx2.Timeout(self.timeout, connect=min(10.0, self.timeout)),
            max_retries=self.max_retries,
            http_client=openai.DefaultAsyncHttpxClient(
                trust_env=not is_local(self.url), event_hooks={"response": [limit_answer]}
            ),
        ) as client:
            return await asyncio.gather(*map(post, range(len(batch))))


@dataclass(eq=False, repr=False)
class Judge(HttpReward):
    r"""Language model behind OpenAI's `/chat/completions` that rates a completion with a number.

    An answer that is truncated, has no match of `pattern`, or a number outside `score_range` is a
    failure.

    Args:
        url (`str`): Base address of the API, e.g. `http://localhost:8000/v1`.
        model (`str`): Model name on the server.
        prompt_template (`str`):
            Rubric with `{completion}`, usually `{prompt}`, and optionally dataset columns in
            braces. Other braces are kept, and inserted text is never interpreted. Ask for a last
            line like `Score: <1 to 10>`.
        name (`str`, *optional*): Name in metrics and errors. Defaults to the last part of `model`.
        api_key_env (`str`, *optional*):
            Environment variable that holds the key, sent as a bearer token.
        concurrency (`int`, *optional*, defaults to `32`):
            Simultaneous requests per process of the run.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds without a byte of the answer that end an attempt.
        max_retries (`int`, *optional*, defaults to `4`): Attempts after the first.
        pattern (`str`, *optional*):
            Regular expression whose last match is the score, or its first group. Defaults to any
            number.
        score_range (`tuple[float, float]`, *optional*): Least and greatest accepted score.
        extra_body (`dict`, *optional*):
            Fields of the request. Without them `temperature` is 0 and `max_tokens` 1024; `None`
            removes one.
    """

    prompt_template: str
    _: KW_ONLY
    pattern: str = NUMBER
    score_range: tuple[float, float] | None = None
    extra_body: dict[str, Any] | None = None

    def __post_init__(self):
        if "{completion}" not in self.prompt_template:
            raise ValueError(
                "`prompt_template` must contain `{completion}`, which the judge scores; add it."
            )
        re.compile(self.pattern)
        self.url = self.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        super().__post_init__()

    def _body(self, batch: ScoringBatch, row: int) -> dict[str, Any]:
        values = {column: str(entries[row]) for column, entries in batch.columns.items()}
        values |= {
            "prompt": as_text(batch.prompts[row]),
            "completion": as_text(batch.completions[row]),
        }
        if unknown := set(re.findall(r"\{([A-Za-z_]\w+)\}", self.prompt_template)) - set(values):
            warnings.warn(
                f"`prompt_template` has {unknown}, not among {list(values)}; sent unchanged.",
                stacklevel=2,
            )
        # in one pass, so that inserted text is not interpreted
        rubric = re.sub(
            r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), self.prompt_template
        )
        body = {"model": self.model, "messages": [{"role": "user", "content": rubric}]}
        body |= {"temperature": 0.0, "max_tokens": 1024} | (self.extra_body or {})
        return {name: value for name, value in body.items() if value is not None}

    def _read(self, answer: Any) -> float:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        reason = choice.get("finish_reason")
        # its last number is meaningless
        if reason in ("length", "content_filter", "abort", "error"):
            if reason == "length":
                raise ValueError(
                    'its answer was truncated (finish_reason="length"); raise `max_tokens`: '
                    f"{text!r}"
                )
            raise ValueError(f'its answer was truncated (finish_reason="{reason}"): {text!r}')
        matches = list(re.finditer(self.pattern, text))
        if not matches:
            raise ValueError(f"its answer has no match of `pattern` {self.pattern!r}: {text!r}")
        score = float(next(filter(None, matches[-1].groups()), matches[-1][0]))
        if self.score_range is not None and not self.score_range[0] <= score <= self.score_range[1]:
            raise ValueError(
                f"its answer's score {score:g} is outside `score_range` {self.score_range}"
            )
        return score
