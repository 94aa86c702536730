"""PPO's mathematics: known answers of other codebases, closed forms, reductions, recomputation
by hand."""

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trl_ppo_ext.ppo_math import (
    Moments,
    aggregate_loss,
    at_turn_ends,
    clipped_policy_loss,
    clipped_value_loss,
    dr_grpo_advantages,
    explained_variance,
    gae,
    grpo_advantages,
    kl_estimate,
    length_adaptive_lambda,
    masked_mean,
    masked_var,
    rloo_advantages,
    sequence_logprobs,
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
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance
    )


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def garbage(like, mask, seed):
    """`like` with other numbers at masked positions."""
    return torch.where(mask.bool(), like, 100 * normal(*like.shape, seed=seed))


def tensors(inputs):
    return {
        k: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v
        for k, v in inputs.items()
    }


# ---- known answers ----


def golden(function):
    cases = [(index, case) for index, case in enumerate(GOLDEN) if case["function"] == function]
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=f"case{index}") for index, case in cases]
    )


@golden("gae")
def test_gae_agrees_with_other_codebases(case):
    advantages, returns = gae(**tensors(case["inputs"]))
    mask = torch.tensor(case["inputs"]["response_mask"]).bool()
    for actual, expected in (
        (advantages, case["expected"]["advantages"]),
        (returns, case["expected"]["returns"]),
    ):
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
    whitened, _ = whiten(inputs["values"], inputs["response_mask"])
    close(whitened[mask], torch.tensor(case["expected"]["bessel"], dtype=torch.float64)[mask], 1e-8)
    assert not whitened[~mask].any()


# ---- generalised advantage estimation ----


def test_gae_with_lambda_per_row_equals_gae_row_by_row():
    rewards = normal(*MASK.shape, seed=7)
    values = normal(*MASK.shape, seed=8)
    lam = torch.linspace(0, 1, len(MASK))
    together = gae(rewards, values, MASK, 0.97, lam.double())
    for row in range(len(MASK)):
        one = slice(row, row + 1)
        alone = gae(rewards[one], values[one], MASK[one], 0.97, float(lam[row]))
        close(together[0][one], alone[0])
        close(together[1][one], alone[1])


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


def test_length_adaptive_lambda_counts_tokens_and_not_positions():
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1, 0, 1]])
    close(length_adaptive_lambda(mask.double(), 1.0), [0.8, 0.8])
    for kind in (torch.bool, torch.int64, torch.float32):
        torch.testing.assert_close(
            length_adaptive_lambda(mask.to(kind), 1.0), torch.tensor([0.8, 0.8])
        )


# ---- log-probabilities of whole sequences ----


def near_policies(seed=1):
    """Log-probabilities, with gradients, and old ones near them: no ratio of a sequence is
    outside 1 ± 0.3."""
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


def test_turns_with_numbers_need_no_token_between_them():
    starts, first = turn_starts(torch.tensor([[1, 1, 2, 0, 3, 4], [0, 1, 2, 2, 0, 0]]))
    assert starts.long().tolist() == [[1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0]]
    assert first.tolist() == [[0, 0, 2, 2, 4, 5], [0, 1, 2, 2, 2, 2]]


def test_discounts_at_turn_ends_may_differ_within_turns():
    turns = torch.tensor([[1, 1, 2, 0, 3, 3], [0, 1, 2, 2, 0, 0]])
    lam = torch.tensor([3.0, 4])
    within = torch.zeros(2)
    assert (at_turn_ends(lam, turns, within) * turns.bool()).tolist() == [
        [0, 3, 3, 0, 0, 3],
        [0, 4, 0, 4, 0, 0],
    ]
    assert torch.equal(
        at_turn_ends(5.0, turns), torch.where(at_turn_ends(lam, turns, within) > 0, 5.0, 1.0)
    )


