"""The server side of `RemoteReward`: `trl-ppo serve-reward MODEL` scores with a sequence classifier over HTTP.

Leaves out TLS and several models; put a proxy in front, or start several. Nothing heavy is imported before it is
needed, so that `--help` comes at once.
"""

import argparse
import asyncio
import hmac
import json
import logging
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    from . import Reward, ScoringBatch

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8 * 2**20
BODY_TIMEOUT = 30.0  # seconds for a request to arrive; else a client that sends nothing holds its connection for ever
MAX_CONNECTIONS = 64  # what is read at most at a time is this times the size of a request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trl-ppo serve-reward`."""
    parser.add_argument("model", metavar="MODEL", help="id or path of a sequence classifier with one label")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a key")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on; 0 takes a free one")
    parser.add_argument("--quantization", choices=("nf4", "fp4", "int8", "none"), default="nf4", help="of the weights")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="compute dtype; auto is bfloat16 on a GPU that has it, else float32",
    )
    parser.add_argument("--device", default="auto", help="such as cuda:0 or cpu; auto is a GPU if there is one")
    parser.add_argument("--batch-size", type=int, default=16, help="completions in one forward")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key clients must send")
    parser.add_argument(
        "--max-request-bytes", type=int, default=MAX_REQUEST_BYTES, help="longest request that is read"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model run code of its own")


def main(args: argparse.Namespace) -> None:
    """Load the model and serve it until the process is stopped."""
    try:
        import uvicorn
    except ImportError:
        raise ValueError(
            "uvicorn and starlette are not installed; run pip install '.[serve]' in the clone that trl_ppo_ext was "
            "installed from, or pip install uvicorn starlette."
        ) from None
    from .http import is_loopback, read_key

    for name in ("batch_size", "max_request_bytes"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")
    if args.api_key_env is not None:
        read_key(args.api_key_env)
    elif not is_loopback(args.host):
        raise ValueError(
            f"--host {args.host} lets other machines in; give --api-key-env NAME with the variable that holds a key, "
            "or leave --host 127.0.0.1."
        )
    app = create_app(load_reward(args), args.api_key_env, args.max_request_bytes)
    uvicorn.run(
        app,
        host=args.host,
        port=args.port,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=5,
    )


def load_reward(args: argparse.Namespace) -> "Reward":
    """Load the classifier as the trainer would."""
    import torch

    from . import ClassifierReward, load_classifier

    gpu = torch.cuda.is_available()
    device = args.device if args.device != "auto" else "cuda" if gpu else "cpu"
    fits = device != "cpu" and gpu and torch.cuda.is_bf16_supported()
    dtype = getattr(torch, args.dtype) if args.dtype != "auto" else torch.bfloat16 if fits else torch.float32
    model = load_classifier(args.model, dtype, args.quantization, device, args.trust_remote_code)
    return ClassifierReward(model, batch_size=args.batch_size)


def create_app(
    reward: "Reward", api_key_env: str | None = None, max_request_bytes: int = MAX_REQUEST_BYTES
) -> "Starlette":
    """The ASGI application: `POST /score` and `GET /health`, both in JSON."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    one_at_a_time = asyncio.Lock()

    async def health(_: "Request") -> "JSONResponse":
        return JSONResponse({"status": "ok"})

    async def score(request: "Request") -> "JSONResponse":
        if api_key_env is not None and not _has_key(request, api_key_env):
            raise HTTPException(401, "wrong or missing key; send it as `Authorization: Bearer KEY`")
        batch = _scoring_batch(await _body(request, max_request_bytes))
        async with one_at_a_time:
            if await request.is_disconnected():  # gave up while it waited, and has probably asked again
                raise HTTPException(408, "the client has gone")
            return JSONResponse({"scores": await asyncio.to_thread(_scores, reward, batch)})

    async def error(_: "Request", raised: Exception) -> "JSONResponse":
        raised = cast(HTTPException, raised)  # it is registered for these
        headers = {"WWW-Authenticate": "Bearer"} if raised.status_code == 401 else None
        return JSONResponse({"error": raised.detail}, raised.status_code, headers)

    return Starlette(
        routes=[Route("/score", score, methods=["POST"]), Route("/health", health, methods=["GET"])],
        exception_handlers={HTTPException: error},
    )


def _has_key(request: "Request", api_key_env: str) -> bool:
    from .http import read_key

    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # in constant time, so that answers do not tell how much of a guess is right
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), read_key(api_key_env).encode())


async def _body(request: "Request", limit: int) -> bytes:
    """Read a request of bounded size in bounded time."""
    from starlette.exceptions import HTTPException

    too_long = HTTPException(413, f"the request is longer than {limit} bytes; send fewer completions at a time")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise too_long
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limit:
                    raise too_long
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_TIMEOUT:g} s") from None
    return bytes(content)


def _scoring_batch(content: bytes) -> "ScoringBatch":
    """Check a request: prompts and completions in equal number, all of them text or all of them messages."""
    from starlette.exceptions import HTTPException

    from . import ScoringBatch

    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is not JSON") from None
    prompts, completions = (body.get(key) if isinstance(body, dict) else None for key in ("prompts", "completions"))
    if not isinstance(prompts, list) or not isinstance(completions, list):
        raise HTTPException(400, 'the request must be {"prompts": [...], "completions": [...]}')
    if len(prompts) != len(completions):
        raise HTTPException(400, f"{len(prompts)} prompts for {len(completions)} completions; send as many of each")
    kinds = {_kind(entry) for entry in prompts + completions}
    if len(kinds) > 1 or None in kinds:
        raise HTTPException(
            400, "prompts and completions must all be text, or all be lists of messages with a role and content"
        )
    return ScoringBatch(prompts, completions, [], {})


def _kind(entry: Any) -> str | None:
    if isinstance(entry, str):
        return "text"
    messages = isinstance(entry, list) and entry and all(isinstance(m, dict) and "role" in m for m in entry)
    return "messages" if messages else None


def _scores(reward: "Reward", batch: "ScoringBatch") -> list[float | None]:
    """Score, and check what came out; the cause of an error stays in the server's log."""
    from starlette.exceptions import HTTPException

    from . import read_scores

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
