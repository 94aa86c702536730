"""Critics: the interface, a linear head on the last state, and a small network on several
states."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed import set_weights
from ..ppo_math import Moments, Reduction
from .adapters import KINDS, check_fit

SIDE_WIDTH = 256
SIDE_STATES = 4  # layers that the side network reads, at equal distances
COSINES = 16
# random directions of the state where a turn begins, and as many of all else, in which the first
# fit sees them
DIRECTIONS = 256
# in the first fit, of a weight of a direction and of a cosine, in completions
FIRST_COSTS = 128.0, 16.0
MOMENTS = ("returns", "rewards")  # in the file of a critic: count, mean and squares of each
EARNED_BOUND = 5.0  # of outliers among the rewards so far


class CriticState(NamedTuple):
    """What a critic has seen of a run; collecting a rollout returns a new one."""

    returns: Moments = Moments()  # Monte Carlo returns of recent rollouts
    rewards: Moments = Moments()  # rewards per token of recent rollouts
    # weights of its inputs; None before the fit, and for a critic without one
    first_fit: Tensor | None = None

    def to_json(self) -> dict[str, list[float]]:
        """Plain numbers of a checkpoint, which has tensors elsewhere."""
        return {name: list(getattr(self, name)) for name in MOMENTS}

    @classmethod
    def from_json(cls, saved: Any) -> "CriticState":
        """Restore the state that [`to_json`] returned."""
        moments = {name: Moments(*map(float, saved.get(name, Moments()))) for name in MOMENTS}
        return cls(moments["returns"], moments["rewards"])


class Units(NamedTuple):
    """Mean and deviation of the returns, in which a critic predicts; the critic itself does not
    know them.

    The moments of recent rollouts move them, and its outputs then mean other values: they follow
    the returns. So no weight is corrected when they move, as PopArt does, which needs whole weights
    on every rank.

    Source: https://huggingface.co/papers/1602.07714
    """

    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, moments: Moments) -> "Units":
        """Units of values with these moments."""
        return cls(moments.mean, moments.unit)

    def values(self, outputs: Tensor) -> Tensor:
        """Values in the unit of the rewards."""
        return self.mean + self.deviation * outputs

    def targets(self, returns: Tensor) -> Tensor:
        """What a critic must output to predict these returns."""
        return (returns - self.mean) / self.deviation


class FirstFit(NamedTuple):
    """A linear fit to the returns of a rollout."""

    weights: Tensor  # of a critic's inputs
    outputs: Tensor  # of the tokens that it was fitted to
    left_out: Tensor  # the same, each by a fit to other prompts only


class Reads(NamedTuple):
    """Layers of the trunk after which states are read: at each token, and where its turn
    begins."""

    layers: Sequence[int] = ()  # none: the last state
    turn_layers: Sequence[int] = ()


class Critic(nn.Module):
    """Predicts at each sampled token what the rest of the completion earns, from states that the
    policy's forward computes anyway.

    One of your own must define `inputs` and `forward`, and may define `observe`; a function that
    builds it is passed as `critic_factory`. Its parameters are float32 and have a dimension, and
    only `forward` may use them: sharding gathers them there.

    Args:
        is_normalized (`bool`, *optional*, defaults to `True`):
            Whether it predicts in units of the returns, instead of those of the rewards.
    """

    kind: str = "own"  # under which it is saved; a critic of another kind is not loaded
    layers: Sequence[int] = ()  # of the trunk, after which it reads states; none: the last state
    # after which it also reads, at all tokens of a turn, the state in which the turn begins
    turn_layers: Sequence[int] = ()
    learning_rate: float | None = None  # None: that of the policy

    def __init__(self, is_normalized: bool = True):
        super().__init__()
        self.is_normalized = is_normalized
        self.saved_state = CriticState()  # read from its file; a run begins with it

    # ---- what a critic must define ----

    def inputs(self, states: list[Tensor], positions: Tensor, observed: Tensor | None) -> Tensor:
        """`[tokens, features]` from states `[tokens, hidden]` after each of `layers`, and those in
        which the turn begins after each of `turn_layers`.

        Without an environment that is the state at the end of the prompt.
        `positions` in the completion and what it observed are `[tokens]`; values after a limit are
        read at positions beyond it. Gradients flow into the policy's adapter through states that are
        not detached.
        """
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs `[tokens]`, in units of the returns if it is normalized; without autocast."""
        raise NotImplementedError

    # ---- what it may define ----

    def observe(self, token_scores: Tensor, mask: Tensor, state: CriticState) -> Tensor | None:
        """What it reads at each token besides states, `[batch, response]`.

        `token_scores` are the rewards; at a token it may use only those of earlier tokens.
        """
        return None

    def check(
        self,
        token_scores: Tensor,
        totals: Tensor,
        usable: Tensor,
        mask: Tensor,
        all_sum: Reduction,
    ) -> None:
        """Raise a `ValueError` if it must not read the rewards of the first rollout.

        `token_scores` and `mask` are `[batch, response]`, `totals` and `usable` `[batch]`. All
        ranks call it.
        """

    def is_new(self, state: CriticState) -> bool:
        """Whether it is to be fitted to the rollout at hand, before its first update."""
        return False

    def settled(self, state: CriticState) -> CriticState:
        """The same state, marked as fitted: what is installed now stays, also if it is nothing."""
        return state

    def install(self, state: CriticState) -> None:
        """Use a state from now on: called between collecting a rollout and its updates."""

    # ---- what all have ----

    def units(self, returns: Moments) -> Units:
        """Units in which it predicts, after returns with these moments."""
        if self.is_normalized:
            return Units.of(returns)
        return Units()

    def load_saved(self, saved: dict[str, Tensor]) -> None:
        """Load a saved critic, and keep its moments aside.

        A file without moments of returns is of a critic in units of the rewards.
        """
        self.saved_state = CriticState.from_json(saved)
        self.is_normalized = "returns" in saved
        tensors = self.state_dict(keep_vars=True)
        weights = {name: x for name, x in saved.items() if name not in MOMENTS}
        check_fit(tensors, weights)
        set_weights(tensors, weights)


