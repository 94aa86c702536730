"""Critics: a linear value head on one state, or a small network on several; their units, inputs
and learning rates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed import set_weights
from ..ppo_math import Reduction
from .adapters import check_fit

SIDE_WIDTH = 256
SIDE_STATES = 4  # layers that the side network reads, at equal distances
COSINES = 16
DIRECTIONS = 256  # of the inputs, at random, in which the first fit sees them
# in the first fit, of a weight of a direction and of a cosine, in completions
FIRST_COSTS = 128.0, 16.0
MOMENTS = ("returns", "rewards")  # in the file of a critic: count, mean and squares of each
EARNED_BOUND = 5.0  # of outliers among the rewards so far


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
    def of(cls, moments: Any) -> "Units":
        """Units of values with these moments."""
        return cls(moments.mean, moments.unit)

    def values(self, outputs: Tensor) -> Tensor:
        """Values in the unit of the rewards."""
        return self.mean + self.deviation * outputs

    def targets(self, returns: Tensor) -> Tensor:
        """What a critic must output to predict these returns."""
        return (returns - self.mean) / self.deviation


def side_layers(num_layers: int) -> list[int]:
    """Layers after which the side network reads states."""
    return sorted({round(num_layers * (i + 1) / SIDE_STATES) for i in range(SIDE_STATES)})


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


class ValueHead(nn.Linear):
    """Linear head in float32 that starts at zero, so that a new critic predicts the mean return."""

    learning_rate: float | None = None  # that of the policy

    def __init__(self, hidden_size: int, is_normalized: bool, device: torch.device):
        super().__init__(hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        # it predicts in units of the returns; else in those of the rewards
        self.is_normalized = is_normalized
        self.saved_moments: dict[str, Tensor] = {}  # in its file, with which a run begins

    def units(self, returns: Any) -> Units:
        """Units in which it predicts, after returns with these moments."""
        if self.is_normalized:
            return Units.of(returns)
        return Units()

    def load_saved(self, saved: dict[str, Tensor]) -> None:
        """Load a saved critic, and keep its moments aside; without those of returns it predicts
        rewards."""
        self.saved_moments = {name: saved[name] for name in MOMENTS if name in saved}
        self.is_normalized = "returns" in self.saved_moments
        tensors = self.state_dict(keep_vars=True)
        weights = {name: x for name, x in saved.items() if name not in MOMENTS}
        check_fit(tensors, weights)
        set_weights(tensors, weights)

    def forward(self, hidden: Tensor) -> Tensor:
        """Outputs `[tokens, 1]` of states `[tokens, hidden]`."""
        # DeepSpeed casts the weights that it trains
        return super().forward(hidden.to(self.weight.dtype)).float()


class FirstFit(NamedTuple):
    """A linear fit to the returns of a rollout."""

    weights: Tensor  # of a critic's inputs
    outputs: Tensor  # of the tokens that it was fitted to


class SideCritic(ValueHead):
    """Gated MLP on states of several layers, the position in the completion, and the rewards before
    it.

    It reads the states that the policy's forward computes anyway, and nothing flows back into them:
    the value loss cannot pull at the policy. A return depends on how much of a completion is left,
    so the position is an input (https://huggingface.co/papers/1712.00378), and the rewards so far
    tell what no state of the policy holds.

    A step of Adam moves every weight by the learning rate, and so an output by that times the sum
    of its inputs. They are scaled to the same sum at any width of the policy
    (https://huggingface.co/papers/2203.03466).

    A new one begins with a linear fit to the returns of the first rollout in which they differ,
    which is not trained: training adds to it. With one value for what ends and what goes on, an
    answer that ends would seem to lose it, and a policy may unlearn EOS in one rollout.
    """

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
        width = (len(self.layers) - 1) * hidden_size + 2 * last_size + 1
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

    @contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Keep what the first fit sees of the inputs in a context, `[tokens, DIRECTIONS +
        COSINES]` per forward."""
        kept = list[Tensor]()
        directions = self.directions()
        hook = self.register_forward_pre_hook(
            lambda _, args: kept.append(nn.functional.linear(args[0], directions))
        )
        try:
            yield kept
        finally:
            hook.remove()

    def directions(self) -> Tensor:
        """What the first fit sees of the inputs: random directions, the same for all, and the
        cosines."""
        random = torch.randn(
            DIRECTIONS, self.first.in_features, generator=torch.Generator().manual_seed(0)
        )
        return torch.block_diag(random, torch.eye(COSINES)).to(self.first_fit.device)

    def fit(
        self,
        recorded: list[Tensor],
        targets: Tensor,
        steps: Tensor,
        completions: Tensor,
        all_sum: Reduction,
    ) -> FirstFit:
        """Fit the targets of the tokens that were recorded; [`set_first_fit`] lets it count.

        By ridge regression over those that are `steps`, in which a weight costs as much as so many
        completions: it takes little of few. One of full length with targets of 0 is added at the
        positions, where none may be.
        """
        device = targets.device
        read = torch.cat(recorded)
        # float64 if the device has it (Apple's GPUs do not): the sums must not depend on the ranks
        if device.type == "mps":
            dtype = torch.float32
        else:
            dtype = torch.float64
        sums = torch.zeros(
            DIRECTIONS + COSINES + 1, DIRECTIONS + COSINES + 1, dtype=dtype, device=device
        )
        # float64 is large
        for inputs, goals, counts in zip(*(x.split(4096) for x in (read, targets, steps))):
            rows = torch.cat([inputs[counts], goals[counts][:, None]], 1).to(dtype)
            sums += rows.T @ rows
        sums[-1, -1] = completions
        sums = all_sum(sums).cpu().double()
        products = sums[:-1, :-1]
        totals = sums[:-1, -1]
        count = sums[-1, -1].clamp(min=1)
        costs = torch.tensor(FIRST_COSTS).repeat_interleave(torch.tensor([DIRECTIONS, COSINES]))
        # the smallest one is for a rollout without a token that counts
        ridge = torch.diag(costs / count * products.diagonal() + 1e-6)
        everywhere = self.cosines(torch.arange(int(self.length), device=device)).cpu().double()
        ridge[DIRECTIONS:, DIRECTIONS:] += everywhere.T @ everywhere
        weights = torch.linalg.solve(products + ridge, totals).to(read)
        return FirstFit(weights @ self.directions(), read @ weights)

    def set_first_fit(self, weights: Tensor) -> None:
        """Let a first fit count in the outputs."""
        self.first_fit.copy_(weights)

    @contextmanager
    def with_first_fit(self, weights: Tensor | None) -> Iterator[None]:
        """Let a first fit count within a context."""
        if weights is None:
            yield
            return
        before = self.first_fit.clone()
        self.set_first_fit(weights)
        try:
            yield
        finally:
            self.set_first_fit(before)

    def read(self, states: list[Tensor], positions: Tensor, earned: Tensor | None) -> Tensor:
        """Input of the network, from states `[tokens, hidden]` after each of `layers`; the
        others are `[tokens]`."""
        size = states[-1].shape[-1]
        normalized = [nn.functional.rms_norm(x.detach().float(), x.shape[-1:]) for x in states]
        cosines = self.cosines(positions)
        position = nn.functional.pad(cosines, (0, size - COSINES))
        rewards = torch.zeros_like(cosines[:, :1]) if earned is None else earned[:, None]
        # as long as a state, or they would drown in large models
        norm = (size / COSINES) ** 0.5
        return torch.cat(
            [self.scale * torch.cat([*normalized, norm * position, norm * rewards], 1), cosines], 1
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Outputs `[tokens, 1]` of what was [`read`]."""
        gate, up = self.first(hidden[:, :-COSINES].to(self.first.weight.dtype)).chunk(2, 1)
        return (
            super().forward(nn.functional.silu(gate) * up)
            + (hidden @ self.first_fit.float())[:, None]
        )


def new_critic(policy: Any, is_normalized: bool, length: int | None = None) -> ValueHead:
    """Critic on the last states of a policy; with the maximum `length` of completions, a side
    network."""
    output = policy.get_output_embeddings()
    config = policy.config.get_text_config()
    width = getattr(output, "in_features", config.hidden_size)  # smaller in OPT-350m
    if length is None:
        return ValueHead(width, is_normalized, policy.device)
    return SideCritic(
        width, config.hidden_size, config.num_hidden_layers, length, is_normalized, policy.device
    )
