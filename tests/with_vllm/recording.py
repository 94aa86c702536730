"""Answers of the real server, right and wrong, of which `tests/fake_vllm.py` makes a server for the
quick tests.

`python tests/with_vllm/recording.py` records them anew; `test_recording.py` checks that the server
still answers so.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from peft import LoraConfig, get_peft_model
from tiny import llama, tokenizer
from vllm_servers import ADAPTERS, served

RECORDED = Path(__file__).with_name("recorded.json")
CHANGING = {"created", "permission", "system_fingerprint"}
COMPLETION = {
    "prompt": [4, 5, 6],
    "n": 2,
    "seed": 7,
    "max_tokens": 3,
    "logprobs": 0,
    "return_token_ids": True,
}


def prepare(folder):
    """A base, with adapters that fit it, that are too large, and that are damaged."""
    model = llama(hidden_size=64, head_dim=32, max_position_embeddings=256)
    model.save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    for name, rank in (("fits", 4), ("damaged", 4), ("large", 20)):
        config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        get_peft_model(llama(hidden_size=64, head_dim=32), config).save_pretrained(folder / name)
    weights = folder / "damaged/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return str(folder / "base")


def same(value, folder):
    """What is the same in each recording: no times, no numbers of requests and tokens, no paths
    of this machine."""
    if isinstance(value, dict):
        named = {key: x for key, x in value.items() if key not in CHANGING}
        named |= {"id": ""} if str(named.get("id")).startswith("cmpl-") else {}
        return {
            key: [] if key in ("top_logprobs", "tokens") else same(x, folder)
            for key, x in named.items()
        }
    if isinstance(value, list):
        return [same(x, folder) for x in value]
    if isinstance(value, str) and value.startswith(" w"):
        return ""  # completion
    if isinstance(value, str):
        return value.replace(str(folder), "FOLDER")
    if type(value) is float:
        return 0.0
    return value


def answers(server, folder):
    """Status and body of every answer of a server that takes adapters."""
    calls = {
        "models": lambda: server.get("/v1/models"),
        "no such path": lambda: server.get("/v1/nothing"),
        "loaded": lambda: load(server, folder / "fits"),
        "loaded already": lambda: load(server, folder / "fits"),
        "not found": lambda: load(server, folder / "nowhere"),
        "rank too high": lambda: load(server, folder / "large"),
        "damaged": lambda: load(server, folder / "damaged"),
        "models with an adapter": lambda: server.get("/v1/models"),
        "completed": lambda: server.post("/v1/completions", COMPLETION | {"model": "fits"}),
        "not loaded": lambda: server.post("/v1/completions", COMPLETION | {"model": "nowhere"}),
        "too long": lambda: server.post(
            "/v1/completions", COMPLETION | {"model": "fits", "max_tokens": 400}
        ),
        "unloaded": lambda: server.post("/v1/unload_lora_adapter", {"lora_name": "fits"}),
        "unloaded already": lambda: server.post("/v1/unload_lora_adapter", {"lora_name": "fits"}),
    }
    return {name: shown(call(), folder) for name, call in calls.items()}


def load(server, directory):
    return server.post(
        "/v1/load_lora_adapter", {"lora_name": directory.name, "lora_path": str(directory)}
    )


def shown(answer, folder):
    is_json = "json" in answer.headers.get("content-type", "")
    return [answer.status_code, same(answer.json() if is_json else answer.text, folder)]


def answers_of_others(base, folder):
    """Answers of servers that were started without an option, need a key, or whose engine dies."""
    with served(base, folder / "log-1", ()) as server:
        found = {"without --enable-lora": shown(load(server, folder / "fits"), folder)}
    unset = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}
    key = {"VLLM_API_KEY": "tok-0123456789"}
    with served(base, folder / "log-2", ADAPTERS, **unset) as server:
        found["without VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = shown(
            load(server, folder / "fits"), folder
        )
        answer = []
        body = COMPLETION | {"model": base, "n": 64, "max_tokens": 250, "ignore_eos": True}
        request = threading.Thread(
            target=lambda: answer.append(server.post("/v1/completions", body))
        )
        request.start()
        time.sleep(0.5)
        children = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(server.process.pid)],
            capture_output=True,
            text=True,
        ).stdout
        engine = next(line.split()[0] for line in children.splitlines() if "EngineCore" in line)
        os.kill(int(engine), signal.SIGKILL)
        request.join()
        found["engine died"] = shown(answer[0], folder)
    with served(base, folder / "log-3", (), **key) as server:
        found["wrong key"] = shown(server.get("/v1/models"), folder)
    return found


def main():
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        base = prepare(folder)
        with served(base, folder / "log-0") as server:
            recorded = answers(server, folder)
        recorded |= answers_of_others(base, folder)
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
