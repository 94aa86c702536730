"""Credit: from rewards per token to advantages and targets, as a chain that is built once.

A step takes the samples, the credit so far and the state of the run, and returns the next credit
and state; it changes nothing of what it is given. A variant that a run does not have is not in its
chain.
"""

from dataclasses import replace
from functools import partial
from operator import and_
from typing import NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.utils import logging

from .. import ppo_math
from ..config import PPOConfig
from ..distributed import unsharded
from ..modeling.critics import Critic, CriticState, SideCritic
from ..ppo_math import Reduction
from ..sequences import Sequences
from .advantages import (
    SOLVED,
    Advantages,
    Cuts,
    Discounts,
    divide_by_unit,
    gae_with_critic,
    group_advantages,
    in_groups_that_differ,
    objective_advantages,
    rewards_to_go,
)
from .baseline import FOLDS, MEMORY, Groups
from .metrics import Metrics, log_critic
from .places import Information, default_lambda, enter_at
from .rollouts import (
    Components,
    Credit,
    CreditStep,
    Samples,
    micro_batches,
    observed_by_critic,
    read_by_critic,
    rows_of_environments,
    unit_of,
)
from .state import RunState

logger = logging.get_logger(__name__)

Stepped = tuple[Credit, RunState]


def build_credit(components: Components, metrics: Metrics) -> list[CreditStep]:
    """Steps of a run, in their order. No other function chooses between them.

    Their settings are read here, once; the critic's step logs to `metrics`.
    """
    args = components.args
    all_sum = components.all_sum
    has_critic = components.actor_critic.value_head is not None
    rank = components.accelerator.process_index
    groups = Groups(args.num_generations, components.accelerator.gather, rank)
    steps: list[CreditStep] = []

    # 1. Which tokens count, and their rewards.
    if args.mask_truncated_completions:
        steps.append(partial(mask_truncated, critic_learns=has_critic))
    if args.drop_equal_groups:
        penalty = args.missing_eos_penalty or 0.0
        steps.append(partial(drop_equal_groups, groups=groups, missing_eos_penalty=penalty))
    if args.whiten_rewards:
        steps.append(partial(whiten_rewards, all_sum=all_sum))
    if args.advantage_level == "turn":
        steps.append(partial(reward_turns, all_sum=all_sum))

    # 2. Advantages.
    if has_critic:
        steps.append(
            partial(estimate_by_critic, components=components, metrics=metrics, groups=groups)
        )
    elif args.advantage_estimator == "rebn":
        steps.append(partial(sum_rewards_to_go, gamma=args.gamma))
    elif args.multi_objective_aggregation == "normalize_then_sum":
        weights = components.reward_weights
        steps.append(partial(compare_objectives_in_groups, weights=weights, groups=groups))
    else:
        estimator = cast(str, args.advantage_estimator)
        steps.append(partial(compare_in_groups, estimator=estimator, groups=groups))
    steps.append(spread_over_turns if args.advantage_level == "turn" else keep_counted_tokens)

    # 3. Their unit, and what is left of them.
    if args.whiten_advantages:
        steps.append(partial(whiten_advantages, all_sum=all_sum))
    elif args.normalize_values:
        steps.append(divide_by_unit_of_returns)
    if args.top_entropy_quantile < 1:
        quantile = args.top_entropy_quantile
        accelerator = components.accelerator
        steps.append(partial(keep_high_entropies, quantile=quantile, accelerator=accelerator))
    if args.entropy_coef:
        # advantages in the unit of the returns fade, and may stay near 0 for long
        least = SOLVED if args.normalize_values and not args.whiten_advantages else 0.0
        steps.append(partial(measure_unit_of_entropy, least=least, all_sum=all_sum))
    return steps


# ---- which tokens count, and their rewards ----


def mask_truncated(
    samples: Samples, credit: Credit, run: RunState, *, critic_learns: bool
) -> Stepped:
    """The policy learns nothing from completions that a limit cut; a critic does.

    Source: https://huggingface.co/papers/2609.36802
    """
    mask = credit.response_mask & samples.stopped[:, None]
    credit = credit._replace(policy_mask=mask)
    if not critic_learns:
        credit = credit._replace(response_mask=mask)
    return credit, run


