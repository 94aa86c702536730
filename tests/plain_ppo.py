"""PPO for language models in its plainest form: the algorithm of this package, and the yardstick of
its tests.

Everything is float64, one completion at a time: no padding, no batches, nothing of the package.
[`Settings`] has the fields of `PPOConfig` and their defaults. An iteration takes completions that
the policy sampled, with their scores:

1. Forward: log-probs under policy and reference, the KL of each token, the critic's predictions.
2. Rewards per token: those of the completion, minus the KL penalty.
3. Advantages: GAE with a critic, in units of the returns; without one, the completions of a prompt
are compared.
4. Loss: clipped policy loss, value loss, KL, entropy.
5. Stop once the policy has moved too far from the one that sampled. Otherwise
6. take an Adam step, and go on with 4., for the minibatches of `num_ppo_epochs`. Then measure how
far it has moved.
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
    # the others are compared with them, but only a critic learns from them
    mask_truncated_completions: bool = False
    whiten_rewards: bool = False
    kl_estimator: str = "k1"
    kl_placement: str = "reward"  # or "loss", or "both"
    kl_coef: float = 0.0
    kl_target: float | None = None  # steers `kl_coef`
    kl_horizon: int = 10_000
    critic: str = "side"  # or "head", "adapter", "none"
    # by default with a critic: it predicts in units of the returns
    normalize_values: bool | None = None
    # without a critic: "grpo" by default, "dr_grpo", "rloo", "reinforce", "rebn"
    advantage_estimator: str | None = None
    num_generations: int = 1  # completions per prompt
    gamma: float = 1.0
    lam: float | None = None  # see `default_lambda`
    lam_critic: float = 1.0  # λ of the critic's targets
    lam_length_alpha: float | None = None  # the policy's λ grows with the length
    # by default for "rebn", and with a critic that has no units
    whiten_advantages: bool | None = None
    # by default a probability changes by a factor of 2 at most: 0.5, 1.0, and a dual clip of 2
    cliprange: float | None = None
    cliprange_high: float | None = None  # `cliprange` by default, if that is set
    dual_clip: float | None = None
    importance_sampling_level: str = "token"  # or "sequence": one ratio per completion
    cliprange_value: float | None = None  # in units of the values
    vf_coef: float = 0.5
    entropy_coef: float = 0.0
    loss_aggregation: str | None = None  # by default that of the estimator's paper
    max_completion_length: int = 256
    num_ppo_epochs: int = 1
    target_kl: float | None = 0.3
    learning_rate: float = 5e-5  # falls linearly to 0 over `max_steps`
    # by default 1e-3 for the side network, else `learning_rate`
    critic_learning_rate: float | None = None
    max_steps: int = -1
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # of policy and critic, each by itself; 0: unclipped

    def __post_init__(self):
        with_critic = self.critic != "none"
        self.advantage_estimator = self.advantage_estimator or ("gae" if with_critic else "grpo")
        papers = {
            "grpo": "sequence_mean",
            "dr_grpo": "constant",
            "rloo": "sequence_sum",
            "reinforce": "sequence_sum",
        }
        self.loss_aggregation = self.loss_aggregation or papers.get(
            self.advantage_estimator, "token"
        )
        if self.normalize_values is None:
            self.normalize_values = with_critic
        if self.whiten_advantages is None:
            plain_critic = with_critic and not self.normalize_values
            self.whiten_advantages = plain_critic or self.advantage_estimator == "rebn"
        if self.cliprange is None:
            self.cliprange = 0.5
            self.cliprange_high = 1.0 if self.cliprange_high is None else self.cliprange_high
            self.dual_clip = 2.0 if self.dual_clip is None else self.dual_clip
        self.cliprange_high = self.cliprange if self.cliprange_high is None else self.cliprange_high
        if self.critic_learning_rate is None:
            if self.critic == "side":
                self.critic_learning_rate = 1e-3
            else:
                self.critic_learning_rate = self.learning_rate


class Recent:
    """Numbers of every rollout so far; together, earlier ones weigh at most as much as 8 average
    completions."""

    def __init__(self):
        self.weighted: list[tuple[float, float]] = []  # weight of each number

    def add(self, rollout: list[float], completions: int) -> None:
        before = sum(weight for weight, _ in self.weighted)
        if before:
            kept = min(1.0, 8 * len(rollout) / completions / before)
        else:
            kept = 1.0
        self.weighted = [(kept * weight, x) for weight, x in self.weighted] + [
            (1.0, x) for x in rollout
        ]

    def moments(self) -> tuple[float, float, float]:
        """Total weight, mean and sum of squared deviations."""
        count = sum(weight for weight, _ in self.weighted)
        mean = sum(weight * x for weight, x in self.weighted) / count
        return count, mean, sum(weight * (x - mean) ** 2 for weight, x in self.weighted)


class Units:
    """Mean and deviation of recent Monte Carlo returns: a value is mean + deviation · prediction.

    The critic does not know them. A new one predicts 0, and so the mean return of its first
    rollout.
    """

    def __init__(self):
        self.returns = Recent()
        self.mean = 0.0
        self.deviation = 1.0

    def begin_rollout(self, outcomes: list[float], completions: int) -> None:
        """Before values are read; `outcomes` are the rewards after each token."""
        before = self.returns.weighted
        if len({x for _, x in before}) < 2:
            self._move(outcomes, completions)
            self.returns.weighted = before

    def end_rollout(self, outcomes: list[float], completions: int) -> float:
        """Before the critic learns; returns the new deviation."""
        self._move(outcomes, completions)
        return self.deviation

    def _move(self, returns: list[float], completions: int) -> None:
        self.returns.add(returns, completions)
        count, self.mean, squares = self.returns.moments()
        # equal returns have no unit, and one below the rounding of returns would be noise
        if squares:
            self.deviation = max(math.sqrt(squares / count), 1e-4 * abs(self.mean))
        else:
            self.deviation = 1.0

    def value(self, prediction: float) -> float:
        return self.mean + self.deviation * prediction

    def in_units(self, value: float) -> float:
        return (value - self.mean) / self.deviation


class SideNetwork(nn.Module):
    """Gated network on [`side_inputs`], one number per token; nothing flows back into the policy.

    The inputs are scaled, as if there were 256 at any size of the policy: so a step of Adam moves
    it as far.
    """

    def __init__(self, first: nn.Linear, output: nn.Linear):
        super().__init__()
        self.first = first
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(256 / x.shape[-1] * x).chunk(2, -1)
        return self.output(gate * gate.sigmoid() * up)


@dataclass
class Models:
    """A policy, the reference it is kept close to, and the critic; with what they leave to the
    next iteration."""

    policy: nn.Module  # a causal language model
    reference: nn.Module
    value_head: nn.Module | None  # a linear layer on last hidden states, or a `SideNetwork`
    # a causal language model whose states the value head reads; or the policy's
    critic_body: nn.Module | None = None
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of Adam
    steps: int = 0  # optimizer steps taken
    units: Units = field(default_factory=Units)  # of the value head
    # in whose units the side network reads rewards
    token_scores: Recent = field(default_factory=Recent)
    first_fit: Tensor | None = None  # weights of what `seen_first` has
    told_earlier: float = 0.0  # squares of scores around what is usual, before last tokens
    told_last: float = 0.0
    largest_unit: float = 0.0  # of the returns of a rollout

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, which begins with "policy" for those of the policy."""
        modules = {
            "policy": self.policy,
            "value_head": self.value_head,
            "critic_body": self.critic_body,
        }
        named = {
            f"{role}.{name}": x
            for role, module in modules.items()
            if module
            for name, x in module.named_parameters()
        }
        return {name: x for name, x in named.items() if x.requires_grad}


