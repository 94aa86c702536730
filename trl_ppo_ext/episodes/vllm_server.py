"""Client of a vLLM server, to which it sends adapters by path and prompts as token ids."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..concurrency import started
from ..redaction import is_local, read_key, redacted, without_key
from ..rewards.answers import LIMIT, MOST_BYTES, AnswerError, limit_answer
from .engine import Request, Sampled, VLLMError

try:
    import httpx2
except ImportError as error:
    raise ImportError(
        f'A vLLM server needs an extra ({error}); run pip install "trl_ppo_ext[vllm]".'
    ) from error

T = TypeVar("T")
TLS = httpx2.create_ssl_context()  # it reads a hundred certificates: once, not for each call
KEY = "VLLM_API_KEY"
PAUSE = 1.0  # seconds between two attempts
LIFE = 10.0  # seconds after which a server that has not answered yet must show that it runs
TOKENS = 2**31  # more than any vocabulary has
BYTES_PER_TOKEN = 1024  # of an answer, at most: id, text and log-prob take about a hundred
SLOWEST = 1.0  # seconds per token of a completion, for a server that runs
UNAVAILABLE = (429, 502, 503, 504)  # while it starts, or is overloaded
# the engine died, e.g. for want of memory, or the server shuts down and answers with the tokens so
# far
ENDED = re.compile(r'"message":\s*"EngineCore encountered an issue|"finish_reason":\s*"abort"')


class Slots:
    """Limit of completions at a time; a request for more than that takes all slots."""

    def __init__(self, number: int):
        self.number = number
        self.free = asyncio.Semaphore(number)
        self.entrance = asyncio.Lock()  # two requests would wait for each other's slots

    @asynccontextmanager
    async def taken(self, completions: int) -> AsyncIterator[None]:
        """Context of a request, which waits for its slots."""
        taken = 0
        try:
            async with self.entrance:
                while taken < min(completions, self.number):
                    await self.free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self.free.release()


class VLLMServer:
    """`vllm serve` on this or another machine, which sees the directory of the adapters under
    the same path."""

    def __init__(
        self,
        url: str,
        timeout: float,
        base: str,
        settings: dict[str, Any],
        rank: int,
        revision: str | None = None,
        concurrency: int = 256,
    ):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self.concurrency = concurrency  # completions at a time
        self.name = redacted(self.url)
        self.settings = settings | {"return_token_ids": True}
        self.command = (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {base} --enable-lora --max-loras 2 "
        )
        if revision is not None:
            self.command += f"--revision {revision} "
        self.command += (
            f"--max-lora-rank {rank} --logprobs-mode processed_logprobs --generation-config vllm "
        )
        address = httpx2.URL(self.url)
        # by default it listens to all networks
        self.command += f"--host {address.host} --port {address.port or 80}"
        answer = self._run(lambda client: self._answer(client, "GET", "/v1/models"))
        bases = self._read(
            answer, "is not a vLLM server", lambda x: [y for y in x["data"] if not y.get("parent")]
        )
        served = [model.get(name) for model in bases for name in ("id", "root")]
        if base not in served:
            raise VLLMError(
                f"The server at {self.name} serves `{_shown(*served[:1])}`, the policy's base is "
                f"`{base}`; start it with `{self.command}`, or set `vllm_kwargs['base_model']` to "
                "what it serves (of the same weights)."
            )

    def wake(self) -> None:
        """Do nothing: a server that was restarted gets its adapter again with the next request."""

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter, unless another rank has."""
        self.directory = directory
        self._run(lambda client: self._load(client, name))

    async def _load(self, client: httpx2.AsyncClient, name: str) -> None:
        adapter = {"lora_name": name, "lora_path": str(self.directory)}
        answer = await self._answer(client, "POST", "/v1/load_lora_adapter", adapter)
        if not answer.is_success and not (
            answer.status_code == 400 and "already been loaded" in answer.text
        ):
            raise VLLMError(
                f"The server at {self.name} cannot load the adapter: {_shown(answer)}. It must be "
                f"started with `{self.command}`, and see `{self.directory}` under that path."
            )

    def unload(self, name: str) -> None:
        """Forget an adapter; a server that was restarted has done so."""
        self._run(
            lambda client: self._answer(
                client, "POST", "/v1/unload_lora_adapter", {"lora_name": name}
            )
        )

    def sample(self, name: str, requests: Sequence[Request]) -> list[list[Sampled]]:
        """Sample the completions of each request."""
        return self.start(name, requests)()

    def start(self, name: str, requests: Sequence[Request]) -> Callable[[], list[list[Sampled]]]:
        """Send requests; the returned function waits for their completions."""

        async def sample() -> list[list[Sampled]]:
            async with self.requesting(name) as complete:
                return await asyncio.gather(*map(complete, requests))

        return started(sample(), waits=True).result

    @asynccontextmanager
    async def requesting(
        self, name: str
    ) -> AsyncIterator[Callable[[Request], Awaitable[list[Sampled]]]]:
        """Context with a function that requests the completions of an adapter."""
        slots = Slots(self.concurrency)
        async with self._client() as client:
            yield partial(self._complete, client, slots, name)

    async def _complete(
        self, client: httpx2.AsyncClient, slots: "Slots", name: str, request: Request
    ) -> list[Sampled]:
        # a request per prompt: all prompts of one request would get the same noise
        body = {
            "model": name,
            "prompt": request.prompt_ids,
            "n": request.copies,
            "seed": request.seed,
        }
        body |= self.settings | {"max_tokens": request.max_tokens}
        async with slots.taken(request.copies):
            answer = await self._answer(client, "POST", "/v1/completions", body)
            # The server was restarted and has lost the adapter: load it and ask again. The same
            # seed samples the same completions.
            if answer.status_code == 404:
                await self._load(client, name)
                answer = await self._answer(client, "POST", "/v1/completions", body)

        def read(body: Any) -> list[Sampled]:
            choices = sorted(body["choices"], key=lambda choice: choice["index"])
            sampled = [
                Sampled(x["token_ids"], list(map(float, x["logprobs"]["token_logprobs"])))
                for x in choices
            ]
            fits = [0 < len(x.ids) == len(x.logprobs) <= request.max_tokens for x in sampled]
            are_ids = all(
                type(token) is int and 0 <= token < TOKENS for x in sampled for token in x.ids
            )
            if fits != [True] * request.copies or not are_ids:
                raise ValueError
            return sampled

        return self._read(
            answer,
            f"did not sample {request.copies} completions with token ids and log-probs",
            read,
        )

    def sleep(self) -> None:
        """Do nothing: others may use the server."""

    def _run(self, action: Callable[[httpx2.AsyncClient], Awaitable[T]]) -> T:
        async def run() -> T:
            async with self._client() as client:
                return await action(client)

        # in the loop in which no code of users runs
        return started(run(), waits=True).result()

    def _client(self) -> httpx2.AsyncClient:
        if os.environ.get(KEY):
            key = read_key(KEY, self.url)
        else:
            key = None
        return httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx2.Timeout(None, connect=LIFE),
            # each slot also asks whether the server runs
            limits=httpx2.Limits(max_connections=None),
            verify=TLS,
            trust_env=not is_local(self.url),
            event_hooks={"response": [limit_answer]},
        )

    async def _answer(
        self, client: httpx2.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx2.Response:
        """Answer to a request, which is repeated while the server cannot be reached or starts."""
        start = alive = time.monotonic()
        tokens = (body or {}).get("n", 1) * (body or {}).get("max_tokens", 0)
        limit = {LIMIT: MOST_BYTES + BYTES_PER_TOKEN * tokens}
        while True:
            request = asyncio.create_task(client.request(method, path, json=body, extensions=limit))
            try:
                # a server that is shut down never answers, nor hangs up; a proxy may answer some
                # requests only
                while not (await asyncio.wait([request], timeout=min(LIFE, self.timeout)))[0]:
                    await asyncio.wait_for(client.get("/v1/models"), LIFE)
                    alive = min(
                        time.monotonic(), start + SLOWEST * (body or {}).get("max_tokens", 0)
                    )
                    if time.monotonic() > alive + self.timeout:
                        raise TimeoutError("it runs, but does not answer this request")
                answer = request.result()
            except AnswerError as error:
                raise VLLMError(
                    f"{self.name} is not a vLLM server that fits the run: {error}"
                ) from error
            except (httpx2.RequestError, TimeoutError) as error:
                cause = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                cause = _shown(answer)
                if answer.status_code in (401, 403):
                    raise VLLMError(
                        f"The server at {self.name} refuses {KEY} of the environment: {cause}."
                    )
                if answer.status_code not in UNAVAILABLE and not ENDED.search(answer.text):
                    return answer
            finally:
                request.cancel()
            if time.monotonic() > alive + self.timeout:
                raise VLLMError(
                    f"No answer from {self.name} within `vllm_server_timeout={self.timeout:g}` s "
                    f"({cause}). If the server does not run, start it with `{self.command}`; the "
                    "run resumes from its checkpoint."
                )
            await asyncio.sleep(PAUSE)

    def _read(self, answer: httpx2.Response, failure: str, read: Callable[[Any], T]) -> T:
        """Parse a successful answer."""
        with suppress(LookupError, TypeError, AttributeError, ValueError):
            if answer.is_success:
                return read(answer.json())
        raise VLLMError(f"The server at {self.name} {failure}: {_shown(answer)}.")


def _shown(answer: Any = None) -> str:
    """A server's answer, or another text of it, without the key."""
    text = without_key(getattr(answer, "text", str(answer)), os.environ.get(KEY, "").strip())
    if isinstance(answer, httpx2.Response):
        return f"{answer.status_code} {text}"
    return text
