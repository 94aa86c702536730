"""`trl-ppo probe`: whether a critic pays on a task, from completions of the frozen policy. Nothing is trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pandas import Series
from torch import Tensor, nn
from transformers.hf_argparser import HfArg

from ..config import PPOConfig
from ..data import spread_indices
from ..modeling.critics import COSINES
from ..ppo import math as ppo_math
from ..ppo.rollouts import Rollout
from ..trainer import PPOTrainer
from .launch import build_trainer, load_datasets, parse
from .pretrain_critic import held_out_rollouts

COMPLETIONS = 256
GENERATIONS = 8  # per prompt, for a run with one
GRADIENTS = 64  # completions whose gradients are compared, at most
FOLDS = 4
RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)  # relative to the mean square of the states
PAYS = 0.9  # variance relative to that of simpler baselines, at most


@dataclass(repr=False)
class ProbeConfig(PPOConfig):
    """[`PPOConfig`] of a run to probe."""

    _argument_group_name = "training (fields of PPOConfig; those about updates and the Hub have no effect)"

    completions: int = HfArg(default=COMPLETIONS, help="Completions to sample.")

    def __post_init__(self):
        self.push_to_hub = False  # it would create the repository
        super().__post_init__()


def probe(trainer: PPOTrainer, completions: int = COMPLETIONS) -> dict[str, Any]:
    """Measure the variance of the frozen policy's gradient with a critic and with baselines without one.

    The result is also written to `probe.json` in the run's `output_dir`.

    Args:
        trainer ([`PPOTrainer`]): Trainer of the run, on one process. The run is not changed.
        completions (`int`, *optional*, defaults to 256):
            Completions to sample at least, in whole rollouts: `num_generations` per prompt, or 8 if that is 1.

    Returns:
        `dict[str, Any]`: `"explained_variance"` of the returns by the policy's states, `"gradient_variance"` of each
        setting relative to `"rebn"` (`None` if all returns are equal), `"groups_without_signal"` and `"verdict"`.

    Raises:
        `ValueError`: If there are several processes, or too few scores.
    """
    gamma, size = trainer.args.gamma, trainer.plan.num_generations
    size = size if size > 1 else GENERATIONS
    if trainer.accelerator.num_processes > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError("`trl-ppo probe` needs one process without DeepSpeed and FSDP; start it without a launcher.")

    # 1. Sample. Without discount, Monte Carlo returns are the rewards of the tokens.
    changes = {"gamma": 0.0, "advantage_estimator": "rebn", "whiten_advantages": False, "advantage_level": "token"}
    rollouts, sampled = zip(*held_out_rollouts(trainer, completions, size, **changes))
    rows = sum(map(len, rollouts)) // size * size  # of complete groups
    mask = _stack([x.response_mask for x in rollouts])[:rows]
    rewards = _stack([cast(Tensor, x.advantages if x.returns is None else x.returns) for x in sampled])[:rows]
    _, returns = ppo_math.gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    counts = mask.any(1)
    if counts.sum() < FOLDS:
        cause = f"Only {int(counts.sum())} of {rows} completions have a score and tokens to learn from"
        raise ValueError(f"{cause}; check the rewards and `mask_truncated_completions`.")

    # 2. Predict each return from other completions: their mean, and a regression on the states of other prompts.
    sums, tokens = (returns.double() * mask).sum(1), mask.sum(1)
    mean_of_others = (sums.sum() - sums) / (tokens.sum() - tokens)
    prompts = [tuple(x.prompt_ids) for samples in sampled for x in samples.batch.episodes]
    numbers = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts[i] for i in counts.nonzero()[:, 0]))}
    blocks = torch.tensor([numbers.get(prompt, 0) for prompt in prompts])  # that share a fold
    if len(numbers) < FOLDS:  # training would see every one of them, too
        blocks = counts.cumsum(0)
    row, flat = mask.nonzero()[:, 0], returns[mask]
    states = torch.cat([read_states(trainer, rollout) for rollout in rollouts])[: len(row)]
    values = ridge_values(states, flat, blocks[row] % FOLDS)

    # 3. Compare the variance of the gradient.
    totals, value_table = rewards.sum(1), torch.zeros_like(rewards).masked_scatter(mask, values)
    advantages = {
        "reinforce": totals[:, None] * mask,
        "rebn": (returns - mean_of_others[:, None]).float() * mask,
        "rloo": ppo_math.rloo_advantages(totals, counts, size)[:, None] * mask,
        "side": ppo_math.gae(rewards, value_table, mask, gamma, 1.0)[0],
    }
    candidates = counts.nonzero()[:, 0]
    sample = candidates[spread_indices(len(candidates), GRADIENTS)].tolist()
    traces = gradient_variances(trainer, rollouts, sample, advantages)
    varies = traces["rebn"] > 1e-12 * traces["reinforce"]  # equal returns may differ by rounding
    variances = {name: trace / traces["rebn"] if varies else None for name, trace in traces.items()}

    # 4. Conclude.
    scores, usable = (torch.cat([getattr(x.scored, name) for x in sampled])[:rows] for name in ("totals", "usable"))
    equal = (ppo_math.dr_grpo_advantages(scores, usable, size) == 0).view(-1, size).all(1)
    without_signal = float(equal[usable.view(-1, size).any(1)].float().mean())
    result = {
        "completions": int(counts.sum()),
        "prompts": len(numbers),
        "num_generations": size,
        "explained_variance": float(ppo_math.explained_variance(values, flat, torch.ones_like(flat))),
        "gradient_variance": variances,
        "groups_without_signal": without_signal,
        "verdict": verdict(variances, without_signal),
    }
    path = Path(str(trainer.args.output_dir), "probe.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return result


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of rollouts as one tensor on the CPU."""
    return nn.utils.rnn.pad_sequence([row for x in tensors for row in x], batch_first=True).cpu()