@dataclass
class Sample:
    """A sampled completion; the second half is filled in by [`collect`], and constant over the
    epochs."""

    prompt: list[int]
    ids: list[int]  # sampled tokens, EOS included
    score: float | None  # None: its reward failed, and it is skipped
    truncated: bool  # ended at the maximum length, not at EOS
    token_scores: list[float] = field(
        default_factory=list
    )  # rewards of the tokens, besides the score; none by default

    # mean reward per token so far, as the side network reads it
    earned: list[float] = field(default_factory=list)
    reference: Tensor | None = None  # [response, vocabulary], log-probs under the reference
    old: "Outputs | None" = None  # under the policy that sampled
    # False: excluded from the policy's loss and from whitening; a critic learns if it has a score
    learn: bool = True
    rewards: list[float] = field(default_factory=list)
    # of the critic when the completion was sampled
    values: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)  # what is subtracted from returns
    # what it says of outcomes around their mean
    explains: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)  # targets of the critic
    outcomes: list[float] = field(default_factory=list)  # Monte Carlo returns
    unit: float = 1.0  # of the advantages, in that of the scores; a KL in the loss has the same
    entropy_unit: float = 1.0  # size of the rollout's advantages, which an entropy bonus has too

    def __post_init__(self):
        self.token_scores = self.token_scores or [0.0] * len(self.ids)

    def scores_at_tokens(self) -> list[float]:
        """Rewards without a KL penalty."""
        return [*self.token_scores[:-1], self.token_scores[-1] + (self.score or 0.0)]