def test_discounts_at_turn_ends_give_the_advantages_of_turns():
    """Less what later tokens of a turn know."""
    rewards = normal(len(MASK), 7)
    values = normal(len(MASK), 7, seed=1)
    after = normal(len(MASK), seed=2)
    gamma = 0.9 + 0 * after
    lam = normal(len(MASK), seed=3).sigmoid()
    # those of the first row have nothing between them
    turns = MASK * torch.tensor([1, 1, 2, 2, 2, 3, 3])
    starts, first = turn_starts(turns)
    earned = (rewards * MASK).cumsum(1) - rewards * MASK
    sums = torch.zeros_like(rewards).scatter_add(1, first, rewards * MASK)
    of_turns = gae(sums, values, starts, 0.9, lam, after)[0].gather(1, first)
    known = earned - earned.gather(1, first) + values - values.gather(1, first)
    actual, _ = gae(
        rewards, values, MASK, at_turn_ends(gamma, turns), at_turn_ends(lam, turns), after
    )
    close(actual, (of_turns - known) * MASK)
    close(actual[starts], of_turns[starts])
    # turns of a token, and one turn, in which nothing follows its end
    for turns, discounts in ((MASK.cumsum(1) * MASK, (0.9, lam)), (MASK, (1.0, 1.0))):
        actual, _ = gae(rewards, values, MASK, at_turn_ends(gamma, turns), at_turn_ends(lam, turns))
        # without a hole
        if discounts[1] is lam:
            rows = slice(None)
        else:
            rows = [0, 1, 2, 5]
        close(actual[rows], gae(rewards, values, MASK, *discounts)[0][rows])


@pytest.mark.parametrize("mode", ["token", "sequence_mean"])
def test_sequence_ratios_have_their_closed_form_gradient(mode):
    """∂L/∂log πₜ = −(1/|y|)·s·Â for each token of y: the tokens of a response share one ratio s
    and one advantage."""
    logprobs, old_logprobs = near_policies()
    of_sequence = normal(len(MASK), 1, seed=3)
    per_token = clipped_policy_loss(
        sequence_logprobs(logprobs, old_logprobs, MASK),
        old_logprobs,
        of_sequence.expand(MASK.shape),
        0.5,
        0.5,
    )
    aggregate_loss(per_token, MASK, mode).backward()
    lengths = MASK.double().sum(1, keepdim=True)
    ratio = (((logprobs.detach() - old_logprobs) * MASK).sum(1, keepdim=True) / lengths).exp()
    if mode == "token":
        share = 1 / lengths.sum()
    else:
        share = 1 / (lengths * len(MASK))
    close(logprobs.grad, -ratio * of_sequence * share * MASK)


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


LOG_RATIOS = torch.tensor(
    [-3.0, -0.5, -0.15, -0.01, 0.01, 0.15, 0.25, 0.5, 1.0, 1.2, 3.0], dtype=torch.float64
)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_clipping_stops_the_gradient_exactly_beyond_its_range(advantage, dual_clip):
    """ρ has to stop above 1 + 0.28 where that is rewarded, below 1 − 0.1 where it is punished,
    nowhere else."""
    logprobs = LOG_RATIOS.clone()[None].requires_grad_()
    advantages = torch.full_like(logprobs, advantage)
    loss = clipped_policy_loss(
        logprobs, torch.zeros_like(logprobs), advantages, 0.1, 0.28, dual_clip
    )
    loss.sum().backward()
    ratio = LOG_RATIOS.exp()
    if advantage > 0:
        dead = ratio > 1.28
    else:
        dead = ratio < 0.9
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
    log_ratios = 2 * normal(50, 20, seed=4)
    advantages = normal(50, 20, seed=5)
    plain = clipped_policy_loss(log_ratios, torch.zeros_like(log_ratios), advantages, 0.2, 0.2)
    dual = clipped_policy_loss(
        log_ratios, torch.zeros_like(log_ratios), advantages, 0.2, 0.2, dual_clip=3.0
    )
    bounded = (advantages < 0) & (log_ratios.exp() > 3)
    assert bounded.any()
    assert torch.equal(dual[~bounded], plain[~bounded])
    close(dual[bounded], (-3 * advantages)[bounded])
    assert (dual[bounded] < plain[bounded]).all()


def test_log_ratios_change_only_beyond_their_bound():
    log_ratios = torch.tensor(
        [[-1e4, -100.0, -21.0, -19.0, 0.0, 19.0, 21.0, 100.0, 1e4]], dtype=torch.float64
    )
    logprobs = log_ratios.clone().requires_grad_()
    old_logprobs = torch.zeros_like(log_ratios)
    advantages = torch.full_like(log_ratios, -1.0)  # so that a large ratio is not clipped
    loss = clipped_policy_loss(logprobs, old_logprobs, advantages, 1.0, 0.2)
    loss.sum().backward()
    within = log_ratios.abs() <= 20
    edge = (20 * log_ratios.sign()).exp()
    close(loss, torch.where(within, log_ratios.exp(), edge))
    close(logprobs.grad, torch.where(within, log_ratios.exp(), 0))


