"""Tokens per second of each sampling backend, and milliseconds of an adapter's swap: `python benchmarks/backends.py`.

SmolLM2-135M-Instruct in bfloat16, LoRA of rank 16 on all linear layers, and 64 openings of reviews with up to 64 new
tokens: once all of 64, once with stops, so that half are shorter than 24. One core; the best of three. Needs vLLM for
its row: `make test-vllm` installs it into .venv-vllm.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "backends.json"
PROMPTS, NEW, STOPS = 64, 64, 36  # every 36th token of the vocabulary ends a completion


def measure(backend: str) -> dict[str, float]:
    """Sample with one backend."""
    import torch
    from datasets import Dataset

    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "recipes" / "smollm2")]
    from reviews import THINGS, openings
    from smollm2 import base_model

    from trl_ppo_ext import PPOConfig, PPOTrainer
    from trl_ppo_ext.rewards import no_reward

    torch.set_num_threads(1)
    results: dict[str, float] = {}
    data = Dataset.from_list([{"prompt": prompt} for prompt in openings(THINGS)[:PROMPTS]])
    settings = {
        "generation_backend": backend,
        "max_completion_length": NEW,
        "model_init_kwargs": {"dtype": "bfloat16"},
    }
    settings |= {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}, "use_cpu": not torch.cuda.is_available()}
    with tempfile.TemporaryDirectory() as directory:
        for name, stops in (("of one length", []), ("of many lengths", [*range(0, 49152, STOPS)])):
            args = PPOConfig(f"{directory}/{name}", stop_token_ids=stops or None, **settings)
            trainer = PPOTrainer(base_model(), no_reward, args, data)
            generator = trainer.roles.player.generator
            ids = trainer.processing_class(data["prompt"][:])["input_ids"]
            rates, swaps = [], []
            for _ in range(4):  # the first warms up
                for x in trainer.actor_critic.policy_parameters().values():
                    x.data += 1e-6  # an adapter that has not moved is not loaded again
                start = time.perf_counter()
                with generator.awake():
                    loaded = time.perf_counter()
                    completions = generator.generate(ids)
                    end = time.perf_counter()
                rates.append(sum(map(len, completions)) / (end - loaded))
                swaps.append(1000 * (loaded - start))
            lengths = sorted(map(len, completions))
            print(name, "lengths:", lengths[0], lengths[PROMPTS // 2], lengths[-1], file=sys.stderr)
            results[f"tokens/s {name}"] = round(max(rates[1:]))
            results["swap ms"] = round(min(swaps[1:]), 1)
    return results


def main() -> None:
    """Measure each backend in a process of its own."""
    if len(sys.argv) > 1:
        print("RESULT" + json.dumps(measure(sys.argv[1])))
        return
    results = {}
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    for backend in ("transformers", *(["vllm"] if find_spec("vllm") else [])):
        run = subprocess.run([sys.executable, __file__, backend], capture_output=True, text=True, env=alone)
        lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
        results[backend] = json.loads(lines[0].removeprefix("RESULT")) if lines else run.stderr[-500:]
        print(backend, results[backend], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
