"""PPO for language models in its plainest form: the algorithm of this package, and the yardstick of
its tests.

Everything is float64, one completion at a time: no padding, no batches, nothing of the package.
[`Settings`] has the names and defaults of `PPOConfig`. An iteration takes completions that the
policy sampled, and their scores:

1. Forward: log-probs under policy and reference, the KL of each token, the critic's predictions.
2. Rewards per token: those of the completion, minus the KL penalty.
3. Advantages: with a critic, GAE in units of the returns. Without one, each completion is compared
   with the others of its prompt.

Steps 4 to 6 are repeated for each minibatch of each of `num_ppo_epochs` epochs:

4. Early stop: take no further step if the policy has moved too far from the one that sampled.
5. Loss: clipped policy loss, value loss, KL, entropy.
6. Optimizer step: clip the gradient, and apply Adam.

After the last of them, the distance from the policy that sampled is measured.

7. Steering: change the KL coefficient of the next iteration.

[`iterate`] takes these steps in this order. The functions above it compute them.
"""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

PerToken = list[float]  # one number for each sampled token of a completion
PerParameter = dict[str, Tensor]  # one tensor for each trained parameter, under its name
Metrics = dict[str, float]

WAVES = 16  # number of inputs that encode the position of a token


@dataclass
class Settings:
    """Hyperparameters, with the names and the defaults that they have in `PPOConfig`.

    A field of None gets a default that depends on the others, or its feature is off.
    """

    temperature: float = 1.0
    # A truncated completion loses this much of its score.
    missing_eos_penalty: float | None = None
    # Truncated completions are compared with the others, but only the critic learns from them.
    mask_truncated_completions: bool = False
    whiten_rewards: bool = False

    kl_estimator: str = "k1"  # or "k2", "k3", "exact"
    kl_placement: str = "reward"  # or "loss", or "both"
    kl_coef: float = 0.0
    kl_target: float | None = None  # KL per completion to which `kl_coef` is steered
    kl_horizon: int = 10_000

    critic: str = "side"  # or "head", "adapter", "none"
    # The critic predicts in units of the returns. This is the default with any critic.
    normalize_values: bool | None = None
    # "gae" with a critic. Without one "grpo" by default, or "dr_grpo", "rloo", "reinforce", "rebn".
    advantage_estimator: str | None = None
    num_generations: int = 1  # completions per prompt
    gamma: float = 1.0
    lam: float | None = None  # λ of the policy's advantages; `default_lambda` if None
    lam_critic: float = 1.0  # λ of the critic's targets
    # The policy's λ grows with the length of a completion: 1 − 1 / (`lam_length_alpha` · length).
    lam_length_alpha: float | None = None
    # By default True for "rebn", and for a critic whose values are not normalized.
    whiten_advantages: bool | None = None

    # By default a token's probability changes at most by a factor of 2: `cliprange` is 0.5,
    # `cliprange_high` 1.0 and `dual_clip` 2.0. If `cliprange` is set, `cliprange_high` equals it by
    # default, and there is no dual clip.
    cliprange: float | None = None
    cliprange_high: float | None = None
    dual_clip: float | None = None
    importance_sampling_level: str = "token"  # or "sequence": one ratio per completion
    cliprange_value: float | None = None  # in units of the critic's predictions
    vf_coef: float = 0.5
    entropy_coef: float = 0.0
    loss_aggregation: str | None = None  # by default that of the paper of the advantage estimator
    max_completion_length: int = 256

    num_ppo_epochs: int = 1
    target_kl: float | None = 0.3
    learning_rate: float = 5e-5  # falls linearly to 0 over `max_steps`
    # By default 1e-3 for the side network and `learning_rate` for other critics.
    critic_learning_rate: float | None = None
    max_steps: int = -1
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    # The gradients of policy and critic are clipped separately. 0 disables clipping.
    max_grad_norm: float = 1.0

    def __post_init__(self):
        has_critic = self.critic != "none"
        if self.advantage_estimator is None:
            if has_critic:
                self.advantage_estimator = "gae"
            else:
                self.advantage_estimator = "grpo"
        if self.loss_aggregation is None:
            aggregations = {
                "grpo": "sequence_mean",
                "dr_grpo": "constant",
                "rloo": "sequence_sum",
                "reinforce": "sequence_sum",
            }
            self.loss_aggregation = aggregations.get(self.advantage_estimator, "token")
        if self.normalize_values is None:
            self.normalize_values = has_critic
        if self.whiten_advantages is None:
            has_plain_values = has_critic and not self.normalize_values
            self.whiten_advantages = has_plain_values or self.advantage_estimator == "rebn"
        if self.cliprange is None:
            self.cliprange = 0.5
            if self.cliprange_high is None:
                self.cliprange_high = 1.0
            if self.dual_clip is None:
                self.dual_clip = 2.0
        if self.cliprange_high is None:
            self.cliprange_high = self.cliprange
        if self.critic_learning_rate is None:
            if self.critic == "side":
                self.critic_learning_rate = 1e-3
            else:
                self.critic_learning_rate = self.learning_rate


class Recent:
    """Weighted numbers of all rollouts so far.

    Each number of the newest rollout weighs 1. All earlier ones together weigh at most as much as 8
    average completions of the newest.
    """

    def __init__(self):
        self.weighted = []  # pairs of a weight and a number

    def add(self, rollout: list[float], completions: int) -> None:
        """Add the numbers of a rollout of so many completions."""
        before = self.count()
        if before:
            most = 8 * len(rollout) / completions
            kept = min(1.0, most / before)
        else:
            kept = 1.0
        earlier = [(kept * weight, x) for weight, x in self.weighted]
        newest = [(1.0, x) for x in rollout]
        self.weighted = earlier + newest

    def count(self) -> float:
        """Sum of the weights."""
        return sum(weight for weight, _ in self.weighted)

    def mean(self) -> float:
        return sum(weight * x for weight, x in self.weighted) / self.count()

    def differ(self) -> bool:
        """Whether not all numbers are equal."""
        return len({x for _, x in self.weighted}) > 1

    def deviation(self) -> float:
        """Standard deviation, or 1 if all numbers are equal."""
        mean = self.mean()
        squares = sum(weight * (x - mean) ** 2 for weight, x in self.weighted)
        if squares == 0:
            return 1.0
        # A deviation below the rounding of the numbers would be noise.
        return max(math.sqrt(squares / self.count()), 1e-4 * abs(mean))


