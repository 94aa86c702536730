"""PPO's mathematics: known answers of other codebases, closed forms, reductions, recomputation by hand."""

import itertools
import json
import math
import threading
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trl_ppo_ext.ppo_math import (
    aggregate_loss,
    clipped_policy_loss,
    clipped_value_loss,
    explained_variance,
    gae,
    kl_estimate,
    length_adaptive_lambda,
    masked_mean,
    masked_var,
    scale_to_unit_variance,
    sequence_logprobs,
    turn_logprobs,
    turn_starts,
    whiten,
)

GOLDEN = json.loads((Path(__file__).parent / "golden_ppo_math.json").read_text())["cases"]
# rows with every kind of mask: full, padded on the right, on the left, with holes, a single token
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 1],
        [1, 0, 0, 1, 1, 0, 1],
        [0, 1, 0, 1, 0, 1, 0],
        [0, 0, 0, 1, 0, 0, 0],
    ]
)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def garbage(like, mask, seed):
    """`like` with other numbers at masked positions."""
    return torch.where(mask.bool(), like, 100 * normal(*like.shape, seed=seed))


def tensors(inputs):
    return {k: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for k, v in inputs.items()}


# ---- known answers ----


def golden(function):
    cases = [(index, case) for index, case in enumerate(GOLDEN) if case["function"] == function]
    return pytest.mark.parametrize("case", [pytest.param(case, id=f"case{index}") for index, case in cases])


def test_golden_file_has_no_untested_function():
    assert {case["function"] for case in GOLDEN} == {"gae", "policy_loss", "value_loss", "kl", "whiten"}


@golden("gae")
def test_gae_agrees_with_other_codebases(case):
    advantages, returns = gae(**tensors(case["inputs"]))
    mask = torch.tensor(case["inputs"]["response_mask"]).bool()
    for actual, expected in ((advantages, case["expected"]["advantages"]), (returns, case["expected"]["returns"])):
        close(actual[mask], torch.tensor(expected, dtype=torch.float64)[mask])
        assert not actual[~mask].any()


@golden("policy_loss")
def test_policy_loss_agrees_with_other_codebases(case):
    inputs = tensors(case["inputs"])
    mask = inputs.pop("response_mask")
    per_token = clipped_policy_loss(**inputs)
    # verl divides a sequence's sum by its length + 1e-8
    for mode, tolerance in (("token", 1e-12), ("sequence_mean", 1e-8), ("sequence_sum", 1e-12)):
        close(aggregate_loss(per_token, mask, mode), case["expected"][f"loss_{mode}"], tolerance)


@golden("value_loss")
def test_value_loss_agrees_with_other_codebases(case):
    inputs = tensors(case["inputs"])
    per_token = clipped_value_loss(
        inputs["values"], inputs["old_values"], inputs["returns"], inputs["cliprange_value"]
    )
    close(aggregate_loss(per_token, inputs["response_mask"], "token"), case["expected"]["loss"])


@golden("kl")
@pytest.mark.parametrize(("estimator", "tolerance"), [("k1", 1e-12), ("k2", 1e-12), ("k3", 1e-8)])
def test_kl_estimators_agree_with_other_codebases(case, estimator, tolerance):
    kl = kl_estimate(**tensors(case["inputs"]), estimator=estimator)
    close(kl, case["expected"][estimator], tolerance)


@golden("whiten")
def test_whiten_agrees_with_other_codebases(case):
    inputs = tensors(case["inputs"])
    mask = inputs["response_mask"].bool()
    whitened = whiten(inputs["values"], inputs["response_mask"])
    close(whitened[mask], torch.tensor(case["expected"]["bessel"], dtype=torch.float64)[mask], 1e-8)
    assert not whitened[~mask].any()


# ---- generalised advantage estimation ----


def counted(row, mask):
    return [x for x, counts in zip(row.tolist(), mask.tolist()) if counts]


def by_double_sum(rewards, values, gamma, lam):
    """Âₜ = Σₗ (γλ)ˡ (rₜ₊ₗ + γ·V(sₜ₊ₗ₊₁) − V(sₜ₊ₗ)) over the tokens that count, one list entry each."""
    tokens, after = len(rewards), [*values[1:], 0.0]
    return [
        sum((gamma * lam) ** (k - t) * (rewards[k] + gamma * after[k] - values[k]) for k in range(t, tokens))
        for t in range(tokens)
    ]


