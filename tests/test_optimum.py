"""The optimum, certified: PPO ends where exact gradient ascent on the same adapter ends."""

import pytest
import torch
from optimum import BETA, Problem, gap, model


def test_closed_form_is_the_best_policy():
    """J(π*) = J*, and no other policy is above it: the yardstick itself, checked."""
    problem = Problem(0)
    with torch.no_grad():
        reference = problem.logprobs(model(0))
    torch.testing.assert_close(reference.exp().sum(1), torch.ones(len(reference)))
    best = (reference + problem.rewards / BETA).log_softmax(1)
    assert problem.objective(best, reference).item() == pytest.approx(problem.best(reference).item(), abs=1e-5)
    for scale in (0.5, 0.9, 1.1, 2.0):
        other = (reference + scale * problem.rewards / BETA).log_softmax(1)
        assert problem.objective(other, reference) < problem.best(reference)
    assert len(problem.responses) == 91


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_ppo_reaches_what_exact_gradient_ascent_reaches(seed, tmp_path, all_cores):
    result = gap(seed, tmp_path)
    way = result["best"] - result["reference"]
    assert result["exact"] <= result["best"] and result["ppo"] <= result["best"], result
    assert result["exact"] - result["reference"] > 0.9 * way, result  # or the yardstick itself is short
    assert result["gap"] <= 0.02, result