def drop_equal_groups(
    samples: Samples, credit: Credit, run: RunState, *, groups: Groups, missing_eos_penalty: float
) -> Stepped:
    """Nothing is learned from completions of a prompt whose scores are all equal."""
    usable = samples.scored.usable
    scores = credit.shaped.totals - missing_eos_penalty * ~samples.stopped
    sizes = credit.rewards.abs().sum(1)
    differs = in_groups_that_differ(scores, usable, sizes, groups.size, groups.gather)
    mask = credit.policy_mask & groups.own(differs, usable)[:, None]
    return credit._replace(response_mask=mask, policy_mask=mask), run


def whiten_rewards(
    samples: Samples, credit: Credit, run: RunState, *, all_sum: Reduction
) -> Stepped:
    """Rewards in units of their deviation over tokens."""
    mask = credit.response_mask
    rewards, unit = ppo_math.whiten(credit.rewards, mask, all_sum, keeps_mean=True)
    return credit._replace(rewards=rewards, unit=credit.unit * unit), run


def reward_turns(samples: Samples, credit: Credit, run: RunState, *, all_sum: Reduction) -> Stepped:
    """Reward and value of a turn are at its first token: γ and λ count turns."""
    starts, first = ppo_math.turn_starts(samples.sequences.turns)
    rewards = torch.zeros_like(credit.rewards).scatter_add(1, first, credit.rewards)
    credit = credit._replace(rewards=rewards, turn_starts=starts)
    # the critic learns at first tokens, from a mean over turns
    counts = torch.stack([credit.response_mask.sum(), credit.steps.sum()])
    tokens, turns = all_sum(counts).unbind()
    return credit._replace(value_weights=credit.steps * (tokens / turns.clamp(min=1))), run


# ---- advantages ----


def sum_rewards_to_go(samples: Samples, credit: Credit, run: RunState, *, gamma: float) -> Stepped:
    """ReBN: the rewards from each token on, without a baseline."""
    result = rewards_to_go(credit.rewards, credit.steps, gamma)
    return credit._replace(advantages=result.advantages), run


def compare_objectives_in_groups(
    samples: Samples, credit: Credit, run: RunState, *, weights: list[float] | None, groups: Groups
) -> Stepped:
    """GDPO: each reward within the completions of its prompt, then their sum."""
    result = objective_advantages(samples.scored.rewards, weights, samples.scored.usable, groups)
    return credit._replace(advantages=result.advantages), run


def compare_in_groups(
    samples: Samples, credit: Credit, run: RunState, *, estimator: str, groups: Groups
) -> Stepped:
    """GRPO and its relatives: a completion's score against the others of its prompt."""
    usable = samples.scored.usable
    result = group_advantages(
        estimator, credit.rewards, usable, groups.size, gather=groups.gather, rank=groups.rank
    )
    return credit._replace(advantages=result.advantages), run


def estimate_by_critic(
    samples: Samples,
    credit: Credit,
    run: RunState,
    *,
    components: Components,
    metrics: Metrics,
    groups: Groups,
) -> Stepped:
    """GAE with the baseline of a critic, and the targets that the critic learns."""
    critic = cast(Critic, components.actor_critic.value_head)
    usable = samples.scored.usable

    # 1. Scores far beyond all others must not set the units of the others.
    ordinary = usable & ~outlying(credit.shaped.totals, usable, groups)
    metrics.total("outlying_completions", usable & ~ordinary)

    # 2. γ and λ, which follow from where scores tell something.
    run, places = learn_where_scores_tell(components, samples, ordinary, run)
    lam, within = lambdas_of(components, samples, run, places)
    metrics.mean("lam", lam, usable if isinstance(lam, Tensor) else None)
    discounts = discounts_of(components.args, samples.sequences.turns, lam, within)

    # 3. Outputs of the critic; a new one begins with a fit to this rollout.
    outputs = cast(Tensor, credit.outputs)
    of_baseline = outputs
    is_new = critic.is_new(run.critic)
    if is_new:
        fitted, state = fit_to_rollout(
            components, samples, credit, ordinary, discounts.gamma, groups, run.critic
        )
        outputs = outputs + fitted.outputs
        of_baseline = of_baseline + fitted.left_out
        run = run._replace(critic=state)

    # 4. Advantages and targets.
    result, returns = gae_with_critic(
        credit.rewards,
        of_baseline,
        credit.steps,
        run.critic.returns,
        is_normalized=critic.is_normalized,
        discounts=discounts,
        cuts=cuts_of(components, samples, run, is_new),
        groups=groups,
        ordinary=ordinary,
        all_sum=components.all_sum,
    )

    # 5. What the next rollouts must know: deviations, and rewards that the critic has seen.
    run = run._replace(spreads=two_largest(*run.spreads, result.spread))
    counted = credit.response_mask & ordinary[:, None]
    rewards = run.critic.rewards.add(samples.scored.tokens, counted, components.all_sum, MEMORY)
    # the fits of the first rollout's values are not what the run goes on with
    log_critic(metrics, result, places, is_new=is_new, all_sum=components.all_sum)
    credit = credit._replace(advantages=result.advantages, outputs=outputs, critic=result)
    state = run.critic._replace(returns=returns, rewards=rewards)
    return credit, run._replace(critic=state)


