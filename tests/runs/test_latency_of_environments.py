"""Episodes do not wait for each other: a rollout takes the model's work and the longest chain of
answers."""

import asyncio
import time

import pytest
from tiny import config, llama, prompts, tokenizer

from trl_ppo_ext import PPOTrainer


class Slow:
    """Environment of several turns, each of which takes `seconds`."""

    def reset(self, row, seed):
        self.left = row["target"]
        return " w1"

    def next(self):
        self.left -= 1
        return " w2", 1.0, not self.left

    def step(self, text):
        time.sleep(self.seconds)
        return self.next()


class Awaited(Slow):
    async def step(self, text):
        await asyncio.sleep(self.seconds)
        return self.next()


@pytest.mark.parametrize("factory", [Slow, Awaited])
@pytest.mark.parametrize(
    ("episodes", "turns", "seconds"),
    [(16, 4, 0.05), pytest.param(64, 16, 0.2, marks=pytest.mark.slow)],
)
def test_rollout_takes_the_longest_chain_of_answers(tmp_path, factory, episodes, turns, seconds):
    rows = [row | {"target": 1 + n % turns} for n, row in enumerate(prompts(episodes).to_list())]
    run = PPOTrainer(
        llama(max_position_embeddings=512),
        args=config(
            tmp_path,
            max_completion_length=256,
            stop_token_ids=list(range(8, 32)),
            per_device_eval_batch_size=episodes,
        ),
        processing_class=tokenizer(),
        environment_factory=factory,
    )

    def sampling(seconds):
        factory.seconds = seconds
        start = time.perf_counter()
        metrics = run.evaluate(rows)
        assert metrics["eval_episodes/turns"] == pytest.approx(
            sum(row["target"] for row in rows) / episodes
        )
        return time.perf_counter() - start

    own_work = min(sampling(0) for _ in range(3))
    # other processes make a machine slower, never faster
    assert any(sampling(seconds) < 1.5 * (own_work + turns * seconds) for _ in range(5))
