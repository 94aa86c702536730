"""Collect a rollout: sample, score, log-probs and values, KL-shaped rewards, advantages."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.utils import logging

from .. import ppo_math
from ..config import PPOConfig
from ..episodes import Episode, Player, to_sequences
from ..episodes.environments import EnvironmentReward
from ..modeling import ActorCritic, TokenScores
from ..modeling.critics import Critic
from ..ppo_math import Moments, Reduction
from ..rewards.scoring import Reward, Scored, ScoringBatch, guarded, monitor, score_all
from ..sequences import Sequences
from .advantages import CriticAdvantages
from .guards import (
    SamplerComparison,
    log_differences,
    report_nonfinite,
    rounding_tolerance,
    stand_ins,
    warn_of_differences,
)
from .metrics import (
    Metrics,
    check_metric_name,
    log_completions,
    log_episodes,
    log_groups,
    log_hacking,
    log_rewards,
)
from .state import RunState

logger = logging.get_logger(__name__)

EVALUATION_STEP = -2  # in place of the optimizer step, in seeds of environments


class Samples(NamedTuple):
    """Completions of a batch of prompts with their scores."""

    sequences: Sequences
    stopped: Tensor  # [batch], 1 unless a limit cut the completion
    batch: ScoringBatch  # input of the rewards
    scored: Scored  # output of the rewards
    monitored: Tensor  # [batch, monitors]
    extra: dict[str, list]  # columns that reward functions added to the table of completions
    tokens: TokenScores  # [batch, response]
    values: Tensor | None  # [batch, response], of the critic in the unit of the rewards
    # [batch], 1 if a log-prob or value is not finite; None if no rank has any
    excluded: Tensor | None
    sampler_weights: Tensor | None = None  # [batch, response], of the advantages
    # [batch, response], what the values are to predict; None in evaluation
    returns: Tensor | None = None
    advantages: Tensor | None = None  # [batch, response]; None in evaluation


class ShapedRewards(NamedTuple):
    """Rewards per token, and the score of each completion in their unit."""

    rewards: Tensor  # [batch, response]
    totals: Tensor  # [batch] without what shaping adds; centered if normalized


class Credit(NamedTuple):
    """What policy and critic learn from a rollout, `[batch, response]`; steps of a chain fill it in.

    Rewards and advantages are in the unit of the scores, divided by `unit`.
    """

    shaped: ShapedRewards  # what the first step is given
    rewards: Tensor
    response_mask: Tensor  # 1 at tokens that count
    policy_mask: Tensor  # 1 at those that the policy learns from
    advantages: Tensor
    outputs: Tensor | None  # of the critic
    turn_starts: Tensor | None = None  # 1 at first tokens of turns, if these are what is rewarded
    critic: CriticAdvantages | None = None
    value_weights: Tensor | None = None  # in the loss of the values; None if all are 1
    unit: float = 1.0
    entropy_unit: float = 1.0  # of the advantages, by which the entropy bonus is multiplied

    @classmethod
    def begin(cls, samples: Samples, shaped: ShapedRewards) -> "Credit":
        """Credit of all tokens of usable completions, before its first step."""
        mask = samples.sequences.completion_mask & samples.scored.usable[:, None]
        rewards = shaped.rewards
        return cls(shaped, rewards, mask, mask, torch.zeros_like(rewards), samples.tokens.values)

    @property
    def steps(self) -> Tensor:
        """1 at tokens, or first tokens of turns, that have a reward and a value."""
        if self.turn_starts is None:
            return self.response_mask
        return self.response_mask & self.turn_starts


CreditStep = Callable[[Samples, Credit, RunState], tuple[Credit, RunState]]


@dataclass(frozen=True)
class Rollout:
    """Sampled sequences with all inputs of the updates; tensors are `[batch, response]`."""

    sequences: Sequences
    response_mask: Tensor  # 1 at sampled tokens that count
    old_logprobs: Tensor  # under the policy that sampled
    advantages: Tensor
    ref_logprobs: Tensor | None = None  # under the reference; None without a KL penalty
    old_values: Tensor | None = None  # outputs of the critic; None without one
    targets: Tensor | None = None  # what it is to output; None without one
    # 1 where the policy learns; None where all tokens do that count
    policy_mask: Tensor | None = None
    value_weights: Tensor | None = None  # in the loss of the values; None if all are 1
    kl_coef: float = 0.0  # constant over the rollout's updates
    entropy_unit: float = 1.0  # of the advantages, by which the entropy bonus is multiplied

    @classmethod
    def of(cls, samples: Samples, credit: Credit, kl_coef: float, gather: Reduction) -> "Rollout":
        """Rollout of samples with their credit."""
        sequences = samples.sequences
        if samples.excluded is not None:
            sequences = stand_ins(sequences, samples.excluded, gather)
        advantages = credit.advantages
        if samples.sampler_weights is not None:
            # PPO's clipped objective is linear in a factor that is not negative
            advantages = advantages * samples.sampler_weights
        learns_everywhere = credit.policy_mask is credit.response_mask
        return cls(
            sequences,
            credit.response_mask,
            old_logprobs=samples.tokens.logprobs,
            advantages=advantages,
            ref_logprobs=samples.tokens.ref_logprobs,
            old_values=credit.outputs,
            targets=None if credit.critic is None else credit.critic.targets,
            policy_mask=None if learns_everywhere else credit.policy_mask,
            value_weights=credit.value_weights,
            # a KL in the loss weighs as much as one in the reward
            kl_coef=kl_coef / credit.unit,
            entropy_unit=credit.entropy_unit,
        )

    @property
    def policy_tokens(self) -> Tensor:
        """1 at tokens that the policy learns from."""
        return self.response_mask if self.policy_mask is None else self.policy_mask

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its own tensors by name, without those of `sequences`."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def __len__(self) -> int:
        return len(self.sequences)

    def to(self, device: torch.device | str) -> "Rollout":
        """Move all tensors except lengths and `sampled`."""
        tensors: dict[str, Any] = {name: x.to(device) for name, x in self.tensors.items()}
        return replace(self, sequences=self.sequences.to(device), **tensors)

    def rows(self, index: Tensor) -> "Rollout":
        """Select rows (`index` on the CPU) and trim the padding that none of them needs."""
        sequences = self.sequences.rows(index)
        on_device = index.to(self.response_mask.device, non_blocking=True)
        end = sequences.completion_ids.shape[1]
        tensors: dict[str, Any] = {name: x[on_device, :end] for name, x in self.tensors.items()}
        return replace(self, sequences=sequences, **tensors)

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors of the rollout by name, for a checkpoint."""
        token_ids = {name: x for name, x in vars(self.sequences).items() if isinstance(x, Tensor)}
        numbers = {"kl_coef": self.kl_coef, "entropy_unit": self.entropy_unit}
        scalars = {name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}
        return {f"sequences.{name}": x for name, x in token_ids.items()} | self.tensors | scalars

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], device: torch.device | str) -> "Rollout":
        """Restore the state returned by [`state_dict`]."""
        tensors = dict(state)
        kl_coef = tensors.pop("kl_coef").item()
        entropy_unit = tensors.pop("entropy_unit").item()
        prefix = "sequences."
        token_ids = {
            key.removeprefix(prefix): tensors.pop(key) for key in state if key.startswith(prefix)
        }
        rollout = cls(Sequences(**token_ids), **tensors, kl_coef=kl_coef, entropy_unit=entropy_unit)
        return rollout.to(device)