class Outputs(NamedTuple):
    """One number per sampled token."""

    logprobs: Tensor
    entropies: Tensor
    kl: Tensor  # KL from the reference by the chosen estimator
    k1: Tensor
    predictions: Tensor | None  # of the critic, in its units
    seen: Tensor | None = None  # [response, inputs] of the first fit


# 1. ---- forward


def earned_rewards(sample: Sample, recent: Recent) -> list[float]:
    """Mean reward of the tokens before each one, in units of earlier rollouts; 0 while there are
    none."""
    if not recent.weighted:
        return [0.0] * len(sample.ids)
    count, mean, squares = recent.moments()
    if squares:
        deviation = max(math.sqrt(squares / count), 1e-4 * abs(mean))
    else:
        deviation = 1.0
    standardized = [(x - mean) / deviation for x in sample.scores_at_tokens()]
    means = [0.0, *(statistics.mean(standardized[:t]) for t in range(1, len(standardized)))]
    return [max(-5.0, min(5.0, x)) for x in means]


def waves(length: int, s: Settings) -> Tensor:
    """The positions up to a length: cos(π·k·t / `max_completion_length`) for k from 0 to 15."""
    parts = [
        [math.cos(math.pi * k * t / s.max_completion_length) for k in range(16)]
        for t in range(length)
    ]
    return torch.tensor(parts, dtype=torch.float64)


def side_inputs(states: list[Tensor], earned: list[float], s: Settings) -> Tensor:
    """States after each quarter of the layers, the position in the completion, and the rewards so
    far.

    All have about the same length.
    """
    size = states[-1].shape[-1]
    epsilon = 2.0**-23
    layers = sorted({round((len(states) - 1) * quarter / 4) for quarter in (1, 2, 3, 4)})
    parts = [
        x / ((x**2).mean(-1, keepdim=True) + epsilon).sqrt()
        for x in (states[layer].detach() for layer in layers)
    ]
    positions = torch.nn.functional.pad(waves(len(earned), s), (0, size - 16))
    rewards = torch.tensor(earned, dtype=torch.float64)[:, None]
    return torch.cat([*parts, math.sqrt(size / 16) * positions, math.sqrt(size / 16) * rewards], -1)


def seen_first(inputs: Tensor, s: Settings) -> Tensor:
    """What the first fit reads: 256 fixed random directions of the side network's inputs, and
    the position."""
    directions = torch.randn(
        256, inputs.shape[1], generator=torch.Generator().manual_seed(0)
    ).double()
    return torch.cat([inputs @ directions.T, waves(len(inputs), s)], 1)


def forward(models: Models, sample: Sample, s: Settings) -> Outputs:
    """Log-probs, entropies, KL and predicted values of a completion."""
    ids = torch.tensor([sample.prompt + sample.ids])
    tokens = torch.tensor(sample.ids)[:, None]
    # logits and values at a position belong to the next token: the first sampled one has them at
    # the prompt's end
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
    predictions = seen = None
    if models.value_head is not None:
        body = (
            outputs
            if models.critic_body is None
            else models.critic_body(input_ids=ids, output_hidden_states=True)
        )
        states = [x[0, response] for x in body.hidden_states]
        if s.critic == "side":
            inputs = side_inputs(states, sample.earned, s)
        else:
            inputs = states[-1]
        predictions = models.value_head(inputs)[:, 0]
        if s.critic == "side":
            seen = seen_first(inputs, s)
            predictions = (
                predictions if models.first_fit is None else predictions + seen @ models.first_fit
            )
    return Outputs(
        policy.gather(1, tokens)[:, 0], -(policy.exp() * policy).sum(-1), kl, k1, predictions, seen
    )


