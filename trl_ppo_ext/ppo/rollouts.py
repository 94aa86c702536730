"""From prompts to a rollout: generate, score, log-probabilities and values, rewards, advantages."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.utils import logging
from trl import is_conversational

from ..data.prompts import PROMPT_IDS
from ..generation import Generator
from ..modeling import ActorCritic, TokenOutputs
from ..rewards import Reward, RewardShaping, ScoringBatch, monitor, score_all
from ..sequences import Rollout, Sequences, longest_first
from . import math as ppo_math
from .advantages import critic_advantages, group_advantages, token_rewards, warning_of_far_scores
from .coefficients import entropy_coefficient, kl_coefficient
from .metrics import Metrics
from .nonfinite import Inspection, RolloutGuard
from .sample_metrics import SampleMetrics
from .samples import Coefficients, Collected, Samples, TokenScores

logger = logging.get_logger(__name__)

Outputs: TypeAlias = dict[str, Tensor]


def _given(outputs: TokenOutputs) -> Outputs:
    return {name: x for name, x in outputs._asdict().items() if x is not None}


class Experience:
    """Collects rollouts."""

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
        self.shaping = RewardShaping(
            baseline=args.reward_baseline,
            normalize=args.normalize_rewards,
            clip_range=args.reward_clip_range,
            missing_eos_penalty=args.missing_eos_penalty,
        )
        self.kl_coef = kl_coefficient(args)
        self.entropy_coef = entropy_coefficient(args)
        self.sample_metrics = SampleMetrics(rewards, monitors, self.all_sum, accelerator.gather)
        inspection = Inspection(args.output_dir, accelerator.process_index, tokenizer)
        self.guard = RolloutGuard(inspection, self.all_sum, accelerator.gather)
        self.exact_kl = args.kl_estimator == "exact" and args.kl_placement != "loss"

    def all_sum(self, total: Tensor) -> Tensor:
        """Sum over all processes."""
        return self.accelerator.reduce(total, reduction="sum")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: running statistics of the rewards, coefficients."""
        return {
            "rewards": self.shaping.state_dict(),
            "kl_coef": self.kl_coef.state_dict(),
            "entropy_coef": self.entropy_coef.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what [`Experience.state_dict`] gave."""
        self.shaping.load_state_dict(state["rewards"])
        for name, coefficient in (("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            if self.args.resume_with_changed_settings and state[name].keys() != coefficient.state_dict().keys():
                logger.warning("`%s` is steered otherwise than in the checkpoint: it starts from the config.", name)
            else:
                coefficient.load_state_dict(state[name])

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
        """Generate a completion for each row, and score it and its tokens."""
        device = self.accelerator.device
        prompt_ids = [row[PROMPT_IDS] for row in rows]
        with self._timed("generate", metrics):
            completion_ids = self.generator.generate(prompt_ids)
        stopped = torch.tensor([ids[-1] in self.generator.stop_token_ids for ids in completion_ids], device=device)
        sequences = Sequences.from_token_ids(prompt_ids, completion_ids, self.tokenizer.pad_token_id, device)
        extra: dict[str, list] = {}
        batch = self._scoring_batch(rows, completion_ids, state, metrics, extra)
        args = self.args
        with self._timed("forward", metrics):
            tokens = self.score_tokens(sequences)
        with self._timed("score", metrics):
            on_failure = (args.reward_on_error, args.max_reward_failures)
            scored = score_all(self.rewards, batch, args.reward_weights, *on_failure, self.all_sum, device)
            monitored = monitor(self.monitors, batch, device) if self.monitors else scored.rewards[:, :0]
        return Samples(sequences, stopped, batch, scored, monitored, extra, tokens)

    def _forward(self, run: Callable[[Tensor], Outputs], sequences: Sequences, name: str) -> Outputs:
        """Run a forward on the rows of each micro-batch of the first epoch, and put the outputs in their places."""
        args, whole = self.args, cast(Outputs, {})
        no_bar = args.disable_tqdm or not self.accelerator.is_main_process
        batches = self._micro_batches(sequences.lengths)
        bar = tqdm(batches, desc=name, leave=False, delay=3, disable=no_bar)  # where it takes more than a few seconds
        with self.accelerator.autocast():  # as around the forward that is trained
            for index in bar:
                for key, x in run(index).items():
                    place = whole.setdefault(key, x.new_zeros(sequences.completion_ids.shape))
                    place[index.to(x.device), : x.shape[1]] = x
        return whole

    def _micro_batches(self, lengths: Tensor) -> list[Tensor]:
        """Rows of each micro-batch, as [`schedule`] makes them for the first epoch."""
        size = self.args.per_device_train_batch_size
        minibatches = torch.arange(len(lengths)).split(size * self.args.gradient_accumulation_steps)
        return [part for rows in minibatches for part in longest_first(rows[None], lengths)[0].split(size)]

    @torch.no_grad()
    def score_tokens(self, sequences: Sequences) -> TokenScores:
        """Log-probabilities, values and entropies, from the very forward that is trained.

        The same code, micro-batches and dtype as in the updates: the ratio of the first update is exactly 1, and
        with a fresh adapter the KL is exactly 0.
        """
        temperature, exact_kl = self.args.temperature, self.exact_kl

        def policy(index: Tensor) -> Outputs:
            return _given(self.actor_critic(sequences.rows(index), temperature, with_entropy=True, with_kl=exact_kl))

        def reference(index: Tensor) -> Outputs:
            return {"ref_logprobs": self.actor_critic.reference_logprobs(sequences.rows(index), temperature)}

        scores = self._forward(policy, sequences, "Log-probabilities")
        scores |= self._forward(reference, sequences, "Reference")
        return TokenScores(**scores)

    def _log(self, samples: Samples, metrics: Metrics, counted: Tensor) -> None:
        """Add the metrics of a batch; `counted`, `[batch]`, leaves out rows that only fill a batch up."""
        scored, tokens, completion_mask = samples.scored, samples.tokens, samples.sequences.completion_mask
        self.sample_metrics.log_rewards(scored, counted, metrics)
        counted = counted & scored.usable
        lengths = completion_mask.sum(1)
        kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, "k1")
        self.sample_metrics.log_tokens(kl, tokens.entropies, completion_mask & counted[:, None], counted, metrics)
        self.sample_metrics.log_completions(lengths, samples.stopped, counted, metrics)
        completions = samples.batch.completions
        self.sample_metrics.log_hacking(completions, scored, samples.monitored, lengths.float(), counted, metrics)

    def collect(self, rows: Sequence[dict], metrics: Metrics, state: TrainerState) -> Collected:
        """Collect one rollout."""
        args = self.args
        samples = self.sample(rows, metrics, state)
        everyone = torch.ones_like(samples.scored.usable)
        samples = self.guard.leave_out(samples, everyone, metrics, state.global_step + 1)
        tokens, usable = samples.tokens, samples.scored.usable
        self._log(samples, metrics, everyone)
        if state.global_step == 0:
            self._see_first_scores(samples)

        completion_mask = samples.sequences.completion_mask
        response_mask = completion_mask & usable[:, None]
        if args.mask_truncated_completions:
            response_mask = response_mask & samples.stopped[:, None]
        kl_coef = self.kl_coef.value  # steered by the rollouts before; the entropy's by this one too
        if state.global_step >= args.value_warmup_steps:  # before, the policy stands still whatever they are
            self._steer(tokens, response_mask, usable)
        coefficients = Coefficients(kl_coef, self.entropy_coef.value)
        rewards = self._rewards(samples, tokens, coefficients.kl)
        metrics.mean("objective", rewards.sum(1), usable)
        if args.whiten_rewards:
            rewards = ppo_math.scale_to_unit_variance(rewards, response_mask, self.all_sum)
        advantages, returns = self._advantages(rewards, tokens.values, response_mask, usable)
        if returns is not None and tokens.values is not None:
            explained = ppo_math.explained_variance(tokens.values, returns, response_mask, self.all_sum)
            metrics.mean("value/explained_variance", explained)
        if args.whiten_advantages:
            advantages = ppo_math.whiten(advantages, response_mask, self.all_sum)
        sequences = self.guard.stand_ins(samples)
        rollout = Rollout(
            sequences, response_mask, tokens.logprobs, tokens.ref_logprobs, advantages, tokens.values, returns
        )
        return Collected(rollout, samples, coefficients)

    def _see_first_scores(self, samples: Samples) -> None:
        """Warn where the first updates would teach the policy something else than the reward."""
        scored = samples.scored
        said = warning_of_far_scores(scored.totals, scored.usable, self.args, self.all_sum)
        if said is None or not self.accelerator.is_main_process:
            return
        if any(x.requires_grad for x in self.actor_critic.policy_parameters().values()):  # else a critic is pretrained
            logger.warning(said)

    def _steer(self, tokens: TokenScores, response_mask: Tensor, usable: Tensor) -> None:
        """Let the controllers see a rollout."""
        completions = int(self.all_sum(usable.sum()))
        kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, "k1")  # 0 at padding
        if completions:
            self.kl_coef.update(float(ppo_math.masked_mean(kl.sum(1), usable, self.all_sum)), completions)
        if self.all_sum(response_mask.sum()):
            self.entropy_coef.update(
                float(ppo_math.masked_mean(tokens.entropies, response_mask, self.all_sum)), completions
            )

    def _rewards(self, samples: Samples, tokens: TokenScores, kl_coef: float) -> Tensor:
        """Rewards of the tokens, the KL penalty among them if that is its place."""
        args, scored = self.args, samples.scored
        shaped = self.shaping(scored.totals, samples.stopped, scored.usable, self.all_sum)
        if args.kl_placement == "loss":
            kl, kl_coef = torch.zeros_like(tokens.logprobs), 0.0
        elif tokens.kls is not None:
            kl = tokens.kls
        else:
            kl = ppo_math.kl_estimate(tokens.logprobs, tokens.ref_logprobs, args.kl_estimator)
        return token_rewards(scored.tokens, shaped, kl, samples.sequences.completion_mask, kl_coef)

    def _advantages(
        self, rewards: Tensor, values: Tensor | None, response_mask: Tensor, usable: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages and, where there is a critic, its targets."""
        if values is not None:
            return critic_advantages(rewards, values, response_mask, self.args)
        # a group may lie across processes
        everyone, counted = self.accelerator.gather(rewards.sum(1)), self.accelerator.gather(usable)
        advantages = group_advantages(everyone, counted, self.args)
        first = self.accelerator.process_index * len(rewards)
        return advantages[first : first + len(rewards), None] * response_mask, None

    def evaluate(self, rows: Sequence[dict], metrics: Metrics, state: TrainerState, counted: int) -> Samples:
        """Sample and score without learning."""
        samples = self.sample(rows, metrics, state)
        rows_that_count = torch.arange(len(rows), device=samples.stopped.device) < counted
        samples = self.guard.leave_out(samples, rows_that_count, metrics, step=None)
        self._log(samples, metrics, rows_that_count)
        return samples