class Units:
    """Mean and deviation of recent Monte Carlo returns: a value is mean + deviation · prediction.

    The critic does not read them. A new critic predicts 0, so its values are the mean return of its
    first rollout.
    """

    def __init__(self):
        self.returns = Recent()
        self.mean = 0.0
        self.deviation = 1.0

    def begin_rollout(self, outcomes: list[float], completions: int) -> None:
        """Set the units in which the predictions for a new rollout are read.

        They are the units of earlier returns. Equal earlier returns have no deviation. Then the
        returns of the new rollout are added, but only `end_rollout` records them.
        """
        earlier = self.returns.weighted
        if not self.returns.differ():
            self._move(outcomes, completions)
            self.returns.weighted = earlier

    def end_rollout(self, outcomes: list[float], completions: int) -> float:
        """Record the returns before the critic learns; return the new deviation."""
        self._move(outcomes, completions)
        return self.deviation

    def _move(self, returns: list[float], completions: int) -> None:
        # Equal returns do not lower the scale: if they would, earlier ones move to the new mean, and
        # keep their distances.
        earlier = self.returns.weighted
        keeps_scale = self.returns.differ() and max(returns) == min(returns)
        before = self.mean
        self.returns.add(returns, completions)
        self.mean = self.returns.mean()
        if keeps_scale and self.returns.deviation() < self.deviation:
            share = self.returns.count() / sum(weight for weight, _ in earlier)
            moved = [(share * weight, x - before + self.mean) for weight, x in earlier]
            self.returns.weighted = moved
        self.deviation = self.returns.deviation()

    def value(self, prediction: float) -> float:
        return self.mean + self.deviation * prediction

    def in_units(self, value: float) -> float:
        return (value - self.mean) / self.deviation


class SideNetwork(nn.Module):
    """Gated network on [`side_inputs`], which returns one number per token.

    Its gradient does not reach the policy. Inputs are scaled as if there were 256 of them. So the
    size of the policy does not matter for how far an Adam step moves the output.
    """

    def __init__(self, first: nn.Linear, output: nn.Linear):
        super().__init__()
        self.first = first
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        scaled = 256 / x.shape[-1] * x
        gate, up = self.first(scaled).chunk(2, -1)
        swish = gate * gate.sigmoid()
        return self.output(swish * up)