# 2. ---- rewards


def rewards_of(sample: Sample, s: Settings) -> list[float]:
    """Rewards of the tokens, less the KL penalty; the score is at the last one."""
    if s.kl_placement == "loss":
        coefficient = 0.0
    else:
        coefficient = s.kl_coef
    rewards = [
        x - coefficient * kl for x, kl in zip(sample.scores_at_tokens(), sample.old.kl.tolist())
    ]
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
    if estimator == "grpo":
        deviation = statistics.stdev(scores) + 1e-4
    else:
        deviation = 1.0
    return [(x - mean) / deviation for x in scores]


def deviation(rows: list[list[float]]) -> float:
    """Deviation over the tokens of all rows."""
    return statistics.stdev([x for row in rows for x in row])


def whiten(rows: list[list[float]], keep_mean: bool = False) -> list[list[float]]:
    """Unit variance over the tokens of all rows, and mean 0 unless it is kept."""
    tokens = [x for row in rows for x in row]
    mean = statistics.mean(tokens)
    deviation = statistics.stdev(tokens)
    return [[(x - mean) / deviation + keep_mean * mean for x in row] for row in rows]


def fit_new(models: Models, samples: list[Sample], s: Settings) -> None:
    """Let a new side network begin with a ridge regression of the returns on what `seen_first` has
    of its inputs.

    Besides the samples there is one completion of full length with targets of 0, of which only the
    position is read. A weight costs its square times the sum of its squared inputs over 128 average
    samples, or 16 for the position.
    """
    inputs = torch.cat([sample.old.seen for sample in samples])
    targets = torch.tensor(
        [models.units.in_units(x) for sample in samples for x in sample.outcomes]
    ).double()
    width = inputs.shape[1] - 16
    length = s.max_completion_length
    costs = torch.tensor([128.0] * width + [16.0] * 16, dtype=torch.float64)
    penalty = torch.diag((costs / len(samples) * (inputs**2).sum(0)).sqrt())
    everywhere = torch.cat([torch.zeros(length, width, dtype=torch.float64), waves(length, s)], 1)
    rows = torch.cat([inputs, everywhere, penalty])
    zeros = torch.zeros(len(rows) - len(targets), dtype=torch.float64)
    models.first_fit = torch.linalg.lstsq(rows, torch.cat([targets, zeros])[:, None]).solution[:, 0]
    for sample in samples:
        sample.old = sample.old._replace(
            predictions=sample.old.predictions + sample.old.seen @ models.first_fit
        )


def usual_scores(samples: list[Sample]) -> list[float]:
    """Mean score at each position: of the completions that go on after it, or else of those that
    end there."""
    means = []
    for t in range(max(len(sample.ids) for sample in samples)):
        going_on = [sample.scores_at_tokens()[t] for sample in samples if len(sample.ids) > t + 1]
        ending = [sample.scores_at_tokens()[t] for sample in samples if len(sample.ids) == t + 1]
        means.append(statistics.mean(going_on or ending))
    return means


def default_lambda(models: Models, samples: list[Sample]) -> float:
    """0.8 if, over the run, scores vary more before last tokens than at them; else 1.

    Each token may have a score.
    """
    means = usual_scores(samples)
    for sample in samples:
        *before, last = [(x - mean) ** 2 for x, mean in zip(sample.scores_at_tokens(), means)]
        models.told_earlier += sum(before)
        models.told_last += last
    if models.told_earlier > models.told_last:
        return 0.8
    return 1.0


def covariance(xs: list[float], ys: list[float]) -> float:
    """Mean product of deviations."""
    x_mean = statistics.mean(xs)
    y_mean = statistics.mean(ys)
    return statistics.mean((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys))