def spread_over_turns(samples: Samples, credit: Credit, run: RunState) -> Stepped:
    """Each token of a turn gets the advantage of its first one."""
    _, first = ppo_math.turn_starts(samples.sequences.turns)
    advantages = credit.advantages.gather(1, first) * credit.response_mask
    return credit._replace(advantages=advantages), run


def keep_counted_tokens(samples: Samples, credit: Credit, run: RunState) -> Stepped:
    """Advantages are 0 at tokens that do not count."""
    return credit._replace(advantages=credit.advantages * credit.response_mask), run


# ---- their unit, and what is left of them ----


def whiten_advantages(
    samples: Samples, credit: Credit, run: RunState, *, all_sum: Reduction
) -> Stepped:
    """Advantages with zero mean and unit variance over the policy's tokens."""
    advantages, unit = ppo_math.whiten(credit.advantages, credit.policy_mask, all_sum)
    return credit._replace(advantages=advantages, unit=credit.unit * unit), run


def divide_by_unit_of_returns(samples: Samples, credit: Credit, run: RunState) -> Stepped:
    """Advantages in units of the deviation of returns."""
    # of one rollout the scores may have been broken
    largest_but_one, _ = run.spreads
    result = divide_by_unit(Advantages(credit.advantages), run.critic.returns, largest_but_one)
    return credit._replace(advantages=result.advantages, unit=credit.unit * result.unit), run


def keep_high_entropies(
    samples: Samples, credit: Credit, run: RunState, *, quantile: float, accelerator: Accelerator
) -> Stepped:
    """Only the share of a rollout's tokens with the highest entropy has advantages.

    Source: https://huggingface.co/papers/2506.01939
    """
    entropies = samples.tokens.entropies
    own = entropies[credit.policy_mask]
    padded = accelerator.pad_across_processes(own, pad_index=-torch.inf)
    ordered = accelerator.gather(padded).sort(descending=True).values
    last = int(quantile * (int(ordered.isfinite().sum()) - 1))
    kept = entropies >= ordered[last] if len(ordered) else credit.policy_mask
    return credit._replace(advantages=credit.advantages * kept), run


def measure_unit_of_entropy(
    samples: Samples, credit: Credit, run: RunState, *, least: float, all_sum: Reduction
) -> Stepped:
    """The entropy bonus is in the unit of the advantages, which is at least `least`."""
    unit = ppo_math.root_mean_square(credit.advantages, credit.policy_mask, all_sum, least)
    return credit._replace(entropy_unit=unit), run


# ---- parts of the critic's step ----


class Fitted(NamedTuple):
    """What a fit adds to the outputs of a new critic, `[batch, response]`."""

    outputs: Tensor
    left_out: Tensor  # by fits to other prompts, for the baseline


def fit_to_rollout(
    components: Components,
    samples: Samples,
    credit: Credit,
    ordinary: Tensor,
    gamma: float | Tensor,
    groups: Groups,
    state: CriticState,
) -> tuple[Fitted, CriticState]:
    """Fit a new critic to a rollout."""
    critic = cast(SideCritic, components.actor_critic.value_head)
    summaries = read_by_critic(components, samples.sequences, critic.summary)
    # micro-batches have their own order
    order = torch.cat(micro_batches(components.args, samples.sequences)).to(credit.rewards.device)
    rows = groups.rank * len(credit.rewards) + order
    fitted, state = fit_new_critic(
        critic,
        summaries,
        state,
        credit.rewards[order],
        credit.steps[order],
        samples.sequences.completion_mask[order],
        gamma=(gamma * torch.ones_like(credit.rewards))[order],
        enters=(credit.steps & ordinary[:, None])[order],
        prompts=rows // groups.size,
        all_sum=components.all_sum,
    )
    back = order.argsort()
    return Fitted(fitted.outputs[back], fitted.left_out[back]), state


