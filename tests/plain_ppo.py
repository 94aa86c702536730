"""PPO for language models in its plainest form: the algorithm of this package, and the yardstick of its tests.

Everything is float64, one completion at a time: no padding, no batches, nothing of the package. [`Settings`] has the
fields of `PPOConfig` and their defaults. An iteration takes completions that the policy sampled, with their scores:

1. Forward: log-probs under policy and reference, the KL of each token, the critic's values.
2. Rewards per token: minus the KL penalty, plus the score at the last one.
3. Advantages: GAE with a critic; without one, the completions of a prompt are compared. Whiten them.
4. Loss: clipped policy loss, value loss, KL, entropy.
5. Stop once the policy has moved too far from the one that sampled. Otherwise
6. take an Adam step, and go on with 4. for `num_ppo_epochs`.
7. Steer the coefficients of KL and entropy for the next iteration.

[`iterate`] has these steps in this order; the functions above it fill them in.
"""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass
class Settings:
    """Hyperparameters, with the names and the defaults that they have in `PPOConfig`."""

    temperature: float = 1.0
    missing_eos_penalty: float | None = None  # subtracted from the score of a truncated completion
    mask_truncated_completions: bool = False  # the others are compared with them, but only a critic learns from them
    whiten_rewards: bool = False
    kl_estimator: str = "k1"
    kl_placement: str = "reward"  # or "loss", or "both"
    kl_coef: float = 0.05
    kl_target: float | None = None  # steers `kl_coef`
    kl_horizon: int = 10_000
    critic: str = "head"  # or "none"
    advantage_estimator: str | None = (
        None  # without a critic: "grpo" by default, "dr_grpo", "rloo", "reinforce", "rebn"
    )
    num_generations: int = 1  # completions per prompt
    gamma: float = 1.0
    lam: float = 0.95
    lam_critic: float | None = None  # λ of the critic's targets; `lam` by default
    lam_length_alpha: float | None = None  # the policy's λ grows with the length
    whiten_advantages: bool | None = None  # by default with a critic, and for "rebn"
    cliprange: float = 0.2
    cliprange_high: float | None = None  # `cliprange` by default
    dual_clip: float | None = None
    importance_sampling_level: str = "token"  # or "sequence": one ratio per completion
    cliprange_value: float | None = None
    vf_coef: float = 0.1
    entropy_coef: float = 0.0
    entropy_target: float | None = None  # steers `entropy_coef`
    loss_aggregation: str | None = None  # by default that of the estimator's paper
    max_completion_length: int = 256
    num_ppo_epochs: int = 4
    target_kl: float | None = None
    learning_rate: float = 5e-5  # falls linearly to 0 over `max_steps`
    max_steps: int = -1
    adam_epsilon: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: unclipped

    def __post_init__(self):
        with_critic = self.critic != "none"
        self.advantage_estimator = self.advantage_estimator or ("gae" if with_critic else "grpo")
        papers = {"grpo": "sequence_mean", "dr_grpo": "constant", "rloo": "sequence_sum", "reinforce": "sequence_sum"}
        self.loss_aggregation = self.loss_aggregation or papers.get(self.advantage_estimator, "token")
        if self.whiten_advantages is None:
            self.whiten_advantages = with_critic or self.advantage_estimator == "rebn"
        self.cliprange_high = self.cliprange if self.cliprange_high is None else self.cliprange_high
        self.lam_critic = self.lam if self.lam_critic is None else self.lam_critic


