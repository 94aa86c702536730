"""PPO steps of miniVERL 0.16.0: python benchmarks/peers/miniverl_ppo.py SHAPE DTYPE STEPS.

Model, tokenizer and reward model are written to a temporary folder, because miniVERL loads all of
them by path. Policy, critic and reference are three copies of the base: the policy with LoRA, the critic
with LoRA and a value head, the reference frozen. The reward model is in float32, which miniVERL
chooses for CPUs. Every completion has the shape's length: the end-of-sequence token is disabled.
"""

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from common import EPOCHS, LORA, model, prompts, report, resident, shape_of, tokenizer
from miniverl.algorithms.contract import ADVANTAGE_IMPLEMENTATION_VERSION
from miniverl.config.models import RunConfig
from miniverl.training.trainer import OPDTrainer

BASELINE = resident()
REVISION = "0" * 40  # a revision is required, and has no effect on a local path


def write_inputs(folder: Path, shape, weights: torch.dtype) -> None:
    """Save the policy, the reward model, the tokenizer and the prompts."""
    words = tokenizer(shape)
    words.model_input_names = ["input_ids", "attention_mask"]
    for name in ("policy", "reward"):
        is_reward = name == "reward"
        model(shape, weights, classifier=is_reward, seed=int(is_reward)).save_pretrained(
            folder / name
        )
        words.save_pretrained(folder / name)
    rows = [
        {
            "prompt": text,
            "data_source": "words",
            "reward_model": {"style": "rule", "ground_truth": "w0"},  # required, not used
        }
        for text in prompts(shape, 4 * shape.batch)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")


def config_of(folder: Path, shape, dtype: str, steps: int) -> RunConfig:
    """Settings of benchmarks/peers/ours.py, in miniVERL's names."""
    base = {
        "model_id": str(folder / "policy"),
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[dtype],
        "attn_implementation": "sdpa",
    }
    lora = {"r": LORA["r"], "alpha": LORA["lora_alpha"], "target_modules": ["all-linear"]}
    return RunConfig.from_mapping(
        {
            "run": {
                "name": "step",
                "mode": "rl",
                "output_dir": str(folder / "runs"),
                "deterministic": False,
            },
            "models": {
                "backend": "hf",
                "device": "auto",
                "student": base | {"lora": lora},
                "reference": base | {"frozen_base": True},
            },
            "source": {
                "kind": "verl_parquet",
                "train_files": [str(folder / "prompts.parquet")],
                "allow_plain_string_prompts": True,
                "use_task_rewards": True,
                "max_prompt_length": shape.prompt,
                "max_response_length": shape.response,
            },
            "rollout": {
                "backend": "hf_cached",
                "prompt_batch_size": shape.batch,
                "max_padded_tokens": shape.batch * (shape.prompt + shape.response),
                "max_new_tokens_per_turn": shape.response,
                "max_total_tokens": max(16, shape.prompt + shape.response),
                "temperature": 1.0,
                "record_logprobs": True,
            },
            "loss": {"mode": "verl_rl_policy", "aggregation": "token-mean"},
            "train": {
                "cycles": steps,
                "rollouts_per_cycle": shape.batch,
                "gradient_accumulation_steps": shape.batch,
                "trajectory_batch_size": "auto",
            },
            "memory": {"strategy": "resident"},
            "eval": {"enabled": False},
            "report": {"enabled": False},
            "reward": {
                "enabled": True,
                "provider": "hf_sequence_classifier",
                "model": {
                    "model_id": str(folder / "reward"),
                    "revision": REVISION,
                    "max_length": 2 * (shape.prompt + shape.response),
                    "batch_size": shape.batch,
                    "offload_between_phases": False,
                },
            },
            "algorithm": {
                "name": "ppo",
                "implementation_version": ADVANTAGE_IMPLEMENTATION_VERSION,
                "kl_coef": 0.05,
                "actor_ppo_epochs": EPOCHS,
            },
            "critic": {"enabled": True, "ppo_epochs": EPOCHS},
        }
    )


def measure(name: str, dtype: str, steps: int) -> None:
    shape = shape_of(name)
    weights = torch.bfloat16 if dtype == "bf16" else torch.float32
    folder = Path(tempfile.mkdtemp())
    write_inputs(folder, shape, weights)
    trainer = OPDTrainer.from_config(config_of(folder, shape, dtype, steps), local_files_only=True)
    trainer.tokenizer.eos_token_id = -1  # completions of equal length, as in the other programs
    seconds = []
    phases = []
    lengths = set()
    ticks = []
    run_cycle = trainer._run_cycle
    build_samples = trainer._build_rl_samples
    optimize_critic = trainer._optimize_critic

    def build_timed(trajectories):
        ticks.append(time.perf_counter())  # sampling, values, rewards, reference are done
        lengths.update(sum(each.model_generated_mask) for each in trajectories)
        return build_samples(trajectories)

    def optimize_critic_timed(samples):
        records = optimize_critic(samples)
        ticks.append(time.perf_counter())
        return records

    def run_timed():
        ticks[:] = [time.perf_counter()]
        records = run_cycle()
        ticks.append(time.perf_counter())
        seconds.append(ticks[-1] - ticks[0])
        phases.append([after - before for before, after in pairwise(ticks)])
        return records

    trainer._build_rl_samples = build_timed
    trainer._optimize_critic = optimize_critic_timed
    trainer._run_cycle = run_timed
    trainer.train()
    means = torch.tensor(phases[1:] or phases).mean(0).tolist()
    report(
        seconds,
        BASELINE,
        warmup=min(1, len(seconds) - 1),
        phases=dict(zip(("collect", "critic", "policy"), means, strict=True)),
        completion_lengths=sorted(lengths),
    )


if __name__ == "__main__":
    measure(*sys.argv[1:3], int(sys.argv[3]))
