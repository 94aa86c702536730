"""Processes of a run as forks of this one, so that what takes seconds is imported once."""

import gc
import os
import signal
import socket
import sys
import time
import traceback

import torch


def in_a_fork(action, environment):
    """Run an action in a fork that exits as a script would; return its process ID."""
    gc.freeze()  # or the first collection in the fork would copy all that was imported
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= environment
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        torch.set_num_threads(1)
        action()
        code = 0
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def start(action, processes):
    """Start the processes of a run; return their IDs."""
    if processes == 1:
        return [in_a_fork(action, {})]
    # the forks hold it too, so that nobody else is given the port before they listen
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        return [
            in_a_fork(action, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(processes)
        ]


def finished(children, bound):
    """Exit codes of processes, negative for the signal that killed them; `None` for one that
    hangs."""
    codes = {}
    end = time.monotonic() + bound
    while len(codes) < len(children) and time.monotonic() < end:
        for child in set(children) - codes.keys():
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in set(children) - codes.keys():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [codes.get(child) for child in children]
