"""Detection of a vLLM engine that samples with the adapter of the rollout before.

    python benchmarks/sampler/old_adapter.py

SmolLM2-135M-Instruct in bfloat16 on reviews, with vLLM in the process: 50 rollouts as they should
be, which must raise nothing, then runs whose engine keeps its adapter from some rollout on. Needs
`make test-vllm`, and its environment.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes" / "smollm2")]
from datasets import Dataset
from peft import LoraConfig
from reviews import THINGS, openings, vader
from smollm2 import base_model

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.ppo.guards import SamplerError

ROLLOUTS = 50
KEPT_FROM = (2, 5, 10)


def run(rollouts: int, kept_from: int | None = None) -> str:
    """Train; return what ended the run. From a rollout on, the adapter of the one before stays."""
    with tempfile.TemporaryDirectory() as directory:
        args = PPOConfig(
            directory,
            generation_backend="vllm",
            max_steps=4 * rollouts,
            generation_batch_size=32,
            per_device_train_batch_size=8,
            max_completion_length=24,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            model_init_kwargs={"dtype": "bfloat16"},
            bf16=True,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"prompt": openings(THINGS)})
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = PPOTrainer(base_model(), vader, args, data, peft_config=lora)
        generator = trainer.components.player.generator
        numbers = iter(range(1, rollouts + 1))
        play = trainer.components.player.play

        def played(*given, **kwargs):
            if next(numbers) == kept_from:
                generator._load = lambda weights: None
            return play(*given, **kwargs)

        trainer.components.player.play = played
        try:
            trainer.train()
        except SamplerError as error:
            return f"ended at rollout {trainer.state.global_step // 4 + 1}: {error}"
        differences = [
            x["sampling/sampling_logp_difference/mean"]
            for x in trainer.state.log_history
            if "reward" in x
        ]
        return (
            f"{rollouts} rollouts, log-probs {min(differences):.3f} to {max(differences):.3f} nats "
            "off in the mean"
        )


if __name__ == "__main__":
    print("as it should be:", run(ROLLOUTS), flush=True)
    for number in KEPT_FROM:
        print(
            f"with the adapter of rollout {number - 1} from {number} on:",
            run(number + 3, number),
            flush=True,
        )
