"""The fused projection against the plain one."""

import pytest
import torch
import torch.nn.functional as F

from trl_ppo_ext.modeling import logprobs as module
from trl_ppo_ext.modeling.logprobs import token_logprobs

ROWS = 13
HIDDEN = 8
VOCABULARY = 31
TEMPERATURE = 0.7


@pytest.fixture(params=[1, 100, 2**22], ids=["row by row", "three rows", "one chunk"])
def chunk_size(request, monkeypatch):
    monkeypatch.setitem(module.CHUNK_LOGITS, "cpu", request.param)


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype)
    bias = torch.randn(VOCABULARY, dtype=dtype)
    return hidden, weight, bias, torch.randint(VOCABULARY, (ROWS,))


def near(hidden, by=0.3):
    return hidden.detach() + by * torch.randn_like(hidden)


def capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


def plain(hidden, weight, bias, tokens, cap=None):
    log_p = (capped(hidden @ weight.T + bias, cap) / TEMPERATURE).log_softmax(-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_kl(hidden, ref_hidden, weight, bias=None, temperature=TEMPERATURE, cap=None):
    """By autograd, in float64."""
    both = (F.linear(h.double(), weight.double(), bias) for h in (hidden, ref_hidden))
    logits, ref_logits = (capped(z, cap) / temperature for z in both)
    return F.kl_div(
        F.log_softmax(ref_logits, -1), F.log_softmax(logits, -1), reduction="none", log_target=True
    ).sum(-1)


def everything(hidden, ref_hidden, weight, bias, tokens, cap=None):
    return token_logprobs(
        hidden, weight, tokens, TEMPERATURE, bias, with_entropy=True, ref_hidden=ref_hidden, cap=cap
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.9])
@pytest.mark.parametrize(("with_bias", "cap"), [(True, None), (False, None), (True, 3.0)])
def test_kl_and_its_gradient_equal_autograd_in_float64(chunk_size, temperature, with_bias, cap):
    hidden, weight, bias, tokens = problem()
    if not with_bias:
        bias = None
    ref_hidden = near(hidden)
    along = torch.randn(ROWS, dtype=torch.float64)
    fused = token_logprobs(
        hidden, weight, tokens, temperature, bias, ref_hidden=ref_hidden, cap=cap
    )
    expected = plain_kl(hidden, ref_hidden, weight, bias, temperature, cap)
    assert fused.kls.dtype == torch.float32 and fused.kls.shape == (ROWS,)
    # the normalisers, about 10, are rounded to float32
    torch.testing.assert_close(fused.kls.double(), expected, rtol=1e-5, atol=3e-6)
    (got,) = torch.autograd.grad((along * fused.kls).sum(), hidden)
    torch.testing.assert_close(
        got, torch.autograd.grad((along * expected).sum(), hidden)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("cap", [None, 3.0])
def test_gradients_of_all_three_statistics_add_up(chunk_size, cap):
    hidden, weight, bias, tokens = problem(torch.float32)
    ref_hidden = near(hidden)
    along = torch.randn(3, ROWS)
    fused = everything(hidden, ref_hidden, weight, bias, tokens, cap)
    kl = plain_kl(hidden, ref_hidden, weight, bias.double(), cap=cap)
    expected = (*plain(hidden, weight, bias, tokens, cap), kl)
    for got, value in zip(fused, expected):
        torch.testing.assert_close(got, value.float())
    (got,) = torch.autograd.grad(sum((a * f).sum() for a, f in zip(along, fused)), hidden)
    (gradient,) = torch.autograd.grad(sum((a * e).sum() for a, e in zip(along, expected)), hidden)
    torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 5003])
def test_kl_from_the_same_hidden_states_is_exactly_zero(chunk_size, dtype, vocabulary):
    hidden, _, _, tokens = problem(dtype)
    weight = torch.randn(vocabulary, HIDDEN, dtype=dtype)
    bias = torch.randn(vocabulary, dtype=dtype)
    kls = everything(hidden, hidden.detach().clone(), weight, bias, tokens).kls
    assert torch.equal(kls, torch.zeros(ROWS))
    assert not torch.autograd.grad(kls.sum(), hidden)[0].any()
    away = everything(hidden, near(hidden), weight, bias, tokens).kls
    assert (away > 0).all()


@pytest.mark.parametrize("size", [1, 2 * VOCABULARY, 6 * VOCABULARY])
def test_chunking_changes_no_bit_where_products_are_exact(monkeypatch, size):
    """In small integers no product of matrices rounds, whatever the order of its sums."""
    hidden, weight, bias, tokens = (
        x if x.dtype == torch.int64 else x.detach().mul(4).round() for x in problem()
    )
    numbers = (
        hidden.float(),
        near(hidden, 2).round().float(),
        weight.float() / 32,
        bias.float(),
        tokens,
    )
    whole = everything(*numbers)
    monkeypatch.setitem(module.CHUNK_LOGITS, "cpu", size)
    for in_chunks, at_once in zip(everything(*numbers)[:3], whole):
        assert torch.equal(in_chunks, at_once)


