"""Calls of user code in threads, and coroutines in one event loop."""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache, partial
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
_ENDS_LOOP = (SystemExit, KeyboardInterrupt)  # asyncio raises them in the thread of its loop


@cache
def _event_loop(running: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
    """Loop for all coroutines of a run, which may share a semaphore; another one than the loop that is running."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


if hasattr(os, "register_at_fork"):  # a fork has no threads
    os.register_at_fork(after_in_child=_event_loop.cache_clear)


def started(awaitable: Awaitable[T]) -> "Future[T]":
    """Start an awaitable in an event loop, which runs in a thread: e.g. a notebook already runs one."""

    async def run() -> T:
        try:
            return await awaitable
        except _ENDS_LOOP as error:
            raise RuntimeError(repr(error)) from error

    running = None
    with suppress(RuntimeError):
        running = asyncio.get_running_loop()
    return asyncio.run_coroutine_threadsafe(run(), _event_loop(running))


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """Start a call in a thread of its own, which the end of the process does not wait for."""
    called: Future[T] = Future()
    called.set_running_or_notify_cancel()

    def run() -> None:
        try:
            called.set_result(call())
        except BaseException as error:  # a future of asyncio that waits for a StopIteration would never end
            called.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    Thread(target=run, daemon=True).start()
    return called


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Result of a function: of a synchronous one in a thread, of a coroutine function in this event loop."""
    call = partial(function, *args, **kwargs)
    try:
        result = call() if inspect.iscoroutinefunction(function) else await asyncio.wrap_future(in_thread(call))
        return await result if inspect.isawaitable(result) else result
    except _ENDS_LOOP as error:
        raise RuntimeError(repr(error)) from error


def finished(future: "Future[T]", timeout: float | None = None) -> T:
    """Wait for a result. After the timeout a thread continues, because it cannot be ended."""
    if not wait([future], timeout).done:
        future.cancel()
        raise TimeoutError(f"no result within reward_timeout={timeout:g} s")
    return future.result()
