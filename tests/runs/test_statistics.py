"""Statistics of whole runs whose truth is known: where credit is, what a critic knows, one score
that is broken."""

import json

import pytest
from datasets import Dataset
from runs_of_tiny import rollouts_of, trainer, write_completions

from trl_ppo_ext.ppo.state import RunState

SIZES = {
    "per_device_train_batch_size": 16,
    "num_mini_batches": 1,
    "num_ppo_epochs": 1,
    "kl_coef": 0.0,
}


class Costly:
    """Four turns, each of which costs; the length of the first answer decides whether the last
    one pays."""

    def reset(self, row, seed):
        self.turn = 0
        self.wins = False
        return " first"

    def step(self, text):
        if self.turn == 0:
            self.wins = len(text.split()) % 2 == 1
        self.turn += 1
        ends = self.turn == 4
        return " next", -0.1 + (self.wins and ends), ends


class Paid(Costly):
    """The same, but each turn pays for its own answer."""

    def step(self, text):
        self.turn += 1
        return " next", -0.1 + len(text.split()) % 2, self.turn == 4


class Best(Costly):
    """One turn, which pays as a whole, in units of thousands."""

    def step(self, text):
        return None, 5000.0 * len(text.split()), True


def words(prompts):
    """One or two words and EOS."""
    return [[5] * (1 + (sum(ids) + row // 3) % 2) + [1] for row, ids in enumerate(prompts)]


def logs_of(run):
    run.train()
    return [row for row in run.state.log_history if "reward" in row]


@pytest.mark.parametrize("environment, over_turn", [(Costly, 1.0), (Paid, 0.8)])
def test_default_lambda_ignores_a_constant_cost_per_turn(tmp_path, environment, over_turn):
    settings = SIZES | {"max_steps": 3, "advantage_level": "turn", "max_completion_length": 24}
    run = trainer(tmp_path, reward_funcs=None, environment_factory=environment, **settings)
    write_completions(run, words)
    logs = logs_of(run)
    assert len(logs) == 3 and all(row["lam"] == pytest.approx(over_turn) for row in logs)


class Large(Paid):
    """The same from -100 to 0."""

    def step(self, text):
        observation, reward, ends = super().step(text)
        return observation, 25 * (reward - 0.9), ends


def test_each_environment_normalizes_rewards_by_its_own_unit(tmp_path):
    rows = Dataset.from_dict({"prompt": ["a"] * 16, "environment": ["paid", "large"] * 8})
    environments = {"environment_factory": {"paid": Paid, "large": Large}, "dataset": rows}
    settings = SIZES | {"max_steps": 1, "max_completion_length": 24, "normalize_rewards": True}
    run = trainer(tmp_path, reward_funcs=None, **environments, **settings)
    write_completions(run, words)
    seen = rollouts_of(run)
    run.train()
    rewards = seen[0][1].scored.totals
    is_large = rewards < -4
    for name, chosen in (("paid", ~is_large), ("large", is_large)):
        assert run.run_state.scores[name].weight == chosen.sum() == 8
        assert run.run_state.scores[name].sample_deviation == pytest.approx(
            rewards[chosen].std().item()
        )
    restored = RunState.from_json(json.loads(json.dumps(run.run_state.to_json())))
    assert restored.scores == run.run_state.scores
    deviations = [seen[0][1].returns[chosen][:, 0].std().item() for chosen in (is_large, ~is_large)]
    assert deviations[0] == pytest.approx(deviations[1], rel=0.5)  # 25 times as large without


def test_default_lambda_counts_the_steps_of_process_rewards(tmp_path):
    def steps(completion_ids, **kwargs):
        return [[(3, 3.0 * (ids[0] % 2)), (7, float(ids[4] % 3))] for ids in completion_ids]

    run = trainer(tmp_path, reward_funcs=steps, **SIZES, max_steps=1)
    write_completions(
        run, lambda prompts: [[*range(4 + n % 7, 11 + n % 7), 1] for n in range(len(prompts))]
    )
    [row] = logs_of(run)
    assert row["lam"] == pytest.approx(0.8 ** (2 / 8))


@pytest.mark.parametrize("critic, step, group", [("side", 0, 1), ("side", 1, 4), ("head", 1, 1)])
def test_one_broken_score_does_not_set_the_unit_of_the_others(tmp_path, critic, step, group):
    """A score of a million in one rollout would silence all others for dozens of them."""

    def broken(completion_ids, trainer_state, **kwargs):
        scores = [float(ids[0] % 5) for ids in completion_ids]
        if trainer_state.global_step == step:
            scores[3] = 1e6
        return scores

    run = trainer(
        tmp_path, reward_funcs=broken, critic=critic, num_generations=group, **SIZES, max_steps=3
    )
    seen = rollouts_of(run)
    logs = logs_of(run)
    assert [row["outlying_completions"] for row in logs] == [
        float(step == number) for number in range(3)
    ]
    assert 0.1 < run.run_state.critic.returns.unit < 10
    rollout = seen[step][0]
    others = [0, 1, 2, *range(4, 16)]
    assert (
        0.1 < rollout.advantages[others].abs().max() < 10
        and rollout.old_values[others].abs().max() < 10
    )
    # it is learned from, up to a bound
    assert rollout.advantages[3].max() == rollout.targets[3].max() == 100


@pytest.mark.parametrize("size", [500.0, 1e6])
def test_rollout_with_broken_scores_does_not_silence_the_later_ones(tmp_path, size):
    """Whether they are found, or not; in groups, where a verifier breaks on a prompt."""

    def broken(completion_ids, trainer_state, **kwargs):
        scores = [float(ids[0] % 5) for ids in completion_ids]
        if trainer_state.global_step == 1:
            scores[:2] = [size, size]
        return scores

    settings = {"num_generations": 2, "max_steps": 12}
    run = trainer(tmp_path, reward_funcs=broken, **SIZES, **settings)
    write_completions(run, lambda prompts: [[4 + n % 5, 1] for n in range(len(prompts))])
    seen = rollouts_of(run)
    logs = logs_of(run)
    deviations = [rollout.advantages[rollout.advantages != 0].std() for rollout, *_ in seen]
    assert 0.5 < deviations[-1] / deviations[0] < 2
    assert logs[1]["outlying_completions"] == (2 if size == 1e6 else 0)


def test_scales_of_environments_do_not_choose_lambda_or_outliers(tmp_path):
    """With `normalize_rewards` each has a unit of its own: multiplying its scores changes
    nothing."""

    class Small(Best):
        def step(self, text):
            return None, float(len(text.split())), True

    logs = []
    for best in (Best, Small):
        rows = Dataset.from_list(
            [{"prompt": f"{n}", "environment": "best" if n % 4 == 0 else "paid"} for n in range(16)]
        )
        settings = SIZES | {"max_steps": 2, "max_completion_length": 24, "normalize_rewards": True}
        run = trainer(
            tmp_path / best.__name__,
            reward_funcs=None,
            dataset=rows,
            environment_factory={"best": best, "paid": Paid},
            **settings,
        )
        write_completions(run, words)
        logs.append(logs_of(run))
    for large, small in zip(*logs):
        assert large["outlying_completions"] == 0
        assert large["lam"] == small["lam"] < 1
        assert large["objective"] == pytest.approx(small["objective"], abs=1e-4)


def test_scores_that_hardly_differ_are_no_outliers_in_their_unit(tmp_path):
    """An environment that is nearly solved has a mean of thousands of deviations."""

    class Solved(Best):
        def reset(self, row, seed):
            self.pays = float(row["pays"])
            return super().reset(row, seed)

        def step(self, text):
            return None, self.pays, True

    rows = Dataset.from_list(
        [
            {
                "prompt": f"{n}",
                "environment": "solved" if n % 16 == 0 else "paid",
                "pays": 1 - n // 16 / 1e4,
            }
            for n in range(48)
        ]
    )
    settings = {
        "max_steps": 3,
        "max_completion_length": 24,
        "normalize_rewards": True,
        "shuffle_dataset": False,
    }
    run = trainer(
        tmp_path,
        reward_funcs=None,
        dataset=rows,
        environment_factory={"solved": Solved, "paid": Paid},
        **SIZES | settings,
    )
    write_completions(run, words)
    assert [row["outlying_completions"] for row in logs_of(run)] == [0, 0, 0]


def test_environment_may_pay_all_turns_of_an_episode_alike(tmp_path):
    """Its rewards are no scores of whole completions that were spread over tokens."""

    class Rated(Costly):
        def reset(self, row, seed):
            self.rate = float(row["rate"])
            return super().reset(row, seed)

        def step(self, text):
            self.turn += 1
            return " next", self.rate, self.turn == 4

    rows = Dataset.from_list([{"prompt": f"{n}", "rate": n} for n in range(1, 17)])
    settings = SIZES | {"max_steps": 1, "max_completion_length": 24}
    run = trainer(tmp_path, reward_funcs=None, dataset=rows, environment_factory=Rated, **settings)
    write_completions(run, lambda prompts: [[1]] * len(prompts))
    assert [row["reward"] for row in logs_of(run)] == [pytest.approx(4 * 8.5)]


def test_rare_success_beside_a_small_penalty_has_a_unit(tmp_path):
    def solved(completion_ids, **kwargs):
        return [float(row == 3) - 0.001 * len(ids) for row, ids in enumerate(completion_ids)]

    run = trainer(tmp_path, reward_funcs=solved, **SIZES, max_steps=1)
    [row] = logs_of(run)
    assert row["outlying_completions"] == 0
    assert run.run_state.critic.returns.unit == pytest.approx(15**0.5 / 16, rel=0.05)


def test_side_critic_reads_a_reward_for_what_a_tool_answered(tmp_path):
    """It enters at the last token that was sampled before."""

    def paid(completion_ids, **kwargs):
        return [[(len(ids) // 2, 3.0), (len(ids) - 1, 1.0)] for ids in completion_ids]

    settings = SIZES | {"max_steps": 2, "max_completion_length": 24}
    run = trainer(tmp_path, reward_funcs=paid, environment_factory=Costly, **settings)
    write_completions(run, words)
    seen = rollouts_of(run)
    logs_of(run)
    rollout, samples = seen[1]
    mask = samples.sequences.completion_mask
    scores = samples.scored.tokens
    assert not scores[~mask].any() and scores.sum(1).tolist() == pytest.approx(
        samples.scored.totals.tolist()
    )
    assert rollout.sequences.observed[:, -1].any()


def test_solved_task_has_no_advantages_and_explains_nothing(tmp_path):
    run = trainer(
        tmp_path,
        reward_funcs=lambda completion_ids, **_: [0.3] * len(completion_ids),
        **SIZES,
        max_steps=3,
    )
    seen = rollouts_of(run)
    logs = logs_of(run)
    assert all(not rollout.advantages.any() for rollout, *_ in seen)
    names = [name for name in logs[0] if name.startswith(("value/explained", "value/weight"))]
    assert len(names) == 3 and all(row[name] == 0 for row in logs for name in names)


def test_group_baseline_needs_several_completions_per_prompt(tmp_path):
    """Each prompt has a score of its own, and chance adds little: the other completions know it."""

    def by_prompt(prompts, completion_ids, **kwargs):
        return [len(prompt) + 0.1 * (ids[0] % 3) for prompt, ids in zip(prompts, completion_ids)]

    settings = {"critic": "head", "learning_rate": 1e-9}  # a critic that knows nothing
    run = trainer(
        tmp_path / "groups",
        reward_funcs=by_prompt,
        **SIZES,
        **settings,
        num_generations=4,
        max_steps=2,
    )
    logs = logs_of(run)
    # less than 1, for it is fitted to three prompts of four completions
    assert logs[1]["value/weight_of_group"] > 0.5 > 0.1 > logs[1]["value/weight_of_critic"]
    assert logs[1]["value/explained_variance"] < 0.1  # what they know is not the critic's
    alone = logs_of(
        trainer(tmp_path / "alone", reward_funcs=by_prompt, **SIZES, **settings, max_steps=2)
    )
    assert "value/weight_of_group" not in alone[1] and alone[1]["value/explained_variance"] < 0.1