@pytest.mark.parametrize(("gamma", "lam"), list(itertools.product([1.0, 0.9, 0.0], [1.0, 0.95, 0.5, 0.0])))
def test_gae_equals_the_double_sum_over_unmasked_tokens(gamma, lam):
    rewards, values = normal(*MASK.shape, seed=1), normal(*MASK.shape, seed=2)
    advantages, returns = gae(rewards, values, MASK, gamma, lam)
    for row, mask in enumerate(MASK.bool()):
        r, v = counted(rewards[row], mask), counted(values[row], mask)
        expected = torch.tensor(by_double_sum(r, v, gamma, lam), dtype=torch.float64)
        close(advantages[row][mask], expected)
        close(returns[row][mask], expected + values[row][mask])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_with_lambda_one_is_monte_carlo_minus_values(gamma):
    rewards, values = normal(*MASK.shape, seed=3), normal(*MASK.shape, seed=4)
    advantages, returns = gae(rewards, values, MASK, gamma, 1.0)
    for row, mask in enumerate(MASK.bool()):
        monte_carlo, to_come = [], 0.0
        for reward in reversed(counted(rewards[row], mask)):
            to_come = reward + gamma * to_come
            monte_carlo.insert(0, to_come)
        close(returns[row][mask], monte_carlo)
        close(advantages[row][mask], torch.tensor(monte_carlo, dtype=torch.float64) - values[row][mask])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_with_lambda_zero_is_the_td_residual(gamma):
    rewards, values = normal(*MASK.shape, seed=5), normal(*MASK.shape, seed=6)
    advantages, _ = gae(rewards, values, MASK, gamma, 0.0)
    for row, mask in enumerate(MASK.bool()):
        r, v = rewards[row][mask], values[row][mask]
        close(advantages[row][mask], r + gamma * torch.cat([v[1:], v.new_zeros(1)]) - v)


def test_gae_with_lambda_per_row_equals_gae_row_by_row():
    rewards, values, lam = normal(*MASK.shape, seed=7), normal(*MASK.shape, seed=8), torch.linspace(0, 1, len(MASK))
    together = gae(rewards, values, MASK, 0.97, lam.double())
    for row in range(len(MASK)):
        one = slice(row, row + 1)
        alone = gae(rewards[one], values[one], MASK[one], 0.97, float(lam[row]))
        close(together[0][one], alone[0])
        close(together[1][one], alone[1])


def test_gae_does_not_read_masked_positions():
    rewards, values = normal(*MASK.shape, seed=9), normal(*MASK.shape, seed=10)
    expected = gae(rewards, values, MASK, 0.97, 0.9)
    for seed in (1, 2):
        actual = gae(garbage(rewards, MASK, seed), garbage(values, MASK, seed + 10), MASK, 0.97, 0.9)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize(("left", "right"), [(0, 3), (3, 0), (2, 2)])
def test_padding_never_changes_gae(left, right):
    rewards, values = normal(*MASK.shape, seed=11), normal(*MASK.shape, seed=12)

    def padded(x, fill):
        return torch.nn.functional.pad(x, (left, right), value=fill)

    expected = gae(rewards, values, MASK, 0.97, 0.9)
    actual = gae(padded(rewards, 7.0), padded(values, -5.0), padded(MASK, 0), 0.97, 0.9)
    for with_padding, without in zip(actual, expected):
        assert torch.equal(with_padding, padded(without, 0.0))


def test_gae_of_a_masked_row_is_zero():
    advantages, returns = gae(normal(1, 4), normal(1, 4), torch.zeros(1, 4), 1.0, 0.95)
    assert not advantages.any()
    assert not returns.any()


def test_gae_with_equal_lambdas_equals_gae_with_a_number():
    rewards, values = normal(*MASK.shape, seed=13), normal(*MASK.shape, seed=14)
    expected = gae(rewards, values, MASK, 0.97, 0.95)
    actual = gae(rewards, values, MASK, 0.97, torch.full((len(MASK),), 0.95, dtype=torch.float64))
    for of_tensor, of_number in zip(actual, expected):
        close(of_tensor, of_number)


def test_critic_lambda_of_one_gives_monte_carlo_targets():
    rewards, values = normal(*MASK.shape, seed=15), normal(*MASK.shape, seed=16)
    lam = length_adaptive_lambda(MASK.double(), alpha=0.5)
    advantages, coupled_returns = gae(rewards, values, MASK, 1.0, lam)
    _, returns = gae(rewards, values, MASK, 1.0, 1.0)
    to_come = (rewards * MASK).flip(1).cumsum(1).flip(1)
    close(returns, to_come * MASK)
    assert (coupled_returns - returns).abs().max() > 0.1
    close(advantages, (coupled_returns - values) * MASK)


