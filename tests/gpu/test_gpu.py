"""What only a GPU can show."""

import pytest
import torch
from tiny import length_reward, llama, prompts, tokenizer
from transformers import BitsAndBytesConfig

from trl_ppo_ext import PPOConfig, PPOTrainer

pytestmark = pytest.mark.gpu


def train(path, output_dir, quantization_config=None, **kwargs):
    args = PPOConfig(
        str(output_dir),
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        max_completion_length=8,
        per_device_train_batch_size=4,
        num_mini_batches=1,
        num_ppo_epochs=2,
        kl_coef=0.05,
        max_steps=2,
        **kwargs,
    )
    trainer = PPOTrainer(
        path, length_reward, args, prompts(), quantization_config=quantization_config
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("nf4", [False, True])
def test_first_ratio_is_one_and_kl_zero_bit_for_bit_in_bf16(tmp_path, nf4):
    llama(hidden_size=64).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    if nf4:
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    else:
        quantization = None
    trainer = train(str(tmp_path / "base"), tmp_path / "run", quantization, bf16=True)
    log = trainer.state.log_history[0]
    assert log["kl"] == 0 and log["ratio/mean"] == log["ratio/max"] == 1
    assert {p.dtype for p in trainer.actor_critic.parameters() if p.requires_grad} == {
        torch.float32
    }


def test_four_bit_reward_model_scores_on_the_gpu(tmp_path):
    llama(hidden_size=64).save_pretrained(tmp_path / "base")
    llama(hidden_size=64, classifier=True).save_pretrained(tmp_path / "reward")
    for name in ("base", "reward"):
        tokenizer().save_pretrained(tmp_path / name)
    args = PPOConfig(
        str(tmp_path), report_to="none", max_completion_length=8, max_steps=1, num_ppo_epochs=1
    )
    trainer = PPOTrainer(str(tmp_path / "base"), str(tmp_path / "reward"), args, prompts())
    trainer.train()
    scorer = trainer.reward_funcs[0]
    assert scorer.is_loaded_in_4bit
    assert next(scorer.parameters()).is_cuda