@dataclass(frozen=True, eq=False)
class Components:
    """What a rollout is collected with: models, what samples, what scores, and settings.

    Collecting changes no weight and no statistic. Only the sampler's last adapters, and the
    environments on loan, are replaced.
    """

    actor_critic: ActorCritic
    player: Player  # samples
    rewards: list[Reward]
    monitors: list[Reward]  # scored and logged, never optimized
    tokenizer: PreTrainedTokenizerBase
    args: PPOConfig
    accelerator: Accelerator
    sampler: SamplerComparison | None = None  # of a sampler that is not the policy

    @property
    def reward_weights(self) -> list[float] | None:
        """Weight of each reward; those of environments come last, with weight 1 as in TRL."""
        weights = self.args.reward_weights
        if weights is None:
            return None
        return list(weights) + [1.0] * (len(self.rewards) - len(weights))

    def all_sum(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        return self.accelerator.reduce(x, reduction="sum")


class EvaluationBatch(NamedTuple):
    """Which rows of an evaluation a batch has."""

    first: int  # place of its first row in the split
    num_valid: int  # rows that count; others fill it up


def sample(
    components: Components,
    rows: Sequence[dict],
    run: RunState,
    metrics: Metrics,
    state: TrainerState,
    evaluated: EvaluationBatch | None = None,
) -> Samples:
    """Sample and score a completion per row of a rollout or, if `evaluated` is given, of an
    evaluation."""
    critic = components.actor_critic.value_head
    device = components.accelerator.device
    training = evaluated is None
    num_valid = len(rows) if evaluated is None else evaluated.num_valid
    is_ahead = training and components.player.generator.ahead is not None
    prepare_forwards(components)

    # 1. Play an episode for each row: a completion, or several turns.
    episodes = play(components, rows, metrics, state, evaluated)
    sequences = to_sequences(episodes, components.tokenizer.pad_token_id, device)
    endings = [episode.ending == "stopped" for episode in episodes]
    stopped = torch.tensor(endings).to(device, non_blocking=True)

    # 2. Score the completions.
    batch, scored, monitored, extra = score(components, episodes, run, metrics, state, training)

    # 3. Log-probs under policy and reference, entropies and values, with the forward of the
    # updates.
    mask = sequences.completion_mask
    # a score that enters where an environment writes is that of the token before
    scored = scored._replace(tokens=ppo_math.at_sampled(scored.tokens, mask))
    if critic is not None:
        sequences = observed_by_critic(critic, sequences, scored.tokens, mask, run)
    with timed("forward", metrics):
        tokens = score_tokens(components, sequences)

    # 4. Exclude what is not finite.
    valid = torch.arange(len(rows), device=device) < num_valid
    step = state.global_step + 1 if training else None
    tokens, scored, excluded = without_nonfinite(components, tokens, scored, valid, metrics, step)
    metrics.total("unscored_completions", scored.unscored & valid)
    names = [reward.name for reward in components.rewards]
    log_rewards(metrics, names, scored, valid, components.all_sum)
    valid = valid & scored.usable

    # 5. Compare with the sampler, and log.
    weights = None
    if training or components.args.eval_temperature is None:  # it was sampled as it is scored
        compared = mask & valid[:, None]
        weights = compare_with_sampler(
            components, episodes, sequences, tokens, compared, metrics, training, is_ahead
        )
    log_completions(metrics, tokens, mask, stopped, valid)
    lengths = mask.sum(1)
    by_name = {"reward": scored.totals, "length": lengths, "turns": sequences.turns.amax(1)}
    log_episodes(metrics, episodes, num_valid, valid, components.player.names, by_name)
    monitor_names = [monitor.name for monitor in components.monitors]
    log_hacking(
        metrics,
        batch.completions,
        lengths,
        scored,
        monitors=dict(zip(monitor_names, monitored.unbind(1))),
        valid=valid,
        all_sum=components.all_sum,
        gather=components.accelerator.gather,
    )
    values = None
    if critic is not None and not training:  # `collect` has those of a rollout
        values = critic.units(run.critic.returns).values(tokens.values) * mask
    return Samples(
        sequences, stopped, batch, scored, monitored, extra, tokens, values, excluded, weights
    )


def prepare_forwards(components: Components) -> None:
    """Choose, before the first rollout, whether rows are packed, and tell if they are not."""
    with components.accelerator.autocast():
        components.actor_critic.prepare_forwards()
    reason = components.actor_critic.why_not_packed
    if components.accelerator.process_index == 0 and reason is not None:
        logger.warning_once(
            f"Rows are padded to the longest of a micro-batch, and not packed, because {reason}."
        )


def play(
    components: Components,
    rows: Sequence[dict],
    metrics: Metrics,
    state: TrainerState,
    evaluated: EvaluationBatch | None,
) -> list[Episode]:
    """Play an episode of the policy for each row."""
    actor_critic = components.actor_critic
    training = evaluated is None
    seeds = seeds_of_episodes(components, len(rows), state, evaluated)
    step = state.global_step if training else None
    with timed("generate", metrics), actor_critic.adapter(actor_critic.policy_adapter):
        episodes = components.player.play(rows, seeds, step, not training)
    if 2 * sum(episode.is_overlong for episode in episodes) > len(episodes):
        logger.warning_once(
            "Most episodes end at answers longer than the rest of `max_completion_length`; raise "
            "it."
        )
    return episodes


def score(
    components: Components,
    episodes: list[Episode],
    run: RunState,
    metrics: Metrics,
    state: TrainerState,
    training: bool,
) -> tuple[ScoringBatch, Scored, Tensor, dict[str, list]]:
    """Score episodes: input and output of the rewards, scores of the monitors, `[batch,
    monitors]`, and columns that the rewards added."""
    args = components.args
    device = components.accelerator.device
    extra: dict[str, list] = {}
    logged: dict[str, list[float]] = {}
    seed = hash((args.seed, state.global_step, components.accelerator.process_index)) % 2**31
    # batches of an evaluation may be small
    max_failures = args.max_reward_failures if training else 1.0
    with timed("score", metrics), guarded(seed, device):
        batch = scoring_batch(episodes, state, extra, logged)
        scored = score_all(
            components.rewards,
            batch,
            components.reward_weights,
            args.reward_on_error,
            max_failures,
            components.all_sum,
            device,
            run.foresight,
        )
        monitored = scored.rewards[:, :0]
        if components.monitors:
            monitored = monitor(components.monitors, batch, device)
    # a reward may log a metric on some ranks only, and in any order
    for name in sorted(set(gather_object(list(logged)))):
        metrics.mean(name, torch.tensor(logged.get(name, [])).to(device, non_blocking=True))
    return batch, scored, monitored, extra


def without_nonfinite(
    components: Components,
    tokens: TokenScores,
    scored: Scored,
    valid: Tensor,
    metrics: Metrics,
    step: int | None,
) -> tuple[TokenScores, Scored, Tensor | None]:
    """Scores without completions that have a log-prob or value that is not finite, and which
    these are, `[batch]`; `None` if no rank has any."""
    all_sum = components.all_sum
    nonfinite = ~tokens.is_finite & valid
    metrics.total("nonfinite_completions", nonfinite)
    if not all_sum(nonfinite.sum()):  # on any rank
        return tokens, scored, None
    report_nonfinite(tokens, valid, all_sum, components.accelerator.process_index, step)
    rows = nonfinite[:, None]
    tokens = tokens.map(lambda x: x.masked_fill(rows, 0))
    scored = scored._replace(
        usable=scored.usable & ~nonfinite,
        tokens=scored.tokens.masked_fill(rows, 0),
        unpaid=scored.unpaid.masked_fill(nonfinite, 0),
    )
    return tokens, scored, nonfinite


def compare_with_sampler(
    components: Components,
    episodes: list[Episode],
    sequences: Sequences,
    tokens: TokenScores,
    compared: Tensor,
    metrics: Metrics,
    training: bool,
    is_ahead: bool,
) -> Tensor | None:
    """Compare log-probs with those of the sampler, if it has them; return weights of the
    advantages, `[batch, response]`, if it corrects them."""
    sampler = components.sampler
    has_logprobs = all(len(episode.logprobs) == len(episode.completion_ids) for episode in episodes)
    if not has_logprobs and sampler is None:
        return None
    sampled = [torch.tensor(episode.logprobs) for episode in episodes]
    logprobs = nn.utils.rnn.pad_sequence(sampled, batch_first=True).to(compared.device)
    if sampler is None:  # the policy itself
        differences = log_differences(tokens, logprobs, compared, metrics)
        tolerance = rounding_tolerance(components.args, components.actor_critic.dtype)
        warn_of_differences(differences, compared, tolerance, components.all_sum)
        return None
    weights = sampler.weights(tokens, logprobs, compared, metrics, is_ahead)
    if training:
        with components.accelerator.autocast():
            sampler.compare_with_last_adapter(
                components.actor_critic, sequences, tokens, logprobs, compared, is_ahead
            )
    return weights


def collect(
    components: Components,
    credit_steps: Sequence[CreditStep],
    rows: Sequence[dict],
    run: RunState,
    metrics: Metrics,
    state: TrainerState,
) -> tuple[Rollout, RunState, Samples]:
    """Collect a rollout from rows of the dataset, and return it with the state for the next one."""
    # 1. Play, score, and run policy, reference and critic.
    samples = sample(components, rows, run, metrics, state)
    if state.global_step == 0:
        check_by_critic(components, samples)
    gather = components.accelerator.gather
    for name, foresight in samples.scored.foresight.items():
        metrics.mean(f"rewards/{name}/foreseen", foresight.share)
    log_groups(metrics, samples.scored, components.args.num_generations, gather)

    # 2. Rewards per token: the KL penalty at every token, and scores where they enter.
    shaped, after = shaped_rewards(components, samples, run)
    objective = shaped.rewards.sum(1)
    if not components.args.normalize_rewards:
        objective = objective + samples.scored.unpaid
    metrics.mean("objective", objective, samples.scored.usable)

    # 3. Credit: from rewards to advantages of the policy and targets of the critic.
    credit = Credit.begin(samples, shaped)
    for step in credit_steps:
        credit, after = step(samples, credit, after)

    # 4. The rollout, and what it leaves to the next one.
    rollout = Rollout.of(samples, credit, run.kl_coef, gather)
    after = after._replace(
        kl_coef=next_kl_coef(components, samples, run, state),
        foresight=samples.scored.foresight,
    )
    metrics.mean("kl_coef", run.kl_coef)
    samples = samples._replace(advantages=rollout.advantages * rollout.policy_tokens)
    if credit.critic is not None:
        samples = samples._replace(values=credit.critic.values, returns=credit.critic.returns)
    return rollout, after, samples


def next_kl_coef(
    components: Components, samples: Samples, run: RunState, state: TrainerState
) -> float:
    """KL coefficient of the next rollout, from the KL of this one's completions."""
    args = components.args
    policy_moves = state.global_step >= args.critic_options.warmup_steps
    if args.kl_target is None or not policy_moves:
        return run.kl_coef
    tokens = samples.tokens
    usable = samples.scored.usable
    # log-probs are 0 at padding
    kls = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, "k1").sum(1)
    measured = float(ppo_math.masked_mean(kls, usable, components.all_sum))
    completions = int(components.all_sum(usable.sum()))
    return ppo_math.adapt_kl_coef(
        run.kl_coef, measured, args.kl_target, args.kl_horizon, completions
    )