def fit(samples: list[Sample]) -> tuple[float, float, float]:
    """α of least squares, between 0 and 1, and the means of returns and values."""
    returns = [x for sample in samples for x in sample.outcomes]
    values = [x for sample in samples for x in sample.values]
    if not returns:
        return 0.0, 0.0, 0.0
    varies = covariance(values, values)
    if varies:
        weight = min(max(covariance(returns, values) / varies, 0.0), 1.0)
    else:
        weight = 0.0
    return weight, statistics.mean(returns), statistics.mean(values)


def squared_error(samples: list[Sample], weight: float, mean: float, center: float) -> float:
    """Sum of the squared errors of mean + weight·(V − center)."""
    pairs = [pair for sample in samples for pair in zip(sample.outcomes, sample.values)]
    return sum((r - mean - weight * (v - center)) ** 2 for r, v in pairs)


def baseline(
    models: Models, sample: Sample, samples: list[Sample], bootstraps: bool
) -> tuple[list[float], float]:
    """R̄ + α·(V − V̄) and α, fitted to the other samples.

    α shrinks by the squared share of what it explains that holds for samples left out in turn, in
    up to 16 parts. With λ below 1 it does not, and is 1 if there are fewer than 8 others; values
    stay as they are if it is above 0.5.
    """
    numbered = [pair for pair in enumerate(samples) if pair[1] is not sample]
    others = [other for _, other in numbered]
    weight, mean, center = fit(list(others))
    if bootstraps:
        if len(others) < 8:
            weight = 1.0
    elif weight:
        errors = constant = 0.0
        for part in range(16):
            left_out = [other for number, other in numbered if number % 16 == part]
            rest = [other for number, other in numbered if number % 16 != part]
            errors += squared_error(left_out, *fit(rest))
            constant += squared_error(left_out, 0.0, *fit(rest)[1:])
        explained = 1 - squared_error(others, weight, mean, center) / squared_error(
            others, 0.0, mean, center
        )
        weight *= min(max((1 - errors / constant) / explained, 0.0), 1.0) ** 2
    returns = [x for other in others for x in other.outcomes]
    # earlier rollouts are 8 average samples more, if there are so many
    before = models.units.returns.weighted
    if before:
        count, earlier, _ = models.units.returns.moments()
        count = min(count, 8 * len(returns) / len(others))
        mean = (mean * len(returns) + earlier * count) / (len(returns) + count)
    if bootstraps and weight > 0.5:  # a shift would charge the ends
        return sample.values, weight
    return [mean + weight * (value - center) for value in sample.values], weight


def advantages_of_critic(models: Models, samples: list[Sample], s: Settings) -> None:
    """GAE, with a λ for the policy's advantages and one for the critic's targets; both in the
    critic's units."""
    units = models.units
    for sample in samples:
        sample.outcomes = gae(sample.rewards, [0.0] * len(sample.ids), s.gamma, 1.0)
    outcomes = [x for sample in samples for x in sample.outcomes]
    is_new = s.critic == "side" and models.first_fit is None
    if s.normalize_values:
        units.begin_rollout(outcomes, len(samples))
    if is_new and (not s.normalize_values or max(outcomes) > min(outcomes)):
        fit_new(models, samples, s)
    of_policy = default_lambda(models, samples)
    if s.lam is not None:
        of_policy = s.lam
    for sample in samples:
        sample.values = [units.value(x) for x in sample.old.predictions.tolist()]
        sample.baseline = sample.explains = sample.values
    if s.normalize_values:
        center = statistics.mean(x for sample in samples for x in sample.values)
        for sample in samples:
            bootstraps = s.lam_length_alpha is not None or of_policy < 1
            sample.baseline, weight = baseline(models, sample, samples, bootstraps)
            sample.explains = [weight * (value - center) for value in sample.values]
    for sample in samples:
        # a longer completion has a λ closer to 1, so that its first tokens feel the score at its
        # end
        alpha = s.lam_length_alpha
        lam = of_policy if alpha is None else max(0.0, 1 - 1 / (alpha * len(sample.ids)))
        sample.advantages = gae(sample.rewards, sample.baseline, s.gamma, lam)
        targets = gae(sample.rewards, sample.values, s.gamma, s.lam_critic)
        sample.returns = [advantage + value for advantage, value in zip(targets, sample.values)]
    if s.normalize_values:
        unit = units.end_rollout(outcomes, len(samples))
        models.largest_unit = max(models.largest_unit, unit)
        unit = max(unit, 0.1 * models.largest_unit)  # what differs in a solved task is not blown up
        for sample in samples:
            sample.advantages = [x / unit for x in sample.advantages]
            sample.unit = sample.unit * unit