@dataclass
class Models:
    """A policy, the reference it is kept close to, and the critic; with the state of their optimizer."""

    policy: nn.Module  # a causal language model
    reference: nn.Module
    value_head: nn.Module | None  # a linear layer on the policy's last hidden states
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of Adam
    steps: int = 0  # optimizer steps taken

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name."""
        modules = {"policy": self.policy} | ({} if self.value_head is None else {"value_head": self.value_head})
        named = {f"{role}.{name}": x for role, module in modules.items() for name, x in module.named_parameters()}
        return {name: x for name, x in named.items() if x.requires_grad}


@dataclass
class Sample:
    """A sampled completion; the second half is filled in by [`collect`], and constant over the epochs."""

    prompt: list[int]
    ids: list[int]  # sampled tokens, EOS included
    score: float | None  # None: its reward failed, and it is skipped
    truncated: bool  # ended at the maximum length, not at EOS

    reference: Tensor | None = None  # [response, vocabulary], log-probs under the reference
    old: "Outputs | None" = None  # under the policy that sampled
    learn: bool = True  # False: excluded from the policy's loss and from whitening; a critic learns if it has a score
    rewards: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)  # targets of the critic
    unit: float = 1.0  # of the advantages, in that of the scores; a KL in the loss has the same


class Outputs(NamedTuple):
    """One number per sampled token."""

    logprobs: Tensor
    entropies: Tensor
    kl: Tensor  # KL from the reference by the chosen estimator
    k1: Tensor
    values: Tensor | None


# 1. ---- forward


def forward(models: Models, sample: Sample, s: Settings) -> Outputs:
    """Log-probs, entropies, KL and values of a completion."""
    ids, tokens = torch.tensor([sample.prompt + sample.ids]), torch.tensor(sample.ids)[:, None]
    # logits and values at a position are those of the next token: the first sampled one has them at the prompt's end
    response = slice(len(sample.prompt) - 1, -1)
    if sample.reference is None:
        with torch.no_grad():
            logits = models.reference(input_ids=ids).logits
            sample.reference = (logits[0, response] / s.temperature).log_softmax(-1)
    outputs = models.policy(input_ids=ids, output_hidden_states=True)
    policy = (outputs.logits[0, response] / s.temperature).log_softmax(-1)  # [response, vocabulary]
    k1 = (policy - sample.reference).gather(1, tokens)[:, 0]
    exact = (policy.exp() * (policy - sample.reference)).sum(-1)
    kl = {"k1": k1, "k2": k1**2 / 2, "k3": (-k1).exp() - 1 + k1, "exact": exact}[s.kl_estimator]
    values = None if models.value_head is None else models.value_head(outputs.hidden_states[-1][0, response])[:, 0]
    return Outputs(policy.gather(1, tokens)[:, 0], -(policy.exp() * policy).sum(-1), kl, k1, values)


# 2. ---- rewards


def rewards_of(sample: Sample, s: Settings) -> list[float]:
    """The KL penalty at every token, and the score at the last."""
    rewards = [0.0 if s.kl_placement == "loss" else -s.kl_coef * kl for kl in sample.old.kl.tolist()]
    rewards[-1] += sample.score or 0.0
    rewards[-1] -= (s.missing_eos_penalty or 0.0) * sample.truncated
    return rewards


# 3. ---- advantages


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Âₜ = Σₗ (γλ)ˡ·δₜ₊ₗ with δₜ = rₜ + γ·V(sₜ₊₁) − V(sₜ); the value after the last token is 0."""
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0])]
    tokens = range(len(deltas))
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in tokens if k >= t) for t in tokens]


def group_advantages(scores: list[float], estimator: str) -> list[float]:
    """Advantages of the completions of one prompt."""
    if estimator == "reinforce":
        return scores
    if len(scores) < 2:  # nothing to compare with
        return [0.0] * len(scores)
    mean = statistics.mean(scores)
    if estimator == "rloo":  # the mean of the others
        return [x - statistics.mean(scores[:i] + scores[i + 1 :]) for i, x in enumerate(scores)]
    deviation = statistics.stdev(scores) + 1e-4 if estimator == "grpo" else 1.0
    return [(x - mean) / deviation for x in scores]


def deviation(rows: list[list[float]]) -> float:
    """Deviation over the tokens of all rows."""
    return statistics.stdev([x for row in rows for x in row])


def whiten(rows: list[list[float]], keep_mean: bool = False) -> list[list[float]]:
    """Unit variance over the tokens of all rows, and mean 0 unless it is kept."""
    tokens = [x for row in rows for x in row]
    mean, deviation = statistics.mean(tokens), statistics.stdev(tokens)
    return [[(x - mean) / deviation + keep_mean * mean for x in row] for row in rows]


