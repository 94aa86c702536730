"""A critic from outside the package: built by a function, trained, saved and resumed as the others."""

import pytest
import torch
from runs_of_tiny import rollouts_of, trainer, weights
from safetensors.torch import load_file
from tiny import prompts
from torch import nn

from trl_ppo_ext import Critic
from trl_ppo_ext.checkpoints.files import CheckpointError

LENGTH = 8


class Clock(Critic):
    """A value for each position, plus a share of what was earned before."""

    kind = "clock"
    learning_rate = 0.05

    def __init__(self, length=LENGTH):
        super().__init__()
        self.values = nn.Parameter(torch.zeros(length))
        self.share = nn.Parameter(torch.zeros(1))

    def observe(self, token_scores, mask, state):
        return token_scores.cumsum(1) - token_scores

    def inputs(self, states, positions, observed):
        return torch.stack([positions, observed], 1)

    def forward(self, inputs):
        positions = inputs[:, 0].long().clamp(max=len(self.values) - 1)
        return self.values[positions] + self.share * inputs[:, 1]


class Watched(Clock):
    """Knows how far the positions reach."""

    longest = 0

    def inputs(self, states, positions, observed):
        self.longest = max(self.longest, int(positions.max()))
        return super().inputs(states, positions, observed)


def one_per_token(completion_ids, **kwargs):
    return [[1.0] * len(ids) for ids in completion_ids]


def run_of(folder, **settings):
    settings = {"max_completion_length": LENGTH, "max_steps": 32, "num_ppo_epochs": 1} | settings
    settings.setdefault("critic_factory", lambda policy: Clock())
    return trainer(folder, reward_funcs=one_per_token, learning_rate=0.0, **settings)


@pytest.mark.parametrize("bootstraps", [False, True])
def test_value_after_a_limit_is_read_at_the_position_beyond_it(tmp_path, bootstraps):
    run = run_of(
        tmp_path,
        critic_factory=lambda policy: Watched(),
        critic_kwargs={"bootstrap_truncated": bootstraps},
        max_steps=1,
    )
    run.train()
    assert run.state.log_history[0]["completions/clipped_ratio"] > 0
    assert run.actor_critic.value_head.longest == LENGTH - 1 + bootstraps


def test_clock_learns_the_reward_that_is_left(tmp_path):
    """With a reward per token, of a policy that stays: a table of positions explains most."""
    run = run_of(tmp_path, lam=1.0)
    rollouts = rollouts_of(run)
    run.train()
    rollout, samples = rollouts[-1]
    mask = rollout.response_mask
    errors = (samples.values - samples.returns)[mask]
    assert errors.var() < 0.6 * samples.returns[mask].var()
    assert (run.actor_critic.value_head.values.diff()[:4] < 0).all()  # less is left
    observed = rollout.sequences.observed
    assert torch.equal(observed[mask], rollout.sequences.positions.float())


def test_own_critic_of_a_run_without_a_reward_is_kept(tmp_path):
    settings = {"reference_prompt": "shown", "kl_coef": 1.0, "critic_factory": lambda _: Clock()}
    rows = prompts().add_column("shown", prompts()["prompt"][::-1])
    run = trainer(tmp_path, reward_funcs=None, dataset=rows, **settings)
    run.train()
    assert isinstance(run.actor_critic.value_head, Clock) and run.args.critic != "none"
    assert any("value/explained_variance" in row for row in run.state.log_history)


def test_own_critic_resumes_bit_for_bit(tmp_path):
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 5}
    whole, again = (run_of(tmp_path / name, **settings) for name in ("whole", "again"))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert any("share" in name for name in weights(whole))
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(again)[name]), name
    saved = load_file(tmp_path / "whole" / "checkpoint-10" / "value_head.safetensors")
    assert saved.keys() == {"values", "share", "returns", "rewards"}


class Keeping(Clock):
    """Keeps the state that it is to use."""

    def install(self, state):
        self.installed = state


def test_critic_uses_the_state_of_the_best_model(tmp_path):
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    run = run_of(tmp_path, critic_factory=lambda policy: Keeping(), **settings)
    run.train()
    head = run.actor_critic.value_head
    last = head.installed
    run.state.best_model_checkpoint = str(tmp_path / "checkpoint-4")
    run._load_best_model()
    assert head.installed == run.run_state.critic != last


def test_run_with_another_critic_does_not_resume(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    run_of(tmp_path / "whole", **settings).train()
    other = run_of(tmp_path / "other", critic_factory=None, max_steps=8)
    with pytest.raises(CheckpointError, match=r"must build the critic 'clock' .*got 'side'"):
        other.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))


@pytest.mark.parametrize(
    "settings",
    [{"critic": "head"}, {"critic": "none", "num_generations": 2}, {"critic_init": "somewhere"}],
)
def test_config_must_not_name_a_critic_beside_it(tmp_path, settings):
    with pytest.raises(ValueError, match="`critic_factory` builds the critic, so `critic` and"):
        run_of(tmp_path, **settings)


class Scalar(Clock):
    """A parameter without a dimension, which FSDP cannot shard."""

    def __init__(self):
        super().__init__()
        self.share = nn.Parameter(torch.zeros(()))


class Nameless(Clock):
    """Saved under no name."""

    kind = None


class Plain(Clock):
    """In the unit of the rewards."""

    def __init__(self):
        super().__init__()
        self.is_normalized = False


class Wide(Clock):
    """Two axes, as of a linear layer."""

    def forward(self, inputs):
        return super().forward(inputs)[:, None]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (lambda: nn.Linear(1, 1), TypeError, "must return a `Critic`, got Linear"),
        (Scalar, ValueError, r"got `share` of shape \(\)"),
        (Nameless, ValueError, "`kind` of Nameless must be a text .* got None"),
        (Plain, ValueError, "Plain has `is_normalized=False`; make them equal"),
    ],
)
def test_unfit_critic_is_refused_when_it_is_built(tmp_path, kind, error, message):
    with pytest.raises(error, match=message):
        run_of(tmp_path, critic_factory=lambda policy: kind())


def test_outputs_of_another_shape_raise(tmp_path):
    run = run_of(tmp_path, critic_factory=lambda policy: Wide())
    with pytest.raises(ValueError, match="`forward` of Wide must return a value per token"):
        run.train()
