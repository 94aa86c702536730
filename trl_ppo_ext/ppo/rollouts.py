"""Collect a rollout: sample, score, log-probs and values, KL-shaped rewards, advantages."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.utils import logging

from ..config import PPOConfig
from ..distributed import unsharded
from ..episodes import Episode, Player, to_sequences
from ..modeling import ActorCritic, TokenScores
from ..modeling.critics import SideCritic, Units, rewards_so_far
from ..rewards.scoring import Reward, Scored, ScoringBatch, guarded, monitor, score_all
from ..sequences import Sequences
from . import math as ppo_math
from .advantages import (
    Cuts,
    Discounts,
    in_groups_that_differ,
    in_units,
    of_critic,
    of_groups,
    of_objectives,
    to_go,
)
from .baseline import MEMORY, Groups
from .guards import (
    SamplerComparison,
    log_differences,
    report_nonfinite,
    rounding,
    stand_ins,
    warn_of_differences,
)
from .math import Moments, Reduction
from .metrics import (
    Metrics,
    check_metric_name,
    log_completions,
    log_critic,
    log_episodes,
    log_groups,
    log_hacking,
    log_rewards,
)
from .places import default_lambda, enter_at
from .state import RunState

logger = logging.get_logger(__name__)


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


@dataclass(frozen=True)
class Rollout:
    """Sampled sequences with all inputs of the updates; tensors are `[batch, response]`."""

    sequences: Sequences
    response_mask: Tensor  # 1 at sampled tokens that count
    old_logprobs: Tensor  # under the policy that sampled
    advantages: Tensor
    ref_logprobs: Tensor | None = None  # under the reference; None without a KL penalty
    old_values: Tensor | None = None  # outputs of the critic; None without one
    returns: Tensor | None = None  # its targets, in its units
    # 1 where the policy learns; None where all tokens do that count
    policy_mask: Tensor | None = None
    value_weights: Tensor | None = None  # in the loss of the values; None if all are 1
    kl_coef: float = 0.0  # constant over the rollout's updates
    entropy_unit: float = 1.0  # of the advantages, by which the entropy bonus is multiplied

    @property
    def policy_tokens(self) -> Tensor:
        """1 at tokens that the policy learns from."""
        return self.response_mask if self.policy_mask is None else self.policy_mask

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors except the token ids, by name."""
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
class Roles:
    """Policy, reference and critic on one base, what samples, and what scores; collecting
    changes no weight."""

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
        return weights and weights + [1.0] * (len(self.rewards) - len(weights))

    def all_sum(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        return self.accelerator.reduce(x, reduction="sum")


def sample(
    roles: Roles,
    rows: Sequence[dict],
    run: RunState,
    metrics: Metrics,
    state: TrainerState,
    num_valid: int | None,
) -> Samples:
    """Sample and score a completion per row; the first `num_valid` of an evaluation (`None`:
    training) are logged."""
    args = roles.args
    accelerator = roles.accelerator
    training = num_valid is None
    device = accelerator.device
    rank = accelerator.process_index
    all_sum = roles.all_sum
    with accelerator.autocast():
        roles.actor_critic.check_logits()
    if rank == 0 and roles.actor_critic.why_not_packed is not None:
        reason = roles.actor_critic.why_not_packed
        logger.warning_once(
            f"Rows are padded to the longest of a micro-batch, and not packed, because {reason}."
        )

    # 1. Play an episode for each row: a completion, or several turns.
    is_ahead = training and roles.player.generator.ahead is not None
    seeds = seeds_of_episodes(roles, len(rows), state, training)
    with timed("generate", metrics), roles.actor_critic.adapter(roles.actor_critic.policy_adapter):
        episodes = roles.player.play(
            rows, seeds, state.global_step if training else None, not training
        )
    sequences = to_sequences(episodes, roles.tokenizer.pad_token_id, device)
    stopped = torch.tensor([episode.ending == "stopped" for episode in episodes]).to(
        device, non_blocking=True
    )
    if 2 * sum(episode.is_overlong for episode in episodes) > len(episodes):
        logger.warning_once(
            "Most episodes end at answers longer than the rest of `max_completion_length`; raise "
            "it."
        )

    # 2. Score the completions.
    extra: dict[str, list] = {}
    logged: dict[str, list[float]] = {}
    seed = hash((args.seed, state.global_step, rank)) % 2**31
    with timed("score", metrics), guarded(seed, device):
        batch = scoring_batch(episodes, state, extra, logged)
        scored = score_all(
            roles.rewards,
            batch,
            roles.reward_weights,
            args.reward_on_error,
            args.max_reward_failures if training else 1.0,  # batches of an evaluation may be small
            all_sum,
            device,
        )
        if roles.monitors:
            monitored = monitor(roles.monitors, batch, device)
        else:
            monitored = scored.rewards[:, :0]
    # a reward may log a metric on some ranks only, and in any order
    for name in sorted(set(gather_object(list(logged)))):
        metrics.mean(name, torch.tensor(logged.get(name, [])).to(device, non_blocking=True))

    # 3. Log-probs under policy and reference, entropies and values, with the forward of the
    # updates.
    if isinstance(roles.actor_critic.value_head, SideCritic):
        sequences = with_rewards_so_far(sequences, scored.tokens, sequences.completion_mask, run)
    with timed("forward", metrics):
        tokens = score_tokens(roles, sequences)

    # 4. Exclude what is not finite, compare with the sampler, and log.
    valid = torch.arange(len(rows), device=device) < (len(rows) if num_valid is None else num_valid)
    nonfinite = ~tokens.is_finite & valid
    excluded = None
    metrics.total("nonfinite_completions", nonfinite)
    if all_sum(nonfinite.sum()):  # on any rank
        excluded = nonfinite
        report_nonfinite(tokens, valid, all_sum, rank, state.global_step + 1 if training else None)
        tokens = tokens.map(lambda x: x.masked_fill(excluded[:, None], 0))
        usable = scored.usable & ~excluded
        token_scores = scored.tokens.masked_fill(excluded[:, None], 0)
        scored = scored._replace(usable=usable, tokens=token_scores)
    metrics.total("unscored_completions", scored.unscored & valid)
    log_rewards(metrics, [reward.name for reward in roles.rewards], scored, valid, all_sum)
    valid = valid & scored.usable
    completion_mask = sequences.completion_mask
    weights = None
    has_logprobs = all(len(episode.logprobs) == len(episode.completion_ids) for episode in episodes)
    if (has_logprobs or roles.sampler is not None) and (training or args.eval_temperature is None):
        sampled = [torch.tensor(episode.logprobs) for episode in episodes]
        logprobs = nn.utils.rnn.pad_sequence(sampled, batch_first=True).to(device)
        compared = completion_mask & valid[:, None]
        if roles.sampler is None:  # the policy itself
            differences = log_differences(tokens, logprobs, compared, metrics)
            tolerance = rounding(args, roles.actor_critic.dtype)
            warn_of_differences(differences, compared, tolerance, all_sum)
        else:
            weights = roles.sampler.weights(tokens, logprobs, compared, metrics, is_ahead)
        if roles.sampler is not None and training:
            with accelerator.autocast():
                roles.sampler.check_version(
                    roles.actor_critic, sequences, tokens, logprobs, compared, is_ahead
                )
    log_completions(metrics, tokens, completion_mask, stopped, valid)
    lengths = completion_mask.sum(1)
    by_name = {"reward": scored.totals, "length": lengths, "turns": sequences.turns.amax(1)}
    log_episodes(metrics, episodes, num_valid, valid, roles.player.names, by_name)
    monitors = {reward.name: scores for reward, scores in zip(roles.monitors, monitored.unbind(1))}
    log_hacking(
        metrics,
        batch.completions,
        lengths,
        scored,
        monitors,
        valid,
        all_sum=all_sum,
        gather=accelerator.gather,
    )
    values = None
    head = roles.actor_critic.value_head
    if head is not None and not training:  # `collect` has those of a rollout
        values = head.units(run.returns).values(tokens.values) * completion_mask
    return Samples(
        sequences, stopped, batch, scored, monitored, extra, tokens, values, excluded, weights
    )


def collect(
    roles: Roles, rows: Sequence[dict], run: RunState, metrics: Metrics, state: TrainerState
) -> tuple[Rollout, RunState, Samples]:
    """Collect one rollout from rows of the dataset, and return it with the state for the next
    one."""
    args = roles.args
    all_sum = roles.all_sum
    level = roles.args.advantage_level
    rank = roles.accelerator.process_index
    groups = Groups(args.num_generations, roles.accelerator.gather, rank)

    # 1. Play, score, and run policy, reference and critic.
    head = roles.actor_critic.value_head
    new_critic = new_side_critic(roles, run)
    with ExitStack() as stack:
        recorded = [] if new_critic is None else stack.enter_context(new_critic.recorded())
        samples = sample(roles, rows, run, metrics, state, num_valid=None)
    sequences = samples.sequences
    tokens = samples.tokens
    scored = samples.scored
    completion_mask = sequences.completion_mask
    usable = scored.usable
    response_mask = policy_mask = completion_mask & usable[:, None]
    # a critic learns from them: https://huggingface.co/papers/2609.36802
    if args.mask_truncated_completions:
        policy_mask = response_mask & samples.stopped[:, None]
        if args.critic == "none":
            response_mask = policy_mask
        else:
            response_mask = response_mask
    if state.global_step == 0:
        check_scores_are_not_spread(roles, scored, completion_mask)
    log_groups(metrics, scored, groups.size, groups.gather)
    if args.drop_equal_groups:
        scores = scored.totals - (args.missing_eos_penalty or 0.0) * ~samples.stopped
        differs = in_groups_that_differ(scores, usable, groups.size, groups.gather)
        response_mask = policy_mask = policy_mask & groups.own(differs, usable)[:, None]

    # 2. Rewards per token, in the unit of the scores or whitened.
    rewards, after = shaped_rewards(roles, samples, run)
    metrics.mean("objective", rewards.sum(1), usable)
    reward_unit = 1.0
    if args.whiten_rewards:
        rewards, reward_unit = ppo_math.whiten(rewards, response_mask, all_sum, keeps_mean=True)

    # 3. Advantages for the policy and targets for the critic: per token, or per turn, whose reward
    # and value are at its first token. γ and λ count one or the other.
    steps = response_mask
    value_weights = None
    starts, first = ppo_math.turn_starts(sequences.turns)
    if level == "turn":
        rewards = torch.zeros_like(rewards).scatter_add(1, first, rewards)
        steps = response_mask & starts
        # the critic learns at first tokens, from a mean over turns
        count, turns = all_sum(torch.stack([response_mask.sum(), steps.sum()])).unbind()
        value_weights = steps * (count / turns.clamp(min=1))
    if head is not None:
        # one completion far from all others must not set the units of the others
        ordinary = usable & ~outlying(rewards.sum(1), usable, groups)
        metrics.total("outlying_completions", usable & ~ordinary)
        discounts, after, places = discounts_of(roles, samples, ordinary, run, after, metrics)
        if new_critic is not None:
            tokens = tokens._replace(
                values=tokens.values
                + first_fit(
                    roles,
                    new_critic,
                    recorded,
                    samples,
                    rewards,
                    steps,
                    ordinary,
                    discounts.gamma,
                    run.returns,
                )
            )
        result, returns = of_critic(
            rewards,
            tokens.values,
            steps,
            run.returns,
            is_normalized=head.is_normalized,
            discounts=discounts,
            cuts=cuts_of(roles, samples, run),
            groups=groups,
            ordinary=ordinary,
            all_sum=all_sum,
        )
        earned = run.rewards.add(scored.tokens, response_mask & ordinary[:, None], all_sum, MEMORY)
        after = after._replace(returns=returns, rewards=earned)
        # values that were fitted to these very returns explain nothing yet
        log_critic(metrics, result, places, is_new=new_critic is not None, all_sum=all_sum)
    elif args.advantage_estimator == "rebn":
        result = to_go(rewards, steps, args.gamma)
    elif args.multi_objective_aggregation == "normalize_then_sum":
        result = of_objectives(scored.rewards, roles.reward_weights, usable, groups)
    else:
        estimator = cast(str, args.advantage_estimator)
        result = of_groups(estimator, rewards, usable, groups.size, groups.gather, rank)
    if level == "turn":
        advantages = result.advantages.gather(1, first)
    else:
        advantages = result.advantages
    result = result._replace(advantages=advantages * response_mask)
    if args.whiten_advantages:
        advantages, unit = ppo_math.whiten(result.advantages, policy_mask, all_sum)
        result = result._replace(advantages=advantages, unit=unit)
    elif args.normalize_values:
        if after.returns.varies:
            after = after._replace(largest_unit=max(run.largest_unit, after.returns.unit))
        result = in_units(result, after.returns, after.largest_unit)

    if args.top_entropy_quantile < 1:
        gained = result.advantages * high_entropies(roles, tokens.entropies, policy_mask)
        result = result._replace(advantages=gained)

    # 4. The rollout, and what it leaves to the next one.
    # before, no policy moves
    if args.kl_target is not None and state.global_step >= args.critic_options.warmup_steps:
        # 0 at padding
        kls = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, "k1").sum(1)
        measured = float(ppo_math.masked_mean(kls, usable, all_sum))
        completions = int(all_sum(usable.sum()))
        kl_coef = ppo_math.adapt_kl_coef(
            run.kl_coef, measured, args.kl_target, args.kl_horizon, completions
        )
        after = after._replace(kl_coef=kl_coef)
    metrics.mean("kl_coef", run.kl_coef)
    weights = samples.sampler_weights
    advantages = result.advantages
    rollout = Rollout(
        sequences
        if samples.excluded is None
        else stand_ins(sequences, samples.excluded, groups.gather),
        response_mask,
        old_logprobs=tokens.logprobs,
        # PPO's clipped objective is linear in a factor that is not negative
        advantages=advantages if weights is None else advantages * weights,
        ref_logprobs=tokens.ref_logprobs,
        old_values=tokens.values,
        returns=result.targets,
        policy_mask=None if policy_mask is response_mask else policy_mask,
        value_weights=value_weights,
        # a KL in the loss weighs as much as one in the reward
        kl_coef=run.kl_coef / (reward_unit * result.unit),
        entropy_unit=ppo_math.root_mean_square(advantages, policy_mask, all_sum)
        if args.entropy_coef
        else 1.0,
    )
    learned: dict[str, Any] = {
        "values": result.values,
        "returns": result.returns,
        "advantages": rollout.advantages,
    }
    return rollout, after, samples._replace(**learned)


