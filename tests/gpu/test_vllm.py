"""A colocated vLLM on the GPU of the run."""

import pytest
import torch
from tiny import length_reward, llama, prompts, tokenizer

from trl_ppo_ext import PPOConfig, PPOTrainer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sleeps", [False, True])
def test_vllm_samples_the_policy_and_frees_memory_in_between(tmp_path, sleeps):
    pytest.importorskip("vllm", reason="needs vLLM")
    llama(hidden_size=256, head_dim=64).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    args = PPOConfig(
        str(tmp_path / "run"),
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        max_completion_length=8,
        max_steps=8,
        num_ppo_epochs=2,
        num_mini_batches=1,
        learning_rate=1e-2,
        use_vllm=True,
        vllm_gpu_memory_utilization=0.2,
        vllm_max_model_length=64,
        vllm_enable_sleep_mode=sleeps,
        generation_kwargs={"enforce_eager": True},
    )
    trainer = PPOTrainer(str(tmp_path / "base"), length_reward, args, prompts())
    free, total = torch.cuda.mem_get_info()
    trainer.train()
    differences = [
        entry["sampling/sampling_logp_difference/mean"]
        for entry in trainer.state.log_history
        if "sampling/sampling_logp_difference/mean" in entry
    ]
    # in bfloat16, before and after updates
    assert len(differences) == 4 and max(differences) < 0.05
    share = (total - free) / total
    assert share < 0.1 if sleeps else share > 0.15