def shaped_rewards(
    components: Components, samples: Samples, run: RunState
) -> tuple[ShapedRewards, RunState]:
    """Rewards per token: the KL penalty at every token, scores where they enter, and what shaping
    adds at the last one."""
    args = components.args
    tokens = samples.tokens
    scored = samples.scored
    after = run
    scores = scored.paid
    token_scores = scored.tokens
    totals = scored.totals
    kl = torch.zeros_like(tokens.logprobs)
    if args.normalize_rewards:
        units, after = units_of_scores(components, samples, run)
        scores = (scores - units.mean_outcomes) / units.deviations
        token_scores = token_scores / units.deviations[:, None]
        totals = (totals - units.means) / units.deviations
    if args.missing_eos_penalty is not None:
        scores = scores - args.missing_eos_penalty * (~samples.stopped)
    kind = args.reward_kl
    if kind is not None:
        if kind == "exact":
            kl = tokens.kls
        else:
            kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, kind)
    rewards = ppo_math.token_rewards(
        token_scores, scores, kl, samples.sequences.completion_mask, run.kl_coef
    )
    return ShapedRewards(rewards, totals), after


class ScoreUnits(NamedTuple):
    """Running statistics of scores, `[batch]`: those of each completion's environment."""

    means: Tensor
    mean_outcomes: Tensor  # of what enters at last tokens
    deviations: Tensor