def fit_new_critic(
    critic: SideCritic,
    summaries: list[Tensor],
    state: CriticState,
    rewards: Tensor,
    steps: Tensor,
    mask: Tensor,
    gamma: float | Tensor = 1.0,
    enters: Tensor | None = None,  # steps that the fit and its units are made of; all by default
    prompts: Tensor | None = None,  # [batch], their numbers; each row has its own by default
    all_sum: Reduction = torch.clone,
) -> tuple[Fitted, CriticState]:
    """Fit a new critic to the Monte Carlo returns of its first rollout; return what that adds to
    its outputs, and its state.

    If no token counts, or all returns are equal and so have no unit, it stays new.
    """
    nothing = torch.zeros_like(rewards)
    outcomes = ppo_math.gae(rewards, nothing, steps, gamma, 1.0)[1]
    enters = steps if enters is None else enters
    seen = state.returns.add(outcomes, enters, all_sum, MEMORY)
    if seen.weight == 0 or (critic.is_normalized and not seen.varies):
        return Fitted(nothing, nothing), state
    if prompts is None:
        prompts = torch.arange(len(rewards), device=rewards.device)
    parts = prompts % FOLDS
    is_of_part = parts[:, None] == torch.arange(FOLDS, device=parts.device)
    fit = critic.fit(
        summaries,
        critic.units(seen).targets(outcomes)[mask],
        enters[mask],
        parts[:, None].expand_as(mask)[mask],
        (is_of_part & enters.any(1)[:, None]).sum(0),
        all_sum,
    )

    def added(outputs: Tensor) -> Tensor:
        return nothing.masked_scatter(mask, outputs).where(steps, 0)

    fitted = Fitted(added(fit.outputs), added(fit.left_out))
    return fitted, state._replace(first_fit=fit.weights)


def two_largest(*values: float) -> tuple[float, float]:
    """The second largest and the largest of some numbers."""
    *_, second, first = sorted(values)
    return second, first


def outlying(totals: Tensor, usable: Tensor, groups: Groups) -> Tensor:
    """True at completions whose scores are far beyond those of all others of a rollout,
    `[batch]`."""
    outliers = ppo_math.outliers(groups.gather(totals), groups.gather(usable), groups.size)
    if outliers.any():
        logger.warning_once(
            "A score is more than %g times as far from the usual one as those of other prompts; it "
            "does not enter the units of advantages and values. Such scores are counted by "
            "`outlying_completions`.",
            ppo_math.OUTLYING,
        )
    return groups.own(outliers, totals)


def learn_where_scores_tell(
    components: Components, samples: Samples, ordinary: Tensor, run: RunState
) -> tuple[RunState, Tensor]:
    """The state with what the scores tell at their places, and these places, `[batch, response]`."""
    scored = samples.scored
    scores, places = enter_at(scored.tokens, scored.places, samples.sequences.turns)
    information = dict(run.information)
    names = components.player.names or [""]
    for name, rows in zip(names, rows_of_environments(components, samples)):
        # what is usual differs between environments
        earlier = information.get(name, Information())
        information[name] = earlier.add(scores, places, ordinary & rows, components.all_sum)
    return run._replace(information=information), places


def lambdas_of(
    components: Components, samples: Samples, run: RunState, places: Tensor
) -> tuple[float | Tensor, float | Tensor]:
    """λ over a token or turn, as the level says, and that within turns, each a number or
    `[batch]`."""
    args = components.args
    options = args.critic_options
    turns = samples.sequences.turns
    # 1. By the length of a completion, or as it is given.
    if options.lam_length_alpha is not None:
        counted = turns.bool() & samples.scored.usable[:, None]
        if args.advantage_level != "token":
            counted = counted & ppo_math.turn_starts(turns)[0]
        return ppo_math.length_adaptive_lambda(counted, options.lam_length_alpha), 1.0
    if args.lam is not None:
        return args.lam, 1.0

    # 2. By where scores tell something, of all environments in the unit of each.
    parts = []
    for name in components.player.names or [""]:
        unit = unit_of(run.scores[name]) if args.normalize_rewards else 1.0
        parts.append(run.information[name].in_unit(unit))
    told = Information.pooled(parts)
    over_token, over_turn = default_lambda(told, places, turns, components.all_sum)
    if args.advantage_level == "token":
        return over_token, over_token
    return over_turn, over_token


