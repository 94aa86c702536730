"""Calls of user code: guarded, in threads, and coroutines in one event loop."""

import asyncio
import inspect
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import chdir, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache, partial
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import set_seed

CPU = torch.device("cpu")
T = TypeVar("T")
_ENDS_LOOP = (SystemExit, KeyboardInterrupt)  # asyncio raises them in the thread of its loop
_SHARED: random.Random = random.random.__self__  # type: ignore[attr-defined]
_OWN = ContextVar("_OWN", default=_SHARED)  # generator from which the functions of `random` draw


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

    Thread(target=copy_context().run, args=(run,), daemon=True).start()
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


# ---- what users' code may not change ----


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