# ---- length-adaptive lambda ----


def test_length_adaptive_lambda_by_hand():
    # lengths 7, 4, 5, 4, 3, 1 of the rows of MASK
    lam = length_adaptive_lambda(MASK.double(), alpha=0.25)
    close(lam, [1 - 4 / 7, 0.0, 1 - 4 / 5, 0.0, 0.0, 0.0])
    close(length_adaptive_lambda(torch.ones(1, 1000, dtype=torch.float64), alpha=0.05), [0.98])


def test_length_adaptive_lambda_sums_gae_weights_to_a_share():
    alpha = 0.05
    for length in (100, 1000):
        lam = length_adaptive_lambda(torch.ones(1, length, dtype=torch.float64), alpha)
        weights = lam ** torch.arange(100 * length)
        close(weights.sum(), alpha * length, 1e-9)


def test_length_adaptive_lambda_stays_between_zero_and_one():
    mask = torch.tensor([[0] * 6, [1] * 6])
    for alpha in (1e-9, 0.05, 1.0, 1e9, math.inf):
        lam = length_adaptive_lambda(mask, alpha)
        assert lam.shape == (2,)
        assert lam[0] == 0
        assert 0 <= lam[1] <= 1


def test_length_adaptive_lambda_counts_tokens_and_not_positions():
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1, 0, 1]])
    close(length_adaptive_lambda(mask.double(), 1.0), [0.8, 0.8])
    for kind in (torch.bool, torch.int64, torch.float32):
        torch.testing.assert_close(length_adaptive_lambda(mask.to(kind), 1.0), torch.tensor([0.8, 0.8]))


def test_length_adaptive_gae_becomes_monte_carlo_for_large_alpha():
    rewards, values = normal(*MASK.shape, seed=17), normal(*MASK.shape, seed=18)
    monte_carlo, _ = gae(rewards, values, MASK, 1.0, 1.0)

    def distance(alpha):
        advantages, _ = gae(rewards, values, MASK, 1.0, length_adaptive_lambda(MASK.double(), alpha))
        return (advantages - monte_carlo).abs().max().item()

    assert distance(1.0) > 0.1
    assert distance(1e9) < 1e-7
    assert distance(math.inf) == 0


# ---- log-probabilities of whole sequences ----


def near_policies(seed=1):
    """Log-probabilities, with gradients, and old ones near them: no ratio of a sequence is outside 1 ± 0.3."""
    old_logprobs = -normal(*MASK.shape, seed=seed).abs()
    logprobs = (old_logprobs + 0.1 * normal(*MASK.shape, seed=seed + 1)).requires_grad_()
    return logprobs, old_logprobs


def test_sequence_ratio_is_the_geometric_mean_of_token_ratios():
    logprobs, old_logprobs = near_policies()
    log_ratio = sequence_logprobs(logprobs, old_logprobs, MASK) - old_logprobs
    for row, mask in enumerate(MASK.bool()):
        ratios = (logprobs[row] - old_logprobs[row])[mask].exp()
        close(log_ratio[row].exp(), (ratios.prod() ** (1 / len(ratios))).expand(MASK.shape[1]))


def test_sequence_logprobs_of_one_token_equal_the_tokens():
    logprobs, old_logprobs = near_policies()
    mask = torch.nn.functional.one_hot(torch.arange(len(MASK)), MASK.shape[1])
    close(sequence_logprobs(logprobs, old_logprobs, mask)[mask.bool()], logprobs[mask.bool()])


def test_sequence_logprobs_without_change_equal_the_old_ones():
    old_logprobs = near_policies()[1].float()
    assert torch.equal(sequence_logprobs(old_logprobs, old_logprobs, MASK), old_logprobs)
    assert torch.equal(sequence_logprobs(old_logprobs + 1, old_logprobs, 0 * MASK), old_logprobs)


def test_turn_ratio_is_the_sequence_ratio_of_each_turn():
    logprobs, old_logprobs = near_policies()
    actual, counts = turn_logprobs(logprobs, old_logprobs, MASK), MASK.bool()
    starts, first = turn_starts(MASK)
    for row, start in starts.nonzero().tolist():
        turn = counts & (first == start) & (torch.arange(len(MASK)) == row)[:, None]
        close(actual[turn], sequence_logprobs(logprobs, old_logprobs, turn)[turn])
    for rows, expected in (([0, 1, 2, 5], sequence_logprobs(logprobs, old_logprobs, MASK)), ([4, 5], logprobs)):
        close(actual[rows][counts[rows]], expected[rows][counts[rows]])