@torch.no_grad()
def collect(models: Models, samples: list[Sample], s: Settings) -> None:
    """Steps 1 to 3."""
    for sample in samples:
        sample.earned = earned_rewards(sample, models.token_scores)
        sample.old = forward(models, sample, s)
        sample.rewards = rewards_of(sample, s)
        sample.learn = sample.score is not None and not (
            sample.truncated and s.mask_truncated_completions
        )
    learned = [x for x in samples if x.learn]
    scored = [x for x in samples if x.score is not None]
    if s.whiten_rewards:
        unit = deviation([sample.rewards for sample in scored])
        for sample, rewards in zip(
            scored, whiten([sample.rewards for sample in scored], keep_mean=True)
        ):
            sample.rewards = rewards
            sample.unit = unit
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
        advantages_of_critic(models, scored, s)
    models.token_scores.add(
        [x for sample in scored for x in sample.scores_at_tokens()], len(scored)
    )
    if s.whiten_advantages:
        unit = deviation([sample.advantages for sample in learned])
        for sample, advantages in zip(learned, whiten([sample.advantages for sample in learned])):
            sample.advantages = advantages
            sample.unit = sample.unit * unit
    if learned:
        size = math.sqrt(statistics.mean(x**2 for sample in learned for x in sample.advantages))
    else:
        size = 0.0
    for sample in samples:
        sample.entropy_unit = size or 1.0


# 4. ---- loss


def policy_loss(ratio: Tensor, advantage: float, s: Settings, clips: Counter) -> Tensor:
    """−Â·ρ with ρ = π/π_old, held at a bound: beyond it the loss is constant."""
    bounds = {
        # likely enough
        "high": (1 + s.cliprange_high, advantage > 0 and ratio > 1 + s.cliprange_high),
        "low": (1 - s.cliprange, advantage < 0 and ratio < 1 - s.cliprange),  # rare enough
        # an outlier
        "dual": (s.dual_clip, advantage < 0 and s.dual_clip is not None and ratio > s.dual_clip),
    }
    for name, (bound, holds) in bounds.items():
        if holds:
            clips[name] += 1
            return -advantage * bound * torch.ones_like(ratio)
    return -advantage * ratio


def value_loss(value: Tensor, old: float, target: float, s: Settings, clips: Counter) -> Tensor:
    """Half the squared error, in units; that of the clipped step from the old value when it is
    larger."""
    error = (value - target) ** 2 / 2
    clip = s.cliprange_value
    if clip is None or abs(value.item() - old) <= clip:
        return error
    clipped = (old + math.copysign(clip, value.item() - old) - target) ** 2 / 2
    clips["value"] += int(clipped > error.item())
    return error.clamp(min=clipped)


def loss_of(models: Models, samples: list[Sample], s: Settings) -> tuple[Tensor, dict[str, float]]:
    """Loss of an optimizer step, the share of tokens that each clip holds, and the mean losses
    per token."""
    clips = Counter()
    completions = []
    of_policy = []
    of_values = []
    in_units = models.units.in_units
    for sample in samples:
        if sample.score is None:
            continue
        now = forward(models, sample, s)
        if now.predictions is not None:
            tokens = zip(
                now.predictions, sample.old.predictions.tolist(), map(in_units, sample.returns)
            )
            of_values.append(torch.stack([value_loss(*token, s, clips) for token in tokens]))
        if not sample.learn:
            continue
        log_ratio = now.logprobs - sample.old.logprobs
        if s.importance_sampling_level == "sequence":
            log_ratio = log_ratio.mean().expand_as(log_ratio)
        losses = [
            policy_loss(ratio, a, s, clips) for ratio, a in zip(log_ratio.exp(), sample.advantages)
        ]
        of_policy.extend(loss.item() for loss in losses)
        if s.kl_placement != "reward":
            losses = [x + s.kl_coef / sample.unit * kl for x, kl in zip(losses, now.kl)]
        losses = [
            x - s.entropy_coef * sample.entropy_unit * entropy
            for x, entropy in zip(losses, now.entropies)
        ]
        completions.append(torch.stack(losses))
    loss = aggregate(completions, s) + (s.vf_coef * aggregate(of_values, s) if of_values else 0)
    metrics = {name: clips[name] / len(of_policy) for name in ("low", "high", "dual")}
    metrics |= {"policy loss": statistics.mean(of_policy), "value": 0.0}
    if of_values:
        errors = torch.cat(of_values)
        metrics |= {"value": clips["value"] / len(errors), "value loss": errors.mean().item()}
    return loss, metrics


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
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(parameters, gradients))