# ---- value loss ----


def value_loss_and_slope(value, old, target, cliprange):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old_values = torch.full_like(values, old)
    returns = torch.full_like(values, target)
    loss = clipped_value_loss(values, old_values.detach(), returns.detach(), cliprange)
    loss.sum().backward()
    return loss.item(), values.grad.item()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        pytest.param(0.1, 0.0, 2.0, 0.5 * 1.9**2, -1.9, id="within the range: the squared error"),
        pytest.param(
            1.0, 0.0, 2.0, 0.5 * 1.8**2, 0.0, id="moved far towards the return: held back"
        ),
        pytest.param(
            -1.0, 0.0, -2.0, 0.5 * 1.8**2, 0.0, id="moved far down towards the return: held back"
        ),
        pytest.param(
            1.0, 0.0, -1.0, 0.5 * 2.0**2, 2.0, id="moved far from the return: brought back"
        ),
        pytest.param(
            -1.0, 0.0, 1.0, 0.5 * 2.0**2, -2.0, id="moved far down from the return: brought back"
        ),
    ],
)
def test_value_loss_clips_the_step_from_the_old_value(value, old, target, loss, slope):
    assert value_loss_and_slope(value, old, target, 0.2) == pytest.approx((loss, slope), abs=1e-12)
    # the same where everything is shifted: only differences matter
    assert value_loss_and_slope(value + 5, old + 5, target + 5, 0.2) == pytest.approx(
        (loss, slope), abs=1e-12
    )


def test_value_loss_without_clipping_is_half_the_squared_error():
    values = normal(4, 5, seed=1)
    old_values = normal(4, 5, seed=2)
    returns = normal(4, 5, seed=3)
    close(clipped_value_loss(values, old_values, returns, None), 0.5 * (values - returns) ** 2)
    wide = clipped_value_loss(values, old_values, returns, 1e6)
    close(wide, clipped_value_loss(values, old_values, returns, None))


# ---- KL estimators: exact expectations over a small vocabulary ----


def policies():
    """Log-probabilities of two policies over nine tokens, the first with gradients to its
    logits."""
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


@pytest.mark.parametrize(
    ("estimator", "gradient_of"), [("k1", "nothing"), ("k2", "reverse KL"), ("k3", "forward KL")]
)
def test_kl_estimators_have_their_expected_gradients(estimator, gradient_of):
    logits, policy, reference = policies()
    # samples carry no gradient: the probabilities with which they come are constants
    (policy.detach().exp() * kl_estimate(policy, reference, estimator)).sum().backward()
    p = policy.detach().exp()
    q = reference.exp()
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
    close(
        logits.grad, torch.autograd.grad(divergence[gradient_of](logits.log_softmax(-1)), logits)[0]
    )


def test_k2_and_k3_are_zero_only_for_equal_policies():
    logprobs = normal(20, 20, seed=1)
    ref_logprobs = normal(20, 20, seed=2)
    for estimator in ("k2", "k3"):
        assert (kl_estimate(logprobs, ref_logprobs, estimator) > 0).all()
        assert not kl_estimate(logprobs, logprobs, estimator).any()
    assert not kl_estimate(logprobs, logprobs, "k1").any()


def test_k3_keeps_precision_for_nearly_equal_policies():
    difference = torch.tensor([[1e-3, -1e-3, 1e-4]])
    k3 = kl_estimate(difference, torch.zeros_like(difference), "k3")
    torch.testing.assert_close(k3, 0.5 * difference**2, rtol=1e-2, atol=0)


# ---- masked statistics ----


def test_statistics_of_too_few_values_are_zero():
    x = normal(2, 3)
    nothing = torch.zeros(2, 3)
    one = torch.tensor([[0, 0, 0], [0, 1, 0]])
    assert masked_mean(x, nothing) == 0
    assert masked_var(x, nothing) == 0
    assert masked_mean(x, one) == x[1, 1]
    assert masked_var(x, one) == 0
    assert not whiten(x, one)[0].any()


