"""`trl-ppo serve-reward MODEL`: score with a sequence classifier over HTTP, for `RemoteReward`.

The server has no TLS and serves one model; put a proxy in front, or start several.
"""

import argparse
import asyncio
import hmac
import json
import logging
import math
from typing import Any

from trl import is_conversational

from ..rewards import ClassifierReward, ScoringBatch, load_classifier
from ..rewards.model import choose_device
from ..servers import is_loopback, read_key
from .check_reward import add_model_arguments

try:
    import h11
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ValueError(
        f"uvicorn and starlette cannot be imported ({error}); run pip install '.[serve]' in the clone that "
        "trl_ppo_ext was installed from, or pip install uvicorn starlette."
    ) from error

logger = logging.getLogger(__name__)

ARRIVAL_TIMEOUT = 30.0  # seconds until a request has arrived completely
MAX_CONNECTIONS = 500  # below the usual limit of open files
MAX_ROWS = 1024  # completions per request: so many are scored even if the client leaves


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trl-ppo serve-reward`."""
    add_model_arguments(parser, ("nf4", "fp4", "int8", "none"))
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs a key")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on; 0 takes a free one")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key clients must send")
    parser.add_argument("--max-request-bytes", type=int, default=8 * 2**20, help="longest request that is read")


def main(options: argparse.Namespace) -> None:
    """Load the model and serve it until the process is stopped."""
    for name in ("batch_size", "max_request_bytes"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}.")
    if options.api_key_env is not None:
        read_key(options.api_key_env)
    elif not is_loopback(options.host):
        raise ValueError(
            f"--host {options.host} accepts other machines; pass --api-key-env NAME with the variable that holds a "
            "key, or use --host 127.0.0.1."
        )
    device, dtype = choose_device(options.device, options.dtype)
    label, trusted = options.reward_label, options.trust_remote_code
    model = load_classifier(options.model, dtype, options.quantization, device, trusted)
    reward = ClassifierReward(model, batch_size=options.batch_size, label=label, trust_remote_code=trusted)
    app = create_app(reward, options.api_key_env, options.max_request_bytes)
    uvicorn.run(app, host=options.host, port=options.port, **SETTINGS)


class Protocol(H11Protocol):
    """HTTP/1.1 that closes a connection on which no request has arrived in time; uvicorn waits without a limit."""

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self.loop.call_later(ARRIVAL_TIMEOUT, self.close_unless_arrived)

    def close_unless_arrived(self) -> None:
        """Close the connection if its request is incomplete."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.close()


# one request per connection
SETTINGS: dict[str, Any] = {
    "http": Protocol,
    "headers": [("Connection", "close")],
    "limit_concurrency": MAX_CONNECTIONS,
    "access_log": False,
    "timeout_graceful_shutdown": 5,
}


def check_sender(request: Request, api_key_env: str | None) -> None:
    """Raise unless a request has the key or, without one, comes from a program on this machine."""
    if api_key_env is not None:
        authorization = request.headers.get("authorization", "").encode()
        # in constant time, so that the delay does not reveal how much of a guess is right
        if not hmac.compare_digest(authorization, f"Bearer {read_key(api_key_env)}".encode()):
            raise HTTPException(401, "wrong or missing key; send it as `Authorization: Bearer KEY`")
    elif "origin" in request.headers or not is_loopback(request.url.hostname or ""):
        # a page in this machine's browser, maybe under a name that its owner points to this machine
        raise HTTPException(403, "without --api-key-env, requests must come from a program on this machine")


def create_app(reward: ClassifierReward, api_key_env: str | None, max_request_bytes: int) -> Starlette:
    """Build the ASGI application: `POST /score` and `GET /health`."""
    one_at_a_time = asyncio.Lock()

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def score(request: Request) -> Response:
        check_sender(request, api_key_env)
        # 1. Read the request, up to a size.
        content = bytearray()
        try:
            async for chunk in request.stream():
                content += chunk
                if len(content) > max_request_bytes:
                    cause = f"the request is longer than {max_request_bytes} bytes; send fewer completions"
                    raise HTTPException(413, cause)
            prompts, completions = parse_batch(bytes(content))
        except ClientDisconnect:  # or too slow
            raise HTTPException(408, "the client has disconnected") from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        if len(prompts) > MAX_ROWS:
            cause = f"the request has {len(prompts)} completions; send at most {MAX_ROWS}: lower `batch_size`"
            raise HTTPException(413, cause)

        # 2. Score it, when the requests before it are done.
        async with one_at_a_time:
            if await request.is_disconnected():  # the client timed out, and has probably retried
                raise HTTPException(408, "the client has disconnected")
            try:
                scores: Any = await asyncio.to_thread(reward.score, ScoringBatch(prompts, completions, []))
                for failure in (entry for entry in scores if isinstance(entry, Exception)):
                    raise failure
            except Exception as error:  # the cause stays in the server's log
                logger.exception("Scoring failed")
                cause = f"scoring failed with {type(error).__name__}; see the server's log"
                raise HTTPException(500, cause) from None
        # JSON has no NaN; the run excludes a completion without a score
        return JSONResponse({"scores": [x if math.isfinite(x) else None for x in scores]})

    return Starlette(routes=[Route("/score", score, methods=["POST"]), Route("/health", health)])


def parse_batch(content: bytes) -> tuple[list[Any], list[Any]]:
    """Parse a request: its prompts and completions."""
    try:
        body: Any = json.loads(content)
        prompts, completions = body["prompts"], body["completions"]
        is_valid = len(prompts) == len(completions) > 0
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ValueError('the request must be JSON: {"prompts": [...], "completions": [...]}') from None
    entries = [*prompts, *completions]
    chats = all(entry and is_conversational({"prompt": entry}) for entry in entries)
    if not (is_valid and (chats or all(isinstance(entry, str) for entry in entries))):
        raise ValueError(
            "prompts and completions must have the same length, and be all text or all lists of messages with a role, "
            f"got {len(prompts)} prompts for {len(completions)} completions"
        )
    return prompts, completions
