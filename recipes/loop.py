"""PPO from the parts of trl_ppo_ext, without a Trainer: `python recipes/loop.py MODEL` (a causal LM on disk or the Hub).

Left out, and in `PPOTrainer`: micro-batches, ranks, turns, checkpoints, metrics, schedules.
"""

import sys
from dataclasses import replace

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from trl_ppo_ext import ppo_math
from trl_ppo_ext.episodes.transformers import cut_at_stop
from trl_ppo_ext.modeling import ActorCritic
from trl_ppo_ext.modeling.critics import rewards_so_far
from trl_ppo_ext.ppo.advantages import in_units, of_critic
from trl_ppo_ext.ppo.batch_plan import BatchPlan
from trl_ppo_ext.ppo.rollouts import Rollout
from trl_ppo_ext.ppo.state import DECAY, RunState
from trl_ppo_ext.ppo.updates import ppo_loss, schedule
from trl_ppo_ext.sequences import Sequences


def ppo(model, tokenizer, prompts, reward, rollouts=10, length=24, learning_rate=5e-4, kl_coef=0.05, lam=0.95):
    """Train LoRA on rollouts of all prompts (texts), and return it; `reward` scores a list of completions."""
    # One frozen base: the policy with its adapter on, the reference with it off, the critic beside it.
    policy = get_peft_model(model.eval(), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    roles = ActorCritic(policy, normalize_values=True, side_length=length)
    trained = [list(roles.policy_parameters().values()), list(roles.critic_parameters().values())]
    rates = learning_rate, roles.value_head.learning_rate
    optimizer = torch.optim.AdamW([{"params": x, "lr": rate} for x, rate in zip(trained, rates)], weight_decay=0.0)
    plan = BatchPlan(micro_batch_size=len(prompts) // 2, num_mini_batches=2, num_ppo_epochs=4)
    eos, run = tokenizer.eos_token_id, RunState(kl_coef, entropy_coef=0.0)
    sampling = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=length, eos_token_id=eos, pad_token_id=eos)
    prompt_ids = tokenizer(prompts)["input_ids"]

    for number in range(rollouts):
        # 1. Sample a completion for each prompt, which ends at EOS.
        torch.manual_seed(number)
        inputs = Sequences.from_token_ids(prompt_ids, [[]] * len(prompts), eos, roles.device)
        ids = roles.sample(inputs.input_ids, inputs.attention_mask, sampling)[:, inputs.input_ids.shape[1] :]
        completions = [cut_at_stop(row, frozenset([eos])) for row in ids.tolist()]
        sequences = Sequences.from_token_ids(prompt_ids, completions, eos, roles.device)
        mask = sequences.completion_mask

        # 2. Score the completions; the scores enter at their last tokens.
        scores = torch.tensor(reward(tokenizer.batch_decode(completions, skip_special_tokens=True)))
        at_last = torch.zeros(mask.shape).scatter(1, sequences.completion_lengths[:, None] - 1, scores[:, None])

        # 3. Log-probs under policy and reference, and the critic's outputs. It reads the rewards so far.
        earned = rewards_so_far(at_last, mask, run.rewards.units, is_known=run.rewards.weight > 0)
        sequences = replace(sequences, earned=earned)
        with torch.no_grad():
            old, reference = roles(sequences), roles.reference_logprobs(sequences)

        # 4. Rewards per token: the KL penalty at every token, the score at the last one.
        kl = ppo_math.kl_estimate(old.logprobs, reference, "k1")
        rewards = ppo_math.token_rewards(at_last, scores, kl, mask, run.kl_coef)

        # 5. Advantages and the critic's targets, in units of the returns of recent rollouts.
        result, returns = of_critic(rewards, old.values, mask, run.returns, is_normalized=True, lam=lam, lam_critic=lam)
        run = run._replace(returns=returns, rewards=run.rewards.add(at_last, mask, torch.clone, DECAY))
        result = in_units(result, returns, mask)
        rollout = Rollout(sequences, mask, old.logprobs, result.advantages, reference, old.values, result.targets)

        # 6. Epochs of minibatches: a token's probability may change by a factor of 2 before its gradient is clipped.
        for (rows,) in schedule(sequences.lengths, plan):
            part = rollout.rows(rows)
            loss, _ = ppo_loss(roles(part.sequences), part, cliprange=(0.5, 1.0), dual_clip=2.0, vf_coef=0.5)
            optimizer.zero_grad()
            loss.backward()
            for parameters in trained:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        print(f"rollout {number + 1}  reward {scores.mean():.3f}  KL {kl.sum(1).mean():.3f} nats")
    return policy


if __name__ == "__main__":
    openings = [f"The {thing} was" for thing in ("hotel", "film", "food", "book", "room", "staff", "game", "view")] * 8
    ppo(
        AutoModelForCausalLM.from_pretrained(sys.argv[1]),
        AutoTokenizer.from_pretrained(sys.argv[1]),
        openings,
        reward=lambda texts: [float(text.count("!")) for text in texts],
    )
