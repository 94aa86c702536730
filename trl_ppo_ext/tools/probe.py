"""Which advantages agree best with the exact gradient on a task. Nothing is trained."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from datasets import IterableDataset
from torch import Tensor, nn

from .. import ppo_math
from ..batch_plan import BatchPlan
from ..data import RolloutSampler, spread_rows
from ..episodes import Episode
from ..modeling.critics import COSINES, Reads, side_layers, turn_layer
from ..ppo.credit import build_credit
from ..ppo.metrics import Metrics
from ..ppo.rollouts import Rollout, Samples, collect
from ..rewards import no_reward
from ..rewards.prefixes import Foresight
from ..trainer import PPOTrainer

COMPLETIONS = 256
GENERATIONS = 8  # per prompt, for a run with one
FOLDS = 4
RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)  # relative to the mean square of the states
LAMBDAS = (0.0, 0.5, 0.8, 0.95, 1.0)
IN_GROUPS = ("rloo", "grpo")
WITHOUT_CRITIC = ("rebn", *IN_GROUPS)
SKETCH = 64  # random directions on each side of a gradient
ROUNDING = 1e-6  # relative to the largest return
# of the intervals; share of resamples with a signal, at least
RESAMPLES = 400
QUANTILES = (0.05, 0.95)
TOLD = 0.95


def probe(trainer: PPOTrainer, completions: int = COMPLETIONS) -> dict[str, Any]:
    """Measure how well a rollout's gradient agrees with the exact one, for several advantages.

    The agreement is the cosine of the two in expectation, from pairs of different completions:
    completions needed for the same progress go with 1 / cosine². Gradients are those of a linear
    layer on the policy's last states, and the critic is a regression on these states, fitted to the
    returns of other prompts. The result is also written to `probe.json` in the run's `output_dir`.

    Args:
        trainer ([`PPOTrainer`]): Trainer of the run, on one process. The run is not changed.
        completions (`int`, *optional*, defaults to 256):
            Completions to sample at least, in whole rollouts: `num_generations` per prompt, or 8 if
            that is 1.

    Returns:
        `dict[str, Any]`: `"explained_variance"` of the returns by the policy's states,
        `"agreement"` of each estimator with its 90 % interval (`None` if the completions do not
        agree on a gradient), `"groups_without_signal"`, `"foreseen"` by scores of prefixes for each
        reward model that is paid by token, and `"verdict"`.

    Raises:
        `ValueError`: If there are several processes, or too few scores.
    """
    if (
        trainer.accelerator.num_processes > 1
        or trainer.is_deepspeed_enabled
        or trainer.is_fsdp_enabled
    ):
        raise ValueError(
            "`trl-ppo probe` needs one process without DeepSpeed and FSDP; start it without a "
            "launcher."
        )
    if trainer.reward_func_names == [no_reward.__name__]:
        raise ValueError(
            "`trl-ppo probe` needs a reward; a run without one learns from its KL, for which a "
            "critic has nothing to predict."
        )
    task = _sampled_task(trainer, completions)
    values = task.predicted(trainer)
    tables = task.advantages(values)
    gradients = gradient_sketches(trainer, task.rollouts, tables)[task.counts]
    # a run without groups compares estimators that need them with those that do not
    in_groups = [x in IN_GROUPS or trainer.plan.num_generations > 1 for x in tables]
    cosines = agreements(
        gradients,
        task.blocks[task.counts],
        task.groups[task.counts],
        exact=list(tables).index("lam=1"),
        rollout=trainer.plan.completions * float(task.counts.double().mean()),
        in_groups=in_groups,
    )
    found = dict(zip(tables, cosines))
    without_signal = task.groups_without_signal()
    flat = task.returns[task.tokens]
    result = {
        "completions": int(task.counts.sum()),
        "prompts": task.prompts,
        "num_generations": task.size,
        "rollout": trainer.plan.completions,
        "explained_variance": float(
            ppo_math.explained_variance(values, flat, torch.ones_like(flat))
        ),
        "agreement": {name: interval(x) for name, x in found.items()},
        "groups_without_signal": without_signal,
        "foreseen": foreseen_by_prefixes(task.samples),
        "verdict": verdict(found, without_signal),
    }
    path = Path(str(trainer.args.output_dir), "probe.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return result


@dataclass(frozen=True)
class Task:
    """Completions of a task that nothing learns from, in whole groups of `size` per prompt."""

    rollouts: tuple[Rollout, ...]
    samples: tuple[Samples, ...]
    size: int
    tokens: Tensor  # 1 at those that are scored, [completions, tokens]
    mask: Tensor  # 1 at those of them that the policy learns from
    turns: Tensor  # of the tokens
    rewards: Tensor
    returns: Tensor  # Monte Carlo
    gamma: float | Tensor
    level: str  # of advantages

    @property
    def usable(self) -> Tensor:
        """Whether a completion is scored, and so compared with others of its prompt."""
        return self.tokens.any(1)

    @property
    def counts(self) -> Tensor:
        """Whether the policy learns from a completion."""
        return self.mask.any(1)

    @property
    def groups(self) -> Tensor:
        """Number of the group of each completion."""
        return torch.arange(len(self.mask)) // self.size

    @cached_property
    def _numbers(self) -> dict[tuple[int, ...], int]:
        """Prompts with completions that are scored."""
        scored = dict.fromkeys(self._prompts[row] for row in self.usable.nonzero()[:, 0])
        return {prompt: number for number, prompt in enumerate(scored)}

    @cached_property
    def _prompts(self) -> list[tuple[int, ...]]:
        every = [tuple(x.prompt_ids) for part in self.samples for x in part.batch.episodes]
        return every[: len(self.mask)]

    @property
    def prompts(self) -> int:
        """Different prompts."""
        return len(self._numbers)

    @property
    def blocks(self) -> Tensor:
        """Number of the block of each completion: those of a prompt share one, unless prompts are
        so few that training would see every one of them, too."""
        if self.prompts < FOLDS:
            return self.usable.cumsum(0)
        return torch.tensor([self._numbers.get(prompt, 0) for prompt in self._prompts])

    def predicted(self, trainer: PPOTrainer) -> Tensor:
        """Predict each return by a regression on the policy's states, fitted to other prompts."""
        row = self.tokens.nonzero()[:, 0]
        states = torch.cat([read_states(trainer, rollout) for rollout in self.rollouts])
        return ridge_values(states[: len(row)], self.returns[self.tokens], self.blocks[row] % FOLDS)

    def advantages(self, values: Tensor) -> dict[str, Tensor]:
        """Advantages to compare: by GAE of these values, and without a critic."""
        mask = self.mask
        table = torch.zeros_like(self.rewards).masked_scatter(self.tokens, values)
        with_critic = {}
        for lam in LAMBDAS:
            decay = per_step(lam, self.level, self.turns)
            of_tokens, _ = ppo_math.gae(self.rewards, table, self.tokens, self.gamma, decay)
            with_critic[f"lam={lam:g}"] = self._spread(of_tokens)
        sums = (self.returns.double() * mask).sum(1)
        tokens = mask.sum(1)
        mean_of_others = (sums.sum() - sums) / (tokens.sum() - tokens)
        totals = self.rewards.sum(1)
        rloo = ppo_math.rloo_advantages(totals, self.usable, self.size, self._sizes)
        grpo = ppo_math.grpo_advantages(totals, self.usable, self.size, self._sizes)
        return with_critic | {
            "rebn": self._spread((self.returns - mean_of_others[:, None]).float()),
            "rloo": rloo[:, None] * mask,
            "grpo": grpo[:, None] * mask,
        }

    @property
    def _sizes(self) -> Tensor:
        """Of what the totals are sums of."""
        return self.rewards.abs().sum(1)

    def _spread(self, advantages: Tensor) -> Tensor:
        """Advantages of tokens as the run has them: of a turn, that of its first one."""
        if self.level == "turn":
            advantages = advantages.gather(1, ppo_math.turn_starts(self.turns)[1])
        return advantages * self.mask

    def groups_without_signal(self) -> float:
        """Share of the prompts whose completions all earn the same, with every penalty."""
        first = self.tokens.int().argmax(1, keepdim=True)
        earned = self.returns.double().gather(1, first)[:, 0]
        distances = ppo_math.dr_grpo_advantages(earned, self.usable, self.size)
        # sums of the same rewards at other tokens are rounded otherwise
        sizes = self._sizes.view(-1, self.size)
        is_equal = distances.abs().view(-1, self.size) <= ROUNDING * sizes.amax(1, keepdim=True)
        teaches = self.counts.view(-1, self.size).any(1)
        return float(is_equal.all(1)[teaches].double().mean())