def test_turns_with_numbers_need_no_token_between_them():
    starts, first = turn_starts(torch.tensor([[1, 1, 2, 0, 3, 4], [0, 1, 2, 2, 0, 0]]))
    assert starts.long().tolist() == [[1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0]]
    assert first.tolist() == [[0, 0, 2, 2, 4, 5], [0, 1, 2, 2, 2, 2]]


@pytest.mark.parametrize("mode", ["token", "sequence_mean"])
def test_sequence_ratios_have_their_closed_form_gradient(mode):
    """∂L/∂log πₜ = −(1/|y|)·s·Â for each token of y: the tokens of a response share one ratio s and one advantage."""
    logprobs, old_logprobs = near_policies()
    of_sequence = normal(len(MASK), 1, seed=3)
    per_token = clipped_policy_loss(
        sequence_logprobs(logprobs, old_logprobs, MASK), old_logprobs, of_sequence.expand(MASK.shape), 0.5, 0.5
    )
    aggregate_loss(per_token, MASK, mode).backward()
    lengths = MASK.double().sum(1, keepdim=True)
    ratio = (((logprobs.detach() - old_logprobs) * MASK).sum(1, keepdim=True) / lengths).exp()
    share = 1 / lengths.sum() if mode == "token" else 1 / (lengths * len(MASK))
    close(logprobs.grad, -ratio * of_sequence * share * MASK)


def test_clipped_sequence_has_no_gradient_at_any_token():
    logprobs, old_logprobs = near_policies()
    mean = (((logprobs - old_logprobs) * MASK).sum(1) / MASK.sum(1)).detach()
    threshold = mean.sort().values[2:4].mean()  # half of the sequences are beyond it
    advantages = torch.ones_like(old_logprobs)
    levelled = sequence_logprobs(logprobs, old_logprobs, MASK)
    loss = clipped_policy_loss(levelled, old_logprobs, advantages, 0.9, (threshold.exp() - 1).item())
    aggregate_loss(loss, MASK, "token").backward()
    alive = logprobs.grad.abs() > 0
    assert torch.equal(alive, MASK.bool() & (mean < threshold)[:, None])


@pytest.mark.parametrize("function", [sequence_logprobs, turn_logprobs])
def test_ratios_of_several_tokens_do_not_read_masked_positions(function):
    logprobs, old_logprobs = near_policies()
    expected = function(logprobs, old_logprobs, MASK)[MASK.bool()]
    for seed in (1, 2):
        other = garbage(logprobs.detach(), MASK, seed).requires_grad_()
        actual = function(other, garbage(old_logprobs, MASK, seed + 10), MASK)
        assert torch.equal(actual[MASK.bool()], expected)
        actual.sum().backward()
        assert not other.grad[~MASK.bool()].any()
        assert other.grad[MASK.bool()].all()


# ---- policy loss ----


def test_policy_loss_at_ratio_one_has_the_gradient_of_reinforce():
    logits = normal(*MASK.shape, 5, seed=1).requires_grad_()
    tokens = torch.randint(5, MASK.shape, generator=torch.Generator().manual_seed(2))
    advantages = normal(*MASK.shape, seed=3)
    logprobs = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    per_token = clipped_policy_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.2)
    close(per_token, -advantages)
    aggregate_loss(per_token, MASK, "token").backward()
    # ∇ log π(y) by the logits is onehot(y) − π
    slope = torch.nn.functional.one_hot(tokens, 5) - logits.detach().softmax(-1)
    close(logits.grad, -(advantages * MASK)[..., None] * slope / MASK.sum())