def discounts_of(
    args: PPOConfig, turns: Tensor, lam: float | Tensor, within: float | Tensor
) -> Discounts:
    """γ and λ; if both levels count, those of turns are at their ends."""
    options = args.critic_options
    if not isinstance(lam, Tensor) and lam != 1.0:  # as a tensor each level rounds alike
        lam = torch.full((len(turns),), lam, device=turns.device)
    if args.advantage_level != "both":
        return Discounts(args.gamma, lam, options.lam)
    return Discounts(
        ppo_math.at_turn_ends(args.gamma, turns),
        ppo_math.at_turn_ends(lam, turns, within) if isinstance(lam, Tensor) else lam,
        ppo_math.at_turn_ends(options.lam, turns),
    )


def cuts_of(components: Components, samples: Samples, run: RunState, is_new: bool) -> Cuts | None:
    """Completions that a limit cut where the critic stands for the rest; `None` if no rank has
    any."""
    # the fit of a new critic is not installed before the updates
    added = run.critic.first_fit if is_new else None
    outputs = outputs_after(components, samples, run, added)
    if outputs is None:
        return None
    is_cut = torch.tensor(goes_on(samples))
    return Cuts(is_cut.to(outputs.device, non_blocking=True), outputs)


def goes_on(samples: Samples) -> list[bool]:
    """Whether the critic's value stands for what would have followed a completion, by completion.

    A score of a completion as a whole is what it earned: with a value on top, a policy would learn
    not to end.
    """
    is_cut = [episode.bootstraps for episode in samples.batch.episodes]
    if not any(is_cut):  # the scores of others are not waited for
        return is_cut
    is_whole = samples.scored.is_whole.tolist()
    if any(map(and_, is_cut, is_whole)):
        logger.warning_once(
            "No value of the critic is added after a limit where a reward function has scored the "
            "truncated completion as a whole, by a number. Return a list of `(position, reward)` "
            "pairs if the value is to stand for the rest."
        )
    return [cut and not whole for cut, whole in zip(is_cut, is_whole)]


def outputs_after(
    components: Components, samples: Samples, run: RunState, added: Tensor | None = None
) -> Tensor | None:
    """Outputs of the critic for the states after completions that a limit cut, `[batch]`; `None`
    if there are none. `added` are weights of a fit that is not installed yet."""
    actor_critic = components.actor_critic
    critic = cast(Critic, actor_critic.value_head)
    device = components.accelerator.device
    episodes = samples.batch.episodes
    sequences = samples.sequences
    rows = [row for row, goes in enumerate(goes_on(samples)) if goes]
    if not gather_object(rows):  # on any rank
        return None
    rows = rows or [0]
    pad_token_id = components.tokenizer.pad_token_id
    index = torch.tensor(rows)
    own = sequences.rows(index)
    on_device = index.to(device)
    completions = []
    turns = []
    for row in rows:
        episode = episodes[row]
        following = episode.following
        # the value of a state is at the token that follows it: one that nothing else reads
        completions.append(episode.completion_ids + following + [pad_token_id])
        # zeros, of what the policy would have read, separate it from the last turn
        turns.append(episode.sampled + [0] * len(following) + [episode.turns])
    prompts = [episodes[row].prompt_ids for row in rows]
    ends = Sequences.from_token_ids(prompts, completions, pad_token_id, device, sampled=turns)
    ends = replace(
        ends,
        critic_prompt_ids=own.critic_prompt_ids,
        critic_prompt_lengths=own.critic_prompt_lengths,
    )
    padding = 0, ends.completion_ids.shape[1] - sequences.completion_ids.shape[1]
    scores = nn.functional.pad(samples.scored.tokens[on_device], padding)
    ends = observed_by_critic(critic, ends, scores, ends.completion_mask, run)

    def read(inputs: Tensor) -> Tensor:
        outputs = critic(inputs)
        if added is not None:
            outputs = outputs + inputs @ added
        return outputs

    with unsharded(actor_critic):  # ranks have other numbers of rows
        by_token = torch.cat(read_by_critic(components, ends, read))
    # micro-batches have their own order
    order = torch.cat(micro_batches(components.args, ends)).to(device)
    is_sampled = ends.completion_mask[order]
    outputs = by_token.new_zeros(is_sampled.shape).masked_scatter(is_sampled, by_token)
    last = ends.completion_lengths.to(device) - 1
    outputs = outputs[order.argsort()].gather(1, last[:, None])[:, 0]
    return outputs.new_zeros(len(sequences)).index_put((on_device,), outputs)
