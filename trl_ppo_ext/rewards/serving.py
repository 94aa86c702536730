"""Server of [`RemoteReward`]s. It has no TLS and serves one model; put a proxy in front, or start several."""

import asyncio
import hmac
import json
import logging
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from .base import Reward, ScoringBatch, read_scores
from .http import read_key

logger = logging.getLogger(__name__)

BODY_TIMEOUT = 30.0  # seconds for a request to arrive; a client that sends nothing would hold its connection for ever


def create_app(reward: Reward, api_key_env: str | None, max_request_bytes: int) -> Starlette:
    """Build the ASGI application: `POST /score` and `GET /health`, both in JSON."""
    one_at_a_time = asyncio.Lock()

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def score(request: Request) -> JSONResponse:
        if api_key_env is not None:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            # in constant time, so that the delay does not reveal how much of a guess is right
            matches = hmac.compare_digest(key.strip().encode(), read_key(api_key_env).encode())
            if scheme.lower() != "bearer" or not matches:
                challenge = {"WWW-Authenticate": "Bearer"}
                raise HTTPException(401, "wrong or missing key; send it as `Authorization: Bearer KEY`", challenge)
        batch = _scoring_batch(await _body(request, max_request_bytes))
        async with one_at_a_time:
            if await request.is_disconnected():  # the client gave up while it waited, and has probably asked again
                raise HTTPException(408, "the client has disconnected")
            return JSONResponse({"scores": await asyncio.to_thread(_scores, reward, batch)})

    async def error(_: Request, raised: Exception) -> JSONResponse:
        raised = cast(HTTPException, raised)
        return JSONResponse({"error": raised.detail}, raised.status_code, raised.headers)

    return Starlette(
        routes=[Route("/score", score, methods=["POST"]), Route("/health", health, methods=["GET"])],
        exception_handlers={HTTPException: error},
    )


async def _body(request: Request, limit: int) -> bytes:
    """Read a request of bounded size in bounded time."""
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limit:
                    raise HTTPException(413, f"the request is longer than {limit} bytes; send fewer completions")
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_TIMEOUT:g} s") from None
    return bytes(content)


def _scoring_batch(content: bytes) -> ScoringBatch:
    """Check a request."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is not JSON") from None
    prompts, completions = (body.get(key) if isinstance(body, dict) else None for key in ("prompts", "completions"))
    if not isinstance(prompts, list) or not isinstance(completions, list):
        raise HTTPException(400, 'the request must be {"prompts": [...], "completions": [...]}')
    if len(prompts) != len(completions):
        raise HTTPException(400, f"{len(prompts)} prompts for {len(completions)} completions; send as many of each")

    def is_chat(entry: Any) -> bool:
        messages = entry if isinstance(entry, list) else []
        return bool(messages) and all(isinstance(x, dict) and "role" in x for x in messages)

    entries = prompts + completions
    if not (all(isinstance(entry, str) for entry in entries) or all(map(is_chat, entries))):
        raise HTTPException(
            400, "prompts and completions must all be text, or all be lists of messages with a role and content"
        )
    return ScoringBatch(prompts, completions, [])


def _scores(reward: Reward, batch: ScoringBatch) -> list[float | None]:
    """Score a request. The cause of an error stays in the server's log."""
    if not len(batch):
        return []
    try:
        scores = read_scores(reward.name, reward.score(batch), [1] * len(batch))
        for failure in scores.failures.values():
            raise failure
    except Exception as error:
        logger.exception("Scoring failed")
        raise HTTPException(500, f"scoring failed with {type(error).__name__}; the server's log says why") from None
    return [None if score != score else score for score in scores.totals.tolist()]  # NaN: does not apply
