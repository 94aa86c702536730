"""Answers of HTTP servers, of which no more is read than a request can need; imported only by
clients."""

from collections.abc import AsyncIterator

import httpx2

MOST_BYTES = 2**24  # of an answer, unless the request's extension of this name has another number
LIMIT = "most_bytes"


class AnswerError(ValueError):
    """Raised when an answer is longer than any that fits the request."""


class _Limited(httpx2.AsyncByteStream):
    """Body of an answer, up to a number of bytes."""

    def __init__(self, stream: httpx2.AsyncByteStream, limit: int):
        self.stream = stream
        self.limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self.stream:
            size += len(chunk)
            if size > self.limit:
                raise AnswerError(
                    f"The server's answer must have at most {self.limit} bytes, which all answers "
                    "to such a request have, got more; check the address."
                )
            yield chunk

    async def aclose(self) -> None:
        await self.stream.aclose()


async def limit_answer(response: httpx2.Response) -> None:
    """Hook of a client, which is called before a body is read."""
    limit = response.request.extensions.get(LIMIT, MOST_BYTES)
    response.stream = _Limited(response.stream, limit)  # type: ignore[arg-type]
