"""Trainers of tiny models, and what they collect."""

import torch
from tiny import KEYS, config, length_reward, llama, prompts, tokenizer

from trl_ppo_ext import PPOConfig, PPOTrainer
from trl_ppo_ext.episodes.generator import cut_at_stop
from trl_ppo_ext.modeling import TokenScores
from trl_ppo_ext.ppo.rollouts import Rollout
from trl_ppo_ext.sequences import Sequences

PROMPTS = [[4, 5, 6], [7], [8, 9, 10, 11]]
COMPLETIONS = [[12, 13, 1], [14, 15, 16, 17, 1], [1]]


def trainer(
    output_dir, model=None, reward_funcs=length_reward, dataset=None, callbacks=None, **kwargs
):
    names = kwargs.keys() - PPOConfig.__dataclass_fields__.keys() - KEYS.keys()
    extra = {name: kwargs.pop(name) for name in names}
    return PPOTrainer(
        model=model or llama(),
        reward_funcs=reward_funcs,
        args=config(output_dir, **kwargs),
        train_dataset=prompts() if dataset is None else dataset,
        callbacks=callbacks,
        **{"processing_class": tokenizer()} | extra,
    )


def rollouts_of(built, seen=None):
    """Record every rollout that a trainer collects."""
    seen = [] if seen is None else seen
    start = built.updates.start

    def recording(rollout, step, *loaded):
        if not loaded:  # from a checkpoint
            seen.append((rollout, built._samples["train"]))
        return start(rollout, step, *loaded)

    built.updates.start = recording
    return seen


def write_completions(built, completions_of):
    """Let a function of the prompts' token ids write completions in place of the policy."""

    generator = built.components.player.generator

    def generate(prompts, rooms=None):
        written = completions_of(prompts)
        rooms = rooms or [built.args.max_completion_length] * len(prompts)
        generator.sampled_logprobs = None
        return [
            cut_at_stop(ids[:room], generator.stop_token_ids) for ids, room in zip(written, rooms)
        ]

    generator.generate = generate
    generator.conversation = lambda: lambda prompts, rooms, rows: generate(prompts, rooms)


def micro_batches_of(built):
    seen = []
    compute_loss = built.compute_loss

    def recording(model, inputs, **kwargs):
        seen.append(inputs)
        return compute_loss(model, inputs, **kwargs)

    built.compute_loss = recording
    return seen


def weights(built):
    return {
        n: p.detach().clone() for n, p in built.actor_critic.named_parameters() if p.requires_grad
    }


def sequences(prompts=PROMPTS, completions=COMPLETIONS):
    return Sequences.from_token_ids(prompts, completions, pad_token_id=0, device="cpu")


def plain_logprobs(model, prompt, completion, temperature=1.0):
    logits = (
        model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    )
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def trainable(built):
    return [name for name, parameter in built.named_parameters() if parameter.requires_grad]


# ---- rollouts from plain tensors


def rollout(rows=4, lengths=None, critic=True, seed=0, **coefficients):
    """A rollout of random numbers in float64, whose completions have lengths from 1 to 5."""
    lengths = lengths or [5 - row % 5 if row % 5 else 3 for row in range(rows)]
    generator = torch.Generator().manual_seed(seed)
    prompts = [[4 + row % 20] * (1 + row % 3) for row in range(len(lengths))]
    batch = sequences(prompts, [[5] * length for length in lengths])
    mask = batch.completion_mask
    mask[0, 0] = mask[0].sum() == 1  # a token that does not count
    shape = len(lengths), max(lengths)
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64) * batch.completion_mask
        for _ in range(5)
    ]
    old_logprobs, ref_logprobs, advantages, old_values, targets = tensors
    if critic:
        values = {"old_values": old_values, "targets": targets}
    else:
        values = {}
    return Rollout(batch, mask, old_logprobs, advantages, ref_logprobs, **values, **coefficients)


def token_scores(batch, seed=1):
    """Scores of a policy that has moved away from the one that sampled; gradients flow to all."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        torch.randn(batch.advantages.shape, generator=generator, dtype=torch.float64)
        for _ in range(4)
    ]
    logprobs, entropies, kls, values = (
        x.requires_grad_() for x in (batch.old_logprobs + 0.5 * drawn[0], *drawn[1:])
    )
    return TokenScores(logprobs, entropies, kls, values)
