"""Completions per second with and without `overlap_rollouts`.

    python benchmarks/speed/overlap.py

SmolLM2-135M-Instruct learns positive reviews, with `vllm serve` on one core (the first of `--cores
0,1`) and the trainer on the other, as on two devices: for each seed a run without and one with
overlap. Prints completions per second of whole runs, and the mean reward of their last quarter.
Needs `make test-vllm`, and its environment. `--gpus 0,1` takes GPUs in place of cores, and `--base`
another model, rewarded for the length of its completions.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("", "recipes/smollm2", "tests/with_vllm")]
RESULTS = ROOT / "benchmarks" / "results" / "overlap.json"


def length(completion_ids: list, **kwargs: Any) -> list[float]:
    """A reward: the number of tokens."""
    return [float(len(ids)) for ids in completion_ids]


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train once, in this process."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from trl_ppo_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    if options.base:
        base = options.base
        reward = length
        texts = [f"w{row} w{row + 1}" for row in range(64)]
    else:
        from reviews import THINGS, openings, vader
        from smollm2 import base_model

        base = base_model()
        reward = vader
        texts = openings(THINGS)
    with tempfile.TemporaryDirectory() as directory:
        args = PPOConfig(
            directory,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=options.url,
            vllm_kwargs={"overlap_rollouts": options.overlaps},
            max_steps=options.rollouts * 2,
            num_mini_batches=2,
            per_device_train_batch_size=options.completions // 2,
            max_completion_length=options.tokens,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            seed=options.seed,
            model_init_kwargs={"dtype": options.dtype},
            bf16=options.dtype == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=not options.gpus,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"prompt": texts})
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = PPOTrainer(base, reward, args, data, peft_config=lora)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        logs = [x for x in trainer.state.log_history if "reward" in x]
    names = "time/generate time/forward time/update sampling/sampling_logp_difference/mean".split()
    means = {name: sum(x[name] for x in logs) / len(logs) for name in names}
    rewards = [x["reward"] for x in logs][-max(options.rollouts // 4, 1) :]
    rate = options.rollouts * options.completions / seconds
    return {"completions/s": rate, "reward": sum(rewards) / len(rewards), **means}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--gpus", help="in place of cores, e.g. 0,1")
    parser.add_argument("--base", help="another model, rewarded for the length of its completions")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--completions", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    for name, kind in {"url": str, "seed": int, "overlaps": int}.items():  # of one run
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.url:
        options.overlaps = bool(options.overlaps)
        print("RESULT" + json.dumps(train(options)))
        return
    from smollm2 import base_model
    from vllm_servers import ADAPTERS, Server

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # with its server
    results: dict[str, list] = {"with": [], "without": []}
    places = (options.gpus or options.cores).split(",")
    more = ["--dtype", options.dtype, "--max-model-len", "512"]
    if options.gpus:
        more += ["--no-enforce-eager", "--enable-chunked-prefill"]  # not as on a CPU
    commands: list[list[str]] = [
        [] if options.gpus else ["taskset", "-c", place] for place in places
    ]
    environments = [
        {"CUDA_VISIBLE_DEVICES": place, "TORCHDYNAMO_DISABLE": "0"} if options.gpus else {}
        for place in places
    ]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            options.base or base_model(), f"{folder}/log", (*ADAPTERS, *more), **environments[0]
        )
        server.command[:0] = commands[0]
        server.start()
        try:
            server.wait()
            for run in range(-1, 2 * options.seeds):  # the first, a short one, warms the server up
                seed = max(run, 0) // 2
                overlaps = run % 2
                own = {"url": server.url, "seed": seed, "overlaps": overlaps} | (
                    {"rollouts": 2} if run < 0 else {}
                )
                command = [*commands[1], sys.executable, __file__, *sys.argv[1:]]
                command += [f"--{name}={x}" for name, x in own.items()]
                environment = (
                    os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environments[1]
                )
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
                if not lines:
                    raise SystemExit(done.stderr[-3000:])
                result = json.loads(lines[0].removeprefix("RESULT"))
                if run >= 0:
                    results["with" if overlaps else "without"].append(result)
                    print(
                        f"seed {seed}, {'with' if overlaps else 'without'} overlap:",
                        result,
                        flush=True,
                    )
                    options.results.write_text(
                        json.dumps({"settings": vars(options), **results}, indent=1, default=str)
                        + "\n"
                    )
        finally:
            server.kill()
    rates = {
        name: sum(x["completions/s"] for x in runs) / len(runs) for name, runs in results.items()
    }
    print(f"with overlap {rates['with'] / rates['without']:.2f} times the completions per second")


if __name__ == "__main__":
    main()