def shaped_rewards(roles: Roles, samples: Samples, run: RunState) -> tuple[Tensor, RunState]:
    """Rewards per token: the KL penalty at every token, the shaped score at the last one."""
    args = roles.args
    tokens = samples.tokens
    scored = samples.scored
    after = run
    scores = scored.totals
    token_scores = scored.tokens
    kl = torch.zeros_like(tokens.logprobs)
    if args.normalize_rewards:
        scores, token_scores, after = normalized_scores(roles, samples, run)
    if args.missing_eos_penalty is not None:
        scores = scores - args.missing_eos_penalty * (~samples.stopped)
    kind = args.reward_kl
    if kind is not None:
        if kind == "exact":
            kl = tokens.kls
        else:
            kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, kind)
    return ppo_math.token_rewards(
        token_scores, scores, kl, samples.sequences.completion_mask, run.kl_coef
    ), after


def normalized_scores(
    roles: Roles, samples: Samples, run: RunState
) -> tuple[Tensor, Tensor, RunState]:
    """Scores `[batch]` and at tokens in units of their running deviation; several environments have
    one each.

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
    deviations = torch.ones_like(scores)
    for name, rows in zip(roles.player.names or [""], rows_of_environments(roles, samples)):
        of_scores[name] = of_scores.get(name, Moments()).add(scores, usable & rows, roles.all_sum)
        of_outcomes[name] = of_outcomes.get(name, Moments()).add(
            outcomes, usable & rows, roles.all_sum
        )
        means = torch.where(rows, of_outcomes[name].mean, means)
        deviations = torch.where(rows, of_scores[name].sample_deviation + 1e-8, deviations)
    after = run._replace(scores=of_scores, outcomes=of_outcomes)
    return (scores - means) / deviations, token_scores / deviations[:, None], after


def rows_of_environments(roles: Roles, samples: Samples) -> list[Tensor]:
    """Masks `[batch]` of the completions of each environment; one of all if there are not
    several."""
    usable = samples.scored.usable
    if not roles.player.names:
        return [torch.ones_like(usable)]
    environments = [episode.columns.get("environment") for episode in samples.batch.episodes]
    masks = [torch.tensor([x == name for x in environments]) for name in roles.player.names]
    return [mask.to(usable.device, non_blocking=True) for mask in masks]


def new_side_critic(roles: Roles, run: RunState) -> SideCritic | None:
    """The side critic, if all returns so far were equal: there was nothing that it could be
    fitted to."""
    head = roles.actor_critic.value_head
    if roles.args.critic_init is not None or not isinstance(head, SideCritic):
        return None
    # without units it is fitted to the mean, too
    if head.is_normalized:
        was_fitted = run.returns.varies
    else:
        was_fitted = run.returns.weight > 0
    if was_fitted:
        return None
    head.first_fit.zero_()  # of a first rollout that was abandoned
    return head


def first_fit(
    roles: Roles,
    critic: SideCritic,
    recorded: list[Tensor],
    samples: Samples,
    rewards: Tensor,
    steps: Tensor,
    ordinary: Tensor,
    gamma: float | Tensor,
    seen: Moments,
) -> Tensor:
    """Outputs that a new critic gains from a fit to its first rollout, `[batch, response]`."""
    # the forwards of step 1 recorded micro-batches in their own order
    order = torch.cat(micro_batches(roles.args, samples.sequences)).to(steps.device)
    gamma = (gamma * torch.ones_like(rewards))[order]
    mask = samples.sequences.completion_mask[order]
    enters = (steps & ordinary[:, None])[order]
    fitted = fit_new(
        critic, recorded, rewards[order], steps[order], mask, gamma, seen, enters, roles.all_sum
    )
    return fitted[order.argsort()]


def fit_new(
    critic: SideCritic,
    recorded: list[Tensor],
    rewards: Tensor,
    steps: Tensor,
    mask: Tensor,
    gamma: float | Tensor = 1.0,
    seen: Moments = Moments(),
    enters: Tensor | None = None,  # steps that the fit and its units are made of; all by default
    all_sum: Reduction = torch.clone,
) -> Tensor:
    """Fit a new critic to the Monte Carlo returns of its first rollout; return what that adds to
    its outputs.

    Returns of earlier rollouts, if any, were all equal.
    """
    outcomes = ppo_math.gae(rewards, torch.zeros_like(rewards), steps, gamma, 1.0)[1]
    enters = steps if enters is None else enters
    targets = critic.units(seen.add(outcomes, enters, all_sum, MEMORY)).targets(outcomes)
    fitted = critic.begin(recorded, targets[mask], enters[mask], enters.any(1).sum(), all_sum)
    return torch.zeros_like(rewards).masked_scatter(mask, fitted).where(steps, 0)


# ---- the forward of the updates ----


def cut(rows: Tensor, lengths: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Cut a minibatch into micro-batches, longest rows first, of which the largest is as small
    as possible, padded."""
    rows = rows[lengths[rows].argsort(descending=True, stable=True)]
    longest = lengths[rows].tolist()

    def ends(budget: int) -> list[int]:
        found = [0]
        for left in reversed(range(parts)):  # a row is left for each of the others
            found.append(min(found[-1] + budget // longest[found[-1]], len(rows) - left))
        return found[1:]

    budget = bisect_left(
        range(longest[0] * len(rows)), len(rows), lo=longest[0], key=lambda x: ends(x)[-1]
    )
    return rows.tensor_split(ends(budget)[:-1])


def micro_batches(args: PPOConfig, sequences: Sequences) -> list[Tensor]:
    """Rows of each micro-batch, in the order in which they are scored."""
    size = args.per_device_train_batch_size
    minibatches = torch.arange(len(sequences)).split(size * args.gradient_accumulation_steps)
    return [
        part
        for rows in minibatches
        for part in cut(rows, sequences.longest_lengths, -(-len(rows) // size))
    ]


@torch.no_grad()
def score_tokens(roles: Roles, sequences: Sequences, with_reference: bool = True) -> TokenScores:
    """Compute log-probs and outputs of the critic with the code, micro-batches and dtype of the
    updates.

    So the ratio of the first optimizer step is exactly 1, and with a fresh adapter the KL is
    exactly 0.
    """
    args = roles.args
    actor_critic = roles.actor_critic
    with_reference = with_reference and args.uses_reference
    exact_kl = with_reference and args.reward_kl == "exact"
    temperature = args.temperature
    index = micro_batches(args, sequences)
    quiet = args.disable_tqdm or not roles.accelerator.is_main_process
    outputs: dict[str, Tensor] = {}
    with roles.accelerator.autocast():
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


def with_rewards_so_far(
    sequences: Sequences, token_scores: Tensor, mask: Tensor, run: RunState
) -> Sequences:
    """Sequences as the side critic reads them."""
    earned = rewards_so_far(
        token_scores, mask, Units.of(run.rewards), is_known=run.rewards.weight > 0
    )
    return replace(sequences, earned=earned)


# ---- parts ----


def outlying(totals: Tensor, usable: Tensor, groups: Groups) -> Tensor:
    """True at the completion whose score is far beyond those of all others of a rollout,
    `[batch]`."""
    outlier = ppo_math.outlier(groups.gather(totals), groups.gather(usable))
    if outlier.any():
        logger.warning_once(
            "A score is more than %g times as far from the others as these are from each other in "
            "total; it does not enter the units of advantages and values. Further ones are "
            "counted by `outlying_completions`.",
            ppo_math.OUTLYING,
        )
    return groups.own(outlier, totals)


def discounts_of(
    roles: Roles,
    samples: Samples,
    ordinary: Tensor,
    run: RunState,
    after: RunState,
    metrics: Metrics,
) -> tuple[Discounts, RunState, Tensor]:
    """γ and λ, the state with what the scores tell, and the places where scores enter, `[batch,
    response]`.

    If both levels count, γ and λ of turns are at their ends.
    """
    args = roles.args
    options = roles.args.critic_options
    level = roles.args.advantage_level
    turns = samples.sequences.turns
    scores, places = enter_at(samples.scored.tokens, samples.scored.places, turns)
    information = run.information
    for rows in rows_of_environments(roles, samples):  # what is usual differs between them
        information = information.add(scores, places, ordinary & rows, roles.all_sum)
    over_token, over_turn = default_lambda(information, places, turns, roles.all_sum)

    lam: float | Tensor | None = args.lam
    within: float | Tensor = 1.0
    if options.lam_length_alpha is not None:
        counted = turns.bool() & samples.scored.usable[:, None]
        if level == "turn":
            counted = counted & ppo_math.turn_starts(turns)[0]
        lam = ppo_math.length_adaptive_lambda(counted, options.lam_length_alpha)
    elif lam is None:
        if level == "token":
            lam = over_token
        else:
            lam = over_turn
        within = over_token
    metrics.mean("lam", lam, samples.scored.usable if isinstance(lam, Tensor) else None)

    if not isinstance(lam, Tensor) and lam != 1.0:  # as a tensor each level rounds alike
        lam = scores.new_full((len(turns),), lam)
    discounts = Discounts(args.gamma, lam, options.lam)
    if level == "both":
        discounts = Discounts(
            ppo_math.at_turn_ends(args.gamma, turns),
            ppo_math.at_turn_ends(lam, turns, within) if isinstance(lam, Tensor) else lam,
            ppo_math.at_turn_ends(options.lam, turns),
        )
    return discounts, after._replace(information=information), places


def cuts_of(roles: Roles, samples: Samples, run: RunState) -> Cuts | None:
    """Completions that a limit cut where the critic stands for the rest; `None` if no rank has
    any."""
    outputs = outputs_after(roles, samples, run)
    if outputs is None:
        return None
    is_cut = torch.tensor([episode.bootstraps for episode in samples.batch.episodes])
    return Cuts(is_cut.to(outputs.device, non_blocking=True), outputs)


def high_entropies(roles: Roles, entropies: Tensor, mask: Tensor) -> Tensor:
    """1 at the share of a rollout's tokens with the highest entropy:
    https://huggingface.co/papers/2506.01939"""
    padded = roles.accelerator.pad_across_processes(entropies[mask], pad_index=-torch.inf)
    ordered = roles.accelerator.gather(padded).sort(descending=True).values
    last = int(roles.args.top_entropy_quantile * (int(ordered.isfinite().sum()) - 1))
    if len(ordered):
        return entropies >= ordered[last]
    return mask


def check_scores_are_not_spread(roles: Roles, scored: Scored, completion_mask: Tensor) -> None:
    """Raise if each score of the first rollout is spread evenly over its tokens: the side critic
    would read it there.

    A reward must be known when its token is sampled, or the rewards so far tell the critic of those
    that follow.
    """
    if not isinstance(roles.actor_critic.value_head, SideCritic):
        return
    lengths = completion_mask.sum(1)
    means = scored.totals / lengths.clamp(min=1)
    is_even = (
        (scored.tokens - means[:, None]).abs() <= 1e-5 * means.abs()[:, None]
    ) | ~completion_mask
    counts = (scored.usable & (lengths > 2)).to(means)
    sums = (
        counts.sum(),
        (is_even.all(1) * counts).sum(),
        (means * counts).sum(),
        (means**2 * counts).sum(),
    )
    rows, even, total, squares = roles.all_sum(torch.stack(sums)).tolist()
    if rows >= 8 and even == rows and squares - total**2 / rows > 1e-4 * squares:  # they differ
        raise ValueError(
            "The rewards per token of the first rollout are equal within each completion, and "
            "differ between them: scores of whole completions, spread over tokens. "
            "`critic='side'` would read them before they are earned; return one number per "
            "completion, or set `critic='head'`."
        )


def outputs_after(roles: Roles, samples: Samples, run: RunState) -> Tensor | None:
    """Outputs of the critic for the states after completions that a limit cut, `[batch]`; `None`
    if there are none."""
    actor_critic = roles.actor_critic
    device = roles.accelerator.device
    episodes = samples.batch.episodes
    sequences = samples.sequences
    rows = [row for row, episode in enumerate(episodes) if episode.bootstraps]
    if not gather_object(rows):  # on any rank
        return None
    rows = rows or [0]
    # the value of a state is at the token that follows it: one that nothing else reads
    pad_token_id = roles.tokenizer.pad_token_id
    index = torch.tensor(rows)
    own = sequences.rows(index)
    on_device = index.to(device)
    completions = [
        episodes[row].completion_ids + episodes[row].following + [pad_token_id] for row in rows
    ]
    last = [[0] * (len(ids) - 1) + [1] for ids in completions]
    prompts = [episodes[row].prompt_ids for row in rows]
    ends = Sequences.from_token_ids(prompts, completions, pad_token_id, device, sampled=last)
    ends = replace(
        ends,
        critic_prompt_ids=own.critic_prompt_ids,
        critic_prompt_lengths=own.critic_prompt_lengths,
    )
    if isinstance(actor_critic.value_head, SideCritic):
        padding = 0, ends.completion_ids.shape[1] - sequences.completion_ids.shape[1]
        scores = samples.scored.tokens[on_device]
        mask = sequences.completion_mask[on_device]
        scores, mask = (nn.functional.pad(x, padding) for x in (scores, mask))
        ends = with_rewards_so_far(ends, scores, mask | ends.completion_mask, run)
    with unsharded(actor_critic):  # ranks have other numbers of rows
        outputs = score_tokens(roles, ends, with_reference=False).values.sum(1)
    return outputs.new_zeros(len(sequences)).index_put((on_device,), outputs)


def scoring_batch(
    episodes: list[Episode],
    state: TrainerState,
    extra: dict[str, list],
    logged: dict[str, list[float]],
) -> ScoringBatch:
    """Input of the rewards, which may add columns to `extra` and metrics to `logged`."""

    def log_extra(column: str, values: list) -> None:
        if len(values) != len(episodes):
            got = f"got {len(values)} for {len(episodes)} completions"
            raise ValueError(f"`log_extra` must get one value per completion in {column!r}, {got}.")
        extra[column] = values

    def log_metric(name: str, value: float) -> None:
        check_metric_name(name)
        logged.setdefault(name, []).append(float(value))

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


def seeds_of_episodes(roles: Roles, rows: int, state: TrainerState, training: bool) -> list[int]:
    """Seeds of environments: the same for all episodes of a prompt and, in training, on any
    number of ranks."""
    group = roles.args.num_generations
    step = state.global_step
    if not training:  # of the evaluation's stream
        group = 1
        step = int(torch.randint(2**31, ()))
    first = roles.accelerator.process_index * rows
    return [hash((roles.args.seed, step, (first + row) // group)) % 2**31 for row in range(rows)]


@contextmanager
def timed(name: str, metrics: Metrics) -> Iterator[None]:
    """Log the seconds within a context."""
    start = time.perf_counter()
    yield
    metrics.mean(f"time/{name}", time.perf_counter() - start)