def unit_of(scores: Moments) -> float:
    """Deviation by which scores are divided."""
    return scores.sample_deviation + 1e-8


def units_of_scores(
    components: Components, samples: Samples, run: RunState
) -> tuple[ScoreUnits, RunState]:
    """Running units of scores; several environments have one each.

    Only what enters at last tokens is centered: one shift for all completions favors none, and it
    never jumps, as a choice between two shifts would. The mean of whole scores would make an end
    look bad where most of them is earned before.
    """
    usable = samples.scored.usable
    scores = samples.scored.totals
    token_scores = samples.scored.tokens
    position = torch.arange(token_scores.shape[1], device=token_scores.device)
    is_last = position >= (position * samples.sequences.completion_mask).amax(1, keepdim=True)
    outcomes = (token_scores * is_last).sum(1)
    of_scores = dict(run.scores)
    of_outcomes = dict(run.outcomes)
    means = torch.zeros_like(scores)
    mean_outcomes = torch.zeros_like(scores)
    deviations = torch.ones_like(scores)
    for name, rows in zip(
        components.player.names or [""], rows_of_environments(components, samples)
    ):
        of_scores[name] = of_scores.get(name, Moments()).add(
            scores, usable & rows, components.all_sum
        )
        of_outcomes[name] = of_outcomes.get(name, Moments()).add(
            outcomes, usable & rows, components.all_sum
        )
        means = torch.where(rows, of_scores[name].mean, means)
        mean_outcomes = torch.where(rows, of_outcomes[name].mean, mean_outcomes)
        deviations = torch.where(rows, unit_of(of_scores[name]), deviations)
    after = run._replace(scores=of_scores, outcomes=of_outcomes)
    return ScoreUnits(means, mean_outcomes, deviations), after


