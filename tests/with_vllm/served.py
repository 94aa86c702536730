"""Trainers of tiny models that vLLM can serve: its kernels for CPUs take heads of 32 or more."""

import torch
from datasets import Dataset
from runs_of_tiny import plain_logprobs
from tiny import WORDS, config, length_reward, llama, prompts, tokenizer

from trl_ppo_ext import PPOTrainer

CONTEXT = 320
SHORT = [[4 + (row + k) % 28 for k in range(1 + row % 5)] for row in range(32)]
# longer than a block of vLLM's cache, which has 128 tokens on a CPU
LONG = [[4 + (row * k + k * k) % 28 for k in range(130 + 11 * row)] for row in range(8)]


def saved(model, directory):
    """Path of a model on disk, where vLLM reads it."""
    model.save_pretrained(directory)
    return str(directory)


def small_llama(**kwargs):
    return llama(**{"head_dim": 32, "max_position_embeddings": CONTEXT} | kwargs)


def long_prompts():
    """Every other prompt is longer than a block of the cache."""
    texts = [
        " ".join(WORDS[token - 4] for token in ids) for pair in zip(SHORT, LONG) for ids in pair
    ]
    return Dataset.from_dict({"prompt": texts})


def served_trainer(output_dir, base, reward=length_reward, dataset=None, **settings):
    of_trainer = settings.keys() & {"peft_config", "environment_factory", "quantization_config"}
    extra = {name: settings.pop(name) for name in of_trainer}
    args = config(output_dir, use_vllm=True, **settings)
    return PPOTrainer(
        base, reward, args, dataset or prompts(), processing_class=tokenizer(), **extra
    )


def move(run, seed, scale=0.1):
    """Move the policy away from its reference, in a direction of the seed; a scale of 0 is the
    reference itself."""
    torch.manual_seed(seed)
    for name, parameter in run.actor_critic.policy_parameters().items():
        if "lora_B" in name:
            parameter.data = scale * torch.randn_like(parameter)


@torch.no_grad()
def largest_difference(run, prompts):
    """Sample from the policy of this moment; return how far the sampler's log-probs are off, at
    most."""
    generator = run.components.player.generator
    policy = run.actor_critic.policy.eval()
    with generator.awake():
        completions = generator.generate(prompts)
    differences = [
        (plain_logprobs(policy, prompt, ids, run.args.temperature) - torch.tensor(logprobs))
        .abs()
        .max()
        .item()
        for prompt, ids, logprobs in zip(
            prompts, completions, generator.sampled_logprobs, strict=True
        )
    ]
    return max(differences)


def logged(run, name):
    """Values of a metric over the rollouts of a run."""
    return [log[name] for log in run.state.log_history if name in log]