LOG_RATIOS = torch.tensor([-3.0, -0.5, -0.15, -0.01, 0.01, 0.15, 0.25, 0.5, 1.0, 1.2, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_clipping_stops_the_gradient_exactly_beyond_its_range(advantage, dual_clip):
    """ρ has to stop above 1 + 0.28 where that is rewarded, below 1 − 0.1 where it is punished, nowhere else."""
    logprobs = LOG_RATIOS.clone()[None].requires_grad_()
    advantages = torch.full_like(logprobs, advantage)
    loss = clipped_policy_loss(logprobs, torch.zeros_like(logprobs), advantages, 0.1, 0.28, dual_clip)
    loss.sum().backward()
    ratio = LOG_RATIOS.exp()
    dead = ratio > 1.28 if advantage > 0 else ratio < 0.9
    if dual_clip is not None and advantage < 0:
        dead |= ratio > dual_clip
    assert dead.any()
    assert not dead.all()
    close(logprobs.grad[0], torch.where(dead, 0, -advantage * ratio))


def test_policy_loss_beyond_the_clip_range_equals_its_edge():
    ratio = torch.tensor([[0.5, 0.95, 1.1, 2.0]], dtype=torch.float64)
    for advantage, expected in ((2.0, [1.0, 1.9, 2.2, 2.56]), (-2.0, [1.8, 1.9, 2.2, 4.0])):
        advantages = torch.full_like(ratio, advantage)
        loss = clipped_policy_loss(ratio.log(), torch.zeros_like(ratio), advantages, 0.1, 0.28)
        close(loss[0], torch.tensor(expected) * (-1 if advantage > 0 else 1), 1e-6)


def test_dual_clip_bounds_only_negative_advantages():
    log_ratios, advantages = 2 * normal(50, 20, seed=4), normal(50, 20, seed=5)
    plain = clipped_policy_loss(log_ratios, torch.zeros_like(log_ratios), advantages, 0.2, 0.2)
    dual = clipped_policy_loss(log_ratios, torch.zeros_like(log_ratios), advantages, 0.2, 0.2, dual_clip=3.0)
    bounded = (advantages < 0) & (log_ratios.exp() > 3)
    assert bounded.any()
    assert torch.equal(dual[~bounded], plain[~bounded])
    close(dual[bounded], (-3 * advantages)[bounded])
    assert (dual[bounded] < plain[bounded]).all()


def test_log_ratios_change_only_beyond_their_bound():
    log_ratios = torch.tensor([[-1e4, -100.0, -21.0, -19.0, 0.0, 19.0, 21.0, 100.0, 1e4]], dtype=torch.float64)
    logprobs, old_logprobs = log_ratios.clone().requires_grad_(), torch.zeros_like(log_ratios)
    advantages = torch.full_like(log_ratios, -1.0)  # so that a large ratio is not clipped
    loss = clipped_policy_loss(logprobs, old_logprobs, advantages, 1.0, 0.2)
    loss.sum().backward()
    within = log_ratios.abs() <= 20
    edge = (20 * log_ratios.sign()).exp()
    close(loss, torch.where(within, log_ratios.exp(), edge))
    close(logprobs.grad, torch.where(within, log_ratios.exp(), 0))


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_distant_policies_give_finite_losses_in_float32(advantage, dual_clip):
    logprobs = torch.tensor([[-1e4, -90.0, 0.0, 50.0, 90.0, 1e4]], requires_grad=True)
    advantages = torch.full((1, 6), advantage)
    loss = clipped_policy_loss(logprobs, torch.zeros(1, 6), advantages, 0.2, 0.2, dual_clip)
    (loss * torch.tensor([[0, 1, 1, 1, 1, 0]])).sum().backward()
    assert loss.isfinite().all()
    assert logprobs.grad.norm().isfinite()


# ---- value loss ----


def value_loss_and_slope(value, old, target, cliprange):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old_values, returns = torch.full_like(values, old), torch.full_like(values, target)
    loss = clipped_value_loss(values, old_values.detach(), returns.detach(), cliprange)
    loss.sum().backward()
    return loss.item(), values.grad.item()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        pytest.param(0.1, 0.0, 2.0, 0.5 * 1.9**2, -1.9, id="within the range: the squared error"),
        pytest.param(1.0, 0.0, 2.0, 0.5 * 1.8**2, 0.0, id="moved far towards the return: held back"),
        pytest.param(-1.0, 0.0, -2.0, 0.5 * 1.8**2, 0.0, id="moved far down towards the return: held back"),
        pytest.param(1.0, 0.0, -1.0, 0.5 * 2.0**2, 2.0, id="moved far from the return: brought back"),
        pytest.param(-1.0, 0.0, 1.0, 0.5 * 2.0**2, -2.0, id="moved far down from the return: brought back"),
    ],
)
def test_value_loss_clips_the_step_from_the_old_value(value, old, target, loss, slope):
    assert value_loss_and_slope(value, old, target, 0.2) == pytest.approx((loss, slope), abs=1e-12)
    # the same where everything is shifted: only differences matter
    assert value_loss_and_slope(value + 5, old + 5, target + 5, 0.2) == pytest.approx((loss, slope), abs=1e-12)