def _sampled_task(trainer: PPOTrainer, completions: int) -> Task:
    """Sample completions; without discount, their Monte Carlo returns are the rewards of the
    tokens."""
    size = trainer.plan.num_generations
    if size == 1:
        size = GENERATIONS
    changes = {
        "gamma": 0.0,
        "advantage_estimator": "rebn",
        "whiten_advantages": False,
        "advantage_level": "token",
        "top_entropy_quantile": 1.0,
        "drop_equal_groups": False,
        "mask_truncated_completions": False,  # they are compared with the others
    }
    # whole groups, if a rollout is smaller than one
    completions = -(-completions // size) * size
    rollouts, samples = zip(*held_out_rollouts(trainer, completions, size, **changes))
    rows = sum(map(len, rollouts)) // size * size  # of complete groups
    tokens = _stack([x.policy_tokens for x in rollouts])[:rows]
    mask = tokens
    if trainer.args.mask_truncated_completions:
        mask = tokens & torch.cat([x.stopped for x in samples])[:rows, None].cpu()
    counted = int(mask.any(1).sum())
    if counted < FOLDS:
        raise ValueError(
            f"Only {counted} of {rows} completions have a score and tokens to learn from; check "
            "the rewards and `mask_truncated_completions`."
        )
    rewards = _stack(
        [cast(Tensor, x.advantages if x.returns is None else x.returns) for x in samples]
    )[:rows]
    turns = _stack([x.sequences.turns for x in rollouts])[:rows]
    level = trainer.args.advantage_level
    gamma = per_step(trainer.args.gamma, level, turns)
    _, returns = ppo_math.gae(rewards, torch.zeros_like(rewards), tokens, gamma, 1.0)
    return Task(rollouts, samples, size, tokens, mask, turns, rewards, returns, gamma, level)


def per_step(x: float, level: str, turns: Tensor) -> float | Tensor:
    """γ or λ as a run has it: of tokens, or of turns, which is at their last tokens."""
    return x if level == "token" else ppo_math.at_turn_ends(x, turns)


def foreseen_by_prefixes(sampled: Sequence[Samples]) -> dict[str, float]:
    """Share of the variance of each reward model's scores that its scores of prefixes foresee."""
    shares = {}
    for name in sampled[0].scored.foresight:
        sums = zip(*(samples.scored.foresight[name] for samples in sampled))
        shares[name] = float(Foresight(*map(sum, sums)).share)
    return shares


def held_out_rollouts(
    trainer: PPOTrainer, completions: int, num_generations: int = 1, **changes: Any
) -> list[tuple[Rollout, Samples]]:
    """Collect rollouts that are not trained on; the state that each leaves is dropped, and the
    run's noise restored.

    A prompt has `num_generations` completions in consecutive rows, and `changes` replaces fields of
    the config.
    """
    args = copy(trainer.args)
    plan = trainer.plan
    accelerator = trainer.accelerator
    # Monte Carlo returns: with another λ they would depend on the critic
    vars(args).update({"critic_options": replace(args.critic_options, lam=1.0)} | changes)
    start = 0

    def play(rows: list[dict], *_: Any) -> list[Episode]:
        """Play without the record of answers, which is the run's; environments of a prompt have
        one seed."""
        seeds = [
            hash((args.seed, (start + row) // num_generations)) % 2**31 for row in range(len(rows))
        ]
        return trainer.components.player.play(rows, seeds)

    # monitored rewards and the comparison with a sampler are for the log of a run
    player: Any = copy(trainer.components.player)
    player.play = play
    components = replace(trainer.components, args=args, monitors=[], sampler=None, player=player)
    device = accelerator.device
    process = accelerator.process_index
    size = plan.completions_per_process
    rounds = -(-completions // plan.completions)
    prompts = _held_out_rows(trainer, -(-rounds * plan.completions // num_generations))
    rows = [row for row in prompts for _ in range(num_generations)]
    trainer.actor_critic.eval()
    rollouts = []
    credit = build_credit(components, Metrics(device))
    run = trainer.run_state
    critic = trainer.actor_critic.value_head
    if critic is not None:  # a new one is not fitted to what nobody learns from
        run = run._replace(critic=critic.settled(run.critic))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(2**32 + args.seed + process)  # the run's own noise begins at its seed
        for number in range(rounds):
            start = (process * rounds + number) * size
            # rewards draw their noise by the step
            state = replace(trainer.state, global_step=trainer.state.global_step + number + 1)
            part = rows[start : start + size]
            rollout, _, samples = collect(components, credit, part, run, Metrics(device), state)
            rollouts.append((rollout, samples))
    return rollouts


def _held_out_rows(trainer: PPOTrainer, count: int) -> list[dict[str, Any]]:
    """Rows of the evaluation sets, or else those that training reaches last."""
    args = trainer.args
    sets = trainer.eval_dataset
    train = trainer.train_dataset
    if sets is None and not isinstance(train, IterableDataset):
        order = RolloutSampler(
            len(train), BatchPlan(1), args.shuffle_dataset, args.prompt_seed
        ).order(epoch=0)
        train = train.select(order[::-1][:count])
    if isinstance(sets, dict):
        sets = list(sets.values())
    else:
        sets = [train if sets is None else sets]
    rows = [row for dataset in sets for row in spread_rows(dataset, -(-count // len(sets)))]
    return [rows[index % len(rows)] for index in range(count)]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of rollouts as one tensor on the CPU."""
    return nn.utils.rnn.pad_sequence([row for x in tensors for row in x], batch_first=True).cpu()


@torch.no_grad()
def read_states(trainer: PPOTrainer, rollout: Rollout) -> Tensor:
    """Position as cosines, last states of the policy, and its state where the turn begins, at the
    tokens that it learns from, `[tokens, features]`."""
    features = []
    length = trainer.args.max_completion_length
    layers = side_layers(trainer.actor_critic.config.get_text_config().num_hidden_layers)
    reads = Reads(turn_layers=[turn_layer(layers)])
    for index in torch.arange(len(rollout)).split(trainer.plan.micro_batch_size):
        part = rollout.rows(index)
        sequences = part.sequences
        with trainer.accelerator.autocast():
            _, states = trainer.actor_critic.read_layers(sequences, reads)
        hidden = [nn.functional.rms_norm(x.float(), x.shape[-1:]) for x in states]
        waves = torch.arange(COSINES, device=states[0].device) * torch.pi / length
        position = (sequences.positions[:, None] * waves).cos()  # the first one is constant
        read = torch.cat([position, *hidden], 1)
        features.append(read[sequences.pick(part.policy_tokens)].cpu())
    return torch.cat(features)


def ridge_values(states: Tensor, returns: Tensor, folds: Tensor) -> Tensor:
    """Predict the returns of each fold, `[tokens]`, from the others by ridge regression, with the
    best ridge.

    The first column of the states is the bias.
    """
    x = states.double()
    y = returns.double()
    chosen = [folds == fold for fold in range(FOLDS)]
    squares = torch.stack([x[fold].T @ x[fold] for fold in chosen])
    products = torch.stack([x[fold].T @ y[fold] for fold in chosen])
    predictions = []
    for ridge in RIDGES:
        values = torch.zeros_like(y)
        for number, fold in enumerate(chosen):
            matrix = squares.sum(0) - squares[number]
            penalty = torch.full_like(matrix[0], ridge * float(matrix.diagonal().mean()))
            penalty[0] = 0
            values[fold] = x[fold] @ torch.linalg.solve(
                matrix + penalty.diag(), products.sum(0) - products[number]
            )
        predictions.append(values)
    return min(predictions, key=lambda values: float((y - values).square().sum())).to(returns.dtype)


@torch.no_grad()
def gradient_sketches(
    trainer: PPOTrainer, rollouts: Sequence[Rollout], tables: Mapping[str, Tensor]
) -> Tensor:
    """Gradient of a linear layer on the last states, with each table of advantages, `[completions,
    tables, features]`.

    It is the sum of Âₜ·δₜ·hₜᵀ, where δₜ is the gradient of the token's log-prob by the state hₜ.
    Both are projected on random directions, which keeps products of two gradients in expectation.
    """
    actor_critic = trainer.actor_critic
    rows = len(next(iter(tables.values())))
    weight = actor_critic.policy.get_base_model().get_output_embeddings().weight
    shape = 2, weight.shape[1], SKETCH
    left, right = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) / SKETCH**0.5).to(
        weight.device
    )
    sketches: list[Tensor] = []
    for rollout in rollouts:
        for index in torch.arange(len(rollout)).split(trainer.plan.micro_batch_size):
            sequences = rollout.rows(index).sequences
            with trainer.accelerator.autocast():
                hidden = actor_critic._hidden_states(sequences).to(weight.dtype).requires_grad_()
            with torch.enable_grad():
                logprobs = actor_critic._project(
                    hidden, sequences, trainer.args.temperature
                ).logprobs
                (by_state,) = torch.autograd.grad(logprobs.sum(), hidden)
            products = torch.einsum(
                "ti,tj->tij", hidden.detach().float() @ left, by_state.float() @ right
            ).flatten(1)
            mask = sequences.completion_mask.cpu()
            start = len(sketches)
            for row, part in enumerate(products.split(mask.sum(1).tolist())):
                if start + row < rows:
                    places = mask[row].nonzero()[:, 0]
                    advantages = torch.stack(
                        [table[start + row, places] for table in tables.values()]
                    )
                    sketches.append((advantages.to(part) @ part).cpu())
    return torch.stack(sketches)


def interval(cosines: Tensor) -> list[float] | None:
    """Cosine with its 90 % interval; `None` if it cannot be told."""
    if cosines.isfinite().float().mean() < TOLD:
        return None
    quantiles = cosines[1:].nanquantile(torch.tensor(QUANTILES).double())
    return [float(x) for x in (cosines[0], *quantiles)]


def agreements(
    gradients: Tensor,
    blocks: Tensor,
    groups: Tensor,  # of completions of a prompt, in a block
    exact: int,
    rollout: float,  # completions that count
    in_groups: Sequence[bool],  # whether a rollout of a table has these groups, or single ones
) -> Tensor:
    """Cosine of a rollout's gradient with the exact one, `[tables, 1 + resamples]`; NaN where that
    cannot be told.

    Products of completions of different `blocks`, which share no prompt, estimate products of
    expected gradients; the table `exact` is of unbiased advantages. The first column is of all
    blocks, the others of resampled ones.
    """
    blocks = blocks.unique(return_inverse=True)[1]
    count = int(blocks.max()) + 1
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    times = torch.zeros(RESAMPLES, count).scatter_add(
        1, drawn, torch.ones_like(drawn, dtype=torch.float)
    )
    weights = torch.cat([torch.ones(1, len(blocks)), times[:, blocks]]).double()
    total = weights.sum(1)
    others = (blocks[:, None] != blocks).double()
    pairs = (weights @ others * weights).sum(1)
    siblings = (groups[:, None] == groups).double().fill_diagonal_(0)
    group_size = 1 + weights @ siblings.sum(1) / total

    def products(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Mean product of a gradient with itself, and with that of a completion of another
        block."""
        table = (first @ second.T).double()
        of_others = (weights @ (others * table) * weights).sum(1)
        return weights @ table.diagonal() / total, of_others / pairs

    def of_siblings(gradient: Tensor) -> Tensor:
        """Sum of the products with those of the other completions of a group, in the mean."""
        return weights @ (siblings * (gradient @ gradient.T)).sum(1) / total

    unbiased = gradients[:, exact]
    _, length = products(unbiased, unbiased)  # squared, of the exact gradient
    cosines = []
    for gradient, is_grouped in zip(gradients.unbind(1), in_groups):
        of_group, expected = products(gradient, gradient)
        size = torch.ones_like(total)
        if is_grouped:
            of_group = of_group + of_siblings(gradient)
            size = group_size
        in_others = (1 - size / rollout).clamp(min=0) * expected.clamp(min=0)
        square = of_group.clamp(min=0) / rollout + in_others
        cosines.append(products(gradient, unbiased)[1] / (square * length.clamp(min=0)).sqrt())
    return torch.stack(cosines)


def verdict(found: Mapping[str, Tensor], without_signal: float) -> str:
    """One sentence: whether a critic pays, and the setting to take."""
    means = {name: float(x[0]) for name, x in found.items()}
    if without_signal == 1:
        return (
            "There is nothing to learn, as all completions of a prompt earn the same: change the "
            "reward or the prompts."
        )
    if not all(map(interval, found.values())):
        return (
            "These completions are too few to tell a signal from noise: set a larger "
            "`--completions`."
        )
    critic = max(
        (name for name in means if name not in WITHOUT_CRITIC), key=lambda name: means[name]
    )
    rival = max(WITHOUT_CRITIC, key=lambda name: means[name])
    low, high = (
        (found[critic] - found[rival])[1:].nanquantile(torch.tensor(QUANTILES).double()).tolist()
    )
    share = (means[rival] / means[critic]) ** 2
    if low > 0:
        needs = f"it needs {share:.0%} of the completions of `advantage_estimator={rival!r}`"
        return f"A critic pays, with `lam` near {critic.removeprefix('lam=')}: {needs}."
    if high < 0:
        setting = f'`critic="none", advantage_estimator="{rival}"`'
        needs = f"it needs {1 / share:.0%} of the completions"
        return f"No critic on the policy's states pays, so take {setting}: {needs}."
    return (
        f"No difference between `lam` {critic.removeprefix('lam=')} and {rival!r} can be told: "
        "keep the default."
    )
