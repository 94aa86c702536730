"""From prompts to a rollout: generate, score, log-probabilities and values, rewards, advantages."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerState
from trl import is_conversational

from . import ppo_math
from .data import PROMPT_IDS
from .generation import Generator
from .metrics import Metrics
from .modeling import ActorCritic
from .rewards import Reward, RewardShaping, Scored, ScoringBatch, monitor, score_all
from .rollout import Rollout, Sequences


class Samples(NamedTuple):
    """Completions of a batch of prompts, with their scores.

    Args:
        sequences ([`Sequences`]): Token ids.
        stopped (`Tensor` of shape `[batch]`): Whether each completion ended by itself.
        batch ([`ScoringBatch`]): What the rewards were given.
        scored ([`Scored`]): What the rewards gave.
        monitored (`Tensor` of shape `[batch, monitors]`): What the monitored rewards gave.
        extra (`dict[str, list]`): Columns that reward functions added to the table of completions.
    """

    sequences: Sequences
    stopped: Tensor
    batch: ScoringBatch
    scored: Scored
    monitored: Tensor
    extra: dict[str, list]


class TokenScores(NamedTuple):
    """What policy, reference and critic say about sampled tokens: `[batch, response]`, 0 at padding."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    entropies: Tensor


def token_rewards(tokens: Tensor, shaped: Tensor, kl: Tensor, completion_mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards where they enter, what shaping changed where the completion ends, and the KL penalty at every token.

    Args:
        tokens (`Tensor` of shape `[batch, response]`): Weighted sum of the rewards, at the tokens where they enter.
        shaped (`Tensor` of shape `[batch]`): Score that is optimised; the sum of `tokens` if nothing shapes it.
        kl (`Tensor` of shape `[batch, response]`): KL of each token.
        completion_mask (`Tensor` of shape `[batch, response]`): 1 at sampled tokens.
        kl_coef (`float`): Coefficient of the penalty.

    Returns:
        `Tensor` of shape `[batch, response]`: Rewards, 0 at padding.
    """
    rewards = tokens - kl_coef * kl * completion_mask
    last = completion_mask.sum(1) - 1  # the token after which nothing was sampled: EOS, or where it was cut off
    rewards[torch.arange(len(tokens), device=tokens.device), last] += shaped - tokens.sum(1)
    return rewards


class Experience:
    """Collects rollouts.

    Args:
        actor_critic ([`ActorCritic`]): Policy, reference and critic.
        generator ([`Generator`]): What samples.
        rewards (`list[Reward]`): What scores.
        monitors (`list[Reward]`): What scores and is only watched.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the policy.
        args ([`PPOConfig`]): The run's config.
        accelerator (`Accelerator`): Device and processes of the run.
    """

    def __init__(
        self,
        actor_critic: ActorCritic,
        generator: Generator,
        rewards: list[Reward],
        monitors: list[Reward],
        tokenizer: PreTrainedTokenizerBase,
        args: Any,
        accelerator: Accelerator,
    ):
        self.actor_critic = actor_critic
        self.generator = generator
        self.rewards = rewards
        self.monitors = monitors
        self.tokenizer = tokenizer
        self.args = args
        self.accelerator = accelerator
        self.shaping = RewardShaping(args)

    def all_sum(self, total: Tensor) -> Tensor:
        """Sum over all processes.

        Args:
            total (`Tensor`): This process's part.

        Returns:
            `Tensor`: The sum.
        """
        return self.accelerator.reduce(total, reduction="sum")

    @contextmanager
    def _timed(self, name: str, metrics: Metrics) -> Iterator[None]:
        start = time.perf_counter()
        yield
        metrics.mean(f"time/{name}", torch.tensor(time.perf_counter() - start, device=self.accelerator.device))

    def _scoring_batch(
        self,
        rows: Sequence[dict],
        completion_ids: list[list[int]],
        state: TrainerState,
        metrics: Metrics,
        extra: dict[str, list],
    ) -> ScoringBatch:
        def log_metric(name: str, value: float) -> None:
            metrics.mean(name, torch.tensor(float(value), device=self.accelerator.device))

        prompts = [row["prompt"] for row in rows]
        completions: list = self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        if is_conversational({"prompt": prompts[0]}):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        kept = [key for key in rows[0] if key not in ("prompt", PROMPT_IDS)]
        return ScoringBatch(
            prompts,
            completions,
            completion_ids,
            columns={key: [row[key] for row in rows] for key in kept},
            prompt_ids=[row[PROMPT_IDS] for row in rows],
            trainer_state=state,
            log_extra=extra.__setitem__,
            log_metric=log_metric,
        )

    def sample(self, rows: Sequence[dict], metrics: Metrics, state: TrainerState) -> Samples:
        """Generate a completion for each row and score it.

        Args:
            rows (`Sequence[dict]`): Rows of the dataset, with `"prompt_ids"`.
            metrics ([`Metrics`]): Where metrics are added.
            state ([`~transformers.TrainerState`]): State of the run, for reward functions.

        Returns:
            [`Samples`]: Completions and scores.
        """
        device = self.accelerator.device
        prompt_ids = [row[PROMPT_IDS] for row in rows]
        with self._timed("generate", metrics):
            completion_ids = self.generator.generate(prompt_ids)
        stopped = torch.tensor([ids[-1] in self.generator.stop_token_ids for ids in completion_ids], device=device)
        extra: dict[str, list] = {}
        batch = self._scoring_batch(rows, completion_ids, state, metrics, extra)
        args = self.args
        with self._timed("score", metrics):
            scored = score_all(
                self.rewards,
                batch,
                args.reward_weights,
                args.reward_on_error,
                args.max_reward_failures,
                self.all_sum,
                device,
            )
            nothing = scored.rewards[:, :0]
            monitored = monitor(self.monitors, batch, device) if self.monitors else nothing
        sequences = Sequences.from_token_ids(prompt_ids, completion_ids, self.tokenizer.pad_token_id, device)
        return Samples(sequences, stopped, batch, scored, monitored, extra)

    def _forward(self, run: Callable[[Sequences], Tensor | tuple], sequences: Sequences, name: str) -> list[Tensor]:
        """Run a forward in the micro-batches of the updates, and put the outputs together again."""
        bar = tqdm(
            torch.arange(len(sequences)).split(self.args.per_device_train_batch_size),
            desc=name,
            leave=False,
            delay=3,  # only where it takes more than a few seconds
            disable=self.args.disable_tqdm or not self.accelerator.is_main_process,
        )
        width = sequences.completion_ids.shape[1]
        outputs = [run(sequences.rows(index)) for index in bar]
        padded = [[torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in output] for output in outputs]
        return [torch.cat(parts) for parts in zip(*padded)]

    @torch.no_grad()
    def score_tokens(self, sequences: Sequences) -> TokenScores:
        """Log-probabilities, values and entropies, from the very forward that is trained.

        The same code, micro-batches and dtype as in the updates: the ratio of the first update is exactly 1, and
        with a fresh adapter the KL is exactly 0.

        Args:
            sequences ([`Sequences`]): Sampled sequences.

        Returns:
            [`TokenScores`]: One number for each response token.
        """
        temperature = self.args.temperature

        def policy(part: Sequences) -> tuple[Tensor, ...]:
            return tuple(self.actor_critic(part, temperature, with_entropy=True))

        def reference(part: Sequences) -> tuple[Tensor, ...]:
            return (self.actor_critic(part, temperature).logprobs,)

        logprobs, values, entropies = self._forward(policy, sequences, "Log-probabilities")
        with self.actor_critic.reference():
            (ref_logprobs,) = self._forward(reference, sequences, "Reference")
        return TokenScores(logprobs, ref_logprobs, values, entropies)

    def _log_samples(
        self, samples: Samples, tokens: TokenScores, metrics: Metrics, counted: Tensor | None = None
    ) -> None:
        """Add the metrics of a batch; `counted`, `[batch]`, leaves out rows that only fill a batch up."""
        scored = samples.scored
        if counted is None:
            counted = torch.ones_like(samples.stopped)
        for reward, scores, failed in zip(self.rewards, scored.rewards.unbind(1), scored.failed.unbind(1)):
            applies = counted & ~scores.isnan() & ~failed
            metrics.mean(f"rewards/{reward.name}/mean", scores, applies)
            metrics.mean(f"rewards/{reward.name}/std", self._deviation(scores.nan_to_num(), applies))
            metrics.total(f"rewards/{reward.name}/failed", failed & counted)
        counted = counted & scored.usable
        mask = samples.sequences.completion_mask & counted[:, None]
        lengths = samples.sequences.completion_mask.sum(1)
        metrics.mean("reward", scored.totals, counted)
        metrics.mean("reward_std", self._deviation(scored.totals, counted))
        kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, "k1")
        metrics.mean("kl", kl, mask)
        metrics.mean("kl_per_completion", (kl * mask).sum(1), counted)
        metrics.mean("entropy", tokens.entropies, mask)
        metrics.mean("completions/mean_length", lengths, counted)
        metrics.maximum("completions/max_length", lengths, counted)
        metrics.minimum("completions/min_length", lengths, counted)
        metrics.mean("completions/clipped_ratio", ~samples.stopped, counted)
        metrics.mean("completions/mean_terminated_length", lengths, samples.stopped & counted)
        self._log_hacking(samples, lengths.float(), counted, metrics)

    def _log_hacking(self, samples: Samples, lengths: Tensor, counted: Tensor, metrics: Metrics) -> None:
        """What shows that a reward is climbed and its purpose is not."""
        scored = samples.scored
        correlation = ppo_math.masked_correlation(scored.totals, lengths, counted, self.all_sum)
        metrics.mean("reward/length_correlation", correlation)
        metrics.mean("completions/repeated_ratio", self._repeated(samples.batch.completions, counted))
        applies = ~scored.rewards.isnan()
        if len(self.rewards) > 1:
            mean = scored.rewards.nanmean(1, keepdim=True)
            squares = ((scored.rewards - mean) ** 2).nansum(1) / (applies.sum(1) - 1).clamp(min=1)
            metrics.mean("rewards/disagreement", squares.sqrt(), counted & (applies.sum(1) > 1))
        for reward, scores in zip(self.monitors, samples.monitored.unbind(1)):
            applies = counted & ~scores.isnan()
            metrics.mean(f"monitor/{reward.name}/mean", scores, applies)
            metrics.mean(f"monitor/{reward.name}/gap", scored.totals - scores, applies)

    def _repeated(self, completions: list, counted: Tensor) -> Tensor:
        """Share of completions, over all processes, that occurred before; digests travel, not texts."""
        digests = [hashlib.sha256(str(text).encode()).digest()[:8] for text in completions]
        numbers = [int.from_bytes(digest, "big", signed=True) for digest in digests]
        everyone = self.accelerator.gather(torch.tensor(numbers, device=counted.device))
        kept = everyone[self.accelerator.gather(counted)]
        return 1 - torch.tensor(len(kept.unique()) / max(len(kept), 1), device=counted.device)

    def _deviation(self, x: Tensor, mask: Tensor) -> Tensor:
        return ppo_math.masked_var(x, mask, self.all_sum).sqrt()

    def collect(self, rows: Sequence[dict], metrics: Metrics, state: TrainerState) -> tuple[Rollout, Samples]:
        """Collect one rollout.

        Args:
            rows (`Sequence[dict]`): Rows of the dataset, with `"prompt_ids"`.
            metrics ([`Metrics`]): Where metrics are added.
            state ([`~transformers.TrainerState`]): State of the run, for reward functions.

        Returns:
            `tuple(Rollout, Samples)`: What is learned from, and what was sampled.
        """
        args = self.args
        samples = self.sample(rows, metrics, state)
        with self._timed("forward", metrics):
            tokens = self.score_tokens(samples.sequences)
        self._log_samples(samples, tokens, metrics)

        completion_mask = samples.sequences.completion_mask
        response_mask = completion_mask & samples.scored.usable[:, None]
        if args.mask_truncated_completions:
            response_mask = response_mask & samples.stopped[:, None]
        kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, args.kl_estimator)
        scored = samples.scored
        shaped = self.shaping(scored.totals, samples.stopped, scored.usable, self.all_sum)
        rewards = token_rewards(scored.tokens, shaped, kl, completion_mask, args.kl_coef)
        metrics.mean("objective", rewards.sum(1), scored.usable)
        if args.whiten_rewards:
            rewards = ppo_math.scale_to_unit_variance(rewards, response_mask, self.all_sum)
        advantages, returns = ppo_math.gae(rewards, tokens.values, response_mask, args.gamma, args.lam)
        unexplained = ppo_math.masked_var(returns - tokens.values, response_mask, self.all_sum)
        variance = ppo_math.masked_var(returns, response_mask, self.all_sum)
        metrics.mean("value/explained_variance", 1 - unexplained / variance.clamp(min=1e-8))
        if args.whiten_advantages:
            advantages = ppo_math.whiten(advantages, response_mask, self.all_sum)
        rollout = Rollout(samples.sequences, response_mask, tokens.logprobs, tokens.values, advantages, returns)
        return rollout, samples

    def evaluate(self, rows: Sequence[dict], metrics: Metrics, state: TrainerState, counted: int) -> Samples:
        """Sample and score without learning.

        Args:
            rows (`Sequence[dict]`): Rows of the dataset, with `"prompt_ids"`.
            metrics ([`Metrics`]): Where metrics are added.
            state ([`~transformers.TrainerState`]): State of the run, for reward functions.
            counted (`int`): Rows that count; those after them only fill the batch up.

        Returns:
            [`Samples`]: What was sampled.
        """
        samples = self.sample(rows, metrics, state)
        with self._timed("forward", metrics):
            tokens = self.score_tokens(samples.sequences)
        rows_counted = torch.arange(len(rows), device=samples.stopped.device) < counted
        self._log_samples(samples, tokens, metrics, rows_counted)
        return samples
