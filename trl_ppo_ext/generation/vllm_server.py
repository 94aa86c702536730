"""Client of a vLLM server, to which it sends adapters by path and prompts as token ids."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from ..concurrency import finished, started
from ..redaction import shortened, without_key
from ..rewards.http import is_loopback
from .vllm import Engine, Request, Sampled, VLLMError

CONCURRENCY = 64  # requests at a time of each process
PAUSE = 1.0  # seconds between two attempts
UNAVAILABLE = (429, 502, 503, 504)  # while it starts, or is overloaded


class VLLMServer(Engine):
    """`vllm serve` on this or another machine, which sees the directory of the adapters under the same path.

    Failed connections are tried again for `timeout` seconds, and a server that was restarted gets
    the adapter again: a request has its seed, so its completions are the same. The key of the server is read from the
    environment variable VLLM_API_KEY.
    """

    def __init__(self, url: str, timeout: float, base: str, settings: dict[str, Any], rank: int):
        self.url, self.timeout, self.settings = url.rstrip("/"), timeout, settings | {"return_token_ids": True}
        self.directories: dict[str, Path] = {}
        self.command = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {base} --enable-lora --max-loras 2 "
        self.command += f"--max-lora-rank {rank} --logprobs-mode processed_logprobs --generation-config vllm"
        models = self._ask("GET", "/v1/models").json()["data"]
        served = [name for model in models if not model.get("parent") for name in (model["id"], model.get("root"))]
        if base not in served:
            raise VLLMError(
                f"The server at {self.url} serves `{served[0]}`, and the policy's base is `{base}`; start it with "
                f"`{self.command}`, or set `vllm_base_model` to what it serves, if the weights are the same."
            )

    # ---- adapters ----

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter, unless another rank has."""
        self.directories = {name: directory}
        answer = self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
        if answer.status_code == 404 and "Not Found" in answer.text and name not in answer.text:
            raise VLLMError(f"The server at {self.url} takes no adapters; start it with `{self.command}`.")
        if answer.is_error and "already" not in answer.text:
            raise VLLMError(
                f"The server at {self.url} cannot load the adapter in `{directory}`, which it must see under that "
                f"path: {self._shown(answer)}. Start it with `{self.command}`."
            )

    def unload(self, name: str) -> None:
        """Forget an adapter; a server that was restarted has done so."""
        self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def wake(self) -> None:
        """Nothing to do: the server has its own memory."""

    def sleep(self) -> None:
        """Nothing to do."""

    # ---- completions ----

    def sample(self, name: str, requests: Sequence[Request]) -> list[list[Sampled]]:
        """Sample the completions of each request."""

        async def all_of_them() -> list[list[Sampled]]:
            slots = asyncio.Semaphore(CONCURRENCY)
            async with self._client() as client:
                return await asyncio.gather(*[self._complete(client, slots, name, x) for x in requests])

        return finished(started(all_of_them()))

    async def _complete(
        self, client: httpx2.AsyncClient, slots: asyncio.Semaphore, name: str, request: Request
    ) -> list[Sampled]:
        # a request per prompt: all prompts of one request would get the same noise
        body = {"model": name, "prompt": request.prompt_ids, "n": request.copies, "seed": request.seed}
        body |= self.settings | {"max_tokens": request.max_tokens}
        async with slots:
            answer = await self._answer(client, "POST", "/v1/completions", body)
            if answer.status_code == 404:  # it was restarted, and has lost the adapter
                load = {"lora_name": name, "lora_path": str(self.directories[name])}
                await self._answer(client, "POST", "/v1/load_lora_adapter", load)
                answer = await self._answer(client, "POST", "/v1/completions", body)
        if answer.is_error:
            raise VLLMError(f"The server at {self.url} did not sample: {self._shown(answer)}.")
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        return [Sampled(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    # ---- requests ----

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        async def ask() -> httpx2.Response:
            async with self._client() as client:
                return await self._answer(client, method, path, body)

        return finished(started(ask()))

    def _client(self) -> httpx2.AsyncClient:
        key = os.environ.get("VLLM_API_KEY", "").strip()
        return httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx2.Timeout(self.timeout, connect=min(10.0, self.timeout)),
            limits=httpx2.Limits(max_connections=CONCURRENCY),
            trust_env=not is_loopback(httpx2.URL(self.url).host),  # requests to this machine go through no proxy
        )

    async def _answer(
        self, client: httpx2.AsyncClient, method: str, path: str, body: dict[str, Any] | None
    ) -> httpx2.Response:
        """Answer to a request, which is repeated while the server cannot be reached or fails."""
        end = time.monotonic() + self.timeout
        while True:
            try:
                answer = await client.request(method, path, json=body)
                if answer.status_code not in UNAVAILABLE or time.monotonic() > end:
                    return answer
            except httpx2.TransportError as error:
                if time.monotonic() > end:
                    cause = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise VLLMError(
                        f"No answer from {self.url} within `vllm_server_timeout={self.timeout:g}` s ({cause}). If the "
                        f"server does not run, start it with `{self.command}`; the run resumes from its checkpoint."
                    ) from None
            await asyncio.sleep(PAUSE)

    def _shown(self, answer: httpx2.Response) -> str:
        text = without_key(answer.text[:2000], os.environ.get("VLLM_API_KEY", "").strip())
        return f"{answer.status_code} {shortened(' '.join(text.split()))}"