def test_reference_changes_no_logprob_and_no_entropy(chunk_size):
    hidden, weight, bias, tokens = problem(torch.float32)
    alone = token_logprobs(hidden, weight, tokens, TEMPERATURE, bias, with_entropy=True)
    beside = everything(hidden, near(hidden), weight, bias, tokens)
    assert torch.equal(beside.logprobs, alone.logprobs) and torch.equal(
        beside.entropies, alone.entropies
    )


def test_no_gradient_flows_to_the_reference():
    hidden, weight, bias, tokens = problem(torch.float32)
    ref_hidden = near(hidden).requires_grad_()
    everything(hidden, ref_hidden, weight, bias, tokens).kls.sum().backward()
    assert ref_hidden.grad is None and hidden.grad.any()


@pytest.mark.parametrize(("with_entropy", "with_kl"), [(False, False), (False, True), (True, True)])
def test_the_backward_keeps_a_derivative_for_each_statistic(with_entropy, with_kl):
    hidden, weight, _, tokens = problem(torch.float32)
    kept = []
    if with_kl:
        ref_hidden = near(hidden)
    else:
        ref_hidden = None
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape) or tensor, lambda x: x
    ):
        statistics = token_logprobs(
            hidden, weight, tokens, with_entropy=with_entropy, ref_hidden=ref_hidden
        )
    assert kept == [(ROWS, HIDDEN)] * (1 + with_entropy + with_kl)
    assert not any(
        isinstance(value, torch.Tensor) for value in vars(statistics.logprobs.grad_fn).values()
    )


def test_bf16_logits_are_not_rounded_to_bf16():
    """The product of two numbers in bfloat16 is exact in float32."""
    hidden, weight, _, tokens = problem(torch.bfloat16)
    large = 4 * hidden.detach()  # logits of up to 40, which bfloat16 rounds by up to 0.1
    got = token_logprobs(large, weight, tokens, with_entropy=True)
    log_p = (large.double() @ weight.double().T).log_softmax(-1)
    assert got.logprobs.dtype == torch.float32
    torch.testing.assert_close(
        got.logprobs.double(), log_p.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=1e-5
    )
    torch.testing.assert_close(
        got.entropies.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 3 * HIDDEN, 2**21])
def test_blocks_of_the_weight_change_no_logit(monkeypatch, dtype, size):
    """Also in float16, whose numbers would change if a CPU rounded factors to bfloat16."""
    monkeypatch.setattr(module, "BLOCK", size)
    hidden, weight, *_ = problem(dtype)
    out = module.project(hidden.detach(), weight, torch.empty(ROWS, VOCABULARY))
    torch.testing.assert_close(
        out.double(), hidden.double() @ weight.double().T, rtol=1e-6, atol=1e-6
    )


def test_precision_of_other_products_stays_as_it_was():
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("torch 2.9 added this setting")
    precision = torch.backends.mkldnn.matmul.fp32_precision
    hidden, weight, _, tokens = problem(torch.bfloat16)
    token_logprobs(hidden, weight, tokens)
    assert torch.backends.mkldnn.matmul.fp32_precision == precision


def test_bf16_kl_is_that_of_unrounded_logits():
    hidden, weight, _, tokens = problem(torch.bfloat16)
    ref_hidden = near(hidden)
    kls = token_logprobs(hidden, weight, tokens, ref_hidden=ref_hidden).kls
    expected = plain_kl(hidden, ref_hidden, weight, temperature=1.0)
    torch.testing.assert_close(kls.double(), expected, rtol=1e-5, atol=3e-6)
    (got,) = torch.autograd.grad(kls.sum(), hidden)
    (gradient,) = torch.autograd.grad(expected.sum(), hidden)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, gradient, rtol=0.05, atol=0.05)


def test_autocast_rounds_the_factors_of_the_logits_and_no_sum():
    hidden, weight, _, tokens = problem(torch.float32)
    ref_hidden = near(hidden, 0.01)
    with torch.autocast("cpu", torch.bfloat16):
        got = token_logprobs(hidden, weight, tokens, with_entropy=True, ref_hidden=ref_hidden)
    rounded, *both = (x.detach().bfloat16().double() for x in (weight, hidden, ref_hidden))
    log_p, log_q = ((x @ rounded.T).log_softmax(-1) for x in both)
    torch.testing.assert_close(
        got.kls.double(), (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-4, atol=3e-6
    )
    torch.testing.assert_close(
        got.entropies.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-6
    )


def test_projection_in_float32_ignores_autocast():
    hidden, weight, bias, tokens = problem(torch.float32)
    expected = token_logprobs(hidden, weight, tokens, bias=bias).logprobs
    with torch.autocast("cpu", torch.bfloat16):
        got = token_logprobs(hidden, weight, tokens, bias=bias, in_float32=True).logprobs
        assert not torch.equal(token_logprobs(hidden, weight, tokens, bias=bias).logprobs, expected)
    assert torch.equal(got, expected)
