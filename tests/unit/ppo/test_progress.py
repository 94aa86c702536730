"""Progress of a run as tensors, and back: what is left out would be lost on resume."""

import torch
from runs_of_tiny import rollout

from trl_ppo_ext.modeling.critics import CriticState
from trl_ppo_ext.ppo.progress import Progress, RolloutInProgress
from trl_ppo_ext.ppo.state import RunState
from trl_ppo_ext.ppo_math import Moments

CPU = torch.device("cpu")
RUN = RunState(
    0.05,
    critic=CriticState(Moments(3.0, 1.0, 2.0), Moments(4.0, 0.5, 1.0), torch.tensor([1.0, -2.0])),
    spreads=(0.6, 0.7),
    played=torch.tensor([[1.0, 0.0], [2.5, 0.0]], dtype=torch.float64),
)


def again(progress):
    """The value that a checkpoint restores; its numbers of the run are in another file."""
    return Progress.from_tensors(progress.tensors(), RunState.from_json(RUN.to_json()), CPU)


def test_progress_comes_back_whole():
    batch = rollout(rows=4)
    rows = torch.tensor([[2, 0], [3, 1]])
    progress = Progress(
        run=RUN,
        rollout=RolloutInProgress(batch, rows, stopped_early=True),
        metrics={"sum:reward": torch.tensor([3.0, 2.0])},
        loss=torch.tensor(0.25),
        last_logged=5,
        skipped=2,
        tokens_seen=123_456_789,
    )
    restored = again(progress)
    assert restored.run.to_json() == RUN.to_json()
    assert torch.equal(restored.run.played, RUN.played)
    assert torch.equal(restored.run.critic.first_fit, RUN.critic.first_fit)
    assert restored.rollout.stopped_early and torch.equal(restored.rollout.rows, rows)
    saved = batch.state_dict()
    assert saved.keys() == restored.rollout.rollout.state_dict().keys()
    for name, tensor in restored.rollout.rollout.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert torch.equal(restored.metrics["sum:reward"], progress.metrics["sum:reward"])
    numbers = restored.loss.item(), restored.last_logged, restored.skipped, restored.tokens_seen
    assert numbers == (0.25, 5, 2, 123_456_789)


def test_progress_between_two_rollouts_has_none():
    plain = RUN._replace(critic=CriticState())
    restored = again(Progress(plain))
    assert restored.rollout is None and restored.ahead is None and not restored.metrics
    assert restored.run.critic.first_fit is None and restored.skipped == 0
