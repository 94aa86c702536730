"""Calls of user code: guarded, in threads, and coroutines in event loops of their own."""

import asyncio
import inspect
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import chdir, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from threading import Event, Thread
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import set_seed

CPU = torch.device("cpu")
T = TypeVar("T")
# errors of user code, which end neither the process nor, in a coroutine, its event loop
FAILURES = (Exception, SystemExit, asyncio.CancelledError)
_WAITING = -1  # the loop that waits for user code; those that run it have the number of loops that wait for them
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_SHARED: random.Random = random.random.__self__  # type: ignore[attr-defined]
_OWN = ContextVar("_OWN", default=_SHARED)  # generator from which the functions of `random` draw

if hasattr(os, "register_at_fork"):  # a fork has no threads
    os.register_at_fork(after_in_child=_loops.clear)


def started(awaitable: Awaitable[T], waits: bool = False) -> "Future[T]":
    """Start an awaitable in a loop of a thread: that of all users' coroutines, or of what `waits` for them."""

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
    number = _WAITING if waits else next((n + 1 for n, loop in [*_loops.items()] if loop is running), 0)
    if (loop := _loops.get(number)) is None:
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
        except BaseException as error:  # a future of asyncio that waits for a StopIteration would never end
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            called.set_exception(error if is_plain else RuntimeError(repr(error)))

    Thread(target=copy_context().run, args=(run,), daemon=True).start()
    return called


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Result of a function: of a synchronous one in a thread, of a coroutine in the loop of user code."""
    call = partial(function, *args, **kwargs)
    result = call() if inspect.iscoroutinefunction(function) else await asyncio.wrap_future(in_thread(call))
    return await asyncio.wrap_future(started(result)) if inspect.isawaitable(result) else result


def leave_blocked_loops(timeout: float) -> None:
    """Let later coroutines run in a new event loop if a call that exceeded its timeout blocks the present one."""
    for number, loop in [*_loops.items()]:
        answered = Event()
        loop.call_soon_threadsafe(answered.set)
        if not answered.wait(min(1.0, timeout / 2)) and _loops.get(number) is loop:
            del _loops[number]


def finished(future: "Future[T]", timeout: float | None = None) -> T:
    """Wait for a result. After the timeout a thread continues, because it cannot be ended."""
    if not wait([future], timeout).done and timeout is not None:
        future.cancel()
        leave_blocked_loops(timeout)
        raise TimeoutError(f"no result within reward_timeout={timeout:g} s")
    return future.result()


# ---- guards around users' code ----


def capture_random_state(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the random state of this moment, e.g. after code of the user."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    backend = None if device.type == "cpu" else torch.get_device_module(device)
    on_device = None if backend is None else backend.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if backend is not None:
            backend.set_rng_state(on_device)

    return restore


@contextmanager
def fixed_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all random numbers within a context; afterwards they continue as if none had been drawn."""
    restore = capture_random_state(device)
    try:
        set_seed(seed)
        yield
    finally:
        restore()


@contextmanager
def guarded(seed: int, device: torch.device) -> Iterator[None]:
    """Run code of the user: random numbers, default dtype, gradients and working directory stay those of the run."""
    # code that seeds would repeat the next rollouts; one that changes the directory would move the checkpoints
    dtype, functions = torch.get_default_dtype(), vars(random).copy()
    for name, function in functions.items():
        if getattr(function, "__self__", None) is _SHARED:  # environments seed it in threads
            setattr(random, name, lambda *args, _name=name, **kwargs: getattr(_OWN.get(), _name)(*args, **kwargs))
    try:
        with fixed_seed(seed, device), chdir("."), torch.enable_grad():
            yield
    finally:
        vars(random).update(functions)
        torch.set_default_dtype(dtype)


async def seeded(awaitable: Awaitable[T], seed: int) -> T:
    """Await something that draws from a generator of `random` of its own, also in threads."""
    _OWN.set(random.Random(seed))
    return await awaitable