@torch.no_grad()
def read_states(trainer: PPOTrainer, rollout: Rollout) -> Tensor:
    """Last states of the policy at the tokens that count, after the position as cosines, `[tokens, features]`."""
    features, length = [], trainer.args.max_completion_length
    for index in torch.arange(len(rollout)).split(trainer.plan.micro_batch_size):
        part = rollout.rows(index)
        sequences = part.sequences
        with trainer.accelerator.autocast():
            hidden = trainer.actor_critic._hidden_states(sequences).float()
        waves = torch.arange(COSINES, device=hidden.device) * torch.pi / length
        position = (sequences.positions[:, None] * waves).cos()  # the first one is constant
        states = torch.cat([position, nn.functional.rms_norm(hidden, hidden.shape[-1:])], 1)
        features.append(states[sequences.pick(part.response_mask)].cpu())
    return torch.cat(features)


def ridge_values(states: Tensor, returns: Tensor, folds: Tensor) -> Tensor:
    """Predict the returns of each fold, `[tokens]`, from the others by ridge regression, with the best ridge.

    The first column of the states is the bias.
    """
    x, y, chosen = states.double(), returns.double(), [folds == fold for fold in range(FOLDS)]
    squares = torch.stack([x[fold].T @ x[fold] for fold in chosen])
    products = torch.stack([x[fold].T @ y[fold] for fold in chosen])
    predictions = []
    for ridge in RIDGES:
        values = torch.zeros_like(y)
        for number, fold in enumerate(chosen):
            matrix = squares.sum(0) - squares[number]
            penalty = torch.full_like(matrix[0], ridge * float(matrix.diagonal().mean()))
            penalty[0] = 0
            values[fold] = x[fold] @ torch.linalg.solve(matrix + penalty.diag(), products.sum(0) - products[number])
        predictions.append(values)
    return min(predictions, key=lambda values: float((y - values).square().sum())).to(returns.dtype)


def gradient_variances(
    trainer: PPOTrainer, rollouts: Sequence[Rollout], rows: Sequence[int], advantages: Mapping[str, Tensor]
) -> dict[str, float]:
    """Trace of the covariance of the completions' policy gradients, at ratio 1, with each of several advantages."""
    actor_critic, size = trainer.actor_critic, len(rollouts[0])
    parameters = list(actor_critic.policy_parameters().values())
    sums, squares = dict.fromkeys(advantages, torch.zeros(())), dict.fromkeys(advantages, 0.0)
    for row in rows:
        sequences = rollouts[row // size].rows(torch.tensor([row % size])).sequences
        with trainer.accelerator.autocast():
            logprobs = actor_critic(sequences, trainer.args.temperature, with_values=False).logprobs[0]
        for name, table in advantages.items():
            objective = logprobs @ table[row, : len(logprobs)].to(logprobs.device)
            parts = torch.autograd.grad(objective, parameters, retain_graph=True, materialize_grads=True)
            gradient = torch.cat([part.flatten().float() for part in parts])
            sums[name] = sums[name].to(gradient.device) + gradient
            squares[name] += float(gradient @ gradient)
    return {
        name: (squares[name] - float(sums[name] @ sums[name]) / len(rows)) / (len(rows) - 1) for name in advantages
    }


def verdict(variances: Mapping[str, float | None], without_signal: float) -> str:
    """One sentence: whether a critic pays, and the setting to take."""
    side, rloo = variances["side"], variances["rloo"]
    if without_signal == 1 or side is None or rloo is None:
        return "There is nothing to learn, as all scores of a prompt are equal: change the reward or the prompts."
    best = min(rloo, 1.0)  # that of "rebn" is 1
    if side <= PAYS * best:
        share = f"the gradient has {side / best:.0%} of its variance with the best baseline without a critic"
        return f'A critic pays, so take `critic="side"`: {share}.'
    setting = f'`critic="none", advantage_estimator="{"rloo" if rloo < 1 else "rebn"}"`'
    return (
        f'No critic on the policy\'s states pays, so take {setting}, or `critic="adapter"` with a `prompt` in '
        "`critic_kwargs` that explains the returns."
    )


def main(argv: Sequence[str]) -> None:
    """Probe a task, and print the table and the verdict."""
    description = "Measure on completions of the frozen policy whether a critic pays, before anything is trained."
    script, args, model = parse("probe", argv, description, ProbeConfig)
    trainer = build_trainer(script, args, model, load_datasets(script))
    result = probe(trainer, cast(ProbeConfig, args).completions)
    print(f"{result['completions']} completions of {result['prompts']} prompts; all scores are equal in", end=" ")
    print(f"{result['groups_without_signal']:.0%} of the groups of {result['num_generations']}")
    print(f"explained variance of the returns by the policy's states: {result['explained_variance']:.2f}")
    variances = Series(result["gradient_variance"], dtype=float)
    print(f"variance of the gradient, relative to rebn\n{variances.to_string(float_format='{:.2f}'.format)}")
    print(result["verdict"])
    trainer.end()
