"""Value normalization: units of the values, corrected heads, runs that do not depend on the rewards' scale; trust."""

import pytest
import torch
from runs_of_tiny import rollouts_of, trainer, weights

from trl_ppo_ext.checkpoints.files import load_actor_critic_weights
from trl_ppo_ext.modeling import SideCritic, ValueHead
from trl_ppo_ext.ppo import math as ppo_math
from trl_ppo_ext.ppo.critics import DECAY, ValueNormalizer, ValueTrust

STATES = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(4, 10, dtype=torch.bool)


def alone(x):
    return x


def values_of(head):
    with torch.no_grad():
        return head(STATES)[:, 0].reshape(4, 10)


def trained_head(seed=0):
    head = ValueHead(8, True, torch.device("cpu"))
    torch.manual_seed(seed)
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    return head


def test_new_head_begins_at_the_mean_return():
    head = ValueHead(8, True, torch.device("cpu"))
    returns = torch.randn(4, 10) * 7 + 50
    values = ValueNormalizer(head, alone).update(values_of(head), returns, MASK)
    torch.testing.assert_close(values, torch.full((4, 10), returns.mean().item()))
    torch.testing.assert_close(values, values_of(head))
    torch.testing.assert_close(head.deviation[0], returns.std(correction=0))


def test_trained_head_keeps_its_values_when_the_units_move():
    head = trained_head()
    normalizer, expected = ValueNormalizer(head, alone), values_of(trained_head())
    for scale, shift in ((1, 0), (100, -3), (0.1, 40)):
        normalizer.update(values_of(head), torch.randn(4, 10) * scale + shift, MASK)
        torch.testing.assert_close(values_of(head), expected, rtol=1e-4, atol=1e-3)


def test_older_returns_decay():
    normalizer = ValueNormalizer(trained_head(), alone)
    first, second = torch.randn(4, 10), torch.randn(4, 10) + 5
    for returns in (first, second):
        normalizer.update(returns, returns, MASK)
    total = 40 * (1 + DECAY)
    mean = (DECAY * first.sum() + second.sum()) / total
    variance = (DECAY * ((first - mean) ** 2).sum() + ((second - mean) ** 2).sum()) / total
    torch.testing.assert_close(normalizer.head.mean[0], mean)
    torch.testing.assert_close(normalizer.head.deviation[0], variance.sqrt())


def test_head_that_another_rank_holds_is_not_new():
    head = ValueHead(8, True, torch.device("cpu"))  # all of a sharded head that this rank sees
    values = torch.randn(4, 10)
    normalizer = ValueNormalizer(head, lambda x: x + 1 if x.ndim == 0 else x)
    assert torch.equal(normalizer.update(values, torch.randn(4, 10), MASK), values)


def test_equal_returns_keep_the_unit_one():
    normalizer = ValueNormalizer(trained_head(), alone)
    normalizer.update(values_of(normalizer.head), torch.full((4, 10), 3.0), MASK)
    assert normalizer.deviation == 1 and normalizer.head.mean.item() == 3


def test_head_with_units_converts_to_one_without_and_back():
    head, plain = trained_head(), ValueHead(8, False, torch.device("cpu"))
    head.mean.fill_(4.0), head.deviation.fill_(0.5)
    saved = {name: x.clone() for name, x in head.state_dict().items()}
    plain.load_state_dict(plain.in_own_units(saved))
    torch.testing.assert_close(values_of(plain), values_of(head))
    again = trained_head(seed=1)
    again.load_state_dict(again.in_own_units(plain.state_dict()))
    torch.testing.assert_close(values_of(again), values_of(head))


def letters(scale, shift):
    def reward(completion_ids, **kwargs):
        return [scale * sum(token % 2 for token in ids) + shift for ids in completion_ids]

    return reward


def relative_distance(plain, other):
    """Distance of two policies, relative to how far the first one has moved."""
    policy = [name for name in plain if "default" in name]
    moved = sum((plain[name] ** 2).sum() for name in policy).sqrt()
    return sum(((plain[name] - other[name]) ** 2).sum() for name in policy).sqrt() / moved


@pytest.mark.parametrize("critic, whiten", [("head", True), ("side", False), ("adapter", False)])
def test_run_does_not_depend_on_scale_and_shift_of_the_rewards(tmp_path, critic, whiten):
    settings = {"critic": critic, "normalize_values": True, "critic_backprop": critic == "adapter", "kl_coef": 0.0}
    settings["whiten_advantages"] = whiten
    runs = []
    for name, numbers in (("plain", (1, 0)), ("shifted", (1, 50)), ("scaled", (100, 0))):
        run = trainer(tmp_path / name, reward_funcs=letters(*numbers), max_steps=12, **settings)
        run.train()
        runs.append(run)
    plain, *others = map(weights, runs)
    logs = [[x["value/explained_variance"] for x in run.state.log_history if "reward" in x] for run in runs]
    assert any(logs[0]) and all(log == pytest.approx(logs[0], abs=1e-3) for log in logs)
    assert all(relative_distance(plain, other) < 0.01 for other in others)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("placement", ["reward", "loss", "both"])
