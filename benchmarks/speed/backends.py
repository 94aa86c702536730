"""Tokens per second of each sampling backend, and milliseconds of an adapter's swap.

    python benchmarks/speed/backends.py

SmolLM2-135M-Instruct in bfloat16, LoRA of rank 16 on all linear layers, and 64 prompts of 17 tokens
with up to 64 new tokens: once without other ends than its own, once with every 24th token as an
end. One core; the best of three. Needs vLLM for its row: `make test-vllm` installs it into
.venv-vllm.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "backends.json"
PROMPTS = 64
PROMPT = 17
NEW = 64
KINDS = "of one length", "of many lengths"


def measure(
    backend: str,
    base: str,
    vocabulary: int,
    kinds: tuple[str, ...] = KINDS,
    quantization: Any = None,
    **fields: Any,
) -> dict[str, float]:
    """Sample with one backend."""
    import torch

    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from tiny import config, length_reward, prompts, tokenizer

    from trl_ppo_ext import PPOTrainer

    words = [f"w{number}" for number in range(vocabulary - 4)]  # and four special tokens
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "generation_backend": backend,
            "max_completion_length": NEW,
            "use_cpu": not torch.cuda.is_available(),
        }
        for name in kinds:
            args = config(f"{directory}/{name}", **settings | fields)
            # a completion has 3/8 of the tokens in the mean, if all tokens are as likely
            if name != KINDS[0]:
                args.stop_token_ids = list(
                    range(4, vocabulary, max(3 * args.max_completion_length // 8, 1))
                )
            trainer = PPOTrainer(
                base,
                length_reward,
                args,
                prompts(),
                processing_class=tokenizer(words),
                quantization_config=quantization,
            )
            generator = trainer.components.player.generator
            ids = [
                [4 + (31 * row + k) % (vocabulary - 4) for k in range(PROMPT)]
                for row in range(PROMPTS)
            ]
            rates = []
            swaps = []
            for _ in range(4):  # the first warms up
                for x in trainer.actor_critic.policy_parameters().values():
                    x.data += 1e-4  # an adapter that has not moved is not loaded
                start = time.perf_counter()
                with generator.awake():
                    loaded = time.perf_counter()
                    completions = generator.generate(ids)
                    end = time.perf_counter()
                rates.append(sum(map(len, completions)) / (end - loaded))
                swaps.append(1000 * (loaded - start))
            results[f"tokens/s {name}"] = round(max(rates[1:]))
            results["swap ms"] = round(min(swaps[1:]), 1) if backend == "vllm" else 0.0
    return results


def main() -> None:
    """Measure each backend in a process of its own."""
    if len(sys.argv) > 1:
        import torch

        sys.path.append(str(ROOT / "recipes" / "smollm2"))
        from smollm2 import base_model

        torch.set_num_threads(1)
        settings: dict = {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}
        print("RESULT" + json.dumps(measure(sys.argv[1], base_model(), 49152, **settings)))
        return
    results = {}
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    for backend in ("transformers", *(["vllm"] if find_spec("vllm") else [])):
        run = subprocess.run(
            [sys.executable, __file__, backend], capture_output=True, text=True, env=alone
        )
        lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
        results[backend] = (
            json.loads(lines[0].removeprefix("RESULT")) if lines else run.stderr[-500:]
        )
        print(backend, results[backend], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
