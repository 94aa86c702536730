"""Credit in whole runs: values after limits, and baselines of episodes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs_of_tiny import plain_logprobs, rollouts_of, trainer, write_completions
from tiny import WORDS, config, llama, prompts, tokenizer
from transformers.utils import logging

from trl_ppo_ext import PPOTrainer, ppo_math
from trl_ppo_ext.data import PromptError
from trl_ppo_ext.episodes.record import ANSWERS
from trl_ppo_ext.modeling import SideCritic
from trl_ppo_ext.modeling.critics import CriticState
from trl_ppo_ext.ppo import credit, rollouts
from trl_ppo_ext.ppo.advantages import OVER_GROUPS
from trl_ppo_ext.sequences import Sequences
from trl_ppo_ext.tools.probe import held_out_rollouts, probe

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import pretrain_critic as recipe

GAMMA = 0.9
VALUE = 1 / (1 - GAMMA)  # of a reward of 1 per step, for ever
PLAIN = {
    "gamma": GAMMA,
    "lam": 0.8,
    "lam_critic": 0.8,
    "kl_coef": 0.0,
    "whiten_advantages": False,
    "normalize_values": False,
}


class Endless:
    """Environment that pays 1 per turn."""

    def reset(self, *, seed, options):
        self.turns = 0
        self.limit = 2 + seed % 3
        self.seed = seed
        return None, {}

    def privileged_state(self):
        return f"{WORDS[self.seed % 20]} w2"

    def step(self, text):
        self.turns += 1
        return f" {WORDS[self.turns]}", 1.0, False, False, {}


class Limited(Endless):
    def step(self, text):
        observation, reward, *_ = super().step(text)
        return observation, reward, False, self.turns == self.limit, {}


class Ending(Endless):
    def step(self, text):
        observation, reward, *_ = super().step(text)
        return observation, reward, self.turns == self.limit, self.turns == self.limit, {}


def episodes_run(output_dir, environment, **kwargs):
    settings = {
        "max_completion_length": 40,
        "stop_token_ids": list(range(4, 32)),
        "max_steps": 1,
        "num_mini_batches": 1,
    }
    args = config(output_dir, per_device_train_batch_size=8, **settings | kwargs)
    return PPOTrainer(
        llama(),
        args=args,
        train_dataset=prompts(),
        processing_class=tokenizer(),
        environment_factory=environment,
    )


TEACHER = {"reference_prompt": "privileged_state", "kl_coef": 0.1}


@pytest.mark.parametrize(
    "settings, is_read", [({}, False), ({"critic": "adapter"}, True), (TEACHER, True)]
)
def test_privileged_state_that_nobody_reads_is_told(
    tmp_path, caplog, monkeypatch, settings, is_read
):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    episodes_run(tmp_path, Endless, **settings)
    assert ("`privileged_state` of Endless needs `critic='adapter'`" in caplog.text) is not is_read


@pytest.mark.parametrize("critic", ["side", "adapter"])
def test_reference_reads_the_privileged_state_and_what_follows(tmp_path, critic):
    run = episodes_run(tmp_path, Limited, critic=critic, **TEACHER)
    rollout, samples = first_rollout(run)
    for row, episode in enumerate(samples.batch.episodes):
        state = run.processing_class(episode.environment.privileged_state())["input_ids"]
        shown = [*state, *episode.prompt_ids]
        assert episode.other_prompts == {"reference": shown} | (
            {"critic": shown} if critic == "adapter" else {}
        )
        with run.actor_critic.reference(), torch.no_grad():
            expected = plain_logprobs(run.actor_critic, shown, episode.completion_ids)
        sampled = torch.tensor(episode.sampled) > 0
        assert 0 < sampled.sum() < len(sampled)  # turns, and observations between them
        torch.testing.assert_close(rollout.ref_logprobs[row, : len(sampled)], expected * sampled)


class Wrapper:
    """As Gymnasium's, which passes no other attributes on."""

    def __init__(self, environment):
        self.environment = environment

    @property
    def unwrapped(self):
        return self.environment

    def reset(self, *, seed=None, options=None):
        return self.environment.reset(seed=seed, options=options)

    def step(self, text):
        return self.environment.step(text)


