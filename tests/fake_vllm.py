"""A server with the endpoints of vLLM and recorded answers of the real one; its completions are
random tokens."""

import asyncio
import json
import random
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

RECORDED = json.loads((Path(__file__).parent / "with_vllm/recorded.json").read_text())
VOCABULARY = range(4, 32)
LOGPROB = -3.25


class FakeVLLM:
    """`asked` has every request; `failures` the answers to the next ones, by path; a `key` is
    required if set.

    Completions take `delay` seconds; `most` is the largest number of them at a time.
    """

    def __init__(self, base):
        self.base = base
        self.key = None
        self.delay = 0.0
        self.longest = 10**6  # tokens of a completion
        self.running = 0
        self.most = 0
        self.adapters = {}
        self.asked = []
        self.failures = {}
        self.port = 0

    # ---- process ----

    def start(self):
        app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])
        settings = {"port": self.port, "log_level": "critical", "lifespan": "off"}
        self.server = uvicorn.Server(uvicorn.Config(app, **settings))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()
        self.adapters.clear()

    # ---- answers ----

    async def answer(self, request):
        path = request.url.path
        body = json.loads(await request.body() or "{}")
        self.asked.append((path, body, request.headers.get("authorization")))
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return self.recorded("wrong key")
        if self.failures.get(path):
            failure = self.failures[path].pop(0)
            if isinstance(failure, int):
                failure = PlainTextResponse("busy", failure)
            if isinstance(failure, str):
                return self.recorded(failure)
            return failure
        answers = {"/v1/models": self.models, "/v1/completions": self.completions}
        answers |= {"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload}
        self.running += body.get("n", 0)
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay if path == "/v1/completions" else 0)
        self.running -= body.get("n", 0)
        if path in answers:
            return answers[path](body)
        return self.recorded("no such path")

    def recorded(self, name, **names):
        """A recorded answer, in which names are replaced by those of this server."""
        status, body = RECORDED[name]
        text = json.dumps(body)
        for old, new in ({"FOLDER/base": self.base} | names).items():
            text = text.replace(old, str(new))
        body = json.loads(text)
        if isinstance(body, str):
            return PlainTextResponse(body, status)
        return JSONResponse(body, status)

    def models(self, body):
        entries = json.loads(self.recorded("models with an adapter").body)["data"]
        adapters = [entries[1] | {"id": name, "root": path} for name, path in self.adapters.items()]
        return JSONResponse({"object": "list", "data": [entries[0], *adapters]})

    def load(self, body):
        name = body["lora_name"]
        path = Path(body["lora_path"])
        if name in self.adapters:
            return self.recorded("loaded already", fits=name)
        if not (path / "adapter_model.safetensors").exists():
            return self.recorded("not found", nowhere=name)
        if json.loads((path / "adapter_config.json").read_text())["r"] > 16:
            return self.recorded("rank too high", large=name)
        self.adapters[name] = str(path)
        return self.recorded("loaded", fits=name)

    def unload(self, body):
        known = self.adapters.pop(body["lora_name"], None)
        return self.recorded("unloaded" if known else "unloaded already", fits=body["lora_name"])

    def completions(self, body):
        """Completions that depend on adapter, seed and prompt, as those of the real server do in
        float32."""
        if body["model"] not in self.adapters:
            return self.recorded("not loaded", nowhere=body["model"])
        if body["n"] > 1 and not body["temperature"]:
            return PlainTextResponse("n must be 1 when using greedy sampling", 400)
        answer = json.loads(self.recorded("completed").body)
        choices = []
        adapter = Path(self.adapters[body["model"]], "adapter_model.safetensors").read_bytes()
        draw = random.Random(f"{body['seed']} {body['prompt']}".encode() + adapter)
        for index in range(body["n"]):
            ids = draw.choices(VOCABULARY, k=draw.randint(1, min(body["max_tokens"], self.longest)))
            choice = answer["choices"][0] | {"index": index, "token_ids": ids}
            choice["logprobs"] = choice["logprobs"] | {"token_logprobs": [LOGPROB] * len(ids)}
            choices.insert(0, choice)  # choices are in no order
        return JSONResponse(answer | {"choices": choices})


@contextmanager
def serving(base):
    server = FakeVLLM(base)
    server.start()
    try:
        yield server
    finally:
        server.stop()