def role_of(name: str) -> str:
    """Policy or critic, by the name of a parameter."""
    if name.startswith("policy."):
        return "policy"
    return "critic"


def gradient_norms(gradient: dict[str, Tensor]) -> dict[str, float]:
    """Norms of the gradients of policy and critic."""
    squares = Counter()
    for name, g in gradient.items():
        squares[role_of(name)] += (g**2).sum().item()
    return {role: math.sqrt(x) for role, x in squares.items()}


@torch.no_grad()
def adam_step(models: Models, gradient: dict[str, Tensor], s: Settings) -> None:
    """Clip policy and critic, each by its norm; Adam with decoupled weight decay, which biases
    are spared."""
    norms = gradient_norms(gradient)
    clipped = {role: s.max_grad_norm and norm > s.max_grad_norm for role, norm in norms.items()}
    scales = {
        role: s.max_grad_norm / norm if clipped[role] else 1.0 for role, norm in norms.items()
    }
    left = 1 - models.steps / s.max_steps
    rates = {"policy": left * s.learning_rate, "critic": left * s.critic_learning_rate}
    models.steps += 1
    for name, parameter in models.parameters().items():
        role = role_of(name)
        g = gradient[name] * scales[role]
        rate = rates[role]
        mean, square = models.moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
        models.moments[name] = mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        # unbiased
        mean = mean / (1 - 0.9**models.steps)
        square = square / (1 - 0.999**models.steps)
        if name.endswith("bias"):
            decay = 0.0
        else:
            decay = s.weight_decay
        parameter -= rate * (mean / (square.sqrt() + s.adam_epsilon) + decay * parameter)


# 7. ---- steered coefficients


def steer_kl_coef(
    coefficient: float, kl_per_completion: float, completions: int, s: Settings
) -> float:
    """Ziegler's rule: move in proportion to the error, of which at most 20 % count."""
    error = max(-0.2, min(0.2, kl_per_completion / s.kl_target - 1))
    return coefficient * (1 + error * min(completions / s.kl_horizon, 1))


def iterate(
    models: Models,
    samples: list[Sample],
    s: Settings,
    minibatches: list[list[Sample]] | None = None,
    measured: list[Sample] | None = None,
) -> tuple[Settings, list[dict[str, float]]]:
    """One iteration on completions of the policy; returns the settings of the next one, and metrics
    of each step.

    A minibatch is what an optimizer step learns from: all samples by default, `num_ppo_epochs`
    times. After the last step the distance of the policy is `measured` on some samples, by default
    on all.
    """
    collect(models, samples, s)
    following = s
    metrics = list[dict[str, float]]()
    for minibatch in minibatches or [samples] * s.num_ppo_epochs:
        if s.target_kl is not None and distance(models, minibatch, s) > s.target_kl:
            break
        loss, of_step = loss_of(models, minibatch, s)
        gradient = gradient_of(models, loss)
        metrics.append(
            of_step | {f"norm of {role}": norm for role, norm in gradient_norms(gradient).items()}
        )
        adam_step(models, gradient, s)
    metrics[-1]["distance"] = distance(models, samples if measured is None else measured, s)
    if s.kl_target is not None:  # the KL of these samples steers the next rewards
        kls = [sample.old.k1.sum().item() for sample in samples if sample.score is not None]
        coefficient = steer_kl_coef(s.kl_coef, statistics.mean(kls), len(kls), s)
        following = replace(following, kl_coef=coefficient)
    return following, metrics