def test_methods_below_a_wrapper_are_called(tmp_path):
    class Paid(Limited):
        def get_reward(self):
            return 100.0

    run = episodes_run(tmp_path, lambda: Wrapper(Paid()), critic="adapter")
    rollout, samples = first_rollout(run)
    assert samples.scored.totals.min() > 100
    assert rollout.sequences.critic_prompt_lengths.min() > 2


def first_rollout(run, value=None):
    if value is not None:
        run.actor_critic.value_head.bias.data.fill_(value)
    seen = rollouts_of(run)
    run.train()
    return seen[0]


@pytest.mark.parametrize(
    ("environment", "settings", "bootstraps"),
    [
        (Limited, {}, True),
        (Limited, {"advantage_level": "both"}, True),
        (Ending, {}, False),
        (Ending, {"advantage_level": "both"}, False),
        (Endless, {"max_tool_calling_iterations": 2}, False),
        (Endless, {"max_tool_calling_iterations": 2, "bootstrap_truncated": True}, True),
    ],
)
def test_episodes_cut_by_a_limit_have_the_returns_of_uncut_ones(
    tmp_path, environment, settings, bootstraps
):
    run = episodes_run(
        tmp_path, environment, critic="head", **{"advantage_level": "turn"} | PLAIN | settings
    )
    rollout, samples = first_rollout(run, VALUE)
    starts, _ = ppo_math.turn_starts(rollout.response_mask)
    for row, turns in enumerate(starts.sum(1).tolist()):
        assert 2 <= turns == samples.batch.episodes[row].turns
        expected = torch.full((turns,), VALUE)
        # of all steps only the last one is worse than its value, by what would have followed
        if not bootstraps:
            expected -= GAMMA * VALUE * (GAMMA * 0.8) ** torch.arange(turns).flip(0)
        torch.testing.assert_close(rollout.targets[row][starts[row]], expected)
    if bootstraps:
        assert rollout.advantages.abs().max() < 1e-5


def test_new_critic_expects_the_mean_return_after_limits(tmp_path):
    settings = PLAIN | {"normalize_values": True}
    run = episodes_run(tmp_path, Limited, advantage_level="turn", critic="head", **settings)
    rollout, samples = first_rollout(run)
    starts, _ = ppo_math.turn_starts(rollout.response_mask)
    [mean] = samples.values[starts].unique()
    assert mean > 1
    _, expected = ppo_math.gae(
        starts.float(), samples.values, starts, GAMMA, 0.8, mean.expand(len(starts))
    )
    torch.testing.assert_close(samples.returns, expected)


def test_new_critic_does_not_call_the_end_of_an_answer_bad(tmp_path):
    """Five tokens that pay 1 and an EOS that pays nothing: with one value everywhere, λ 0.8
    would charge the EOS."""

    def one_per_token(completion_ids, **_):
        return [[1.0] * (len(ids) - 1) + [0.0] for ids in completion_ids]

    sizes = {
        "per_device_train_batch_size": 64,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "max_steps": 1,
    }
    run = trainer(tmp_path, reward_funcs=one_per_token, **sizes, kl_coef=0.0, lam=0.8)
    write_completions(run, lambda prompts: [[5, 6, 7, 8, 9, 1]] * len(prompts))
    rollout, samples = first_rollout(run)
    to_go = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    assert (samples.values[0] - to_go).abs().max() < 0.5 and samples.values.std(0).max() < 0.2
    assert rollout.advantages[:, -1].abs().max() < 0.3 < to_go.mean() / to_go.std()