class ValueHead(nn.Linear, Critic):
    """Linear head in float32 that starts at zero, so that a new critic predicts the mean return."""

    kind = "head"

    def __init__(self, hidden_size: int, is_normalized: bool, device: torch.device):
        super().__init__(hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.is_normalized = is_normalized

    def inputs(self, states: list[Tensor], positions: Tensor, observed: Tensor | None) -> Tensor:
        """The last state."""
        return states[-1]

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs `[tokens]` of states `[tokens, hidden]`."""
        # DeepSpeed casts the weights that it trains
        return super().forward(inputs.to(self.weight.dtype)).float()[:, 0]


def side_layers(num_layers: int) -> list[int]:
    """Layers after which the side network reads states."""
    return sorted({round(num_layers * (i + 1) / SIDE_STATES) for i in range(SIDE_STATES)})


def turn_layer(layers: Sequence[int]) -> int:
    """Of these layers the one whose state at the end of a prompt tells most of its worth, to a
    linear fit."""
    return layers[-2]


def rewards_so_far(rewards: Tensor, mask: Tensor, units: Units, is_known: bool) -> Tensor:
    """Mean reward per sampled token before each one, in units of *earlier* rollouts, `[batch,
    response]`.

    With the units of this rollout, later rewards of an episode would enter its values. Without any
    the result is 0.
    """
    standardized = (units.targets(rewards) * is_known).masked_fill(~mask, 0)
    total, tokens = (nn.functional.pad(x, (1, -1)).cumsum(1) for x in (standardized, mask.long()))
    earned = total / tokens.clamp(min=1)
    return earned.clamp(-EARNED_BOUND, EARNED_BOUND).masked_fill(~mask, 0)


def _slope(x: Tensor, y: Tensor, all_sum: Reduction) -> Tensor:
    """Slope of a line through 0 by least squares, from 0 to 1."""
    sums = all_sum(torch.stack([(x * y).sum(), (x * x).sum()]))
    return (sums[0] / sums[1].clamp(min=torch.finfo(x.dtype).tiny)).clamp(0, 1)


class SideCritic(ValueHead):
    """Gated MLP on states of several layers, the state in which the turn begins, the position in
    the completion, and the rewards before it.

    It reads the states that the policy's forward computes anyway, and nothing flows back into them:
    the value loss cannot pull at the policy. States within a turn tell the next token, and little of
    what is still to come; the state in which it begins, at the end of the prompt or of what an
    environment wrote, tells more. A return depends on how much of a completion is left, so the
    position is an input (https://huggingface.co/papers/1712.00378), and the rewards so far tell what
    no state of the policy holds.

    A step of Adam moves every weight by the learning rate, and so an output by that times the sum
    of its inputs. They are scaled to the same sum at any width of the policy
    (https://huggingface.co/papers/2203.03466).

    A new one begins with a linear fit to the returns of the first rollout in which they differ,
    which is not trained: training adds to it. With one value for what ends and what goes on, an
    answer that ends would seem to lose it, and a policy may unlearn EOS in one rollout.
    """

    kind = "side"
    learning_rate = 1e-3

    def __init__(
        self,
        last_size: int,
        hidden_size: int,
        num_layers: int,
        length: int,
        is_normalized: bool,
        device: torch.device,
    ):
        super().__init__(SIDE_WIDTH, is_normalized, device)
        self.layers = side_layers(num_layers)
        self.turn_layers = [turn_layer(self.layers)]
        self.turn_state_size = hidden_size
        of_layers = (len(self.layers) - 1) * hidden_size + last_size
        position_and_rewards = last_size + 1
        width = self.turn_state_size + of_layers + position_and_rewards
        self.scale = SIDE_WIDTH / width  # of the inputs
        self.first = nn.Linear(width, 2 * SIDE_WIDTH, dtype=torch.float32, device=device)
        self.first.weight.data /= self.scale
        self.length: Tensor
        self.register_buffer("length", torch.full((1,), float(length), device=device))
        self.first_fit: Tensor  # weights of the inputs
        self.register_buffer("first_fit", torch.zeros(width + COSINES, device=device))

    def cosines(self, positions: Tensor) -> Tensor:
        """Cosines of positions in a completion, `[..., COSINES]`."""
        frequencies = torch.arange(COSINES, device=positions.device) * torch.pi / self.length
        # a critic of shorter completions must not read those beyond as their mirror image
        return (torch.minimum(positions, self.length)[..., None] * frequencies).cos().float()

    def observe(self, token_scores: Tensor, mask: Tensor, state: CriticState) -> Tensor:
        """Rewards so far, in units of earlier rollouts, if any."""
        is_known = state.rewards.weight > 0
        return rewards_so_far(token_scores, mask, Units.of(state.rewards), is_known)

    def inputs(self, states: list[Tensor], positions: Tensor, observed: Tensor | None) -> Tensor:
        """State in which the turn begins, states, position and rewards so far, each as long as a
        state, and cosines of the position for the first fit."""
        *own, of_turn = states
        size = own[-1].shape[-1]
        normalized = [
            nn.functional.rms_norm(x.detach().float(), x.shape[-1:]) for x in (of_turn, *own)
        ]
        cosines = self.cosines(positions)
        position = nn.functional.pad(cosines, (0, size - COSINES))
        rewards = torch.zeros_like(cosines[:, :1]) if observed is None else observed[:, None]
        # as long as a state, or they would drown in large models
        norm = (size / COSINES) ** 0.5
        return torch.cat(
            [self.scale * torch.cat([*normalized, norm * position, norm * rewards], 1), cosines], 1
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs `[tokens]`: what was trained, and the first fit."""
        gate, up = self.first(inputs[:, :-COSINES].to(self.first.weight.dtype)).chunk(2, 1)
        trained = super().forward(nn.functional.silu(gate) * up)
        return trained + inputs @ self.first_fit.float()

    def install(self, state: CriticState) -> None:
        """Let the first fit of a state count in the outputs."""
        if state.first_fit is None:
            self.first_fit.zero_()
        else:
            self.first_fit.copy_(state.first_fit)

    def is_new(self, state: CriticState) -> bool:
        """Whether it has no first fit yet."""
        return state.first_fit is None

    def settled(self, state: CriticState) -> CriticState:
        """State with the fit that counts now, zeros if there is none."""
        return state._replace(first_fit=self.first_fit.clone())

    def load_saved(self, saved: dict[str, Tensor]) -> None:
        """Load a saved critic with its first fit, if it was ever fitted."""
        super().load_saved(saved)
        if self.first_fit.any():
            self.saved_state = self.settled(self.saved_state)

    # ---- the first fit ----

    def summary(self, inputs: Tensor) -> Tensor:
        """Inputs projected on [`directions`], from which the fit is computed."""
        return nn.functional.linear(inputs, self.directions())

    def directions(self) -> Tensor:
        """Random directions of the inputs, the same for all runs, and the cosines.

        Those of the state in which a turn begins are apart: among all others, it would drown.
        """
        generator = torch.Generator().manual_seed(0)
        of_turn = torch.randn(DIRECTIONS, self.turn_state_size, generator=generator)
        others = torch.randn(
            DIRECTIONS, self.first.in_features - self.turn_state_size, generator=generator
        )
        every = torch.block_diag(of_turn, others, torch.eye(COSINES))
        return every.to(self.first_fit.device)

    def fit(
        self,
        summaries: list[Tensor],
        targets: Tensor,
        steps: Tensor,
        parts: Tensor,
        completions: Tensor,
        all_sum: Reduction,
    ) -> FirstFit:
        """Fit the targets of tokens to the [`summary`] of their inputs, by micro-batch.

        By ridge regression over those that are `steps`, in which a weight costs as much as so many
        completions: it takes little of few. A completion of full length with targets of 0 is added
        for the cosines, so that positions that no completion reached have a value.

        A baseline of a completion must not hold its return. So there is also a fit without each
        part of the prompts; `parts` has the number of each token's part, and `completions` how many
        completions have steps in each one. What those fits read where turns begin may hold for no
        others, so it counts as far as it fits the prompts that were left out, and all else is
        fitted to what it leaves.
        """
        device = targets.device
        read = torch.cat(summaries)
        # float64 if the device has it (Apple's GPUs do not): the sums must not depend on the ranks
        if device.type == "mps":
            dtype = torch.float32
        else:
            dtype = torch.float64
        size = read.shape[1] + 1
        sums = torch.zeros(len(completions), size, size, dtype=dtype, device=device)
        # float64 is large
        for inputs, goals, of_part, counts in zip(
            *(x.split(4096) for x in (read, targets, parts, steps))
        ):
            rows = torch.cat([inputs, goals[:, None]], 1).to(dtype)
            for part, sums_of_part in enumerate(sums):
                own = rows[counts & (of_part == part)]
                sums_of_part += own.T @ own
        sums[:, -1, -1] = completions
        sums = all_sum(sums).cpu().double()
        whole = sums.sum(0)

        def of_left_out(x: Tensor, weights: list[Tensor]) -> Tensor:
            by_part = torch.stack(weights).to(device, dtype).T
            chunks = zip(x.split(4096), parts.split(4096))
            outputs = [(y.to(dtype) @ by_part).gather(1, of_part[:, None]) for y, of_part in chunks]
            return torch.cat(outputs)[:, 0]

        # 1. How far what is read where turns begin holds for prompts that were left out.
        without = [self._ridge(whole - of_part) for of_part in sums]
        from_turns = of_left_out(read[:, :DIRECTIONS], [x[:DIRECTIONS] for x in without])
        from_others = of_left_out(read[:, DIRECTIONS:], [x[DIRECTIONS:] for x in without])
        share = _slope(from_turns[steps], (targets - from_others)[steps], all_sum).cpu().double()

        # 2. The fits with that share of it.
        without = [
            self._ridge(whole - of_part, share * x[:DIRECTIONS])
            for of_part, x in zip(sums, without)
        ]
        weights = self._ridge(whole, share * self._ridge(whole)[:DIRECTIONS]).to(read)
        left_out = of_left_out(read, without).to(read)
        return FirstFit(weights @ self.directions(), read @ weights, left_out)

    def _ridge(self, sums: Tensor, from_turns: Tensor | None = None) -> Tensor:
        """Weights of a summary, of which those of the state in which a turn begins may be given.

        `sums` are those of products of its entries and the targets; the last one is the number of
        completions.
        """
        products = sums[:-1, :-1]
        totals = sums[:-1, -1]
        count = sums[-1, -1].clamp(min=1)
        sizes = torch.tensor([len(products) - COSINES, COSINES])
        costs = torch.tensor(FIRST_COSTS).repeat_interleave(sizes)
        # the smallest one is for a rollout without a token that counts
        ridge = torch.diag(costs / count * products.diagonal() + 1e-6)
        positions = torch.arange(int(self.length), device=self.length.device)
        everywhere = self.cosines(positions).cpu().double()
        ridge[-COSINES:, -COSINES:] += everywhere.T @ everywhere
        matrix = products + ridge
        if from_turns is None:
            return torch.linalg.solve(matrix, totals)
        left = (totals - matrix[:, :DIRECTIONS] @ from_turns)[DIRECTIONS:]
        others = torch.linalg.solve(matrix[DIRECTIONS:, DIRECTIONS:], left)
        return torch.cat([from_turns, others])

    def check(
        self,
        token_scores: Tensor,
        totals: Tensor,
        usable: Tensor,
        mask: Tensor,
        all_sum: Reduction,
    ) -> None:
        """Raise if each score is spread evenly over its tokens: it would be read there.

        A reward must be known when its token is sampled, or the rewards so far tell of those that
        follow.
        """
        lengths = mask.sum(1)
        means = totals / lengths.clamp(min=1)
        differences = (token_scores - means[:, None]).abs()
        is_even = (differences <= 1e-5 * means.abs()[:, None]) | ~mask
        counts = (usable & (lengths > 2)).to(means)
        sums = (
            counts.sum(),
            (is_even.all(1) * counts).sum(),
            (means * counts).sum(),
            (means**2 * counts).sum(),
        )
        rows, even, total, squares = all_sum(torch.stack(sums)).tolist()
        they_differ = squares - total**2 / max(rows, 1) > 1e-4 * squares
        if rows >= 8 and even == rows and they_differ:
            raise ValueError(
                "The rewards per token of the first rollout are equal within each completion, and "
                "differ between them: scores of whole completions, spread over tokens. "
                "`critic='side'` would read them before they are earned; return one number per "
                "completion, or set `critic='head'`."
            )


CriticFactory = Callable[[Any], Critic]  # from the policy


def built_by(factory: CriticFactory, policy: Any, is_normalized: bool) -> Critic:
    """Critic that a factory builds; raise an error if it could not be trained, saved or resumed."""
    critic = factory(policy)
    if not isinstance(critic, Critic):
        raise TypeError(
            f"`critic_factory` must return a `Critic`, got {type(critic).__name__}; derive its "
            "class from `trl_ppo_ext.Critic`."
        )
    kind = critic.kind
    if not isinstance(kind, str) or kind in (*KINDS, "none"):
        raise ValueError(
            f"`kind` of {type(critic).__name__} must be a text other than those of this package, "
            f"got {kind!r}; choose another name."
        )
    for name, x in critic.named_parameters():
        if name in MOMENTS or x.dim() == 0:
            raise ValueError(
                f"Parameters of {type(critic).__name__} must have a dimension, and no name of "
                f"{MOMENTS}, got `{name}` of shape {tuple(x.shape)}; change it."
            )
    if critic.is_normalized != is_normalized:
        raise ValueError(
            f"`normalize_values` is {is_normalized}, and {type(critic).__name__} has "
            f"`is_normalized={critic.is_normalized}`; make them equal."
        )
    return critic.to(policy.device)


def new_critic(kind: str, policy: Any, is_normalized: bool, length: int) -> Critic:
    """Critic of this package on the states of a policy, for completions of at most `length`
    tokens."""
    output = policy.get_output_embeddings()
    config = policy.config.get_text_config()
    width = getattr(output, "in_features", config.hidden_size)  # smaller in OPT-350m
    if kind == "side":
        return SideCritic(
            last_size=width,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            length=length,
            is_normalized=is_normalized,
            device=policy.device,
        )
    head = ValueHead(width, is_normalized, policy.device)
    head.kind = kind  # "head", or "adapter" if it reads one of its own
    return head
