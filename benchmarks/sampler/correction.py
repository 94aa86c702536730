"""Gap to the known optimum with a sampler that is not the policy, an hour.

    python benchmarks/sampler/correction.py

As `benchmarks/learning/optimum.py`, but completions are sampled with noise in the base's weights,
as an engine with other kernels or another quantization would. Each mode weights the advantages by
π_old/μ in its own way.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "correction.json"
MODES = ["token_truncate", "sequence_truncate", "sequence_mask"]
ROWS = ["the policy samples", "none", *MODES]


def with_noise(trainer, noise, seed):
    """Let another model sample: the policy with relative Gaussian noise in the weights of its
    base."""
    import torch

    from trl_ppo_ext.episodes.transformers_generator import TransformersGenerator
    from trl_ppo_ext.ppo.guards import SamplerComparison
    from trl_ppo_ext.sequences import Sequences

    base = trainer.actor_critic.policy.get_base_model()
    weights = [weight for name, weight in base.named_parameters() if "lora_" not in name]
    rng = torch.Generator().manual_seed(2000 + seed)
    exact = [weight.detach().clone() for weight in weights]
    noisy = [weight * (1 + noise * torch.randn(weight.shape, generator=rng)) for weight in exact]

    class NoisyGenerator(TransformersGenerator):
        @torch.no_grad()
        def generate(self, prompts, rooms=None):
            torch._foreach_copy_(weights, noisy)
            completions = super().generate(prompts, rooms)
            sequences = Sequences.from_token_ids(
                prompts, completions, self.config.pad_token_id, weights[0].device
            )
            logprobs = self.actor_critic(sequences, self.config.temperature).logprobs.tolist()
            torch._foreach_copy_(weights, exact)
            self.sampled_logprobs = [row[: len(ids)] for row, ids in zip(logprobs, completions)]
            return completions

    roles = trainer.components
    args = trainer.args
    roles.player.generator = NoisyGenerator(
        trainer.actor_critic, roles.tokenizer, args, trainer.accelerator
    )
    trainer.components = replace(
        roles, sampler=SamplerComparison(args, torch.float32, roles.all_sum)
    )


def measure(job):
    """Train one row with one seed, on one thread."""
    name, seed, noise, max_steps = job
    sys.path.insert(0, str(ROOT / "tests" / "optimum"))
    from optimum import gap

    settings = {
        "vllm_importance_sampling_correction": name in MODES,
        "vllm_kwargs": {"max_logp_difference": 100.0},
    }
    settings["vllm_importance_sampling_mode"] = name if name in MODES else MODES[0]
    if name == ROWS[0]:
        prepare = None
    else:
        prepare = partial(with_noise, noise=noise, seed=seed)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(None):
        return gap(seed, directory, max_steps, prepare=prepare, **settings)["gap"]


def main():
    """Train every row with every seed and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--noise", type=float, default=0.1, help="relative to each weight")
    parser.add_argument("--max_steps", type=int, default=1400)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="trainings at a time, each on one thread"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    jobs = [(name, seed, args.noise, args.max_steps) for name in ROWS for seed in args.seeds]
    gaps = {name: [] for name in ROWS}
    with ProcessPoolExecutor(args.jobs, max_tasks_per_child=1) as pool:
        for (name, *_), gap in zip(jobs, pool.map(measure, jobs)):
            gaps[name].append(gap)
            measured = {
                "noise": args.noise,
                "max_steps": args.max_steps,
                "seeds": args.seeds,
                "gaps": gaps,
            }
            # keep finished measurements
            args.output.write_text(json.dumps(measured, indent=2) + "\n")
    print("| weights | gap, by seed | mean |", "|---|---|---|", sep="\n")
    for name, row in gaps.items():
        print(f"| {name} | {', '.join(f'{gap:.4f}' for gap in row)} | {statistics.mean(row):.4f} |")


if __name__ == "__main__":
    main()
