"""A run that is killed within an episode goes on as if nothing had happened, though no tool
answers twice the same."""

import asyncio
import json
import os
import random
import signal
import time
from functools import partial

import pytest
import torch
from accelerate.state import AcceleratorState
from processes import finished, start
from runs_of_tiny import rollouts_of, weights
from scripted import call, write_turns
from tiny import byte_tokenizer, config, llama, prompts, tokenizer

from trl_ppo_ext import PPOTrainer, RewardError, StepResult
from trl_ppo_ext.checkpoints.atomic import checkpoints
from trl_ppo_ext.episodes import play, turns
from trl_ppo_ext.episodes.record import ANSWERS, Record
from trl_ppo_ext.episodes.turns import GroupedSampler

STEPS = 6  # three rollouts
SLOWEST = 0.04  # seconds of an answer
CHANCE = random.SystemRandom()


class Tape:
    """Random answers to questions, in the order in which they were asked; or, of another run,
    the given ones."""

    def __init__(self, path, answers=None):
        self.path = path
        self.answers = answers

    def asked(self, key, draw):
        if self.answers is not None:
            return self.answers[key]
        answer = draw()
        line = json.dumps([key, answer]).encode() + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line)
        os.close(descriptor)
        return answer

    def latency(self):
        return 0 if self.answers is not None else CHANCE.uniform(0, SLOWEST)


def text():
    return "".join(f" w{CHANCE.randrange(12)}" for _ in range(5))


def plain_trainer(tape, args, **kwargs):
    """A plain environment, whose turns a policy samples. It has a state: how many there were."""

    class Game:
        def reset(self, row, seed):
            self.seed = seed
            self.turns = 0
            time.sleep(tape.latency())
            return tape.asked(f"{seed} reset", text)

        def step(self, said):
            self.turns += 1
            time.sleep(tape.latency())
            reward = tape.asked(f"{self.seed} {self.turns}", CHANCE.random)
            return f" w{int(reward * 9)} w1", reward, self.turns == 3

        async def get_reward(self):
            await asyncio.sleep(tape.latency() / 10)
            return tape.asked(f"{self.seed} reward", CHANCE.random)

    args = config(
        max_completion_length=24, stop_token_ids=list(range(16, 32)), advantage_level="both", **args
    )
    kwargs = {"environment_factory": Game, "train_dataset": prompts()} | kwargs
    if kwargs.get("curriculum"):  # two environments
        kwargs["environment_factory"] = {"game": Game, "other": type("Other", (Game,), {})}
    return PPOTrainer(llama(), args=args, processing_class=tokenizer(), **kwargs)


def curriculum_trainer(tape, args):
    """Two such environments, whose rows are drawn by what they were worth so far."""
    rows = prompts(6).add_column("environment", ["game", "other"] * 3)
    return plain_trainer(
        tape, args, train_dataset=rows, curriculum=lambda episodes, scores: 0.1 + scores.abs() ** 3
    )


def tool_trainer(tape, args):
    """A tool without a state, which a script calls, twice in the first turn; it must not be
    asked twice."""

    async def look(key: str) -> str:
        """
        Look.

        Args:
            key: A key.
        """
        await asyncio.sleep(tape.latency())
        reward = tape.asked(f"{trainer.state.global_step} {key}", CHANCE.random)
        return StepResult(f"seen {reward}", reward=reward)

    def length(completions, **kwargs):
        return [-float(len(str(messages))) / 100 for messages in completions]

    looks = {n: [call("look", key=f"{n} {k}") for k in range(3)] for n in range(8)}
    turns = {f"Q{n}Q": ["\n".join(looks[n][:2]), looks[n][2], "end"] for n in range(8)}
    rows = [{"prompt": [{"role": "user", "content": f"Q{n}Q"}]} for n in range(8)]
    trainer = PPOTrainer(
        llama(vocab_size=259, max_position_embeddings=4096),
        length,
        config(max_completion_length=600, **args),
        rows,
        processing_class=byte_tokenizer(),
        tools=[look],
    )
    write_turns(trainer, turns)
    return trainer