def test_new_critic_of_both_levels_fits_returns_over_turns(tmp_path):
    run = episodes_run(
        tmp_path, Ending, critic="side", advantage_level="both", gamma=GAMMA, kl_coef=0.0
    )
    fits = []
    head = run.actor_critic.value_head
    fit = head.fit
    head.fit = lambda recorded, targets, *rest: (
        fits.append(targets) or fit(recorded, targets, *rest)
    )
    rollout, _ = first_rollout(run)
    mask = rollout.response_mask
    turns = rollout.sequences.turns
    left = (turns.amax(1, keepdim=True) - turns + 1)[mask]  # turns, each of which pays 1 at its end
    expected = (1 - GAMMA**left) * VALUE
    assert mask.sum() > turns.amax(1).sum()
    torch.testing.assert_close(
        fits[0].sort()[0], ((expected - expected.mean()) / expected.std(correction=0)).sort()[0]
    )


@pytest.mark.parametrize("normalize_values", [True, False])
def test_new_critic_is_fitted_to_the_first_scored_rollout(tmp_path, normalize_values):
    calls = []

    def late(completion_ids, **kwargs):
        calls.append(None)
        return [None if len(calls) == 1 else float(ids[0]) for ids in completion_ids]

    settings = {
        "max_reward_failures": 1.0,
        "critic": "side",
        "normalize_values": normalize_values,
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
    }
    run = trainer(tmp_path, None, late, max_steps=2, **settings)
    first_fit = []
    run.updates.start = lambda rollout, step, start=run.updates.start: (
        first_fit.append(run.actor_critic.value_head.first_fit.norm().item()),
        start(rollout, step),
    )
    run.train()
    assert first_fit[0] == 0 < first_fit[1]


def test_first_fit_counts_in_values_after_a_limit(tmp_path, monkeypatch):
    """Though it is installed only before the updates."""
    compared = []
    outputs_after = credit.outputs_after

    def recorded(components, samples, run_state, first_fit):
        outputs = outputs_after(components, samples, run_state, first_fit)
        head = components.actor_critic.value_head
        head.install(CriticState(first_fit=first_fit))
        compared.append((outputs, outputs_after(components, samples, run_state)))
        head.install(CriticState())
        return outputs

    monkeypatch.setattr(credit, "outputs_after", recorded)
    first_rollout(episodes_run(tmp_path, Limited, critic="side"))
    [(outputs, installed)] = compared
    assert outputs.unique().numel() > 4
    torch.testing.assert_close(outputs, installed)


def test_completions_of_a_prompt_are_left_out_of_the_first_fit_together(tmp_path, monkeypatch):
    sizes = []
    fit = SideCritic.fit

    def recorded(self, summaries, targets, steps, parts, completions, all_sum):
        sizes.append(completions.tolist())
        return fit(self, summaries, targets, steps, parts, completions, all_sum)

    monkeypatch.setattr(SideCritic, "fit", recorded)
    trainer(tmp_path, critic="side", num_generations=4, max_steps=1).train()
    [of_parts] = sizes
    assert of_parts == [4, 4] + [0] * 14


def equal_first(completion_ids, trainer_state, **kwargs):
    """3.3 for all completions of the first rollout."""
    return [3.3 if trainer_state.global_step == 0 else 100.0 * ids[0] for ids in completion_ids]