@torch.no_grad()
def collect(models: Models, samples: list[Sample], s: Settings) -> None:
    """Steps 1 to 3."""
    for sample in samples:
        sample.old = forward(models, sample, s)
        sample.rewards = rewards_of(sample, s)
        sample.learn = sample.score is not None and not (sample.truncated and s.mask_truncated_completions)
    learned, scored = ([x for x in samples if x.learn], [x for x in samples if x.score is not None])
    if s.whiten_rewards:
        unit = deviation([sample.rewards for sample in scored])
        for sample, rewards in zip(scored, whiten([sample.rewards for sample in scored], keep_mean=True)):
            sample.rewards, sample.unit = rewards, unit
    if s.advantage_estimator == "rebn":
        for sample in learned:
            sample.advantages = gae(sample.rewards, [0.0] * len(sample.rewards), s.gamma, 1.0)
    elif s.critic == "none":
        for start in range(0, len(samples), s.num_generations):
            group = [x for x in samples[start : start + s.num_generations] if x.score is not None]
            totals = [sum(sample.rewards) for sample in group]  # scores less the KL penalties
            for sample, advantage in zip(group, group_advantages(totals, s.advantage_estimator)):
                sample.advantages = [advantage] * len(sample.ids)
    else:
        for sample in scored:
            # a longer completion has a λ closer to 1, so that its first tokens feel the score at its end
            alpha, values = s.lam_length_alpha, sample.old.values.tolist()
            lam = s.lam if alpha is None else max(0.0, 1 - 1 / (alpha * len(values)))
            sample.advantages = gae(sample.rewards, values, s.gamma, lam)
            targets = gae(sample.rewards, values, s.gamma, s.lam_critic)
            sample.returns = [advantage + value for advantage, value in zip(targets, values)]
    if s.whiten_advantages:
        unit = deviation([sample.advantages for sample in learned])
        for sample, advantages in zip(learned, whiten([sample.advantages for sample in learned])):
            sample.advantages, sample.unit = advantages, sample.unit * unit


# 4. ---- loss


def policy_loss(ratio: Tensor, advantage: float, s: Settings, clips: Counter) -> Tensor:
    """−Â·ρ with ρ = π/π_old, held at a bound: beyond it the loss is constant."""
    bounds = {
        "high": (1 + s.cliprange_high, advantage > 0 and ratio > 1 + s.cliprange_high),  # likely enough
        "low": (1 - s.cliprange, advantage < 0 and ratio < 1 - s.cliprange),  # rare enough
        "dual": (s.dual_clip, advantage < 0 and s.dual_clip is not None and ratio > s.dual_clip),  # an outlier
    }
    for name, (bound, holds) in bounds.items():
        if holds:
            clips[name] += 1
            return -advantage * bound * torch.ones_like(ratio)
    return -advantage * ratio


def value_loss(value: Tensor, old: float, target: float, s: Settings, clips: Counter) -> Tensor:
    """Half the squared error; that of the clipped step from the old value when it is larger."""
    error, clip = (value - target) ** 2 / 2, s.cliprange_value
    if clip is None or abs(value.item() - old) <= clip:
        return error
    clipped = (old + math.copysign(clip, value.item() - old) - target) ** 2 / 2
    clips["value"] += int(clipped > error.item())
    return error.clamp(min=clipped)


def loss_of(models: Models, samples: list[Sample], s: Settings) -> tuple[Tensor, dict[str, float]]:
    """Loss of an optimizer step, and the share of tokens that each clip holds."""
    clips, completions, of_values = Counter(), [], []
    for sample in samples:
        if sample.score is None:
            continue
        now = forward(models, sample, s)
        if now.values is not None:
            values = zip(now.values, sample.old.values.tolist(), sample.returns)
            of_values.append(torch.stack([s.vf_coef * value_loss(*token, s, clips) for token in values]))
        if not sample.learn:
            continue
        log_ratio = now.logprobs - sample.old.logprobs
        if s.importance_sampling_level == "sequence":
            log_ratio = log_ratio.mean().expand_as(log_ratio)
        losses = [policy_loss(ratio, a, s, clips) for ratio, a in zip(log_ratio.exp(), sample.advantages)]
        if s.kl_placement != "reward":
            losses = [x + s.kl_coef / sample.unit * kl for x, kl in zip(losses, now.kl)]
        losses = [x - s.entropy_coef * entropy for x, entropy in zip(losses, now.entropies)]
        completions.append(torch.stack(losses))
    loss = aggregate(completions, s) + (aggregate(of_values, s) if of_values else 0)
    tokens, value_tokens = (sum(map(len, losses)) for losses in (completions, of_values))
    shares = {name: clips[name] / tokens for name in ("low", "high", "dual")}
    return loss, shares | {"value": clips["value"] / max(value_tokens, 1)}