@dataclass
class Models:
    """Policy, reference and critic, and the state that is kept between iterations."""

    policy: nn.Module  # a causal language model
    reference: nn.Module  # the model that the KL penalty keeps the policy close to
    value_head: nn.Module | None  # a linear layer on last hidden states, or a `SideNetwork`
    # A causal language model whose states the value head reads. None: the policy.
    critic_body: nn.Module | None = None

    steps: int = 0  # optimizer steps taken
    first_moments: PerParameter = field(default_factory=dict)  # of Adam
    second_moments: PerParameter = field(default_factory=dict)
    units: Units = field(default_factory=Units)  # units of the value head's predictions
    # The side network reads earlier rewards in units of these.
    token_scores: Recent = field(default_factory=Recent)
    # Weights on the inputs of `seen_first`, whose output is added to the side network's.
    first_fit: Tensor | None = None
    # `default_lambda` compares these sums over the run. They are squared distances of scores from
    # the usual score at their position, at last tokens of completions and at all tokens before.
    squares_before_last: float = 0.0
    squares_at_last: float = 0.0
    # the largest and the second largest deviation of the returns of a rollout so far
    largest_deviations: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, which begins with "policy" for those of the policy."""
        modules = {
            "policy": self.policy,
            "value_head": self.value_head,
            "critic_body": self.critic_body,
        }
        trained = {}
        for role, module in modules.items():
            if module is None:
                continue
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    trained[f"{role}.{name}"] = parameter
        return trained


@dataclass
class Sample:
    """A sampled completion, and the results of [`collect`], which are constant over the epochs."""

    prompt: list[int]
    ids: list[int]  # sampled tokens, EOS included
    score: float | None  # None if the reward failed; then the completion is skipped
    truncated: bool  # ended at the maximum length, not at EOS
    # Rewards of single tokens in addition to the score. Without any, `__post_init__` sets zeros.
    token_scores: PerToken = field(default_factory=list)

    # `collect` sets the fields below.
    earned: PerToken = field(default_factory=list)  # see `earned_rewards`
    reference: Tensor | None = None  # log-probs under the reference, [response, vocabulary]
    old: "Outputs | None" = None  # outputs of the models that sampled
    # False: excluded from the policy's loss and from whitening. The critic learns from every
    # completion that has a score.
    learn: bool = True
    rewards: PerToken = field(default_factory=list)
    values: PerToken = field(default_factory=list)  # predictions as values, before any update
    baseline: PerToken = field(default_factory=list)  # subtracted from the returns
    # The part of the baseline that varies with the values. Only tests read it.
    explains: PerToken = field(default_factory=list)
    advantages: PerToken = field(default_factory=list)
    returns: PerToken = field(default_factory=list)  # targets of the critic
    outcomes: PerToken = field(default_factory=list)  # Monte Carlo returns
    # An advantage of 1 is this much score. A KL penalty in the loss is divided by it.
    unit: float = 1.0
    # Root mean square of the rollout's advantages. The entropy bonus is multiplied by it.
    entropy_unit: float = 1.0

    def __post_init__(self):
        if not self.token_scores:
            self.token_scores = [0.0] * len(self.ids)

    def scores_at_tokens(self) -> PerToken:
        """Rewards without a KL penalty: the score is added at the last token."""
        *before, last = self.token_scores
        return [*before, last + (self.score or 0.0)]


class Outputs(NamedTuple):
    """Results of a forward, one number per sampled token."""

    logprobs: Tensor
    entropies: Tensor
    kl: Tensor  # KL from the reference by the chosen estimator
    k1: Tensor  # the same by k1
    predictions: Tensor | None  # outputs of the critic, before `Units` make them values
    fit_inputs: Tensor | None = None  # inputs of the first fit, [response, inputs]
    left_out: Tensor | None = None  # predictions of a first fit to other samples only


# 1. ---- forward


def earned_rewards(sample: Sample, recent: Recent) -> PerToken:
    """Mean reward of the tokens before each one, in units of earlier rollouts.

    In the first rollout, which has no units yet, it is 0.
    """
    if not recent.weighted:
        return [0.0] * len(sample.ids)
    mean = recent.mean()
    deviation = recent.deviation()
    standardized = [(x - mean) / deviation for x in sample.scores_at_tokens()]
    earned = [0.0]
    for t in range(1, len(standardized)):
        mean_before = statistics.mean(standardized[:t])
        earned.append(max(-5.0, min(5.0, mean_before)))
    return earned


def waves(length: int, settings: Settings) -> Tensor:
    """Encode positions t below a length: cos(π·k·t / `max_completion_length`) for k of 0 to 15."""
    longest = settings.max_completion_length
    rows = []
    for t in range(length):
        row = []
        for k in range(WAVES):
            row.append(math.cos(math.pi * k * t / longest))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def side_inputs(
    states: list[Tensor],
    earned: PerToken,
    settings: Settings,
) -> Tensor:
    """Inputs of the side network: the state at the end of the prompt, states after each quarter of
    the layers, the position in the completion, and the rewards so far."""
    size = states[-1].shape[-1]
    last = len(states) - 1
    layers = sorted({round(last * quarter / 4) for quarter in (1, 2, 3, 4)})
    of_prompt = states[layers[-2]][:1].expand(len(earned), -1)
    epsilon = 2.0**-23
    parts = []
    for x in [of_prompt, *(states[layer] for layer in layers)]:
        state = x.detach()
        mean_square = (state**2).mean(-1, keepdim=True)
        parts.append(state / (mean_square + epsilon).sqrt())
    # Positions and rewards are scaled to about the norm of a state, which grows with its size.
    scale = math.sqrt(size / 16)
    positions = waves(len(earned), settings)
    positions = torch.nn.functional.pad(positions, (0, size - WAVES))
    rewards = torch.tensor(earned, dtype=torch.float64)[:, None]
    return torch.cat([*parts, scale * positions, scale * rewards], -1)


def seen_first(inputs: Tensor, size: int, settings: Settings) -> Tensor:
    """Inputs of the first fit: 256 fixed random directions of the prompt's state, 256 of all else
    that the side network reads, and the position."""
    generator = torch.Generator().manual_seed(0)
    projected = []
    for part in (inputs[:, :size], inputs[:, size:]):
        directions = torch.randn(256, part.shape[1], generator=generator).double()
        projected.append(part @ directions.T)
    return torch.cat([*projected, waves(len(inputs), settings)], 1)


def forward(
    models: Models,
    sample: Sample,
    settings: Settings,
) -> Outputs:
    """Log-probs, entropies, KL and predicted values of a completion."""
    ids = torch.tensor([sample.prompt + sample.ids])
    tokens = torch.tensor(sample.ids)[:, None]
    # Logits and values at a position belong to the next token. So those of the first sampled token
    # are found at the last token of the prompt.
    response = slice(len(sample.prompt) - 1, -1)

    # The reference does not change, so one forward of it serves all epochs.
    if sample.reference is None:
        with torch.no_grad():
            logits = models.reference(input_ids=ids).logits[0, response]
            sample.reference = (logits / settings.temperature).log_softmax(-1)

    outputs = models.policy(input_ids=ids, output_hidden_states=True)
    logits = outputs.logits[0, response]
    policy = (logits / settings.temperature).log_softmax(-1)  # [response, vocabulary]
    k1 = (policy - sample.reference).gather(1, tokens)[:, 0]
    if settings.kl_estimator == "k1":
        kl = k1
    elif settings.kl_estimator == "k2":
        kl = k1**2 / 2
    elif settings.kl_estimator == "k3":
        kl = (-k1).exp() - 1 + k1
    else:  # "exact"
        kl = (policy.exp() * (policy - sample.reference)).sum(-1)
    logprobs = policy.gather(1, tokens)[:, 0]
    entropies = -(policy.exp() * policy).sum(-1)

    predictions = None
    fit_inputs = None
    if models.value_head is not None:
        if models.critic_body is None:
            body = outputs
        else:
            body = models.critic_body(input_ids=ids, output_hidden_states=True)
        states = [x[0, response] for x in body.hidden_states]
        if settings.critic == "side":
            inputs = side_inputs(states, sample.earned, settings)
            fit_inputs = seen_first(inputs, states[-1].shape[-1], settings)
        else:
            inputs = states[-1]
        predictions = models.value_head(inputs)[:, 0]
        if models.first_fit is not None:  # only a side network has one
            predictions = predictions + fit_inputs @ models.first_fit

    return Outputs(
        logprobs=logprobs,
        entropies=entropies,
        kl=kl,
        k1=k1,
        predictions=predictions,
        fit_inputs=fit_inputs,
    )


# 2. ---- rewards


def rewards_of(sample: Sample, settings: Settings) -> PerToken:
    """Rewards of the tokens, less the KL penalty. The last one includes the score, and the penalty
    for a missing EOS."""
    if settings.kl_placement == "loss":
        coefficient = 0.0
    else:
        coefficient = settings.kl_coef
    scores = sample.scores_at_tokens()
    kls = sample.old.kl.tolist()
    rewards = []
    for score, kl in zip(scores, kls):
        rewards.append(score - coefficient * kl)
    if sample.truncated and settings.missing_eos_penalty is not None:
        rewards[-1] -= settings.missing_eos_penalty
    return rewards


# 3. ---- advantages


def gae(
    rewards: PerToken,
    values: PerToken,
    gamma: float,
    lam: float,
) -> PerToken:
    """Âₜ = Σₗ (γλ)ˡ·δₜ₊ₗ with δₜ = rₜ + γ·V(sₜ₊₁) − V(sₜ).

    The value after the last token is 0. With values of 0 and λ = 1 these are the returns.
    """
    next_values = [*values[1:], 0.0]
    deltas = []
    for reward, value, next_value in zip(rewards, values, next_values):
        deltas.append(reward + gamma * next_value - value)
    advantages = []
    for t in range(len(deltas)):
        terms = []
        for k in range(t, len(deltas)):
            terms.append((gamma * lam) ** (k - t) * deltas[k])
        advantages.append(sum(terms))
    return advantages


def group_advantages(scores: list[float], estimator: str) -> list[float]:
    """Advantages of the completions of one prompt."""
    if estimator == "reinforce":
        return scores
    if len(scores) < 2:  # there is nothing to compare with
        return [0.0] * len(scores)
    if estimator == "rloo":
        advantages = []
        for i, score in enumerate(scores):
            others = scores[:i] + scores[i + 1 :]
            advantages.append(score - statistics.mean(others))
        return advantages
    mean = statistics.mean(scores)
    if estimator == "grpo":
        scale = statistics.stdev(scores) + 1e-4
    else:  # "dr_grpo"
        scale = 1.0
    return [(x - mean) / scale for x in scores]


def whiten(
    rows: list[PerToken],
    keep_mean: bool,
) -> tuple[list[PerToken], float]:
    """Scale rows to unit variance over all their tokens; return them and their old deviation.

    The mean becomes 0 unless it is kept.
    """
    tokens = [x for row in rows for x in row]
    mean = statistics.mean(tokens)
    deviation = statistics.stdev(tokens)
    if keep_mean:
        new_mean = mean
    else:
        new_mean = 0.0
    whitened = []
    for row in rows:
        whitened.append([(x - mean) / deviation + new_mean for x in row])
    return whitened, deviation


def fit_new(
    models: Models,
    samples: list[Sample],
    settings: Settings,
) -> None:
    """Fit the returns by ridge regression on [`seen_first`], and add the fit to the predictions.

    The baseline of a sample has predictions without its return: of a fit to the other fifteen parts
    of the samples, by their number in the rollout, of which there are at least two. What is read
    from prompts counts as far as these predictions fit the returns: by the slope of a line through
    0, between 0 and 1. The rest is fitted again to what that leaves.
    """
    other_parts = []
    for number in range(len(samples)):
        others = []
        for i, other in enumerate(samples):
            if i % 16 != number % 16:
                others.append(other)
        other_parts.append(others)

    read = []
    errors = []
    for sample, others in zip(samples, other_parts):
        weights = ridge(models, others, settings)
        targets = targets_of(models, [sample])
        read.append(sample.old.fit_inputs[:, :256] @ weights[:256])
        errors.append(targets - sample.old.fit_inputs[:, 256:] @ weights[256:])
    read = torch.cat(read)
    slope = (read @ torch.cat(errors) / (read @ read)).clamp(0, 1)

    models.first_fit = ridge_with_share(models, samples, slope, settings)
    for sample, others in zip(samples, other_parts):
        weights = ridge_with_share(models, others, slope, settings)
        before = sample.old.predictions
        sample.old = sample.old._replace(
            predictions=before + sample.old.fit_inputs @ models.first_fit,
            left_out=before + sample.old.fit_inputs @ weights,
        )


def targets_of(models: Models, samples: list[Sample]) -> Tensor:
    """Returns of samples in units of the critic."""
    targets = []
    for sample in samples:
        for outcome in sample.outcomes:
            targets.append(models.units.in_units(outcome))
    return torch.tensor(targets, dtype=torch.float64)


def ridge_with_share(
    models: Models,
    samples: list[Sample],
    share: Tensor,
    settings: Settings,
) -> Tensor:
    """Weights of a ridge regression, of which those of the prompt are reduced to a share."""
    given = share * ridge(models, samples, settings)[:256]
    return torch.cat([given, ridge(models, samples, settings, given)])


def ridge(
    models: Models,
    samples: list[Sample],
    settings: Settings,
    of_prompt: Tensor | None = None,
) -> Tensor:
    """Weights of a ridge regression of the returns, or with those of the prompt the others.

    The regression has one more completion, of maximum length. Its targets and its inputs are 0,
    except for the inputs of the position. So there is also a fit at positions that no sample
    reaches.
    """
    inputs = torch.cat([sample.old.fit_inputs for sample in samples])
    targets = targets_of(models, samples)
    if of_prompt is not None:
        targets = targets - inputs[:, :256] @ of_prompt
        inputs = inputs[:, 256:]

    length = settings.max_completion_length
    width = inputs.shape[1] - WAVES
    no_inputs = torch.zeros(length, width, dtype=torch.float64)
    extra = torch.cat([no_inputs, waves(length, settings)], 1)

    # The penalty of a weight is its square, times the sum of its squared inputs over 128 average
    # samples. For the inputs of the position it is 16 samples. A penalty c·w² is a further row of
    # the regression, with an input of √c for this weight and a target of 0.
    strengths = torch.tensor([128.0] * width + [16.0] * WAVES, dtype=torch.float64)
    squares = (inputs**2).sum(0)
    penalty = torch.diag((strengths / len(samples) * squares).sqrt())

    rows = torch.cat([inputs, extra, penalty])
    zeros = torch.zeros(len(rows) - len(targets), dtype=torch.float64)
    right_side = torch.cat([targets, zeros])[:, None]
    return torch.linalg.lstsq(rows, right_side).solution[:, 0]


def usual_scores(samples: list[Sample]) -> list[float]:
    """Mean score at each position, over the completions that continue after it.

    If none continues, it is the mean over the completions that end there.
    """
    longest = max(len(sample.ids) for sample in samples)
    means = []
    for t in range(longest):
        continuing = []
        ending = []
        for sample in samples:
            if len(sample.ids) > t + 1:
                continuing.append(sample.scores_at_tokens()[t])
            elif len(sample.ids) == t + 1:
                ending.append(sample.scores_at_tokens()[t])
        means.append(statistics.mean(continuing or ending))
    return means


def default_lambda(models: Models, samples: list[Sample]) -> float:
    """Add a rollout's scores to the sums of squares in `models`; return λ of the policy.

    If scores of the run vary more before the last tokens of completions than at them, λ is 0.8.
    Otherwise it is 1, e.g. if a score comes only at the end.
    """
    means = usual_scores(samples)
    for sample in samples:
        squares = []
        for score, mean in zip(sample.scores_at_tokens(), means):
            squares.append((score - mean) ** 2)
        models.squares_before_last += sum(squares[:-1])
        models.squares_at_last += squares[-1]
    if models.squares_before_last > models.squares_at_last:
        return 0.8
    return 1.0


class Line(NamedTuple):
    """Prediction of a return from a value: mean + weight · (value − center)."""

    weight: float
    mean: float  # of the returns
    center: float  # mean of the values


def covariance(xs: list[float], ys: list[float]) -> float:
    """Mean product of deviations."""
    x_mean = statistics.mean(xs)
    y_mean = statistics.mean(ys)
    products = []
    for x, y in zip(xs, ys):
        products.append((x - x_mean) * (y - y_mean))
    return statistics.mean(products)


def fit(samples: list[Sample]) -> Line:
    """Line of least squares over all tokens, with a weight between 0 and 1."""
    returns = []
    values = []
    for sample in samples:
        returns.extend(sample.outcomes)
        values.extend(sample.values)
    if not returns:
        return Line(0.0, 0.0, 0.0)
    variance = covariance(values, values)
    if variance:
        slope = covariance(returns, values) / variance
        weight = min(max(slope, 0.0), 1.0)
    else:
        weight = 0.0
    return Line(
        weight,
        mean=statistics.mean(returns),
        center=statistics.mean(values),
    )


def squared_error(samples: list[Sample], line: Line) -> float:
    """Sum of the squared errors of a line."""
    weight, mean, center = line
    squares = []
    for sample in samples:
        for outcome, value in zip(sample.outcomes, sample.values):
            error = outcome - mean - weight * (value - center)
            squares.append(error**2)
    return sum(squares)


def explained_left_out(samples: list[Sample], excluded: Sample) -> float:
    """Explained variance of samples that are left out of a fit to all samples except one.

    They are left out in up to 16 parts, by their number in the rollout.
    """
    residual = 0.0
    total = 0.0
    for part in range(16):
        left_out = []
        rest = []
        for number, sample in enumerate(samples):
            if sample is excluded:
                continue
            if number % 16 == part:
                left_out.append(sample)
            else:
                rest.append(sample)
        line_of_rest = fit(rest)
        residual += squared_error(left_out, line_of_rest)
        total += squared_error(left_out, line_of_rest._replace(weight=0.0))
    if not total:
        return 0.0
    return 1 - residual / total


def confirmed_share(
    samples: list[Sample],
    excluded: Sample,
    line: Line,
) -> float:
    """Explained variance of samples that are left out of a fit, relative to that of the line which
    was fitted to all samples except one, between 0 and 1."""
    others = [sample for sample in samples if sample is not excluded]
    residual = squared_error(others, line)
    total = squared_error(others, line._replace(weight=0.0))
    explained = 1 - residual / total
    return min(max(explained_left_out(samples, excluded) / explained, 0.0), 1.0)


def weight_of_values(samples: list[Sample], sample: Sample) -> tuple[Line, float]:
    """Line of the other samples, and its weight, which shrinks as far as values fit the returns by
    chance."""
    line = fit([other for other in samples if other is not sample])
    weight = line.weight
    if weight:
        weight *= confirmed_share(samples, sample, line) ** 2
    return line, weight


def set_baseline(models: Models, sample: Sample, samples: list[Sample]) -> None:
    """R̄ + α·(V − V̄) at each token.

    R̄ and V̄ are the mean return and value, and α is the weight of the values. They are fitted to the
    other samples, so that the baseline does not depend on the sample's own return.
    """
    others = [other for other in samples if other is not sample]
    line, weight = weight_of_values(samples, sample)

    # The mean return includes earlier rollouts, which count as 8 average samples at most.
    mean = line.mean
    recent = models.units.returns
    if recent.weighted:
        tokens = sum(len(other.outcomes) for other in others)
        earlier_tokens = min(recent.count(), 8 * tokens / len(others))
        total = mean * tokens + recent.mean() * earlier_tokens
        mean = total / (tokens + earlier_tokens)

    sample.baseline = [mean + weight * (value - line.center) for value in sample.values]
    values = [value for other in samples for value in other.values]
    center = statistics.mean(values)
    sample.explains = [weight * (value - center) for value in sample.values]


def means_of_others(rows: list[PerToken]) -> list[PerToken]:
    """Mean of the other rows at each position; fewer than eight count as eight."""
    totals: dict[int, float] = {}
    counts: dict[int, int] = {}
    for row in rows:
        for position, x in enumerate(row):
            totals[position] = totals.get(position, 0.0) + x
            counts[position] = counts.get(position, 0) + 1
    means = []
    for row in rows:
        means.append(
            [
                (totals[position] - x) / max(counts[position] - 1, 8)
                for position, x in enumerate(row)
            ]
        )
    return means


def deviations(row: PerToken, usual: PerToken, shares: PerToken) -> PerToken:
    """Deviations from the mean at each position; 0 if that is rounding."""
    result = []
    for x, mean, share in zip(row, usual, shares):
        deviation = share * x - mean
        result.append(deviation if abs(deviation) > 1e-6 * abs(x) else 0.0)
    return result


def scatter_of_errors(samples: list[Sample], predictions: list[PerToken], excluded: int) -> float:
    """Sum, over all samples but one, of the squares of errors around their mean."""
    errors = []
    for number, (sample, row) in enumerate(zip(samples, predictions)):
        if number != excluded:
            errors.extend(x - y for x, y in zip(sample.outcomes, row))
    if not errors:
        return 0.0
    mean = statistics.mean(errors)
    return sum((error - mean) ** 2 for error in errors)


def set_bootstrapped_baselines(samples: list[Sample]) -> None:
    """What the others earn from a position on, and the values around their mean there, as far as
    they fit the returns around theirs.

    Values that know more, and whose errors scatter less than those of the mean of the others, are
    taken as they are. A value stands for those that are missing to eight others.
    """
    present = means_of_others([[1.0] * len(sample.ids) for sample in samples])
    usual_values = means_of_others([sample.values for sample in samples])
    usual_outcomes = means_of_others([sample.outcomes for sample in samples])
    values = [sample.values for sample in samples]
    of_others = []
    for outcomes, shares, row in zip(usual_outcomes, present, values):
        of_others.append([x + (1 - share) * v for x, share, v in zip(outcomes, shares, row)])
    around = []
    for sample, shares, value, outcome in zip(samples, present, usual_values, usual_outcomes):
        beyond = deviations(sample.values, value, shares)
        around.append(
            replace(sample, values=beyond, outcomes=deviations(sample.outcomes, outcome, shares))
        )
    for number, sample in enumerate(samples):
        own = around[number]
        _, weight = weight_of_values(around, own)
        scatter = scatter_of_errors(samples, values, number)
        is_nearer = scatter < scatter_of_errors(samples, of_others, number)
        if weight > 0.5 and explained_left_out(around, own) > 0.01 and is_nearer:
            sample.baseline = sample.values
            sample.explains = sample.values
            continue
        sample.baseline = []
        sample.explains = []
        for position, value in enumerate(sample.values):
            left = of_others[number][position]
            sample.baseline.append(left + weight * own.values[position])
            there = [other for other in samples if position < len(other.values)]
            values_there = [other.values[position] for other in there]
            outcomes = [other.outcomes[position] for other in there]
            # The mean of all steps stands for those that are missing to eight.
            missing = max(8 - len(there), 0)
            overall = statistics.mean(x for other in samples for x in other.values)
            values_there += missing * [overall]
            outcomes += missing * [statistics.mean(x for other in samples for x in other.outcomes)]
            beyond = value - statistics.mean(values_there)
            sample.explains.append(statistics.mean(outcomes) + weight * beyond)


def advantages_of_critic(
    models: Models,
    samples: list[Sample],
    settings: Settings,
) -> None:
    """GAE with one λ for the policy's advantages and another for the critic's targets.

    Advantages are in units of the returns if the critic is.
    """
    units = models.units
    outcomes = []
    for sample in samples:
        no_values = [0.0] * len(sample.ids)
        sample.outcomes = gae(
            sample.rewards,
            no_values,
            gamma=settings.gamma,
            lam=1.0,
        )
        outcomes.extend(sample.outcomes)

    # A new side network begins with a fit, unless equal returns leave its units undefined.
    is_new = settings.critic == "side" and models.first_fit is None
    if settings.normalize_values:
        units.begin_rollout(outcomes, len(samples))
    if is_new and (not settings.normalize_values or max(outcomes) > min(outcomes)):
        fit_new(models, samples, settings)

    # A given λ replaces the default.
    policy_lambda = default_lambda(models, samples)
    if settings.lam is not None:
        policy_lambda = settings.lam
    alpha = settings.lam_length_alpha

    # Normalized values are fitted to the returns before they are a baseline. Others are one as they
    # are.
    bootstraps = alpha is not None or policy_lambda < 1
    for sample in samples:
        predictions = sample.old.predictions
        if sample.old.left_out is not None:
            predictions = sample.old.left_out
        sample.values = [units.value(x) for x in predictions.tolist()]
        sample.baseline = sample.values
        sample.explains = sample.values
    if settings.normalize_values and bootstraps:
        set_bootstrapped_baselines(samples)
    elif settings.normalize_values:
        for sample in samples:
            set_baseline(models, sample, samples)

    for sample in samples:
        if alpha is None:
            lam = policy_lambda
        else:
            # A longer completion has a λ closer to 1, so that the score at its end reaches its
            # first tokens.
            lam = max(0.0, 1 - 1 / (alpha * len(sample.ids)))
        sample.advantages = gae(
            sample.rewards,
            sample.baseline,
            gamma=settings.gamma,
            lam=lam,
        )
        errors = gae(
            sample.rewards,
            sample.values,
            gamma=settings.gamma,
            lam=settings.lam_critic,
        )
        sample.returns = []
        for error, value in zip(errors, sample.values):
            sample.returns.append(error + value)

    if settings.normalize_values:
        unit = units.end_rollout(outcomes, len(samples))
        deviation = statistics.pstdev(outcomes)
        if deviation > 1e-6 * abs(statistics.mean(outcomes)):
            deviations = models.largest_deviations + [deviation]
            models.largest_deviations = sorted(deviations, reverse=True)[:2]
        # The returns of a solved task hardly differ. A lower bound keeps their noise small. It
        # forgives one rollout with broken scores.
        unit = max(unit, 0.1 * models.largest_deviations[1])
        for sample in samples:
            sample.advantages = [x / unit for x in sample.advantages]
            sample.unit *= unit


@torch.no_grad()
def collect(
    models: Models,
    samples: list[Sample],
    settings: Settings,
) -> None:
    """Take steps 1 to 3."""
    scored = []
    learned = []
    for sample in samples:
        sample.earned = earned_rewards(sample, models.token_scores)
        sample.old = forward(models, sample, settings)
        sample.rewards = rewards_of(sample, settings)
        is_scored = sample.score is not None
        is_masked = sample.truncated and settings.mask_truncated_completions
        sample.learn = is_scored and not is_masked
        if is_scored:
            scored.append(sample)
        if sample.learn:
            learned.append(sample)

    if settings.whiten_rewards:
        rows = [sample.rewards for sample in scored]
        whitened, unit = whiten(rows, keep_mean=True)
        for sample, rewards in zip(scored, whitened):
            sample.rewards = rewards
            sample.unit = unit

    if settings.advantage_estimator == "rebn":
        # The advantage of a token is the sum of its own and later rewards.
        for sample in learned:
            no_values = [0.0] * len(sample.rewards)
            sample.advantages = gae(
                sample.rewards,
                no_values,
                gamma=settings.gamma,
                lam=1.0,
            )
    elif settings.critic == "none":
        # All tokens of a completion have the same advantage.
        size = settings.num_generations
        for start in range(0, len(samples), size):
            completions = samples[start : start + size]
            group = [sample for sample in completions if sample.score is not None]
            totals = [sum(sample.rewards) for sample in group]  # scores less the KL penalties
            advantages = group_advantages(totals, settings.advantage_estimator)
            for sample, advantage in zip(group, advantages):
                sample.advantages = [advantage] * len(sample.ids)
    else:
        advantages_of_critic(models, scored, settings)

    token_scores = []
    for sample in scored:
        token_scores.extend(sample.scores_at_tokens())
    models.token_scores.add(token_scores, len(scored))

    if settings.whiten_advantages:
        rows = [sample.advantages for sample in learned]
        whitened, unit = whiten(rows, keep_mean=False)
        for sample, advantages in zip(learned, whitened):
            sample.advantages = advantages
            sample.unit *= unit

    # The entropy bonus is scaled with the advantages, so that `entropy_coef` means the same in any
    # unit of the rewards.
    squares = []
    for sample in learned:
        squares.extend(x**2 for x in sample.advantages)
    entropy_unit = math.sqrt(statistics.mean(squares)) if squares else 0.0
    if settings.normalize_values and not settings.whiten_advantages:
        # In the unit of the returns advantages fade, and the bonus stays.
        entropy_unit = max(entropy_unit, 0.1)
    if entropy_unit == 0:
        entropy_unit = 1.0
    for sample in samples:
        sample.entropy_unit = entropy_unit


# 4. ---- early stop


@torch.no_grad()
def distance(
    models: Models,
    samples: list[Sample],
    settings: Settings,
) -> float:
    """KL from the policy that sampled, estimated by k3, as the mean over tokens."""
    kls = []
    for sample in samples:
        if sample.learn:
            now = forward(models, sample, settings)
            log_ratio = now.logprobs - sample.old.logprobs
            k3 = log_ratio.exp() - 1 - log_ratio
            kls.extend(k3.tolist())
    return statistics.mean(kls)


# 5. ---- loss


def policy_loss(
    ratio: Tensor,
    advantage: float,
    settings: Settings,
    clips: Counter,
) -> Tensor:
    """−Â·ρ with ρ = π/π_old. Beyond a bound of ρ the loss is constant."""
    upper = 1 + settings.cliprange_high
    lower = 1 - settings.cliprange
    dual = settings.dual_clip
    if advantage > 0 and ratio > upper:  # a good token is likely enough
        clip = "high"
        bound = upper
    elif advantage < 0 and ratio < lower:  # a bad token is rare enough
        clip = "low"
        bound = lower
    elif advantage < 0 and dual is not None and ratio > dual:  # a bad token's loss is an outlier
        clip = "dual"
        bound = dual
    else:
        return -advantage * ratio
    clips[clip] += 1
    return -advantage * bound * torch.ones_like(ratio)


def value_loss(
    value: Tensor,
    old: float,
    target: float,
    settings: Settings,
    clips: Counter,
) -> Tensor:
    """Half the squared error. All numbers are in units of the returns.

    A value that moved further than the clip has at least the error of the clipped value.
    """
    error = (value - target) ** 2 / 2
    clip = settings.cliprange_value
    change = value.item() - old
    if clip is None or abs(change) <= clip:
        return error
    clipped_value = old + math.copysign(clip, change)
    clipped_error = (clipped_value - target) ** 2 / 2
    if clipped_error > error.item():
        clips["value"] += 1
    return error.clamp(min=clipped_error)


def loss_of(
    models: Models,
    samples: list[Sample],
    settings: Settings,
) -> tuple[Tensor, Metrics]:
    """Loss of an optimizer step, and metrics: the share of tokens that each clip holds, and mean
    losses per token."""
    clips = Counter()
    completions = []
    policy_losses = []
    value_losses = []
    for sample in samples:
        if sample.score is None:
            continue
        now = forward(models, sample, settings)

        if now.predictions is not None:
            old_predictions = sample.old.predictions.tolist()
            targets = [models.units.in_units(x) for x in sample.returns]
            losses = []
            for value, old, target in zip(now.predictions, old_predictions, targets):
                losses.append(value_loss(value, old, target, settings=settings, clips=clips))
            value_losses.append(torch.stack(losses))

        if not sample.learn:
            continue
        log_ratios = now.logprobs - sample.old.logprobs
        if settings.importance_sampling_level == "sequence":
            log_ratios = log_ratios.mean().expand_as(log_ratios)
        ratios = log_ratios.exp()
        kl_coef = settings.kl_coef / sample.unit
        entropy_coef = settings.entropy_coef * sample.entropy_unit
        losses = []
        for ratio, advantage, kl, entropy in zip(
            ratios,
            sample.advantages,
            now.kl,
            now.entropies,
        ):
            loss = policy_loss(ratio, advantage, settings, clips=clips)
            policy_losses.append(loss.item())
            if settings.kl_placement != "reward":
                loss = loss + kl_coef * kl
            loss = loss - entropy_coef * entropy
            losses.append(loss)
        completions.append(torch.stack(losses))

    loss = aggregate(completions, settings)
    if value_losses:
        loss = loss + settings.vf_coef * aggregate(value_losses, settings)

    metrics = {}
    for clip in ("low", "high", "dual"):
        metrics[clip] = clips[clip] / len(policy_losses)
    metrics["policy loss"] = statistics.mean(policy_losses)
    metrics["value"] = 0.0
    if value_losses:
        errors = torch.cat(value_losses)
        metrics["value"] = clips["value"] / len(errors)
        metrics["value loss"] = errors.mean().item()
    return loss, metrics


def aggregate(completions: list[Tensor], settings: Settings) -> Tensor:
    """Reduce the losses of the tokens of each completion to one number."""
    if settings.loss_aggregation == "sequence_mean":
        means = [losses.mean() for losses in completions]
        return sum(means) / len(means)
    sums = [losses.sum() for losses in completions]
    if settings.loss_aggregation == "token":
        tokens = sum(len(losses) for losses in completions)
        return sum(sums) / tokens
    sum_per_completion = sum(sums) / len(sums)
    if settings.loss_aggregation == "constant":
        return sum_per_completion / settings.max_completion_length
    return sum_per_completion  # "sequence_sum"


# 6. ---- optimizer step


def gradient_of(models: Models, loss: Tensor) -> PerParameter:
    """Gradient of each trained parameter."""
    parameters = models.parameters()
    gradients = torch.autograd.grad(
        loss,
        list(parameters.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(parameters, gradients))


def role_of(name: str) -> str:
    """Policy or critic, by the name of a parameter."""
    if name.startswith("policy."):
        return "policy"
    return "critic"


def gradient_norms(gradient: PerParameter) -> dict[str, float]:
    """Norms of the gradients of policy and critic."""
    squares = Counter()
    for name, x in gradient.items():
        squares[role_of(name)] += (x**2).sum().item()
    norms = {}
    for role, x in squares.items():
        norms[role] = math.sqrt(x)
    return norms


@torch.no_grad()
def adam_step(
    models: Models,
    gradient: PerParameter,
    settings: Settings,
) -> None:
    """Clip the gradients of policy and critic, each by its norm, and take a step of AdamW.

    Biases do not decay.
    """
    limit = settings.max_grad_norm
    scales = {}
    for role, norm in gradient_norms(gradient).items():
        if limit and norm > limit:
            scales[role] = limit / norm
        else:
            scales[role] = 1.0

    remaining = 1 - models.steps / settings.max_steps
    rates = {
        "policy": remaining * settings.learning_rate,
        "critic": remaining * settings.critic_learning_rate,
    }

    models.steps += 1
    for name, parameter in models.parameters().items():
        role = role_of(name)
        clipped = gradient[name] * scales[role]
        zeros = torch.zeros_like(clipped)
        mean = models.first_moments.get(name, zeros)
        square = models.second_moments.get(name, zeros)
        mean = 0.9 * mean + 0.1 * clipped
        square = 0.999 * square + 0.001 * clipped**2
        models.first_moments[name] = mean
        models.second_moments[name] = square
        # The moments begin at 0. These divisions remove the bias.
        mean = mean / (1 - 0.9**models.steps)
        square = square / (1 - 0.999**models.steps)
        direction = mean / (square.sqrt() + settings.adam_epsilon)
        if name.endswith("bias"):
            decay = 0.0
        else:
            decay = settings.weight_decay
        parameter -= rates[role] * (direction + decay * parameter)


# 7. ---- steered KL coefficient


def steer_kl_coef(
    coefficient: float,
    kl_per_completion: float,
    completions: int,
    settings: Settings,
) -> float:
    """Ziegler's rule: change in proportion to the relative error of the KL, clipped to ±20 %."""
    error = kl_per_completion / settings.kl_target - 1
    error = max(-0.2, min(0.2, error))
    share_of_horizon = min(completions / settings.kl_horizon, 1)
    return coefficient * (1 + error * share_of_horizon)