def test_sums_of_the_same_numbers_in_another_order_do_not_differ():
    """Seven rewards of 0.1 at other tokens: in float32 0.70000005 or 0.6999999."""
    scores = torch.where(torch.arange(32) % 2 == 0, 0.70000005, 0.6999999)
    assert scores.unique().numel() == 2
    counts = torch.ones(32, dtype=torch.bool)
    for advantages in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        assert not advantages(scores, counts, 4).any()
        # what differs by more does
        assert advantages(scores + 1e-5 * (torch.arange(32) % 4), counts, 4).any()
    assert Moments.of(scores, counts)[0].sample_deviation == 1.0


# ---- aggregation ----


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token", 18 / 4), ("sequence_mean", (12 / 3 + 6) / 2), ("sequence_sum", 18 / 2)],
)
def test_aggregation_by_hand(mode, expected):
    # sums 12 and 6, lengths 3 and 1; the last row has no token that counts and is no sequence
    per_token = torch.tensor([[1.0, 2.0, 9.0], [6.0, 50.0, 50.0], [50.0, 50.0, 50.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    close(aggregate_loss(per_token, mask, mode), expected)


# ---- errors ----


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda a, b: gae(a, a, b, 1.0, 1.0), ["rewards", "values", "response_mask"]),
        (lambda a, b: gae(a, b, a, 1.0, 1.0), ["rewards", "values", "response_mask"]),
        (
            lambda a, b: clipped_policy_loss(a, a, b, 0.2, 0.2),
            ["logprobs", "old_logprobs", "advantages"],
        ),
        (lambda a, b: sequence_logprobs(a, b, a), ["logprobs", "old_logprobs", "response_mask"]),
        (lambda a, b: sequence_logprobs(a, a, b), ["logprobs", "old_logprobs", "response_mask"]),
        (lambda a, b: clipped_value_loss(a, b, a, 0.2), ["values", "old_values", "returns"]),
        (lambda a, b: kl_estimate(a, b, "k1"), ["logprobs", "ref_logprobs"]),
        (lambda a, b: masked_mean(a, b), ["x", "mask"]),
        (lambda a, b: masked_var(a, b), ["x", "mask"]),
        (lambda a, b: whiten(a, b), ["x", "mask"]),
        (lambda a, b: aggregate_loss(a, b, "token"), ["per_token", "response_mask"]),
    ],
)
def test_broadcastable_shapes_raise(function, names):
    with pytest.raises(ValueError, match="one shape") as caught:
        function(torch.ones(2, 3), torch.ones(1, 3))
    assert all(part in str(caught.value) for part in [*map(repr, names), "(2, 3)", "(1, 3)"])


@pytest.mark.parametrize("level", [0.0, 7.3, -1e4])
def test_equal_returns_explain_nothing(level):
    mask = torch.ones(4, 5, dtype=torch.bool)
    returns = torch.full((4, 5), level)
    rounding = returns * (1 + 1e-7 * torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))
    for targets in (returns, rounding):
        assert explained_variance(targets, targets, mask) == 0
    small = 1e-5 * torch.arange(20.0).reshape(4, 5)  # of a reward of any scale
    assert explained_variance(small, small, mask) == 1
    assert explained_variance(torch.zeros(4, 5), small, mask).abs() < 1e-6


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_final_value_is_that_of_a_state_that_pays_it(lam):
    rewards = normal(*MASK.shape)
    values = normal(*MASK.shape, seed=1)
    final = normal(len(MASK), seed=2)
    actual = gae(rewards, values, MASK, 0.9, lam, final)
    with_state = [torch.cat([x, final[:, None]], 1) for x in (rewards, values)]
    expected = gae(*with_state, torch.nn.functional.pad(MASK, (0, 1), value=1), 0.9, lam)
    for one, other in zip(actual, expected):
        close(one, other[:, :-1])
    assert all(
        map(
            torch.equal,
            gae(rewards, values, MASK, 0.9, lam, 0 * final),
            gae(rewards, values, MASK, 0.9, lam),
        )
    )


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_returns_of_a_cut_chain_equal_those_of_the_whole(lam):
    rewards = normal(1, 9)
    mask = torch.ones(1, 9)
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
        counts.append(
            sum(
                event.name.startswith("aten::") and event.name not in views
                for event in profiler.events()
            )
        )
    assert counts[1] - counts[0] == 32