def test_value_loss_without_a_clip_range_is_half_the_squared_error():
    values, old_values, returns = normal(4, 5, seed=1), normal(4, 5, seed=2), normal(4, 5, seed=3)
    close(clipped_value_loss(values, old_values, returns, None), 0.5 * (values - returns) ** 2)
    wide = clipped_value_loss(values, old_values, returns, 1e6)
    close(wide, clipped_value_loss(values, old_values, returns, None))


def test_clipping_never_lowers_the_value_loss():
    values, old_values, returns = normal(40, 5, seed=1), normal(40, 5, seed=2), normal(40, 5, seed=3)
    clipped, plain = (clipped_value_loss(values, old_values, returns, c) for c in (0.2, None))
    assert (clipped >= plain).all()
    assert (clipped > plain).any()


# ---- KL estimators: exact expectations over a small vocabulary ----


def policies():
    """Log-probabilities of two policies over nine tokens, the first with gradients to its logits."""
    logits = normal(3, 9, seed=1).requires_grad_()
    return logits, logits.log_softmax(-1), normal(3, 9, seed=2).log_softmax(-1)


def exact_kl(policy, reference):
    return (policy.exp() * (policy - reference)).sum(-1)


def expected_estimate(policy, reference, estimator):
    return (policy.exp() * kl_estimate(policy, reference, estimator)).sum(-1)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    _, policy, reference = policies()
    close(expected_estimate(policy, reference, estimator), exact_kl(policy, reference))


def test_k2_is_biased():
    _, policy, reference = policies()
    bias = expected_estimate(policy, reference, "k2") / exact_kl(policy, reference) - 1
    assert (bias.abs() > 0.01).all()


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k3", True), ("k2", False)])
def test_sampled_mean_is_the_exact_kl_within_four_errors(estimator, unbiased):
    policy, reference = (x.detach()[0] for x in policies()[1:])
    samples = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(3))
    estimates = kl_estimate(policy[samples], reference[samples], estimator)
    standard_errors = (estimates.mean() - exact_kl(policy, reference)) / (estimates.std() / len(samples) ** 0.5)
    assert (abs(standard_errors.item()) < 4) == unbiased


def test_k2_approximates_the_kl_of_near_policies():
    logits, direction = normal(1, 9, seed=1), normal(1, 9, seed=2)
    policy, reference = logits.log_softmax(-1), (logits + 1e-3 * direction).log_softmax(-1)
    k1, k2 = ((policy.exp() * kl_estimate(policy, reference, estimator)).sum() for estimator in ("k1", "k2"))
    assert k2.item() == pytest.approx(k1.item(), rel=1e-2)


@pytest.mark.parametrize(("estimator", "gradient_of"), [("k1", "nothing"), ("k2", "reverse KL"), ("k3", "forward KL")])
def test_kl_estimators_have_their_expected_gradients(estimator, gradient_of):
    logits, policy, reference = policies()
    # samples carry no gradient: the probabilities with which they come are constants
    (policy.detach().exp() * kl_estimate(policy, reference, estimator)).sum().backward()
    p, q = policy.detach().exp(), reference.exp()
    kl = (p * (p / q).log()).sum(-1, keepdim=True)
    expected = {
        "nothing": torch.zeros_like(p),
        "reverse KL": p * ((p / q).log() - kl),  # ∂KL(π ‖ π_ref)/∂logits
        "forward KL": p - q,  # ∂KL(π_ref ‖ π)/∂logits
    }
    close(logits.grad, expected[gradient_of])
    divergence = {
        "nothing": lambda policy: 0 * policy.sum(),
        "reverse KL": lambda policy: exact_kl(policy, reference).sum(),
        "forward KL": lambda policy: exact_kl(reference, policy).sum(),
    }
    close(logits.grad, torch.autograd.grad(divergence[gradient_of](logits.log_softmax(-1)), logits)[0])


def test_k2_and_k3_are_zero_only_for_equal_policies():
    logprobs, ref_logprobs = normal(20, 20, seed=1), normal(20, 20, seed=2)
    for estimator in ("k2", "k3"):
        assert (kl_estimate(logprobs, ref_logprobs, estimator) > 0).all()
        assert not kl_estimate(logprobs, logprobs, estimator).any()
    assert not kl_estimate(logprobs, logprobs, "k1").any()


def test_k3_keeps_precision_for_nearly_equal_policies():
    difference = torch.tensor([[1e-3, -1e-3, 1e-4]])
    k3 = kl_estimate(difference, torch.zeros_like(difference), "k3")
    torch.testing.assert_close(k3, 0.5 * difference**2, rtol=1e-2, atol=0)


