"""Collect a rollout: sample, log-probs and values, score, KL-shaped rewards, advantages."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.utils import logging

from ..distributed import is_sharded
from ..episodes import Episode, Generator, Player, to_sequences
from ..modeling import ActorCritic, TokenScores
from ..randomness import fixed_seed
from ..rewards import Reward, RewardShaping, RunningMoments, Scored, ScoringBatch, monitor, score_all
from ..sequences import Sequences
from . import math as ppo_math
from .critics import EarnedRewards, ValueNormalizer, ValueTrust
from .guards import NonFiniteGuard
from .metrics import (
    Metrics,
    check_metric_name,
    log_completions,
    log_episodes,
    log_groups,
    log_reward_hacking,
    log_rewards,
)
from .sampler import SamplerComparison

logger = logging.get_logger(__name__)

OVER_GROUPS = {
    "grpo": ppo_math.grpo_advantages,
    "dr_grpo": ppo_math.dr_grpo_advantages,
    "rloo": ppo_math.rloo_advantages,
    "prompt_std": ppo_math.prompt_weights,
}
SHAPING_FIELDS = ("reward_baseline", "normalize_rewards", "reward_clip_range", "missing_eos_penalty")


class Samples(NamedTuple):
    """Completions of a batch of prompts with their scores."""

    sequences: Sequences
    stopped: Tensor  # [batch], 1 unless a limit cut the completion
    batch: ScoringBatch  # input of the rewards
    scored: Scored  # output of the rewards
    monitored: Tensor  # [batch, monitors]
    extra: dict[str, list]  # columns that reward functions added to the table of completions
    tokens: TokenScores  # [batch, response]
    excluded: Tensor | None  # [batch], 1 if a score is not finite; None if no rank has any
    sampler_weights: Tensor | None = None  # [batch, response], of the advantages
    advantages: Tensor | None = None  # [batch, response]; None in evaluation

    @property
    def is_cut(self) -> Tensor:
        """Completions after which the value bootstraps, `[batch]`."""
        cut = torch.tensor([episode.bootstraps for episode in self.batch.episodes])
        return cut.to(self.stopped.device, non_blocking=True)


@dataclass(frozen=True)
class Rollout:
    """Sampled sequences with all inputs of the updates; tensors are `[batch, response]`."""

    sequences: Sequences
    response_mask: Tensor  # 1 at sampled tokens that count
    old_logprobs: Tensor  # under the policy that sampled
    advantages: Tensor
    ref_logprobs: Tensor | None = None  # under the reference; None without a KL penalty
    old_values: Tensor | None = None  # None without a critic
    returns: Tensor | None = None  # targets of the values
    policy_mask: Tensor | None = None  # 1 where the policy learns; None where all tokens do that count
    value_weights: Tensor | None = None  # in the loss of the values, `[batch, 1]` or of each token
    kl_coef: float = 0.0  # coefficients are constant over the rollout's updates
    entropy_coef: float = 0.0
    value_unit: float = 1.0  # in which the loss of the values is computed

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
        """Move all tensors except lengths."""
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
        numbers = torch.tensor([self.kl_coef, self.entropy_coef, self.value_unit], dtype=torch.float64)
        return {f"sequences.{name}": x for name, x in token_ids.items()} | self.tensors | {"numbers": numbers}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], device: torch.device | str) -> "Rollout":
        """Restore the state returned by [`state_dict`]."""
        tensors = dict(state)
        kl_coef, entropy_coef, unit = tensors.pop("numbers").tolist()
        prefix = "sequences."
        token_ids = {key.removeprefix(prefix): tensors.pop(key) for key in state if key.startswith(prefix)}
        rollout = cls(Sequences(**token_ids), **tensors, kl_coef=kl_coef, entropy_coef=entropy_coef, value_unit=unit)
        return rollout.to(device)


def longest_first(rows: Tensor, lengths: Tensor) -> Tensor:
    """Sort the rows of each minibatch, `[minibatches, rows]`, by length, so that micro-batches need little padding."""
    return rows.gather(1, lengths[rows].argsort(dim=1, descending=True, stable=True))


@dataclass(eq=False)
class RolloutCollector:
    """Collects rollouts from a policy, its reference and critic, and rewards."""

    actor_critic: ActorCritic
    player: Player  # samples
    rewards: list[Reward]
    monitors: list[Reward]  # scored and logged, never optimized
    tokenizer: PreTrainedTokenizerBase
    args: Any
    accelerator: Accelerator
    guard: NonFiniteGuard

    def __post_init__(self):
        args, weights = self.args, self.args.reward_weights
        # those of environments come last, with weight 1 as in TRL
        self.reward_weights = weights and [*weights, *[1.0] * (len(self.rewards) - len(weights))]
        self.shaping = RewardShaping(**{name: getattr(args, name) for name in SHAPING_FIELDS})
        self.kl_in_reward = args.uses_reference and args.kl_placement != "loss"
        self.kl_coef = ppo_math.Coefficient(args.kl_coef)
        if args.kl_target is not None:
            self.kl_coef = ppo_math.AdaptiveKL(args.kl_coef, args.kl_target, args.kl_horizon)
        self.entropy_coef = ppo_math.Coefficient(args.entropy_coef)
        if args.entropy_target is not None:
            self.entropy_coef = ppo_math.AdaptiveEntropy(args.entropy_coef, args.entropy_target)
        roles, all_sum = cast(Any, self.actor_critic), self.all_sum  # with a value head, where one is needed
        self.normalizer = ValueNormalizer(roles.value_head, all_sum) if args.normalize_values else None
        self.value_trust = ValueTrust(all_sum) if args.advantage_estimator == "auto" else None
        self.earned = EarnedRewards(roles.value_head, all_sum) if args.critic == "side" else None
        uses_vllm = args.generation_backend == "vllm"
        self.sampler = SamplerComparison(args, roles.dtype, all_sum) if uses_vllm else None
        self.logits_are_checked = False
        is_shifted = args.normalize_rewards or args.reward_baseline is not None
        sees_all = args.normalize_values or self.value_trust or (args.lam == 1 and args.lam_length_alpha is None)
        is_new = args.critic != "none" and args.critic_init is None
        self.warns_of_far_scores = is_new and not is_shifted and not sees_all

    @property
    def generator(self) -> Generator:
        """Generator with which the player samples."""
        return self.player.generator

    def all_sum(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        return self.accelerator.reduce(x, reduction="sum")

    # ---- steps 1 to 3, for training and evaluation ----

    def sample(
        self,
        rows: Sequence[dict],
        metrics: Metrics,
        state: TrainerState,
        num_valid: int | None = None,
        training: bool = False,
    ) -> Samples:
        """Sample and score a completion for each row of the dataset; only the first `num_valid` enter metrics."""
        args, device = self.args, self.accelerator.device
        if not self.logits_are_checked:  # not in a constructor, before device and dtype are final
            with self.accelerator.autocast():
                self.actor_critic.check_logits()
            self.logits_are_checked = True

        # 1. Play an episode for each row: a completion, or several turns.
        seeds = self._episode_seeds(len(rows), state, training)
        with self._timed("generate", metrics):
            episodes = self.player.play(rows, seeds, state.global_step if training else None)
        sequences = to_sequences(episodes, self.tokenizer.pad_token_id, device)
        stopped = torch.tensor([episode.ending == "stopped" for episode in episodes]).to(device, non_blocking=True)

        # 2. Score the completions.
        extra: dict[str, list] = {}
        logged: dict[str, list[float]] = {}
        # rewards draw from a stream of their own: one that seeds would repeat the next rollouts. Nor may one that
        # changes the working directory move the checkpoints, or one that switches gradients off end the training
        seed = hash((args.seed, state.global_step, self.accelerator.process_index)) % 2**31
        with self._timed("score", metrics), fixed_seed(seed, device), chdir("."), torch.enable_grad():
            batch = self._scoring_batch(episodes, state, extra, logged)
            on_error, max_failures = args.reward_on_error, args.max_reward_failures
            scored = score_all(self.rewards, batch, self.reward_weights, on_error, max_failures, self.all_sum, device)
            monitored = monitor(self.monitors, batch, device) if self.monitors else scored.rewards[:, :0]
        # a reward may log a metric on some ranks only, and in any order
        for name in sorted(set(gather_object(list(logged)))):
            metrics.mean(name, torch.tensor(logged.get(name, [])).to(device, non_blocking=True))

        # 3. Log-probs under policy and reference, values and entropies, with the forward of the updates.
        if self.earned is not None:
            sequences = self.earned.read_by_critic(sequences, scored)
        with self._timed("forward", metrics):
            tokens = self.score_tokens(sequences)

        valid = torch.arange(len(rows), device=device) < (len(rows) if num_valid is None else num_valid)
        step = state.global_step + 1 if training else None
        excluded = self.guard.find_nonfinite(tokens, valid, metrics, step)
        if excluded is not None:
            tokens = tokens.map(lambda x: x.masked_fill(excluded[:, None], 0))
            usable, token_scores = scored.usable & ~excluded, scored.tokens.masked_fill(excluded[:, None], 0)
            scored = scored._replace(usable=usable, tokens=token_scores)
        metrics.total("unscored_completions", scored.unscored & valid)
        log_rewards(metrics, [reward.name for reward in self.rewards], scored, valid, self.all_sum)
        valid = valid & scored.usable
        completion_mask, weights = sequences.completion_mask, None
        if self.sampler is not None:
            sampled = [torch.tensor(episode.logprobs) for episode in episodes]
            logprobs = nn.utils.rnn.pad_sequence(sampled, batch_first=True).to(device)
            weights = self.sampler.weights(tokens, logprobs, completion_mask & valid[:, None], metrics)
        log_completions(metrics, tokens, completion_mask, stopped, valid)
        log_episodes(metrics, episodes, num_valid)
        lengths, reduce = completion_mask.sum(1), (self.all_sum, self.accelerator.gather)
        monitors = {reward.name: scores for reward, scores in zip(self.monitors, monitored.unbind(1))}
        log_reward_hacking(metrics, batch.completions, lengths, scored, monitors, valid, *reduce)
        return Samples(sequences, stopped, batch, scored, monitored, extra, tokens, excluded, weights)

    # ---- all five steps ----

    def collect(self, rows: Sequence[dict], metrics: Metrics, state: TrainerState) -> tuple[Rollout, Samples]:
        """Collect one rollout from rows of the dataset."""
        args = self.args
        samples = self.sample(rows, metrics, state, training=True)
        sequences, tokens, scored = samples.sequences, samples.tokens, samples.scored
        completion_mask, usable = sequences.completion_mask, scored.usable
        response_mask = policy_mask = completion_mask & usable[:, None]
        if args.mask_truncated_completions:  # a critic learns from them: https://huggingface.co/papers/2609.36802
            policy_mask = response_mask & samples.stopped[:, None]
            response_mask = policy_mask if args.critic == "none" else response_mask
        if state.global_step == 0:
            self._warn_about_scores(scored)
        log_groups(metrics, scored, args.num_generations, self.accelerator.gather)

        # 4. Rewards per token: the KL penalty at every token, the shaped score at the last one.
        kl_coef = self.kl_coef.value  # adapted to earlier rollouts; the entropy's coefficient also to this one
        if state.global_step >= args.value_warmup_steps:  # until then the policy does not change
            self._update_coefficients(tokens, policy_mask, usable)
        rewards = self._token_rewards(tokens, scored, samples.stopped, completion_mask, kl_coef)
        metrics.mean("objective", rewards.sum(1), usable)
        reward_unit = 1.0
        if args.whiten_rewards:
            reward_unit = math.sqrt(float(ppo_math.masked_var(rewards, response_mask, self.all_sum)) + 1e-8)
            rewards = ppo_math.scale_to_unit_variance(rewards, response_mask, self.all_sum)

        # 5. Advantages for the policy and, with a critic, returns for the values: per token, or per turn, whose reward
        #    and value are at its first token.
        returns, values, steps = None, tokens.values, response_mask
        if args.advantage_level == "turn":
            starts, first = ppo_math.turn_starts(sequences.turns)
            rewards, steps = torch.zeros_like(rewards).scatter_add(1, first, rewards), response_mask & starts
        if values is not None:
            values, advantages, returns = self._gae(rewards, values, steps, samples, metrics)
            explained = ppo_math.explained_variance(values, returns, steps, self.all_sum)
            metrics.mean("value/explained_variance", explained)
        elif args.advantage_estimator == "rebn":  # https://huggingface.co/papers/2510.01051
            advantages, _ = ppo_math.gae(rewards, torch.zeros_like(rewards), steps, args.gamma, 1.0)
        else:
            advantages = self._over_groups(args.advantage_estimator, rewards.sum(1), usable)[:, None] * response_mask
        if args.advantage_level == "turn":
            advantages = advantages.gather(1, first) * response_mask
        advantages, unit = self._scaled(advantages, policy_mask, returns, steps)
        if samples.sampler_weights is not None:  # PPO's clipped objective is linear in a factor that is not negative
            advantages = advantages * samples.sampler_weights
        if self.earned is not None:
            self.earned.update(scored, response_mask)

        if samples.excluded is not None:
            sequences = self.guard.stand_ins(sequences, samples.excluded)
        entropy_coef = self.entropy_coef.value
        metrics.mean("kl_coef", kl_coef)
        metrics.mean("entropy_coef", entropy_coef)
        rollout = Rollout(
            sequences=sequences,
            response_mask=response_mask,
            old_logprobs=tokens.logprobs,
            ref_logprobs=tokens.ref_logprobs,
            advantages=advantages,
            old_values=values,
            returns=returns,
            policy_mask=None if policy_mask is response_mask else policy_mask,
            value_weights=self._value_weights(rewards, steps, response_mask, usable),
            kl_coef=kl_coef / (reward_unit * unit),  # a KL in the loss weighs as much as one in the reward
            entropy_coef=entropy_coef,
            value_unit=1.0 if self.normalizer is None else self.normalizer.deviation,
        )
        return rollout, samples._replace(tokens=tokens._replace(values=values), advantages=advantages)

    # ---- parts of the steps ----

    @torch.no_grad()
    def score_tokens(self, sequences: Sequences, with_reference: bool = True) -> TokenScores:
        """Compute log-probs and values with the code, micro-batches and dtype of the updates.

        So the ratio of the first optimizer step is exactly 1, and with a fresh adapter the KL is exactly 0.
        """
        args, with_reference = self.args, with_reference and self.args.uses_reference
        exact_kl = with_reference and self.kl_in_reward and args.kl_estimator == "exact"
        size, temperature = args.per_device_train_batch_size, args.temperature
        minibatches = torch.arange(len(sequences)).split(size * args.gradient_accumulation_steps)
        ordered = [longest_first(rows[None], sequences.lengths)[0] for rows in minibatches]
        index = [part for rows in ordered for part in rows.split(size)]
        quiet = args.disable_tqdm or not self.accelerator.is_main_process
        outputs: dict[str, Tensor] = {}
        start = 0
        with self.accelerator.autocast():
            for rows in tqdm(index, desc="Scoring tokens", leave=False, delay=3, disable=quiet):
                part = sequences.rows(rows)
                scores = self.actor_critic(part, temperature, with_entropy=True, with_kl=exact_kl)
                if with_reference:
                    scores = scores._replace(ref_logprobs=self.actor_critic.reference_logprobs(part, temperature))
                for name, x in scores._asdict().items():
                    if x is not None:
                        out = outputs.setdefault(name, x.new_zeros(sequences.completion_ids.shape))
                        out[start : start + len(x), : x.shape[1]] = x
                start += len(rows)
        # rows in the order of the micro-batches until here
        order = torch.cat(index).argsort().to(sequences.completion_ids.device, non_blocking=True)
        return TokenScores(**outputs).map(lambda x: x[order])

    def _scoring_batch(
        self, episodes: list[Episode], state: TrainerState, extra: dict[str, list], logged: dict[str, list[float]]
    ) -> ScoringBatch:
        def log_extra(column: str, values: list) -> None:
            if len(values) != len(episodes):
                got = f"got {len(values)} for {len(episodes)} completions"
                raise ValueError(f"`log_extra` must get one value per completion in {column!r}, {got}.")
            extra[column] = values

        def log_metric(name: str, value: float) -> None:
            check_metric_name(name)
            logged.setdefault(name, []).append(float(value))

        columns = {name: [episode.columns[name] for episode in episodes] for name in episodes[0].columns}
        completions = [x.completion for x in episodes], [x.completion_ids for x in episodes]
        prompts = [episode.prompt for episode in episodes]
        return ScoringBatch(prompts, *completions, columns, state, episodes, log_extra, log_metric)

    def _episode_seeds(self, rows: int, state: TrainerState, training: bool) -> list[int]:
        """Seeds of environments: the same on any number of ranks, and for all episodes of a prompt."""
        group, step = self.args.num_generations, state.global_step
        if not training:  # of the evaluation's stream
            group, step = 1, int(torch.randint(2**31, ())) if self.player.takes_seeds else 0
        first = self.accelerator.process_index * rows
        return [hash((self.args.seed, step, (first + row) // group)) % 2**31 for row in range(rows)]

    def _value_weights(self, rewards: Tensor, steps: Tensor, response_mask: Tensor, usable: Tensor) -> Tensor | None:
        """Weights in the loss of the values, of turns and prompts; `None` if all are equal."""
        weights = None
        if self.args.advantage_level == "turn":  # the critic learns at first tokens, from a mean over turns
            count, turns = self.all_sum(torch.stack([response_mask.sum(), steps.sum()])).unbind()
            weights = steps * (count / turns.clamp(min=1))
        if self.args.value_loss_weights == "prompt_std":
            of_prompts = self._over_groups("prompt_std", rewards.sum(1), usable)[:, None]
            weights = of_prompts if weights is None else of_prompts * weights
        return weights

    def _token_rewards(
        self, tokens: TokenScores, scored: Scored, stopped: Tensor, completion_mask: Tensor, kl_coef: float
    ) -> Tensor:
        score = self.shaping(scored.totals, stopped, scored.usable, self.all_sum)
        kl = torch.zeros_like(tokens.logprobs)
        if self.kl_in_reward and tokens.kls is not None:
            kl = tokens.kls
        elif self.kl_in_reward:
            kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, self.args.kl_estimator)
        return ppo_math.token_rewards(scored.tokens, score, kl, completion_mask, kl_coef)

    def _update_coefficients(self, tokens: TokenScores, policy_mask: Tensor, usable: Tensor) -> None:
        if self.args.kl_target is not None and (completions := int(self.all_sum(usable.sum()))):
            kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, "k1")  # 0 at padding
            self.kl_coef.update(float(ppo_math.masked_mean(kl.sum(1), usable, self.all_sum)), completions)
        if self.args.entropy_target is not None and self.all_sum(policy_mask.sum()):
            entropy = ppo_math.masked_mean(tokens.entropies, policy_mask, self.all_sum)
            self.entropy_coef.update(float(entropy))

    def _values_after(self, samples: Samples) -> Tensor | None:
        """Values of the states after completions that a limit cut, `[batch]`, 0 after others; `None` if none is."""
        episodes, sequences, device = samples.batch.episodes, samples.sequences, self.accelerator.device
        rows = [row for row, episode in enumerate(episodes) if episode.bootstraps]
        if is_sharded(self.actor_critic.embedding):  # ranks need as many forwards
            rows = [*range(len(sequences))] if self.all_sum(samples.is_cut.sum()) else []
        if not rows:
            return None
        # the value of a state is at the token that follows it: one that nothing else reads
        pad_token_id, index = self.tokenizer.pad_token_id, torch.tensor(rows)
        own, on_device = sequences.rows(index), index.to(device)
        completions = [[*episodes[row].completion_ids, *episodes[row].following, pad_token_id] for row in rows]
        last = [[0] * (len(ids) - 1) + [1] for ids in completions]
        prompts = [episodes[row].prompt_ids for row in rows]
        ends = Sequences.from_token_ids(prompts, completions, pad_token_id, device, sampled=last)
        ends = replace(ends, critic_prompt_ids=own.critic_prompt_ids, critic_prompt_lengths=own.critic_prompt_lengths)
        if self.earned is not None:
            padding = 0, ends.completion_ids.shape[1] - sequences.completion_ids.shape[1]
            scores, mask = samples.scored.tokens[on_device], sequences.completion_mask[on_device]
            scores, mask = (nn.functional.pad(x, padding) for x in (scores, mask))
            ends = replace(ends, earned=self.earned.before(scores, mask | ends.completion_mask))
        values = cast(Tensor, self.score_tokens(ends, with_reference=False).values).sum(1)
        if self.args.value_range is not None:
            values = values.clamp(*self.args.value_range)
        values = values.new_zeros(len(sequences)).index_put((on_device,), values)
        return values.masked_fill(~samples.is_cut, 0)

    def _gae(
        self, rewards: Tensor, values: Tensor, response_mask: Tensor, samples: Samples, metrics: Metrics
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values in the units of the returns, advantages for the policy and returns for the critic, each with its λ.

        Source: https://huggingface.co/papers/2503.01491 (decoupled λ), https://huggingface.co/papers/2504.05118
        """
        names = ("gamma", "lam", "lam_critic", "lam_length_alpha")
        gamma, lam, lam_critic, alpha = (getattr(self.args, name) for name in names)
        lam_critic = lam if lam_critic is None else lam_critic
        new = self.normalizer if self.normalizer is not None and self.normalizer.is_new else None
        if new is not None:
            _, outcomes = ppo_math.gae(rewards, torch.zeros_like(values), response_mask, gamma, 1.0)
            values = new.update(values, outcomes, response_mask)
        final_values = self._values_after(samples)
        if self.args.value_range is not None:  # https://huggingface.co/papers/2608.23566
            values = values.clamp(*self.args.value_range)
        baseline, final_baseline = values, final_values
        if self.value_trust is not None:
            metrics.mean("value/weight", self.value_trust.weight)
            without = partial(ppo_math.gae, rewards, torch.zeros_like(values), response_mask, gamma, 1.0)
            weigh = self.value_trust.weighing(without()[1], response_mask)
            baseline = weigh(values)
            if final_values is not None:
                final_baseline = weigh(final_values).masked_fill(~samples.is_cut, 0)
            self.value_trust.add(values, without(final_baseline)[1], response_mask)
        lam_policy = lam if alpha is None else ppo_math.length_adaptive_lambda(response_mask, alpha)
        advantages, returns = ppo_math.gae(rewards, baseline, response_mask, gamma, lam_policy, final_baseline)
        if baseline is not values or alpha is not None or lam_critic != lam:
            _, returns = ppo_math.gae(rewards, values, response_mask, gamma, lam_critic, final_values)
        if self.normalizer is not None:
            self.normalizer.update(values, returns, response_mask)
        return values, advantages, returns

    def _scaled(
        self, advantages: Tensor, policy_mask: Tensor, returns: Tensor | None, steps: Tensor
    ) -> tuple[Tensor, float]:
        """Advantages as the policy learns from them, and their unit in that of the rewards."""
        if self.args.whiten_advantages:
            variance = ppo_math.masked_var(advantages, policy_mask, self.all_sum)
            return ppo_math.whiten(advantages, policy_mask, self.all_sum), math.sqrt(float(variance) + 1e-8)
        if self.normalizer is None or returns is None:
            return advantages, 1.0
        # The unit is the deviation of the returns: no scale of the rewards is left. When they hardly vary any more, a
        # critic that lags behind is worse than a constant one: its errors are scaled down to what the returns vary.
        error = ppo_math.masked_mean(advantages**2, steps, self.all_sum)
        spread = ppo_math.masked_var(returns, steps, self.all_sum)
        unit = self.normalizer.deviation * max(1.0, math.sqrt(float(error / spread.clamp(min=1e-20))))
        return advantages / unit, unit

    def _over_groups(self, name: str, scores: Tensor, usable: Tensor) -> Tensor:
        """Advantages or weights of completions, `[batch]`, from the sums of their rewards; a group may span ranks."""
        if name == "reinforce":
            return scores.masked_fill(~usable, 0)
        gather = self.accelerator.gather
        results = OVER_GROUPS[name](gather(scores), gather(usable), self.args.num_generations)
        first = self.accelerator.process_index * len(scores)
        return results[first : first + len(scores)]

    def _warn_about_scores(self, scored: Scored) -> None:
        """Warn if first scores are all equal, or far from 0, the first prediction of a new critic.

        With λ < 1 the score at the end reaches earlier tokens through the values in between, which start at 0. So only
        the last tokens receive it.
        """
        moments = RunningMoments()
        moments.update(scored.totals, scored.usable, self.all_sum)
        mean, deviation = moments.mean, math.sqrt(moments.squares / max(moments.count - 1, 1))
        if moments.count < 8 or not self.accelerator.is_main_process:
            return
        if deviation <= 1e-6 * abs(mean):  # equal scores may differ by rounding
            logger.warning(
                "All %d scores of the first rollout are %.3g, which teaches nothing about the completions; check the "
                "reward, or make the task easier.",
                moments.count,
                mean,
            )
        elif self.warns_of_far_scores and deviation < abs(mean) / 3:
            ending, lengths = ("worse", "grow") if mean < 0 else ("better", "shrink")
            logger.warning(
                "The scores of the first rollout are %.3g ± %.3g, but a new critic predicts 0. Until it has learned "
                "their mean, only a completion's last tokens receive it, and ending looks %s than continuing: "
                "completions %s, for any reward. Set `normalize_values=True`, `normalize_rewards=True` or "
                "`reward_baseline='reference'`, or start from a `critic_init` (see `trl-ppo pretrain-critic`).",
                mean,
                deviation,
                ending,
                lengths,
            )

    @contextmanager
    def _timed(self, name: str, metrics: Metrics) -> Iterator[None]:
        start = time.perf_counter()
        yield
        metrics.mean(f"time/{name}", time.perf_counter() - start)

    # ---- checkpoints ----

    @property
    def _moments(self) -> dict[str, RunningMoments]:
        """Running statistics of the values."""
        parts = {"returns": self.normalizer, "trust": self.value_trust, "earned": self.earned}
        return {
            f"{part}.{name}": x
            for part, statistics in parts.items()
            for name, x in (vars(statistics).items() if statistics else ())
            if isinstance(x, RunningMoments)
        }

    def forget_values(self) -> None:
        """Drop the statistics of the values: another critic was loaded, which has its own units."""
        for moments in self._moments.values():
            vars(moments).update(vars(RunningMoments()))

    def state_dict(self) -> dict[str, Any]:
        """Running statistics of the rewards and coefficients, as plain numbers."""
        return {
            "rewards": self.shaping.state_dict(),
            "kl_coef": self.kl_coef.state_dict(),
            "entropy_coef": self.entropy_coef.state_dict(),
            "values": {name: dict(vars(moments)) for name, moments in self._moments.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by [`state_dict`]."""
        self.shaping.load_state_dict(state["rewards"])
        for name, moments in self._moments.items():
            vars(moments).update(state["values"].get(name, {}))
        self.kl_coef.load_state_dict(state["kl_coef"])
        self.entropy_coef.load_state_dict(state["entropy_coef"])
