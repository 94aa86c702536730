"""Log-probabilities of given tokens, and entropies, straight from hidden states.

Logits over the vocabulary exist for a chunk of rows at a time, in the forward and in the backward.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Logits that exist at a time, in numbers. On a CPU a chunk should stay near the caches, a GPU wants large products.
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**26}


def _chunks(rows: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    size = max(1, CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"]) // vocabulary)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class _TokenLogprobs(torch.autograd.Function):
    """Both outputs of a row depend on that row's hidden state alone.

    So the forward, while it has the probabilities at hand, leaves behind the derivative of each output by the hidden
    state, `[rows, hidden]`; the backward scales it with the incoming gradient. The vocabulary is passed once, there is
    nothing to recompute, and nothing of `[rows, vocabulary]` to keep. With probabilities p, logits z = W·h/T and
    entropy H:  ∂log p(y)/∂h = (W_y − p·W)/T,  ∂H/∂h = −(p·(log p + H))·W/T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        with_entropy: bool,
        entropy_needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = len(tokens)
        logprobs = hidden.new_empty(rows, dtype=torch.float32)
        entropies = hidden.new_zeros(rows, dtype=torch.float32)
        needs_grad = ctx.needs_input_grad[0]
        by_logprob = torch.empty_like(hidden, dtype=torch.float32) if needs_grad else None
        by_entropy = torch.empty_like(hidden, dtype=torch.float32) if needs_grad and entropy_needs_grad else None
        for rows_of in _chunks(rows, len(weight), hidden.device):
            logits = (hidden[rows_of] @ weight.T).float()
            if bias is not None:
                logits += bias.float()
            logits /= temperature
            chunk_tokens = tokens[rows_of, None]
            log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
            logprobs[rows_of] = log_p.gather(1, chunk_tokens)[:, 0]
            if not (needs_grad or with_entropy):
                continue
            p = log_p.exp()
            if with_entropy:
                entropy = -torch.linalg.vecdot(p, log_p)
                entropies[rows_of] = entropy
                if by_entropy is not None:
                    slope = -p * (log_p + entropy[:, None])
                    by_entropy[rows_of] = (slope.to(weight.dtype) @ weight).float() / temperature
            if by_logprob is not None:
                slope = p.neg_().scatter_add_(1, chunk_tokens, torch.ones_like(p[:, :1]))
                by_logprob[rows_of] = (slope.to(weight.dtype) @ weight).float() / temperature
        ctx.save_for_backward(by_logprob, by_entropy)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy = ctx.saved_tensors
        grad = gradients[0][:, None] * by_logprob
        if by_entropy is not None:
            grad += gradients[1][:, None] * by_entropy
        return grad, None, None, None, None, None, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    entropy_needs_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `tokens` under `softmax((hidden @ weight.T + bias) / temperature)`.

    Gradients flow to `hidden` only: the projection is part of the frozen base.

    Args:
        hidden (`Tensor` of shape `[rows, hidden]`): Hidden states that predict the tokens.
        weight (`Tensor` of shape `[vocabulary, hidden]`): Projection to the vocabulary.
        tokens (`Tensor` of shape `[rows]`): Token ids.
        temperature (`float`, *optional*, defaults to 1.0): Divides the logits.
        bias (`Tensor` of shape `[vocabulary]`, *optional*): Bias of the projection.
        with_entropy (`bool`, *optional*, defaults to `False`): Whether to compute entropies.
        entropy_needs_grad (`bool`, *optional*, defaults to `False`): Whether gradients flow through the entropies.

    Returns:
        `tuple(Tensor, Tensor or None)`: Log-probabilities and entropies in nats, `[rows]` in float32.
    """
    wants_grad = with_entropy and entropy_needs_grad
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, bias, tokens, temperature, with_entropy, wants_grad)
    if not with_entropy:
        return logprobs, None
    return logprobs, entropies if wants_grad else entropies.detach()