TRAINERS = {
    "plain": plain_trainer,
    "groups": plain_trainer,
    "curriculum": curriculum_trainer,
    "tools": tool_trainer,
}


def note_groups(folder, rank, trainer, answers):
    """Write down which episodes were sampled together, or let a run sample those of another."""
    sampled = GroupedSampler._sampled

    def noted(self, group):
        self.number = getattr(self, "number", -1) + 1
        rows = [waiting.row for waiting in group]
        with open(folder / f"groups-{rank}", "a") as file:
            print(json.dumps([trainer.state.global_step, self.number, rows]), file=file)
        taken = sampled(self, group)
        self.patience = turns.QUICK  # however slow the machine samples
        return taken

    GroupedSampler._sampled = noted
    if answers is None:
        return
    by_step = {}
    for line in (folder.parent / f"killed/groups-{rank}").read_text().splitlines():
        step, number, rows = json.loads(line)
        assert by_step.setdefault(step, {}).setdefault(number, rows) == rows

    class Replaying(Record):
        def __init__(self, path, *args):
            super().__init__(path, *args)
            if path is not None:
                groups = by_step[int(path.name.split("-")[0])]
                self.groups = [groups[number] for number in sorted(groups)]

    play.Record = Replaying


def train(folder, kind, processes, tape):
    """Train in this process, from the newest checkpoint if there is one; save weights, and write
    down transcripts."""
    AcceleratorState._reset_state(reset_partial_state=True)
    args = {
        "output_dir": folder,
        "max_steps": STEPS,
        "num_ppo_epochs": 1,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = TRAINERS[kind](tape, args | {"per_device_train_batch_size": 2, "save_total_limit": 2})
    rank = trainer.accelerator.process_index
    # episodes wait for all others, or for no longer than a moment
    turns.QUICK = 0.01 if kind == "groups" else 10.0
    if kind == "groups":
        note_groups(folder, rank, trainer, tape.answers)

    class Transcripts:
        def append(self, collected):
            _, samples = collected
            episodes = [
                [x.ids, x.sampled, x.rewards, x.messages, x.failed_calls]
                for x in samples.batch.episodes
            ]
            with open(folder / f"transcripts-{rank}", "a") as file:
                print(
                    json.dumps(
                        [trainer.state.global_step, episodes, samples.scored.totals.tolist()]
                    ),
                    file=file,
                )

    rollouts_of(trainer, Transcripts())
    trainer.train(resume_from_checkpoint=bool(checkpoints(folder)) or None)
    torch.save(weights(trainer), folder / f"end-{rank}.pt")
    trainer.end()


def run(folder, kind, processes, answers=None):
    """Start the processes of a run."""
    folder.mkdir(exist_ok=True)
    return start(partial(train, folder, kind, processes, Tape(folder / "tape", answers)), processes)


def outcome(folder, processes):
    """Weights at the end, and the transcripts of every rollout, which are the same if it was
    sampled twice."""
    ends = []
    rollouts = {}
    for rank in range(processes):
        ends.append(torch.load(folder / f"end-{rank}.pt"))
        for line in (folder / f"transcripts-{rank}").read_text().splitlines():
            step, *episodes = json.loads(line)
            assert rollouts.setdefault((rank, step), episodes) == episodes
    return ends, rollouts


def tape_of(folder):
    return [json.loads(line) for line in (folder / "tape").read_text().splitlines()]


def kill(folder, kind, processes, seed, times=1):
    """Kill a run within rollouts, resuming it each time; compare with a run that nothing
    happened to."""
    folder.mkdir()
    chance = random.Random(seed)
    settled = {}
    killed = folder / "killed"
    step = 2 * chance.randrange(1, STEPS // 2)
    moment = chance.uniform(0.0, 5 * SLOWEST)
    for number in range(times):
        if number:
            answers = len(tape_of(killed)) + chance.randrange(2, 14)
        else:
            answers = 0
        children = run(killed, kind, processes)
        bound = time.monotonic() + 60
        while (
            not (killed / f"checkpoint-{step}").exists() and time.monotonic() < bound and not number
        ):
            time.sleep(0.002)
        while (
            len(tape_of(killed)) < answers
            and not (killed / "end-0.pt").exists()
            and time.monotonic() < bound
        ):
            time.sleep(0.002)
        time.sleep(0 if number else moment)
        for child in children:
            os.kill(child, signal.SIGKILL)
        finished(children, 60)
        # what is on disk at this moment is settled
        recorded = "".join(path.read_text() for path in (killed / ANSWERS).iterdir())
        settled = {
            k: answer for k, answer in tape_of(killed) if json.dumps(answer).strip('"') in recorded
        } | settled
    assert finished(run(killed, kind, processes), 60) == [0] * processes
    if kind == "tools":
        last = dict(tape_of(killed))
        assert {key: last[key] for key in settled} == settled  # none was asked again
    assert not any((killed / ANSWERS).iterdir())
    if kind == "groups":  # episodes did not wait for all others
        groups = (killed / "groups-0").read_text().splitlines()
        assert len({len(json.loads(line)[-1]) for line in groups}) > 1

    whole = folder / "whole"
    assert (
        finished(run(whole, kind, processes, dict(tape_of(killed)) | settled), 60)
        == [0] * processes
    )
    (ends, transcripts), (others, expected) = outcome(killed, processes), outcome(whole, processes)
    assert transcripts == expected and len(transcripts) == processes * STEPS // 2
    for end, other in zip(ends, others):
        assert all(torch.equal(x, other[name]) for name, x in end.items())
    return len(settled)


@pytest.mark.parametrize("kind", ["curriculum", "groups", "tools"])
def test_kill_within_an_episode_does_not_change_the_result(tmp_path, kind):
    kill(tmp_path / "run", kind, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, processes, times",
    [("plain", 1, 8), ("plain", 2, 6), ("groups", 1, 6), ("groups", 2, 6), ("tools", 1, 6)],
)
def test_runs_killed_within_episodes_end_as_uninterrupted_ones(tmp_path, kind, processes, times):
    settled = [kill(tmp_path / f"{seed}", kind, processes, seed) for seed in range(1, times + 1)]
    assert sum(count > 0 for count in settled) >= times / 2  # most were killed within episodes


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_ten_kills_do_not_change_the_result_of_a_curriculum(tmp_path, processes):
    assert kill(tmp_path / "run", "curriculum", processes, 0, times=10) > 5


class AtOnce(Tape):
    """Answers to every question, in this process and without waiting."""

    latency = staticmethod(lambda: 0)

    def __init__(self):
        self.given = {}

    def asked(self, key, draw):
        answers = self.given.setdefault(key, [])
        answers.append(draw())
        return answers[-1]


def test_run_that_begins_anew_asks_again(tmp_path):
    """Also where the first one left no checkpoint."""
    tape = AtOnce()
    for _ in range(2):
        plain_trainer(tape, {"output_dir": tmp_path, "max_steps": 1}).train()
    assert {len(answers) for answers in tape.given.values()} == {2}


def test_environment_whose_failure_ended_the_run_is_asked_again(tmp_path):
    class Failing(AtOnce):
        def asked(self, key, draw):
            self.given.setdefault(key, [])
            if self.fails and len(self.given) == 50:  # in the second rollout
                raise OSError("connection lost")
            return super().asked(key, draw)

    tape = Failing()
    args = {"output_dir": tmp_path, "max_steps": 3, "num_ppo_epochs": 1}
    tape.fails = True
    with pytest.raises(RewardError, match="OSError: connection lost"):
        plain_trainer(tape, args).train()
    tape.fails = False
    trainer = plain_trainer(tape, args)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    assert all(tape.given.values())