def iterate(
    models: Models,
    samples: list[Sample],
    settings: Settings,
    minibatches: list[list[Sample]] | None = None,
    measured: list[Sample] | None = None,
) -> tuple[Settings, list[Metrics]]:
    """Run one iteration on completions of the policy.

    Each optimizer step learns from one of the minibatches. By default it learns from all samples,
    and there are `num_ppo_epochs` steps. The distance after the last step is of the samples in
    `measured`, by default of all.

    Returns:
        The settings of the next iteration, and the metrics of each step.
    """
    if minibatches is None:
        minibatches = [samples] * settings.num_ppo_epochs
    if measured is None:
        measured = samples

    # 1. to 3. Forward, rewards, advantages.
    collect(models, samples, settings)

    metrics = []
    for minibatch in minibatches:
        # 4. Early stop. Before the first step the distance is 0.
        limit = settings.target_kl
        if limit is not None and distance(models, minibatch, settings) > limit:
            break

        # 5. Loss.
        loss, metrics_of_step = loss_of(models, minibatch, settings)

        # 6. Optimizer step.
        gradient = gradient_of(models, loss)
        for role, norm in gradient_norms(gradient).items():
            metrics_of_step[f"norm of {role}"] = norm
        metrics.append(metrics_of_step)
        adam_step(models, gradient, settings)
    metrics[-1]["distance"] = distance(models, measured, settings)

    # 7. KL coefficient of the next iteration.
    if settings.kl_target is None:
        return settings, metrics
    kls = []
    for sample in samples:
        if sample.score is not None:
            kls.append(sample.old.k1.sum().item())
    coefficient = steer_kl_coef(
        settings.kl_coef,
        kl_per_completion=statistics.mean(kls),
        completions=len(kls),
        settings=settings,
    )
    return replace(settings, kl_coef=coefficient), metrics