def test_kl_penalty_is_in_units_of_the_reward(tmp_path, placement, whiten):
    """Rewards and penalty times 100 give the same policy wherever the penalty enters."""
    settings = {"critic": "side", "kl_placement": placement, "kl_estimator": "k2" if placement == "loss" else "exact"}
    settings |= {"normalize_values": True, "whiten_advantages": whiten, "max_steps": 12}
    runs = []
    for scale in (1, 100):
        run = {"reward_funcs": letters(scale, 0), "kl_coef": 0.3 * scale}
        runs.append(trainer(tmp_path / str(scale), **run, **settings))
        runs[-1].train()
    assert relative_distance(*map(weights, runs)) < 0.01


def test_kl_in_the_loss_has_the_unit_of_whitened_rewards(tmp_path, monkeypatch):
    units, scale = [], ppo_math.scale_to_unit_variance

    def recorded(x, mask, all_sum):
        units.append(x[mask].std().item())
        return scale(x, mask, all_sum)

    monkeypatch.setattr(ppo_math, "scale_to_unit_variance", recorded)
    settings = {"kl_placement": "both", "kl_estimator": "exact", "kl_coef": 0.3, "whiten_rewards": True}
    settings |= {"whiten_advantages": False, "num_ppo_epochs": 1, "num_mini_batches": 1}
    run = trainer(tmp_path, reward_funcs=letters(9, 0), max_steps=1, **settings)
    rollouts = rollouts_of(run)
    run.train()
    assert units[0] > 1.5
    assert rollouts[0][0].kl_coef == pytest.approx(0.3 / units[0], rel=1e-4)


def test_advantages_do_not_grow_when_returns_no_longer_vary(tmp_path):
    """The unit of the returns then goes to 0, and faster than the critic's errors."""
    calls = []

    def solved(completion_ids, **kwargs):
        calls.append(None)
        return [sum(ids) % 7 if len(calls) <= 3 else 6.0 for ids in completion_ids]

    settings = {"critic": "side", "normalize_values": True, "whiten_advantages": False, "kl_coef": 0.0}
    run = trainer(tmp_path, reward_funcs=solved, max_steps=128, learning_rate=1e-3, **settings)
    rollouts = rollouts_of(run)
    run.train()
    squares = [(rollout.advantages[rollout.response_mask] ** 2).mean().item() for rollout, _ in rollouts]
    # those of a rollout are at most its returns' spread, of which the running variance has at least a fifth
    assert len(squares) == 32 and max(squares) < 5 and max(squares[10:]) < 1


def test_best_model_has_the_units_of_its_checkpoint(tmp_path):
    """Training may go on from it."""
    scores = iter(range(1, 100, 9))
    settings = {"normalize_values": True, "save_strategy": "steps", "save_steps": 4, "num_mini_batches": 1}

    def growing(completion_ids, **kwargs):
        scale = next(scores)
        return [scale + scale * (sum(ids) % 5) for ids in completion_ids]

    run = trainer(tmp_path, reward_funcs=growing, max_steps=8, num_ppo_epochs=4, **settings)
    run.train()
    head, collector = run.actor_critic.value_head, run.collector
    later = collector.normalizer.units
    run.state.best_model_checkpoint = str(tmp_path / "checkpoint-4")
    run._load_best_model()
    states = torch.randn(4, 10, 32)
    values = head(states)[..., 0]
    assert collector.normalizer.units == (float(head.mean), float(head.deviation)) != later
    collector.normalizer.update(values, torch.randn(4, 10), MASK)
    torch.testing.assert_close(head(states)[..., 0], values, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("normalized", [False, True])
def test_normalized_values_turn_on_and_off_on_resume(tmp_path, normalized):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "resume_with_changed_settings": True}
    first, again = (trainer(tmp_path / str(x), normalize_values=x, **settings) for x in (normalized, not normalized))
    first.train()
    checkpoint = str(tmp_path / str(normalized) / "checkpoint-6")
    load_actor_critic_weights(again.actor_critic, checkpoint)
    states = torch.randn(40, 32)
    torch.testing.assert_close(again.actor_critic.value_head(states), first.actor_critic.value_head(states))
    again.train(resume_from_checkpoint=checkpoint.replace("-6", "-3"))
    assert again.state.global_step == 6


