"""Episodes run by themselves: which turns are sampled together, and that no result depends on
timing."""

import json
import threading
import time
from functools import partial

import pytest
import torch
from fake_vllm import serving
from runs_of_tiny import trainer, weights
from scripted import Echo, player_of, rows_of
from tiny import config, llama, prompts

from trl_ppo_ext.data import PROMPT_IDS
from trl_ppo_ext.episodes import turns, vllm_server
from trl_ppo_ext.episodes.engine import VLLMError
from trl_ppo_ext.episodes.record import ANSWERS

BASE = "org/base"


@pytest.fixture
def impatient(monkeypatch):
    """Ready episodes wait for a moment only."""
    monkeypatch.setattr(turns, "QUICK", 0.02)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(vllm_server, "PAUSE", 0.02)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with serving(BASE) as server:
        server.longest = 6
        yield server


class Holds:
    """Environment whose `hold` lasts until another episode has made three steps."""

    def reset(self, row, seed):
        self.steps = 0

    def step(self, text):
        if text == "hold":
            self.freed = three_steps.wait(10)
            return "go on", 0.0, False
        self.steps += 1
        if self.steps == 3:
            three_steps.set()
        return "go on", 1.0, self.steps == 3


three_steps = threading.Event()


# ---- groups in this process ----


def sizes(player):
    return [size for size, _ in player.generator.calls]


def test_slow_tool_does_not_hold_other_episodes(impatient):
    three_steps.clear()
    rows = rows_of("alpha", "beta", "gamma")
    script = {"alpha": ["hold", *["x"] * 3], "": ["x"] * 3}
    player = player_of(script, rows, factory=Holds)
    slow, *others = player.play(rows, [7] * 3)
    assert slow.environment.freed and [x.turns for x in (slow, *others)] == [4, 3, 3]
    assert sizes(player) == [3, 2, 2, 1, 1, 1]


def test_quick_tools_are_waited_for():
    class Quick(Echo):
        def step(self, text):
            time.sleep(0.01 * self.seed)
            return super().step(text)

    rows = rows_of(*"abcdefgh")
    player = player_of({"": ["w2"]}, rows, factory=Quick)
    player.play(rows, list(range(8)))
    assert sizes(player) == [8, 8, 8]


def test_first_group_waits_for_all_resets(impatient):
    class SlowReset(Echo):
        def reset(self, row, seed):
            time.sleep(0.2 * seed)
            return super().reset(row, seed)

    rows = rows_of("alpha", "beta")
    player = player_of({"": ["w2"]}, rows, factory=SlowReset)
    player.play(rows, [0, 1])
    assert sizes(player) == [2, 2, 2]


def test_failure_of_an_episode_loses_nothing_of_the_others(impatient):
    class Fails(Echo):
        def step(self, text):
            if text == "fail":
                raise OSError("connection lost")
            return super().step(text)

    rows = rows_of("alpha", "beta")
    player = player_of({"alpha": ["w2", "fail"], "beta": ["w2"]}, rows, factory=Fails)
    failed, other = player.play(rows, [7, 7])
    assert str(failed.error) == "connection lost" and failed.turns == 2
    assert other.error is None and other.turns == 3 and len(other.rewards) == 3


def test_error_of_the_sampler_ends_the_rollout(impatient):
    three_steps.clear()
    rows = rows_of("alpha", "beta")
    player = player_of({"alpha": ["hold"], "": ["x"] * 3}, rows, factory=Holds)
    generate = player.generator.generate

    def failing(prompts, rooms=None):
        if len(player.generator.calls) == 2:
            raise RuntimeError("out of memory")
        return generate(prompts, rooms)

    player.generator.generate = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        player.play(rows, [7, 7])
    three_steps.set()
    running = player.lent[0]
    deadline = time.monotonic() + 5
    while running.error is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert running.error is not None  # so its environment is not used again


# ---- groups of a run that was killed ----


class Sleeps:
    """Environment whose steps sleep for a time that depends on the run, the row and the turn."""

    shift = 0

    def reset(self, row, seed):
        self.row = row["target"]
        self.turns = 0
        return f" w{self.row}"

    def step(self, text):
        self.turns += 1
        time.sleep(0.06 * ((self.row + self.turns + self.shift) % 3))
        return f" w{len(text) % 9} w1", 1.0, self.turns == 4


def groups_in(path):
    lines = path.read_text().splitlines()
    return [json.loads(x)["group"] for x in lines if x.startswith('{"group"') and x[-1] == "}"]


@pytest.fixture
def sampled(tmp_path, impatient):
    """Function that plays a rollout with the tiny model: ids of episodes, and their groups."""
    rows = [row | {"target": n} for n, row in enumerate(prompts(6).to_list())]
    settings = {"max_completion_length": 40, "stop_token_ids": list(range(12, 32))}
    model = llama(max_position_embeddings=256)
    run = trainer(tmp_path / "run", model, environment_factory=Sleeps, **settings)
    player = run.components.player
    player.folder = str(tmp_path)
    player.saves = True
    ids = run.processing_class([row["prompt"] for row in rows])["input_ids"]
    rows = [row | {PROMPT_IDS: x} for row, x in zip(rows, ids)]

    def play(shift, step):
        Sleeps.shift = shift
        torch.manual_seed(0)
        episodes = player.play(rows, list(range(6)), step)
        groups = groups_in(tmp_path / ANSWERS / f"{step}-0.jsonl")
        return [(x.ids, x.logprobs) for x in episodes], groups

    return play


