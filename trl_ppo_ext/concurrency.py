"""Calls of user code in threads, and coroutines in event loops of their own."""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Event, Thread
from typing import Any, TypeVar

T = TypeVar("T")
# errors of user code, which end neither the process nor, in a coroutine, its event loop
FAILURES = (Exception, SystemExit, asyncio.CancelledError)
# the loop that waits for user code; those that run it have the number of loops that wait for them
_WAITING = -1
_loops: dict[int, asyncio.AbstractEventLoop] = {}

if hasattr(os, "register_at_fork"):  # a fork has no threads
    os.register_at_fork(after_in_child=_loops.clear)


def started(awaitable: Awaitable[T], waits: bool = False) -> "Future[T]":
    """Start an awaitable in a loop of a thread: that of all users' coroutines, or of what
    `waits` for them."""

    async def run() -> T:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # after a timeout
                raise
            raise RuntimeError(repr(error)) from error

    running = None
    with suppress(RuntimeError):
        running = asyncio.get_running_loop()
    if waits:
        number = _WAITING
    else:
        number = next((n + 1 for n, loop in list(_loops.items()) if loop is running), 0)
    loop = _loops.get(number)
    if loop is None:
        loop = _loops.setdefault(number, new := asyncio.new_event_loop())
        if loop is new:  # no other thread was faster
            Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(run(), loop)


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """Start a call in a thread of its own, which the end of the process does not wait for."""
    called: Future[T] = Future()
    called.set_running_or_notify_cancel()

    def run() -> None:
        try:
            called.set_result(call())
        # a future of asyncio that waits for a StopIteration would never end
        except BaseException as error:
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            called.set_exception(error if is_plain else RuntimeError(repr(error)))

    Thread(target=copy_context().run, args=(run,), daemon=True).start()
    return called


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Result of a function: of a synchronous one in a thread, of a coroutine in the loop of user
    code."""
    call = partial(function, *args, **kwargs)
    if inspect.iscoroutinefunction(function):
        result = call()
    else:
        result = await asyncio.wrap_future(in_thread(call))
    if inspect.isawaitable(result):
        return await asyncio.wrap_future(started(result))
    return result


def leave_blocked_loops(timeout: float) -> None:
    """Let later coroutines run in a new event loop if a call that exceeded its timeout blocks
    the present one."""
    for number, loop in list(_loops.items()):
        if number == _WAITING:  # no code of users runs there, but episodes that must go on
            continue
        answered = Event()
        loop.call_soon_threadsafe(answered.set)
        if not answered.wait(min(1.0, timeout / 2)) and _loops.get(number) is loop:
            del _loops[number]
