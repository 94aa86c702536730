"""Bias of advantages where the policy decides when to stop, by enumeration of all episodes of a
tiny game."""

import itertools

import pytest
import torch

from trl_ppo_ext.ppo_math import (
    at_turn_ends,
    clipped_policy_loss,
    gae,
    rloo_advantages,
    turn_starts,
)

# At each of three turns, "go" earns a reward and leads to the next turn; "stop" earns one and ends
# the game. An environment writes a token between turns. Going on is worth less than stopping at
# first, and more in the end.
GO = torch.tensor([0.1, 0.7, 2.0]).double()
STOP = torch.tensor([0.5, 0.4, 0.2]).double()
EPISODES = [[0], [1, 0], [1, 1, 0], [1, 1, 1]]  # 1 is "go"
WIDTH = 5
PARAMETERS = torch.tensor([0.3, -0.4, 0.2]).double()


def tensors():
    """Mask and rewards of all episodes, `[episodes, tokens]`."""
    mask, rewards = torch.zeros(2, len(EPISODES), WIDTH, dtype=torch.float64)
    for row, actions in enumerate(EPISODES):
        for turn, action in enumerate(actions):
            mask[row, 2 * turn], rewards[row, 2 * turn] = 1, (GO if action else STOP)[turn]
    return mask, rewards


def logprobs_of(parameters):
    logprobs = [torch.zeros(WIDTH, dtype=torch.float64) for _ in EPISODES]
    for row, actions in enumerate(EPISODES):
        for turn, action in enumerate(actions):
            if action:
                sign = 1
            else:
                sign = -1
            logprobs[row] = logprobs[row].index_put(
                (torch.tensor(2 * turn),), torch.nn.functional.logsigmoid(sign * parameters[turn])
            )
    return torch.stack(logprobs)


MASK, REWARDS = tensors()
PROBABILITIES = logprobs_of(PARAMETERS).sum(1).exp()


def true_gradient():
    parameters = PARAMETERS.clone().requires_grad_()
    expected = (logprobs_of(parameters).sum(1).exp() * REWARDS.sum(1)).sum()
    return torch.autograd.grad(expected, parameters)[0]


def gradient(advantages):
    """Expectation of the policy's gradient, with the loss of the first update."""
    parameters = PARAMETERS.clone().requires_grad_()
    logprobs = logprobs_of(parameters)
    loss = clipped_policy_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.2) * MASK
    return -torch.autograd.grad((PROBABILITIES * loss.sum(1)).sum(), parameters)[0]


def test_probabilities_sum_to_one():
    torch.testing.assert_close(PROBABILITIES.sum(), torch.ones(()).double())


def test_baselines_per_turn_index_have_the_bias_of_later_rewards():
    reached = (PROBABILITIES[:, None] * MASK).sum(0)
    # at each index, of a large group
    means = (PROBABILITIES[:, None] * REWARDS).sum(0) / reached.clamp(min=1e-9)
    advantages, _ = gae(REWARDS - means, torch.zeros_like(REWARDS), MASK, 1.0, 1.0)
    bias = gradient(advantages) - true_gradient()
    go = PARAMETERS.sigmoid()
    # going on seems to earn nothing later: the gradient lacks E[later rewards] of the decision to
    # go
    later = torch.stack(
        [GO[1] * go[1] + STOP[1] * (1 - go[1]), GO[2] * go[2] + STOP[2] * (1 - go[2])]
    )
    after_go = torch.stack([later[0] + go[1] * later[1], later[1], torch.zeros(()).double()])
    torch.testing.assert_close(bias, -reached[::2] * go * (1 - go) * after_go)
    # it learns to stop where it should go on
    assert true_gradient()[0] > 0 > gradient(advantages)[0]


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_is_unbiased_with_exact_values_or_at_lambda_one(lam):
    """At λ = 1 with any values."""
    _, returns = gae(REWARDS, torch.zeros_like(REWARDS), MASK, 1.0, 1.0)
    reached = (PROBABILITIES[:, None] * MASK).sum(0)
    exact = (PROBABILITIES[:, None] * returns).sum(0) / reached.clamp(min=1e-9)
    wrong = torch.tensor([3.0, 7.0, -2.0, 7.0, 0.5]).double()
    for values in (exact, wrong, 0 * wrong):  # with zeros and λ = 1, ReBN before it is whitened
        bias = (
            gradient(gae(REWARDS, values.expand(REWARDS.shape), MASK, 1.0, lam)[0])
            - true_gradient()
        )
        is_unbiased = values is exact or lam == 1
        assert (bias.abs().max() < 1e-12) == is_unbiased, (values, lam)


def test_rloo_over_episodes_is_unbiased():
    total = torch.zeros(3).double()
    for pair in itertools.product(range(len(EPISODES)), repeat=2):
        advantage = rloo_advantages(REWARDS.sum(1)[list(pair)], torch.ones(2), 2)[0]
        weight = torch.zeros(len(EPISODES), 1).double()
        weight[pair[0]] = PROBABILITIES[pair[1]] * advantage
        total = total + gradient(weight.expand(MASK.shape))
    torch.testing.assert_close(total, true_gradient())