# ---- masked statistics ----


def test_masked_moments_equal_those_of_unmasked_values():
    x = normal(*MASK.shape, seed=1)
    close(masked_mean(x, MASK), x[MASK.bool()].mean())
    close(masked_var(x, MASK), x[MASK.bool()].var())
    for function in (masked_mean, masked_var):
        close(function(garbage(x, MASK, 2), MASK), function(x, MASK))


def test_statistics_of_too_few_values_are_zero():
    x = normal(2, 3)
    nothing, one = torch.zeros(2, 3), torch.tensor([[0, 0, 0], [0, 1, 0]])
    assert masked_mean(x, nothing) == 0
    assert masked_var(x, nothing) == 0
    assert masked_mean(x, one) == x[1, 1]
    assert masked_var(x, one) == 0
    assert not whiten(x, one).any()


def test_whitened_values_have_mean_zero_and_bessel_variance_one():
    x = 3 + 5 * normal(*MASK.shape, seed=1)
    whitened = whiten(garbage(x, MASK, 2), MASK)
    counts = whitened[MASK.bool()]
    close(counts.mean(), 0.0)
    close(counts.var(), 1.0, 1e-8)
    assert not whitened[~MASK.bool()].any()
    close(whitened, whiten(x, MASK))
    close(whitened, whiten(7 - (-2) * x, MASK), 1e-8)  # shift and scale do not matter


def test_scaling_to_unit_variance_leaves_the_mean():
    x = 3 + 5 * normal(*MASK.shape, seed=1)
    scaled = scale_to_unit_variance(garbage(x, MASK, 2), MASK)
    close(scaled[MASK.bool()].mean(), x[MASK.bool()].mean())
    close(scaled[MASK.bool()].var(), 1.0, 1e-8)
    assert not scaled[~MASK.bool()].any()


def on_two_processes(function, *parts):
    """Run `function(part, all_sum)` as two processes would, with an `all_sum` that waits for the other one."""
    barrier, given, results = threading.Barrier(2, timeout=10), [None, None], [None, None]

    def process(rank):
        def all_sum(x):
            given[rank] = x
            barrier.wait()
            total = given[0] + given[1]
            barrier.wait()
            return total

        results[rank] = function(parts[rank], all_sum)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("function", [masked_mean, masked_var, whiten, scale_to_unit_variance])
@pytest.mark.parametrize("cut", [1, 4])
def test_moments_over_ranks_equal_those_of_the_whole_batch(function, cut):
    x = 2 + normal(*MASK.shape, seed=1)
    parts = ((x[:cut], MASK[:cut]), (x[cut:], MASK[cut:]))
    first, second = on_two_processes(lambda part, all_sum: function(*part, all_sum), *parts)
    whole = function(x, MASK)
    if whole.ndim:
        close(torch.cat([first, second]), whole)
    else:
        close(first, whole)
        close(second, whole)


# ---- aggregation ----

MODES = ("token", "sequence_mean", "sequence_sum")


