"""Bias of advantages where the policy decides when to stop, by enumeration of all episodes of a tiny game."""

import itertools

import pytest
import torch

from trl_ppo_ext.ppo_math import clipped_policy_loss, gae, rloo_advantages

# At each of three turns, "go" earns a reward and leads to the next turn; "stop" earns one and ends the game. An
# environment writes a token between turns. Going on is worth less than stopping at first, and more in the end.
GO, STOP = torch.tensor([0.1, 0.7, 2.0]).double(), torch.tensor([0.5, 0.4, 0.2]).double()
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
            sign = 1 if action else -1
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
    means = (PROBABILITIES[:, None] * REWARDS).sum(0) / reached.clamp(min=1e-9)  # at each index, of a large group
    advantages, _ = gae(REWARDS - means, torch.zeros_like(REWARDS), MASK, 1.0, 1.0)
    bias = gradient(advantages) - true_gradient()
    go = PARAMETERS.sigmoid()
    # going on seems to earn nothing later: the gradient lacks E[later rewards] of the decision to go
    later = torch.stack([GO[1] * go[1] + STOP[1] * (1 - go[1]), GO[2] * go[2] + STOP[2] * (1 - go[2])])
    after_go = torch.stack([later[0] + go[1] * later[1], later[1], torch.zeros(()).double()])
    torch.testing.assert_close(bias, -reached[::2] * go * (1 - go) * after_go)
    assert true_gradient()[0] > 0 > gradient(advantages)[0]  # it learns to stop where it should go on


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_is_unbiased_with_exact_values_and_at_lambda_one_with_any(lam):
    _, returns = gae(REWARDS, torch.zeros_like(REWARDS), MASK, 1.0, 1.0)
    reached = (PROBABILITIES[:, None] * MASK).sum(0)
    exact = (PROBABILITIES[:, None] * returns).sum(0) / reached.clamp(min=1e-9)
    wrong = torch.tensor([3.0, 7.0, -2.0, 7.0, 0.5]).double()
    for values in (exact, wrong, 0 * wrong):  # with zeros and λ = 1, ReBN before it is whitened
        bias = gradient(gae(REWARDS, values.expand(REWARDS.shape), MASK, 1.0, lam)[0]) - true_gradient()
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