def test_new_critic_is_fitted_when_scores_first_differ(tmp_path):
    settings = {
        "critic": "side",
        "kl_coef": 0.0,
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "max_steps": 3,
    }
    run = trainer(
        tmp_path / "whole", None, equal_first, save_strategy="steps", save_steps=1, **settings
    )
    seen = []
    run.updates.start = lambda rollout, step, start=run.updates.start: (
        seen.append((run.actor_critic.value_head.first_fit.clone(), rollout)),
        start(rollout, step),
    )
    run.train()
    (before, first), (fit, rollout), (later, _) = seen
    assert not before.any() and fit.any() and torch.equal(later, fit)
    assert not first.advantages.any() and not first.targets.any()

    # its first values are fitted in the units of its targets
    mask = rollout.response_mask
    errors = (rollout.targets - rollout.old_values)[mask]
    assert errors.square().mean() < rollout.targets[mask].var()

    # a run that resumes between the two ends bit for bit the same
    again = trainer(tmp_path / "again", None, equal_first, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for name, x in run.actor_critic.value_head.state_dict().items():
        assert torch.equal(again.actor_critic.value_head.state_dict()[name], x), name
    assert again.run_state.critic.returns == run.run_state.critic.returns


@pytest.mark.parametrize("level", ["token", "turn"])
def test_first_values_over_turns_equal_the_critics_outputs(tmp_path, level):
    """The outputs after its first fit."""
    run = episodes_run(tmp_path, Ending, advantage_level=level, critic="side")
    compared = []
    start = run.updates.start

    def begin(rollout, step):
        outputs = rollouts.score_tokens(run.components, rollout.sequences).values
        starts, _ = ppo_math.turn_starts(rollout.sequences.turns)
        if level == "turn":
            has_value = rollout.response_mask & starts
        else:
            has_value = rollout.response_mask
        compared.append((outputs, rollout.old_values, has_value))
        return start(rollout, step)

    run.updates.start = begin
    run.train()
    [(outputs, values, mask)] = compared
    assert run.actor_critic.value_head.first_fit.any() and values[mask].std() > 0.01
    torch.testing.assert_close(outputs[mask], values[mask])


def test_value_after_a_limit_has_room_in_the_context(tmp_path):
    trainer(tmp_path, max_completion_length=59)
    with pytest.raises(PromptError, match="leaves 4"):
        trainer(tmp_path, max_completion_length=59, bootstrap_truncated=True)


@pytest.mark.parametrize("bootstraps", [False, True])
def test_truncated_completions_bootstrap_if_they_are_told_to(tmp_path, bootstraps):
    def one_per_token(completion_ids, **_):
        return [[1.0] * len(ids) for ids in completion_ids]

    settings = {
        "max_completion_length": 6,
        "stop_token_ids": list(range(24, 32)),
        "critic": "head",
        "max_steps": 1,
    }
    run = trainer(
        tmp_path,
        reward_funcs=one_per_token,
        bootstrap_truncated=bootstraps,
        **PLAIN | {"lam": 1.0, "lam_critic": 1.0},
        **settings,
    )
    rollout, samples = first_rollout(run, VALUE)
    assert 0 < samples.stopped.sum() < len(samples.stopped)
    for row, stopped in enumerate(samples.stopped.tolist()):
        left = torch.arange(int(rollout.response_mask[row].sum()), 0, -1)
        if stopped or not bootstraps:
            expected = VALUE * (1 - GAMMA**left)
        else:
            expected = torch.full(left.shape, VALUE)
        torch.testing.assert_close(rollout.targets[row, : len(left)], expected)


def test_nothing_is_added_to_scores_of_truncated_completions_as_a_whole(
    tmp_path, caplog, monkeypatch
):
    """They would be paid twice, and a policy would learn not to end."""
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    settings = PLAIN | {
        "max_completion_length": 6,
        "stop_token_ids": list(range(24, 32)),
        "max_steps": 1,
        "bootstrap_truncated": True,
        "lam": 1.0,
        "lam_critic": 1.0,
        "critic": "head",
    }

    def returns(*rewards, **more):
        run = trainer(tmp_path, reward_funcs=list(rewards), **settings | more)
        rollout, samples = first_rollout(run, VALUE)
        last = torch.stack(
            [row[mask][-1] for row, mask in zip(rollout.targets, rollout.response_mask)]
        )
        return last, samples.stopped

    def as_a_whole(completion_ids, **_):
        return [2.0] * len(completion_ids)

    def along_the_way(completion_ids, **_):
        return [[(0, 1.0)] for _ in completion_ids]

    def does_not_apply(completion_ids, **_):
        return [None] * len(completion_ids)

    last, stopped = returns(along_the_way, does_not_apply)
    assert 0 < stopped.sum() < len(stopped)
    is_first = last == 1.0  # a completion of one token
    torch.testing.assert_close(last[~stopped], torch.full_like(last[~stopped], GAMMA * VALUE))
    assert not last[stopped & ~is_first].any() and "No value of the critic" not in caplog.text
    torch.testing.assert_close(returns(as_a_whole)[0], torch.full_like(last, 2.0))
    assert "scored the truncated completion as a whole, by a number" in caplog.text
    # one that weighs nothing is no score
    weighed, _ = returns(along_the_way, as_a_whole, reward_weights=[1.0, 0.0])
    torch.testing.assert_close(weighed, last)


def test_lambda_of_a_length_counts_turns_where_lambda_does(tmp_path):
    class OfThree(Endless):
        def step(self, text):
            observation, reward, *_ = super().step(text)
            return observation, reward, self.turns == 3, False, {}

    def lam(level):
        run = episodes_run(tmp_path, OfThree, lam_length_alpha=0.5, advantage_level=level)
        run.train()
        return next(row["lam"] for row in run.state.log_history if "lam" in row)

    assert lam("both") == lam("turn") == pytest.approx(1 - 1 / (0.5 * 3))
    assert lam("token") > lam("turn")


def test_nothing_is_added_to_the_final_reward_of_a_truncated_episode(tmp_path):
    class Paid(Limited):
        def get_reward(self):
            return 5.0

    run = episodes_run(tmp_path, Paid, critic="head", **PLAIN | {"advantage_level": "turn"})
    rollout, samples = first_rollout(run, VALUE)
    assert {episode.ending for episode in samples.batch.episodes} == {"limited"}
    for episode, total in zip(samples.batch.episodes, samples.scored.totals):
        assert total == 5.0 + episode.turns
    starts, _ = ppo_math.turn_starts(rollout.sequences.turns)
    last_turn = starts & (starts.cumsum(1) == starts.sum(1, keepdim=True))
    torch.testing.assert_close(rollout.targets[last_turn], torch.full((8,), 6.0))


@pytest.mark.parametrize("critic", ["head", "side", "adapter"])
def test_value_after_a_limit_is_that_of_the_next_turn(tmp_path, critic, monkeypatch):
    run = episodes_run(tmp_path, Limited, critic=critic, bootstrap_truncated=True)
    torch.manual_seed(1)
    for weight in run.actor_critic.critic_parameters().values():
        weight.data += 0.2 * torch.randn_like(weight)
    _, samples = first_rollout(run)
    state = run.run_state
    batch = samples.batch
    whole = samples.sequences
    whole = rollouts.observed_by_critic(  # in today's units
        run.actor_critic.value_head, whole, samples.scored.tokens, whole.completion_mask, state
    )
    values = rollouts.score_tokens(run.components, whole).values
    starts = ppo_math.turn_starts(whole.completion_mask)[0]

    # cut each episode before its second turn
    seconds = [int(row.nonzero()[1]) for row in starts]
    ends = [batch.episodes[row].sampled.index(0) for row in range(len(batch))]
    cut = [ids[:end] for ids, end in zip(batch.completion_ids, ends)]
    after = [ids[end:second] for ids, end, second in zip(batch.completion_ids, ends, seconds)]
    if critic == "adapter":
        shown = {"critic": [x.other_prompts["critic"] for x in batch.episodes]}
    else:
        shown = {}
    assert all(len(set(map(len, x))) > 1 and min(map(len, x)) > 2 for x in shown.values())
    sampled = [[1] * end for end in ends]
    sequences = Sequences.from_token_ids(
        [x.prompt_ids for x in batch.episodes], cut, 0, "cpu", shown, sampled
    )
    scored = samples.scored._replace(tokens=samples.scored.tokens[:, : max(ends)])
    parts = zip(batch.episodes, cut, sampled, after)
    episodes = [
        replace(
            x,
            completion_ids=ids,
            sampled=turns,
            starts=x.starts[:1],
            following=next_ids,
            bootstraps=True,
        )
        for x, ids, turns, next_ids in parts
    ]
    episodes[3] = replace(episodes[3], bootstraps=False, following=[])
    samples = samples._replace(
        sequences=sequences, batch=replace(batch, episodes=episodes), scored=scored
    )
    expected = values[range(len(batch)), seconds].index_fill(0, torch.tensor(3), 0)
    assert expected.std() > 1e-3
    is_cut = torch.tensor([episode.bootstraps for episode in samples.batch.episodes])
    outputs = credit.outputs_after(run.components, samples, state) * is_cut
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_group_baselines_compare_whole_episodes(tmp_path, estimator):
    class Lucky(Limited):
        def step(self, text):
            observation, _, *rest = super().step(text)
            return observation, float(len(text)), *rest

    run = episodes_run(
        tmp_path,
        Lucky,
        critic="none",
        num_generations=4,
        advantage_estimator=estimator,
        kl_coef=0.0,
    )
    rollout, samples = first_rollout(run)
    totals = torch.tensor([sum(reward for _, reward in x.rewards) for x in samples.batch.episodes])
    expected = OVER_GROUPS[estimator](totals, torch.ones(8), 4)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(rollout.advantages, expected[:, None] * rollout.response_mask)


def test_rewards_of_a_run_are_normalized_apart(tmp_path):
    def first(completion_ids, **kwargs):
        return [float(ids[0]) for ids in completion_ids]

    def last(completion_ids, **kwargs):
        return [float(ids[-1]) if ids[0] % 3 else None for ids in completion_ids]

    settings = {
        "multi_objective_aggregation": "normalize_then_sum",
        "reward_weights": [1.0, 0.2],
        "kl_coef": 0.0,
    }
    run = trainer(tmp_path, None, [first, last], critic="none", num_generations=4, **settings)
    rollout, samples = first_rollout(run)
    each = [OVER_GROUPS["grpo"](x, ~x.isnan(), 4) for x in samples.scored.rewards.T]
    assert samples.scored.rewards.isnan().any() and min(x.std() for x in each) > 0.1
    total = each[0] + 0.2 * each[1]
    expected = (total - total.mean()) / (total.std() + 1e-4)
    torch.testing.assert_close(rollout.advantages, expected[:, None] * rollout.response_mask)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_critic_is_pretrained_and_measured_on_episodes(tmp_path, monkeypatch, level):
    monkeypatch.setattr(recipe, "HELD_OUT", 64)
    settings = {
        "critic": "side",
        "normalize_values": True,
        "lam_critic": 1.0,
        "max_steps": 40,
        "num_ppo_epochs": 4,
    }
    settings |= {"advantage_level": level, "critic_learning_rate": 2e-3, "kl_coef": 0.0}
    run = episodes_run(tmp_path, Ending, **settings)
    ((rollout, samples),) = held_out_rollouts(run, completions=8)
    starts, _ = ppo_math.turn_starts(rollout.sequences.turns)
    # turns, each of which pays 1
    left = (starts.flip(1).cumsum(1).flip(1) * starts)[rollout.response_mask & starts]
    assert (
        torch.equal(samples.returns[rollout.response_mask & starts], left.float())
        and left.max() == 4
    )
    assert not (tmp_path / ANSWERS).exists()
    numbers = recipe.pretrain_critic(run)
    assert numbers["explained_variance_before"] < 0.1 and numbers["explained_variance_after"] > 0.2


def test_explained_variance_of_turns_is_at_their_first_tokens(tmp_path):
    settings = {
        "advantage_level": "turn",
        "lam_critic": 1.0,
        "kl_coef": 0.0,
        "stop_token_ids": list(range(16, 32)),
    }
    # units move while rollouts are held out
    settings |= {"critic": "head", "normalize_values": False}
    run = episodes_run(tmp_path, Ending, **settings)
    torch.nn.init.normal_(run.actor_critic.value_head.weight, std=0.3)
    ((rollout, samples),) = held_out_rollouts(run, completions=8)
    first = ppo_math.turn_starts(rollout.sequences.turns)[0] & rollout.response_mask
    assert first.sum() < rollout.response_mask.sum()
    errors = (samples.returns - samples.values)[first]
    returns = samples.returns[first]
    expected = 1 - errors.var() / returns.var()
    assert recipe.explained_variance(run, [(rollout, samples)]) == pytest.approx(
        expected.item(), abs=1e-4
    )


def test_probe_measures_episodes(tmp_path):
    run = episodes_run(
        tmp_path, Ending, critic="side", normalize_values=True, advantage_level="turn", kl_coef=0.0
    )
    assert probe(run, 64)["completions"] == 64