@pytest.mark.parametrize(
    ("mode", "expected"), [("token", 18 / 4), ("sequence_mean", (12 / 3 + 6) / 2), ("sequence_sum", 18 / 2)]
)
def test_aggregation_by_hand(mode, expected):
    # sums 12 and 6, lengths 3 and 1; the last row has no token that counts and is no sequence
    per_token = torch.tensor([[1.0, 2.0, 9.0], [6.0, 50.0, 50.0], [50.0, 50.0, 50.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    close(aggregate_loss(per_token, mask, mode), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [[6], [3, 3], [1, 5], [2, 1, 3], [1] * 6])
def test_split_losses_add_up_with_a_common_denominator(mode, cuts):
    per_token = normal(*MASK.shape, seed=1).requires_grad_()
    denominator = MASK.sum() if mode == "token" else len(MASK)
    parts = zip(per_token.split(cuts), MASK.split(cuts))
    total = sum(aggregate_loss(part, mask, mode, denominator=denominator) for part, mask in parts)
    whole = aggregate_loss(per_token, MASK, mode)
    close(total, whole)
    close(*(torch.autograd.grad(loss, per_token)[0] for loss in (total, whole)))


@pytest.mark.parametrize("mode", MODES)
def test_padding_never_changes_the_loss(mode):
    per_token = normal(*MASK.shape, seed=1)
    padded, mask = (torch.nn.functional.pad(x, (2, 3), value=fill) for x, fill in ((per_token, 9.0), (MASK, 0)))
    expected = aggregate_loss(per_token, MASK, mode)
    close(aggregate_loss(padded, mask, mode), expected)
    close(aggregate_loss(garbage(per_token, MASK, 2), MASK, mode), expected)


@pytest.mark.parametrize("mode", MODES)
def test_loss_of_no_token_is_zero(mode):
    assert aggregate_loss(normal(2, 3), torch.zeros(2, 3), mode) == 0
    assert aggregate_loss(normal(2, 3), torch.zeros(2, 3), mode, denominator=torch.tensor(7.0)) == 0


# ---- errors ----


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda a, b: gae(a, a, b, 1.0, 1.0), ["rewards", "values", "response_mask"]),
        (lambda a, b: gae(a, b, a, 1.0, 1.0), ["rewards", "values", "response_mask"]),
        (lambda a, b: clipped_policy_loss(a, a, b, 0.2, 0.2), ["logprobs", "old_logprobs", "advantages"]),
        (lambda a, b: sequence_logprobs(a, b, a), ["logprobs", "old_logprobs", "response_mask"]),
        (lambda a, b: sequence_logprobs(a, a, b), ["logprobs", "old_logprobs", "response_mask"]),
        (lambda a, b: turn_logprobs(a, a, b), ["logprobs", "old_logprobs", "turns"]),
        (lambda a, b: clipped_value_loss(a, b, a, 0.2), ["values", "old_values", "returns"]),
        (lambda a, b: kl_estimate(a, b, "k1"), ["logprobs", "ref_logprobs"]),
        (lambda a, b: masked_mean(a, b), ["x", "mask"]),
        (lambda a, b: masked_var(a, b), ["x", "mask"]),
        (lambda a, b: whiten(a, b), ["x", "mask"]),
        (lambda a, b: scale_to_unit_variance(a, b), ["x", "mask"]),
        (lambda a, b: aggregate_loss(a, b, "token"), ["per_token", "response_mask"]),
    ],
)
def test_broadcastable_shapes_raise(function, names):
    with pytest.raises(ValueError, match="one shape") as caught:
        function(torch.ones(2, 3), torch.ones(1, 3))
    message = str(caught.value)
    assert all(f"'{name}'" in message for name in names)
    assert "(2, 3)" in message
    assert "(1, 3)" in message


@pytest.mark.parametrize("level", [0.0, 7.3, -1e4])
def test_equal_returns_explain_nothing(level):
    mask, returns = torch.ones(4, 5, dtype=torch.bool), torch.full((4, 5), level)
    rounding = returns * (1 + 1e-7 * torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))
    for targets in (returns, rounding):
        assert explained_variance(targets, targets, mask) == 0
    small = 1e-5 * torch.arange(20.0).reshape(4, 5)  # of a reward of any scale
    assert explained_variance(small, small, mask) == 1
    assert explained_variance(torch.zeros(4, 5), small, mask).abs() < 1e-6


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_final_value_is_that_of_a_state_that_pays_it(lam):
    rewards, values, final = normal(*MASK.shape), normal(*MASK.shape, seed=1), normal(len(MASK), seed=2)
    actual = gae(rewards, values, MASK, 0.9, lam, final)
    with_state = [torch.cat([x, final[:, None]], 1) for x in (rewards, values)]
    expected = gae(*with_state, torch.nn.functional.pad(MASK, (0, 1), value=1), 0.9, lam)
    for one, other in zip(actual, expected):
        close(one, other[:, :-1])
    assert all(map(torch.equal, gae(rewards, values, MASK, 0.9, lam, 0 * final), gae(rewards, values, MASK, 0.9, lam)))


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_returns_of_a_cut_chain_equal_those_of_the_whole(lam):
    rewards, mask = normal(1, 9), torch.ones(1, 9)
    _, values = gae(rewards, torch.zeros(1, 9).double(), mask, 0.9, 1.0)  # exact
    for cut in (1, 5):
        first = (x[:, :cut] for x in (rewards, values, mask))
        advantages, returns = gae(*first, 0.9, lam, values[:, cut])
        close(advantages, torch.zeros(1, cut))
        close(returns, values[:, :cut])


def test_gae_takes_one_operation_per_token():
    counts = []
    for width in (8, 40):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            gae(normal(3, width), normal(3, width, seed=1), torch.ones(3, width), 1.0, 0.95)
        views = ("aten::select", "aten::as_strided")
        counts.append(sum(event.name.startswith("aten::") and event.name not in views for event in profiler.events()))
    assert counts[1] - counts[0] == 32
