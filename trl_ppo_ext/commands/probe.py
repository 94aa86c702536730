"""`trl-ppo probe`: whether a critic pays on a task, from completions of the frozen policy. Nothing is trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from pandas import DataFrame, Series
from torch import Tensor, nn
from transformers.hf_argparser import HfArg

from ..config import PPOConfig
from ..data.loading import spread_indices
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
EXPLAINS = 0.1  # explained variance, at least


@dataclass(repr=False)
class ProbeConfig(PPOConfig):
    """[`PPOConfig`] of a run to probe."""

    _argument_group_name = "training (fields of PPOConfig; those about updates and the Hub have no effect)"

    completions: int = HfArg(default=COMPLETIONS, help="Completions to sample.")

    def __post_init__(self):
        self.push_to_hub = False  # it would create the repository
        super().__post_init__()


def probe(trainer: PPOTrainer, completions: int = COMPLETIONS) -> dict[str, Any]:
    """Measure what baselines explain of the frozen policy's returns, and the variance of the gradient with each.

    The result is also written to `probe.json` in the run's `output_dir`.

    Args:
        trainer ([`PPOTrainer`]): Trainer of the run, on one process. The run is not changed.
        completions (`int`, *optional*, defaults to 256):
            Completions to sample: `num_generations` per prompt, or 8 if that is 1.

    Returns:
        `dict[str, Any]`: `"explained_variance"` of each baseline by position, `"gradient_variance"` of each setting
        relative to `"rebn"` (`None` if all returns are equal), `"groups_without_signal"` and `"verdict"`.

    Raises:
        `ValueError`: If there are several processes, or too few completions or scores.
    """
    args = trainer.args
    size = args.num_generations if args.num_generations > 1 else GENERATIONS
    if args.world_size > 1 or args.uses_deepspeed or trainer.is_fsdp_enabled:
        raise ValueError("`trl-ppo probe` needs one process without DeepSpeed and FSDP; start it without a launcher.")
    if completions < FOLDS * size:
        needed = f"at least {FOLDS * size}, {FOLDS} prompts with {size} completions each"
        raise ValueError(f"`completions` must be {needed}, got {completions}.")

    # 1. Sample. Without discount, Monte Carlo returns are the rewards of the tokens.
    changes = {
        "gamma": 0.0,
        "advantage_estimator": "rebn",
        "whiten_advantages": False,
        "advantage_level": "token",
    }
    collected = held_out_rollouts(trainer, completions, size, **changes)
    rollouts = [rollout for rollout, _ in collected]
    sampled = [samples for _, samples in collected]
    rows = sum(map(len, rollouts)) // size * size  # of complete groups
    mask = _stack([x.response_mask for x in rollouts])[:rows]
    rewards = _stack([cast(Tensor, x.advantages if x.returns is None else x.returns) for x in sampled])[:rows]
    _, returns = ppo_math.gae(rewards, torch.zeros_like(rewards), mask, args.gamma, 1.0)
    counts = mask.any(1)
    if counts.sum() < FOLDS:
        cause = f"Only {int(counts.sum())} of {rows} completions have a score and tokens to learn from"
        raise ValueError(f"{cause}; check the rewards and `mask_truncated_completions`.")

    # 2. Predict each return from other completions, and by the ridge regression from those of other prompts.
    row, position, flat = mask.nonzero()[:, 0], (mask.cumsum(1) - 1)[mask], returns[mask]
    # of all tokens, as what is left of a completion is not known before its end
    quarter = torch.bucketize(position, position.float().quantile(torch.tensor([0.25, 0.5, 0.75])))
    group = row // size
    mean = mean_of_others(flat, 0 * row, row, torch.zeros(()))
    quarter_mean = mean_of_others(flat, quarter, row, mean)
    group_mean = mean_of_others(flat, 4 * group + quarter, row, mean_of_others(flat, group, row, mean))
    prompts = [tuple(x.prompt_ids) for _, samples in collected for x in samples.batch.episodes]
    numbers = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts[i] for i in counts.nonzero()[:, 0]))}
    units = torch.tensor([numbers.get(prompt, 0) for prompt in prompts])
    if len(numbers) < FOLDS:  # training would see every one of them, too
        units = counts.cumsum(0)
    states = torch.cat([read_states(trainer, rollout) for rollout in rollouts])[: len(row)]
    values = ridge_values(states, flat, units[row] % FOLDS)

    # 3. Compare what they explain, and the variance of the gradient with each.
    baselines = {"mean": quarter_mean, "group mean": group_mean, "states": values}
    parts = {"first token": position == 0} | {f"quarter {n + 1}": quarter == n for n in range(4)} | {"all": row >= 0}
    explained = {
        name: {part: float(ppo_math.explained_variance(x, flat, chosen)) for part, chosen in parts.items()}
        for name, x in baselines.items()
    }
    table, totals, alpha = torch.zeros_like(rewards), rewards.sum(1), args.critic_options.lam_length_alpha
    value_table = table.masked_scatter(mask, values)
    lam = args.lam if alpha is None else ppo_math.length_adaptive_lambda(mask, alpha)
    advantages = {
        "reinforce": totals[:, None] * mask,
        "rebn": table.masked_scatter(mask, flat - mean),
        "rloo": ppo_math.rloo_advantages(totals, counts, size)[:, None] * mask,
        "side, λ = 1": ppo_math.gae(rewards, value_table, mask, args.gamma, 1.0)[0],
        "side": ppo_math.gae(rewards, value_table, mask, args.gamma, lam)[0],
    }
    candidates = counts.nonzero()[:, 0]
    sample = candidates[spread_indices(len(candidates), GRADIENTS)].tolist()
    traces = gradient_variances(trainer, rollouts, sample, advantages)
    varies = traces["rebn"] > 1e-12 * traces["reinforce"]  # equal returns may differ by rounding
    variances = {name: trace / traces["rebn"] if varies else None for name, trace in traces.items()}

    # 4. Conclude.
    scored = [samples.scored for _, samples in collected]
    scores, usable = (torch.cat([getattr(x, name) for x in scored])[:rows] for name in ("totals", "usable"))
    equal = ppo_math.dr_grpo_advantages(scores, usable, size) == 0
    without_signal = float(equal.view(-1, size).all(1).float().mean())
    result = {
        "completions": int(counts.sum()),
        "prompts": len(numbers),
        "num_generations": size,
        "explained_variance": explained,
        "gradient_variance": variances,
        "groups_without_signal": without_signal,
        "verdict": verdict(explained, variances, without_signal),
    }
    path = Path(cast(str, args.output_dir), "probe.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return result


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of rollouts as one tensor on the CPU."""
    width = max(x.shape[1] for x in tensors)
    return torch.cat([nn.functional.pad(x, (0, width - x.shape[1])) for x in tensors]).cpu()


