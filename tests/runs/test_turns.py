"""Episodes of several turns: what the environment writes is read, and never learned."""

import pytest
import torch
from runs_of_tiny import PROMPTS, plain_logprobs
from tiny import config, llama

from trl_ppo_ext.modeling import load_actor_critic
from trl_ppo_ext.ppo import math as ppo_math
from trl_ppo_ext.ppo.guards import NonFiniteGuard
from trl_ppo_ext.ppo.rollouts import Rollout
from trl_ppo_ext.ppo.updates import ppo_loss
from trl_ppo_ext.sequences import Sequences

# ---- sequences of sampled and written tokens ----

COMPLETIONS = [[12, 13, 20, 21, 14, 1], [14, 15, 1], [16, 22, 17, 23, 24, 18, 19, 1]]
SAMPLED = [[1, 1, 0, 0, 1, 1], [1, 1, 1], [1, 0, 1, 0, 0, 1, 1, 1]]


def episodes(rows=range(3), completions=COMPLETIONS):
    ids = [PROMPTS[r] for r in rows], [completions[r] for r in rows]
    return Sequences.from_token_ids(*ids, 0, "cpu", sampled=[SAMPLED[r] for r in rows])


def moved(tmp_path, critic):
    built = load_actor_critic(llama().double(), config(tmp_path, critic=critic)).double()
    torch.manual_seed(1)
    for parameter in built.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return built


def rollout(sequences, seed=0):
    """A rollout whose numbers depend on the place of a token only; those of the environment are garbage."""
    torch.manual_seed(seed)
    mask = sequences.completion_mask
    numbers = torch.randn(3, 8, dtype=torch.float64)[:, : mask.shape[1]].expand(len(mask), -1, -1)
    old, advantages, values = numbers.masked_fill(~mask[:, None], 7.0).unbind(1)
    return Rollout(sequences, mask, old - 3, advantages, None, values, values + 1, entropy_coef=0.1)


def loss_of(built, sequences, denominator):
    scores = built(sequences, 1.0, True)
    return ppo_loss(scores, rollout(sequences), denominator, cliprange=(0.2, 0.2), vf_coef=0.5)


def gradient(built, sequences, denominator):
    built.zero_grad()
    loss_of(built, sequences, denominator)[0].backward()
    return torch.cat([x.grad.flatten() for x in built.parameters() if x.requires_grad])


def test_logprobs_of_episodes_are_those_of_a_plain_forward(tmp_path):
    built, sequences = moved(tmp_path, "head"), episodes()
    with torch.no_grad():
        scores = built(sequences)
        for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
            counts = torch.tensor(SAMPLED[row]).bool()
            expected = plain_logprobs(built.policy, prompt, completion)
            torch.testing.assert_close(scores.logprobs[row, : len(counts)][counts], expected[counts])
            hidden = built.trunk(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
            values = built.value_head(hidden[len(prompt) - 1 : -1])[:, 0]
            torch.testing.assert_close(scores.values[row, : len(counts)][counts], values[counts])
    assert not scores.logprobs[~sequences.completion_mask].any()


@pytest.mark.parametrize("critic", ["head", "side", "adapter"])
def test_gradient_of_mixed_episodes_is_the_sum_of_each_alone(tmp_path, critic):
    built = moved(tmp_path, critic)
    together = gradient(built, episodes(), 12)
    alone = sum(gradient(built, episodes([row]), 12) for row in range(3))
    assert together.norm() > 1e-3
    assert (together - alone).norm() < 1e-6 * together.norm()


def test_tokens_of_the_environment_enter_no_loss_and_no_metric(tmp_path):
    built, sequences = moved(tmp_path, "side"), episodes()
    loss, metrics = loss_of(built, sequences, 12)
    garbage = {name: x.masked_fill(~sequences.completion_mask, 1e3) for name, x in rollout(sequences).tensors.items()}
    scores = built(sequences, 1.0, True)
    scores = scores.map(lambda x: torch.where(sequences.completion_mask, x, 5.0))
    changed = Rollout(sequences, **garbage | {"response_mask": sequences.completion_mask}, entropy_coef=0.1)
    other, others = ppo_loss(scores, changed, 12, cliprange=(0.2, 0.2), vf_coef=0.5)
    assert torch.equal(loss, other)
    for name, x in metrics.items():
        assert torch.equal(x[sequences.completion_mask], others[name][sequences.completion_mask]), name


def test_reward_at_a_token_of_the_environment_enters_at_the_sampled_one_before():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 1, 1]]).bool()
    scores = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0, 2.0]])
    rewards = ppo_math.token_rewards(scores, torch.tensor([30.0, 3.0]), torch.ones(2, 6), mask, 0.5)
    expected = torch.tensor([[1.0, 14.0, 0.0, 0.0, 15.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 2.0]]) - 0.5 * mask
    assert torch.equal(rewards, expected)


def test_stand_in_of_an_excluded_episode_has_one_sampled_token():
    stand_ins = NonFiniteGuard(0, 5, lambda x: x, lambda x: x).stand_ins(
        episodes(), torch.tensor([False, False, True])
    )
    assert stand_ins.completion_mask.sum(1).tolist() == [4, 3, 1]
    assert stand_ins.rows(torch.tensor([2])).input_ids.tolist() == [PROMPTS[0][:2]]