def test_side_critic_of_shorter_completions_reads_no_mirror_image_beyond():
    critic = SideCritic(32, 32, 1, 8, False, torch.device("cpu"))
    read = critic.read([torch.ones(4, 32)], torch.tensor([0, 7, 8, 16]), None)
    assert torch.equal(read[2], read[3]) and not torch.allclose(read[0], read[3])


# ---- trust in the values


def states_and_returns(noise=1.0, shift=0.0, rollouts=30, width=10, seed=0):
    """Rollouts of the mean returns of their states, and of returns with some noise."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rollouts):
        means, noises = torch.randn(2, 64, width, generator=generator)
        yield means + shift, means + shift + noise * noises


def baseline(trust, values, returns, mask=None):
    """Weighed values of a rollout, which then is evidence."""
    mask = torch.ones_like(values) if mask is None else mask
    weighed = trust.weighing(returns, mask)(values)
    trust.add(values, returns, mask)
    return weighed


def trust_after(rollouts):
    trust = ValueTrust(alone)
    for values, returns in rollouts:
        baseline(trust, values, returns)
    return trust


def test_value_after_a_cut_is_weighed_as_the_others(tmp_path):
    """A critic that is not trusted yet adds nothing to completions that a limit cut, however wrong it is."""
    settings = {"advantage_estimator": "auto", "bootstrap_truncated": True, "kl_coef": 0.0, "max_steps": 1}
    settings |= {"critic": "head", "normalize_values": False, "whiten_advantages": False, "num_mini_batches": 1}
    settings |= {"generation_kwargs": {"min_new_tokens": 8}, "max_completion_length": 8, "num_ppo_epochs": 1}
    run = trainer(tmp_path, reward_funcs=letters(0, 0), **settings)
    torch.nn.init.constant_(run.actor_critic.value_head.bias, 50.0)
    rollouts = rollouts_of(run)
    run.train()
    ((rollout, _),) = rollouts
    assert rollout.old_values.max() == 50 and not rollout.advantages.any()


@pytest.mark.parametrize("shift", [0, 1e3])
def test_exact_values_are_trusted_fully(shift):
    rollouts = [(returns, returns) for _, returns in states_and_returns(shift=shift)]
    assert trust_after(rollouts).weight == pytest.approx(1)
    assert trust_after(states_and_returns(shift=shift)).weight == pytest.approx(1, abs=0.05)


def test_values_far_from_the_returns_are_not_trusted():
    """They rank the states, but as a baseline they are worse than a constant."""
    assert trust_after((values + 50, returns) for values, returns in states_and_returns(noise=0)).weight < 1e-3
    assert trust_after((-values, returns) for values, returns in states_and_returns()).weight == 0
    assert trust_after((torch.full_like(x, 3.0), x) for _, x in states_and_returns(shift=3)).weight < 0.02


def test_trust_depends_on_earlier_rollouts_only():
    first, (values, returns) = states_and_returns(rollouts=2)
    one, other = trust_after([first]), trust_after([first])
    assert torch.equal(baseline(one, values, returns), baseline(other, values, -7 * returns))
    assert one.weight != other.weight


@pytest.mark.parametrize("shift", [0.0, 2.0])
@pytest.mark.parametrize("error", [0.0, 0.3, 1.0, 3.0, 10.0])
def test_gradient_varies_no_more_than_with_the_better_baseline(error, shift):
    """Policy gradient of a softmax over three actions, whose values have an error and are too high by `shift`."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.eye(3) - 1 / 3  # gradients of the log-probs, uniform policy
    trust, variances = ValueTrust(alone), []
    for means, _ in states_and_returns(rollouts=40):
        actions = torch.randint(3, means.shape, generator=generator)
        returns = means + (actions - 1) + 0.5 * torch.randn(means.shape, generator=generator)
        values = means + error * torch.randn(means.shape, generator=generator) + shift
        mean = trust.returns.mean
        weighed = baseline(trust, values, returns)
        gradients = [(returns - x)[..., None] * scores[actions] for x in (weighed, values, torch.tensor(mean))]
        variances.append([x.flatten(0, 1).var(0).sum() for x in gradients])
    weighed, by_values, by_mean = torch.tensor(variances[5:]).mean(0)
    assert weighed < 1.02 * min(by_values, by_mean)
    if error in (1.0, 3.0):  # better than both: w is between 0 and 1
        assert weighed < 0.98 * min(by_values, by_mean) or shift