def test_recorded_groups_are_sampled_again_at_any_timing(sampled):
    first, groups = sampled(0, step=2)
    assert min(map(len, groups)) < 6
    for shift in (1, 2):
        assert sampled(shift, step=2) == (first, groups)
    _, others = sampled(1, step=4)  # another rollout has groups of its own
    assert others != groups


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.8])
def test_killed_rollout_goes_on_after_its_groups(sampled, tmp_path, kept):
    _, groups = sampled(0, step=2)
    path = tmp_path / ANSWERS / "2-0.jsonl"
    text = path.read_text()
    path.write_text(text[: int(kept * len(text))])
    begun = groups_in(path)
    resumed, resumed_groups = sampled(1, step=2)
    assert resumed_groups[: len(begun)] == begun == groups[: len(begun)]
    assert sampled(2, step=2) == (resumed, resumed_groups)


def test_recorded_group_without_an_episode_that_now_ends_is_sampled(impatient, tmp_path):
    """It fails now, e.g. because its state depends on more than its seed."""

    class Fragile(Echo):
        fails = False

        def step(self, text):
            if self.fails and text == "w4":
                raise OSError("gone")
            return super().step(text)

    rows = rows_of("alpha", "beta")
    disk = {"output_dir": str(tmp_path), "save_strategy": "steps"}
    make = partial(player_of, {"alpha": ["w4"], "beta": ["w2"]}, rows, factory=Fragile, **disk)
    make().play(rows, [7, 7], 2)
    Fragile.fails = True
    player = make()
    failed, other = player.play(rows, [7, 7], 2)
    assert str(failed.error) == "gone" and other.turns == 3 and sizes(player) == [2, 1, 1]


# ---- a server ----


class Game:
    """Environment of three turns; those of the first row take `seconds`."""

    seconds = 0.0

    def reset(self, row, seed):
        self.row = row["target"]
        self.turns = 0
        return f" w{self.row % 9}"

    def step(self, text):
        self.turns += 1
        if self.row == 0:
            time.sleep(self.seconds)
        return f" w{len(text) % 9} w1", float(len(text)), self.turns == 3


def run(server, output_dir, rows=8, **kwargs):
    settings = {
        "vllm_base_model": BASE,
        "vllm_server_base_url": server.url,
        "vllm_max_logp_difference": 99.0,
        "max_completion_length": 48,
        "stop_token_ids": list(range(4, 32)),
        "max_steps": 8,
        "environment_factory": Game,
    }
    data = [row | {"target": n} for n, row in enumerate(prompts(rows).to_list())]
    return trainer(
        output_dir,
        llama(max_position_embeddings=256),
        dataset=data,
        use_vllm=True,
        vllm_mode="server",
        **settings | kwargs,
    )


def test_each_turn_of_each_episode_has_a_seed_of_its_own(server, tmp_path):
    """Else a policy that repeats itself would draw the same tokens again."""
    built = run(server, tmp_path)
    built.evaluate(built.train_dataset)
    seeds = [body["seed"] for path, body, _ in server.asked if path == "/v1/completions"]
    assert len(seeds) > 8 and len(set(seeds)) == len(seeds)


def test_server_gets_the_turns_of_others_while_a_tool_runs(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Game, "seconds", 0.6)
    built = run(server, tmp_path)
    start = time.monotonic()
    times = []
    complete = built.components.player.generator.engine._complete

    async def timed(*args):
        times.append(time.monotonic() - start)
        return await complete(*args)

    built.components.player.generator.engine._complete = timed
    metrics = built.evaluate(built.train_dataset)
    assert metrics["eval_episodes/turns"] == 3 and len(times) == 24
    # all others' turns, and the first two of the slow one, in one and a half of its steps
    assert sorted(times)[-2] < times[0] + 0.9


def test_result_with_a_server_depends_on_no_timing(server, tmp_path, monkeypatch):
    ends = []
    for number, seconds in enumerate((0.0, 0.1)):
        monkeypatch.setattr(Game, "seconds", seconds)
        server.delay = seconds / 10
        built = run(server, tmp_path / str(number))
        built.train()
        ends.append(weights(built))
    assert all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())


def test_run_with_a_server_killed_in_an_episode_resumes_bit_for_bit(server, tmp_path):
    whole = run(server, tmp_path / "whole")
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 2}
    killed = run(server, tmp_path / "killed", **saving)
    complete = killed.components.player.generator.engine._complete
    asked = []

    async def dying(*args):
        asked.append(args)
        if len(asked) == 38:  # in the second of four rollouts of 24 turns
            raise VLLMError("killed")
        return await complete(*args)

    killed.components.player.generator.engine._complete = dying
    with pytest.raises(VLLMError, match="killed"):
        killed.train()
    resumed = run(server, tmp_path / "killed", **saving)
    resumed.train(resume_from_checkpoint=True)
    expected = weights(whole)
    assert all(torch.equal(x, expected[name]) for name, x in weights(resumed).items())


def test_episodes_have_256_requests_in_flight(server, tmp_path):
    server.delay = 1.0
    built = run(server, tmp_path, rows=300, per_device_eval_batch_size=300)
    built.evaluate(built.train_dataset)
    assert server.most == 256


@pytest.mark.parametrize(("concurrency", "most"), [(8, 8), (6, 4), (3, 4)])
def test_concurrency_limits_completions_in_flight(server, tmp_path, concurrency, most):
    """A request for more completions of a prompt than that is sent by itself."""
    server.delay = 0.05
    settings = {"num_generations": 4, "environment_factory": None}
    built = run(server, tmp_path, max_steps=2, vllm_concurrency=concurrency, **settings)
    built.train()
    assert server.most == most


def test_concurrency_without_a_server_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`vllm_kwargs\['concurrency'\]` must be omitted without"):
        config(tmp_path, vllm_concurrency=8)
