"""Log-probs, entropies and KL divergences from hidden states.

Logits over the vocabulary exist for one chunk of rows at a time, in the forward and in the
backward.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

# Logits per chunk. On a CPU a chunk should fit the caches; a GPU needs large products.
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**26}
# weights that are cast to float32 at a time, where no product of 16 bits is kept in float32
BLOCK = 2**21


class TokenScores(NamedTuple):
    """Scores of sampled tokens in float32 and nats: `[batch, response]` with 0 at padding, or
    `[tokens]`."""

    logprobs: Tensor  # log-prob of the token at the sampling temperature
    # None if not computed; annotated as present, for the code that computes them
    entropies: Tensor = None  # type: ignore[assignment]  # entropy of the distribution it was sampled from
    kls: Tensor = None  # type: ignore[assignment]  # exact KL of that distribution from the reference's
    values: Tensor = None  # type: ignore[assignment]  # the critic's output for the state before it, see `Units`
    ref_logprobs: Tensor = None  # type: ignore[assignment]  # log-prob under the reference

    @property
    def is_finite(self) -> Tensor:
        """Rows of which every score is finite, `[batch]`."""
        return torch.stack([x.isfinite().all(1) for x in self if x is not None]).all(0)

    def map(self, change: Callable[[Tensor], Tensor]) -> "TokenScores":
        """Change every score that is present."""
        return TokenScores(*(x if x is None else change(x) for x in self))


def logit_scale_and_cap(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Scale and cap of a model's logits, which are scale·cap·tanh(z/cap) of the output
    projection z."""
    config = config.get_text_config()
    factors = "logit_scale", "lm_head_multiplier"  # of Cohere, Falcon-H1
    scale = math.prod(getattr(config, name, None) or 1.0 for name in factors)
    scale /= getattr(config, "logits_scaling", None) or 1  # of Granite
    cap = getattr(config, "final_logit_softcapping", None)  # of Gemma; on scaled logits
    return scale, None if cap is None else cap / scale


@lru_cache
def _keeps_float32(device_type: str, dtype: torch.dtype) -> bool:
    """Check if a device keeps products of 16-bit numbers in float32, as CUDA does since torch
    2.8."""
    some = torch.zeros(16, 16, dtype=dtype, device=device_type)
    try:
        torch.mm(some, some, torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


@contextmanager
def _bfloat16_factors(dtype: torch.dtype) -> Iterator[None]:
    """Let a CPU round the factors of float32 products to bfloat16, if the weight has that dtype:
    that is exact then, and fast."""
    settings = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9
    if settings is None or dtype != torch.bfloat16:
        yield
        return
    previous = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = previous


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Compute `hidden @ weight.T` in `out`, in float32.

    Factors have the dtype of `weight`, whatever autocast does.

    The product of two 16-bit numbers is exact in float32. Rounded to bfloat16 again, logits near 16
    are off by up to 0.06, which is more than a step of the policy.
    """
    hidden = hidden.to(weight.dtype)
    if weight.dtype == torch.float32:
        return torch.mm(hidden, weight.T, out=out)
    if weight.dtype.itemsize > 2:
        return out.copy_(hidden @ weight.T)
    if _keeps_float32(weight.device.type, weight.dtype):
        return torch.mm(hidden, weight.T, torch.float32, out=out)
    # elsewhere factors are cast, a block of the weight at a time
    hidden = hidden.float()
    size = max(1, BLOCK // weight.shape[1])
    with _bfloat16_factors(weight.dtype):
        for start in range(0, len(weight), size):
            block = slice(start, start + size)
            torch.mm(hidden, weight[block].float().T, out=out[:, block])
    return out


class _Projection:
    """Projection of a chunk of hidden states to the vocabulary, and of derivatives back.

    All chunks share buffers: on a CPU, fresh memory costs as much as the arithmetic on it.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        cap: float | None,
        rows: int,
        references: bool,
        in_float32: bool,
    ):
        device = weight.device
        self.weight = weight
        # autocast does not apply to products with `out`
        if torch.is_autocast_enabled(device.type) and not in_float32:
            self.weight = weight.to(torch.get_autocast_dtype(device.type))
        self.bias = bias
        self.temperature = temperature
        self.cap = cap
        self.logits = torch.empty(rows, len(weight), device=device)
        is_rounded = self.weight.dtype != torch.float32
        if is_rounded:
            self.rounded = self.weight.new_empty(rows, len(weight))
        else:
            self.rounded = self.logits
        self.log_p = torch.empty_like(self.logits)
        if references:
            self.log_q = torch.empty_like(self.logits)
        else:
            self.log_q = self.log_p
        self.slope = None if cap is None else torch.empty_like(self.logits)

    def log_softmax(self, hidden: Tensor, out: Tensor) -> Tensor:
        rows = slice(len(hidden))
        logits = project(hidden, self.weight, out=self.logits[rows])
        if self.bias is not None:
            logits += self.bias.float()
        if self.slope is not None and self.cap is not None:
            torch.square(logits.div_(self.cap).tanh_(), out=self.slope[rows]).neg_().add_(1)
            logits *= self.cap
        if self.temperature != 1:
            logits /= self.temperature
        return torch.log_softmax(logits, -1, out=out[rows])

    def pull_back(self, dlogits: Tensor) -> Tensor:
        """Derivative by the hidden states of the last [`log_softmax`]; `dlogits` is overwritten."""
        if self.slope is not None:
            dlogits *= self.slope[: len(dlogits)]
        # in the weight's dtype: errors relative to the terms of a sum average out, while a log-prob
        # is a small difference of logits, in which an error relative to the logits is large
        if self.weight.dtype != torch.float32:
            dlogits = self.rounded[: len(dlogits)].copy_(dlogits)
        return (dlogits @ self.weight).float() / self.temperature