def aggregate(completions: list[Tensor], s: Settings) -> Tensor:
    """Mean of the losses of tokens, or of completions."""
    sums, means = ([f(losses) for losses in completions] for f in (torch.sum, torch.mean))
    return {
        "token": sum(sums) / sum(map(len, completions)),
        "sequence_mean": sum(means) / len(means),
        "sequence_sum": sum(sums) / len(sums),
        "constant": sum(sums) / len(sums) / s.max_completion_length,
    }[s.loss_aggregation]


# 5. ---- the end of the epochs


@torch.no_grad()
def distance(models: Models, samples: list[Sample], s: Settings) -> float:
    """KL from the policy that sampled, estimated by k3: mean over the tokens."""
    kls = []
    for sample in samples:
        if sample.learn:
            log_ratio = forward(models, sample, s).logprobs - sample.old.logprobs
            kls.extend((log_ratio.exp() - 1 - log_ratio).tolist())
    return statistics.mean(kls)


# 6. ---- optimizer step


def gradient_of(models: Models, loss: Tensor) -> dict[str, Tensor]:
    """Gradient of each trained parameter."""
    parameters = models.parameters()
    gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients))


@torch.no_grad()
def adam_step(models: Models, gradient: dict[str, Tensor], s: Settings) -> None:
    """Clip policy and critic, each by its norm; Adam with decoupled weight decay, which biases are spared."""
    squares = Counter()
    for name, g in gradient.items():
        squares[name.partition(".")[0]] += (g**2).sum().item()
    clipped = {role: s.max_grad_norm and x > s.max_grad_norm**2 for role, x in squares.items()}
    scales = {role: s.max_grad_norm / math.sqrt(x) if clipped[role] else 1.0 for role, x in squares.items()}
    rate = s.learning_rate * (1 - models.steps / s.max_steps)
    models.steps += 1
    for name, parameter in models.parameters().items():
        g = gradient[name] * scales[name.partition(".")[0]]
        mean, square = models.moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
        models.moments[name] = mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        mean, square = mean / (1 - 0.9**models.steps), square / (1 - 0.999**models.steps)  # unbiased
        decay = 0.0 if name.endswith("bias") else s.weight_decay
        parameter -= rate * (mean / (square.sqrt() + s.adam_epsilon) + decay * parameter)


# 7. ---- steered coefficients


def steer_kl_coef(coefficient: float, kl_per_completion: float, completions: int, s: Settings) -> float:
    """Ziegler's rule: move in proportion to the error, of which at most 20 % count."""
    error = max(-0.2, min(0.2, kl_per_completion / s.kl_target - 1))
    return coefficient * (1 + error * completions / s.kl_horizon)


def steer_entropy_coef(coefficient: float, entropy: float, s: Settings) -> float:
    """A step up below the target, a step down above it."""
    return min(coefficient + 0.005, 1.0) if entropy < s.entropy_target else max(coefficient - 0.005, 0.0)


def iterate(models: Models, samples: list[Sample], s: Settings) -> Settings:
    """One iteration on completions of the policy; returns the settings of the next one."""
    collect(models, samples, s)
    now, following = s, s
    if s.entropy_target is not None:  # the entropy of these samples steers their own loss; above the target it is free
        entropy = statistics.mean(x for sample in samples if sample.learn for x in sample.old.entropies.tolist())
        following = replace(following, entropy_coef=steer_entropy_coef(s.entropy_coef, entropy, s))
        now = following if entropy <= s.entropy_target else replace(s, entropy_coef=0.0)
    for _ in range(s.num_ppo_epochs):
        if s.target_kl is not None and distance(models, samples, s) > s.target_kl:
            break
        loss, _ = loss_of(models, samples, now)
        adam_step(models, gradient_of(models, loss), s)
    if s.kl_target is not None:  # the KL of these samples steers the next rewards
        kls = [sample.old.k1.sum().item() for sample in samples if sample.score is not None]
        coefficient = steer_kl_coef(s.kl_coef, statistics.mean(kls), len(kls), s)
        following = replace(following, kl_coef=coefficient)
    return following
