"""Value heads: linear on the last hidden state, or a small network on states of several layers."""

import torch
from torch import Tensor, nn

SIDE_WIDTH = 256
SIDE_LEARNING_RATE = 1e-3
SIDE_STATES = 4  # layers that the side network reads, at equal distances
COSINES = 16


def side_layers(num_layers: int) -> list[int]:
    """Layers after which the side network reads states."""
    return sorted({round(num_layers * (i + 1) / SIDE_STATES) for i in range(SIDE_STATES)})


class ValueHead(nn.Linear):
    """Linear head in float32 that starts at zero; with `normalized` it predicts in units that are saved with it."""

    def __init__(self, hidden_size: int, normalized: bool, device: torch.device):
        super().__init__(hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.normalized = normalized
        self.mean: Tensor
        self.deviation: Tensor
        if normalized:
            self.register_buffer("mean", torch.zeros(1, device=device))
            self.register_buffer("deviation", torch.ones(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values `[tokens, 1]` of states `[tokens, hidden]`."""
        # DeepSpeed casts the weights that it trains
        values = super().forward(hidden.to(self.weight.dtype)).float()
        return self.mean + self.deviation * values if self.normalized else values

    def in_own_units(self, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the weights of a head that was saved with or without units."""
        head = {"mean": torch.zeros(1), "deviation": torch.ones(1)} | saved
        if self.normalized:
            return head
        mean, deviation = head.pop("mean"), head.pop("deviation")
        for name, offset in {"weight": torch.zeros(1), "bias": mean}.items():
            if name in head:  # otherwise it does not fit, which is checked after this
                head[name] = deviation * head[name] + offset
        return head


class SideCritic(ValueHead):
    """Gated MLP on states of several layers, the position in the completion, and the rewards before it.

    It reads the states that the policy's forward computes anyway, and nothing flows back into them: the value loss
    cannot pull at the policy. A return depends on how much of a completion is left, so the position is an input
    (https://huggingface.co/papers/1712.00378), and the rewards so far tell what no state of the policy holds.
    """

    def __init__(
        self, last_size: int, hidden_size: int, num_layers: int, length: int, normalized: bool, device: torch.device
    ):
        super().__init__(SIDE_WIDTH, normalized, device)
        self.layers = side_layers(num_layers)
        width = (len(self.layers) - 1) * hidden_size + 2 * last_size + 1
        self.inputs = nn.Linear(width, 2 * SIDE_WIDTH, dtype=torch.float32, device=device)
        self.length: Tensor
        self.register_buffer("length", torch.full((1,), float(length), device=device))
        self.reward_mean: Tensor
        self.reward_deviation: Tensor  # 0 until rewards have been seen
        self.register_buffer("reward_mean", torch.zeros(1, device=device))
        self.register_buffer("reward_deviation", torch.zeros(1, device=device))

    def read(self, states: list[Tensor], positions: Tensor, earned: Tensor | None) -> Tensor:
        """Input of the network, from states `[tokens, hidden]` after each of `layers`; the others are `[tokens]`."""
        size = states[-1].shape[-1]
        normalized = [nn.functional.rms_norm(x.detach().float(), x.shape[-1:]) for x in states]
        waves = torch.arange(COSINES, device=positions.device) * torch.pi / self.length
        # a critic of shorter completions must not read those beyond as their mirror image
        positions = torch.minimum(positions, self.length)
        position = nn.functional.pad((positions[:, None] * waves).cos(), (0, size - COSINES))
        rewards = torch.zeros_like(waves[:1]).expand(len(positions), 1) if earned is None else earned[:, None]
        # as long as a state, or they would drown in large models
        scale = (size / COSINES) ** 0.5
        return torch.cat([*normalized, scale * position, scale * rewards], 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values `[tokens, 1]` of what was [`read`]."""
        gate, up = self.inputs(hidden.to(self.inputs.weight.dtype)).chunk(2, 1)
        return super().forward(nn.functional.silu(gate) * up)