def mean_of_others(returns: Tensor, cluster: Tensor, row: Tensor, default: Tensor) -> Tensor:
    """Mean of the returns of each token's cluster in other rows, `[tokens]`; `default` if there are none."""
    own = cluster * (int(row.max()) + 1) + row
    total, own_total = (torch.bincount(index, returns.double())[index] for index in (cluster, own))
    others = torch.bincount(cluster)[cluster] - torch.bincount(own)[own]
    return torch.where(others > 0, ((total - own_total) / others.clamp(min=1)).float(), default)


@torch.no_grad()
def read_states(trainer: PPOTrainer, rollout: Rollout) -> Tensor:
    """Last states of the policy at the tokens that count, after the position as cosines, `[tokens, features]`."""
    args, features = trainer.args, []
    for index in torch.arange(len(rollout)).split(args.per_device_train_batch_size):
        part = rollout.rows(index)
        sequences = part.sequences
        with trainer.accelerator.autocast():
            hidden = trainer.actor_critic._hidden_states(sequences).float()
        waves = torch.arange(COSINES, device=hidden.device) * torch.pi / args.max_completion_length
        position = (sequences.positions[:, None] * waves).cos()  # the first one is constant
        states = torch.cat([position, nn.functional.rms_norm(hidden, hidden.shape[-1:])], 1)
        features.append(states[sequences.pick(part.response_mask)].cpu())
    return torch.cat(features)


