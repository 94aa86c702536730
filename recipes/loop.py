"""PPO from the parts of trl_ppo_ext, without a Trainer: `python recipes/loop.py MODEL`.

Micro-batches, ranks, turns, checkpoints, metrics and schedules are in `PPOTrainer`.
"""

import sys
from dataclasses import replace

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from trl_ppo_ext.batch_plan import BatchPlan
from trl_ppo_ext.episodes.generator import cut_at_stop
from trl_ppo_ext.modeling import ActorCritic
from trl_ppo_ext.modeling.critics import CriticState, new_critic
from trl_ppo_ext.ppo.advantages import Discounts, divide_by_unit, gae_with_critic
from trl_ppo_ext.ppo.baseline import MEMORY
from trl_ppo_ext.ppo.credit import fit_new_critic, two_largest
from trl_ppo_ext.ppo.rollouts import Rollout
from trl_ppo_ext.ppo.updates import ppo_loss, schedule
from trl_ppo_ext.sequences import Sequences


def ppo(
    model,
    tokenizer,
    prompts,
    reward,
    rollouts=10,
    length=24,
    learning_rate=5e-4,
    kl_coef=0.05,
    lam=1.0,
):
    """Train an adapter on rollouts of all prompts (an even number of texts); `reward` scores a
    list of completions."""
    eos = tokenizer.eos_token_id
    prompt_ids = [tokenizer(text)["input_ids"] for text in prompts]
    if eos is None:
        raise ValueError("`tokenizer.eos_token` must be set, got None; completions end there.")
    if not prompt_ids or len(prompt_ids) % 2 or not all(prompt_ids):
        shortest = min(map(len, prompt_ids), default=0)
        needed = "an even number of texts, for two minibatches, of at least one token each"
        raise ValueError(f"`prompts` must be {needed}, got {len(prompts)} of at least {shortest}.")
    # One frozen base: the policy with its adapter on, the reference with it off, and a critic, here
    # a small network beside the base. It reads the policy's states, but its loss does not train the
    # policy. It predicts (return - mean) / deviation, with those of the returns so far.
    policy = get_peft_model(
        model.eval(), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    )
    critic = new_critic("side", policy, is_normalized=True, length=length)
    roles = ActorCritic(policy, critic)
    trained = [list(roles.policy_parameters().values()), list(roles.critic_parameters().values())]
    groups = zip(trained, (learning_rate, critic.learning_rate))
    optimizer = torch.optim.AdamW(
        [{"params": x, "lr": rate} for x, rate in groups], eps=1e-5, weight_decay=0.0
    )
    plan = BatchPlan(micro_batch_size=len(prompts) // 2, num_mini_batches=2, num_ppo_epochs=4)
    state = CriticState()  # what a rollout leaves to the critic of the next
    spreads = 0.0, 0.0  # the two largest deviations of a rollout's returns so far
    sampling = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length, eos_token_id=eos, pad_token_id=eos
    )

    for number in range(rollouts):
        # 1. Sample a completion for each prompt, up to its EOS.
        torch.manual_seed(number)
        inputs = Sequences.from_token_ids(prompt_ids, [[]] * len(prompts), eos, roles.device)
        sampled = roles.sample(inputs.input_ids, inputs.attention_mask, sampling)[
            :, inputs.input_ids.shape[1] :
        ]
        completions = [cut_at_stop(ids, frozenset([eos])) for ids in sampled.tolist()]
        sequences = Sequences.from_token_ids(prompt_ids, completions, eos, roles.device)
        mask = sequences.completion_mask

        # 2. Score the completions; a score enters at the last token.
        scores = reward(tokenizer.batch_decode(completions, skip_special_tokens=True))
        scores = torch.as_tensor(scores, dtype=torch.float32, device=mask.device)
        if scores.shape != (len(prompts),) or not scores.isfinite().all():
            needed = f"a finite number for each of {len(prompts)} completions"
            raise ValueError(f"`reward` must return {needed}, got {scores.tolist()}.")
        token_scores = scores[:, None] * (mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1)))

        # 3. Log-probs (0 at padding) and outputs of the critic, of all rows at once: the first
        # ratios are 1 up to rounding. The critic also reads the rewards before each token: here 0,
        # since the only reward comes last.
        sequences = replace(sequences, observed=critic.observe(token_scores, mask, state))
        with torch.no_grad():
            old = roles(sequences)
            ref_logprobs = roles.reference_logprobs(sequences)

        # 4. Rewards per token: the KL penalty at every token, the score at the last one.
        rewards = token_scores - kl_coef * (kl := old.logprobs - ref_logprobs)

        # 5. Advantages and targets. Value = mean + deviation · output, with the mean and deviation
        # before this rollout for `old.values`, and those after it for the targets: outputs follow
        # when the units move. The values are weighed by how well they fit the returns, and then
        # subtracted from them.
        if critic.is_new(state):  # it is fitted to the first returns that differ
            summary = roles.read_critic(sequences, critic.summary)
            fitted, state = fit_new_critic(critic, [summary], state, rewards, steps=mask, mask=mask)
            old = old._replace(values=old.values + fitted.left_out)  # of fits to other prompts
        result, seen = gae_with_critic(
            rewards,
            old.values,
            mask,
            state.returns,
            is_normalized=True,
            discounts=Discounts(1.0, lam),
        )
        # advantages in deviations of the returns, or of a tenth of the second largest, if that is
        # more: the scores of one rollout may have been broken
        spreads = two_largest(*spreads, result.spread)
        result = divide_by_unit(result, seen, spreads[0])
        seen_rewards = state.rewards.add(token_scores, mask, memory=MEMORY)
        state = state._replace(returns=seen, rewards=seen_rewards)
        critic.install(state)  # the first fit counts in its outputs from here on
        data = Rollout(
            sequences,
            mask,
            old.logprobs,
            result.advantages,
            old_values=old.values,
            targets=result.targets,
        )

        # 6. Epochs of minibatches of one micro-batch; tokens that became twice or half as likely
        # are clipped.
        for rows in schedule(plan):
            part = data.rows(rows)
            loss, _ = ppo_loss(
                roles(part.sequences), part, cliprange=(0.5, 1.0), dual_clip=2.0, vf_coef=0.5
            )
            optimizer.zero_grad()
            loss.backward()
            for parameters in trained:  # a large value loss must not shrink the policy's step
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        print(f"rollout {number + 1}  reward {scores.mean():.3f}  KL {kl.sum(1).mean():.3f} nats")


if __name__ == "__main__":
    base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    prompts = ["The hotel was", "The film was"] * 32
    ppo(
        base,
        AutoTokenizer.from_pretrained(sys.argv[1]),
        prompts,
        lambda texts: [float("!" in x) for x in texts],
    )