# ---- turns of several tokens ----

# Two turns of two tokens, 0 or 1, with a reward at each of random size; an environment writes a
# token between them.
TOKENS = torch.tensor(list(itertools.product((0, 1), repeat=4)))
PLACES = torch.tensor([0, 1, 3, 4])
TURNS = torch.tensor([1, 1, 0, 2, 2])
# [episodes, 4], of 15
STATES = torch.stack([2**n - 1 + TOKENS[:, :n] @ 2 ** torch.arange(n) for n in range(4)], 1)
SCORES, LOGITS, WRONG = torch.randn(3, 31, generator=torch.Generator().manual_seed(0)).double()


class TwoTurns:
    """All episodes; tensors are `[episodes, tokens]`."""

    mask = torch.zeros(16, 5, dtype=torch.float64).index_fill(1, PLACES, 1)
    turns = (mask * TURNS).long()
    rewards = torch.zeros_like(mask).index_copy(1, PLACES, SCORES[2 * STATES + TOKENS])
    starts, first = turn_starts(turns)
    # gradient of a token's log-prob by the logit of its state
    score = TOKENS - LOGITS[STATES].sigmoid()
    chances = torch.where(TOKENS == 1, LOGITS[STATES].sigmoid(), 1 - LOGITS[STATES].sigmoid()).prod(
        1
    )

    @classmethod
    def values(cls, of_state):
        return torch.zeros_like(cls.mask).index_copy(1, PLACES, of_state[STATES])

    @classmethod
    def exact_values(cls):
        to_go = gae(cls.rewards, 0 * cls.rewards, cls.mask, 1.0, 1.0)[1][:, PLACES]
        weights = cls.chances[:, None].expand(to_go.shape)
        sums = weights * to_go, weights
        total, chance = (
            torch.zeros(15).double().index_add(0, STATES.flatten(), x.flatten()) for x in sums
        )
        return cls.values(total / chance)

    @classmethod
    def gradient(cls, advantages):
        """Expectation of the gradient by the logits, and its variance."""
        each = (
            torch.zeros(16, 15).double().scatter_add(1, STATES, advantages[:, PLACES] * cls.score)
        )
        mean = cls.chances @ each
        return mean, cls.chances @ (each - mean).square().sum(1)

    @classmethod
    def both(cls, values, lam, inside=1.0):
        lam = torch.where(at_turn_ends(0.0, cls.turns) == 0, lam, inside).double()
        return gae(cls.rewards, values, cls.mask, 1.0, lam)[0]

    @classmethod
    def turn(cls, values, lam):
        sums = torch.zeros_like(cls.rewards).scatter_add(1, cls.first, cls.rewards)
        return gae(sums, values, cls.starts, 1.0, lam)[0].gather(1, cls.first)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_both_levels_have_the_bias_of_turns_and_less_variance(lam):
    exact = TwoTurns.exact_values()
    wrong = TwoTurns.values(WRONG)
    true, _ = TwoTurns.gradient(TwoTurns.both(0 * exact, 1.0))
    wrong_within = torch.where(TwoTurns.starts, exact, wrong)
    for values in (exact, wrong, wrong_within):
        mean, _ = TwoTurns.gradient(TwoTurns.both(values, lam))
        torch.testing.assert_close(mean, TwoTurns.gradient(TwoTurns.turn(values, lam))[0])
        assert ((mean - true).abs().max() < 1e-12) == (values is not wrong or lam == 1)
    assert (
        TwoTurns.gradient(TwoTurns.both(exact, lam))[1]
        < TwoTurns.gradient(TwoTurns.turn(exact, lam))[1]
    )
    of_tokens, _ = TwoTurns.gradient(TwoTurns.both(wrong_within, lam, inside=lam))
    # errors within a turn are a bias of tokens
    assert ((of_tokens - true).abs().max() < 1e-12) == (lam == 1)


def test_token_residuals_centered_in_a_turn_are_biased():
    """Also with exact values: the mean over a turn depends on what its later tokens were, so the
    gradient of the first token is inflated."""
    exact = TwoTurns.exact_values()
    true, _ = TwoTurns.gradient(TwoTurns.both(exact, 1.0))
    of_tokens = TwoTurns.both(exact, 1.0)
    total = torch.zeros_like(exact)
    mean = total.scatter_add(1, TwoTurns.first, of_tokens).gather(1, TwoTurns.first) / 2
    centered, _ = TwoTurns.gradient((TwoTurns.turn(exact, 1.0) + of_tokens - mean) * TwoTurns.mask)
    # by the depth of a state
    factors = torch.tensor([1.5, 1, 1.5, 1]).repeat_interleave(torch.tensor([1, 2, 4, 8]))
    torch.testing.assert_close(centered, factors * true)