def ridge_values(states: Tensor, returns: Tensor, folds: Tensor) -> Tensor:
    """Predict the returns of each fold, `[tokens]`, by ridge regression on the others, in closed form.

    The others also choose the ridge, by predicting one another. The first column of the states is the bias.
    """
    parts = [(states[folds == fold].double(), returns[folds == fold].double()) for fold in range(FOLDS)]
    squares = torch.stack([x.T @ x for x, _ in parts])
    products = torch.stack([x.T @ y for x, y in parts])

    @cache
    def fit(ridge: float, excluded: frozenset[int]) -> Tensor:
        kept = [fold for fold in range(FOLDS) if fold not in excluded]
        matrix = squares[kept].sum(0)
        penalty = torch.full_like(matrix[0], ridge * float(matrix.diagonal().mean()))
        penalty[0] = 0
        return torch.linalg.solve(matrix + penalty.diag(), products[kept].sum(0))

    def error(ridge: float, fold: int) -> float:
        others = [(other, x, y) for other, (x, y) in enumerate(parts) if other != fold]
        return sum(float(((y - x @ fit(ridge, frozenset({fold, other}))) ** 2).sum()) for other, x, y in others)

    values = torch.zeros_like(returns)
    for fold, (x, _) in enumerate(parts):
        ridge = min(RIDGES, key=lambda ridge, fold=fold: error(ridge, fold))  # type: ignore[misc]
        values[folds == fold] = (x @ fit(ridge, frozenset({fold}))).to(values.dtype)
    return values


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


def verdict(
    explained: Mapping[str, Mapping[str, float]], variances: Mapping[str, float | None], without_signal: float
) -> str:
    """One sentence: whether a critic pays, and the setting to take."""
    side, rloo = variances["side, λ = 1"], variances["rloo"]
    if without_signal == 1 or side is None or rloo is None:
        return "There is nothing to learn, as all scores of a prompt are equal: change the reward or the prompts."
    best = min(rloo, 1.0)  # that of "rebn" is 1
    if side <= PAYS * best:
        share = f"the gradient has {side / best:.0%} of its variance with the best baseline without a critic"
        return f'A critic pays, so take `critic="side"`: {share}.'
    if best > PAYS and max(explained[name]["all"] for name in ("group mean", "states")) < EXPLAINS:
        return (
            "No critic that reads the policy's states pays, as nothing there explains the returns: take "
            '`critic="adapter"` with a `prompt` in `critic_kwargs` that does, or `critic="none", '
            'advantage_estimator="rebn"`.'
        )
    setting = f'`critic="none", advantage_estimator="{"rloo" if rloo < 1 else "rebn"}"`'
    return f"No critic pays, so take {setting}: values from the policy's states add little to it."


def main(argv: Sequence[str]) -> None:
    """Probe a task, and print two tables and the verdict."""
    description = "Measure on completions of the frozen policy whether a critic pays, before anything is trained."
    script, args, model, mixture = parse("probe", argv, description, ProbeConfig)
    trainer = build_trainer(script, args, model, load_datasets(script, mixture))
    result = probe(trainer, cast(ProbeConfig, args).completions)
    print(f"{result['completions']} completions of {result['prompts']} prompts; all scores are equal in", end=" ")
    print(f"{result['groups_without_signal']:.0%} of the groups of {result['num_generations']}")
    explained, variances = DataFrame(result["explained_variance"]).T, Series(result["gradient_variance"], dtype=float)
    titles = {"explained variance of the returns": explained, "variance of the gradient, relative to rebn": variances}
    for title, table in titles.items():
        print(f"\n{title}\n{table.to_string(float_format='{:.2f}'.format)}")
    print(f"\n{result['verdict']}")
    trainer.end()
