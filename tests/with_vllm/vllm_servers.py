"""`vllm serve` on loopback: processes that are watched, and the address under which they answer."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2

VLLM = Path(sys.executable).with_name("vllm")
ADAPTERS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "16")
# on CPUs, vLLM 0.32 dies of seeded requests whose prompts it splits ("CPU Generator does not use
# offset")
CPU = ("--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill")
SAMPLING = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request compiles for seconds
    "OMP_NUM_THREADS": "1",
}


class Server:
    """A server with the processes that it starts, which `kill` ends together."""

    def __init__(self, base, log, arguments=ADAPTERS, **environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log)
        self.command = [VLLM, "serve", base, "--port", str(self.port), *CPU, *SAMPLING, *arguments]
        self.environment = (
            os.environ | ENVIRONMENT | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} | environment
        )
        self.environment.pop("PYTHONPATH", None)  # a server needs nothing of this package

    def start(self):
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def wait(self, bound=300):
        end = time.monotonic() + bound
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(
                    f"the server ended, or started for {bound} s:\n{self.log.read_text()[-3000:]}"
                )
            time.sleep(0.2)

    def answers(self):
        try:
            return self.get("/health").is_success
        except httpx2.TransportError:
            return False

    def get(self, path):
        return httpx2.get(self.url + path, trust_env=False)

    def post(self, path, body):
        return httpx2.post(self.url + path, json=body, timeout=60, trust_env=False)

    def adapters(self):
        return [model["id"] for model in self.get("/v1/models").json()["data"] if model["parent"]]

    def kill(self, number=signal.SIGKILL):
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


@contextmanager
def served(base, log, *arguments, **environment):
    """A server that answers."""
    server = Server(base, log, *arguments, **environment)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()
