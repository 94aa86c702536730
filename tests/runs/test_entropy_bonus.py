"""The entropy bonus is in units of a rollout's advantages."""

import math

import pytest
import torch
from runs_of_tiny import rollouts_of, trainer, weights

from trl_ppo_ext.modeling import TokenScores
from trl_ppo_ext.ppo.advantages import Discounts, divide_by_unit, gae_with_critic
from trl_ppo_ext.ppo.rollouts import Rollout
from trl_ppo_ext.ppo.updates import ppo_loss
from trl_ppo_ext.ppo_math import Moments, root_mean_square, whiten
from trl_ppo_ext.sequences import Sequences

LENGTH = 1024
ROWS = 8
COEFFICIENT = 0.02


def gradients(advantages, unit):
    """Norms of the gradients of a bonus and of the policy, on tokens with these advantages."""
    sequences = Sequences.from_token_ids([[4]] * ROWS, [[5] * LENGTH] * ROWS, 0, "cpu")
    batch = Rollout(
        sequences,
        sequences.completion_mask,
        old_logprobs=torch.zeros_like(advantages),
        advantages=advantages,
        entropy_unit=unit,
    )
    logprobs = torch.zeros_like(advantages, requires_grad=True)
    entropies = torch.ones_like(advantages, requires_grad=True)
    scores = TokenScores(logprobs, entropies)
    loss, _ = ppo_loss(scores, batch, cliprange=(0.2, 0.2), entropy_coef=COEFFICIENT)
    of_policy, of_bonus = torch.autograd.grad(loss, [logprobs, entropies])
    return of_bonus.norm().item(), of_policy.norm().item()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_dense_rewards_do_not_change_the_weight_of_the_bonus(scale):
    """It is that beside whitened advantages. Returns to go are sums over the rest of a completion,
    in whose deviation advantages are small."""
    rewards = scale * torch.randn(
        ROWS, LENGTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    mask = torch.ones_like(rewards).bool()
    nothing = torch.zeros_like(rewards)
    result, seen = gae_with_critic(
        rewards, nothing, mask, Moments(), is_normalized=True, discounts=Discounts(1.0, 0.8)
    )
    scaled = divide_by_unit(result, seen).advantages
    whitened, _ = whiten(result.advantages, mask)
    bonus, policy = gradients(scaled, root_mean_square(scaled, mask))
    assert bonus / policy == pytest.approx(COEFFICIENT)
    others = gradients(whitened, root_mean_square(whitened, mask))
    assert bonus / policy == pytest.approx(others[0] / others[1])
    # without the unit it would weigh more, by the size of the advantages
    bonus, policy = gradients(scaled, 1.0)
    assert bonus / policy > 5 * COEFFICIENT


def test_unit_is_the_root_mean_square_over_tokens_of_all_ranks():
    """Only tokens of the policy count."""
    x = torch.tensor([[3.0, math.nan, 1.0], [5.0, 7.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
    assert root_mean_square(x, mask) == pytest.approx(math.sqrt(35 / 3))
    other = torch.tensor([4.0, 1.0])  # the sum of squares and the count of another rank
    assert root_mean_square(x, mask, lambda own: own + other) == pytest.approx(math.sqrt(39 / 4))
    assert root_mean_square(0 * x, mask) == root_mean_square(x, 0 * mask) == 1


def of_run(tmp_path, scale=1.0, **settings):
    """Rollouts and trained weights of a run with an entropy bonus."""

    def reward(completion_ids, **kwargs):
        return [scale * (len(ids) + ids[0] % 5) for ids in completion_ids]

    settings = {"max_steps": 8, "entropy_coef": 0.1, "learning_rate": 1e-2} | settings
    built = trainer(tmp_path, reward_funcs=reward, **settings)
    rollouts = rollouts_of(built)
    built.train()
    return [rollout for rollout, _ in rollouts], weights(built)


def test_rollout_carries_the_unit_of_its_advantages(tmp_path):
    for rollout in of_run(tmp_path, mask_truncated_completions=True)[0]:
        expected = rollout.advantages[rollout.policy_tokens].square().mean().sqrt().item()
        assert rollout.entropy_unit == pytest.approx(
            expected, rel=1e-5
        ) and expected != pytest.approx(1, abs=1e-3)
        assert (
            Rollout.from_state_dict(rollout.state_dict(), "cpu").entropy_unit
            == rollout.entropy_unit
        )
    (whitened, *_), _ = of_run(tmp_path, whiten_advantages=True)
    assert whitened.entropy_unit == pytest.approx(1, abs=0.05)


def test_bonus_acts_when_no_score_differs(tmp_path):
    settings = {"critic": "none", "num_generations": 4}
    (first, *_), after = of_run(tmp_path, scale=0.0, **settings)
    assert not first.advantages.any() and first.entropy_unit == 1
    _, without = of_run(tmp_path, scale=0.0, entropy_coef=0.0, **settings)
    assert any(not torch.equal(x, without[name]) for name, x in after.items())


@pytest.mark.parametrize("settings", [{}, {"critic": "none", "advantage_estimator": "reinforce"}])
def test_scale_of_rewards_changes_nothing(tmp_path, settings):
    """Also where advantages are in the unit of the rewards: Adam removes the scale of policy and
    bonus together."""
    settings = settings | {"max_grad_norm": 0.0, "adam_epsilon": 1e-20, "kl_coef": 0.0}
    (_, one), (_, scaled) = of_run(tmp_path, 1.0, **settings), of_run(tmp_path, 4.0, **settings)
    torch.testing.assert_close(one, scaled, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_normalized, unit", [(True, 0.1), (False, 1.0)])
def test_bonus_keeps_a_tenth_where_advantages_are_in_the_unit_of_the_returns(
    tmp_path, is_normalized, unit
):
    """They fade when a task is solved, and at 0 it is no more than just before."""
    settings = {"kl_coef": 0.0, "normalize_values": is_normalized, "whiten_advantages": False}
    (first, *_), _ = of_run(tmp_path, scale=0.0, **settings)
    assert not first.advantages.any() and first.entropy_unit == pytest.approx(unit)