def _expectation_(
    x: Tensor, p: Tensor, projection: _Projection, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """E = p·x of each row, and ∂E/∂h if needed; `x` is overwritten.

    For x whose own derivative is 0 in expectation, as that of any log p is: then ∂E/∂z = p(x − E).
    """
    # no dot product: autocast takes those in its low precision, and a KL is a small difference of
    # large terms
    expectation = x.mul_(p).sum(-1)
    if not needs_grad:
        return expectation, None
    return expectation, projection.pull_back(x.addcmul_(p, expectation[:, None], value=-1))


def _statistics(
    hidden: Tensor,
    tokens: Tensor,
    ref_hidden: Tensor | None,
    projection: _Projection,
    with_entropy: bool,
    needs_grad: bool,
) -> tuple[Tensor | None, ...]:
    """Log-probabilities, entropies and KLs of one chunk, then their derivatives by the hidden
    state.

    Each step overwrites what no later step reads.
    """
    entropies = kls = dlogprob = dentropy = dkl = None
    log_q = None if ref_hidden is None else projection.log_softmax(ref_hidden, projection.log_q)
    log_p = projection.log_softmax(hidden, projection.log_p)
    logprobs = log_p.gather(1, tokens[:, None])[:, 0]
    if not (needs_grad or with_entropy or ref_hidden is not None):
        return logprobs, None, None, None, None, None
    p = torch.exp(log_p, out=projection.logits[: len(log_p)])
    if log_q is not None:
        kls, dkl = _expectation_(log_q.neg_().add_(log_p), p, projection, needs_grad)
    if with_entropy:
        negative, dnegative = _expectation_(log_p, p, projection, needs_grad)
        entropies = -negative
        dentropy = None if dnegative is None else -dnegative
    if needs_grad:
        dlogprob = projection.pull_back(
            p.neg_().scatter_add_(1, tokens[:, None], torch.ones_like(p[:, :1]))
        )
    return logprobs, entropies, kls, dlogprob, dentropy, dkl


class _TokenLogprobs(torch.autograd.Function):
    """All outputs of a row depend only on that row's hidden state.

    So the forward, while it has the probabilities at hand, leaves behind the derivative of each
    output by the hidden state, `[rows, hidden]`; the backward scales it with the incoming gradient.
    The vocabulary is passed once, there is nothing to recompute, and nothing of `[rows,
    vocabulary]` to keep. With probabilities p, logits z = W·h/T, entropy H and the reference's
    probabilities q:  ∂log p(y)/∂h = (W_y − p·W)/T,  ∂H/∂h = −(p·(log p + H))·W/T, ∂KL/∂h = (p·(log
    p − log q − KL))·W/T. A cap c, z = c·tanh(W·h/c)/T, multiplies W by 1 − tanh².
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        cap: float | None,
        ref_hidden: Tensor | None,
        with_entropy: bool,
        in_float32: bool,
    ) -> tuple[Tensor | None, ...]:
        with_kl = ref_hidden is not None
        trained = ctx.needs_input_grad[0]
        computed = (True, with_entropy, with_kl)
        outputs = [
            hidden.new_empty(len(tokens), dtype=torch.float32) if x else None for x in computed
        ]
        derivatives = [
            torch.empty_like(hidden, dtype=torch.float32) if x and trained else None
            for x in computed
        ]
        chunk_logits = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cuda"])
        # not fewer with a reference: products over other rows may round otherwise, and the first
        # ratio must be 1
        size = min(len(tokens), max(1, chunk_logits // len(weight)))
        projection = _Projection(weight, bias, temperature, cap, size, with_kl, in_float32)
        for start in range(0, len(tokens), size or 1):
            rows = slice(start, start + size)
            ref_rows = None if ref_hidden is None else ref_hidden[rows]
            chunk = _statistics(
                hidden[rows], tokens[rows], ref_rows, projection, with_entropy, trained
            )
            for out, part in zip(outputs + derivatives, chunk):
                if out is not None and part is not None:
                    out[rows] = part
        ctx.save_for_backward(*derivatives)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dlogprob, *others = ctx.saved_tensors
        grad = gradients[0][:, None] * dlogprob
        for gradient, derivative in zip(gradients[1:], others):
            if derivative is not None:
                grad += gradient[:, None] * derivative
        return grad, *(None,) * 8


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    ref_hidden: Tensor | None = None,
    cap: float | None = None,
    in_float32: bool = False,
) -> TokenScores:
    """Log-probs of `tokens` `[rows]` under `softmax((hidden @ weight.T + bias) / temperature)`,
    entropies and KLs.

    Gradients flow to `hidden` `[rows, hidden]` only: the projection `weight` `[vocabulary, hidden]`
    is part of the frozen base, and the reference is a constant. The KL is computed with
    `ref_hidden`, the reference's hidden states. With a cap c, a logit z of the projection is
    c·tanh(z/c). Logits are float32; autocast rounds the factors of their products, unless the
    projection is `in_float32`.

    The KL is the sum over the vocabulary, not an estimate: KL(π ‖ π_ref) = Σᵥ pᵥ·(log pᵥ − log qᵥ).
    It is exactly 0 where both have the same hidden state. Elsewhere it carries the rounding of the
    logits (about 1e-6 for logits around 10), so where both nearly agree it may be slightly
    negative; it is not clamped.
    """
    scores = _TokenLogprobs.apply(
        hidden, weight, bias, tokens, temperature, cap, ref_hidden, with_entropy, in_float32
    )
    return TokenScores(*scores)
