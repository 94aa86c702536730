"""Episodes per second on a server, against turns in lockstep.

    python benchmarks/speed/episodes.py --simulated
    python benchmarks/speed/episodes.py --base runs/SmolLM2-135M-Instruct --tokens 24

Episodes of 5 to 15 turns, whose lengths are lognormal, with tools that sleep, are played twice:
each by itself, as with `vllm_mode="server"`, and with a sampler that waits for all unfinished
episodes. The simulated server takes 10 ms per token of a request, however many there are; it needs
the environment of `make test`.

Without `--simulated`, `vllm serve` samples in bfloat16 on a CPU, from a tiny Llama or from `--base`;
that needs `make test-vllm`, and its environment. The adapter is one of `o_proj`: on a CPU, vLLM
copies the weights of an adapter for each token. The server has a core of its own, if there are two.
Only prints.
"""

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("", "tests", "tests/with_vllm")]

from trl_ppo_ext.concurrency import called
from trl_ppo_ext.episodes import turns
from trl_ppo_ext.episodes.engine import Request
from trl_ppo_ext.episodes.record import Record
from trl_ppo_ext.episodes.turns import GroupedSampler, TurnSampler
from trl_ppo_ext.episodes.vllm_generator import RequestingSampler
from trl_ppo_ext.episodes.vllm_server import VLLMServer

ADAPTER = "bench-1"
SECONDS_PER_TOKEN = 0.01  # of the simulated server
# sigma of the lengths, and share of a mean turn's time that a tool takes in the mean
CASES = ["0.5,0", "1,0", "1,0.5"]
LORA = {"r": 8, "target_modules": ["o_proj"]}
STEPS = 48  # that a step's time is the mean of


class Lockstep(GroupedSampler):
    """Samples the turns of all unfinished episodes together, on a server."""

    def __init__(self, server: VLLMServer):
        self.server = server
        self.sampled_logprobs = None
        super().__init__(self)  # type: ignore[arg-type]

    def conversation(self) -> Callable:
        """Function that samples turns."""

        def sample(prompts: list, rooms: list, rows: list | None) -> list[list[int]]:
            requests = [
                Request(ids, 1, seed, room) for seed, (ids, room) in enumerate(zip(prompts, rooms))
            ]
            return [x[0].ids for x in self.server.sample(ADAPTER, requests)]

        return sample


def lognormal(draw: random.Random, mean: float, sigma: float) -> float:
    return draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)


async def episode(
    sampler: TurnSampler, row: int, sigma: float, tool: float, tokens: int, seed: int
) -> None:
    """Sample turns, between which a tool sleeps."""
    draw = random.Random(f"{seed} {row}")
    ids = [4 + (row * k) % 28 for k in range(8)]
    number = draw.randint(5, 15)
    for turn in range(number):
        length = min(max(1, round(lognormal(draw, tokens, sigma))), 8 * tokens)
        sampled = await sampler.sample(row, turn, ids, length)
        ids = ids + sampled.ids[-4:] + [5]  # so that contexts stay short
        seconds = lognormal(draw, tool, sigma) if tool else 0.0
        if turn < number - 1:
            await called(time.sleep, seconds)


def rate(sampler: TurnSampler, options: argparse.Namespace, *case: Any) -> float:
    """Episodes per second of a rollout."""
    parts = [episode(sampler, row, *case) for row in range(options.episodes)]
    start = time.perf_counter()
    sampler.play(parts, Record(None), lambda number: nullcontext())
    return options.episodes / (time.perf_counter() - start)


@contextmanager
def simulated(base: str, log: str) -> Iterator[str]:
    """Address of a server that samples every request as if it were the only one."""
    from fake_vllm import FakeVLLM

    class Simulated(FakeVLLM):
        async def answer(self, request: Any) -> Any:
            body = json.loads(await request.body() or "{}")
            await asyncio.sleep(SECONDS_PER_TOKEN * body.get("max_tokens", 0))
            return await super().answer(request)

    server = Simulated(base)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


@contextmanager
def real(base: str, log: str) -> Iterator[str]:
    """Address of `vllm serve` on the first core, while this process has the others."""
    from vllm_servers import served

    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [first])  # processes that it starts inherit it
    lora = ("--enable-lora", "--max-lora-rank", str(LORA["r"]), "--lora-target-modules", "o_proj")
    limits = ("--dtype", "bfloat16", "--max-num-seqs", "256", "--max-model-len", "2048")
    with served(base, log, (*lora, *limits)) as server:
        os.sched_setaffinity(0, others or [first])
        yield server.url


def save_base(folder: str) -> str:
    """Path of a tiny Llama, which is saved there."""
    from served import saved, small_llama
    from tiny import tokenizer

    base = saved(small_llama(max_position_embeddings=4096), f"{folder}/base")
    tokenizer().save_pretrained(base)  # a server reads one
    return base


def save_adapter(base: str, folder: Path) -> None:
    """Save an adapter of a base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(**LORA, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


def seconds_of_step(server: VLLMServer, requests: int) -> float:
    """Seconds of a step of the server with so many requests."""
    start = time.perf_counter()
    server.sample(ADAPTER, [Request([4, 5, 6], 1, row, STEPS) for row in range(requests)])
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulated", action="store_true", help="no vLLM")
    parser.add_argument("--base", help="folder of a model, instead of a tiny Llama")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="of a turn, in the mean")
    parser.add_argument("--cases", nargs="+", default=CASES, help="sigma, and share of tools")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    turns.QUICK = math.inf  # lockstep waits for all
    with tempfile.TemporaryDirectory() as folder:
        base = options.base or save_base(folder)
        save_adapter(base, Path(folder, ADAPTER))
        with (simulated if options.simulated else real)(base, f"{folder}/log") as url:
            settings = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True}
            server = VLLMServer(url, 240.0, base, settings, rank=LORA["r"])
            server.load(ADAPTER, Path(folder, ADAPTER))
            seconds_of_step(server, options.episodes)  # warms it up
            of_one, of_all = (seconds_of_step(server, number) for number in (1, options.episodes))
            print(
                f"a step: {1000 * of_one:.0f} ms with one request, {1000 * of_all:.0f} ms with "
                f"{options.episodes}"
            )
            seconds = SECONDS_PER_TOKEN if options.simulated else of_all
            mean_seconds = seconds * options.tokens
            for numbers in options.cases:
                sigma, share = map(float, numbers.split(","))
                tool = share * mean_seconds
                print(f"sigma {sigma}, tools of {tool:.2f} s:", flush=True)
                for seed in range(options.seeds):
                    case = (sigma, tool, options.tokens, seed)
                    alone = rate(RequestingSampler(server, ADAPTER), options, *case)
                    lockstep = rate(Lockstep(server), options, *case)
                    print(
                        f"  seed {seed}: {alone:.2f} episodes per second, {lockstep:.2f} in "
                        f"lockstep: {alone / lockstep:.2f} times",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