def rows_of_environments(components: Components, samples: Samples) -> list[Tensor]:
    """Masks `[batch]` of the completions of each environment; one of all if there are not
    several."""
    usable = samples.scored.usable
    if not components.player.names:
        return [torch.ones_like(usable)]
    environments = [episode.columns.get("environment") for episode in samples.batch.episodes]
    masks = [torch.tensor([x == name for x in environments]) for name in components.player.names]
    return [mask.to(usable.device, non_blocking=True) for mask in masks]


# ---- the forward of the updates ----


def cut(rows: Tensor, lengths: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Cut a minibatch into micro-batches, longest rows first, of which the largest is as small
    as possible, padded."""
    rows = rows[lengths[rows].argsort(descending=True, stable=True)]
    longest = lengths[rows].tolist()

    def ends(budget: int) -> list[int]:
        """Ends of parts that take as many rows as fit a budget of padded tokens."""
        found = [0]
        for left in reversed(range(parts)):  # a row is left for each of the others
            found.append(min(found[-1] + budget // longest[found[-1]], len(rows) - left))
        return found[1:]

    budget = bisect_left(
        range(longest[0] * len(rows)), len(rows), lo=longest[0], key=lambda x: ends(x)[-1]
    )
    return rows.tensor_split(ends(budget)[:-1])


def micro_batches(args: PPOConfig, sequences: Sequences) -> list[Tensor]:
    """Rows of each micro-batch of the first epoch, in order: the updates cut the same ones, so the
    first ratio is 1."""
    size = args.per_device_train_batch_size
    minibatches = torch.arange(len(sequences)).split(size * args.gradient_accumulation_steps)
    return [
        part
        for rows in minibatches
        for part in cut(rows, sequences.longest_lengths, -(-len(rows) // size))
    ]


@torch.no_grad()
def score_tokens(
    components: Components, sequences: Sequences, with_reference: bool = True
) -> TokenScores:
    """Compute log-probs and outputs of the critic with the code, micro-batches and dtype of the
    updates.

    So the ratio of the first optimizer step is exactly 1, and with a fresh adapter the KL is
    exactly 0.
    """
    args = components.args
    actor_critic = components.actor_critic
    with_reference = with_reference and args.uses_reference
    exact_kl = with_reference and args.reward_kl == "exact"
    temperature = args.temperature
    index = micro_batches(args, sequences)
    quiet = args.disable_tqdm or not components.accelerator.is_main_process
    outputs: dict[str, Tensor] = {}
    with components.accelerator.autocast():
        for rows in tqdm(index, desc="Scoring tokens", leave=False, delay=3, disable=quiet):
            part = sequences.rows(rows)
            on_device = rows.to(sequences.prompt_ids.device, non_blocking=True)
            scores = actor_critic(part, temperature, with_entropy=True, with_kl=exact_kl)
            if with_reference and not exact_kl:
                scores = scores._replace(
                    ref_logprobs=actor_critic.reference_logprobs(part, temperature)
                )
            for name, x in scores._asdict().items():
                if x is not None:
                    out = outputs.setdefault(name, x.new_zeros(sequences.completion_ids.shape))
                    out[on_device, : x.shape[1]] = x
    return TokenScores(**outputs)


def read_by_critic(
    components: Components, sequences: Sequences, read: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """What a function makes of the critic's inputs, in the micro-batches of [`score_tokens`]."""
    read_critic = components.actor_critic.read_critic
    with components.accelerator.autocast():
        return [
            read_critic(sequences.rows(rows), read)
            for rows in micro_batches(components.args, sequences)
        ]


@torch.no_grad()
def observed_by_critic(
    critic: Critic, sequences: Sequences, token_scores: Tensor, mask: Tensor, run: RunState
) -> Sequences:
    """Sequences with what the critic reads of their rewards."""
    return replace(sequences, observed=critic.observe(token_scores, mask, run.critic))


# ---- parts ----


def check_by_critic(components: Components, samples: Samples) -> None:
    """Raise if the critic, if there is one, must not read the rewards of the first rollout.

    An environment pays a turn when it is over.
    """
    critic = components.actor_critic.value_head
    are_earned = all(isinstance(reward, EnvironmentReward) for reward in components.rewards)
    if critic is None or are_earned:
        return
    scored = samples.scored
    mask = samples.sequences.completion_mask
    critic.check(scored.tokens, scored.totals, scored.usable, mask, components.all_sum)


def scoring_batch(
    episodes: list[Episode],
    state: TrainerState,
    extra: dict[str, list],
    logged: dict[str, list[float]],
) -> ScoringBatch:
    """Input of the rewards, which may add columns to `extra` and metrics to `logged`."""

    def log_extra(column: str, values: list) -> None:
        if len(values) != len(episodes):
            raise ValueError(
                f"`log_extra` must get one value per completion in {column!r}, got {len(values)} "
                f"for {len(episodes)} completions."
            )
        extra[column] = values

    def log_metric(name: str, value: float) -> None:
        check_metric_name(name)
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"`log_metric` must get a number for {name!r}, got {type(value).__name__}."
            ) from error
        logged.setdefault(name, []).append(number)

    # rows of a stream may lack some
    names = dict.fromkeys(name for episode in episodes for name in episode.columns)
    columns = {name: [episode.columns.get(name) for episode in episodes] for name in names}
    return ScoringBatch(
        prompts=[episode.prompt for episode in episodes],
        completions=[episode.completion for episode in episodes],
        completion_ids=[episode.completion_ids for episode in episodes],
        columns=columns,
        trainer_state=state,
        episodes=episodes,
        log_extra=log_extra,
        log_metric=log_metric,
    )


def seeds_of_episodes(
    components: Components, rows: int, state: TrainerState, evaluated: EvaluationBatch | None
) -> list[int]:
    """Seeds of environments, the same on any number of ranks: for all episodes of a prompt in
    training, and for a row of a split in all evaluations."""
    if evaluated is None:
        step = state.global_step
        group = components.args.num_generations
        first = components.accelerator.process_index * rows
    else:
        step = EVALUATION_STEP
        group = 1
        first = evaluated.first
    return [
        hash((components.args.seed, step, (first + row) // group)) % 2**31 for row in range(rows)
    ]


@contextmanager
def timed(name: str, metrics: Metrics) -> Iterator[None]:
    """Log the seconds within a context."""
    start = time.perf_counter()
    yield
    metrics.mean(f"time/{name}", time.perf_counter() - start)
