"""The fused projection against the plain one."""

import pytest
import torch

from trl_ppo_ext.modeling import logprobs as module
from trl_ppo_ext.modeling import token_logprobs

ROWS, HIDDEN, VOCABULARY, TEMPERATURE = 13, 8, 31, 0.7


@pytest.fixture(params=[1, 100, 2**22], ids=["row by row", "three rows", "one chunk"])
def chunk_size(request, monkeypatch):
    monkeypatch.setitem(module.CHUNK_LOGITS, "cpu", request.param)


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
    weight, bias = torch.randn(VOCABULARY, HIDDEN, dtype=dtype), torch.randn(VOCABULARY, dtype=dtype)
    return hidden, weight, bias, torch.randint(VOCABULARY, (ROWS,))


def plain(hidden, weight, bias, tokens):
    log_p = ((hidden @ weight.T + bias) / TEMPERATURE).log_softmax(-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_equals_the_plain_projection(chunk_size):
    hidden, weight, bias, tokens = problem(torch.float32)
    logprobs, entropies = token_logprobs(hidden, weight, tokens, TEMPERATURE, bias, with_entropy=True)
    expected_logprobs, expected_entropies = plain(hidden, weight, bias, tokens)
    torch.testing.assert_close(logprobs, expected_logprobs)
    torch.testing.assert_close(entropies, expected_entropies)


def test_gradient_equals_autograd_through_the_plain_projection(chunk_size):
    hidden, weight, bias, tokens = problem(torch.float32)
    along = torch.randn(2, ROWS)
    fused = token_logprobs(hidden, weight, tokens, TEMPERATURE, bias, with_entropy=True, entropy_needs_grad=True)
    (got,) = torch.autograd.grad((along[0] * fused[0] + along[1] * fused[1]).sum(), hidden)
    logprobs, entropies = plain(hidden, weight, bias, tokens)
    (expected,) = torch.autograd.grad((along[0] * logprobs + along[1] * entropies).sum(), hidden)
    torch.testing.assert_close(got, expected)


def test_entropy_without_gradient_leaves_none():
    hidden, weight, bias, tokens = problem(torch.float32)
    logprobs, entropies = token_logprobs(hidden, weight, tokens, TEMPERATURE, bias, with_entropy=True)
    assert not entropies.requires_grad and logprobs.requires_grad
    assert token_logprobs(hidden, weight, tokens)[1] is None


def test_no_tensor_over_rows_and_vocabulary_exists(monkeypatch):
    """The largest tensor that any operation of forward and backward makes is one chunk of logits."""
    monkeypatch.setitem(module.CHUNK_LOGITS, "cpu", 4 * VOCABULARY)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                is_weight = isinstance(tensor, torch.Tensor) and tensor.data_ptr() == weight.data_ptr()
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCABULARY,) and not is_weight:
                    largest = max(largest, tensor.numel())
            return out

    hidden, weight, bias, tokens = problem(torch.float32)
    with Watch():
        logprobs, entropies = token_logprobs(
            hidden, weight, tokens, bias=bias, with_entropy=True, entropy_needs_grad=True
        )
        (logprobs + entropies).sum().backward()
    assert largest == 4 * VOCABULARY


def test_bf16_log_sum_exp_is_computed_in_float32():
    hidden, weight, _, tokens = problem(torch.bfloat16)
    logprobs, _ = token_logprobs(hidden, weight, tokens)
    logits = (hidden @ weight.T).float()
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
