"""recipes/loop.py learns what `PPOTrainer` learns: the parts are parts."""

import ast
import math
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny import WORDS, config, llama, tokenizer
from transformers import TrainerCallback

from trl_ppo_ext import PPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import loop

PROMPTS = [" ".join(WORDS[(row + k) % len(WORDS)] for k in range(1 + row % 4)) for row in range(16)]
STEPS = 8  # of a rollout: four epochs of two minibatches


class SeedRollouts(TrainerCallback):
    """Begin each rollout with the noise of the loop's."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % STEPS == 0:
            torch.manual_seed(state.global_step // STEPS)


def recorded(scores, equal_first=False):
    """Reward that keeps its scores; with `equal_first` all are 0 in the first rollout, which has no
    unit, and small in the others."""

    def reward(texts):
        counts = [sum(word in WORDS[:8] for word in text.split()) / 4 for text in texts]
        if equal_first:
            counts = [0.01 * count if scores else 0.0 for count in counts]
        scores.append(counts)
        return scores[-1]

    return reward


@pytest.mark.parametrize("equal_first", [False, True])
def test_loop_gets_the_rewards_of_the_trainer(tmp_path, capsys, equal_first):
    by_loop = []
    by_trainer = []
    settings = {"learning_rate": 1e-3, "kl_coef": 0.05, "lam": 0.95}
    model = llama()
    torch.manual_seed(0)  # the adapter is drawn
    loop.ppo(model, tokenizer(), PROMPTS, recorded(by_loop, equal_first), length=8, **settings)

    reward = recorded(by_trainer, equal_first)
    sizes = {
        "per_device_train_batch_size": 8,
        "num_mini_batches": 2,
        "num_ppo_epochs": 4,
        "max_steps": 10 * STEPS,
    }
    default = {
        "critic": "side",
        "normalize_values": None,
        "cliprange": None,
        "vf_coef": 0.5,
        "target_kl": None,
        "generation_kwargs": {"cache_implementation": "dynamic"},  # `generate` as in the loop
    }
    args = config(
        tmp_path,
        **settings,
        **sizes,
        **default,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        seed=0,
    )
    PPOTrainer(
        llama(),
        lambda completions, **kwargs: reward(completions),
        args,
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer(),
        callbacks=[SeedRollouts()],
    ).train()
    assert by_loop == by_trainer and len(by_loop) == 10
    first, last = (sum(scores) for scores in (by_loop[0], by_loop[-1]))
    assert equal_first or last > 1.2 * first


@pytest.mark.parametrize(
    "kind", [int, bool, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float64)]
)
def test_rewards_of_any_type_count_as_their_floats(kind):
    """Two rollouts: a critic reads the rewards of the first one in the second."""

    def trained(change):
        model = llama()
        torch.manual_seed(0)
        loop.ppo(
            model, tokenizer(), PROMPTS[:4], lambda texts: change([len(x) % 2 for x in texts]), 2, 4
        )
        return [x.clone() for x in model.parameters() if x.requires_grad]

    def change(scores):
        if isinstance(kind, type):
            return [kind(x) for x in scores]
        return kind(scores)

    expected = trained(lambda scores: [float(x) for x in scores])
    assert expected and all(map(torch.equal, trained(change), expected))


@pytest.mark.parametrize(
    ("scores", "got"),
    [
        ([1.0, math.nan], r"got \[1.0, nan\]"),
        ([1.0, -math.inf], r"got \[1.0, -inf\]"),
        ([1e39, 1.0], r"got \[inf, 1.0\]"),
        (1.0, "got 1.0"),
        ([1.0], r"got \[1.0\]"),
        ([1.0] * 3, r"got \[1.0, 1.0, 1.0\]"),
        ([[1.0], [2.0]], r"got \[\[1.0\], \[2.0\]\]"),
    ],
)
def test_loop_trains_on_a_finite_reward_per_completion_only(scores, got):
    with pytest.raises(
        ValueError, match=rf"`reward` must return a finite number for each of 2 completions, {got}"
    ):
        loop.ppo(llama(), tokenizer(), PROMPTS[:2], lambda texts: scores, 2, 4)


@pytest.mark.parametrize(
    ("prompts", "got"),
    [
        (PROMPTS[:3], "got 3 of at least 1"),
        (PROMPTS[:1], "got 1 of at least 1"),
        ([], "got 0 of at least 0"),
        (["w1", ""], "got 2 of at least 0"),
    ],
    ids=str,
)
def test_loop_needs_an_even_number_of_texts(prompts, got):
    with pytest.raises(ValueError, match=rf"`prompts` must be an even number of texts, .*{got}"):
        loop.ppo(llama(), tokenizer(), prompts, lambda texts: [1.0] * len(texts), 1, 4)


def test_loop_needs_an_eos():
    without = tokenizer()
    without.eos_token = None
    with pytest.raises(ValueError, match=r"`tokenizer.eos_token` must be set, got None"):
        loop.ppo(llama(), without, PROMPTS[:2], lambda texts: [1.0] * len(texts), 1, 4)


def test_loop_is_short_and_not_packed():
    """By what a reader reads: nodes of its syntax tree, and how many of them a line of code has."""
    source = Path(loop.__file__).read_text()
    nodes = sum(1 for _ in ast.walk(ast.parse(source)))
    lines = [line for line in source.splitlines() if line.strip() and line.strip()[0] not in '#"']
    assert nodes <= 1030
    assert nodes / len(lines) <= 9
