"""Environments of other packages, trained on as they are; `make test-environments` installs the
packages.

Each adapter takes at most 15 lines. A turn is one token: the vocabulary has the actions of the
game, so that tiny models with random weights earn different rewards.
"""

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny import config, llama, tokenizer

from trl_ppo_ext import PPOTrainer

sys.path.append(str(Path(__file__).parents[2] / "recipes" / "textworld"))
pytestmark = pytest.mark.slow
NEEDED = {"reason": "needs the package, see `make test-environments`"}


def guessing_of_textarena(folder):
    textarena = pytest.importorskip("textarena", **NEEDED)

    class Guess:
        def reset(self, row, seed):
            self.game = textarena.make("GuessTheNumber-v0-raw")  # wrappers would repeat the history
            self.game.reset(num_players=1, seed=seed)
            return self.seen()

        def step(self, text):
            done, _ = self.game.step(text)
            return self.seen(), self.game.close()[0][0] if done else 0.0, done

        def seen(self):
            kinds = textarena.ObservationType
            return "\n".join(
                x for _, x, kind in self.game.get_observation()[1] if kind != kinds.PLAYER_ACTION
            )

    return Guess, [f"[{number}]" for number in range(1, 21)], [{"prompt": ""}], 10


def guessing_of_gem(folder):
    gem = pytest.importorskip("gem", **NEEDED)
    actions = [rf"\boxed{{{number}}}" for number in range(1, 11)]
    return lambda: gem.make("game:GuessTheNumber-v0-easy"), actions, [{"prompt": ""}], 4


def sums_of_reasoning_gym(folder):
    reasoning_gym = pytest.importorskip("reasoning_gym", **NEEDED)

    class ChainSum:
        data = reasoning_gym.create_dataset("chain_sum", seed=0, size=8, max_terms=2, max_digits=1)

        def reset(self, row, seed):
            self.entry = self.data[row["number"]]
            return self.entry["question"]

        def step(self, text):
            return "", self.data.score_answer(text, self.entry), True

    return (
        ChainSum,
        [str(number) for number in range(-9, 19)],
        [{"prompt": "", "number": n} for n in range(8)],
        1,
    )


def games_of_textworld(folder):
    pytest.importorskip("textworld", **NEEDED)
    from text_games import TextWorld, rows, walkthrough

    games = rows(range(2), ((1, 2, 2),), folder)
    commands = {x["content"] for row in games for x in walkthrough(row) if x["role"] == "assistant"}
    return TextWorld, sorted(commands), [row | {"prompt": ""} for row in games], 4


def doors_of_openenv(folder):
    openenv = pytest.importorskip("openenv.core", **NEEDED)
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Said(Action):
        text: str

    class Seen(Observation):
        text: str

    class Door(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.code = 1 + seed % 4
            self.tries = 0
            return Seen(text="locked")

        def step(self, action, timeout_s=None, **kwargs):
            opens = action.text == str(self.code)
            self.tries = self.tries + 1
            text, reward = ("open", 1.0) if opens else ("locked", -0.5)
            return Seen(text=text, reward=reward, done=opens or self.tries == 4)

    app = create_fastapi_app(Door, Said, Seen, max_concurrent_envs=64)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    class OpenEnv:
        def __init__(self):
            self.client = openenv.GenericEnvClient(base_url=url)

        async def reset(self, row, seed):
            return (await self.client.reset(seed=seed)).observation["text"]

        async def step(self, text):
            result = await self.client.step({"text": text})
            return result.observation["text"], result.reward or 0.0, result.done

    return OpenEnv, ["1", "2", "3", "4"], [{"prompt": ""}], 4


PACKAGES = [
    guessing_of_textarena,
    guessing_of_gem,
    sums_of_reasoning_gym,
    games_of_textworld,
    doors_of_openenv,
]


@pytest.mark.parametrize("package", PACKAGES)
def test_environment_of_a_package_is_trained_on(tmp_path, package):
    factory, actions, rows, turns = package(tmp_path / "games")
    text = tokenizer(actions)
    run = PPOTrainer(
        llama(len(text), max_position_embeddings=2048),
        args=config(
            tmp_path / "run",
            max_steps=4,  # two rollouts: environments are used again
            num_ppo_epochs=1,
            per_device_train_batch_size=8,
            max_completion_length=1024,
            stop_token_ids=list(range(4, len(text))),
        ),
        train_dataset=Dataset.from_list(rows * 16),
        processing_class=text,
        environment_factory=factory,
    )
    before = {
        name: x.detach().clone() for name, x in run.model.named_parameters() if "lora_B" in name
    }
    run.train()
    logged = run.state.log_history[0]
    assert logged["reward_std"] > 0 and logged["episodes/turns"] <= turns
    assert logged.get("episodes/failed", 0) == 0 and logged["episodes/overlong"] == 0
    assert any(
        not torch.equal(x, before[name])
        for name, x in run.model.named_parameters()
        if name in before
    )
